"""One run: train a model on a task and measure it."""

from __future__ import annotations

import dataclasses
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor

from .protocol import PROTOCOLS, WORDS, Protocol
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


def probe(
    task: str | Task,
    model: str | Model,
    *,
    seed: int = 0,
    n_layers: int | None = None,
    protocol: Protocol | None = None,
    device: torch.device | str = "cpu",
    watch: Callable[[Check], None] | None = None,
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

    Returns
    -------
    Result

    Raises
    ------
    ValueError
        If a name is unknown, or the model does not suit the task.
    """
    began = time.perf_counter()
    task = known("task", task, TASKS) if isinstance(task, str) else task
    model = known("model", model, MODELS) if isinstance(model, str) else model
    protocol = protocol or PROTOCOLS.get(task.name, WORDS)
    generator = Generator().manual_seed(1 + 10_000 * seed)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        tagger = Tagger(task, model, n_layers, protocol.width).to(device)
    optimizer = torch.optim.Adam(tagger.parameters(), lr=protocol.lr)
    early = protocol.select == "early"
    watched = protocol.check if early else protocol.validation
    best, kept, checks = None, 0, []
    for step in range(1, protocol.steps + 1):
        drawn = task.draw(generator, protocol.batch, protocol.length).to(device)
        loss = task.loss(tagger(drawn.x, drawn.dt), drawn)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % protocol.every and step < protocol.steps:
            continue
        score = evaluate(tagger, task, watched, protocol.batch)
        checks.append(Check(step, float(loss.detach()), score))
        if watch is not None:
            watch(checks[-1])
        if early:
            kept = step
            if score >= protocol.goal:
                break
        elif best is None or score > max(c.score for c in checks[:-1]):
            best, kept = {k: v.clone() for k, v in tagger.state_dict().items()}, step
    if best is not None:
        tagger.load_state_dict(best)

    def measured(evaluation: Evaluation) -> float:
        return evaluate(tagger, task, evaluation, protocol.batch)

    fitted, sign = measured(protocol.fitted), 1 if task.symbols else -1
    return Result(
        task.name,
        model.name,
        seed,
        tagger.n_layers,
        sum(p.numel() for p in tagger.parameters()),
        checks[-1].step,
        kept,
        {e.label: sign * measured(e) for e in protocol.final},
        sign * fitted,
        fitted >= protocol.fit,
        tuple(checks),
        protocol,
        time.perf_counter() - began,
        f"torch {torch.__version__}, {torch.device(device)}, {platform.machine()}, "
        f"{torch.get_num_threads()} threads",
    )


def known(what: str, name: str, names: dict[str, Any]) -> Any:
    """What a name stands for, or a ``ValueError`` that lists the names."""
    if name not in names:
        raise ValueError(f"{what}: got {name!r}, expected one of {', '.join(names)}.")
    return names[name]
