"""Card of the metric and of naturalization (notes, sections 4 and 5)."""

from __future__ import annotations

from pararnn.spec import Fragment, softplus

from ..metric import RelationalMetric
from .part import part

with Fragment("RelationalMetric, diagonal") as DIAGONAL:
    (_u_D,) = DIAGONAL.drives("u_D", of="g")
    (_eps,) = DIAGONAL.constants("epsilon", axes=())
    DIAGONAL.let("D", softplus(_u_D) + _eps)

with Fragment("naturalize") as BLEND:
    (_raw,) = BLEND.given("v_raw")
    (_hat,) = BLEND.given("v_hat", latex=r"\hat{v}")
    (_s,) = BLEND.constants("s", axes=())
    BLEND.let("v", (1 - _s) * _raw + _s * _hat)

METRIC = part(
    "drm_metric",
    RelationalMetric,
    diagonal=DIAGONAL,
    blend=BLEND,
)
