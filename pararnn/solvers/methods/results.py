"""From what a method computed to a :class:`~pararnn.Solution`, and to and from the operator."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor

from .. import operator
from ..config import Kept, Progress, Solution, States
from ..problem import Problem
from ..spec_recurrence import SpecRecurrence
from .method import Choice


def solution_of(
    problem: Problem, choice: Choice, states: Tensor, progress: Progress | None, final: Any = None
) -> Solution:
    """From all states ``(B, T, *state_shape)`` in the state's dtype."""
    if final is None:
        final = states[:, -1].clone() if states.shape[1] else problem.h0
    rounded = states.to(problem.u.dtype)
    spec = problem.spec
    read = states if spec is not None and spec.readout is not None else rounded
    output = problem.recurrence.output(read, problem.u)
    return packed(choice, output, Kept(rounded), final, progress, (rounded, final))


def packed(
    choice: Choice,
    output: Tensor,
    states: States,
    final: Tensor,
    progress: Progress | None,
    computed: tuple[Tensor, ...],
) -> Solution:
    """A solution; ``computed`` is all that must be finite besides the output."""
    return Solution(
        final_state=final,
        error_bound=None,
        method=choice.method,
        chunk_length=choice.chunk_length,
        chunks=choice.chunks,
        path=choice.path,
        reason=choice.reason,
        progress=progress,
        parts=(output, states),
        computed=tuple(t.detach() for t in computed),
    )


def call_of(problem: Problem, settings: operator.Settings) -> operator.Call:
    """The arguments of the operator that solves a problem."""
    recurrence = cast(SpecRecurrence, problem.recurrence)
    spec, sizes = recurrence.spec, recurrence.sizes
    return operator.Call(
        spec.fingerprint,
        [sizes[a] for a in (*spec.axes, "heads") if a in sizes],
        recurrence.dtype,
        [problem.u],
        problem.dt,
        problem.start,
        problem.resets,
        list(problem.params),
        *settings,
    )
