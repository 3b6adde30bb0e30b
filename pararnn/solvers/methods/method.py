"""What a method of solving is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from ..config import Solution
from ..problem import Problem


@dataclass(frozen=True)
class Choice:
    """What a solve runs, and why; see :class:`~pararnn.Solution` for the attributes."""

    method: str
    path: str
    chunk_length: int
    chunks: int
    reason: str
    length: int = 0  # of a chunk, as the operator is told: 0 leaves it to the cost model
    warmup: int = -1
    cap: int | None = None  # corrections that the cost model counts on, at most


class Method(ABC):
    """A way to solve a recurrence."""

    name: ClassVar[str]

    @abstractmethod
    def unfit(self, problem: Problem) -> str | None:
        """Why it does not solve this problem; None if it does."""

    @abstractmethod
    def cost(self, problem: Problem) -> float:
        """What it is modelled to take, in microseconds, from sizes alone."""

    @abstractmethod
    def choice(self, problem: Problem) -> Choice:
        """What it would run, from sizes and settings alone."""

    @abstractmethod
    def run(self, problem: Problem, choice: Choice) -> Solution:
        """Solve."""


def asked_otherwise(problem: Problem, *names: str) -> str | None:
    """Why a method that goes by these names is not what was asked for; None if it is, or if nothing
    was."""
    if problem.config.backend == "fused":
        return "asked for: backend='fused'"
    if problem.method not in ("auto", *names):
        return f"asked for: method={problem.method!r}"
    return None
