"""The ways to solve a recurrence, one a file, and the choice between them.

A method says why it is unfit for a problem, or what it is modelled to take. ``auto`` takes the
cheapest that fits; :func:`pararnn.explain` prints the list.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ..problem import Problem
from .delta import Delta
from .fused import Fused
from .method import Choice, Method
from .newton import Newton
from .scan import Scan
from .sequential import Sequential
from .shooting import Shooting

FUSED: Method = Fused()
ALL: tuple[Method, ...] = (FUSED, Delta(), Scan(), Shooting(), Newton(), Sequential())
BY_NAME = {method.name: method for method in ALL}
ASKED = ("auto", "sequential", "newton", "shooting")
"""What a user can ask for."""


class Candidate(NamedTuple):
    """A method, and why it is unfit, or what it is modelled to take, in microseconds."""

    method: Method
    unfit: str | None
    cost: float | None


def candidates(problem: Problem) -> list[Candidate]:
    """All methods: those that fit first, the cheapest at their head."""
    listed = [(method, method.unfit(problem)) for method in ALL]
    found = [Candidate(m, why, None if why else m.cost(problem)) for m, why in listed]
    return sorted(found, key=lambda c: float("inf") if c.cost is None else c.cost)


def choose(problem: Problem) -> tuple[Method, Choice]:
    """The method that a problem is solved by, from sizes and settings alone, and what it runs.

    Raises
    ------
    ValueError
        If no method does what is asked for.
    """
    if problem.spec is None or torch.compiler.is_compiling():
        return _choose(problem, FUSED.unfit(problem))
    u, refused = problem.u, FUSED.unfit(problem)
    key = (
        problem.spec, problem.recurrence.state_shape, u.shape, u.device, u.dtype, problem.config,
        problem.method, problem.layer, refused, problem.traced, problem.transformed,
        torch.get_num_threads(),
    )  # fmt: skip
    made = _MADE.get(key)
    if made is None:
        if len(_MADE) > 1024:
            _MADE.clear()
        made = _MADE[key] = _choose(problem, refused)
    return made


_MADE: dict[Any, tuple[Method, Choice]] = {}
"""Choices that were made; sizes and settings of a problem with a Spec say all."""


def _choose(problem: Problem, refused: str | None) -> tuple[Method, Choice]:
    """``refused`` is why the kernels are unfit."""
    others = [(method, method.unfit(problem)) for method in ALL if method is not FUSED]
    listed = [(FUSED, refused), *others]
    fit = [method for method, why in listed if why is None]
    if not fit:
        raise ValueError(_nothing(problem, {m.name: why for m, why in listed}))
    if len(fit) == 1 or torch.compiler.is_compiling():
        best = fit[0]  # in a graph, sizes may be unknown: the order of the list decides
    else:
        best = min(fit, key=lambda method: method.cost(problem))
    choice = best.choice(problem)
    if refused is not None and problem.u.device.type != "cpu" and refused not in choice.reason:
        choice = replace(choice, reason=f"{choice.reason}; not fused: {refused}")
    return best, choice


def _nothing(problem: Problem, unfit: dict[str, str | None]) -> str:
    if problem.config.backend == "fused":
        return f"backend: got 'fused', but {unfit['fused']}; use backend='auto'."
    name = "newton" if problem.method == "newton" else "shooting"
    return str(unfit[name])
