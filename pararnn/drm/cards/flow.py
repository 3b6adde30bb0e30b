"""Card of directions, flow and update (notes, sections 2, 3 and 6)."""

from __future__ import annotations

import sympy

from pararnn.spec import Fragment, maximum, sigmoid, tanh

from ..direction import DirectionField
from ..dynamics import DRMDynamics
from ..flow import DirectStateTransition, DRMFlow
from .part import part

with Fragment("DRMFlow", axes=("n", "d")) as VELOCITY:
    (_V,) = VELOCITY.given("V")
    (_u_a,) = VELOCITY.drives("u_a", axes=("n",), of="g")
    (_u_c,) = VELOCITY.drives("u_c", axes=("n",), of="y")
    _beta, _tau = VELOCITY.constants("beta tau", axes=())
    _a = VELOCITY.let("a", sigmoid((_u_a + _beta) / _tau))
    _c = VELOCITY.let("c", tanh(_u_c))
    _kappa = VELOCITY.let("kappa", _a * _c)
    VELOCITY.let("v_raw", VELOCITY.contract("v", _V * _kappa, over="n"))

with Fragment("DirectStateTransition") as DIRECT:
    (_u_T,) = DIRECT.drives("u_T", of="y")
    DIRECT.let("T", tanh(_u_T))

with Fragment("DRMDynamics, step") as STEP:
    _z = STEP.state("z")
    (_v,) = STEP.given("v")
    _dt, _R = STEP.constants("dt R", axes=())
    _q = STEP.let("q", _z + _dt * _v)
    _square = STEP.contract("square_norm", _q * _q, over="d")
    STEP.next(_z, _R * tanh(_q / maximum(_R, sympy.sqrt(_square))))

FLOW = part(
    "drm_flow",
    DRMFlow,
    DirectionField,
    DirectStateTransition,
    DRMDynamics,
    velocity=VELOCITY,
    direct=DIRECT,
    step=STEP,
)
