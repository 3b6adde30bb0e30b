"""A proof, after the fact, of how far computed states are from the true trajectory.

Newton–Kantorovich on ``F(H)_t = h_t − f(h_{t−1}, u_t)``: let ``Y`` be the largest entry of the next
Newton correction at the computed states, ``κ`` a bound of ``‖(DF)⁻¹‖`` in the maximum norm, from
``s_t = |J_t| s_{t−1} + 1``, and ``M`` a bound of the second derivative of one step. If
``2YκM < 1``, the recurrence has exactly one trajectory within ``2Y``, and it is the sequential one.
A recurrence that is linear in its state has ``M = 0``, whatever the states.
Everything is evaluated in float64, so the rounding errors of float32 states are covered too; the
rounding of the evaluation itself enters ``Y`` as ``κ`` times a few units in the last place.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from ..scan import Algebra, Diagonal, affine_scan
from ..spec.bounds import derivative_bounds
from .dynamics import SpecDynamics
from .implicit import Problem, linearized
from .task import Task
from .walkers import cut

WINDOW = 16
"""Steps whose Jacobians are multiplied out before absolute values are taken."""

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


def certify(task: Task, states: Tensor) -> Certificate:
    """Certificate of states ``(B, T, *state_shape)`` of a prepared task (no gradient needed)."""
    with torch.no_grad():
        return _certify(task, states)


def _certify(task: Task, states: Tensor) -> Certificate:
    task = task.in_float64()
    dynamics = task.make(task.params)
    if not isinstance(dynamics, SpecDynamics):
        return _none("the cell has no Spec, so its second derivative has no bound")
    if dynamics.algebra("exact") is None:
        return _none("exact Jacobians of this structure are not formed")
    if states.numel() == 0:
        return Certificate(0.0, 0.0, 1.0, 0.0, 0.0, "")
    u, states, h0 = task.inputs, states.double(), task.h0
    problem = Problem(task.make, task.resets)
    before = problem.previous(states, h0)
    residual = dynamics.step(before, u) - states
    largest = float(residual.abs().max())
    if not math.isfinite(largest):
        return _none("the states are not finite")
    linear = linearized(problem, dynamics, before, u)
    correction = linear.solve(residual, torch.zeros_like(h0), reverse=False)
    kappa = max(
        _amplification(dynamics, before[i : i + 1], u[i : i + 1], resets)
        for i, resets in enumerate(_rows(task.resets, u.shape[0]))
    )
    rounding = ROUNDING * torch.finfo(torch.float64).eps * max(1.0, float(states.abs().max()))
    y = float(correction.abs().max()) + kappa * rounding
    m = _curvature(dynamics, task, float(states.abs().max().maximum(h0.abs().max())) + 2 * y)
    product = 2 * y * kappa * m if m else 0.0
    reason = ""
    if not math.isfinite(y):
        reason = "κ is too large for a number: no proof"
    elif m == math.inf and None in dynamics.bounds:
        reason = "a state slot declares no bounds, so its second derivative has no bound"
    elif not product < 1:
        reason = f"2YκM = {product:.1e} is not below 1: no proof"
    if reason:
        return Certificate(math.inf, y, kappa, m, largest, reason)
    # (1 − √(1 − 2YκM)) / (κM), written so that it does not cancel for small Y.
    bound = 2 * y / (1 + math.sqrt(1 - product))
    return Certificate(bound, y, kappa, m, largest, "")


def _curvature(dynamics: SpecDynamics, task: Task, reach: float) -> float:
    """``M`` on the states up to ``reach``: 0 for what is linear in its state, infinite for what is
    not and declares no box."""
    if dynamics.linear:
        return 0.0
    if None in dynamics.bounds:
        return math.inf
    params = [p.detach().cpu().numpy() for p in dynamics.raw_params]
    gap = math.inf if task.dt is None else float(task.dt.max())
    return float(derivative_bounds(dynamics.spec, params, dynamics.sizes, reach, gap)[1].max())


def _rows(resets: Tensor | None, batch: int) -> list[Tensor | None]:
    return [None] * batch if resets is None else list(resets.split(1))


def _none(reason: str) -> Certificate:
    return Certificate(math.inf, math.nan, math.nan, math.nan, math.nan, reason)


def _amplification(
    dynamics: SpecDynamics, before: Tensor, u: Tensor, resets: Tensor | None
) -> float:
    """``max_t s_t``, where ``s_t`` bounds ``Σ_i |J_t ⋯ J_{i+1}|·1`` of one sequence.

    Absolute values are taken of products over windows, not of every factor: ``|J_2 J_1|`` can be
    much smaller than ``|J_2||J_1|``. Between windows the recursion is ``s ← |Π| s + q``. For a
    rotation that still grows without end, and its Euclidean norm does not: the smaller of the two
    bounds counts.
    """
    algebra = cast(Algebra, dynamics.algebra("exact"))
    op = cut(dynamics.operator_at(before, u, "exact"), resets)
    total = op.shape[1]
    window = min(WINDOW, total)
    whole = total - total % window
    one = torch.ones_like(before[:, :1])
    s, peak = torch.zeros_like(one), 0.0
    for start, stop, width in ((0, whole, window), (whole, total, total - whole)):
        if start == stop:
            continue
        part = op[:, start:stop].unflatten(1, (-1, width))
        products, sums = _window(algebra, part, one)
        starts = affine_scan(products[-1], sums[-1], s[:, 0], algebra=algebra)
        starts = torch.cat([s, starts], 1)
        for product, q in zip(products, sums, strict=True):
            peak = max(peak, float((algebra.apply(product, starts[:, :-1]) + q).max()))
        s = starts[:, -1:]
    peak = peak if not math.isnan(peak) else math.inf
    return min(peak, _euclidean(algebra, op)) if dynamics.linear and peak > total else peak


def _euclidean(algebra: Algebra, op: Tensor) -> float:
    """A bound as :func:`_amplification` from ``s ← ‖J_t‖₂ s + √n`` in every block of ``n`` numbers:
    ``√n`` is the length of a vector of ones, and no entry is longer than its vector."""
    norms = algebra.norm(op)
    ones = torch.full_like(norms, math.sqrt(algebra.order(op)))
    s = affine_scan(norms, ones, torch.zeros_like(ones[:, 0]), algebra=Diagonal())
    peak = float(s.max())
    return peak if not math.isnan(peak) else math.inf


def _window(algebra: Algebra, op: Tensor, one: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """For every step of a window (all windows side by side): ``|product so far|``, and the sum of
    ``|product since i|·1`` over its steps ``i``."""
    products: list[Tensor] = []
    sums: list[Tensor] = []
    since: list[Tensor] = []
    whole = op[:, :, 0]
    for j in range(op.shape[2]):
        now = op[:, :, j]
        if j:
            since = [algebra.compose(now, e) for e in since] + [now]
            whole = algebra.compose(now, whole)
        total = one.expand(-1, op.shape[1], *one.shape[2:])
        for e in since:
            total = total + algebra.apply(e.abs(), one)
        products.append(whole.abs())
        sums.append(total)
    return products, sums
