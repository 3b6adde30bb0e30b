"""Card of directions, flow and update (notes, sections 2, 3 and 6)."""

from __future__ import annotations

from dataclasses import replace

import sympy

from pararnn.cells import Deviation, Formula, Part, Symbol
from pararnn.spec import Fragment, maximum, sigmoid, tanh

from ..direction import DirectionField
from ..dynamics import DRMDynamics
from ..flow import DirectStateTransition, DRMFlow
from .notes import NOTES

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

FLOW = Part(
    name="DRMFlow",
    title="DRM: directions and flow",
    slug="drm_flow",
    family="DRM",
    checked_by="pytest conformance --cell DRM",
    fidelity=("notes-faithful",),
    modules=(DRMFlow, DirectionField, DirectStateTransition, DRMDynamics),
    summary="The vector field that moves the state: learned directions with soft gates, and "
    "coefficients of state and token; or, without directions, one direct transition. The recurrent "
    "path takes an Euler step of it for every token.",
    sources=(replace(NOTES, equations="sections 2, 3 and 6"),),
    symbols=(
        Symbol("z_t", "(B, d_state)", "state that has absorbed the token of step t"),
        Symbol("e_t", "(B, d_token)", "embedding of the token"),
        Symbol("g_t", "(B, hidden_size)", "features of the state"),
        Symbol("V_t", "(B, n_directions, d_state)", "directions, one a row"),
        Symbol("a_t", "(B, n_directions)", "gates, in (0, 1)"),
        Symbol(r"\mathrm{dimD}_t", "(B,)", "sum of the gates"),
        Symbol("y_t", "(B, hidden_size)", "features of state and token"),
        Symbol("c_t", "(B, n_directions)", "coefficients, in [-1, 1]"),
        Symbol(r"v_{\mathrm{raw},t}", "(B, d_state)", "raw velocity"),
        Symbol("T_t", "(B, d_state)", "raw velocity without directions"),
        Symbol("v_t", "(B, d_state)", "applied velocity, naturalized if there is a metric"),
        Symbol("q_t", "(B, d_state)", "state before it is bounded"),
        Symbol(r"\beta, \tau", "scalar", "gate_logit_bias and gate_temperature, not trained"),
        Symbol(r"\mathrm{dt}, R", "scalar", "step size and state_radius"),
        Symbol(r"\Phi", "(direction_basis, d_state)", "learned basis; without one, the identity"),
    ),
    equations=(
        Formula(
            "g", r"g_t = \operatorname{GELU}(A_2 \operatorname{GELU}(A_1 z_{t-1} + b_1) + b_2)"
        ),
        Formula(
            "V",
            r"V_{t,i} = \frac{r_{t,i}}{\lVert r_{t,i} \rVert},\quad "
            r"r_t = \operatorname{reshape}(W_V g_t + b_V)\, \Phi",
        ),
        Formula("y", r"y_t = \operatorname{GELU}(C_1 [z_{t-1}; e_t] + b_C)"),
        VELOCITY,
        Formula("dimD", r"\mathrm{dimD}_t = \sum_i a_{t,i}"),
        DIRECT,
        STEP,
    ),
    update="v_raw",
    structure=("dense",),
    path="sweeps or shooting",
    parallel_path="The recurrent path is a nonlinear recurrence whose Jacobian is dense. With "
    "path='parallel' it is solved to a tolerance by sweeps, each a batch of velocities and a "
    "linear recurrence of the bound's Jacobian, with the gradients of the loop; the output says whether they settled, what they "
    "cost and how far the states may be off. Multiple shooting solves it too. "
    "The block path approximates it.",
    numerics="Norms of directions are at least direction_floor, in float16 6.1e-5, where they divide; "
    "the gradient of a row is divided by its norm too. The bound is a norm clip "
    "and a tanh of each coordinate, written as one formula; it is no projection, so bounding twice "
    "moves the state again.",
    not_claimed=(
        "The sum of the gates, dimD, is no rank: not that of the metric, which is d_state, and not "
        "the formal rank of a degenerate one (section 2).",
        "Directions are not orthogonal, and not independent in general (section 2).",
        "Soft gates are never 0, so without gate_top_k the span of the directions with open gates is "
        "that of all; and only the raw velocity is in it: naturalization leaves it.",
        "That directions help is not claimed: the published comparison of J with J_NO_DIRECTION "
        "favours the latter, and their step sizes differ.",
    ),
    deviations=(
        Deviation(
            "Directions are divided by their norm by default",
            "the notes call it optional; the published system does it",
            "normalize_directions=False leaves them as they are",
            "tests/drm/test_direction.py",
        ),
        Deviation(
            "Norms of directions have a floor, 1e-12, that can be raised; of equal gates the first are "
            "kept",
            "the notes say nothing of directions that vanish; the published floor is 1e-12",
            "direction_floor bounds the factor by which the gradient of a vanishing direction grows, "
            "1e12 by default",
            "tests/drm/test_direction.py",
        ),
        Deviation(
            "Gates have a temperature of 1.5 and a bias of -1; the largest k alone can be kept",
            "the published system has them, the notes only say that gates are in [0, 1]",
            "a gate whose trained part is 0 is 0.34",
            "drm-model",
        ),
        Deviation(
            "With direction_basis=q all directions are combinations of q learned vectors",
            "the published 125M models have q = 128; the default here is none",
            "with q the raw velocity stays in one q-dimensional space, whatever the state",
            "drm-span",
        ),
        Deviation(
            "A direct transition can be scaled so that its velocities start as long as those of "
            "directions would",
            "section 3 has T as it is, and so has the published J_NO_DIRECTION, whose first steps are "
            "15 times longer than those of J",
            "direct_scale='matched', off by default, is the control that tells the length of a step "
            "from what directions do",
            "tests/drm/test_controls.py",
        ),
        Deviation(
            "The bound has this form, with R = 8",
            "the notes say norm clipping and a tanh of each coordinate, without a formula",
            "R does not grow with the width, so small models feel it later",
            "drm-model",
        ),
        Deviation(
            "The recurrent path may keep its geometry for several steps and cut its graph in "
            "training",
            "geometry_interval and truncation; the published file has 4 and 64, the default and the "
            "variants here 1 and 0",
            "with them a step depends on more than its state and token, and the parallel solve "
            "refuses",
            "tests/drm/test_parallel.py",
        ),
        Deviation(
            "dt is 0.1 by default and 0.08 in the variants",
            "the notes give no number; as published",
            "none beside the length of a step",
            "drm-model",
        ),
        Deviation(
            "On the recurrent path a token can take several flow steps of dt; geometry_interval "
            "counts them",
            "the notes have one step a token; the published system can take several, and takes one",
            "flow_steps=1 by default; more are an error on other paths and for losses that read "
            "the trace",
            "tests/drm/test_paths.py",
        ),
        Deviation(
            "The recurrent path runs without directions and without a metric",
            "the published one needs both",
            "J_NO_METRIC, J_NO_DIRECTION and the direct controls have a recurrent path",
            "tests/drm/test_paths.py",
        ),
        Deviation(
            "Without directions dimD is 0 where the mixer reads it",
            "as in the published system; the notes do not say",
            "none",
            "drm-model",
        ),
        Deviation(
            "gate_temperature must be above 0",
            "the published system takes 1e-6 for anything below",
            "other values are an error",
            "tests/drm/test_config.py",
        ),
    ),
)
