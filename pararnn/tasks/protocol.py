"""The settings of a run: seeds, budget, which weights are kept. Those of every task are data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .task import Evaluation

SELECTIONS = ("early", "best")
FIRST_TRAINING_SEED, TRAINING_STRIDE = 1, 10_000
_SHORT = Evaluation(2, 64, 2)
_LONGER = Evaluation(5, 128, 2)
_CHOSEN_BY = Evaluation(6, 128, 2)
_FINAL = (
    Evaluation(3, 64, 4),
    Evaluation(4, 256, 4),
    Evaluation(4, 512, 4),
    Evaluation(4, 1024, 4),
)


@dataclass(frozen=True)
class Protocol:
    """Settings of a run. The defaults are those of the word problems.

    Weights are never judged by the batches that chose them: ``check`` and ``validation`` share no seed
    with ``fitted`` and ``final``, and no evaluation has the seed of a training stream.

    Attributes
    ----------
    steps : int
        Most steps of the optimizer.
    select : str
        ``'early'``: stop at the first check whose score reaches ``goal``, and keep the weights of
        that step. ``'best'``: use all steps, and keep the weights with the best ``validation``.
    goal : float
        See ``select``.
    fit : float
        A run whose ``fitted`` score reaches this has learnt the task.
    length, batch, width, lr, every
        Steps of a training sequence, sequences a batch, width of the model, learning rate of Adam,
        steps between checks.
    check, validation, fitted : Evaluation
        What ``'early'`` looks at, what ``'best'`` looks at, and what ``fit`` judges.
    final : tuple of Evaluation
        The result.

    Raises
    ------
    ValueError
        If a word or number is out of range, or an evaluation shares its batches with one that
        it must not.
    """

    steps: int = 1600
    select: str = "early"
    goal: float = 0.999
    fit: float = 0.99
    length: int = 64
    batch: int = 128
    width: int = 64
    lr: float = 3e-3
    every: int = 100
    check: Evaluation = _SHORT
    validation: Evaluation = _CHOSEN_BY
    fitted: Evaluation = _LONGER
    final: tuple[Evaluation, ...] = _FINAL

    def __post_init__(self) -> None:
        if self.select not in SELECTIONS:
            raise ValueError(f"select: got {self.select!r}, expected one of {SELECTIONS}.")
        if self.steps < 1:
            raise ValueError(f"steps: got {self.steps}, expected at least 1.")
        choosing = {"check": self.check.seed, "validation": self.validation.seed}
        judging = {self.fitted.seed, *(e.seed for e in self.final)}
        for name, seed in choosing.items():
            if seed in judging:
                raise ValueError(
                    f"{name}: got seed {seed}, which fitted or final has too, expected one of its own: "
                    "weights are not judged by the batches that chose them."
                )
        for seed in (*choosing.values(), *judging):
            if seed % TRAINING_STRIDE == FIRST_TRAINING_SEED:
                raise ValueError(
                    f"Protocol: got an evaluation with seed {seed}, expected none that is "
                    f"{FIRST_TRAINING_SEED} modulo {TRAINING_STRIDE}, which training streams have."
                )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Protocol:
        """Settings of plain data, as :func:`dataclasses.asdict` gives them, also after JSON."""
        single = {name: Evaluation(**values[name]) for name in ("check", "validation", "fitted")}
        final = tuple(Evaluation(**e) for e in values["final"])
        return cls(**{**values, **single, "final": final})

    @staticmethod
    def training_seed(seed: int) -> int:
        """Seed of the stream of training batches, of a run's seed."""
        return FIRST_TRAINING_SEED + TRAINING_STRIDE * seed


WORDS = Protocol()
TIMED = Protocol(steps=1500, final=_FINAL[:2])
S5 = Protocol(
    steps=12_800,
    select="best",
    validation=Evaluation(1_000_005, 128, 4),
    fitted=Evaluation(1_000_006, 128, 4),
    final=tuple(Evaluation(1_000_004, length, 4) for length in (256, 512, 1024)),
)
RECALL = Protocol(
    steps=12_800,
    select="best",
    validation=Evaluation(1_000_005, 64, 4),
    fitted=Evaluation(1_000_006, 64, 4),
    final=tuple(Evaluation(1_000_004, 256, 4, {"pairs": pairs}) for pairs in (16, 32)),
)
PENDULUM = Protocol(
    select="best",
    fit=-0.0014,
    goal=0.0,
    validation=Evaluation(1_000_005, 64, 4),
    fitted=Evaluation(1_000_006, 64, 4),
    final=tuple(Evaluation(1_000_004, length, 4) for length in (64, 256)),
)

PROTOCOLS: dict[str, Protocol] = {
    "session-parity": TIMED,
    "parity-timestamped": TIMED,
    "S5": S5,
    "MQAR": RECALL,
    "pendulum": PENDULUM,
}
"""Of the tasks that do not have the protocol of the word problems."""
