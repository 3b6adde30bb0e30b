"""Clauses about the DRM over time: paths, causality, pieces of a text, the memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pararnn import drm
from pararnn.testing.context import Context, error

from ..drm_models import (
    EXACT,
    RECURRENT,
    STRONG,
    TOKENS,
    WRITTEN,
    configuration,
    drawn,
    label,
    moving,
    tokens,
    variants,
)
from . import checks

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
    lengths(ctx)
    still = drawn(ctx, configuration("J_NO_DIRECTION", **STRONG, **RECURRENT))
    x = tokens(ctx, 2, 9)
    for window in (0, 4):
        found = like(still, path="parallel", parallel_window=window)
        wanted = gradients(still, x)
        for gap in map(error, gradients(found, x), wanted):
            ctx.within("gradient of the parallel path", gap, 1e-9)


def lengths(ctx: Context) -> None:
    """States whose squares overflow or underflow are bounded as those between are."""
    for dtype, least, most in ((torch.float32, 1e-30, 1e37), (torch.float64, 1e-200, 1e300)):
        z = ctx.normal(7, 33).to(ctx.device, dtype)
        wanted = drm.bound_state(1e3 * z, 1.0)
        for size in (least, most):
            found = drm.bound_state(size * z, size / 1e3) / (size / 1e3)
            ctx.within("bounded state of another size", error(found, wanted), 1e-5)
            if size > 1:
                far = drm.bound_state(size * z, 1.0)
                ctx.within("bounded state of a long one", error(far, wanted), 1e-5)


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
