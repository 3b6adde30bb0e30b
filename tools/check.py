"""Runs the project's checks one after the other and says which failed: `make test`.

`python tools/check.py lint types` runs only the named ones.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import needs

ROOT = Path(__file__).resolve().parent.parent
PYTEST = ("-m", "pytest", "--quiet", "--durations=5", "--durations-min=5")

# name: arguments for Python, tool that the machine may lack
STEPS: dict[str, tuple[tuple[str, ...], str | None]] = {
    "lint": (("-m", "ruff", "check", "--output-format=concise", "."), None),
    "format": (("-m", "ruff", "format", "--check", "--output-format=concise", "."), None),
    "types": (("-m", "mypy"), None),
    "fragments": (("tools/fragments.py", "--check"), None),
    "docs": (("tools/catalog.py", "--once"), "node"),
    "snippets": ((*PYTEST, "docs", "README.md", "CONTRIBUTING.md"), None),
    "tests": ((*PYTEST, "--numprocesses=auto", "--dist=worksteal", "tests"), None),
    "conformance": ((*PYTEST, "conformance"), None),
}


def run(name: str) -> tuple[str, str]:
    """Runs one step; returns ("passed" | "failed" | "skipped", why)."""
    arguments, tool = STEPS[name]
    reason = needs.lacking(tool) if tool else None
    if tool and reason:
        return ("failed" if needs.required(tool) else "skipped"), reason
    if not all((ROOT / word).exists() for word in arguments if word in ("tests", "conformance")):
        return "skipped", f"there is no folder {name} yet"
    # Tests are many small operations: one thread each is fastest, and does not vary.
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    command = [sys.executable, *arguments]
    status = subprocess.run(command, cwd=ROOT, env=environment).returncode
    if status == 5 and "pytest" in arguments:
        return "skipped", "there is nothing to run"
    return ("failed", f"exit status {status}") if status else ("passed", "")


def main() -> int:
    names = sys.argv[1:] or list(STEPS)
    unknown = [name for name in names if name not in STEPS]
    if unknown:
        print(f"check: no step {', '.join(unknown)}; there are {', '.join(STEPS)}", file=sys.stderr)
        return 2
    results = []
    for name in names:
        print(f"\n=== {name} ===", flush=True)
        start = time.monotonic()
        outcome, why = run(name)
        results.append((name, outcome, time.monotonic() - start, why))
    print("\n=== summary ===")
    for name, outcome, seconds, why in results:
        print(f"{name:12} {outcome:8} {seconds:6.1f} s  {why}".rstrip())
    outcomes = [outcome for _, outcome, _, _ in results]
    print(
        f"{outcomes.count('passed')} passed, {outcomes.count('failed')} failed, "
        f"{outcomes.count('skipped')} skipped"
    )
    return int("failed" in outcomes)


if __name__ == "__main__":
    sys.exit(main())
