"""Clauses about the DRM. Models are tiny variants in float64 whose parameters are drawn afresh."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from typing import Any

import mpmath
import torch
from torch import Tensor, nn

from pararnn import drm
from pararnn.drm.variants import TINY

from ..context import UNIT_ROUNDOFF, Context, error
from ..drm_reference import Written
from . import checks
from .solving import name as dtype_name

EXACT, WRITTEN = 1e-13, 1e-12
TOKENS = TINY["vocab_size"]
STRONG = {"dt": 0.5, "state_radius": 1.5}
"""Steps and a bound that show: states move by a part of the radius in every step."""
RECURRENT = {"path": "recurrent", "block_carry": "base", "refinement_layers": 0,
             "geometry_interval": 1, "truncation": 0}  # fmt: skip
PARALLEL = {**RECURRENT, "path": "parallel"}
OPTIONS: tuple[dict[str, Any], ...] = (
    RECURRENT,
    {**RECURRENT, "geometry_interval": 3, "flow_steps": 2},
    PARALLEL,
    {**PARALLEL, "parallel_window": 5},
    {"block_length": 0},
    {"block_length": 1},
    {"block_carry": "final"},
    {"memory_start": "block_state"},
    {"bound_increments": True},
    {"bound_corrections": True},
    {"bounded_state": False},
    {"gate_top_k": 2, "gate_top_k_renormalize": True},
    {"direction_basis": 0, "metric_basis": 0, "normalize_directions": False},
    {"metric_rank": 0},
    {"naturalization_strength": 1.0},
    {"naturalization_precision": "single"},
    {"naturalization_precision": "published"},
    {"naturalization_form": "subspace"},
    {"naturalization_form": "orthonormal"},
    {"risk": "enabled"},
    {"mixer_layers": 3, "mixer_dilation_growth": 2},
    {"refinement_layers": 2},
    {"emitter_layers": 2, "emitter_form": "swiglu", "emitter_residual": True},
    {"state_radius": 0.1, "block_carry": "final"},
)


def configuration(name: str = "J", published: bool = False, **changes: Any) -> drm.DRMConfig:
    config = drm.variant(name).config(**TINY)
    if published:
        config = config.published().changed(naturalization_warmup=0)
    return config.changed(**changes)


def drawn(ctx: Context, config: drm.DRMConfig) -> drm.DRM:
    """A model in evaluation, none of its parameters zero."""
    model = drm.DRM(config).double()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(ctx.uniform(*p.shape, high=0.45 if p.ndim < 2 else 1.2 * p.shape[-1] ** -0.5))
    return model.to(ctx.device).eval()


def tokens(ctx: Context, batch: int, length: int) -> Tensor:
    made = torch.randint(TOKENS, (batch, length), generator=ctx.generator)
    return made.to(ctx.device)


def variants() -> Iterator[tuple[str, bool]]:
    """Every variant, as in the notes and as published."""
    yield from ((name, published) for name in drm.VARIANTS for published in (False, True))


def label(name: str, published: bool) -> str:
    return f"{name}, {'published' if published else 'notes'}"


def moving(name: str) -> bool:
    """Whether the variant has base dynamics and no refinement, and so a recurrent path."""
    config = configuration(name)
    return config.transition != "none" and not config.refinement_layers


# -- the model -------------------------------------------------------------------------------------


@checks("drm-model")
def model(ctx: Context) -> None:
    for name, published in variants():
        with ctx.explained(label(name, published)):
            written_out(ctx, configuration(name, published, **STRONG))
        if moving(name) and not published:
            with ctx.explained(f"{name}, recurrent"):
                written_out(ctx, configuration(name, **STRONG, **RECURRENT))
        row = drm.variant(name)
        counted = drm.parameter_count(row.config())
        ctx.require(
            counted == row.parameters,
            f"{name}: got {counted:,} parameters, expected the published {row.parameters:,}",
        )
    for changes in ({"direction_basis": 0, "metric_basis": 0}, {"metric_rank": 0}):
        with ctx.explained(str(changes)):
            written_out(ctx, configuration(**STRONG, **changes))


def written_out(ctx: Context, config: drm.DRMConfig) -> None:
    made, x = drawn(ctx, config), tokens(ctx, 2, 11)
    with torch.no_grad():
        got = made(x).logits.cpu()
    written = Written(made.cpu())
    wanted = torch.stack([written.logits(row) for row in x.cpu()])
    ctx.within("logits", error(got, wanted), WRITTEN)


# -- metric and naturalization ---------------------------------------------------------------------


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


@checks("drm-ablation")
def ablation(ctx: Context) -> None:
    settings = [(dtype, False) for dtype in ctx.wide_dtypes()]
    settings += [(torch.float32, True)] if torch.bfloat16 in ctx.dtypes else []
    # The published semantics carry states from block to block that the recurrent path does not have.
    for published, path in ((False, {}), (True, {}), (False, RECURRENT)):
        for dtype, autocast in settings:
            place = f"{label('J', published)}, {path.get('path', 'block')}, {dtype_name(dtype)}"
            with (
                ctx.explained(f"{place}{', bfloat16 autocast' if autocast else ''}"),
                torch.autocast(ctx.device.type, torch.bfloat16, enabled=autocast),
            ):
                same_after_training(
                    ctx,
                    dtype,
                    configuration("J_NO_METRIC", published, seed=5, **path),
                    configuration("J_NO_NATURALIZATION", published, seed=5, **path),
                )


def same_after_training(ctx: Context, dtype: torch.dtype, *configs: drm.DRMConfig) -> None:
    """Logits and parameters over steps of AdamW."""
    one, two = (drm.DRM(config).to(ctx.device, dtype) for config in configs)
    shared = dict(one.named_parameters())
    unused = {n: p.clone() for n, p in two.named_parameters() if n not in shared}
    ctx.require(bool(unused), "J_NO_NATURALIZATION: got no metric, expected an unused one")
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, weight_decay=0.1) for m in (one, two)]
    for step in range(4):
        text = tokens(ctx, 3, 12)
        outputs = [m(text[:, :-1], step=step) for m in (one, two)]
        ctx.same_bits("logits", outputs[1].logits, outputs[0].logits)
        for m, output, optimizer in zip((one, two), outputs, optimizers, strict=True):
            optimizer.zero_grad()
            drm.drm_loss(output, text[:, 1:], m.config).total.backward()
            optimizer.step()
    trained = dict(two.named_parameters())
    for name, p in shared.items():
        ctx.same_bits("parameters", trained[name], p)
    for name, p in unused.items():
        ctx.same_bits("parameters of the unused metric", trained[name], p)


# -- paths -----------------------------------------------------------------------------------------


@checks("drm-paths")
def paths(ctx: Context) -> None:
    for name in filter(moving, drm.VARIANTS):
        with ctx.explained(name), torch.no_grad():
            one = drawn(ctx, configuration(name, **STRONG, **RECURRENT))
            x = tokens(ctx, 3, 13)
            loop = one(x).base
            ctx.same_bits(
                "blocks of one token − loop", like(one, path="block", block_length=1)(x).base, loop
            )
            for window in (0, 5):
                found = like(one, path="parallel", parallel_window=window)(x)
                ctx.within("parallel − loop", error(found.base, loop), 1e-10)
            order = torch.randperm(13, generator=ctx.generator).to(ctx.device)
            blind = like(one, path="block", block_length=0)
            straight, mixed = (blind(y).base[:, -1] for y in (x, x[:, order]))
            ctx.within("end of a block in another order", error(mixed, straight), EXACT)
            gap = error(one(x[:, order]).base[:, -1], loop[:, -1])
            ctx.require(
                gap > 1e-4, f"loop in another order: got a difference of {gap:.1e}, expected one"
            )
            radius = torch.linalg.vector_norm(loop, dim=-1).max() / one.config.state_radius
            ctx.within("state / radius", radius, 1.0)
    still = drawn(ctx, configuration("J_NO_DIRECTION", **STRONG, **RECURRENT))
    x = tokens(ctx, 2, 9)
    for window in (0, 4):
        found = like(still, path="parallel", parallel_window=window)
        wanted = gradients(still, x)
        for gap in map(error, gradients(found, x), wanted):
            ctx.within("gradient of the parallel path", gap, 1e-9)


def like(made: drm.DRM, **changes: Any) -> drm.DRM:
    """A model with the same parameters and another configuration."""
    other = drm.DRM(made.config.changed(**changes)).double().to(next(made.parameters()).device)
    other.load_state_dict(made.state_dict())
    return other.eval()


def gradients(made: nn.Module, x: Tensor) -> list[Tensor]:
    output = made(x)
    used = [p for p in made.parameters() if p.requires_grad]
    found = torch.autograd.grad(output.logits.square().sum(), used, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(used, found, strict=True)]


@checks("drm-causality")
def causality(ctx: Context) -> None:
    cases = [(label(n, p), configuration(n, p)) for n, p in variants()]
    cases += [(str(changes), configuration(**changes)) for changes in OPTIONS]
    for place, config in cases:
        with ctx.explained(place), torch.no_grad():
            made, x = drawn(ctx, config), tokens(ctx, 2, 14)
            whole = made(x)
            for cut in range(1, 14) if ctx.exhaustive else (1, 4, 7, 13):
                later = (x + 1 + torch.arange(14, device=x.device) % (TOKENS - 1)) % TOKENS
                changed = made(torch.cat([x[:, :cut], later[:, cut:]], 1))
                for what in ("logits", "states", "base"):
                    before = getattr(changed, what)[:, :cut]
                    ctx.same_bits(
                        f"{what} before the change", before, getattr(whole, what)[:, :cut]
                    )
                seen = (changed.logits[:, cut] != whole.logits[:, cut]).any(-1).all()
                ctx.require(bool(seen), "logits at the change: got the same ones, expected others")


@checks("drm-streaming")
def streaming(ctx: Context) -> None:
    cases = [(label(n, p), configuration(n, p)) for n, p in variants()]
    cases += [(f"{n}, recurrent", configuration(n, **RECURRENT)) for n in drm.VARIANTS if moving(n)]
    for place, config in cases:
        with ctx.explained(place), torch.no_grad():
            made, x = drawn(ctx, config), tokens(ctx, 2, 14)
            whole = made(x).logits
            parts, stream = [], None
            for piece in x.split([6, 1, 1, 1, 5], 1):
                logits, stream = drm.read(made, piece, stream)
                parts.append(logits)
            ctx.within("prefill and decode", error(torch.cat(parts, 1), whole), WRITTEN)


# -- memory and losses -----------------------------------------------------------------------------


@checks("drm-memory")
def memory(ctx: Context) -> None:
    for bias in (2.0, -10.0, 10.0):
        with ctx.explained(f"forget bias {bias}"), torch.no_grad():
            made = drawn(ctx, configuration(memory_forget_bias=bias)).memory
            states, e = 3 * ctx.normal(2, 517, 10), 3 * ctx.normal(2, 517, 7)
            start, first = ctx.normal(2, 10), ctx.normal(2, 10)
            states, e, start, first = (x.to(ctx.device) for x in (states, e, start, first))
            f, u = made.maps(states, start, e)
            m, loop = first, []
            for t in range(517):
                m = f[:, t] * m + u[:, t]
                loop.append(m)
            whole, last = made(states, start, e, first)
            ctx.within("scan − loop", error(whole, torch.stack(loop, 1)), EXACT)
            ctx.within("last memory", error(last, m), EXACT)
            size = first.abs().amax() + 1 / (1 - f.amax())
            ctx.within("memory / its bound", whole.abs().amax() / size, 1.0)
            for cut in (1, 64, 300):
                left, middle = made(states[:, :cut], start, e[:, :cut], first)
                right, _ = made(states[:, cut:], states[:, cut - 1], e[:, cut:], middle)
                ctx.within("pieces − whole", error(torch.cat([left, right], 1), whole), EXACT)
            underflows(ctx, made)
    with torch.no_grad():
        made = drawn(ctx, configuration()).memory.float()
        f, u = (x.to(ctx.device) for x in (ctx.uniform(2, 300, 10).abs(), ctx.normal(2, 300, 10)))
        f[:, ::7] = 0.0
        whole, _ = made.scan(f.float(), u.float(), torch.zeros_like(u[:, 0]).float())
        m, loop = torch.zeros_like(u[:, 0]), []
        for t in range(300):
            m = f[:, t].float().double() * m + u[:, t].float().double()
            loop.append(m)
        ctx.within("gates of exactly 0, float32", error(whole, torch.stack(loop, 1)), 1e-6)


def underflows(ctx: Context, made: nn.Module) -> None:
    """Gates whose product is 0 in floating point: a scan that divides by it has no answer."""
    f = torch.full((1, 400, 10), 1e-4, dtype=torch.float64, device=ctx.device)
    u = ctx.normal(1, 400, 10).to(ctx.device)
    found, _ = made.scan(f, u, u[:, 0])
    wanted = u + 1e-4 * torch.cat([u[:, :1], found[:, :-1]], 1)
    ctx.within("product of gates underflows", error(found, wanted), EXACT)


@checks("drm-terms")
def terms(ctx: Context) -> None:
    made = drawn(ctx, configuration(risk="enabled")).train()
    text = tokens(ctx, 3, 12)
    alone = gradients_of(ctx, made, text, poison=False)
    poisoned = gradients_of(ctx, made, text, poison=True)
    for name, p in alone.items():
        ctx.same_bits("gradient beside a NaN of weight 0", poisoned[name], p)
    idle = drawn(ctx, configuration("J_NO_NATURALIZATION")).train()
    for name, p in gradients_of(ctx, idle, text, poison=False).items():
        if "metric" in name:
            ctx.require(not p.numel(), f"{name}: got a gradient, expected none: no term uses it")
    weights = {
        f.name: 1.0 for f in dataclasses.fields(drm.LossWeights) if not f.metadata.get("target")
    }
    loss = drm.drm_loss(
        made(text[:, :-1], trace=True), text[:, 1:], made.config, drm.LossWeights(**weights)
    )
    total = loss.terms["ce"] + sum(v for k, v in loss.terms.items() if k != "ce")
    ctx.within("total − sum of all terms", error(loss.total, total), EXACT)
    ctx.require(bool(loss.total.isfinite()), "total of all terms: got no finite number")


def gradients_of(ctx: Context, made: drm.DRM, text: Tensor, poison: bool) -> dict[str, Tensor]:
    """Loss and gradients of the cross entropy, all other terms having weight 0; the recorded
    geometry is NaN if asked. A parameter without gradient has an empty one."""
    made.zero_grad()
    output = made(text[:, :-1], trace=True)
    if poison:
        trace = output.trace
        spoilt = {
            f.name: getattr(trace, f.name) * float("nan")
            for f in dataclasses.fields(trace)
            if f.name != "steps" and getattr(trace, f.name) is not None
        }
        output = dataclasses.replace(output, recorded=dataclasses.replace(trace, **spoilt))
    loss = drm.drm_loss(output, text[:, 1:], made.config, drm.LossWeights()).total
    loss.backward()
    found = {
        n: p.new_empty(0) if p.grad is None else copy.copy(p.grad)
        for n, p in made.named_parameters()
    }
    return {"loss": loss.detach(), **found}
