"""Compares two versions of the library: every row of the channelwise and the linear benchmark.

    python benchmarks/compare.py OLD NEW [--only main --only scan] [--budget 460] [--limit 1.03]

OLD and NEW are folders that hold a `pararnn`; both are measured with the scripts of this folder. First
the kernels of both are compiled, in several processes. Then sections run in processes of their own, for
one version after the other; the next round takes them the other way round. Sections with a row
above the limit are measured again, for both versions, while there is time: of every row the fastest
median of each version counts, so that what only one run was slowed by does not count. Rows above the
limit are printed, worst first. The exit status is 1 if there are any, or if a row of OLD has no
counterpart in NEW, a section failed or was left out.

`--out` keeps the rows as lines of JSON: section, row, part, old, new (milliseconds, or MiB of a
peak), ratio. It fits into eight minutes of one H200; `--cache DIR` keeps the kernels for another run.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from harness import RESULTS, START, Row, add_line, parser, say
from report import lines, load
from sessions import process

BATCHES = (
    ("gpu_channelwise.py", ("main", "others", "layer", "memory", "overhead"), 40),
    ("gpu_channelwise.py", ("newton",), 20),
    ("gpu_channelwise.py", ("sweep",), 50),
    ("gpu_linear.py", ("scan", "delta"), 25),
    ("gpu_linear.py", ("layers", "groups"), 35),
)
"""Script, sections that one process measures, and about how many seconds it takes on an H200."""
SECTIONS = tuple(section for _, sections, _ in BATCHES for section in sections)
LABELS = (
    "library", "cell", "mixer", "coefficients", "precision", "dtype", "shape", "samples", "norm", "bias",
)  # fmt: skip
Times = dict[tuple[str, str, str], float]
"""Milliseconds, or MiB of a peak, by section, row and part."""


def medians(section: str, found: Row) -> Times:
    """The times of a section's results."""
    rows = found.get(section, [])
    if isinstance(rows, dict):
        return {(section, "", part): value / 1e3 for part, value in rows.items()}
    times: Times = {}
    for row in rows:
        name = " ".join(_shown(row[key]) for key in LABELS if key in row)
        parts = {part: row[part] for part in row if isinstance(row[part], dict)}
        for chunks, both in parts.pop("times", {}).items():
            parts |= {f"{part}, chunks {chunks}": timed for part, timed in both.items()}
        for part, timed in parts.items():
            if "median" in timed:
                times[section, name, part] = timed["median"]
        if "peak" in row:
            times[section, name, "peak, MiB"] = row["peak"] / 2**20
    return times


def _shown(value: object) -> str:
    return "×".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def fastest(all_times: Iterable[Times]) -> Times:
    """The least of every row."""
    found: Times = {}
    for times in all_times:
        for key, value in times.items():
            found[key] = min(value, found.get(key, value))
    return found


def compared(old: Times, new: Times) -> Iterator[Row]:
    """Rows of both, the worst first; the ratio of a time that is not a number above 0 is infinite."""
    rows = []
    for key in old.keys() & new.keys():
        right = old[key] > 0 and new[key] > 0
        ratio = new[key] / old[key] if right else float("inf")
        section, row, part = key
        rows.append({"section": section, "row": row, "part": part, "old": old[key], "new": new[key],
                     "ratio": ratio})  # fmt: skip
    yield from sorted(rows, key=lambda r: (-r["ratio"], r["section"], r["row"], r["part"]))


class Comparison:
    """Runs sections of two versions and keeps their times. ``scratch`` is for results and kernels."""

    def __init__(self, folders: Sequence[Path], scratch: Path, smoke: bool, limit: float):
        self.folders = [str(f.resolve()) for f in folders]
        self.scratch, self.limit, self.flags = scratch, limit, ["--smoke"] * smoke
        self.times: dict[str, list[list[Times]]] = {}
        self.failed: set[str] = set()

    def start(
        self, which: int, script: str, sections: Sequence[str], *words: str
    ) -> tuple[subprocess.Popen[str], Path]:
        """A process that measures; each version has a cache of kernels of its own."""
        out = Path(tempfile.mkdtemp(prefix=f"results-{which}-", dir=self.scratch))
        only = [word for name in sections for word in ("--only", name)]
        path, cache = Path(__file__).with_name(script), str(self.scratch / f"triton-{which}")
        words = (*only, "--out", str(out), *self.flags, *words)
        return process(path, words, self.folders[which], TRITON_CACHE_DIR=cache), out

    def warm(self, workers: int) -> None:
        """Compile all kernels of both versions."""
        for script in dict.fromkeys(script for script, _, _ in BATCHES):
            both = [self.start(w, script, ["warm"], "--workers", str(workers))[0] for w in (0, 1)]
            for which, started in enumerate(both):
                out, _ = started.communicate()
                if started.returncode:
                    say(f"{script} of {self.folders[which]} did not compile:\n{out[-2000:]}")

    def run(self, script: str, sections: Sequence[str], order: Sequence[int]) -> None:
        """One round of some sections: both versions, one after the other."""
        for which in order:
            started, out = self.start(which, script, sections)
            text, _ = started.communicate()
            found: Row = {}
            for file in out.glob("*.json"):
                found = load(file)
            for section in sections:
                times = medians(section, found)
                self.times.setdefault(section, [[], []])[which].append(times)
                if started.returncode or not (times or self.flags):
                    self.failed.add(f"{section} of {self.folders[which]}")
            if started.returncode:
                say(f"{script} of {self.folders[which]}: exit status {started.returncode}:\n"
                    f"{text[-3000:]}")  # fmt: skip
            elif f", {self.folders[which]}\n" not in text:  # it says what it measures
                self.failed.add(f"{script} of {self.folders[which]}: measured another folder")
        slow = {section: len(self.slower(section)) for section in sections}
        say(f"rows above {self.limit:g}: {slow}")

    def best(self, which: int, section: str) -> Times:
        return fastest(self.times.get(section, [[], []])[which])

    def rows(self, section: str) -> list[Row]:
        return list(compared(self.best(0, section), self.best(1, section)))

    def slower(self, section: str) -> list[Row]:
        return [r for r in self.rows(section) if r["ratio"] > self.limit]

    def missing(self) -> list[str]:
        """Rows of the old version that the new one has not."""
        return [
            " ".join(key)
            for section in self.times
            for key in sorted(self.best(0, section).keys() - self.best(1, section).keys())
        ]


def table(rows: Iterable[Row]) -> str:
    head = ["Section", "row", "part", "old", "new", "new / old"]
    shown = (
        [
            r["section"],
            r["row"],
            r["part"],
            f"{r['old']:.4f}",
            f"{r['new']:.4f}",
            f"{r['ratio']:.3f}",
        ]
        for r in rows
    )
    return "\n".join(lines(head, shown, 3))


def main(arguments: list[str] | None = None) -> int:
    made = parser(__doc__, SECTIONS, 460, out=RESULTS.parent / "comparison.jsonl")
    made.add_argument("old", type=Path)
    made.add_argument("new", type=Path)
    made.add_argument("--limit", type=float, default=1.03, help="ratio of times, new to old")
    made.add_argument("--cache", type=Path, help="folder that keeps compiled kernels")
    made.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    made.add_argument("--cold", action="store_true", help="do not compile beforehand")
    made.add_argument("--all", action="store_true", help="print all rows")
    args = made.parse_args(arguments)
    for folder in (args.old, args.new):
        if not (folder / "pararnn" / "__init__.py").is_file():
            made.error(f"got {folder}, expected a folder that holds pararnn/; give a checkout.")
    with tempfile.TemporaryDirectory(prefix="compare-") as folder:
        scratch = args.cache or Path(folder)
        scratch.mkdir(parents=True, exist_ok=True)
        runs = Comparison((args.old, args.new), scratch, args.smoke, args.limit)
        if not args.cold:
            runs.warm(args.workers)
            say("compiled")
        left_out = measure(
            runs, set(args.only or SECTIONS), math.inf if args.smoke else args.budget
        )
    rows = [row for section in runs.times for row in runs.rows(section)]
    slow = [row for row in rows if row["ratio"] > args.limit]
    args.out.unlink(missing_ok=True)
    for row in rows:
        add_line(args.out, row)
    print(table(rows if args.all else slow))
    missing = runs.missing()
    say(f"{len(slow)} of {len(rows)} rows above {args.limit:g}; missing: {missing}; failed: "
        f"{sorted(runs.failed)}; left out: {left_out}; all rows in {args.out}")  # fmt: skip
    return int(bool(slow or missing or runs.failed or left_out or not rows))


def measure(runs: Comparison, wanted: set[str], budget: float, rounds: int = 4) -> list[str]:
    """A round of all sections, then of those with slow rows, as far as the seconds reach; what was not
    measured at all."""
    left_out: list[str] = []
    took: dict[str, float] = {}
    for number in range(1 if budget == math.inf else rounds):
        for script, sections, guess in BATCHES:
            chosen = [s for s in sections if s in wanted and (number == 0 or runs.slower(s))]
            expected = took.get(sections[0], 2.0 * guess)
            if not chosen:
                continue
            if time.perf_counter() - START + expected > budget:
                left_out += chosen if number == 0 else []
                continue
            begin = time.perf_counter()
            runs.run(script, chosen, (1, 0) if number % 2 else (0, 1))
            took[sections[0]] = time.perf_counter() - begin
    return left_out


if __name__ == "__main__":
    sys.exit(main())
