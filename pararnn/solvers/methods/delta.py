"""A layer's output and final state without the states in between: the delta rule, in chunks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..config import HostProgress, Solution
from ..cost import chunk_cut
from ..problem import Problem
from .method import Choice, Method
from .results import packed
from .scan import asked_chunks, one_scan
from .shooting import parallel_states


class Delta(Method):
    """Taken by a cell that reads from its states through a scan of its own, :meth:`~pararnn.Cell.through`,
    where nothing but the output and the final state is asked for. States are then solved for when
    they are read."""

    name = "delta"

    def unfit(self, problem: Problem) -> str | None:
        if (other := asked_chunks(problem)) is not None:
            return other
        if problem.spec is None or not _cell(problem).direct:
            return "it has no scan of its own that reads without forming states"
        if not problem.layer:
            return "all states are asked for"
        return None

    def cost(self, problem: Problem) -> float:
        """Chunks of it are products of matrices."""
        return chunk_cut(problem.total, problem.numbers, problem.u.device.type).cost / 4

    def choice(self, problem: Problem) -> Choice:
        return one_scan(problem)

    def run(self, problem: Problem, choice: Choice) -> Solution:
        given: dict[str, Any] = {"resets": problem.resets, "dt": problem.dt}
        output, final = _cell(problem).through(problem.u, problem.start, **given)
        later = Later(problem, problem.versions)
        return packed(choice, output, later, final, HostProgress(), (final,))


def _cell(problem: Problem) -> Any:
    return problem.recurrence.cell  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Later:
    """States that are solved for when they are read."""

    problem: Problem
    versions: tuple[int, ...]

    def __call__(self) -> Tensor:
        if self.problem.versions != self.versions:
            raise RuntimeError(
                "got parameters or inputs that were changed since this solve, and its states had not "
                "been computed; read states before that, or solve again."
            )
        return parallel_states(self.problem)[0].to(self.problem.u.dtype)

    def detached(self) -> Later:
        return Later(self.problem.detached(), self.versions)
