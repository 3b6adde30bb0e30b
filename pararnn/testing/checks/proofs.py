"""Clauses about how the iteration ends: how soon, how fast, and with what proven error."""

from __future__ import annotations

import math

import mpmath
import numpy as np
import torch

from pararnn import Cell, NewtonConfig, Spec
from pararnn.spec import oracle, tanh

from ..context import Context, NotApplicable, converted, error
from ..equations import DIGITS
from ..reference import block_bidiagonal, drives, jacobians, loop, shifted
from . import checks
from .solving import formed


@checks("convergence")
def convergence(ctx: Context) -> None:
    length = 40
    for gain, _ in ((g, r) for g in (1.0, 3.0) for r in ctx.rounds()):
        cell = ctx.cell(gain=gain)
        x, h0 = ctx.inputs(cell, 2, length), ctx.state(cell, 2)
        for jacobian in ("auto", "exact", "quasi", "none"):
            for chunk in (c for c in (1, 3, 8) if formed(cell, jacobian, c)):
                chunks = -(-length // chunk)
                config = NewtonConfig(
                    jacobian=jacobian,
                    chunk_length=chunk,
                    iteration_cap=chunks,
                    on_divergence="ignore",
                )
                solution = ctx.api.solve(cell, x, config, method="shooting", h0=h0)
                ctx.require(
                    solution.converged and not solution.fallback,
                    f"jacobian={jacobian!r}, {chunks} chunks of {chunk}, gain {gain}: got "
                    f"residual {solution.residual:.3g} after {solution.iterations} iterations",
                )
                ctx.within("iterations / chunks", solution.iterations / chunks, 1.0)
        if getattr(cell, "jac_structure", "") == "linear":
            one_iteration(ctx, cell, x, h0)
    quadratic(ctx)


def one_iteration(ctx: Context, cell, x, h0) -> None:
    reference = loop(cell, x, h0).detach()
    for chunk in (1, 3, 8):
        config = NewtonConfig(max_iters=1, jacobian="exact", chunk_length=chunk)
        states = ctx.api.solve(cell, x, config, method="shooting", h0=h0).states
        ctx.within("linear cell, error after one iteration", error(states, reference), 1e-12)


def quadratic(ctx: Context) -> None:
    """``e_{k+1} ≤ ½ κ_k M e_k²`` for Newton over single steps, with κ_k = ‖DF(H_k)⁻¹‖_∞ at the
    iterate and M the bound of the second derivative; rounding stops it at about 1e-14."""
    cell = ctx.cell(gain=1.0)
    spec = getattr(cell, "spec", None)
    if spec is None or any(slot.bounds is None for slot in spec.slots):
        return
    x, h0 = ctx.inputs(cell, 2, 24), ctx.state(cell, 2)
    truth = loop(cell, x, h0).detach()
    params = tuple(p.detach().cpu().numpy() for p in cell.recurrent_params())
    gap = {"gap": float(x[..., -1].max())} if spec.gap is not None else {}
    curvature = float(np.max(ctx.api.derivative_bounds(spec, params, cell.sizes, **gap)[1]))
    iterate, gap = None, math.inf
    for count in range(7):
        config = NewtonConfig(max_iters=count, jacobian="exact", on_divergence="ignore")
        following = ctx.api.solve(cell, x, config, method="newton", h0=h0).states.detach()
        distance = float((following - truth).abs().max())
        if iterate is not None:
            dense = block_bidiagonal(jacobians(cell, shifted(iterate, h0), x))
            kappa = float(torch.linalg.inv(dense).abs().sum(-1).max())
            # The states are one pass behind the corrected starts, which multiplies by one |J|.
            stretch = float(jacobians(cell, shifted(iterate, h0), x).abs().sum(-1).max())
            bound = 0.5 * kappa * curvature * gap**2 * max(1.0, stretch) + 1e-13
            ctx.within("Newton error / quadratic bound", distance / bound, 1.0)
        iterate, gap = following, distance
    ctx.within("error after 6 Newton iterations", gap, 1e-12)


def true_error(cell, states: torch.Tensor, u: torch.Tensor, h0: torch.Tensor) -> float:
    """Largest distance of the states to the trajectory of the given drives, in :data:`DIGITS` digits:
    the difference is rounded to float64, not the trajectory."""
    parts = tuple(d.detach().double().cpu().numpy() for d in cell.split(u))
    params = tuple(p.detach().double().cpu().numpy() for p in cell.recurrent_params())
    found = states.detach().double().cpu().numpy()
    with mpmath.workdps(DIGITS):
        start = h0.detach().double().cpu().numpy()
        truth = oracle.sequence(cell.spec, start, parts, params, "mpmath")
        truth = np.broadcast_to(truth, found.shape)
        return float(np.abs(truth - oracle.convert(found, "mpmath")).max())


def cancelling_cells(ctx: Context):
    """Own cells, drives and starts in float64, whose states are small where what makes them is not:
    a product of a large drive and a parameter, and of a large start and a weight."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    with Spec("LargeDrive") as s:
        h = s.state("h", bounds=(-1, 1))
        (u,) = s.drives("u")
        p, q = s.params("p q")
        w = s.map("w", structure="diagonal")
        s.next(h, tanh(u * p - q + w(h)))
    cell = Cell(2, 3, spec=s).double()
    with torch.no_grad():
        cell.p.copy_(1 + torch.rand(3, generator=generator, dtype=torch.float64))
        cell.q.copy_(1e4 * cell.p)
        cell.w.fill_(0.9)
    yield cell, 1e4 + 0.1 * normal(2, 30, 3), torch.zeros(2, 3, dtype=torch.float64)

    with Spec("LargeStart") as s:
        h = s.state("h")
        (u,) = s.drives("u")
        w = s.map("w", structure="diagonal")
        kept = s.let("kept", w(h))  # a stage of its own: no fused operation spares its rounding
        s.next(h, kept + u)
    cell = Cell(2, 3, spec=s).double()
    with torch.no_grad():
        cell.w.copy_(0.9 * torch.rand(3, generator=generator, dtype=torch.float64))
    h0, drive = 1e12 * normal(2, 3), normal(2, 9, 3)
    drive[:, 0] -= cell.w.detach() * h0
    yield cell, drive, h0


@checks("certificate")
def certificate(ctx: Context) -> None:
    cell = ctx.cell()
    spec = ctx.spec_of(cell)
    if spec.jac_structure != "linear" and any(slot.bounds is None for slot in spec.slots):
        raise NotApplicable(
            "a state slot declares no bounds, so nothing bounds the second derivative"
        )
    for own, u, start in cancelling_cells(ctx):
        own, u, start = own.to(ctx.device), u.to(ctx.device), start.to(ctx.device)
        for method in ("sequential", "shooting"):
            config = NewtonConfig(chunk_length=None if method == "sequential" else 4, certify=True)
            solution = ctx.api.solve(own, None, config, method=method, h0=start, drives=u)
            bound, measured = solution.error_bound, true_error(own, solution.states, u, start)
            place = f"{method}, own Spec {own.spec.name}"
            ctx.require(
                measured <= bound < 1e-2,
                f"{place}: got error {measured:.3g}, but error_bound {bound:.3g}",
            )
            ctx.within("measured error / certified bound", measured / bound, 1.0)
    length, certified = 23, 0
    for gain, _ in ((g, r) for g in (1.0, 3.0, 8.0) for r in ctx.rounds()):
        cell = ctx.cell(gain=gain)
        x, h0 = ctx.inputs(cell, 2, length), ctx.state(cell, 2)
        for dtype in ctx.wide_dtypes():
            narrow = converted(cell, dtype)
            given, initial = x.to(dtype), h0.to(dtype)
            u = drives(narrow, given)
            for method, chunk, counts in (
                ("newton", None, (None, 0, 1, 2, 3)),
                ("shooting", 5, (None, 1, 3)),
                ("sequential", None, (None,)),
            ):
                for count in counts:
                    config = NewtonConfig(
                        max_iters=count,
                        chunk_length=chunk,
                        certify=True,
                        on_divergence="sequential" if count is None else "ignore",
                    )
                    solution = ctx.api.solve(narrow, given, config, method=method, h0=initial)
                    bound = solution.error_bound
                    ctx.require(bound is not None, "certify=True: got error_bound=None")
                    measured = true_error(narrow, solution.states, u, initial)
                    place = f"{method}, max_iters={count}, gain {gain}, {dtype}"
                    if bound == math.inf:
                        ctx.require(
                            gain > 1 or not solution.converged or method == "sequential",
                            f"{place}: got no bound for a converged solve of a tame cell",
                        )
                        continue
                    certified += 1
                    ctx.require(
                        measured <= bound,
                        f"{place}: got error {measured:.3g}, but error_bound {bound:.3g}",
                    )
                    ctx.within("measured error / certified bound", measured / bound, 1.0)
                    if gain == 1 and count is None:
                        ctx.within(f"tightness: bound, {dtype}", bound, 1e-3)
    ctx.measured["solves certified"] = float(certified)
    ctx.require(certified > 0, "no solve was certified at all")
