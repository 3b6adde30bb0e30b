"""The tables of variants, from the data of the switch matrix."""

from __future__ import annotations

from collections.abc import Mapping

from pararnn.cells import Table

from ..variants import CONTROLS, VARIANTS, Variant

_HEADER = (
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
)


def _table(rows: Mapping[str, Variant], caption: str) -> Table:
    """One row a variant, at the published 125M size."""
    return Table(caption, _HEADER, tuple(map(_row, rows.values())), prose=(1,))


def _row(v: Variant) -> tuple[str, ...]:
    c = v.config()
    if not c.metric:
        metric = "–"
    elif c.naturalization_strength:
        metric = f"`{c.naturalization_form}` {c.naturalization_strength}"
    else:
        metric = "unused"
    growth = f", {c.mixer_dilation_growth}" if c.mixer_dilation_growth > 1 else ""
    terms = [name for name, weight in v.losses.terms().items() if weight]
    return (
        f"`{v.name}`",
        v.about,
        f"`{c.transition}`",
        metric,
        f"{c.mixer_hidden}×{c.mixer_layers}{growth}" if c.mixer else "–",
        str(c.token_residual_scale) if c.token_residual else "–",
        str(c.memory_hidden) if c.memory else "–",
        str(c.block_length),
        f"{len(terms)} terms" if len(terms) > 1 else "".join(f"`{t}`" for t in terms) or "–",
        f"{v.parameters:,}",
    )


TABLES = (
    ("variants", _table(VARIANTS, "Variants of the DRM")),
    ("controls", _table(CONTROLS, "Controls of the DRM that were not published")),
)
