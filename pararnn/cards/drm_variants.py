"""The table of the DRM's variants, from the data of the switch matrix."""

from __future__ import annotations

from collections.abc import Mapping

from ..drm import Variant
from .typeset import prose, table

HEADER = [
    "Variant",
    "About",
    "Transition",
    "Metric",
    "Mixer",
    "Residual",
    "Memory",
    "Block",
    "Losses beside CE",
    "Parameters",
]


def variants(rows: Mapping[str, Variant], caption: str) -> str:
    """One row a variant, at the published 125M size."""
    return table(HEADER, [_row(v) for v in rows.values()], caption)


def _row(v: Variant) -> list[str]:
    c = v.config()
    if not c.metric:
        metric = "–"
    elif c.naturalization_strength:
        metric = f"`{c.naturalization_form}` {c.naturalization_strength}"
    else:
        metric = "unused"
    growth = f", {c.mixer_dilation_growth}" if c.mixer_dilation_growth > 1 else ""
    terms = [name for name, weight in v.losses.terms().items() if weight]
    return [
        f"`{v.name}`",
        prose(v.about),
        f"`{c.transition}`",
        metric,
        f"{c.mixer_hidden}×{c.mixer_layers}{growth}" if c.mixer else "–",
        str(c.token_residual_scale) if c.token_residual else "–",
        str(c.memory_hidden) if c.memory else "–",
        str(c.block_length),
        f"{len(terms)} terms" if len(terms) > 1 else "".join(f"`{t}`" for t in terms) or "–",
        f"{v.parameters:,}",
    ]
