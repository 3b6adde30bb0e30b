"""The fused part of the delta rule: all starts of its chunks in one kernel.

Inside a chunk there are matrix products only, of all chunks at once. Between the chunks runs the
recurrence ``x_t = A_t x_{t−1} + b_t`` of matrix states, which is short and would be many small calls;
here the state stays on the chip. Its adjoint is the same kernel, backwards. A second derivative
takes the eager scan.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..kernels import missing
from ..kernels.support import on_device_of
from .autograd import scan
from .backend import Fused, register_fused

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


def _setup(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs, output)


def _gradients(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    op, b, start, states = ctx.saved_tensors
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        views = [x.view_as(x) if x.requires_grad else x.detach() for x in (op, b, start)]
        given = [x.requires_grad_() for x in views]
        found = torch.autograd.grad(scan(*given, kind="left"), given, g, create_graph=True)
        return found[0], found[1], found[2]
    cotangents = chain_back(op, g)
    before = torch.cat([start.unsqueeze(1), states[:, :-1]], 1)
    return cotangents @ before.mT, cotangents, op[:, 0].mT @ cotangents[:, 0]


chain.register_autograd(_gradients, setup_context=_setup)


def _lacks(q: Tensor, k: Tensor, *others: Tensor | None) -> str | None:
    """Why the kernel cannot run a delta rule; None if it can."""
    if q.shape[-1] > LARGEST:
        return f"the kernel holds states of at most {LARGEST} rows, not dk={q.shape[-1]}"
    if any(x is not None and x.dtype == torch.float64 for x in (q, k, *others)):
        return "the kernel computes in float32, and there is a float64 tensor"
    if torch._C._are_functorch_transforms_active():
        return "torch.func transforms the eager scan only"
    return None if torch.compiler.is_compiling() else missing(q.device)


register_fused("delta_scan", Fused(_lacks, chain))
