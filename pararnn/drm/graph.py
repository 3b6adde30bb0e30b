"""The end of a forward pass: what a second backward pass through it is told, and idle parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_SECOND = (
    "state: got a backward pass through the graph of a state whose own backward pass is over, or whose parameters "
    "have been updated since, expected a state without that graph; go on from state.detach(), or take one "
    "backward pass, of the summed losses, before the update."
)


def ended(
    values: Sequence[Tensor | None], idle: Sequence[Tensor], used: Sequence[Tensor]
) -> list[Tensor | None]:
    """The same values, through one node that every backward pass through any of them meets first.

    Parameters
    ----------
    values
        States and memories; None stays None.
    idle
        Parameters that none of them depends on: they get a gradient of zeros.
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
    if not torch.is_grad_enabled() or not any(x.requires_grad for x in (*known, *idle)):
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
        return tuple(x.view_as(x) for x in tensors[:count])

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
        return tuple(None if t is None else t.view_as(t) for t in tangents[2 : 2 + ctx.count])
