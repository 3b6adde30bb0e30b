"""Runs the property tests with new random cases for some time: `make fuzz MINUTES=60`.

Every case that fails is printed as a script that runs it again. Add it to the property as an
`@example` when the fault is mended. `PARARNN_DEVICE=cuda` runs the cases on a GPU.

    python tools/fuzz.py --minutes 5 test_cells::test_gradients
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HOME = ROOT / "tests" / "property"
SCRIPT = """\
# {error}
# The whole run again: HYPOTHESIS_PROFILE=fuzz PARARNN_EXAMPLES={examples} \\
#     python -m pytest tests/property/{module}.py -k {test} --hypothesis-seed={seed}
PYTHONPATH=. python - <<'END'
import sys
sys.path[:0] = ["tests/property"]
from math import inf, nan
from pararnn.testing.cases import Case
from {module} import {test}
{test}.hypothesis.inner_test{call}
END
"""


def properties(chosen: list[str]) -> list[str]:
    """Names ``file::test`` of all property tests, or of those that contain one of the words."""
    found = [
        f"{path.stem}::{name}"
        for path in sorted(HOME.glob("test_*.py"))
        for name in re.findall(r"^@given(?:.|\n)*?^def (test_\w+)", path.read_text(), re.MULTILINE)
    ]
    return [name for name in found if not chosen or any(word in name for word in chosen)]


def falsified(output: str, test: str) -> list[str]:
    """The calls that failed, as Python."""
    lines = [re.sub(r"^\s*(E |\|)?\s*", "", line) for line in output.splitlines()]
    calls, text = [], "\n".join(re.sub(r"  # or any other.*", "", line) for line in lines)
    for match in re.finditer(rf"Falsifying (?:explicit )?example: {test}(\((?:.|\n)*?^\s*\))", text,
                             re.MULTILINE):  # fmt: skip
        calls.append(match.group(1))
    return calls


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--examples", type=int, default=300, help="per cent of the usual number")
    parser.add_argument("properties", nargs="*", help="words in their names (default: all)")
    options = parser.parse_args()
    names, seen, runs = properties(options.properties), set(), 0
    if not names:
        parser.error(f"no property is called {' or '.join(options.properties)}")
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "HYPOTHESIS_PROFILE": "fuzz"}
    environment["PARARNN_EXAMPLES"] = str(options.examples)
    end = time.monotonic() + 60 * options.minutes
    while time.monotonic() < end:
        name = names[runs % len(names)]
        file, test = name.split("::")
        seed = str(int.from_bytes(os.urandom(4), "big"))
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider",
                   f"--hypothesis-seed={seed}", f"{HOME / file}.py::{test}"]  # fmt: skip
        left = max(end - time.monotonic(), 1)
        runs += 1
        try:
            done = subprocess.run(command, cwd=ROOT, env=environment, text=True, timeout=left,
                                  capture_output=True)  # fmt: skip
        except subprocess.TimeoutExpired:
            break
        print(f"{name}, seed {seed}: {'failed' if done.returncode else 'passed'}", flush=True)
        if done.returncode == 0:
            continue
        error = re.search(r"(?:Error|error|Exception): .*", done.stdout)
        calls = falsified(done.stdout, test)
        for call in calls:
            if (test, call) not in seen:
                seen.add((test, call))
                what = error.group(0) if error else "see the output"
                script = SCRIPT.format(error=what, module=file, test=test, call=call, seed=seed,
                                       examples=options.examples)  # fmt: skip
                print(script, flush=True)
        if not calls:
            print(done.stdout[-3000:], flush=True)
    print(f"{runs} runs of {len(names)} properties; {len(seen)} cases failed")
    return int(bool(seen))


if __name__ == "__main__":
    sys.exit(main())
