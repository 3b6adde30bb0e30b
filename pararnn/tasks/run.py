"""One run: train a model on a task and measure it."""

from __future__ import annotations

import dataclasses
import os
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor

from .protocol import PROTOCOLS, WORDS, Protocol
from .record import Record
from .registry import MODELS, TASKS, Model
from .tagger import Tagger
from .task import Evaluation, Task


@dataclass(frozen=True)
class Check:
    """What was seen at one step of the training: the loss of its batch, and the score that decides
    which weights are kept."""

    step: int
    loss: float
    score: float


@dataclass(frozen=True)
class Result:
    """One run. Scores are accuracies, or mean squared errors where answers are numbers.

    Attributes
    ----------
    task, model : str
        What was learnt, and by what.
    seed, n_layers, parameters : int
        Seed of the run, layers and trained numbers of the model.
    steps : int
        Steps of the optimizer that were taken.
    kept : int
        The step whose weights were measured.
    scores : dict
        By length of the sequences (and options of the task).
    fitted : float
        The score that decides whether the task was learnt.
    fit : bool
        Whether it was.
    checks : tuple of Check
        The course of the training.
    protocol : Protocol
        The settings.
    seconds : float
        Time of the whole run.
    machine : str
        Version of PyTorch, device, and number of threads. Results differ slightly between machines.
    """

    task: str
    model: str
    seed: int
    n_layers: int
    parameters: int
    steps: int
    kept: int
    scores: dict[str, float]
    fitted: float
    fit: bool
    checks: tuple[Check, ...]
    protocol: Protocol
    seconds: float
    machine: str

    def to_dict(self) -> dict[str, Any]:
        """The result as plain data, for JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Result:
        """The result of plain data, as :meth:`to_dict` gives it, also after JSON."""
        checks = tuple(Check(**c) for c in values["checks"])
        return cls(
            **{**values, "checks": checks, "protocol": Protocol.from_dict(values["protocol"])}
        )

    def __str__(self) -> str:
        scores = "  ".join(f"@{label} {score:.4f}" for label, score in self.scores.items())
        return (
            f"{self.task} {self.model} L={self.n_layers} seed {self.seed}: {scores}  "
            f"{'fit' if self.fit else 'no fit'} ({self.fitted:.4f}), step {self.kept} of "
            f"{self.steps}, {self.seconds:.0f} s"
        )


@torch.no_grad()
def evaluate(
    answer: Callable[..., Tensor], task: Task, evaluation: Evaluation, batch: int = 128
) -> float:
    """Mean score over all steps that are asked: accuracy, or the negative mean squared error.

    ``answer(x, dt)`` gives ``(B, T, outputs)``; a module is called in evaluation mode.
    """
    module = answer if isinstance(answer, torch.nn.Module) else torch.nn.Identity()
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    training = module.training
    module.eval()
    generator = Generator().manual_seed(evaluation.seed)
    scores = []
    for _ in range(evaluation.batches):
        drawn = task.draw(generator, batch, evaluation.length, **evaluation.options).to(device)
        scores.append(task.right(answer(drawn.x, drawn.dt), drawn))
    module.train(training)
    return float(torch.cat(scores).mean())


class Training:
    """A run between two steps: model, optimizer, stream of batches, and what was seen so far."""

    def __init__(
        self,
        task: Task,
        model: Model,
        seed: int,
        n_layers: int | None,
        protocol: Protocol,
        device: torch.device | str,
    ):
        self.task, self.protocol, self.device = task, protocol, device
        self.generator = Generator().manual_seed(Protocol.training_seed(seed))
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            self.tagger = Tagger(task, model, n_layers, protocol.width).to(device)
        self.optimizer = torch.optim.Adam(self.tagger.parameters(), lr=protocol.lr)
        self.early = protocol.select == "early"
        self.step, self.kept, self.seconds = 0, 0, 0.0
        self.checks: list[Check] = []
        self.best: dict[str, Tensor] | None = None

    @property
    def over(self) -> bool:
        """Whether all steps are done, or the goal is reached."""
        at_goal = self.early and self.checks and self.checks[-1].score >= self.protocol.goal
        return self.step >= self.protocol.steps or bool(at_goal)

    def advance(self) -> Check | None:
        """One step of the optimizer; what was seen, at the steps where one looks."""
        protocol, task = self.protocol, self.task
        drawn = task.draw(self.generator, protocol.batch, protocol.length).to(self.device)
        loss = task.loss(self.tagger(drawn.x, drawn.dt), drawn)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.step += 1
        if self.step % protocol.every and self.step < protocol.steps:
            return None
        watched = protocol.check if self.early else protocol.validation
        seen = Check(self.step, float(loss.detach()), self.measured(watched))
        better = not self.checks or seen.score > max(c.score for c in self.checks)
        if self.early or self.best is None or better:
            self.kept = self.step
        if not self.early and self.kept == self.step:
            self.best = {k: v.clone() for k, v in self.tagger.state_dict().items()}
        self.checks.append(seen)
        return seen

    def measured(self, evaluation: Evaluation) -> float:
        """Score of the model as it is."""
        return evaluate(self.tagger, self.task, evaluation, self.protocol.batch)

    def chosen(self) -> None:
        """Go back to the weights that are kept."""
        if self.best is not None:
            self.tagger.load_state_dict(self.best)

    def state(self) -> dict[str, Any]:
        """All that the next steps depend on."""
        return {
            "tagger": self.tagger.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "generator": self.generator.get_state(),
            "best": self.best,
            "kept": self.kept,
            "seconds": self.seconds,
            "checks": self.seen(),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""
        self.tagger.load_state_dict(state["tagger"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.generator.set_state(state["generator"])
        self.best, self.kept, self.seconds = state["best"], state["kept"], state["seconds"]
        self.checks = [Check(**c) for c in state["checks"]]
        self.step = self.checks[-1].step

    def seen(self) -> list[dict[str, Any]]:
        """The checks so far, as plain data."""
        return [dataclasses.asdict(c) for c in self.checks]


def probe(
    task: str | Task,
    model: str | Model,
    *,
    seed: int = 0,
    n_layers: int | None = None,
    protocol: Protocol | None = None,
    device: torch.device | str = "cpu",
    watch: Callable[[Check], None] | None = None,
    record: str | os.PathLike[str] | None = None,
) -> Result:
    """Train a model on a task and measure it.

    The run's seed decides the initial weights, and, as ``1 + 10000 · seed``, the stream of training
    batches; all batches are fresh. The optimizer is Adam with its defaults, without weight decay,
    clipping or schedule; the loss is the mean over all steps that are asked.

    Parameters
    ----------
    task, model
        Names in ``TASKS`` and ``MODELS``, or what they name.
    seed
        Seed of the run; the global random state is left as it was.
    n_layers
        Layers of the model; 1 if not given, or as many as the model names.
    protocol
        The task's own if not given; change one with :func:`dataclasses.replace`.
    device
        Where to train. Batches and initial weights are drawn on the CPU, so they are the same
        everywhere.
    watch
        Called at every check.
    record
        A folder to keep the run in (:class:`Record`): its checks as JSON lines while it goes, and the
        state after the last one. The same call goes on from there after a stop, to the result that the
        run would have had, bit for bit but for ``seconds``; once there is a result, it returns that.

    Returns
    -------
    Result

    Raises
    ------
    ValueError
        If a name is unknown, or the model does not suit the task, or the record is of a run with other
        settings or on another machine.
    """
    task = known("task", task, TASKS) if isinstance(task, str) else task
    model = known("model", model, MODELS) if isinstance(model, str) else model
    protocol = protocol or PROTOCOLS.get(task.name, WORDS)
    run = Training(task, model, seed, n_layers, protocol, device)
    machine = (
        f"torch {torch.__version__}, {torch.device(device)}, {platform.machine()}, "
        f"{torch.get_num_threads()} threads"
    )
    log = None
    if record is not None:
        log = Record(record, _settings(task, model, seed, run, machine))
        result, state = log.found()
        if result is not None:
            return Result.from_dict(result)
        if state is not None:
            run.load(state)
    began = time.perf_counter() - run.seconds
    try:
        while not run.over:
            seen = run.advance()
            run.seconds = time.perf_counter() - began
            if seen is not None and log is not None:
                log.save(run.state(), run.seen())
            if seen is not None and watch is not None:
                watch(seen)
        run.chosen()
        fitted, sign = run.measured(protocol.fitted), 1 if task.symbols else -1
        scores = {e.label: sign * run.measured(e) for e in protocol.final}
    except BaseException:
        if log is not None:
            log.stopped(run.step, run.seen())
        raise
    outcome = Result(
        task.name,
        model.name,
        seed,
        run.tagger.n_layers,
        sum(p.numel() for p in run.tagger.parameters()),
        run.checks[-1].step,
        run.kept,
        scores,
        sign * fitted,
        fitted >= protocol.fit,
        tuple(run.checks),
        protocol,
        time.perf_counter() - began,
        machine,
    )
    if log is not None:
        log.finished(outcome.to_dict(), run.seen())
    return outcome


def _settings(task: Task, model: Model, seed: int, run: Training, machine: str) -> dict[str, Any]:
    """All that decides the result of a run."""
    return {
        "task": task.name,
        "model": model.name,
        "n_layers": run.tagger.n_layers,
        "seed": seed,
        "stack": {"mixer": model.mixer, "mixer_kwargs": _plain(model.mixer_kwargs)}
        | {"feature": model.feature, "decay": model.decay},
        "protocol": dataclasses.asdict(run.protocol),
        "machine": machine,
    }


def _plain(values: Mapping[str, Any] | None) -> dict[str, Any] | None:
    return None if values is None else dict(values)


def known(what: str, name: str, names: dict[str, Any]) -> Any:
    """What a name stands for, or a ``ValueError`` that lists the names."""
    if name not in names:
        raise ValueError(f"{what}: got {name!r}, expected one of {', '.join(names)}.")
    return names[name]
