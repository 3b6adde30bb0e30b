"""Clauses about the whole DRM: its equations, an ablation of it, its losses."""

from __future__ import annotations

import copy
import dataclasses

import torch
from torch import Tensor

from pararnn import drm
from pararnn.testing.checks.solving import name as dtype_name
from pararnn.testing.context import Context, error

from ..drm_models import (
    EXACT,
    RECURRENT,
    STRONG,
    WRITTEN,
    configuration,
    drawn,
    label,
    moving,
    tokens,
    variants,
)
from ..drm_reference import Written
from . import checks


@checks("drm-model")
def model(ctx: Context) -> None:
    for name, published in variants():
        with ctx.explained(label(name, published)):
            written_out(ctx, configuration(name, published, **STRONG))
        if moving(name):
            with ctx.explained(f"{label(name, published)}, recurrent"):
                written_out(ctx, configuration(name, published, **STRONG, **RECURRENT))
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
    for name in drm.VARIANTS:
        frozen(ctx, name)


def frozen(ctx: Context, name: str) -> None:
    """What is frozen has no gradient, and the rest has one; zeros where a call does not use it."""
    for published in (False, True):
        for path in ("block", "recurrent", "parallel"):
            config = configuration(name, published)
            if path != "block":
                if config.transition == "none" or (config.refinement_layers and not published):
                    continue
                config = config.changed(path=path)
            with ctx.explained(f"{label(name, published)}, {path}"):
                made, text = drm.DRM(config).to(ctx.device), tokens(ctx, 2, 6)
                given = made.initial_state(2).detach()
                for step, state in ((0, given), (1, None)):
                    made.zero_grad()
                    out = made(text[:, :-1], state, step=step)
                    drm.cross_entropy(out.logits, text[:, 1:]).backward()
                    for what, p in made.named_parameters():
                        ctx.require(
                            p.requires_grad == (p.grad is not None),
                            f"{what}, step {step}: got requires_grad={p.requires_grad} and "
                            f"{'no' if p.grad is None else 'a'} gradient, expected a gradient if and "
                            "only if it is not frozen",
                        )
                        if state is not None and what == "initializer.z0":
                            idle = p.grad is not None and not bool(p.grad.any())
                            ctx.require(idle, "z0: got a gradient from a call with a given state")


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
            if f.name != "steps" and isinstance(getattr(trace, f.name), Tensor)
        }
        output = dataclasses.replace(output, recorded=dataclasses.replace(trace, **spoilt))
    loss = drm.drm_loss(output, text[:, 1:], made.config, drm.LossWeights()).total
    loss.backward()
    found = {
        n: p.new_empty(0) if p.grad is None else copy.copy(p.grad)
        for n, p in made.named_parameters()
    }
    return {"loss": loss.detach(), **found}
