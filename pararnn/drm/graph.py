"""The end of a forward pass: what a second backward pass through it is told, and idle parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

_SECOND = (
    "DRM: got a backward pass through the graph of a state or stream whose own backward pass is over, or whose parameters "
    "have been updated since, expected a state without that graph; go on from its detach(), or take one "
    "backward pass, of the summed losses, before the update."
)


T = TypeVar("T")


def mapped(value: T, change: Callable[[Tensor], Tensor]) -> T:
    """The same, with every tensor changed: of dataclasses, tuples, and what they are made of."""
    new: object = value
    if isinstance(value, Tensor):
        new = change(value)
    elif isinstance(value, tuple):
        new = tuple(mapped(item, change) for item in value)
    elif is_dataclass(value) and not isinstance(value, type):
        parts = {f.name: mapped(getattr(value, f.name), change) for f in fields(value)}
        new = replace(value, **parts)
    return cast(T, new)


def tensors(value: object) -> list[Tensor]:
    """Those that :func:`mapped` changes, in its order."""
    found: list[Tensor] = []

    def kept(x: Tensor) -> Tensor:
        found.append(x)
        return x

    mapped(value, kept)
    return found


def ended(
    values: Sequence[Tensor | None], idle: Sequence[Tensor], used: Sequence[Tensor]
) -> list[Tensor | None]:
    """The same values, through one node that every backward pass through any of them meets first.

    Parameters
    ----------
    values
        States and memories; None stays None.
    idle
        Parameters that none of them depends on: they get a gradient of zeros, if they are trained (which a
        transform of ``torch.func`` hides).
    used
        Weights whose values the backward pass of ``values`` needs.

    Raises
    ------
    RuntimeError
        In a backward pass, if an earlier one has freed the graph, or a weight was changed in place; in compiled
        code PyTorch's own.
    """
    known = [v for v in values if v is not None]
    learned = [p for p in used if p.requires_grad]
    if not torch.is_grad_enabled() or not known:
        return list(values)
    if torch.compiler.is_compiling():  # which traces no error of a backward pass
        nothing = sum((p.flatten()[:0].sum() for p in idle), start=known[0].new_zeros(()))
        return [None if v is None else v + nothing.to(v.dtype) for v in values]
    through = iter(_End.apply(len(known), len(idle), *known, *idle, *learned))
    return [None if v is None else next(through) for v in values]


class _End(torch.autograd.Function):
    """``(*values, *idle, *used) → values``."""

    generate_vmap_rule = True

    @staticmethod
    def forward(count: int, idle: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.clone() for x in tensors[:count])  # a view may be of a parameter

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.count, ctx.idle, ctx.all = inputs[0], inputs[1], len(inputs) - 2
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[2 + ctx.count :])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        try:
            parameters = ctx.saved_tensors
        except RuntimeError as error:
            raise RuntimeError(_SECOND) from error
        idle = [torch.zeros_like(p) for p in parameters[: ctx.idle]]
        rest = ctx.all - ctx.count - ctx.idle
        return None, None, *grads, *idle, *(None,) * rest

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[Any, ...]:
        return tuple(None if t is None else t.clone() for t in tangents[2 : 2 + ctx.count])
