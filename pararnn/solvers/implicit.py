"""Solving a recurrence as one differentiable operation, by the implicit function theorem.

The states solve ``h_t = f(h_{t−1}, u_t)``. Their cotangents ``λ`` solve the linear adjoint
``λ_t = g_t + J_{t+1}ᵀ λ_{t+1}``, and the gradients of inputs and parameters are those of one step
at every ``t``, weighted by ``λ_t``. The adjoint is a recurrence too, so the same engine (or, where
Jacobians are diagonal, one scan) solves it. Second derivatives differentiate this once more, with
the tangent recurrence in the place of the adjoint.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from .._checks import full_precision
from .._precision import exactly
from ..scan import Algebra, Block, Diagonal, Flat, Left, affine_scan
from ..scan.autograd import doubtful, reached
from .columns import column_scan
from .config import TOLERANCE
from .cost import chunk_length
from .dynamics import Coefficients
from .engine import Plan, run
from .partition import Partition
from .walkers import Dynamics, LinearWalker, cut

MakeDynamics = Callable[[tuple[Tensor, ...]], Dynamics]
Solver = Callable[[Dynamics, Tensor, Tensor], Tensor]
LINEAR_CAP = 64
GROUP = 1 << 19
"""Numbers of the state whose backward pass the CPU computes at a time, where rows can be taken
apart: intermediates then stay in cache, and memory does not grow with the batch."""


@dataclass
class Problem:
    """A recurrence. It outlives its solve, in what autograd keeps, so it holds no states."""

    make: MakeDynamics
    resets: Tensor | None

    def rows(self, rows: slice) -> Problem:
        """The same problem for some rows of the batch."""
        return replace(self, resets=None if self.resets is None else self.resets[rows])

    def previous(self, states: Tensor, h0: Tensor) -> Tensor:
        """The state before every step, after resets."""
        return self.restarted(torch.cat([h0.unsqueeze(1), states[:, :-1]], 1))

    def first(self, h0: Tensor) -> Tensor:
        """The state before the first step, ``(B, 1, ...)``."""
        return cut(h0.unsqueeze(1), None if self.resets is None else self.resets[:, :1])

    def restarted(self, before: Tensor) -> Tensor:
        """States before every step, with zero where a reset restarts them."""
        return cut(before, self.resets)


def silent(problem: Problem, states: Tensor, u: Tensor, h0: Tensor, g: Tensor) -> Tensor | None:
    """Steps ``(B, T)`` with numbers that are not finite and that no cotangent reaches, such as those
    before a reset: a product with a cotangent of zero would make a NaN of them. None if there are
    none."""
    if not doubtful(states, u, h0):
        return None
    with torch.no_grad():
        before = problem.previous(states, h0).flatten(2)
        finite = before.isfinite().all(2) & u.isfinite().all(2)
        idle = ~reached((g != 0).flatten(2).any(2), problem.resets, reverse=True)
        return idle & ~finite


def formed(dynamics: Dynamics) -> bool:
    """Whether exact operators are cheap enough that one scan over them solves linear systems."""
    return isinstance(dynamics.algebra("exact"), Diagonal | Block | Flat | Left)


@dataclass
class Linearization:
    """``J_t`` of a range of steps at the states ``before``, as coefficients; where ``resets`` is
    set, ``J_t`` is zero."""

    dynamics: Dynamics
    coefficients: Coefficients
    before: Tensor
    resets: Tensor | None

    def from_step(self, first: int) -> Linearization:
        """The same for the steps from ``first`` on."""
        return Linearization(
            self.dynamics,
            tuple(c[:, first:] for c in self.coefficients),
            self.before[:, first:],
            None if self.resets is None else self.resets[:, first:],
        )

    def solve(self, b: Tensor, x0: Tensor, *, reverse: bool, out: Tensor | None = None) -> Tensor:
        """States of ``x_t = J_t x_{t−1} + b_t`` (``reverse``: ``x_t = J_tᵀ x_{t+1} + b_t``)."""
        if out is None:
            out = torch.empty_like(b, memory_format=torch.contiguous_format)
        if b.shape[1] == 0:
            return out
        if formed(self.dynamics):
            algebra = cast(Algebra, self.dynamics.algebra("exact"))
            if isinstance(algebra, Block) and getattr(self.dynamics, "linear", False):
                act = self.dynamics.transpose if reverse else self.dynamics.tangent
                arguments = (act, self.coefficients, b, x0, self.resets)
                return column_scan(*arguments, axes=algebra.axes, reverse=reverse, out=out)
            op = self.dynamics.operator(self.coefficients, "exact", self.before)
            op = algebra.transpose(op) if reverse else op
            return affine_scan(
                op, b, x0, algebra=algebra, resets=self.resets, reverse=reverse, out=out
            )
        length, warmup = chunk_length(b.shape[1], x0.numel(), b.device.type)
        partition = Partition(b.shape[1], length, reverse)
        walker = LinearWalker(self.dynamics, self.coefficients, b, self.resets, partition, out)
        kind = self.dynamics.cheap_kind
        run(walker, x0, Plan(TOLERANCE[b.dtype], warmup, "none", kind, None, LINEAR_CAP, True))
        return out


def linearized(problem: Problem, dynamics: Dynamics, before: Tensor, u: Tensor) -> Linearization:
    """Linearization at the states ``before`` every step, which are after resets."""
    return Linearization(dynamics, dynamics.coefficients(before, u), before, problem.resets)


def _adjoint(linear: Linearization, g: Tensor) -> Tensor:
    """Cotangents ``λ_t`` of every state, from the cotangents ``g_t`` of the outputs."""
    out = torch.empty_like(g, memory_format=torch.contiguous_format)
    if g.shape[1]:
        out[:, -1] = g[:, -1]
        linear.from_step(1).solve(g[:, :-1], g[:, -1], reverse=True, out=out[:, :-1])
    return out


def _first_cotangent(
    problem: Problem, dynamics: Dynamics, before: Tensor, u: Tensor, cotangent: Tensor
) -> Tensor:
    """Cotangent of ``h0``, from that of the first state ``(B, 1, ...)``."""
    moved = dynamics.transpose(dynamics.coefficients(before, u), cotangent)
    moved = cut(moved, None if problem.resets is None else problem.resets[:, :1])
    return moved.squeeze(1)


class Solve(torch.autograd.Function):
    """``(u, h0, *parameters) → states`` by ``solver(dynamics, u, h0)``, differentiable twice. The
    solver is not kept."""

    @staticmethod
    def forward(
        ctx: Any, problem: Problem, solver: Solver, u: Tensor, h0: Tensor, *params: Tensor
    ) -> Tensor:
        with full_precision(u.device):
            states = solver(problem.make(params), u, h0)
        ctx.problem = problem
        ctx.save_for_backward(u, h0, states, *params)
        return states

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        u, h0, states, *params = ctx.saved_tensors
        problem: Problem = ctx.problem
        dynamics = problem.make(tuple(params))
        if u.shape[1] == 0:
            return None, None, *(torch.zeros_like(t) for t in (u, h0, *params))
        if torch.is_grad_enabled():
            u_bar, h0_bar, grads = differentiable_gradients(
                problem, dynamics, states, u, h0, g, tuple(params)
            )
        else:
            with full_precision(g.device):
                u_bar, h0_bar, grads = first_order(problem, dynamics, states, u, h0, g)
        cast = (None if g is None else g.to(p.dtype) for g, p in zip(grads, params, strict=True))
        return None, None, u_bar, h0_bar, *cast


def differentiable_gradients(
    problem: Problem,
    dynamics: Dynamics,
    states: Tensor,
    u: Tensor,
    h0: Tensor,
    g: Tensor,
    params: tuple[Tensor, ...],
) -> tuple[Tensor, Tensor, list[Tensor | None]]:
    """Cotangents of ``u``, of ``h0`` and of the parameters, which can be differentiated again."""
    skipped = silent(problem, states, u, h0, g)
    before, u = cut(problem.previous(states, h0), skipped), cut(u, skipped)
    known: list[bool] = []  # which parameters have a cotangent

    def run(g: Tensor, before: Tensor, u: Tensor, *params: Tensor) -> tuple[Tensor, ...]:
        dynamics = problem.make(params)
        cotangents = AdjointSolve.apply(problem, g, before, u, *params)
        values = dynamics.linearization(before, u)
        u_bar, grads = dynamics.gradients(values, before, u, cotangents)
        first = _first_cotangent(problem, dynamics, before[:, :1], u[:, :1], cotangents[:, :1])
        known[:] = [grad is not None for grad in grads]
        return u_bar, first, *(grad for grad in grads if grad is not None)

    u_bar, first, *grads = exactly(run, u.device, g, before, u, *params)
    each = iter(grads)
    return u_bar, first, [next(each) if there else None for there in known]


def first_order(
    problem: Problem, dynamics: Dynamics, states: Tensor, u: Tensor, h0: Tensor, g: Tensor
) -> tuple[Tensor, Tensor, list[Tensor | None]]:
    """Cotangents of ``u``, of ``h0`` and of the parameters, some rows at a time."""
    skipped = silent(problem, states, u, h0, g)
    u = cut(u, skipped)
    u_bar = torch.empty_like(u, memory_format=torch.contiguous_format)
    first = []
    totals: list[Tensor | None] = [None] * len(dynamics.raw_params)
    size = max(1, u.shape[0])
    if u.device.type == "cpu" and formed(dynamics):
        size = max(1, GROUP // max(1, states[:1].numel()))
    for i in range(0, u.shape[0], size):
        rows = slice(i, i + size)
        part = problem.rows(rows)
        before, drive = part.previous(states[rows], h0[rows]), u[rows]
        before = before if skipped is None else cut(before, skipped[rows])
        values = dynamics.linearization(before, drive)
        linear = Linearization(dynamics, values[: dynamics.n_state], before, part.resets)
        cotangents = _adjoint(linear, g[rows])
        _, grads = dynamics.gradients(values, before, drive, cotangents, u_bar[rows])
        totals = [_plus(a, b) for a, b in zip(totals, grads, strict=True)]
        first.append(cotangents[:, :1])
    cotangents = torch.cat(first) if first else g[:, :1]
    before = cut(problem.first(h0), None if skipped is None else skipped[:, :1])
    h0_bar = _first_cotangent(problem, dynamics, before, u[:, :1], cotangents)
    return u_bar, h0_bar, totals


def _plus(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a + b


class AdjointSolve(torch.autograd.Function):
    """``(g, h_{t−1}, u, *parameters) → λ``; its derivative solves the tangent recurrence."""

    @staticmethod
    def forward(
        ctx: Any, problem: Problem, g: Tensor, before: Tensor, u: Tensor, *params: Tensor
    ) -> Tensor:
        cotangents = _adjoint(linearized(problem, problem.make(params), before, u), g)
        ctx.problem = problem
        ctx.save_for_backward(before, u, cotangents, *params)
        return cotangents

    @staticmethod
    def backward(ctx: Any, v: Tensor) -> tuple[Tensor | None, ...]:
        with torch.no_grad(), full_precision(v.device):
            found = AdjointSolve._backward(ctx, v)
        if not torch.is_grad_enabled():
            return found
        given = [g for g in found if g is not None]
        last = iter(LastDerivative.apply(len(given), *given, v, *ctx.saved_tensors))
        return tuple(None if g is None else next(last) for g in found)

    @staticmethod
    def _backward(ctx: Any, v: Tensor) -> tuple[Tensor | None, ...]:
        before, u, cotangents, *params = ctx.saved_tensors
        problem: Problem = ctx.problem
        dynamics = problem.make(tuple(params))
        linear = linearized(problem, dynamics, before, u)
        zero = torch.zeros_like(before[:, 0])
        tangents = linear.solve(v, zero, reverse=False)
        # d/d(h, u, θ) of Σ_t λ_tᵀ J_t δ_{t−1}, with λ and δ held fixed.
        moved = problem.previous(tangents, zero)
        with torch.enable_grad():
            inputs = [t.detach().requires_grad_() for t in (before, u, *params)]
            live = problem.make(tuple(inputs[2:]))
            product = live.tangent(live.coefficients(inputs[0], inputs[1]), moved)
            if not product.requires_grad:  # J is constant
                return None, tangents, *(None for _ in inputs)
            grads = torch.autograd.grad(product, inputs, cotangents, allow_unused=True)
        return None, tangents, *grads


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
