"""Card of the metric and of naturalization (notes, sections 4 and 5)."""

from __future__ import annotations

from dataclasses import replace

from pararnn.cells import Deviation, Formula, Part, Symbol
from pararnn.spec import Fragment, softplus

from ..metric import RelationalMetric
from .notes import NOTES
from .switches import switches

with Fragment("RelationalMetric, diagonal") as DIAGONAL:
    (_u_D,) = DIAGONAL.drives("u_D", of="g")
    (_eps,) = DIAGONAL.constants("epsilon", axes=())
    DIAGONAL.let("D", softplus(_u_D) + _eps)

with Fragment("naturalize") as BLEND:
    (_raw,) = BLEND.given("v_raw")
    (_hat,) = BLEND.given("v_hat", latex=r"\hat{v}")
    (_s,) = BLEND.constants("s", axes=())
    BLEND.let("v", (1 - _s) * _raw + _s * _hat)

METRIC = Part(
    name="RelationalMetric",
    title="DRM: metric and naturalization",
    slug="drm_metric",
    family="DRM",
    checked_by="pytest conformance --cell DRM",
    fidelity=("notes-faithful",),
    modules=(RelationalMetric,),
    summary="A learned positive definite matrix of the state, a diagonal plus a matrix of low rank, "
    "and the preconditioning of velocities with it.",
    sources=(replace(NOTES, equations="sections 4 and 5"),),
    symbols=(
        Symbol("g_t", "(B, hidden_size)", "features of the state, of a network of their own"),
        Symbol("D_t", "(B, d_state)", "diagonal, above ε"),
        Symbol("U_t", "(B, d_state, metric_rank)", "factor of the low-rank part; r columns"),
        Symbol("G_t", "(B, d_state, d_state)", "metric; formed in tests and diagnostics only"),
        Symbol(r"\mathcal{E}_t(v)", "(B,)", "energy of a velocity"),
        Symbol("C_t", "(B, n_directions, n_directions)", "coupling of the directions"),
        Symbol(r"\rho_t", "(B,)", "risk mass, 0 without a risk field"),
        Symbol(r"v_{\mathrm{raw},t}, v_t", "(B, d_state)", "raw and applied velocity"),
        Symbol(r"\hat{v}_t", "(B, d_state)", "naturalized velocity"),
        Symbol(r"\Delta_t", "(B, d_state, d_state)", "damped diagonal, as a matrix"),
        Symbol(r"\epsilon", "scalar", "metric_eps, above 0"),
        Symbol(r"\lambda, s", "scalar", "naturalization_damping and naturalization_strength"),
    ),
    equations=(
        Formula(
            "g", r"g_t = \operatorname{GELU}(B_2 \operatorname{GELU}(B_1 z_{t-1} + b_1) + b_2)"
        ),
        DIAGONAL,
        Formula("U", r"U_t = r^{-1/2} \operatorname{reshape}(W_U g_t + b_U)"),
        Formula("G", r"G_t = \mathrm{diag}(D_t) + U_t U_t^\top"),
        Formula(
            "energy",
            r"\mathcal{E}_t(v) = v^\top (G_t + \rho_t I) v",
        ),
        Formula(
            "energy of the parts",
            r"\mathcal{E}_t(v) = v^\top (D_t \odot v) + \rho_t\, v^\top v + "
            r"\lVert U_t^\top v \rVert^2",
        ),
        Formula("coupling", r"C_t = V_t G_t V_t^\top"),
        Formula("rank", r"\mathrm{rank}(G_t) = d"),
        Formula(
            "condition",
            r"\mathrm{cond}(G_t) \le \mathrm{bound}_t = "
            r"\frac{\max D_t + \lVert U_t \rVert_F^2}{\min D_t}",
        ),
        Formula(
            "v_hat",
            r"\hat{v}_t = (G_t + \lambda I)^{-1} v_{\mathrm{raw},t}",
        ),
        Formula("damped", r"\Delta_t = \mathrm{diag}(D_t + \lambda)"),
        Formula(
            "woodbury",
            r"(G_t + \lambda I)^{-1} = \Delta_t^{-1} - \Delta_t^{-1} U_t "
            r"(I + U_t^\top \Delta_t^{-1} U_t)^{-1} U_t^\top \Delta_t^{-1}",
        ),
        BLEND,
    ),
    update="G",
    path="one factor a block",
    parallel_path="In a block there is one metric: its inner r×r matrix is factored once, for all "
    "tokens.",
    numerics="The inner matrix of the Woodbury identity has eigenvalues of at least 1 and is factored "
    "by Cholesky. For a velocity near the span of a large U the result is a small difference of "
    "large terms, with a relative error of about the rounding unit times the condition number: "
    "float64 by default, rounded once.",
    not_claimed=(
        "Naturalization is first-order preconditioning. It solves no geodesic boundary-value "
        "problem (section 5).",
        "No optimality of the action, local or global; no geodesic equation; neither uniqueness nor "
        "completeness; no convergence of the path to a geodesic. A low action is a diagnostic "
        "(section 14).",
        "The rank of G is d_state by construction. A number of eigenvalues above a threshold is an "
        "approximation with a tolerance, not the rank of a degenerate metric (section 4).",
        "No covariance: the inverse of G maps covectors to vectors, and here it is applied to "
        "vectors, so the result depends on the coordinates. Nothing ties G to distances between "
        "emitted distributions.",
        "That the metric helps is not claimed: the published gains of J over J_NO_METRIC and "
        "J_NO_NATURALIZATION are below the least gain that their authors ask for.",
    ),
    switches=switches("naturalization_precision", "evaluation_strength", "naturalization_warmup"),
    deviations=(
        Deviation(
            "ε must be above 0, and s at most 1",
            "with ε = 0 the rank of G could fall below d; the published system takes both",
            "other values are an error",
            "tests/drm/test_config.py",
        ),
        Deviation(
            "U is divided by the root of its number of columns; with metric_basis=q its columns "
            "are combinations of q learned vectors",
            "the published system does so, the notes do not say",
            "with q, the low-rank part sees one q-dimensional space of velocities only",
            "drm-model",
        ),
        Deviation(
            "Cholesky in place of a general solve",
            "the inner matrix is symmetric and positive definite",
            "a NaN stays in its own state",
            "drm-metric",
        ),
        Deviation(
            "The risk mass adds to the energy, not to naturalization",
            "as in the published system; the notes name risk only among the regularisers",
            "none on the states",
            "tests/drm/test_metric.py",
        ),
        Deviation(
            "naturalization_form='subspace' and 'orthonormal' solve in the span of the directions",
            "later variants of the published system, not in the notes; off by default",
            "the applied velocity stays in the span",
            "drm-span",
        ),
        Deviation(
            "metric=False demands naturalization_strength=0",
            "a strength without a metric would be ignored",
            "an error",
            "tests/drm/test_config.py",
        ),
        Deviation(
            "The metric is not evaluated where s is 0 and no trace is asked",
            "nothing looks at it",
            "J_NO_NATURALIZATION costs what J_NO_METRIC costs; the same bits",
            "drm-ablation",
        ),
        Deviation(
            "ε = 1e-4, λ = 0.3 and s = 0.5 by default",
            "the notes give no numbers; as published",
            "the eigenvalues of the whole map lie between 0.5 and 2.17",
            "tests/drm/test_naturalize.py",
        ),
        Deviation(
            "One factor of the inner matrix for all tokens of a block",
            "the published system solves one system for each token",
            "the same result for less work",
            "tests/drm/test_naturalize.py",
        ),
        Deviation(
            "In the span of the directions, a matrix that has no factor gives NaN in its own state",
            "the published system tries larger dampings, then takes the plain directions",
            "nothing is replaced silently",
            "tests/drm/test_naturalize.py",
        ),
        Deviation(
            "The bound of the condition number takes the least of D as at least 1e-8",
            "as published; the notes have no bound",
            "none with the default ε",
            "tests/drm/test_metric.py",
        ),
        Deviation(
            "Without a metric the energy of a velocity is its squared length",
            "as in the published system; the notes have no energy there",
            "an action can be measured for every variant with dynamics",
            "tests/drm/test_losses.py",
        ),
    ),
)
