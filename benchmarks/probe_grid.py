"""Runs the rows of `probe_grid.toml`: tasks × models × seeds, many at a time on one device.

    python benchmarks/probe_grid.py --device cuda --workers 8 --minutes 9 --out FILE.jsonl

A job is some rows with all of their seeds. On a GPU the training step of every seed is captured as
a CUDA graph and replayed on a stream of its own, so that the small kernels of many models overlap;
jobs run beside each other in worker processes. On a CPU a job is one row, which trains its seeds one
after the other, and gives the numbers of :func:`pararnn.tasks.probe` (a test compares them).

Every finished seed is one line of JSON in the file. What is in the file is not run again, so a run
that was stopped goes on where it was. No job starts that would not end before `--minutes`; what runs
then is measured at its next check, and counts as not finished. `--smoke` trains every row for a few
steps, captured and not, and says how far the losses differ and how long a step takes.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from harness import add_line, parser, read_lines, record
from probe_runs import GRID, Row, draw, grid, smoke, train, wanted

PATIENCE = 10.0  # seconds between two lines of progress
SHARED = ("device", "torch", "triton", "python", "revision", "date")
SLOW = 1.5  # milliseconds a step, from which a row is not trained together with others

# --------------------------------------------------------------------------------------
# Workers
# --------------------------------------------------------------------------------------


@dataclass
class Job:
    """Rows that one worker trains together."""

    rows: list[Row]
    capture: bool = True

    @property
    def seconds(self) -> float:
        return sum(row.seconds() for row in self.rows)

    @property
    def seeds(self) -> int:
        return sum(len(row.seeds) for row in self.rows)

    def __str__(self) -> str:
        return " ".join(row.id for row in self.rows)


def bundled(rows: Sequence[Row], most: int) -> list[Job]:
    """Jobs of up to ``most`` seeds, of rows with one priority and about one time a step. Slow rows are
    alone: their evaluations keep the processor busy, one after the other."""
    jobs: list[Job] = []
    for row in sorted(rows, key=lambda r: (r.priority, -r.cost * r.protocol().steps, -r.cost)):
        last = jobs[-1] if jobs else None
        if (
            last is not None
            and last.rows[0].cost < SLOW
            and last.seeds + len(row.seeds) <= most
            and last.rows[0].priority == row.priority
            and last.rows[0].cost <= 3 * row.cost
            and last.rows[0].protocol().steps <= 2 * row.protocol().steps
        ):
            last.rows.append(row)
        else:
            jobs.append(Job([row]))
    return sorted(jobs, key=lambda job: (job.rows[0].priority, -job.seconds))


def work(pipe: Connection, device_name: str, scratch: Path | None) -> None:
    """A worker: jobs come in, results go out."""
    torch.set_num_threads(1)
    device = torch.device(device_name)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    while True:
        job, only_smoke, until = pipe.recv()
        try:
            if only_smoke:
                pipe.send(("smoke", smoke(job.rows[0], device, scratch)))
            else:
                train(
                    job.rows,
                    device,
                    scratch,
                    job.capture,
                    lambda found: pipe.send(("result", found)),
                    lambda part: pipe.send(("part", part)),
                    until=until,
                )
            pipe.send(("done", None))
        except Exception:
            pipe.send(("failed", traceback.format_exc()))
            if device.type == "cuda":
                return  # the device's state may be lost; a new worker takes over
        if device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()


class Worker:
    """The parent's end of a worker process."""

    def __init__(self, device: str, scratch: Path | None):
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=work, args=(theirs, device, scratch), daemon=True)
        self.process.start()
        theirs.close()
        self.job: Job | None = None
        self.part, self.since = 0.0, 0.0

    def give(self, job: Job, only_smoke: bool, until: float) -> None:
        self.job, self.part, self.since = job, 0.0, time.perf_counter()
        self.pipe.send((job, only_smoke, until))

    def stop(self) -> None:
        self.process.terminate()
        self.process.join(5)


class Grid:
    """Hands out jobs and writes what comes back."""

    def __init__(self, args: argparse.Namespace, rows: list[Row], scratch: Path | None):
        self.args, self.scratch = args, scratch
        self.began = time.perf_counter()
        self.until = time.time() + 60 * args.minutes
        alone = args.smoke or torch.device(args.device).type == "cpu"
        self.jobs = [Job([r]) for r in rows] if alone else bundled(rows, args.together)
        for job in self.jobs:
            job.capture = not args.eager
        self.total = sum(job.seconds for job in self.jobs)
        self.ended, self.failed = 0.0, 0
        self.written: set[tuple[str, int]] = set()
        self.slower: list[float] = []
        self.same = environment(args)

    @property
    def elapsed(self) -> float:
        return time.perf_counter() - self.began

    def expected(self, job: Job) -> float:
        """Seconds of a job beside the others: its guess times what finished ones took of theirs."""
        ratio = sorted(self.slower)[len(self.slower) // 2] if self.slower else 1.0
        return job.seconds * ratio

    def next_job(self) -> Job | None:
        """The first that would end in time."""
        for job in self.jobs:
            takes = 0.0 if self.args.smoke else self.expected(job)
            if self.elapsed + takes < 60 * self.args.minutes:
                self.jobs.remove(job)
                return job
        return None

    def write(self, found: dict[str, Any]) -> None:
        if "seed" in found:
            self.written.add((found["id"], found["seed"]))
        add_line(self.args.out, found | self.same)

    def say(self, text: str) -> None:
        print(f"[{self.elapsed:5.0f} s] {text}", flush=True)

    def handle(self, worker: Worker, kind: str, found: Any) -> bool:
        """Whether the worker is free again."""
        job = worker.job
        assert job is not None
        if kind == "part":
            worker.part = found
        elif kind in ("result", "smoke"):
            self.write(found)
            if kind == "smoke":
                self.say(json.dumps(found))
        elif kind == "done":
            took = time.perf_counter() - worker.since
            if worker.part == 1.0:  # not stopped early
                self.slower.append(took / job.seconds)
            self.ended += job.seconds
            self.say(f"{took:.0f} s for {job.seeds} seeds of {job}")
            return True
        else:
            self.failed += 1
            self.say(f"FAILED: {job}: {found.strip().splitlines()[-1]}")
            with self.args.out.with_suffix(".errors").open("a", encoding="utf-8") as file:
                file.write(f"{job}, captured={job.capture}\n{found}\n")
            self.jobs[:0] = self.again(job)
            return True
        return False

    def again(self, job: Job) -> list[Job]:
        """What is left of a job that failed: its rows one by one, and then without capture."""
        rows = []
        for row in job.rows:
            seeds = tuple(s for s in row.seeds if (row.id, s) not in self.written)
            rows += [replace(row, seeds=seeds)] if seeds else []
        if self.args.smoke or self.args.device == "cpu":
            return []
        if len(job.rows) > 1:
            return [Job([row], job.capture) for row in rows]
        return [Job([row], False) for row in rows] if job.capture else []

    def run(self) -> None:
        workers = [Worker(self.args.device, self.scratch) for _ in range(self.args.workers)]
        said = time.perf_counter()
        while self.elapsed < 60 * self.args.minutes + self.args.grace:
            for i, worker in enumerate(workers):
                if worker.job is None and (job := self.next_job()) is not None:
                    if not worker.process.is_alive():
                        workers[i] = worker = Worker(self.args.device, self.scratch)
                    worker.give(job, self.args.smoke, self.until)
            busy = {w.pipe: w for w in workers if w.job is not None}
            if not busy:
                break
            for pipe in wait(list(busy), timeout=1.0):
                worker = busy[pipe]  # type: ignore[index]
                try:
                    kind, found = worker.pipe.recv()
                except EOFError:
                    kind, found = "failed", "the worker died"
                if self.handle(worker, kind, found):
                    worker.job = None
                    if kind == "failed":
                        worker.stop()
            if time.perf_counter() - said > PATIENCE:
                said = time.perf_counter()
                self.progress(workers)
        for worker in workers:
            if worker.job is not None:
                self.say(f"stopped after {worker.part:.0%} of the steps: {worker.job}")
            worker.stop()
        left = ", ".join(map(str, self.jobs))
        self.say(f"{len(self.written)} seeds in {self.args.out}, {self.failed} failures; not run: "
                 f"{left or 'none'}")  # fmt: skip

    def progress(self, workers: list[Worker]) -> None:
        now = sum(w.job.seconds * w.part for w in workers if w.job is not None)
        done = self.ended + now
        left = f"{(self.total - done) * self.elapsed / done:.0f} s" if done > 0 else "unknown"
        running = ", ".join(
            f"{w.job.rows[0].id}… {w.part:.0%}" for w in workers if w.job is not None
        )
        self.say(f"{len(self.written)} seeds, {done / self.total:.0%}, left {left}; {running}")


def finished(path: Path) -> set[tuple[str, int]]:
    """Rows and seeds that a file has. A line that was cut off counts as missing, and is removed."""
    if not path.exists():
        return set()
    entries = list(read_lines(path.read_text(encoding="utf-8"), cut=True))
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8")
    return {(e["id"], e["seed"]) for e in entries if "seed" in e and "cut" not in e}


def planned(args: argparse.Namespace) -> list[Row]:
    """What is left to do: by priority, and within one the longest first."""
    have = set() if args.smoke else finished(args.out)
    rows = []
    for row in grid(args.grid):
        if args.only and not any(word in row.id for word in args.only):
            continue
        if not args.first <= row.priority <= args.last:
            continue
        if args.steps is not None:
            row = replace(row, steps=min(args.steps, row.protocol().steps))
        seeds = tuple(s for s in row.seeds if (row.id, s) not in have)
        if seeds:
            rows.append(replace(row, seeds=seeds))
    if args.smoke:
        once = {(r.model, r.layers): r for r in sorted(rows, key=lambda r: -r.priority)}
        rows = [replace(r, steps=50, select="best") for r in once.values()]
        return sorted(rows, key=lambda r: -r.cost)
    return sorted(rows, key=lambda r: (r.priority, -r.seconds()))


def environment(args: argparse.Namespace) -> dict[str, Any]:
    """What every line says of where it was measured."""
    found = record("", args.device, args.revision)
    return {key: found[key] for key in SHARED} | {"workers": args.workers}


def options(arguments: list[str] | None = None) -> argparse.Namespace:
    made = parser(__doc__, out=None)
    made.add_argument("--grid", type=Path, default=GRID)
    made.add_argument("--device", default="cpu")
    made.add_argument("--workers", type=int, default=1, help="jobs at a time")
    made.add_argument("--together", type=int, default=16, help="seeds of a job on a GPU")
    made.add_argument("--drawers", type=int, default=6, help="processes that draw batches")
    made.add_argument("--minutes", type=float, default=1e6, help="no job starts that ends later")
    made.add_argument("--grace", type=float, default=45, help="seconds later all is stopped")
    made.add_argument("--only", action="append", help="rows whose id contains this; repeatable")
    made.add_argument("--first", type=int, default=1, help="lowest priority number that runs")
    made.add_argument("--last", type=int, default=99, help="highest")
    made.add_argument("--steps", type=int, help="at most so many, to test the script")
    made.add_argument("--eager", action="store_true", help="no CUDA graphs")
    made.add_argument("--list", action="store_true", help="only show what would run")
    return made.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    args = options(arguments)
    rows = planned(args)
    if args.list:
        for row in rows:
            print(f"{row.priority} {row.seconds():6.0f} s  {row.id}: {len(row.seeds)} seeds of "
                  f"{row.protocol().steps} steps")  # fmt: skip
        print(f"{len(rows)} rows, {sum(len(r.seeds) for r in rows)} seeds, "
              f"{sum(r.seconds() for r in rows) / 60:.1f} min one after the other")  # fmt: skip
        return
    if torch.device(args.device).type == "cpu":
        Grid(args, rows, None).run()
        return
    drawers = multiprocessing.get_context("spawn").Pool(args.drawers)
    with tempfile.TemporaryDirectory(prefix="probe-") as folder, drawers:
        scratch = Path(folder)
        for item in wanted(rows):  # in the order in which they are needed
            drawers.apply_async(draw, (item, scratch), error_callback=print)
        Grid(args, rows, scratch).run()


if __name__ == "__main__":
    main()
