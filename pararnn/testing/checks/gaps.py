"""The clause about the time between steps."""

from __future__ import annotations

import mpmath
import numpy as np
import torch
from torch import Tensor, nn

import pararnn

from ..context import Context, NotApplicable, converted, error, tolerance
from ..equations import DIGITS, LIMITS
from ..reference import advance, amplification, loop
from . import checks
from .equations import STEP, arrays, digits
from .gradients import by_loop, gradient_tolerance, gradients, runs
from .sequences import WAYS
from .solving import name

CHANGE = {torch.float64: 1e-12, torch.float32: 1e-5}
GAPS = (0.0, 1e-6, 1.0, 1e4)


@checks("time-gap")
def time_gap(ctx: Context) -> None:
    spec = ctx.spec_of(ctx.cell())
    if spec.gap is None:
        raise NotApplicable("the cell takes no time gaps")
    for _ in ctx.rounds(2):
        cell = ctx.cell()
        x, h = ctx.inputs(cell, 3, 1)[:, 0], ctx.state(cell, 3)
        no_time(ctx, cell, h, x)
        for dtype in ctx.wide_dtypes():
            short_time(ctx, converted(cell, dtype), x.to(dtype))
        much = after(cell, h, x, 1e4)
        ctx.require(bool(much.isfinite().all()), "a gap of 1e4: got a state that is not finite")
    sequences(ctx)
    forever(ctx)


def forever(ctx: Context) -> None:
    """An infinite gap counts as 1e10; a NaN is none."""
    for dtype in ctx.wide_dtypes():
        cell = converted(ctx.cell(), dtype)
        x, found = ctx.inputs(cell, 2, 7), []
        for label, options in WAYS:
            for gap in (1e10, float("inf")):
                given = x.clone()
                given[0, 3, -1] = gap
                given.requires_grad_()
                states = ctx.api.solve(cell, given, **options).states
                leaves = (given, *cell.parameters())
                found.append(
                    (
                        states,
                        *torch.autograd.grad(states.square().sum(), leaves, materialize_grads=True),
                    )
                )
            much, infinite = found[-2:]
            for first, second in zip(much, infinite, strict=True):
                ctx.require(bool(second.isfinite().all()), f"an infinite gap, {label}: not finite")
                ctx.within(f"an infinite gap − 1e10, {name(dtype)}", error(second, first), 1e-5)
        if ctx.device.type == "cpu":  # elsewhere nothing looks
            given = x.clone()
            given[0, 3, -1] = float("nan")
            try:
                ctx.api.solve(cell, given)
            except ValueError:
                continue
            ctx.require(False, "a gap that is NaN: got no ValueError")


def gapped(x: Tensor, dt: float) -> Tensor:
    """Inputs with another time gap."""
    return torch.cat([x[..., :-1], torch.full_like(x[..., -1:], dt)], -1)


def after(cell: nn.Module, h: Tensor, x: Tensor, dt: float) -> Tensor:
    return advance(cell, h, gapped(x, dt)).detach()


def exactly(ctx: Context, cell: nn.Module, h: Tensor, x: Tensor, dt: float) -> np.ndarray:
    """The Spec's step in :data:`DIGITS` digits."""
    state, drives, params = arrays(cell, h, gapped(x, dt))
    with mpmath.workdps(DIGITS):
        return ctx.api.step(cell.spec, state, drives, params, "mpmath")


def no_time(ctx: Context, cell: nn.Module, h: Tensor, x: Tensor) -> None:
    """The value at 0, continuity there, and the derivative with respect to the gap."""
    here = after(cell, h, x, 0.0)
    subject = ctx.subject.name
    ctx.require(
        subject in LIMITS or subject not in pararnn.cell_names(),
        f"got no limit of {subject}, expected its step when no time has passed, as the card says; "
        "put it into LIMITS of pararnn/testing/equations.py",
    )
    if subject in LIMITS:
        drives = cell.split(cell.drives(x[..., :-1]))
        stated = LIMITS[subject](h, drives, cell.recurrent_params()).detach()
        ctx.within("step at Δt = 0 − the limit on the card", error(here, stated), 1e-15)
    for dt in (1e-12, 1e-6):
        moved = (after(cell, h, x, dt) - here).abs().max()
        ctx.within("change over a short gap / the gap", moved / dt, 1e3)
    given = gapped(x, 0.0).requires_grad_()
    weights = ctx.like(cell, ctx.normal(*here.shape))
    (slope,) = torch.autograd.grad((advance(cell, h, given) * weights).sum(), given)
    small = 1e-20
    with mpmath.workdps(DIGITS):
        apart = exactly(ctx, cell, h, x, small) - exactly(ctx, cell, h, x, 0.0)
        wanted = digits(apart / mpmath.mpf(small)).to(weights)
    wanted = (wanted * weights).flatten(1).sum(1)
    ctx.within("derivative at Δt = 0", error(slope[:, -1], wanted), 10 * STEP)


def short_time(ctx: Context, cell: nn.Module, x: Tensor) -> None:
    """From the zero state, where no larger number hides the change that a short gap makes."""
    h = torch.zeros(x.shape[0], *cell.state_shape, dtype=x.dtype, device=x.device)
    dt = float(torch.tensor(1e-6, dtype=x.dtype))
    got = after(cell, h, x, dt) - after(cell, h, x, 0.0)
    with mpmath.workdps(DIGITS):
        wanted = digits(exactly(ctx, cell, h, x, dt) - exactly(ctx, cell, h, x, 0.0))
    start = float(after(cell, h, x, 0.0).abs().max())
    if start > 0:  # the change hides behind a larger number whatever the cell does
        return
    ctx.within(f"change over 1e-6, {name(x.dtype)}", error(got.cpu(), wanted), CHANGE[x.dtype])


def sequences(ctx: Context) -> None:
    length = 33
    wide = ctx.cell()
    x, h0 = ctx.inputs(wide, 3, length), ctx.state(wide, 3)
    order = torch.randint(len(GAPS), (3, length), generator=ctx.generator)
    x[..., -1] = ctx.like(wide, torch.tensor(GAPS, dtype=torch.float64)[order])
    kappa = amplification(wide, loop(wide, x, h0), h0, x)
    shape = (3, length, *wide.state_shape)
    weights = ctx.like(wide, ctx.normal(*shape)), ctx.like(wide, ctx.normal(*h0.shape))
    for dtype in ctx.wide_dtypes():
        cell, given, initial = converted(wide, dtype), x.to(dtype), h0.to(dtype)
        reference = loop(cell, given, initial).detach()
        for label, options in WAYS:
            states = ctx.api.solve(cell, given, h0=initial, **options).states
            with ctx.explained(f"gaps from 0 to 1e4, {label}"):
                ctx.within(name(dtype), error(states, reference), tolerance(dtype, kappa))
        narrow = tuple(w.to(dtype) for w in weights)
        expected = gradients(by_loop, cell, given, initial, narrow)
        for label, run in runs(ctx, cell):
            for what, value in gradients(run, cell, given, initial, narrow).items():
                place = f"gaps from 0 to 1e4, gradient of {what}, {label}"
                ctx.require(bool(value.isfinite().all()), f"{place}: got one that is not finite")
                with ctx.explained(place):
                    bound = gradient_tolerance(dtype, kappa)
                    ctx.within(f"gradient, {name(dtype)}", error(value, expected[what]), bound)
