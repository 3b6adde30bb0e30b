"""A proof, after the fact, of how far computed states are from the true trajectory.

Let ``d_t`` be what has to be added to a computed state ``h_t`` to get the true one, that of the
recurrence on real numbers. With the residual ``r_t = f(h_{t−1}, u_t) − h_t``, the Jacobian ``J_t`` at
the computed states and a bound ``M`` of the second derivative of one step,

    |d_t − (J_t d_{t−1} + r_t)| ≤ ½ M ‖d_{t−1}‖².

Nothing in it is known exactly. Steps and Jacobians are evaluated as balls (:mod:`.enclosure`): a
value, and a radius that bounds the rounding of every operation in it. ``c`` solves the linear
recurrence ``c_t = A_t c_{t−1} + r_t`` of the values, somehow: how well it does is evaluated, not
presumed. With ``local_t`` what that equation misses by, plus the radius of ``r_t``, and with ``R_t``
the radius of ``A_t``,

    |d_t − c_t| ≤ |A_t ⋯| (local_t + R_t ‖d_{t−1}‖ + ½ M ‖d_{t−1}‖²) summed over the steps before,

which is a recurrence of numbers that are not negative, solved with every rounding upwards. If all
``d`` before ``t`` are at most ``β``, so is ``d_t``, where

    Y + q β + ½ κ M β² ≤ β:

``Y`` bounds ``|c|`` and the sums of ``local``, ``q`` those of ``R``, ``κ`` those of ones. By induction ``β``
bounds the whole trajectory's error. No state need lie in its declared bounds: ``M`` is
bounded on a box that holds all drives, and all states with room for ``β``. A recurrence that is linear in its state
has ``M = 0``. The states may be float32: their rounding is part of ``r``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor

from ..scan import Algebra, Block, Dense, Diagonal, Flat, Left, affine_scan
from ..scan.inputs import cut
from ..spec.bounds import derivative_bounds
from ..spec.declarations import Linear
from ..spec.functions import snap
from ..spec.interval import Interval
from . import enclosure
from .adjoint import previous
from .enclosure import EPS, TINY, UP, Ball, over, summing
from .problem import Problem
from .spec_recurrence import SpecRecurrence

WINDOW = 16
"""Steps whose Jacobians are multiplied out before absolute values are taken."""

GROUP = 1 << 22
"""Numbers of the operators of the rows that are looked at together."""


@dataclass(frozen=True)
class Certificate:
    """What was proven. ``error_bound`` is infinite if the condition does not hold.

    Attributes
    ----------
    error_bound
        Largest possible error of any state, in the maximum norm.
    correction, amplification, curvature, residual
        ``Y / (1 − q)``, ``κ / (1 − q)``, ``M`` and the largest residual ``|f(h_{t−1}) − h_t|``.
    reason
        Why there is no proof, or an empty string.
    """

    error_bound: float
    correction: float
    amplification: float
    curvature: float
    residual: float
    reason: str


def certify(problem: Problem, states: Tensor) -> Certificate:
    """Certificate of states ``(B, T, *state_shape)`` of a prepared problem (no gradient needed)."""
    with torch.no_grad():
        return _certify(problem, states)


def _certify(problem: Problem, states: Tensor) -> Certificate:
    problem = problem.in_float64()
    recurrence = problem.recurrence
    if not isinstance(recurrence, SpecRecurrence):
        return _none("the cell has no Spec, so its second derivative has no bound")
    if recurrence.algebra("exact") is None:
        return _none("exact Jacobians of this structure are not formed")
    if _jumps(recurrence):
        return _none("snap of the state jumps where its derivative does not show it")
    if states.numel() == 0:
        return Certificate(0.0, 0.0, 1.0, 0.0, 0.0, "")
    states, h0 = states.double(), problem.h0
    largest = float(torch.maximum(states.abs().max(), h0.abs().max()))
    if not math.isfinite(largest):
        return _none("the states are not finite")
    before = previous(states, h0, problem.resets)
    width = max(1, enclosure.columns(recurrence, states))
    count = max(1, GROUP // (states[0].numel() * width))
    u, resets, found = problem.inputs, problem.resets, []
    for start in range(0, states.shape[0], count):
        rows = slice(start, start + count)
        found.append(
            _row_bounds(
                recurrence,
                before[rows],
                u[rows],
                states[rows],
                None if resets is None else resets[rows],
            )
        )
    rows_of = [torch.cat(parts).tolist() for parts in zip(*found, strict=True)]
    return _judged(recurrence, problem, largest, *rows_of)


def _judged(
    recurrence: SpecRecurrence,
    problem: Problem,
    largest: float,
    sums: list[float],
    kappas: list[float],
    radii: list[float],
    residuals: list[float],
) -> Certificate:
    """The certificate from ``Y``, ``κ``, ``q`` and the residual of every row of the batch."""
    residual = max(residuals)
    if not math.isfinite(residual):
        return _none("the rounding of a step has no finite bound: no proof")
    room = min((1 - q) * (1 - EPS) for q in radii)
    if not math.isfinite(max(kappas)) or not all(map(math.isfinite, sums)):
        reason = "κ is too large for a number: no proof"
        return Certificate(math.inf, max(sums), max(kappas), math.nan, residual, reason)
    if not room > 0:
        reason = "the rounding of the Jacobians, times κ, is not below 1: no proof"
        return Certificate(math.inf, max(sums), max(kappas), math.nan, residual, reason)
    pairs = [
        (y / ((1 - q) * (1 - EPS)) * UP, k / ((1 - q) * (1 - EPS)) * UP)
        for y, k, q in zip(sums, kappas, radii, strict=True)
    ]
    y, kappa = (max(values) for values in zip(*pairs, strict=True))
    m = _curvature(recurrence, problem, (largest + 2 * y) * UP)
    product = max(2 * a * b * m for a, b in pairs) if m else 0.0
    bounds = [_smallest(a, b, m) for a, b in pairs]
    reason = ""
    if m == math.inf and None in recurrence.bounds:
        reason = "a state slot declares no bounds, so its second derivative has no bound"
    elif not all(map(math.isfinite, bounds)):
        reason = f"2YκM = {product:.1e} is not below 1: no proof"
    return Certificate(math.inf if reason else max(bounds), y, kappa, m, residual, reason)


def _smallest(y: float, kappa: float, m: float) -> float:
    """A number ``β`` with ``y + ½ κ M β² ≤ β``, little above the least; infinite if there is none."""
    bent = kappa * m * UP if m else 0.0
    if not 2 * y * bent < 1:
        return math.inf
    # (1 − √(1 − 2YκM)) / (κM), written so that it does not cancel for small Y.
    beta = 2 * y / (1 + math.sqrt(1 - 2 * y * bent)) * (1 + 2.0**-45)
    return beta if (y + 0.5 * bent * beta * beta) * UP <= beta else math.inf


def _jumps(recurrence: SpecRecurrence) -> bool:
    """Whether the state enters a function that jumps, whose derivative is declared and not its own."""
    fz = recurrence.spec.factorization
    return any(
        call.free_symbols & fz.state_dependent
        for stage in recurrence.spec.stages
        for call in (stage.operand if isinstance(stage, Linear) else stage.expr).atoms(snap)
    )


def _curvature(recurrence: SpecRecurrence, problem: Problem, reach: float) -> float:
    """``M`` on the states up to ``reach``: 0 for what is linear in its state, infinite for what is
    not and declares no box."""
    if recurrence.linear:
        return 0.0
    if None in recurrence.bounds:
        return math.inf
    params = [p.detach().cpu().numpy() for p in recurrence.raw_params]
    ends = zip(
        *(_parts(recurrence, x) for x in torch.aminmax(problem.inputs.flatten(0, 1), dim=0)),
        strict=True,
    )
    drives = [Interval(lo, hi) for lo, hi in ends]
    bent = derivative_bounds(recurrence.spec, params, recurrence.sizes, reach, drives=drives)[1]
    m = float(bent.max())
    return math.inf if math.isnan(m) else m


def _parts(recurrence: SpecRecurrence, u: Tensor) -> list[np.ndarray]:
    """Packed drives ``(C,)`` as arrays, each of the shape of its axes."""
    shapes = recurrence.spec.drive_shapes(recurrence.sizes)
    parts = u.split([math.prod(shape) for shape in shapes], -1)
    return [p.reshape(shape).cpu().numpy() for p, shape in zip(parts, shapes, strict=True)]


def _none(reason: str) -> Certificate:
    return Certificate(math.inf, math.nan, math.nan, math.nan, math.nan, reason)


def _row_bounds(
    recurrence: SpecRecurrence, before: Tensor, u: Tensor, states: Tensor, resets: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``Y``, ``κ``, ``q`` and the largest residual of every row."""
    algebra = cast(Algebra, recurrence.algebra("exact"))
    residual = enclosure.step(recurrence, before, u) + Ball(-states)
    ball = enclosure.jacobian(recurrence, before, u)
    op, radius = (cut(x, resets) for x in (ball.value, cast(Tensor, ball.radius)))
    c = affine_scan(op, residual.value, algebra=algebra)
    n = algebra.order(op)
    earlier = torch.cat([torch.zeros_like(c[:, :1]), c[:, :-1]], 1)
    moved = Ball(
        algebra.apply(op, earlier), over(algebra.apply(op.abs(), earlier.abs() * summing(n)), n)
    )
    one = torch.ones_like(c)
    local = (moved + residual + Ball(-c)).magnitude
    forcing = torch.stack([local, one, over(algebra.apply(radius, one), n)])
    forcing = torch.where(forcing.isnan(), torch.full_like(forcing, math.inf), forcing)
    s = _accumulated(algebra, op, forcing)
    least = _largest_of(((c.abs() + s[0]) * UP).unsqueeze(0))[0]
    _, kappa, q = _largest_of(s)
    if recurrence.linear and bool((kappa > op.shape[1]).any()) and bool(op.isfinite().all()):
        lengths = _euclidean(algebra, op, forcing)
        least = torch.minimum(least, (c.abs().flatten(1).amax(1) + lengths[0]) * UP)
        kappa, q = torch.minimum(kappa, lengths[1]), torch.minimum(q, lengths[2])
    return least, kappa, q, _largest_of(residual.magnitude.unsqueeze(0))[0]


def _largest_of(x: Tensor) -> Tensor:
    """Largest entry of every row, ``(F, B, T, ...) → (F, B)``; infinite where one is not a number."""
    return x.flatten(2).nan_to_num(nan=math.inf, posinf=math.inf).amax(2)


def _accumulated(algebra: Algebra, op: Tensor, forcing: Tensor) -> Tensor:
    """Bounds ``s_t ≥ Σ_i |A_t ⋯ A_{i+1}| forcing_i`` for forcings ``(F, B, T, *state_shape)``.

    Absolute values are taken of products over windows, not of every factor: ``|A_2 A_1|`` can be
    much smaller than ``|A_2||A_1|``. Between windows the recursion is ``s ← |Π| s + q``.
    """
    total, n = op.shape[1], algebra.order(op)
    window = min(WINDOW, total)
    whole = total - total % window
    start, out = torch.zeros_like(forcing[:, :, 0]), []
    for first, last, width in ((0, whole, window), (whole, total, total - whole)):
        if first == last:
            continue
        part = op[:, first:last].unflatten(1, (-1, width))
        added = forcing[:, :, first:last].unflatten(2, (-1, width))
        products, sums = _window(algebra, part, added)
        ends = _running(algebra, products[-1], sums[-1], start)
        starts = torch.cat([start.unsqueeze(2), ends[:, :, :-1]], 2)
        found = [
            over(algebra.apply(p, starts) + q, n + 1) for p, q in zip(products, sums, strict=True)
        ]
        out.append(torch.stack(found, 3).flatten(2, 3))
        start = ends[:, :, -1]
    return torch.cat(out, 2)


def _window(algebra: Algebra, op: Tensor, forcing: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """For every step of a window (all windows side by side): a bound of ``|product so far|``, and of
    the sum of ``|product since i| forcing_i`` over its steps ``i``."""
    n, steps = algebra.order(op), forcing.movedim(3, 0)
    products, sums = [], []
    since = whole = Ball(op[:, :, 0].unsqueeze(0), torch.zeros_like(op[:, :, 0]).unsqueeze(0))
    for j in range(op.shape[2]):
        now = op[:, :, j].unsqueeze(0)
        total = steps[j]
        if j:
            whole = _composed(algebra, now, whole)
            latest = Ball(now, torch.zeros_like(now))
            since = _joined(_composed(algebra, now, since), latest) if j > 1 else latest
            passed = algebra.apply(since.magnitude.unsqueeze(1), steps[:j]).sum(0)
            total = over(total + passed, (n + 1) * (j + 1))
        products.append(whole.magnitude.squeeze(0))
        sums.append(total)
    return products, sums


def _joined(first: Ball, last: Ball) -> Ball:
    pairs = ((first.value, last.value), (cast(Tensor, first.radius), cast(Tensor, last.radius)))
    return Ball(*(torch.cat(pair) for pair in pairs))


def _composed(algebra: Algebra, after: Tensor, before: Ball) -> Ball:
    """Products of operators, the later one exact."""
    n = algebra.order(after)
    moved = (before.value.abs() * summing(n) + before.radius) * UP
    value = algebra.compose(after, before.value)
    return Ball(value, over(algebra.compose(after.abs(), moved), n))


def _running(algebra: Algebra, op: Tensor, b: Tensor, start: Tensor) -> Tensor:
    """Bounds of ``s_t = A_t s_{t−1} + b_t`` for ``A, b, s_0 ≥ 0`` of shapes ``(B, T, ...)``,
    ``(F, B, T, ...)`` and ``(F, B, ...)``: a scan with a little more in every step, then a test that
    every step of it holds with what its own rounding may be. Infinite in rows where it does not."""
    n = algebra.order(op)
    ops = op.expand(b.shape[0], *op.shape).flatten(0, 1)
    bs, first = b.flatten(0, 1), start.flatten(0, 1)
    s, holds = bs, torch.zeros(bs.shape[0], dtype=torch.bool, device=bs.device)
    for slack in (2.0**-45, 2.0**-35, 2.0**-25):
        s = affine_scan(
            ops * (1 + slack), bs * (1 + slack) + 2 * (n + 2) * TINY, first, algebra=algebra
        )
        earlier = torch.cat([first.unsqueeze(1), s[:, :-1]], 1)
        least = over(algebra.apply(ops, earlier) + bs, n + 1)
        holds = (least <= s).flatten(1).all(1)
        if bool(holds.all()):
            break
    holds = holds.reshape(-1, *(1,) * (s.ndim - 1))
    return torch.where(holds, s, torch.full_like(s, math.inf)).unflatten(0, b.shape[:2])


def _euclidean(algebra: Algebra, op: Tensor, forcing: Tensor) -> Tensor:
    """Bounds ``(F, B)`` of the sums of :func:`_accumulated` from ``s ← ‖A_t‖₂ s + √n max forcing_t``
    in every block of ``n`` numbers: no entry is longer than its vector. Products of rotations have
    absolute values above 1, and norm 1."""
    n = algebra.order(op)
    norms = algebra.norm(op)
    norms = norms * (1 + 64 * n * EPS) + n * TINY  # a singular value is right to a few n units
    b = _block_maxima(algebra, forcing) * (math.sqrt(n) * UP)
    start = torch.zeros_like(b[:, :, 0])
    return _largest_of(_running(Diagonal(), norms, b, start))


def _block_maxima(algebra: Algebra, x: Tensor) -> Tensor:
    """Largest entry of every vector that :meth:`Algebra.norm` has a number for."""
    if isinstance(algebra, Diagonal):
        return x
    if isinstance(algebra, Block):
        return x.amax(-algebra.axes - 1)
    if isinstance(algebra, Dense):
        return algebra.pack(x).amax(-1)
    if isinstance(algebra, Left):
        return x.amax((-2, -1))
    if isinstance(algebra, Flat):
        return x.flatten(3).amax(-1)
    return x.amax(-1)
