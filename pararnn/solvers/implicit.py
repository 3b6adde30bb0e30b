"""Solving a recurrence as one differentiable operation, by the implicit function theorem.

The states solve ``h_t = f(h_{t−1}, u_t)``. Their cotangents ``λ`` solve the linear adjoint
``λ_t = g_t + J_{t+1}ᵀ λ_{t+1}``, and the gradients of inputs and parameters are those of one step
at every ``t``, weighted by ``λ_t``. The adjoint is a recurrence too, so the same engine (or, where
Jacobians are diagonal, one scan) solves it. Second derivatives differentiate this once more, with
the tangent recurrence in the place of the adjoint.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .._checks import full_precision
from ..scan import Algebra, Block, Diagonal, affine_scan
from .config import TOLERANCE
from .cost import chunk_length
from .dynamics import Coefficients
from .engine import Plan, run
from .partition import Partition
from .walkers import Dynamics, LinearWalker, _per_state

MakeDynamics = Callable[[tuple[Tensor, ...]], Dynamics]
Source = Callable[[slice], Tensor]

LINEAR_CAP = 64
BLOCK = 65_536
"""Numbers of the state that vectorized parts of the backward pass treat at a time, to stay in
cache; what is kept is a block's results, not its intermediates."""


@dataclass
class Problem:
    """A recurrence, and how to solve it forwards."""

    make: MakeDynamics
    forward: Callable[[Dynamics, Tensor, Tensor], Tensor]
    resets: Tensor | None

    def previous(self, states: Tensor, h0: Tensor, block: slice = slice(None)) -> Tensor:
        """The state before every step of a block of time, after resets."""
        first, last, _ = block.indices(states.shape[1])
        if first == 0:
            before = torch.cat([h0.unsqueeze(1), states[:, : max(last - 1, 0)]], 1)[:, :last]
        else:
            before = states[:, first - 1 : last - 1]
        return self.restarted(before, slice(first, last))

    def restarted(self, before: Tensor, block: slice = slice(None)) -> Tensor:
        """States before every step, with zero where a reset restarts them."""
        if self.resets is None:
            return before
        mask = _per_state(self.resets[:, block], before)
        return torch.where(mask, torch.zeros_like(before), before)


def _blocks(total: int, numbers: int) -> list[slice]:
    step = max(1, BLOCK // max(numbers, 1))
    return [slice(t, min(t + step, total)) for t in range(0, total, step)]


@dataclass
class Linearization:
    """``J_t`` of a range of steps: formed operators where they are cheap, else coefficients."""

    dynamics: Dynamics
    operators: Tensor | None
    coefficients: Coefficients
    resets: Tensor | None

    @classmethod
    def at(
        cls, dynamics: Dynamics, before: Source, u: Tensor, resets: Tensor | None, first: int = 0
    ) -> Linearization:
        """Linearize at the states ``before`` of all steps from ``first`` on, block by block."""
        formed = isinstance(dynamics.algebra("exact"), Diagonal | Block)
        collected: list[Tensor] = []
        numbers = math.prod(dynamics.state_shape) * u.shape[0]
        total = u.shape[1] - first
        if total == 0:
            return cls(dynamics, None, (), None)
        for block in _blocks(total, numbers):
            time = slice(block.start + first, block.stop + first)
            h, drive = before(time), u[:, time]
            values = (
                (dynamics.operator_at(h, drive, "exact"),)
                if formed
                else dynamics.coefficients(h, drive)
            )
            if not collected:
                collected = [v.new_empty(v.shape[0], total, *v.shape[2:]) for v in values]
            for whole, part in zip(collected, values, strict=True):
                whole[:, block] = part
        resets = None if resets is None else resets[:, first:]
        if not formed:
            return cls(dynamics, None, tuple(collected), resets)
        op = collected[0]
        if resets is not None:
            op.masked_fill_(_per_state(resets, op), 0)
        return cls(dynamics, op, (), resets)

    def solve(self, b: Tensor, x0: Tensor, *, reverse: bool, out: Tensor | None = None) -> Tensor:
        """States of ``x_t = J_t x_{t−1} + b_t`` (``reverse``: ``x_t = J_tᵀ x_{t+1} + b_t``)."""
        if out is None:
            out = torch.empty_like(b, memory_format=torch.contiguous_format)
        if b.shape[1] == 0:
            return out
        if self.operators is not None:
            algebra = cast(Algebra, self.dynamics.algebra("exact"))
            op = algebra.transpose(self.operators) if reverse else self.operators
            return affine_scan(op, b, x0, algebra=algebra, reverse=reverse, out=out)
        length, warmup = chunk_length(b.shape[1], x0.numel(), b.device.type)
        partition = Partition(b.shape[1], length, reverse)
        walker = LinearWalker(self.dynamics, self.coefficients, b, self.resets, partition, out)
        largest = torch.maximum(b.flatten(1).abs().amax(1), x0.flatten(1).abs().amax(1))
        scale = largest.clamp_min(torch.finfo(b.dtype).tiny).reshape(-1, 1, *(1,) * (x0.ndim - 1))
        kind = self.dynamics.cheap_kind
        run(
            walker,
            x0,
            Plan(TOLERANCE[b.dtype], scale, warmup, "none", kind, None, LINEAR_CAP, True),
        )
        return out


def _adjoint(problem: Problem, dynamics: Dynamics, before: Source, u: Tensor, g: Tensor) -> Tensor:
    """Cotangents ``λ_t`` of every state, from the cotangents ``g_t`` of the outputs."""
    out = torch.empty_like(g, memory_format=torch.contiguous_format)
    if g.shape[1]:
        out[:, -1] = g[:, -1]
        linear = Linearization.at(dynamics, before, u, problem.resets, first=1)
        linear.solve(g[:, :-1], g[:, -1], reverse=True, out=out[:, :-1])
    return out


def _first_cotangent(
    problem: Problem, dynamics: Dynamics, before: Tensor, u: Tensor, cotangent: Tensor
) -> Tensor:
    """Cotangent of ``h0``, from that of the first state ``(B, 1, ...)``."""
    moved = dynamics.transpose(dynamics.coefficients(before, u), cotangent)
    if problem.resets is not None:
        moved = torch.where(
            _per_state(problem.resets[:, :1], moved), torch.zeros_like(moved), moved
        )
    return moved.squeeze(1)


class Solve(torch.autograd.Function):
    """``(u, h0, *parameters) → states``, differentiable twice."""

    @staticmethod
    def forward(ctx: Any, problem: Problem, u: Tensor, h0: Tensor, *params: Tensor) -> Tensor:
        with full_precision(u.device):
            states = problem.forward(problem.make(params), u, h0)
        ctx.problem = problem
        ctx.save_for_backward(u, h0, states, *params)
        return states

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        with full_precision(g.device):
            return Solve._backward(ctx, g)

    @staticmethod
    def _backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        u, h0, states, *params = ctx.saved_tensors
        problem: Problem = ctx.problem
        dynamics = problem.make(tuple(params))
        if u.shape[1] == 0:
            return None, torch.zeros_like(u), torch.zeros_like(h0), *(None for _ in params)
        if torch.is_grad_enabled():
            before = problem.previous(states, h0)
            cotangents = AdjointSolve.apply(problem, g, before, u, *params)
            u_bar, found = dynamics.gradients(before, u, cotangents)
            grads = list(found)
            first = before[:, :1]
        else:
            cotangents, u_bar, grads = _first_order(problem, dynamics, states, u, h0, g)
            first = problem.previous(states, h0, slice(0, 1))
        h0_bar = _first_cotangent(problem, dynamics, first, u[:, :1], cotangents[:, :1])
        cast = (None if g is None else g.to(p.dtype) for g, p in zip(grads, params, strict=True))
        return None, u_bar, h0_bar, *cast


def _first_order(
    problem: Problem, dynamics: Dynamics, states: Tensor, u: Tensor, h0: Tensor, g: Tensor
) -> tuple[Tensor, Tensor, list[Tensor | None]]:
    """Cotangents of states, inputs and parameters, block by block."""

    def before(block: slice) -> Tensor:
        return problem.previous(states, h0, block)

    cotangents = _adjoint(problem, dynamics, before, u, g)
    u_bar = torch.empty_like(u, memory_format=torch.contiguous_format)
    totals: list[Tensor | None] = []
    for block in _blocks(u.shape[1], h0.numel()):
        _, grads = dynamics.gradients(
            before(block), u[:, block], cotangents[:, block], u_bar[:, block]
        )
        totals = [_plus(a, b) for a, b in itertools.zip_longest(totals, grads)]
    return cotangents, u_bar, totals


def _plus(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a + b


class AdjointSolve(torch.autograd.Function):
    """``(g, h_{t−1}, u, *parameters) → λ``; its derivative solves the tangent recurrence."""

    @staticmethod
    def forward(
        ctx: Any, problem: Problem, g: Tensor, before: Tensor, u: Tensor, *params: Tensor
    ) -> Tensor:
        dynamics = problem.make(params)
        cotangents = _adjoint(problem, dynamics, lambda block: before[:, block], u, g)
        ctx.problem = problem
        ctx.save_for_backward(before, u, cotangents, *params)
        return cotangents

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, v: Tensor) -> tuple[Tensor | None, ...]:
        with full_precision(v.device):
            return AdjointSolve._backward(ctx, v)

    @staticmethod
    def _backward(ctx: Any, v: Tensor) -> tuple[Tensor | None, ...]:
        before, u, cotangents, *params = ctx.saved_tensors
        problem: Problem = ctx.problem
        dynamics = problem.make(tuple(params))
        linear = Linearization.at(dynamics, lambda block: before[:, block], u, problem.resets)
        zero = torch.zeros_like(before[:, 0])
        tangents = linear.solve(v, zero, reverse=False)
        # d/d(h, u, θ) of Σ_t λ_tᵀ J_t δ_{t−1}, with λ and δ held fixed.
        moved = problem.previous(tangents, zero)
        with torch.enable_grad():
            inputs = [t.detach().requires_grad_() for t in (before, u, *params)]
            live = problem.make(tuple(inputs[2:]))
            product = live.tangent(live.coefficients(inputs[0], inputs[1]), moved)
            grads = torch.autograd.grad(product, inputs, cotangents, allow_unused=True)
        return None, tangents, *grads
