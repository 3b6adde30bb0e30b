"""Solving a recurrence as one differentiable operation, by the implicit function theorem.

The states solve ``h_t = f(h_{t−1}, u_t)``. Their cotangents ``λ`` solve the linear adjoint
``λ_t = g_t + J_{t+1}ᵀ λ_{t+1}``, and the gradients of inputs and parameters are those of one step
at every ``t``, weighted by ``λ_t``. The adjoint is a recurrence too, so the same engine (or, where
Jacobians are diagonal, one scan) solves it. Second derivatives differentiate this once more, with
the tangent recurrence in the place of the adjoint.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..scan import Block, Diagonal, affine_scan
from .config import TOLERANCE
from .cost import chunk_length
from .dynamics import Coefficients
from .engine import Plan, run
from .partition import Partition
from .walkers import Dynamics, LinearWalker, _per_state

MakeDynamics = Callable[[tuple[Tensor, ...]], Dynamics]
LINEAR_CAP = 64
BLOCK = 32_768  # numbers of a slot that the backward pass treats at a time, to stay in cache


@dataclass
class Problem:
    """A recurrence and how to solve it forwards; carries the report out of autograd."""

    make: MakeDynamics
    forward: Callable[[Dynamics, Tensor, Tensor], Tensor]
    resets: Tensor | None

    def previous(self, states: Tensor, h0: Tensor) -> Tensor:
        """The state before every step, after resets."""
        return self.restarted(torch.cat([h0.unsqueeze(1), states[:, :-1]], 1))

    def restarted(self, before: Tensor) -> Tensor:
        """States before every step, with zero where a reset restarts them."""
        if self.resets is None:
            return before
        return torch.where(_per_state(self.resets, before), torch.zeros_like(before), before)


def linear_solve(
    dynamics: Dynamics,
    coefficients: Coefficients,
    b: Tensor,
    x0: Tensor,
    resets: Tensor | None,
    *,
    reverse: bool,
) -> Tensor:
    """States of ``x_t = J_t x_{t−1} + b_t`` (``reverse``: ``x_t = J_tᵀ x_{t+1} + b_t``)."""
    if b.shape[1] == 0:
        return torch.empty_like(b)
    algebra = dynamics.algebra("exact")
    if isinstance(algebra, Diagonal | Block):
        op = dynamics.operator(coefficients, "exact")
        if resets is not None:
            op = op.masked_fill(_per_state(resets, op), 0)
        op = algebra.transpose(op) if reverse else op
        return affine_scan(op, b, x0, algebra=algebra, reverse=reverse)
    out = torch.empty_like(b, memory_format=torch.contiguous_format)
    length, warmup = chunk_length(b.shape[1], x0.numel(), b.device.type)
    walker = LinearWalker(
        dynamics, coefficients, b, resets, Partition(b.shape[1], length, reverse), out
    )
    largest = torch.maximum(b.flatten(1).abs().amax(1), x0.flatten(1).abs().amax(1))
    scale = largest.clamp_min(torch.finfo(b.dtype).tiny).reshape(-1, 1, *(1,) * (x0.ndim - 1))
    kind = dynamics.cheap_kind
    plan = Plan(TOLERANCE[b.dtype], scale, warmup, "none", kind, None, LINEAR_CAP, True)
    run(walker, x0, plan)
    return out


def _adjoint(
    problem: Problem, dynamics: Dynamics, before: Tensor, u: Tensor, g: Tensor
) -> Tensor:
    """Cotangents ``λ_t`` of every state, from the cotangents ``g_t`` of the outputs."""
    if g.shape[1] == 0:
        return g.clone()
    resets = None if problem.resets is None else problem.resets[:, 1:]
    later = dynamics.coefficients(before[:, 1:], u[:, 1:])
    rest = linear_solve(dynamics, later, g[:, :-1], g[:, -1], resets, reverse=True)
    return torch.cat([rest, g[:, -1:]], 1)


class Solve(torch.autograd.Function):
    """``(u, h0, *parameters) → states``, differentiable twice."""

    @staticmethod
    def forward(ctx: Any, problem: Problem, u: Tensor, h0: Tensor, *params: Tensor) -> Tensor:
        dynamics = problem.make(params)
        states = problem.forward(dynamics, u, h0)
        ctx.problem = problem
        ctx.save_for_backward(u, h0, states, *params)
        return states

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        u, h0, states, *params = ctx.saved_tensors
        problem: Problem = ctx.problem
        dynamics = problem.make(tuple(params))
        if torch.is_grad_enabled():
            before = problem.previous(states, h0)
            cotangents = AdjointSolve.apply(problem, g, before, u, *params)
            h_bar, u_bar, grads = dynamics.gradients(before, u, cotangents)
        else:
            before = problem.previous(states, h0)
            cotangents = _adjoint(problem, dynamics, before, u, g)
            h_bar, u_bar, grads = dynamics.gradients(before, u, cotangents)
        h0_bar = h_bar[:, 0] if u.shape[1] else torch.zeros_like(h0)
        if problem.resets is not None and u.shape[1]:
            h0_bar = torch.where(
                _per_state(problem.resets[:, 0], h0_bar), torch.zeros_like(h0_bar), h0_bar
            )
        return None, u_bar, h0_bar, *grads


class AdjointSolve(torch.autograd.Function):
    """``(g, h_{t−1}, u, *parameters) → λ``; its derivative solves the tangent recurrence."""

    @staticmethod
    def forward(
        ctx: Any, problem: Problem, g: Tensor, before: Tensor, u: Tensor, *params: Tensor
    ) -> Tensor:
        cotangents = _adjoint(problem, problem.make(params), before, u, g)
        ctx.problem = problem
        ctx.save_for_backward(before, u, cotangents, *params)
        return cotangents

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, v: Tensor) -> tuple[Tensor | None, ...]:
        before, u, cotangents, *params = ctx.saved_tensors
        problem: Problem = ctx.problem
        dynamics = problem.make(tuple(params))
        coefficients = dynamics.coefficients(before, u)
        zero = torch.zeros_like(before[:, 0])
        tangents = linear_solve(dynamics, coefficients, v, zero, problem.resets, reverse=False)
        # d/d(h, u, θ) of Σ_t λ_tᵀ J_t δ_{t−1}, with λ and δ held fixed.
        moved = problem.previous(tangents, zero)
        with torch.enable_grad():
            inputs = [t.detach().requires_grad_() for t in (before, u, *params)]
            live = problem.make(tuple(inputs[2:]))
            product = live.tangent(live.coefficients(inputs[0], inputs[1]), moved)
            grads = torch.autograd.grad(product, inputs, cotangents, allow_unused=True)
        return None, tangents, *grads
