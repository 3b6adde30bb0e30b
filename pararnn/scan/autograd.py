"""The affine scan as a differentiable function. Its adjoint is the reversed scan of the same kind.

With ``x_t = A_t x_{t−1} + b_t`` and cotangents ``g_t`` of the states, the cotangents of the inputs
are ``λ_t = A_{t+1}ᵀ λ_{t+1} + g_t``, those of the operators ``λ_t x_{t−1}ᵀ``, and that of the
initial state ``A_1ᵀ λ_1``. All three are scans and products, so the derivative can be
differentiated again, any number of times.

Eager calls go through :class:`AffineScan`, which ``torch.func`` can transform. Traced ones go
through an operator with the same derivative, so that compilers and exporters see one node,
whatever the length.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._checks import full_precision
from .affine import affine_scan
from .algebra import Algebra, Block, Diagonal, Left, MaxPlus

ALGEBRAS: dict[str, Algebra] = {
    "diagonal": Diagonal(),
    "block": Block(),
    "left": Left(),
    "maxplus": MaxPlus(),
}


def scan(
    op: Tensor, b: Tensor, x0: Tensor, kind: str = "diagonal", reverse: bool = False
) -> Tensor:
    """States ``(B, T, *state_shape)`` of an affine recurrence, recorded by autograd.

    ``op``, ``b`` and ``x0`` are as in :func:`~pararnn.scan.affine.affine_scan`, of one dtype;
    ``kind`` names the algebra.
    """
    if torch.compiler.is_compiling():
        return _operator(op, b, x0, kind, reverse)
    return AffineScan.apply(op, b, x0, kind, reverse)


class AffineScan(torch.autograd.Function):
    """``(op, b, x0) → states`` with derivatives of any order and rules for ``torch.func``."""

    @staticmethod
    def forward(op: Tensor, b: Tensor, x0: Tensor, kind: str, reverse: bool) -> Tensor:
        with full_precision(b.device):
            return affine_scan(op, b, x0, algebra=ALGEBRAS[kind], reverse=reverse)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _setup(ctx, inputs, output)
        ctx.save_for_forward(inputs[0], inputs[2], output)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        with full_precision(g.device):
            if torch.is_grad_enabled():
                return _backward(ctx, g, AffineScan.apply)
            return _backward_once(ctx, g)

    @staticmethod
    def jvp(
        ctx: Any, d_op: Tensor | None, d_b: Tensor | None, d_x0: Tensor | None, *_: Any
    ) -> Tensor:
        op, x0, states = ctx.saved_tensors
        forcing = torch.zeros_like(states) if d_b is None else d_b
        if d_op is not None:
            moved = ALGEBRAS[ctx.kind].apply(d_op, _previous(states, x0, ctx.reverse))
            forcing = forcing + moved
        start = torch.zeros_like(x0) if d_x0 is None else d_x0
        return AffineScan.apply(op, forcing, start, ctx.kind, ctx.reverse)

    @staticmethod
    def vmap(info: Any, dims: tuple[int | None, ...], *inputs: Any) -> tuple[Tensor, int]:
        """The mapped dimension joins the batch."""
        *tensors, kind, reverse = inputs
        folded = []
        for value, dim in zip(tensors, dims[:3], strict=True):
            batched = (
                value.unsqueeze(0).expand(info.batch_size, *value.shape)
                if dim is None
                else value.movedim(dim, 0)
            )
            folded.append(batched.flatten(0, 1))
        op, b, x0 = folded
        states = scan(op, b, x0, kind, reverse)
        return states.unflatten(0, (info.batch_size, states.shape[0] // info.batch_size)), 0


@torch.library.custom_op("pararnn::affine_scan", mutates_args=())
def _operator(op: Tensor, b: Tensor, x0: Tensor, kind: str, reverse: bool) -> Tensor:
    with full_precision(b.device):
        return affine_scan(op, b, x0, algebra=ALGEBRAS[kind], reverse=reverse)


@_operator.register_fake
def _(op: Tensor, b: Tensor, x0: Tensor, kind: str, reverse: bool) -> Tensor:
    return torch.empty_like(b, memory_format=torch.contiguous_format)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    op, _, x0, ctx.kind, ctx.reverse = inputs
    ctx.save_for_backward(op, x0, output)


def _previous(states: Tensor, x0: Tensor, reverse: bool) -> Tensor:
    """The state before every step."""
    start = x0.unsqueeze(1)
    return torch.cat([states[:, 1:], start] if reverse else [start, states[:, :-1]], 1)


def _backward(ctx: Any, g: Tensor, again: Callable[..., Tensor]) -> tuple[Tensor | None, ...]:
    """The derivative, made of differentiable operations."""
    op, x0, states = ctx.saved_tensors
    algebra, reverse = ALGEBRAS[ctx.kind], ctx.reverse
    if g.shape[1] == 0:
        return torch.zeros_like(op), torch.zeros_like(g), torch.zeros_like(x0), None, None
    adjoint = algebra.transpose(op)
    if reverse:
        rest = again(adjoint[:, :-1], g[:, 1:], g[:, 0], ctx.kind, False)
        cotangent, first = torch.cat([g[:, :1], rest], 1), -1
    else:
        rest = again(adjoint[:, 1:], g[:, :-1], g[:, -1], ctx.kind, True)
        cotangent, first = torch.cat([rest, g[:, -1:]], 1), 0
    d_op = algebra.outer(cotangent, _previous(states, x0, reverse))
    return d_op, cotangent, algebra.apply(adjoint[:, first], cotangent[:, first]), None, None


def _backward_once(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    """The same derivative where nothing is recorded, written in place."""
    op, x0, states = ctx.saved_tensors
    algebra, reverse = ALGEBRAS[ctx.kind], ctx.reverse
    if g.shape[1] == 0:
        return torch.zeros_like(op), torch.zeros_like(g), torch.zeros_like(x0), None, None
    # In the order of the recurrence: its first step, its last, all but the first, all but the last.
    first, last, later, earlier = 0, -1, slice(1, None), slice(None, -1)
    if reverse:
        first, last, later, earlier = last, first, earlier, later
    adjoint = algebra.transpose(op)
    cotangent = torch.empty_like(g, memory_format=torch.contiguous_format)
    cotangent[:, last] = g[:, last]
    affine_scan(
        adjoint[:, later],
        g[:, earlier],
        g[:, last],
        algebra=algebra,
        reverse=not reverse,
        out=cotangent[:, earlier],
    )
    d_op = d_x0 = None
    if ctx.needs_input_grad[0]:
        d_op = torch.empty_like(op, memory_format=torch.contiguous_format)
        algebra.outer(cotangent[:, later], states[:, earlier], out=d_op[:, later])
        algebra.outer(cotangent[:, first], x0, out=d_op[:, first])
    if ctx.needs_input_grad[2]:
        d_x0 = algebra.apply(adjoint[:, first], cotangent[:, first])
    return d_op, cotangent, d_x0, None, None


def _operator_backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    with full_precision(g.device):
        return _backward(ctx, g, _operator)


_operator.register_autograd(_operator_backward, setup_context=_setup)
