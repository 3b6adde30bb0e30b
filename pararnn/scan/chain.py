"""The delta rule on a GPU: matrix products, and all starts of its chunks in one kernel.

Inside a chunk there are matrix products only, of all chunks at once: triangular systems are inverted
by products, too (:mod:`.triangular`). Between the chunks runs the recurrence ``x_t = A_t x_{t−1} + b_t`` of matrix states, which is short and would be many small calls;
here the state stays on the chip. Its adjoint is the same kernel, backwards. A second derivative
takes the eager scan.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..kernels import missing
from ..kernels.support import on_device_of
from .backend import Fused, register_fused
from .triangular import unit_lower_inverse
from .wy import Pieces, left_scan, side_by_side, substituted

LARGEST = 128
"""Rows of an operator that a program holds."""


@torch.library.custom_op("pararnn::chain", mutates_args=())
def chain(op: Tensor, b: Tensor, start: Tensor) -> Tensor:
    """States ``(N, T, k, v)`` of operators ``(N, T, k, k)`` and inputs ``(N, T, k, v)``, from
    ``start (N, k, v)``; float32."""
    return _walk(op, b, start, False)


@torch.library.custom_op("pararnn::chain_back", mutates_args=())
def chain_back(op: Tensor, g: Tensor) -> Tensor:
    """Cotangents ``(N, T, k, v)`` of the states, from those of the output."""
    return _walk(op, g, None, True)


def _walk(op: Tensor, b: Tensor, start: Tensor | None, back: bool) -> Tensor:
    if b.numel() == 0:
        return torch.empty_like(b, memory_format=torch.contiguous_format)
    from ..kernels.chain import run_chain

    first = None if start is None else start.contiguous()
    with on_device_of(b):
        return run_chain(op.contiguous(), b.contiguous(), first, back)


@chain.register_fake
def _(op: Tensor, b: Tensor, start: Tensor) -> Tensor:
    return torch.empty_like(b, memory_format=torch.contiguous_format)


@chain_back.register_fake
def _(op: Tensor, g: Tensor) -> Tensor:
    return torch.empty_like(g, memory_format=torch.contiguous_format)


def recorded(*given: Tensor) -> list[Tensor]:
    """Tensors to differentiate by, apart from what they are made from."""
    views = [x.view_as(x) if x.requires_grad else x.detach() for x in given]
    return [x.requires_grad_() for x in views]


def _setup(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs, output)


def _gradients(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    op, b, start, states = ctx.saved_tensors
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        given = recorded(op, b, start)
        found = torch.autograd.grad(left_scan(*given), given, g, create_graph=True)
        return found[0], found[1], found[2]
    cotangents = chain_back(op, g)
    before = torch.cat([start.unsqueeze(1), states[:, :-1]], 1)
    return cotangents @ before.mT, cotangents, op[:, 0].mT @ cotangents[:, 0]


chain.register_autograd(_gradients, setup_context=_setup)


class Solve(torch.autograd.Function):
    """``(I + L)⁻¹ b`` for strictly lower triangular ``L``, by the inverse."""

    @staticmethod
    def forward(ctx: Any, below: Tensor, b: Tensor) -> Tensor:
        inverse = unit_lower_inverse(below)
        solved = inverse @ b
        ctx.save_for_backward(below, b, inverse, solved)
        return solved

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        below, b, inverse, solved = ctx.saved_tensors
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            given = recorded(below, b)
            found = torch.autograd.grad(substituted(*given), given, g, create_graph=True)
            return found[0], found[1]
        moved = inverse.mT @ g
        return (moved @ solved.mT).tril(-1).neg_(), moved


def fused_chunks(pieces: Pieces, start: Tensor) -> tuple[Tensor, Tensor]:
    """:func:`~.wy.side_by_side`, by products and the kernel."""
    return side_by_side(pieces, start, Solve.apply, chain)


def _lacks(q: Tensor, k: Tensor, *others: Tensor | None) -> str | None:
    """Why the kernel cannot run a delta rule; None if it can."""
    if q.shape[-1] > LARGEST:
        return f"the kernel holds states of at most {LARGEST} rows, not dk={q.shape[-1]}"
    if any(x is not None and x.dtype == torch.float64 for x in (q, k, *others)):
        return "the kernel computes in float32, and there is a float64 tensor"
    if torch._C._are_functorch_transforms_active():
        return "torch.func transforms the eager scan only"
    return None if torch.compiler.is_compiling() else missing(q.device)


register_fused("delta_scan", Fused(_lacks, fused_chunks))
