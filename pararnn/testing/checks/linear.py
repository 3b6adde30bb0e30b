"""Clauses about recurrences that are linear in their state, and the layers that they are."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import mpmath
import torch
from torch import Tensor, nn

from pararnn import NewtonConfig
from pararnn.scan import delta_scan, linear_scan, matrix_scan

from ..context import UNIT_ROUNDOFF, Context, NotApplicable, converted, error, tolerance
from ..reference import advance, amplification, apart, loop
from . import checks
from .equations import STEP
from .gradients import on_a_grid
from .sequences import WAYS
from .solving import formed, name


@checks("linearity")
def linearity(ctx: Context) -> None:
    if ctx.spec_of(ctx.cell()).jac_structure != "linear":
        raise NotApplicable("the recurrence is not linear in its state")
    for _ in ctx.rounds(2):
        cell = ctx.cell()
        x, g, h = ctx.inputs(cell, 3, 1)[:, 0], ctx.state(cell, 3), ctx.state(cell, 3)
        if all(slot.bounds is not None and slot.bounds[0] == 0 for slot in cell.spec.slots):
            h = g + h  # so that no mixture below has a negative entry, which such a step refuses
        for share in (0.3, -2.5):
            mixed = advance(cell, share * g + (1 - share) * h, x)
            apart_ = share * advance(cell, g, x) + (1 - share) * advance(cell, h, x)
            ctx.within("step of a mixture − mixture of steps", error(mixed, apart_), 10 * STEP)
    wide = ctx.cell()
    x, h0 = ctx.inputs(wide, 2, 48), ctx.state(wide, 2)
    kappa = amplification(wide, loop(wide, x, h0), h0, x)
    for dtype in ctx.wide_dtypes():
        cell, given, initial = converted(wide, dtype), x.to(dtype), h0.to(dtype)
        reference = loop(cell, given, initial).detach()
        for method, chunk in (("newton", 1), ("shooting", 5)):
            if not formed(cell, "exact", chunk):
                continue
            config = NewtonConfig(
                max_iters=1, chunk_length=chunk, jacobian="exact", on_divergence="ignore"
            )
            solution = ctx.api.solve(cell, given, config, method=method, h0=initial)
            gap = error(solution.states, reference)
            with ctx.explained(f"{method}, one correction"):
                ctx.within(f"states, {name(dtype)}", gap, tolerance(dtype, kappa))


@checks("orthogonality")
def orthogonality(ctx: Context) -> None:
    if not getattr(ctx.cell(), "orthogonal", False):
        raise NotApplicable("the transition is not said to be orthogonal")
    for _ in ctx.rounds(2):
        cell = ctx.cell()
        x = ctx.inputs(cell, 3, 1)[:, 0]
        count = math.prod(cell.state_shape)
        unit = torch.eye(count, dtype=x.dtype, device=x.device).reshape(count, *cell.state_shape)
        for row in x:
            here = row.expand(count, -1)
            columns = advance(cell, unit, here) - advance(cell, 0 * unit, here)
            a = columns.flatten(1).mT.detach()
            identity = torch.eye(count, dtype=a.dtype, device=a.device)
            ctx.within("‖AᵀA − 1‖", (a.mT @ a - identity).abs().max(), 1e-14)
            ctx.within("|det A − 1|", (torch.linalg.det(a) - 1).abs(), 1e-13)
    cell = ctx.cell()
    x, g, h = ctx.inputs(cell, 2, 257), ctx.state(cell, 2), ctx.state(cell, 2)
    ends = [ctx.api.solve(cell, x, h0=start).final_state.detach() for start in (g, h)]
    before, after = (g - h).flatten(1).norm(dim=1), (ends[0] - ends[1]).flatten(1).norm(dim=1)
    ctx.within("distance after 257 steps / before, − 1", (after / before - 1).abs().max(), 1e-12)


@checks("positivity")
def positivity(ctx: Context) -> None:
    spec = ctx.spec_of(ctx.cell())
    if any(slot.bounds is None or slot.bounds[0] != 0 for slot in spec.slots):
        raise NotApplicable("the states are not bounded below by 0")
    for dtype in ctx.dtypes:
        for scale in (1.0, 30.0):
            cell = converted(ctx.cell(), dtype)
            x = ctx.inputs(cell, 3, 61, scale)
            zero = torch.zeros(3, *cell.state_shape, dtype=torch.float64).to(next(iter(x)))
            for label, options in WAYS:
                for start in (None, zero):
                    states = ctx.api.solve(cell, x, h0=start, **options).states
                    place = f"{label}, {name(dtype)}, inputs of size {scale:g}"
                    with ctx.explained(place):
                        ctx.within("largest −state", float(-states.min()), 0.0)
                        if scale == 1:
                            ctx.require(bool((states > 0).all()), "got a state that is 0")
    if "learnable_h0" not in ctx.hyperparameters(ctx.cell()):
        return
    cell = ctx.cell(learnable_h0=True)
    nn.init.zeros_(cell.h0_pre)
    (slope,) = torch.autograd.grad(cell.init_state(1).sum(), cell.h0_pre)
    ctx.within("derivative of the start at 0, − 1", (slope - 1).abs().max(), 0.0)
    if ctx.device.type == "cpu":  # elsewhere it is an assertion of the device
        x = ctx.inputs(cell, 2, 5)
        x, more = apart(cell, x)
        for bad in (-1e-30, float("nan")):
            h = torch.ones(2, 1, cell.d_h, dtype=x.dtype)
            h[1, 0, 2] = bad
            bad_starts(ctx, cell, x, more, h)


def bad_starts(
    ctx: Context, cell: nn.Module, x: Tensor, more: dict[str, Tensor], h: Tensor
) -> None:
    """A start that no sequence has, in every way to run one; and as the state of a single step."""
    layer, given = ctx.api.layer(cell), torch.cat([x, *more_columns(more)], -1)
    now = {key: value[:, 0] for key, value in more.items()}
    sequences: dict[str, Callable[[], object]] = {
        "a call": lambda: cell(x, h, more.get("dt")),
        "a layer": lambda: layer(x, h[None, :, 0], **more),
    }
    for label, options in WAYS:
        sequences[label] = lambda o=options: ctx.api.solve(cell, given, h0=h[:, 0], **o)
    steps: dict[str, Callable[[], object]] = {
        "step": lambda: cell.step(h[:, 0], x[:, 0], **now),
        "stream": lambda: cell.stream(x[:, 0], h, *now.values()),
        "step of a layer": lambda: layer.step(x[:, 0], h[None, :, 0], **now),
    }
    for what, call in sequences.items():
        refused(ctx, f"{what}, a start with an entry that is negative or NaN", call)
    for what, call in steps.items():
        if bool((h < 0).any()):
            refused(ctx, f"{what}, a state with a negative entry", call)
        else:  # as after a step that met a NaN
            call()


def more_columns(more: dict[str, Tensor]) -> list[Tensor]:
    return [value[..., None] for value in more.values()]


def refused(ctx: Context, what: str, call) -> None:
    """A call must raise a ``ValueError``."""
    try:
        call()
    except ValueError:
        return
    ctx.require(False, f"{what}: got no ValueError")


def placed(cell: nn.Module, **values: Tensor) -> Tensor:
    """Packed drives ``(B, C)`` with the given values of named drives, and 0 for the others."""
    parts = []
    batch = next(iter(values.values())).shape[0]
    for drive in cell.spec.projected:
        zero = torch.zeros(
            batch, cell.channels, dtype=torch.float64, device=cell.in_proj.weight.device
        )
        parts.append(values.get(drive.name, zero))
    return torch.cat(parts, -1)


@checks("snap")
def snap(ctx: Context) -> None:
    cell = ctx.cell()
    if not on_a_grid(cell):
        raise NotApplicable("no angle is put on a grid")
    batch, n, m = 64, cell.channels, cell.m
    for _ in ctx.rounds(2):
        theta = ctx.like(cell, ctx.uniform(batch, n, high=12.0))
        u = placed(cell, u_theta=theta, u_d=torch.full_like(theta, 40.0))  # tanh is 1
        h = ctx.like(cell, torch.zeros(batch, 2, n))
        h[:, 0] = 1
        turned, once = h, None
        for power in range(1, int(m.max()) + 1):
            turned = cell.step(turned, drives=u)
            once = turned if once is None else once
            done = m == power
            ctx.within(
                "m turns − none",
                float((turned - h)[:, :, done].abs().max()) if done.any() else 0.0,
                1e-13,
            )
        angle = torch.atan2(once[:, 1], once[:, 0])
        off = torch.remainder(angle - theta + math.pi, 2 * math.pi) - math.pi
        ctx.within("distance to the grid / half a step", (off.abs() * m / math.pi).max(), 1 + 1e-12)
        straight(ctx, cell, theta)
    large_angles(ctx, converted(ctx.cell(), torch.float32))


def large_angles(ctx: Context, cell: nn.Module) -> None:
    """Turns by float32 angles of size 1e3 to 1e9: those of the nearest multiple, by 40 digits."""
    batch, n = 32, cell.channels
    for size in (1e3, 1e6, 1e9):
        theta = (size * ctx.normal(batch, n)).float().to(ctx.device)
        u = placed(cell, u_theta=theta, u_d=torch.full_like(theta, 40.0)).float()
        h = torch.zeros(batch, 2, n, device=ctx.device)
        h[:, 0] = 1
        got = cell.step(h, drives=u)
        by_spec = ctx.api.solve(cell, drives=u[:, None], h0=h).states[:, 0]
        with mpmath.workdps(40):
            want = torch.tensor([[turn(v, m) for v, m in zip(row, cell.m.tolist(), strict=True)]
                                 for row in theta.tolist()], dtype=torch.float64)  # fmt: skip
        want = want.movedim(-1, 1).to(ctx.device)
        for what, found in (("step", got), ("solve", by_spec)):
            gap = (found.double() - want).abs().max()
            ctx.within(f"angles of size {size:g}, {what}", gap, 4 * 2.0**-23)


def turn(angle: float, m: float) -> tuple[float, float]:
    step = 2 * mpmath.pi / int(m)
    near = mpmath.nint(mpmath.mpf(angle) / step) * step
    return float(mpmath.cos(near)), float(mpmath.sin(near))


def straight(ctx: Context, cell: nn.Module, theta: Tensor) -> None:
    """The derivative by the angle is that of the free recurrence at the angle on the grid."""
    free = cell.rebuilt(snap=None).to(ctx.device, torch.float64)
    near = (theta * cell.m / (2 * math.pi)).round() * (2 * math.pi / cell.m)
    h, weights = (
        ctx.state(cell, len(theta)),
        ctx.like(cell, ctx.normal(len(theta), 2, cell.channels)),
    )
    slopes = []
    for module, at in ((cell, theta), (free, near)):
        at = at.clone().requires_grad_()
        u = placed(module, u_theta=at, u_d=torch.full_like(theta, 0.3))
        (slope,) = torch.autograd.grad((module.step(h, drives=u) * weights).sum(), at)
        slopes.append(slope)
    ctx.within("derivative − that of the free recurrence", error(*slopes), 1e-12)


@checks("decay")
def decay(ctx: Context) -> None:
    probe = ctx.cell()
    if "log1p_delta" not in ctx.hyperparameters(probe):
        raise NotApplicable("the cell has no time-aware decay")
    for kind in ("fixed", "learnable"):
        for log in (False, True):
            changes = {"decay": kind, "decay_rate": 0.6, "log1p_delta": log}
            fading(ctx, ctx.cell(**changes), log)
            layer(ctx, ctx.cell(**changes))
    without = ctx.cell(decay=None, decay_rate=None, log1p_delta=False)
    x, gaps = ctx.normal(2, 4, without.d_in).to(ctx.device), torch.rand(2, 4).double()
    refused(ctx, "dt without a decay", lambda: without(x, None, gaps.to(ctx.device)))
    refused(ctx, "a decay without dt", lambda: ctx.cell(decay="fixed")(x))


def fading(ctx: Context, cell: nn.Module, log: bool) -> None:
    """What is left of the old state after a gap, over what is left after none."""
    x, h = ctx.inputs(cell, 6, 1)[:, 0, :-1], ctx.state(cell, 6)
    gaps = ctx.like(cell, torch.tensor([0, 1e-9, 0.03, 1, 40, 1e300], dtype=torch.float64))
    rate = cell.rate if cell.decay == "fixed" else nn.functional.softplus(cell.rho)
    gamma = torch.exp(-rate * (torch.log1p(gaps) if log else gaps)[:, None])
    none = cell.step(0 * h, x, dt=gaps)
    ctx.within(
        "what the input adds, by the gap", error(none, cell.step(0 * h, x, dt=0 * gaps)), 0.0
    )
    left = cell.step(h, x, dt=gaps) - none
    whole = cell.step(h, x, dt=0 * gaps) - none
    axes = next(p.axes for p in cell.spec.param_list if p.name in ("rho", "rate"))
    place = [cell.sizes[a] if a in axes else 1 for a in cell.spec.axes]
    shown = gamma.reshape(6, *(1,) * (h.ndim - 1 - len(place)), *place)
    ctx.within("kept − γ · kept without a gap", error(left, shown * whole), 1e-12)


def layer(ctx: Context, cell: nn.Module) -> None:
    """Gaps that are none count as stated, with one warning, and gradients stay finite."""
    x = ctx.like(cell, ctx.normal(2, 6, cell.d_in))
    gaps = ctx.like(cell, 1 + ctx.uniform(2, 6))
    bad, good = gaps.clone(), gaps.clone()
    for at, (value, counts) in enumerate(
        ((float("nan"), 0.0), (float("inf"), 1e10), (-float("inf"), 0.0), (-3.0, 0.0))
    ):
        bad[at % 2, at], good[at % 2, at] = value, counts
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = [cell(x, None, bad.requires_grad_()) for _ in range(2)][1]
    said = sum(issubclass(w.category, UserWarning) and "dt: got" in str(w.message) for w in caught)
    expected = int(ctx.device.type == "cpu")
    ctx.require(said == expected, f"bad gaps, twice: got {said} warnings, expected {expected}")
    ctx.same_bits("bad gaps − what they count as", found.detach(), cell(x, None, good).detach())
    leaves = [bad, *cell.parameters()]
    for value in torch.autograd.grad(found.square().sum(), leaves, allow_unused=True):
        ctx.require(
            value is None or bool(value.isfinite().all()), "got a gradient that is not finite"
        )


@checks("scan-range")
def scan_range(ctx: Context) -> None:
    if ctx.spec_of(ctx.cell()).jac_structure != "linear":
        raise NotApplicable("the recurrence is not linear in its state")
    length = 150
    if ctx.device.type == "cpu":
        delta_range(ctx)
    for dtype in ctx.wide_dtypes():
        for number in ctx.rounds(2):
            # Powers of ten between which every lane walks, by steps of its own: anywhere, or further
            # apart than the least and the largest number of the dtype, in several steps.
            largest = (
                18.0 + 3 * (number % 2) if dtype == torch.float32 else 150.0 + 10 * (number % 2)
            )
            levels = ctx.uniform(2, length + 1, 3, high=largest)
            if number % 2:
                levels = largest * torch.sin(levels.cumsum(1) / largest)
            steps = levels.diff(dim=1).to(ctx.device)
            a, b = 10.0**steps, 1e-8 * 10.0 ** levels[:, 1:].to(ctx.device)
            h0 = 10.0 ** levels[:, 0].to(ctx.device)
            b = b * ctx.normal(*b.shape).to(ctx.device)
            blocks = torch.stack([a, 0 * a, 0.5 * a, -a], -1).unflatten(-1, (2, 2))
            two = (v.unsqueeze(-1) * torch.tensor([1.0, -0.5]).to(v) for v in (b, h0))
            for scan, given in ((linear_scan, (a, b, h0)), (matrix_scan, (blocks, *two))):
                with ctx.explained(f"{scan.__name__}, {name(dtype)}"):
                    whole_range(ctx, scan, *(v.to(dtype) for v in given))


def delta_range(ctx: Context) -> None:
    """The delta rule in chunks: decays whose products leave the range of the states, and numbers that
    overflow before a reset."""
    for dtype in ctx.wide_dtypes():
        info = torch.finfo(dtype)
        decades = 4.0 if dtype == torch.float32 else 34.0
        q, v = (ctx.normal(2, 70, 2, 3).to(dtype) for _ in range(2))
        k = torch.nn.functional.normalize(ctx.normal(2, 70, 2, 3), dim=-1).to(dtype)
        beta = 2 * ctx.uniform(2, 70, 2).abs().to(dtype)
        steps = torch.tensor(([-decades] * 12 + [decades] * 12) * 3)[:70].reshape(1, -1, 1)
        gamma = (10.0**steps).to(dtype).expand(2, 70, 2)
        h0 = (10.0 ** (7 * decades) * ctx.normal(2, 2, 3, 3)).to(dtype)
        y, _ = delta_scan(q, k, v, 0 * beta, h0, gamma=gamma)
        scales = (gamma.double() * 10.0 ** -steps.double()).cumprod(1)  # rounded decays, near 1
        levels = steps.double().cumsum(1) + 7 * decades
        start = h0.double() * 10.0 ** (-7 * decades)
        want = (q.double().unsqueeze(-2) @ start.unsqueeze(1)).squeeze(-2) * scales.unsqueeze(-1)
        found = y.double() / 10.0 ** levels.unsqueeze(-1)
        bound = 8 * 70 * UNIT_ROUNDOFF[dtype] + 1e-13
        ctx.within("delta rule that decays", (found - want).abs().max() / want.abs().max(), bound)
        resets = torch.zeros(2, 70, dtype=torch.bool)
        resets[1, 40] = True
        gamma, h0 = ctx.uniform(2, 70, 2).abs().to(dtype), ctx.normal(2, 2, 3, 3).to(dtype)
        clean, end = delta_scan(q, k, v, beta, h0, gamma=gamma, resets=resets)
        spoiled = v.clone()
        spoiled[1, 35] = 0.9 * info.max
        grown = gamma.clone()
        grown[1, 36:39] = 10.0
        y, last = delta_scan(q, k, spoiled, beta, h0, gamma=grown, resets=resets)
        ctx.same_bits("after a reset", y[1, 40:], clean[1, 40:])
        ctx.same_bits("beside it", y[0], clean[0])
        ctx.same_bits("final state", last, end)


def whole_range(ctx: Context, scan: Any, op: Tensor, b: Tensor, h0: Tensor) -> None:
    """A scan against the loop in its dtype; and parts of it beside other numbers."""

    def walk(op: Tensor, b: Tensor, h: Tensor) -> Tensor:
        states = []
        for op_t, b_t in zip(op.unbind(1), b.unbind(1), strict=True):
            moved = op_t * h if op_t.ndim == h.ndim else (op_t @ h.unsqueeze(-1)).squeeze(-1)
            h = moved + b_t
            states.append(h)
        return torch.stack(states, 1)

    for reverse in (False, True):
        if reverse:
            op, b = op.flip(1), b.flip(1)
        got = scan(op, b, h0, reverse=reverse)
        order = (1,) if reverse else ()
        want = walk(op.flip(order), b.flip(order), h0).flip(order)
        tiny = torch.finfo(b.dtype).tiny
        sizes = op.flip(order).abs().double(), b.flip(order).abs().double() + tiny
        terms = walk(*sizes, h0.abs().double())
        gap = (got - want).double().abs() / terms.flip(order)
        rows = 1 if op.ndim == b.ndim else 2
        bound = 8 * b.shape[1] * rows * UNIT_ROUNDOFF[b.dtype]
        ctx.within("difference / σ", torch.where(got == want, 0.0, gap).max(), bound)
        other = op.clone()
        edge = slice(None, 97) if reverse else slice(53, None)
        kept = slice(97, None) if reverse else slice(None, 53)
        other[:, edge] *= 1e12
        ctx.same_bits(
            "before other numbers", scan(other, b, h0, reverse=reverse)[:, kept], got[:, kept]
        )
        other = op.clone()
        other[1] *= 1e12
        ctx.same_bits("beside other numbers", scan(other, b, h0, reverse=reverse)[0], got[0])
