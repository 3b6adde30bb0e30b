"""Entering a cell: what a layer runs on it is a call of the module, between its hooks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

from torch import nn

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")

F = TypeVar("F", bound=Callable[..., Any])


def takes_run(forward: F) -> F:
    """``forward``, which does ``run(*given, **named)`` instead if it is called with ``run``."""

    @functools.wraps(forward)
    def chosen(self: Any, *given: Any, run: Callable[..., Any] | None = None, **named: Any) -> Any:
        return forward(self, *given, **named) if run is None else run(*given, **named)

    chosen.takes_run = True  # type: ignore[attr-defined]
    return cast(F, chosen)


def entered(module: Any, run: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """``run(*given, **named)`` as a call of the module: between its hooks.

    So what a hook computes (a pruned or normalised weight, gathered shards) is there while ``run``
    runs, and hooks see, and may change, what goes in and comes out. A module that is no
    :class:`~pararnn.Cell` may have any ``forward``; it stands aside for this call.
    """
    if getattr(type(module).forward, "takes_run", False):
        return module(*given, run=run, **named)
    if not any(getattr(module, name) for name in HOOKS):
        return run(*given, **named)
    before = module.__dict__.get("forward")

    def restore() -> None:
        module.__dict__.pop("forward", None)
        if before is not None:
            module.__dict__["forward"] = before

    def forward(*given: Any, **named: Any) -> Any:
        restore()  # a step of the module may be its forward
        return run(*given, **named)

    module.__dict__["forward"] = forward
    try:
        return module(*given, **named)
    finally:
        restore()


def hooks(module: nn.Module, kind: str) -> int:
    """Number of hooks of a kind, one of :data:`HOOKS`."""
    return len(getattr(module, kind))
