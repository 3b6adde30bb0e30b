"""A proof, after the fact, of how far computed states are from the true trajectory.

Newton–Kantorovich on ``F(H)_t = h_t − f(h_{t−1}, u_t)``: let ``Y`` be the largest entry of the next
Newton correction at the computed states, ``κ`` a bound of ``‖(DF)⁻¹‖`` in the maximum norm, from
``s_t = |J_t| s_{t−1} + 1``, and ``M`` a bound of the second derivative of one step. If
``2YκM < 1``, the recurrence has exactly one trajectory within ``2Y``, and it is the sequential one.
Everything is evaluated in float64, so the rounding errors of float32 states are covered too; the
rounding of the evaluation itself enters ``Y`` as ``κ`` times a few units in the last place.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..spec.bounds import derivative_bounds
from .dynamics import Coefficients, SpecDynamics
from .implicit import Problem, linear_solve

ROUNDING = 32
"""Units in the last place of float64 that evaluating one residual may be off."""


@dataclass(frozen=True)
class Certificate:
    """What was proven. ``error_bound`` is infinite if the condition does not hold.

    Attributes
    ----------
    error_bound
        Largest possible error of any state, in the maximum norm.
    correction, amplification, curvature, residual
        ``Y``, ``κ``, ``M`` and the largest residual ``|f(h_{t−1}) − h_t|``.
    reason
        Why there is no proof, or an empty string.
    """

    error_bound: float
    correction: float
    amplification: float
    curvature: float
    residual: float
    reason: str


def certify(task, states: Tensor) -> Certificate:
    """Certificate of states ``(B, T, *state_shape)`` of a prepared task (no gradient needed)."""
    with torch.no_grad():
        return _certify(task, states)


def _certify(task, states: Tensor) -> Certificate:
    dynamics = task.make(tuple(p.detach().double() for p in task.params))
    if not isinstance(dynamics, SpecDynamics):
        return _none("the cell has no Spec, so its second derivative has no bound")
    if any(b is None for b in dynamics.bounds):
        return _none("a state slot declares no bounds, so its second derivative has no bound")
    if states.numel() == 0:
        return Certificate(0.0, 0.0, 1.0, 0.0, 0.0, "")
    u, states, h0 = task.u.detach().double(), states.double(), task.h0.double()
    problem = Problem(task.make, lambda *_: states, task.resets)
    before = problem.previous(states, h0)
    residual = dynamics.step(before, u) - states
    largest = float(residual.abs().max())
    if not math.isfinite(largest):
        return _none("the states are not finite")
    coefficients = dynamics.coefficients(before, u)
    zero = torch.zeros_like(h0)
    correction = linear_solve(dynamics, coefficients, residual, zero, task.resets, reverse=False)
    kappa = _amplification(dynamics, coefficients, task.resets, zero)
    rounding = ROUNDING * torch.finfo(torch.float64).eps * max(1.0, float(states.abs().max()))
    y = float(correction.abs().max()) + kappa * rounding
    low, high = (max(abs(b[i]) for b in dynamics.bounds) for i in (0, 1))
    reach = float(states.abs().max().maximum(h0.abs().max())) + 2 * y
    params = [p.detach().cpu().numpy() for p in dynamics.raw_params]
    radius = max(1.0, reach / min(low, high))
    m = float(derivative_bounds(dynamics.spec, params, dynamics.sizes, radius)[1].max())
    product = 2 * y * kappa * m
    if not product < 1:
        return Certificate(
            math.inf, y, kappa, m, largest, f"2YκM = {product:.1e} is not below 1: no proof"
        )
    # (1 − √(1 − 2YκM)) / (κM), written so that it does not cancel for small Y.
    bound = 2 * y / (1 + math.sqrt(1 - product))
    return Certificate(bound, y, kappa, m, largest, "")


def _none(reason: str) -> Certificate:
    return Certificate(math.inf, math.nan, math.nan, math.nan, math.nan, reason)


def _amplification(
    dynamics: SpecDynamics, coefficients: Coefficients, resets: Tensor | None, zero: Tensor
) -> float:
    """``max_t s_t`` of ``s_t = |J_t| s_{t−1} + 1``."""
    majorant = _Majorant(dynamics)
    ones = torch.ones((), dtype=zero.dtype, device=zero.device)
    lead = torch.broadcast_shapes(*(c.shape[:2] for c in coefficients))
    b = ones.expand(*lead, *zero.shape[1:])
    s = linear_solve(majorant, coefficients, b, zero, resets, reverse=False)
    return float(s.max())


class _Majorant:
    """The linearized recurrence with ``|J|`` in the place of ``J``."""

    def __init__(self, dynamics: SpecDynamics):
        self._inner = dynamics
        self.cheap_kind = "none"

    def algebra(self, kind: str):
        algebra = self._inner.algebra(kind)
        return algebra if self._inner.spec.channelwise and kind == "exact" else None

    def operator(self, coefficients: Coefficients, kind: str) -> Tensor:
        return self._inner.operator(coefficients, kind).abs()

    def tangent(self, coefficients: Coefficients, v: Tensor) -> Tensor:
        return self._inner.majorant(coefficients, v)
