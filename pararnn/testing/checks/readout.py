"""The clause about layers that pass on something else than the state."""

from __future__ import annotations

import mpmath
import numpy as np
import torch
from torch import Tensor, nn

import pararnn
from pararnn.spec import oracle

from ..context import Context, NotApplicable, converted, error, tolerance
from ..equations import DIGITS
from ..reference import amplification, apart, loop
from . import checks
from .equations import arrays, digits
from .gradients import gradient_tolerance
from .solving import name

READ = 1e-13
LENGTH = 71


@checks("readout")
def readout(ctx: Context) -> None:
    spec = ctx.spec_of(ctx.cell())
    if spec.readout is None:
        raise NotApplicable("a layer passes on the states themselves")
    for _ in ctx.rounds(1):
        once(ctx)
        for dtype in ctx.wide_dtypes():
            cell = converted(ctx.cell(), dtype)
            sequences(ctx, cell, dtype)
            poisoned(ctx, cell)


def project(cell: nn.Module, read: Tensor) -> Tensor:
    """What follows the read-out ``(..., *axes)`` in the layer."""
    flat = read.flatten(-len(cell.spec.axes_of(cell.spec.readout.symbol)))
    return cell.out_proj(flat) if hasattr(cell, "out_proj") else flat


def once(ctx: Context) -> None:
    """One read-out against the Spec in many digits."""
    cell = ctx.cell()
    x, h = ctx.inputs(cell, 4, 1)[:, 0], ctx.state(cell, 4)
    state, drives, params = arrays(cell, h, x)
    with mpmath.workdps(DIGITS):
        many = oracle.read(cell.spec, state, drives, params, "mpmath")
    bare, _ = apart(cell, x)
    expected = project(cell, digits(np.array(many, dtype=object)).to(h))
    ctx.within("output of a step − Spec", error(cell.output(h, bare), expected), READ)
    drives = cell.drives(bare)
    ctx.within("the same from drives", error(cell.output(h, drives=drives), expected), READ)


def outputs(cell: nn.Module, x: Tensor, states: Tensor) -> Tensor:
    """The read-out of given states, all steps at once."""
    bare, _ = apart(cell, x)
    return cell.output(states, bare)


def sequences(ctx: Context, cell: nn.Module, dtype: torch.dtype) -> None:
    x = ctx.inputs(cell, 3, LENGTH)
    h0 = ctx.state(cell, 3)
    resets = torch.rand(3, LENGTH, generator=ctx.generator) < 0.1
    resets = resets.to(x.device)
    leaves = [x.requires_grad_(), h0.requires_grad_(), *cell.parameters()]
    states = loop(cell, x, h0, resets)
    expected = outputs(cell, x, states)
    weights = ctx.like(cell, ctx.normal(*expected.shape))
    last = ctx.like(cell, ctx.normal(*h0.shape))

    def gradients(y: Tensor, final: Tensor) -> tuple[Tensor, ...]:
        loss = (y * weights).sum() + (final * last).sum()
        return torch.autograd.grad(loss, leaves, materialize_grads=True)

    wanted = gradients(expected, states[:, -1])
    kappa = amplification(cell, states.detach(), h0.detach(), x.detach())
    bare, more = apart(cell, x)
    for method in ("auto", "sequential", "shooting"):
        layer = pararnn.ParaRNN(cell, solver=method)
        y, h_n = layer(bare, h0.unsqueeze(0), resets=resets, **more)
        label = f"{method}, {name(dtype)}"
        bound = tolerance(dtype, kappa)
        ctx.within(f"output − read-out of the loop, {label}", error(y, expected), bound)
        ctx.within(f"final state − loop, {label}", error(h_n[0], states[:, -1]), bound)
        for got, want in zip(gradients(y, h_n[0]), wanted, strict=True):
            bound = gradient_tolerance(dtype, kappa)
            ctx.within(f"gradients, {label}", error(got, want), bound)
    stepwise, state = [], h0.unsqueeze(0)
    for t in range(9):
        more_t = {key: value[:, t] for key, value in more.items()}
        y_t, state = layer.step(bare[:, t], torch.where(
            resets[:, t].reshape(1, -1, *(1,) * (h0.ndim - 1)), 0, state), **more_t)  # fmt: skip
        stepwise.append(y_t)
    ctx.within(
        f"step by step, {name(dtype)}",
        error(torch.stack(stepwise, 1), expected[:, :9]),
        tolerance(dtype, kappa),
    )


def poisoned(ctx: Context, cell: nn.Module) -> None:
    """A NaN in one input leaves earlier outputs and other rows as they are."""
    x = ctx.inputs(cell, 2, LENGTH)
    layer, at = pararnn.ParaRNN(cell), LENGTH // 2
    bad = x.clone()
    bad[0, at, 0] = torch.nan
    found = []
    for given in (x, bad):
        bare, more = apart(cell, given)
        found.append(layer(bare, **more)[0].detach())
    ctx.same_bits("earlier outputs, with a NaN later", found[1][0, :at], found[0][0, :at])
    ctx.same_bits("another row, with a NaN in one", found[1][1], found[0][1])
    ctx.require(bool(found[1][0, at:].isnan().all()), "a NaN in the input did not reach the output")
