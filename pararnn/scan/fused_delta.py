"""The delta rule on a GPU: chunks all at once in kernels, and their starts in one between them.

A second derivative takes the eager path.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._checks import state_dtype
from ..kernels import missing
from ..kernels.support import on_device_of
from .backend import Fused, register_fused
from .delta import NAME, in_chunks
from .inputs import common_dtype

LARGEST = {torch.float32: 128, torch.float64: 64}
"""Rows of a state that a program holds."""


@torch.library.custom_op("pararnn::delta_chunks", mutates_args=())
def delta_chunks(
    sequences: list[Tensor], start: Tensor, most: int
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Outputs ``(B, T, H, dv)`` and the final state ``(B, H, dk, dv)``, then what the backward pass
    reads. The arguments are those of :func:`~.delta.in_chunks`."""
    from ..kernels.delta import run_delta

    with on_device_of(start):
        y, end, kept = run_delta(sequences, start.flatten(0, 1), most)
    return y, end.view(start.shape), kept


@delta_chunks.register_fake
def _(sequences: list[Tensor], start: Tensor, most: int) -> tuple[Tensor, Tensor, list[Tensor]]:
    from ..kernels.delta import Chunks

    y, *kept = Chunks(sequences, most).outputs()
    return y.squeeze(2), start.new_empty(start.shape), kept


@torch.library.custom_op("pararnn::delta_chunks_backward", mutates_args=())
def delta_chunks_backward(
    sequences: list[Tensor], kept: list[Tensor], most: int, d_y: Tensor, d_end: Tensor
) -> list[Tensor]:
    """Cotangents of the sequences and of the first state."""
    from ..kernels.delta import run_delta_back

    with on_device_of(d_end):
        found, d_start = run_delta_back(sequences, kept, most, d_y, d_end.flatten(0, 1))
    return [*found, d_start.view(d_end.shape)]


@delta_chunks_backward.register_fake
def _(
    sequences: list[Tensor], kept: list[Tensor], most: int, d_y: Tensor, d_end: Tensor
) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in (*sequences, d_end)]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    sequences, start, ctx.most = inputs
    ctx.count = len(sequences)
    ctx.save_for_backward(*sequences, start, *output[2])
    ctx.mark_non_differentiable(*output[2])


def _cotangents(ctx: Any, d_y: Tensor, d_end: Tensor, _: Any) -> tuple[Any, ...]:
    given = ctx.saved_tensors[: ctx.count + 1]
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        *found, d_start = _differentiable(given, ctx.most, (d_y, d_end))
    else:
        kept = ctx.saved_tensors[ctx.count + 1 :]
        *found, d_start = delta_chunks_backward(given[:-1], kept, ctx.most, d_y, d_end)
    return found, d_start, None


delta_chunks.register_autograd(_cotangents, setup_context=_keep)


def _differentiable(
    inputs: Sequence[Tensor], most: int, bars: tuple[Tensor, Tensor]
) -> tuple[Tensor | None, ...]:
    """Cotangents that can be differentiated again."""
    # Views, because an input may be made from another one, whose derivative is not asked for here.
    views = [x.view_as(x) for x in inputs]
    wanted = [x for x in views if x.requires_grad]
    outputs = in_chunks(views[:-1], views[-1], most)
    grads = iter(torch.autograd.grad(outputs, wanted, bars, create_graph=True))
    return tuple(next(grads) if x.requires_grad else None for x in views)


def fused_chunks(sequences: list[Tensor], start: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """:func:`~.delta.in_chunks`, by kernels."""
    if start.numel() == 0:
        return in_chunks(sequences, start, most)
    y, end, _ = delta_chunks(sequences, start, most)
    return y, end


def _lacks(q: Tensor, k: Tensor, *others: Tensor | None) -> str | None:
    """Why the kernels cannot run a delta rule; None if they can."""
    dtype = state_dtype(common_dtype(q, k, *others))
    if q.shape[-1] > LARGEST[dtype]:
        return (
            f"the kernels hold {dtype} states of at most {LARGEST[dtype]} rows, not "
            f"dk={q.shape[-1]}"
        )
    if torch._C._are_functorch_transforms_active():
        return "torch.func transforms the eager scan only"
    return None if torch.compiler.is_compiling() else missing(q.device)


register_fused(NAME, Fused(_lacks, fused_chunks))
