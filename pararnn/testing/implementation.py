"""A solver of one's own in place of the library's functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from .context import Api, NotApplicable, fed
from .kinds import AnyCell
from .reference import start

Solve = Callable[..., Any]


class Answer:
    """States ``(B, T, *state_shape)`` and nothing else. What a report would say is not there: a clause
    that asks for it does not apply."""

    def __init__(self, states: Tensor, final_state: Tensor):
        self.states, self.final_state = states, final_state

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise NotApplicable(
            f"solve gives states without a report, and the clause asks for {name!r}"
        )


def answered(solve: Solve) -> Solve:
    """``solve`` with its config by name, and its states alone made an answer."""

    def call(cell: AnyCell, x: Tensor | None = None, config: Any = None, **options: Any) -> Any:
        if config is not None:
            options["config"] = config
        found = solve(cell, x, **options)
        if not isinstance(found, Tensor):
            return found
        if found.shape[1]:
            return Answer(found, found[:, -1])
        h0 = options.get("h0")
        given = options["drives"] if x is None else x
        return Answer(found, start(cell, given) if h0 is None else h0)

    return call


def api_of(solve: Solve) -> Api:
    """The functions that checks call, all of them by ``solve``, with the method that each stands for.
    Layers stay the library's."""
    whole = fed(answered(solve))

    def by(method: str) -> Callable[..., Tensor]:
        def apply(cell: AnyCell, x: Tensor, config: Any = None, **options: Any) -> Tensor:
            return whole(cell, x, config, method=method, **options).states

        return apply

    return Api(
        solve=whole,
        sequential_apply=by("sequential"),
        newton_apply=by("newton"),
        shooting_apply=by("shooting"),
    )
