"""Clauses about the DRM's geometry: metric, naturalization, directions."""

from __future__ import annotations

import mpmath
import torch
from torch import Tensor

from pararnn import drm
from pararnn.testing.checks.solving import name as dtype_name
from pararnn.testing.context import UNIT_ROUNDOFF, Context, error

from ..drm_models import EXACT, RECURRENT, WRITTEN, configuration, drawn, tokens
from . import checks


@checks("drm-metric")
def metric(ctx: Context) -> None:
    for rank, basis in ((3, 0), (3, 4), (0, 0), (12, 0)):
        part = drm.RelationalMetric(10, rank, 12, basis=basis, eps=1e-3).double().to(ctx.device)
        z = 3 * ctx.normal(5, 10).to(ctx.device)
        with torch.no_grad():
            for p in part.parameters():
                p.copy_(4 * ctx.uniform(*p.shape))
            found = part(z)
            dense = found.dense()
            eigenvalues = torch.linalg.eigvalsh(dense)
            top = eigenvalues[..., -1]
            floor = (part.eps - eigenvalues[..., 0]) / top  # of the rank: no eigenvalue below eps
            ctx.within("floor of the eigenvalues", floor.max(), EXACT)
            ctx.within("asymmetry", ((dense - dense.mT).abs().amax((-2, -1)) / top).max(), EXACT)
            ratio = top / eigenvalues[..., 0] / found.condition_bound()
            ctx.within("condition / its bound", ratio.max(), 1 + 1e-9)
            v = ctx.normal(5, 6, 10).to(ctx.device)
            gram = v @ dense @ v.mT
            ctx.within("coupling", error(found.coupling(v), gram), EXACT)
            energy = found.energy(v)
            ctx.within("energy", error(energy, gram.diagonal(dim1=-2, dim2=-1)), EXACT)
            ctx.require(bool((energy > 0).all()), "energy: got a number ≤ 0 for a velocity ≠ 0")
    for _ in ctx.rounds():
        for scale in (0.0, 1.0, 1e2, 1e4, 1e6):
            for damping in (0.0, 0.3):
                with ctx.explained(f"U of size {scale:g}, damping {damping}"):
                    solved(ctx, scale, damping)
    differentiated(ctx)
    with ctx.explained("a NaN"):
        contained(ctx)


def solved(ctx: Context, scale: float, damping: float) -> None:
    """Woodbury against 50 digits; v lies near the span of U, where it cancels most."""
    diagonal = 0.31 + ctx.uniform(2, 9, high=0.3)
    unit, v = ctx.normal(2, 9, 4), ctx.normal(2, 3, 9)
    factor, v[:, 0] = scale * unit, unit[..., 0]
    for dtype in ctx.wide_dtypes():
        given = [x.to(ctx.device, dtype) for x in (diagonal, factor, v)]
        wanted, condition = dense_solution(*(x.double().cpu() for x in given), damping)
        rounded = UNIT_ROUNDOFF[dtype]
        for precision in ("safe", "single"):
            got = drm.solve_metric(drm.Metric(*given[:2]), given[2], damping, precision)
            inner = UNIT_ROUNDOFF[torch.float64] if precision == "safe" else rounded
            gap = torch.linalg.vector_norm(got.double().cpu() - wanted, dim=-1)
            relative = gap / torch.linalg.vector_norm(wanted, dim=-1)
            bound = rounded + 16 * inner * condition.unsqueeze(-1)
            ctx.within(
                f"{precision}, {dtype_name(dtype)}, of its bound", (relative / bound).max(), 1
            )


def differentiated(ctx: Context) -> None:
    """Derivatives by D, U and v are those of the dense solution."""
    given = [1.0 + ctx.uniform(2, 7, high=0.5), ctx.normal(2, 7, 3), ctx.normal(2, 4, 7)]
    given = [x.to(ctx.device).requires_grad_() for x in given]
    diagonal, factor, v = given
    weights = ctx.normal(2, 4, 7).to(ctx.device)
    woodbury = drm.solve_metric(drm.Metric(diagonal, factor), v, 0.3)
    dense = torch.diag_embed(diagonal + 0.3) + factor @ factor.mT
    direct = torch.linalg.solve(dense, v.mT).mT
    pairs = (torch.autograd.grad((x * weights).sum(), given) for x in (woodbury, direct))
    for got, wanted in zip(*pairs, strict=True):
        ctx.within("derivative of the solution", error(got, wanted), WRITTEN)


def dense_solution(
    diagonal: Tensor, factor: Tensor, v: Tensor, damping: float
) -> tuple[Tensor, Tensor]:
    """``(D + UUᵀ + λI)⁻¹ v`` at 50 digits, and the condition numbers of the matrices."""
    solutions, conditions = [], []
    with mpmath.workdps(50):
        for d, u, rows in zip(diagonal.tolist(), factor.tolist(), v.tolist(), strict=True):
            low = mpmath.matrix(u)
            g = mpmath.diag([x + mpmath.mpf(damping) for x in d]) + low * low.T
            solutions.append(
                [[float(x) for x in mpmath.lu_solve(g, mpmath.matrix(r))] for r in rows]
            )
            eigenvalues = mpmath.eigsy(g, eigvals_only=True)
            conditions.append(float(max(eigenvalues) / min(eigenvalues)))
    return torch.tensor(solutions, dtype=v.dtype), torch.tensor(conditions, dtype=v.dtype)


def contained(ctx: Context) -> None:
    """A state whose metric is not finite spoils no other."""
    diagonal = (1.0 + ctx.uniform(3, 7, high=0.5)).to(ctx.device)
    factor, v = ctx.normal(3, 7, 2).to(ctx.device), ctx.normal(3, 2, 7).to(ctx.device)
    clean = drm.solve_metric(drm.Metric(diagonal, factor), v, 0.3)
    factor[1, 4, 0] = float("nan")
    found = drm.solve_metric(drm.Metric(diagonal, factor), v, 0.3)
    ctx.same_bits("other states", found[[0, 2]], clean[[0, 2]])
    ctx.require(bool(found[1].isnan().any()), "its own state: got numbers, expected NaN")


@checks("drm-span")
def span(ctx: Context) -> None:
    for changes in ({}, {"direction_basis": 0}, {"gate_top_k": 2}):
        dynamics = drawn(ctx, configuration(**changes)).dynamics
        z, e = ctx.normal(4, 10).to(ctx.device), ctx.normal(4, 6, 7).to(ctx.device)
        with torch.no_grad():
            geometry = dynamics.geometry(z)
            vectors, gates = geometry.directions.vectors, geometry.directions.gates
            length = torch.linalg.vector_norm(vectors, dim=-1)
            ctx.within("length of a direction − 1", (length - 1).abs().max(), EXACT)
            outside = torch.maximum(-gates, gates - 1).max()
            ctx.within("gates outside of [0, 1]", outside, 0.0)
            raw = dynamics.velocity(geometry, z, e, 0.0)
            ctx.within("raw velocity outside of the span", beside(raw, vectors), EXACT)
            post = dynamics.velocity(geometry, z, e, 0.5)
            ctx.require(
                beside(post, vectors) > 1e-4,
                "naturalized velocity: got one in the span, expected one that has left it",
            )
    for form in ("subspace", "orthonormal"):
        dynamics = drawn(ctx, configuration(naturalization_form=form)).dynamics
        z, e = ctx.normal(4, 10).to(ctx.device), ctx.normal(4, 6, 7).to(ctx.device)
        with torch.no_grad():
            geometry = dynamics.geometry(z)
            inside = dynamics.velocity(geometry, z, e, 1.0)
            ctx.within(form, beside(inside, geometry.directions.vectors), 1e-11)
    still = {"metric": False, "naturalization_strength": 0.0, "bounded_state": False}
    made = drawn(ctx, configuration(direction_basis=4, **still, **RECURRENT))
    with torch.no_grad():
        base = made(tokens(ctx, 3, 12)).base
        moved = base - made.initializer(3).unsqueeze(1)
        basis = made.dynamics.direction.basis
        ctx.within("movement outside of the basis", beside(moved, basis.expand(3, -1, -1)), EXACT)


def beside(rows: Tensor, vectors: Tensor) -> float:
    """Largest part of a row that is not in the span of some vectors, over its length."""
    q, _ = torch.linalg.qr(vectors.mT)
    rest = rows - (rows @ q) @ q.mT
    return float(
        (torch.linalg.vector_norm(rest, dim=-1) / torch.linalg.vector_norm(rows, dim=-1)).max()
    )
