"""Runs of several sections on a GPU, and work in other processes.

A `Session` holds what a run has found; its sections are methods. `recorded` runs them and writes the
results after each, `verdict` says how the run ended. `pooled` runs functions in processes, `process` a
script that sees another library.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Any

import torch
from harness import START, Call, Clock, Row, attempt, brief, read_lines, record, save, say, target

# -- processes -------------------------------------------------------------------------------------


def pooled(
    tasks: Sequence[tuple[Callable[..., Any], Any]],
    workers: int,
    seconds: float,
    fresh: bool = False,
) -> Iterator[tuple[Any, Any]]:
    """Arguments and results, as they come, of functions that run in other processes (``fresh``: in one
    of its own each), until the seconds are over. The result is the exception of one that raised, and a
    TimeoutError for what did not end in time."""
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, context, max_tasks_per_child=1 if fresh else None)
    futures = {pool.submit(run, job): job for run, job in tasks}
    limit = None if seconds == math.inf else max(5, seconds)
    try:
        for future in as_completed(list(futures), timeout=limit):
            job = futures.pop(future)
            try:
                result = future.result()
            except Exception as error:
                result = error
            yield job, result
    except TimeoutError as error:
        yield from ((job, error) for job in futures.values())
    finally:
        children = list((pool._processes or {}).values())
        pool.shutdown(wait=not futures, cancel_futures=True)  # times are measured alone
        for child in children:  # one may hang
            if futures and child.is_alive():
                child.kill()


def process(
    script: str | Path, words: Sequence[str], path: str, quiet: bool = False, **environment: str
) -> subprocess.Popen[str]:
    """A script of this folder, with the library that ``path`` holds."""
    path = os.pathsep.join(filter(None, (path, os.environ.get("PYTHONPATH"))))
    return subprocess.Popen(
        [sys.executable, str(script), *words],
        stdout=subprocess.DEVNULL if quiet else subprocess.PIPE,
        stderr=subprocess.DEVNULL if quiet else None,
        text=True,
        env=os.environ | {"PYTHONPATH": path} | environment,
        cwd="/",
    )


# -- runs ----------------------------------------------------------------------------------------


class Session:
    """A run: what its sections share, and the results so far. A section is a method."""

    topic = ""
    script = ""
    least = 8.0  # seconds below which no section starts

    def __init__(self, args: argparse.Namespace):
        self.smoke, self.budget = args.smoke, args.budget
        self.workers = getattr(args, "workers", 1)
        self.peer = str(Path(args.peer).resolve()) if args.peer else None
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.clock = Clock(self.device)
        self.found: Row = {"failures": {}, "skipped": []}
        self.bandwidth = 0.0

    def left(self) -> float:
        """Seconds; a run that only tests the script has as many as it needs."""
        return math.inf if self.smoke else self.budget - (time.perf_counter() - START)

    def lacks(self, what: str) -> None:
        self.found["skipped"].append(what)

    def rows(self, section: str, each: Iterable[Any], run: Callable[..., Row]) -> None:
        """Fill a section, row by row, while there is time; a row that raises says so."""
        rows = self.found.setdefault(section, [])
        for case in each:
            if self.left() < self.least:
                self.lacks(f"{section} {case}")
                continue
            row = attempt({}, partial(run, *case))
            if "exception" in row:
                row["case"] = str(case)
                say(f"{section} {case}: {brief(row)}")
            rows.append(row)
            self.clock.free()
        torch.set_float32_matmul_precision("highest")

    def copy(self) -> None:
        """The best of three ways to copy 1 GiB: bytes read and written a second."""
        found = self.found["copy"] = copy_bandwidth(self.clock)
        self.bandwidth = found["bandwidth"]
        say(f"copy bandwidth, TB/s: { {k: f'{v / 1e12:.2f}' for k, v in found['ways'].items()} }")

    def milliseconds(self, numbers: float) -> float:
        """What copying so many bytes takes."""
        return 1e3 * numbers / self.bandwidth if self.bandwidth else math.nan

    # Processes that see another library.

    def start(self, job: Row, path: str, quiet: bool = False, **environment: str) -> Any:
        words = ["--as-peer", json.dumps({"device": self.device, "peer": self.peer} | job)]
        return process(Path(__file__).with_name(self.script), words, path, quiet, **environment)

    def rows_of(self, started: subprocess.Popen[str], what: str, limit: float) -> Iterator[Row]:
        """Rows that a process wrote until it ended or ran out of time."""
        try:
            least = max(10, min(limit, self.left()))
            out, _ = started.communicate(timeout=None if self.smoke else least)
        except subprocess.TimeoutExpired:
            started.kill()
            out, _ = started.communicate()
            self.lacks(f"some of {what} (no time)")
        yield from read_lines(out, "ROW ", cut=True)
        if started.returncode:
            say(f"{what}: exit status {started.returncode}")


def source() -> str:
    """The folder of the library that is measured."""
    import pararnn

    return str(Path(pararnn.__file__).resolve().parent.parent)


def copy_bandwidth(clock: Clock) -> Row:
    numbers = 2**28 if clock.cuda else 2**16
    x = torch.randn(numbers, device=clock.device)
    y = torch.empty_like(x)
    ways: dict[str, Call] = {
        "torch.mul": lambda: torch.mul(x, 1, out=y),
        "copy_": lambda: y.copy_(x),
    }
    if clock.cuda:
        from gpu_copy import copy

        ways["Triton"] = lambda: copy[(numbers // 4096,)](x, y, BLOCK=4096, num_warps=8)
    found = {}
    for name, run in ways.items():
        for _ in range(50 if clock.cuda else 1):
            run()
        times = clock.events(run, 15) if clock.cuda else [1.0]
        found[name] = 2 * x.nbytes / (1e-3 * statistics.median(times))
    best = max(found, key=lambda name: found[name])
    return {"bandwidth": found[best], "best": best, "ways": found}


def recorded(session: Session, args: argparse.Namespace, sections: Sequence[str]) -> Path:
    """Run the sections that were asked for, while there is time, and write the results after each of
    them; returns the file."""
    cuda, script = session.clock.cuda, f"PYTHONPATH=. python benchmarks/{session.script}"
    session.found = found = {
        **record(script, session.device, args.revision, unit="ms", seconds=0.0),
        **session.found,
    }
    file = target(args.out, found, session.device, session.topic, args.smoke)
    say(f"{found['device']}, torch {found['torch']}, triton {found['triton']}, {source()}")
    for name in args.only or sections:
        if session.left() < session.least and not args.only:
            session.lacks(name)
            say(f"{name}: left out, no time")
            continue
        say(f"== {name}")
        gc.collect()
        gc.freeze()  # every capture of a graph collects garbage
        try:
            getattr(session, name)()
        except Exception:
            found["failures"][name] = traceback.format_exc()
            say(f"{name} failed:\n{found['failures'][name]}")
        if cuda:
            try:
                torch.cuda.empty_cache()
            except Exception:  # the device is lost; other processes may still have theirs
                say(traceback.format_exc())
        found["seconds"] = round(time.perf_counter() - START, 1)
        save(file, found)
    return file


def verdict(found: Row, file: Path) -> int:
    """Say how a run ended; the exit status is 1 if a check, a section or a row of this library failed."""
    judged = [*found.get("checks", ()), *([found["giant"]] if "giant" in found else [])]
    bad = [r for r in judged if not r.get("ok")]
    rows = [r for part in found.values() if isinstance(part, list) for r in part]
    raised = [r for r in rows if isinstance(r, dict) and "exception" in r and ours(r)]
    say(f"wrote {file}; {len(bad)} checks failed, sections failed: {list(found['failures'])}, "
        f"{len(raised)} rows raised, left out: {found['skipped']}")  # fmt: skip
    return int(bool(bad or raised or found["failures"]))


def ours(row: Row) -> bool:
    return "peer" not in row and row.get("library", "pararnn") == "pararnn"
