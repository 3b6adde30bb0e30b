"""Runs the project's checks and says which failed: `make test`.

Steps of one process run side by side, and those that use all cores after them. `python tools/check.py
lint types` runs only the named ones.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import needs

ROOT = Path(__file__).resolve().parent.parent
PYTEST = ("-m", "pytest", "--quiet", "--durations=5", "--durations-min=5")
WIDE = ("--numprocesses=auto", "--dist=worksteal")

# name: arguments for Python, tool that the machine may lack
STEPS: dict[str, tuple[tuple[str, ...], str | None]] = {
    "lint": (("-m", "ruff", "check", "--output-format=concise", "."), None),
    "format": (("-m", "ruff", "format", "--check", "--output-format=concise", "."), None),
    "types": (("-m", "mypy"), None),
    "fragments": (("tools/fragments.py", "--check"), None),
    "docs": (("tools/catalog.py", "--once"), "node"),
    "snippets": ((*PYTEST, "docs", "README.md", "CONTRIBUTING.md"), None),
    "tests": ((*PYTEST, *WIDE, "tests"), None),
    "conformance": ((*PYTEST, *WIDE, "conformance"), None),
}


def run(name: str, aside: bool = False) -> tuple[str, str, str]:
    """Runs one step; returns ("passed" | "failed" | "skipped", why), and its output if it runs beside
    others."""
    arguments, tool = STEPS[name]
    reason = needs.lacking(tool) if tool else None
    if tool and reason:
        return ("failed" if needs.required(tool) else "skipped"), reason, ""
    if not all((ROOT / word).exists() for word in arguments if word in ("tests", "conformance")):
        return "skipped", f"there is no folder {name} yet", ""
    # Tests are many small operations: one thread each is fastest, and does not vary.
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    command = [sys.executable, *arguments]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE if aside else None,
        stderr=subprocess.STDOUT if aside else None,
        text=True,
    )
    if done.returncode == 5 and "pytest" in arguments:
        return "skipped", "there is nothing to run", done.stdout
    outcome = ("failed", f"exit status {done.returncode}") if done.returncode else ("passed", "")
    return *outcome, done.stdout


def main() -> int:
    names = sys.argv[1:] or list(STEPS)
    unknown = [name for name in names if name not in STEPS]
    if unknown:
        print(f"check: no step {', '.join(unknown)}; there are {', '.join(STEPS)}", file=sys.stderr)
        return 2
    results = {}

    def timed(name: str, aside: bool) -> str:
        start = time.monotonic()
        outcome, why, output = run(name, aside)
        results[name] = outcome, time.monotonic() - start, why
        return output

    narrow = [name for name in names if not set(WIDE) <= set(STEPS[name][0])]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        running = {name: pool.submit(timed, name, True) for name in narrow}
        for name, future in running.items():
            output = future.result()
            print(f"\n=== {name} ===\n{output}", end="", flush=True)
    for name in names:
        if name not in narrow:
            print(f"\n=== {name} ===", flush=True)
            timed(name, False)
    print("\n=== summary ===")
    for name in names:
        outcome, seconds, why = results[name]
        print(f"{name:12} {outcome:8} {seconds:6.1f} s  {why}".rstrip())
    outcomes = [outcome for outcome, _, _ in results.values()]
    print(
        f"{outcomes.count('passed')} passed, {outcomes.count('failed')} failed, "
        f"{outcomes.count('skipped')} skipped"
    )
    return int("failed" in outcomes)


if __name__ == "__main__":
    sys.exit(main())
