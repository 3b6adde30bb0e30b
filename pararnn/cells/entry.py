"""How cells and layers are called: names and order of arguments, and entering a cell, so that what a
layer runs on it is a call of the module, between its hooks."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

from torch import Tensor

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")

F = TypeVar("F", bound=Callable[..., Any])


def spelled(**others: str) -> Callable[[F], F]:
    """For a method that takes arguments under other names, too: ``spelled(h_0="h0")``."""

    def decorate(method: F) -> F:
        own = inspect.signature(method)
        places = list(own.parameters)[1:]

        @functools.wraps(method)
        def call(self: Any, *given: Any, **named: Any) -> Any:
            for other in others.keys() & named:
                if (name := others[other]) in named or name in places[: len(given)]:
                    raise TypeError(
                        f"{name}: got it twice, also as {other}; leave one of them out."
                    )
                named[name] = named.pop(other)
            return method(self, *given, **named)

        kind = inspect.Parameter.KEYWORD_ONLY
        more = [inspect.Parameter(other, kind, default=None) for other in others]
        shown = own.replace(parameters=[*own.parameters.values(), *more])
        call.__signature__ = shown  # type: ignore[attr-defined]
        return cast(F, call)

    return decorate


def in_order(call: str, x: object, h: object, d_in: int | None, numbers: int) -> None:
    """Raise a ``TypeError`` if a layer's ``call(x, h)`` got the state first, where shapes tell: ``x``
    has as many ``numbers`` a sample as a state, and ``h`` is an input ``(B, d_in)``."""
    swapped = isinstance(x, list | tuple)
    if isinstance(x, Tensor) and isinstance(h, Tensor) and h.ndim == 2:
        inputs = [v.ndim == 2 and d_in in (None, v.shape[1]) for v in (x, h)]
        swapped = inputs == [False, True] and x.numel() == numbers * h.shape[0]
    if swapped:
        raise TypeError(
            f"{call}: got the state first, expected {call}(x, h): a layer takes its input first, as "
            "in forward(x, h0), and a cell's step the state; swap them, or name them, "
            f"{call}(x=…, h=…)."
        )


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
