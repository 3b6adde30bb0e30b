"""What a probe task is: a stream of batches, and how answers are scored."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True)
class Batch:
    """Sequences and what is asked about them.

    Attributes
    ----------
    x : Tensor
        Symbols ``(B, T)`` int64, or numbers ``(B, T, F)``.
    y : Tensor
        Answers at every step: classes ``(B, T)`` int64, or numbers ``(B, T, F)``.
    dt : Tensor, optional
        Time since the step before, ``(B, T)``.
    asked : Tensor, optional
        Bool ``(B, T)``: the steps that count. All of them if not given.
    """

    x: Tensor
    y: Tensor
    dt: Tensor | None = None
    asked: Tensor | None = None

    def to(self, device: torch.device | str) -> Batch:
        """The batch on a device."""
        moved = [None if v is None else v.to(device) for v in (self.x, self.y, self.dt, self.asked)]
        return Batch(*moved)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Task:
    """A stream of random sequences.

    Attributes
    ----------
    name : str
        As it is given on the command line.
    draw : callable
        ``draw(generator, batch, length, **options) -> Batch``, on the CPU. All randomness comes
        from the generator, in an order that never changes.
    inputs, outputs : int
        Number of symbols and classes; of features and targets if not ``symbols``.
    symbols : bool
        Whether inputs are symbols and answers classes, scored by accuracy; else both are numbers,
        scored by the mean squared error.
    timed : bool
        Whether batches have time gaps.
    chance : float
        Score of who has learnt nothing: accuracy of a guess, or squared error of the noisy input
        given back as the answer.
    """

    name: str
    draw: Callable[..., Batch] = field(repr=False)
    inputs: int
    outputs: int
    chance: float
    symbols: bool = True
    timed: bool = False

    def loss(self, answers: Tensor, batch: Batch) -> Tensor:
        """Mean cross-entropy, or squared error, of answers ``(B, T, outputs)`` over all steps that
        are asked."""
        y = batch.y
        if batch.asked is not None:
            answers, y = answers[batch.asked], y[batch.asked]
        if not self.symbols:
            return functional.mse_loss(answers, y)
        return functional.cross_entropy(answers.reshape(-1, self.outputs), y.reshape(-1))

    def right(self, answers: Tensor, batch: Batch) -> Tensor:
        """Score of every asked step, flat: 1 where the likeliest class is right; the negative
        squared error where answers are numbers. More is better in both."""
        if self.symbols:
            score = (answers.argmax(-1) == batch.y).to(torch.float64)
        else:
            score = -(answers - batch.y).to(torch.float64).square().mean(-1)
        return score.flatten() if batch.asked is None else score[batch.asked]


@dataclass(frozen=True)
class Evaluation:
    """Fresh batches from a fixed seed: the same ones at every call.

    Attributes
    ----------
    seed, length, batches : int
        Seed of the generator, steps of a sequence, number of batches.
    options : mapping
        For the task's ``draw``.
    """

    seed: int
    length: int
    batches: int
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """``'256'``, or ``'256 pairs=16'``."""
        return " ".join([str(self.length), *(f"{k}={v}" for k, v in self.options.items())])
