"""Rows of `probe_grid.toml`, their data, and the training of their seeds."""

from __future__ import annotations

import dataclasses
import math
import time
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from harness import ROOT
from probe_models import built, names, rates
from torch import Generator, Tensor
from torch.nn import functional as F

from pararnn.tasks import PROTOCOLS, TASKS, WORDS, Batch, Evaluation, Protocol, Task, evaluate

GRID = ROOT / "benchmarks" / "probe_grid.toml"
UNASKED = -100

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
