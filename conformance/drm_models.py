"""The DRMs that clauses are about: tiny variants in float64 whose parameters are drawn afresh."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from pararnn import drm
from pararnn.drm.variants import TINY
from pararnn.testing.context import Context

EXACT, WRITTEN = 1e-13, 1e-12
TOKENS = TINY["vocab_size"]
STRONG = {"dt": 0.5, "state_radius": 1.5}
"""Steps and a bound that show: states move by a part of the radius in every step."""
RECURRENT = {"path": "recurrent", "block_carry": "base", "refinement_layers": 0,
             "geometry_interval": 1, "truncation": 0}  # fmt: skip


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
