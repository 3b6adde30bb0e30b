"""Solving a recurrence as one differentiable operation, by the implicit function theorem.

The states solve ``h_t = f(h_{t−1}, u_t)``. Their cotangents ``λ`` solve the linear adjoint
``λ_t = g_t + J_{t+1}ᵀ λ_{t+1}``, and the gradients of inputs and parameters are those of one step
at every ``t``, weighted by ``λ_t``. The adjoint is a recurrence too, so the same engine (or, where
Jacobians are diagonal, one scan) solves it. Second derivatives differentiate this once more, with
the tangent recurrence in the place of the adjoint.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from .._checks import full_precision
from .._precision import exactly
from ..scan import Algebra, Block, Diagonal, Flat, Left, affine_scan
from ..scan.autograd import doubtful, reached
from ..scan.inputs import cut
from .columns import column_scan
from .config import TOLERANCE
from .cost import chunk_length
from .engine import Schedule, run
from .partition import Partition
from .recurrence import Linearization, Recurrence
from .walkers import LinearWalker

Solver = Callable[[Recurrence, Tensor, Tensor], Tensor]
LINEAR_CAP = 64
GROUP = 1 << 19
"""Numbers of the state whose backward pass the CPU computes at a time, where rows can be taken
apart: intermediates then stay in cache, and memory does not grow with the batch."""


def previous(states: Tensor, h0: Tensor, resets: Tensor | None) -> Tensor:
    """The state before every step, after resets."""
    return cut(torch.cat([h0.unsqueeze(1), states[:, :-1]], 1), resets)


def silent(
    states: Tensor, u: Tensor, h0: Tensor, g: Tensor, resets: Tensor | None
) -> Tensor | None:
    """Steps ``(B, T)`` with numbers that are not finite and that no cotangent reaches, such as those
    before a reset: a product with a cotangent of zero would make a NaN of them. None if there are
    none."""
    if not doubtful(states, u, h0):
        return None
    with torch.no_grad():
        before = previous(states, h0, resets).flatten(2)
        finite = before.isfinite().all(2) & u.isfinite().all(2)
        idle = ~reached((g != 0).flatten(2).any(2), resets, reverse=True)
        return idle & ~finite


def formed(recurrence: Recurrence) -> bool:
    """Whether exact operators are cheap enough that one scan over them solves linear systems."""
    return isinstance(recurrence.algebra("exact"), Diagonal | Block | Flat | Left)


def solve_linear(
    linear: Linearization, b: Tensor, x0: Tensor, *, reverse: bool, out: Tensor | None = None
) -> Tensor:
    """States of ``x_t = J_t x_{t−1} + b_t`` (``reverse``: ``x_t = J_tᵀ x_{t+1} + b_t``)."""
    recurrence, resets = linear.recurrence, linear.resets
    if out is None:
        out = torch.empty_like(b, memory_format=torch.contiguous_format)
    if b.shape[1] == 0:
        return out
    if formed(recurrence):
        algebra = cast(Algebra, recurrence.algebra("exact"))
        if isinstance(algebra, Block) and recurrence.linear:
            act = recurrence.transpose if reverse else recurrence.tangent
            arguments = (act, linear.coefficients, b, x0, resets)
            return column_scan(*arguments, axes=algebra.axes, reverse=reverse, out=out)
        op = recurrence.operator(linear.coefficients, "exact", linear.before)
        op = algebra.transpose(op) if reverse else op
        return affine_scan(op, b, x0, algebra=algebra, resets=resets, reverse=reverse, out=out)
    length, warmup = chunk_length(b.shape[1], x0.numel(), b.device.type)
    walker = LinearWalker(linear, b, Partition(b.shape[1], length, reverse), out)
    cheap = recurrence.cheap_kind
    run(walker, x0, Schedule(TOLERANCE[b.dtype], warmup, "none", cheap, None, LINEAR_CAP, True))
    return out


def _adjoint(linear: Linearization, g: Tensor) -> Tensor:
    """Cotangents ``λ_t`` of every state, from the cotangents ``g_t`` of the outputs."""
    out = torch.empty_like(g, memory_format=torch.contiguous_format)
    if g.shape[1]:
        out[:, -1] = g[:, -1]
        later = linear.at((slice(None), slice(1, None)))
        solve_linear(later, g[:, :-1], g[:, -1], reverse=True, out=out[:, :-1])
    return out


def _first_cotangent(
    recurrence: Recurrence, before: Tensor, u: Tensor, cotangent: Tensor, resets: Tensor | None
) -> Tensor:
    """Cotangent of ``h0``, from what the first step reads and the cotangent of its result, all with a
    dimension of time."""
    cuts = None if resets is None else resets[:, :1]
    return recurrence.linearized(before, u, cuts).apply(cotangent, reverse=True).squeeze(1)


class Solve(torch.autograd.Function):
    """``(u, h0, *parameters) → states`` by ``solver(recurrence, u, h0)``, differentiable twice. The
    solver is not kept."""

    @staticmethod
    def forward(
        ctx: Any,
        recurrence: Recurrence,
        resets: Tensor | None,
        solver: Solver,
        u: Tensor,
        h0: Tensor,
        *params: Tensor,
    ) -> Tensor:
        with full_precision(u.device):
            states = solver(recurrence.using(params), u, h0)
        ctx.recurrence, ctx.resets = recurrence, resets
        ctx.save_for_backward(u, h0, states, *params)
        return states

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        u, h0, states, *params = ctx.saved_tensors
        if u.shape[1] == 0:
            return None, None, None, *(torch.zeros_like(t) for t in (u, h0, *params))
        recurrence = ctx.recurrence.using(params)
        gradients = differentiable_gradients if torch.is_grad_enabled() else first_order
        with full_precision(g.device):
            u_bar, h0_bar, grads = gradients(recurrence, ctx.resets, states, u, h0, g)
        cast = (None if g is None else g.to(p.dtype) for g, p in zip(grads, params, strict=True))
        return None, None, None, u_bar, h0_bar, *cast


Gradients = tuple[Tensor, Tensor, list[Tensor | None]]
"""Cotangents of ``u``, of ``h0`` and of the parameters."""


def differentiable_gradients(
    recurrence: Recurrence,
    resets: Tensor | None,
    states: Tensor,
    u: Tensor,
    h0: Tensor,
    g: Tensor,
) -> Gradients:
    """Gradients that can be differentiated again."""
    skipped = silent(states, u, h0, g, resets)
    before, u = cut(previous(states, h0, resets), skipped), cut(u, skipped)
    known: list[bool] = []  # which parameters have a cotangent

    def run(g: Tensor, before: Tensor, u: Tensor, *params: Tensor) -> tuple[Tensor, ...]:
        live = recurrence.using(params)
        cotangents = AdjointSolve.apply(recurrence, resets, g, before, u, *params)
        values = live.linearization(before, u)
        u_bar, grads = live.gradients(values, before, u, cotangents)
        first = _first_cotangent(live, before[:, :1], u[:, :1], cotangents[:, :1], resets)
        known[:] = [grad is not None for grad in grads]
        return u_bar, first, *(grad for grad in grads if grad is not None)

    u_bar, first, *grads = exactly(run, u.device, g, before, u, *recurrence.raw_params)
    each = iter(grads)
    return u_bar, first, [next(each) if there else None for there in known]


def first_order(
    recurrence: Recurrence,
    resets: Tensor | None,
    states: Tensor,
    u: Tensor,
    h0: Tensor,
    g: Tensor,
) -> Gradients:
    """Gradients of some rows at a time."""
    skipped = silent(states, u, h0, g, resets)
    u = cut(u, skipped)
    u_bar = torch.empty_like(u, memory_format=torch.contiguous_format)
    first = []
    totals: list[Tensor | None] = [None] * len(recurrence.raw_params)
    size = max(1, u.shape[0])
    if u.device.type == "cpu" and formed(recurrence):
        size = max(1, GROUP // max(1, states[:1].numel()))
    for i in range(0, u.shape[0], size):
        rows = slice(i, i + size)
        local = None if resets is None else resets[rows]
        before, drive = previous(states[rows], h0[rows], local), u[rows]
        before = before if skipped is None else cut(before, skipped[rows])
        values = recurrence.linearization(before, drive)
        linear = Linearization(recurrence, values[: recurrence.n_state], before, local)
        cotangents = _adjoint(linear, g[rows])
        _, grads = recurrence.gradients(values, before, drive, cotangents, u_bar[rows])
        totals = [_plus(a, b) for a, b in zip(totals, grads, strict=True)]
        first.append(cotangents[:, :1])
    cotangents = torch.cat(first) if first else g[:, :1]
    cuts = None if resets is None else resets[:, :1]
    before = cut(h0.unsqueeze(1), cuts)
    before = before if skipped is None else cut(before, skipped[:, :1])
    return u_bar, _first_cotangent(recurrence, before, u[:, :1], cotangents, resets), totals


def _plus(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a + b


class AdjointSolve(torch.autograd.Function):
    """``(g, h_{t−1}, u, *parameters) → λ``; its derivative solves the tangent recurrence."""

    @staticmethod
    def forward(
        ctx: Any,
        recurrence: Recurrence,
        resets: Tensor | None,
        g: Tensor,
        before: Tensor,
        u: Tensor,
        *params: Tensor,
    ) -> Tensor:
        cotangents = _adjoint(recurrence.using(params).linearized(before, u, resets), g)
        ctx.recurrence, ctx.resets = recurrence, resets
        ctx.save_for_backward(before, u, cotangents, *params)
        return cotangents

    @staticmethod
    def backward(ctx: Any, v: Tensor) -> tuple[Tensor | None, ...]:
        with torch.no_grad(), full_precision(v.device):
            grads = AdjointSolve._backward(ctx, v)
        if not torch.is_grad_enabled():
            return None, None, *grads
        there = [g for g in grads if g is not None]
        last = iter(LastDerivative.apply(len(there), *there, v, *ctx.saved_tensors))
        return None, None, *(None if g is None else next(last) for g in grads)

    @staticmethod
    def _backward(ctx: Any, v: Tensor) -> tuple[Tensor | None, ...]:
        before, u, cotangents, *params = ctx.saved_tensors
        linear = ctx.recurrence.using(params).linearized(before, u, ctx.resets)
        zero = torch.zeros_like(before[:, 0])
        tangents = solve_linear(linear, v, zero, reverse=False)
        # d/d(h, u, θ) of Σ_t λ_tᵀ J_t δ_{t−1}, with λ and δ held fixed.
        moved = previous(tangents, zero, ctx.resets)
        with torch.enable_grad():
            inputs = [t.detach().requires_grad_() for t in (before, u, *params)]
            live = ctx.recurrence.using(inputs[2:])
            product = live.tangent(live.coefficients(inputs[0], inputs[1]), moved)
            if not product.requires_grad:  # J is constant
                return tangents, *(None for _ in inputs)
            grads = torch.autograd.grad(product, inputs, cotangents, allow_unused=True)
        return tangents, *grads


class LastDerivative(torch.autograd.Function):
    """The identity on the first tensors. Differentiating through it raises: it also depends on the
    other tensors, in a way that is not implemented, and must not be silently left out."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(t.view_as(t) for t in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        raise RuntimeError(
            "got a third derivative through a parallel solve, expected at most two; use "
            "method='sequential', which autograd differentiates any number of times."
        )
