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
import dataclasses
import gc
import json
import math
import multiprocessing
import os
import tempfile
import time
import tomllib
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from harness import ROOT, add_line, parser, read_lines, record
from probe_models import built, names, rates
from torch import Generator, Tensor
from torch.nn import functional as F

from pararnn.tasks import PROTOCOLS, TASKS, WORDS, Batch, Evaluation, Protocol, Task, evaluate

GRID = ROOT / "benchmarks" / "probe_grid.toml"
PATIENCE = 10.0  # seconds between two lines of progress
UNASKED = -100
SHARED = ("device", "torch", "triton", "python", "revision", "date")
SLOW = 1.5  # milliseconds a step, from which a row is not trained together with others

# --------------------------------------------------------------------------------------
# The grid
# --------------------------------------------------------------------------------------

LENGTHS = (64, 256, 512, 1024)
PUBLISHED = replace(  # written out: the published rows keep their seeds if a default changes
    WORDS,
    select="early",
    goal=0.999,
    fit=0.99,
    check=Evaluation(2, 64, 2),
    validation=Evaluation(5, 128, 2),
    fitted=Evaluation(6, 128, 2),  # published: the batches that chose the weights; see `best`
    final=tuple(Evaluation(3 if n == 64 else 4, n, 4) for n in LENGTHS),
)


@dataclass(frozen=True)
class Row:
    """One row of the grid. Lengths of ``final`` and ``validation`` change the protocol's own."""

    id: str
    section: str
    task: str
    model: str
    seeds: tuple[int, ...]
    layers: int | None = None
    priority: int = 1
    steps: int | None = None
    select: str | None = None
    validation: int | None = None
    own_protocol: bool = False
    cost: float = 0.5
    name: str = ""
    published: dict[str, Any] = field(default_factory=dict)
    note: str = ""

    def protocol(self) -> Protocol:
        """That of the publication, or the task's own, with the row's changes."""
        base = PROTOCOLS.get(self.task, WORDS) if self.own_protocol else PUBLISHED
        if self.own_protocol and self.task == "S5":
            seed = base.final[0].seed
            base = replace(base, final=tuple(Evaluation(seed, n, 4) for n in LENGTHS))
        changes: dict[str, Any] = {"steps": self.steps, "select": self.select}
        if self.validation is not None:
            changes["validation"] = replace(base.validation, length=self.validation)
        return replace(base, **{k: v for k, v in changes.items() if v is not None})

    def seconds(self) -> float:
        """Guess, alone on the device."""
        return 8 + self.cost / 1000 * self.protocol().steps * len(self.seeds)


def grid(path: Path = GRID) -> list[Row]:
    """The rows of a file, each with the defaults of the file."""
    content = tomllib.loads(path.read_text(encoding="utf-8"))
    rows = []
    for entry in content["row"]:
        entry = dict(entry)
        seeds = entry.pop("seeds")
        entry["seeds"] = tuple(range(seeds)) if isinstance(seeds, int) else tuple(seeds)
        row = Row(**entry)
        if row.task not in TASKS or row.model not in names():
            raise ValueError(
                f"{path.name}, {row.id}: unknown task or model {row.task} {row.model}."
            )
        rows.append(row)
    if len({r.id for r in rows}) < len(rows):
        raise ValueError(f"{path.name}: got two rows with one id.")
    return rows


# --------------------------------------------------------------------------------------
# Data
# --------------------------------------------------------------------------------------


def narrow(x: Tensor) -> Tensor:
    """Symbols in a byte."""
    return x.to(torch.uint8) if x.dtype == torch.int64 and int(x.max()) < 256 else x


def stream(task: Task, seed: int, steps: int, protocol: Protocol) -> dict[str, Tensor]:
    """The first batches of a training stream, ``(steps, B, T)``: those that ``probe`` draws."""
    generator = Generator().manual_seed(1 + 10_000 * seed)
    parts: dict[str, list[Tensor]] = {}
    for _ in range(steps):
        batch = task.draw(generator, protocol.batch, protocol.length)
        for key, value in vars(batch).items():
            if value is not None:
                parts.setdefault(key, []).append(narrow(value))
    return {key: torch.stack(values) for key, values in parts.items()}


@dataclass(frozen=True)
class Wanted:
    """A stream in a file of the scratch folder."""

    task: str
    seed: int
    steps: int
    length: int
    batch: int

    def path(self, scratch: Path) -> Path:
        return scratch / f"{self.task}-{self.seed}-{self.length}-{self.batch}.pt"


def wanted(rows: list[Row]) -> list[Wanted]:
    """The streams of some rows, each once and as long as the longest row needs it."""
    most: dict[tuple[str, int, int, int], int] = {}
    for row in rows:
        p = row.protocol()
        for seed in row.seeds:
            key = (row.task, seed, p.length, p.batch)
            most[key] = max(most.get(key, 0), p.steps)
    return [Wanted(task, seed, n, length, b) for (task, seed, length, b), n in most.items()]


def draw(item: Wanted, scratch: Path) -> None:
    torch.set_num_threads(1)
    protocol = replace(PUBLISHED, length=item.length, batch=item.batch)
    target = item.path(scratch)
    part = target.with_suffix(".part")
    torch.save(stream(TASKS[item.task], item.seed, item.steps, protocol), part)
    part.replace(target)


def loaded(row: Row, seed: int, protocol: Protocol, scratch: Path | None) -> dict[str, Tensor]:
    """A run's batches: from the scratch folder once they are there, or drawn here."""
    if scratch is None:
        return stream(TASKS[row.task], seed, protocol.steps, protocol)
    path = Wanted(row.task, seed, 0, protocol.length, protocol.batch).path(scratch)
    since = time.perf_counter()
    while not path.exists():
        if time.perf_counter() - since > 300:
            raise TimeoutError(f"{path.name}: not drawn within 300 seconds.")
        time.sleep(0.05)
    found = torch.load(path, weights_only=True)
    return {key: value[: protocol.steps] for key, value in found.items()}


def remembered(task: Task, device: torch.device) -> Task:
    """The task, with batches that are drawn once and then lie on the device."""
    found: dict[Any, tuple[Batch, Tensor]] = {}

    def again(generator: Generator, batch: int, length: int, **options: Any) -> Batch:
        before = generator.get_state().numpy().tobytes()
        key = (before, batch, length, *sorted(options.items()))
        if key not in found:
            drawn = task.draw(generator, batch, length, **options).to(device)
            found[key] = drawn, generator.get_state()
        drawn, after = found[key]
        generator.set_state(after)
        return drawn

    return replace(task, draw=again)


# --------------------------------------------------------------------------------------
# Training
# --------------------------------------------------------------------------------------


def loss_of(task: Task, answers: Tensor, batch: Batch) -> Tensor:
    """The task's loss, without a mask's wait for the device."""
    if batch.asked is None or answers.device.type == "cpu":
        return task.loss(answers, batch)
    y = batch.y.masked_fill(~batch.asked, UNASKED)
    return F.cross_entropy(answers.reshape(-1, task.outputs), y.reshape(-1), ignore_index=UNASKED)


class Run:
    """One seed: its model, its optimizer, its batches, and the step that trains it."""

    def __init__(self, row: Row, seed: int, device: torch.device, scratch: Path | None):
        self.row, self.seed = row, seed
        self.task, self.protocol = TASKS[row.task], row.protocol()
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            model = built(self.task, row.model, row.layers, self.protocol.width)
        self.model = model.to(device)
        cuda = device.type == "cuda"
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        kind: dict[str, Any] = {"fused": True, "capturable": True} if cuda else {}
        self.optimizer = torch.optim.Adam(parameters, lr=self.protocol.lr, **kind)
        found = loaded(row, seed, self.protocol, scratch)
        self.data = {key: value.to(device) for key, value in found.items()}
        self.at = torch.zeros(1, dtype=torch.int64, device=device)
        self.loss = torch.zeros((), device=device)
        self.graph: Any = None
        self.stream: Any = torch.cuda.Stream(device) if cuda else None
        if cuda:
            torch.cuda.synchronize()  # the stream does not wait for what was put there
        self.best: dict[str, Tensor] | None = None
        self.checks: list[tuple[int, float, float]] = []
        self.kept, self.done, self.cut = 0, False, False

    def eager(self) -> None:
        """One step of the optimizer, on the next batch."""
        fields = {key: value.index_select(0, self.at)[0] for key, value in self.data.items()}
        for key in ("x", "y"):
            if fields[key].dtype == torch.uint8:
                fields[key] = fields[key].long()
        batch = Batch(**fields)
        loss = loss_of(self.task, self.model(batch.x, batch.dt), batch)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()
        self.loss.copy_(loss.detach())
        self.at += 1

    def capture(self) -> None:
        """Record the step as a CUDA graph. Nothing is trained by that."""
        start = {k: v.clone() for k, v in self.model.state_dict().items()}
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            for _ in range(3):
                self.eager()
            self.optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream):
            self.eager()
        torch.cuda.synchronize()
        self.model.load_state_dict(start)
        for state in self.optimizer.state.values():
            for value in state.values():
                value.zero_()
        self.at.zero_()
        torch.cuda.synchronize()
        self.graph = graph

    def step(self) -> None:
        if self.stream is None:
            self.eager()
            return
        with torch.cuda.stream(self.stream):
            if self.graph is None:
                self.eager()
            else:
                self.graph.replay()

    def check(self, step: int, task: Task) -> None:
        """Look at the score, and keep the weights or stop, as `pararnn.tasks.probe` does."""
        p = self.protocol
        early = p.select == "early"
        score = evaluate(self.model, task, p.check if early else p.validation, p.batch)
        if early:
            self.kept, self.done = step, score >= p.goal
        elif self.best is None or score > max(c[2] for c in self.checks):
            self.best = {k: v.clone() for k, v in self.model.state_dict().items()}
            self.kept = step
        self.checks.append((step, float(self.loss), score))
        self.done = self.done or step == p.steps

    def result(self, task: Task) -> dict[str, Any]:
        """What the weights that were kept can do."""
        if self.best is not None:
            self.model.load_state_dict(self.best)
        p, sign = self.protocol, 1 if task.symbols else -1
        fitted = evaluate(self.model, task, p.fitted, p.batch)
        found = {
            "id": self.row.id,
            "task": self.row.task,
            "model": self.row.model,
            "seed": self.seed,
            "n_layers": self.model.n_layers,
            "parameters": sum(w.numel() for w in self.model.parameters()),
            "steps": self.checks[-1][0],
            "kept": self.kept,
            "scores": {e.label: sign * evaluate(self.model, task, e, p.batch) for e in p.final},
            "fitted": sign * fitted,
            "fit": fitted >= p.fit,
            "best": max(c[2] for c in self.checks),
            "finite": all(bool(w.isfinite().all()) for w in self.model.parameters()),
            "captured": self.graph is not None,
            "checks": [[step, round(a, 6), round(b, 6)] for step, a, b in self.checks],
            "protocol": dataclasses.asdict(p),
        }
        rate = rates(self.model)
        found |= {} if rate is None else {"rate": rate}
        return found | {"cut": True} if self.cut else found


def train(
    rows: Sequence[Row],
    device: torch.device,
    scratch: Path | None,
    capture: bool,
    emit: Callable[[dict[str, Any]], None],
    tell: Callable[[float], None] = lambda part: None,
    together: bool | None = None,
    until: float = math.inf,
) -> None:
    """All seeds of all rows, by default together on a GPU and one after the other on a CPU.

    ``tell`` is given the part of the steps that is behind. At the first check after the time
    ``until``, all runs end as if that were their last step; their results have ``cut``.
    """
    cuda = device.type == "cuda"
    together = cuda if together is None else together
    pairs = [(row, seed) for row in rows for seed in row.seeds]
    tasks = {row.task: remembered(TASKS[row.task], device) for row in rows}
    for group in [pairs] if together else [[pair] for pair in pairs]:
        began = time.perf_counter()
        runs = [Run(row, seed, device, scratch) for row, seed in group]
        if capture and cuda:
            for run in runs:
                run.capture()
        active, step = runs, 0
        last = max(run.protocol.steps for run in runs)
        while active:
            step += 1
            for run in active:
                run.step()
            checked = [
                run
                for run in active
                if step % run.protocol.every == 0 or step == run.protocol.steps
            ]
            if not checked:
                continue
            if cuda:
                torch.cuda.synchronize()
            late = time.time() > until
            for run in active if late else checked:
                run.check(step, tasks[run.row.task])
                run.cut = late and not run.done
                if run.done or run.cut:
                    seconds = round(time.perf_counter() - began, 2)
                    found = run.result(tasks[run.row.task])
                    emit(found | {"seconds": seconds, "together": len(runs)})
            active = [run for run in active if not (run.done or run.cut)]
            tell(step / last)


def smoke(row: Row, device: torch.device, scratch: Path | None, steps: int = 20) -> dict[str, Any]:
    """Losses of some steps, captured and not, and how long a step takes."""
    found: dict[str, Any] = {"id": row.id, "task": row.task, "model": row.model}
    losses: dict[bool, list[float]] = {}
    for capture in (False, True):
        if capture and device.type != "cuda":
            continue
        run = Run(row, row.seeds[0], device, scratch)
        if capture:
            run.capture()
        losses[capture] = []
        for _ in range(steps):
            run.step()
            if run.stream is not None:
                run.stream.synchronize()
            losses[capture].append(float(run.loss))
        since = time.perf_counter()
        for _ in range(steps):
            run.step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        label = "captured_ms" if capture else "eager_ms"
        found[label] = round(1000 * (time.perf_counter() - since) / steps, 3)
    found["losses"] = [round(v, 5) for v in losses[False][::6]]
    if True in losses:
        found["differ"] = max(abs(a - b) for a, b in zip(*losses.values(), strict=True))
    if device.type == "cuda":  # seeds together, and an evaluation at the greatest length
        runs = [Run(row, seed, device, scratch) for seed in row.seeds]
        for run in runs:
            run.capture()
        since = time.perf_counter()
        for _ in range(steps):
            for run in runs:
                run.step()
        torch.cuda.synchronize()
        found["together_ms"] = round(1000 * (time.perf_counter() - since) / steps, 3)
        found["together"] = len(runs)
        since = time.perf_counter()
        evaluate(runs[0].model, TASKS[row.task], runs[0].protocol.final[-1], 128)
        found["evaluate_s"] = round(time.perf_counter() - since, 2)
        found["GiB"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    return found


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
