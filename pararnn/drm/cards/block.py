"""Card of the block path, the mixer and the token residual (notes, sections 7 and 8)."""

from __future__ import annotations

from pararnn.spec import Spec, tanh

from ..mixer import CausalLocalMixer
from ..residual import TokenStateResidual
from .part import part

with Spec("block path", axes=("n",)) as DISPLACEMENT:
    _p = DISPLACEMENT.state("p")
    (_u_c,) = DISPLACEMENT.drives("u_c", of="y")
    (_a,) = DISPLACEMENT.params("a")
    (_dt,) = DISPLACEMENT.constants("dt", axes=())
    _c = DISPLACEMENT.let("c", tanh(_u_c))
    DISPLACEMENT.next(_p, _p + _dt * _a * _c)

BLOCK = part(
    "drm_block",
    CausalLocalMixer,
    TokenStateResidual,
    displacement=DISPLACEMENT,
)
