"""Card of the selective memory (notes, section 9)."""

from __future__ import annotations

from pararnn.spec import Fragment, Spec, sigmoid, tanh

from ..memory import SelectiveMemory
from .part import part

with Spec("SelectiveMemory") as RECURRENCE:
    _m = RECURRENCE.state("m")
    _u = RECURRENCE.drives("u_f u_w u_c", of="h")
    (_beta,) = RECURRENCE.constants("beta", axes=())
    _f = RECURRENCE.let("f", sigmoid(_u[0] + _beta))
    _w = RECURRENCE.let("w", sigmoid(_u[1]))
    _c = RECURRENCE.let("c", tanh(_u[2]))
    RECURRENCE.next(_m, _f * _m + _w * _c)

with Fragment("SelectiveMemory, read") as READ:
    (_z,) = READ.given("z", latex="z'")
    (_mt,) = READ.given("m")
    (_eta,) = READ.constants("eta_mem", axes=())
    READ.let("z_J", _z + _eta * _mt, latex="z^{J}")

MEMORY = part(
    "drm_memory",
    SelectiveMemory,
    recurrence=RECURRENCE,
    read=READ,
)
