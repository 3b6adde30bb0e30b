"""Card of the whole model (notes, sections 1 and 10 to 16)."""

from __future__ import annotations

from dataclasses import replace

from pararnn.cells import Deviation, Formula, Part, Symbol

from ..emitter import LanguageEmitter
from ..initial import DRMStateInitializer, TokenEmbedding
from ..model import DRM
from ..risk import RiskField
from .notes import NOTES
from .switches import SWITCHES
from .variants import TABLES

MODEL = Part(
    name="DRM",
    title="DRM",
    slug="drm",
    family="DRM",
    checked_by="pytest conformance --cell DRM",
    fidelity=("notes-faithful",),
    modules=(DRM, TokenEmbedding, DRMStateInitializer, LanguageEmitter, RiskField),
    summary="The geometric state-space language model of the notes. Learned directions and a learned "
    "metric move a state; mixer, token residual and selective memory correct it; logits are read "
    "from it. Each is a switch.",
    sources=(replace(NOTES, equations="sections 1 and 10 to 16, and the parts"),),
    symbols=(
        Symbol("x_t", "(B,)", "token, an integer below vocab_size"),
        Symbol("e_t", "(B, d_token)", "its embedding"),
        Symbol("z_0", "(B, d_state)", "learned first state, the same for every sequence"),
        Symbol("v_t", "(B, d_state)", "applied velocity: directions and flow, metric"),
        Symbol(
            r"\tilde{z}_t", "(B, d_state)", "base state, by the block path or the recurrent path"
        ),
        Symbol(r"\bar{z}_t, z'_t, z^{J}_t", "(B, d_state)", "after mixer, token residual, memory"),
        Symbol(r"\ell_t", "(B, vocab_size)", "logits of the next token"),
        Symbol(r"b_t, u_t", "(B,)", "blindspot and dubiety, probabilities of the risk field"),
        Symbol(r"\rho_t", "(B,)", "risk mass, in [0, 10]"),
        Symbol(r"\mathcal{A}", "scalar", "action proxy"),
        Symbol(r"\mathcal{R}_k, \lambda_k", "scalar", "regularisers and their weights"),
    ),
    equations=(
        Formula("e", r"e_t = E(x_t)"),
        Formula("base", r"\tilde{z}_t = \mathrm{Bnd}(\tilde{z}_{t-1} + \mathrm{dt}\, v_t)"),
        Formula("mixer", r"\bar{z} = \tilde{z} + \eta_{\mathrm{mix}} F(\tilde{z}, \ldots)"),
        Formula("residual", r"z'_t = \bar{z}_t + \eta_{\mathrm{tok}} W_{\mathrm{tok}} e_t"),
        Formula("memory", r"z^{J}_t = z'_t + \eta_{\mathrm{mem}} m_t"),
        Formula("logits", r"\ell_t = f_{\mathrm{emit}}(z^{J}_t)"),
        Formula("p", r"p(x_{t+1} | x_1, \ldots, x_t) = \operatorname{softmax}(\ell_t)"),
        Formula(
            "cross entropy",
            r"\mathcal{L}_{\mathrm{CE}} = -\frac{1}{T} \sum_t \log p(x_{t+1} | x_1, \ldots, x_t)",
        ),
        Formula("action", r"\mathcal{A} = \sum_t \mathrm{dt}\, v_t^\top (G_t + \rho_t I) v_t"),
        Formula(
            "risk",
            r"\rho_t = \min(|\alpha_b|\, b_t^{|\beta_b|} + |\alpha_u|\, u_t^{|\beta_u|},\; 10)",
        ),
        Formula(
            "loss",
            r"\mathcal{L} = \mathcal{L}_{\mathrm{CE}} + \lambda_{\mathrm{action}} \mathcal{A} + "
            r"\sum_k \lambda_k \mathcal{R}_k",
        ),
    ),
    update="base",
    structure=("dense",),
    path="blocks; sweeps or shooting",
    parallel_path="The block path, the default, computes a block at once and blocks one after the "
    "other. The recurrent path can be solved in parallel, exactly. The memory is one scan.",
    numerics="Every path and option is causal, exactly: logits do not depend on later tokens. The "
    "system of the metric is solved in float64, the memory runs in float32 at least.",
    not_claimed=(
        "No geodesics: the metric is positive definite, the velocities follow directions and the "
        "action is measured, and none of that makes the path optimal, a solution of the geodesic "
        "equation, unique, complete or convergent to a geodesic (section 14).",
        "Nothing of the roadmap: no degenerate metric with a kernel, strata, anchors, transport, "
        "connection, holonomy, pullback metric in the dynamics, boundary-value solver or validated "
        "topology (section 15). The page of open problems has what can be measured of them.",
        "Causality does not make block states equal to recurrent ones (section 12).",
        "SSM_CONTROL is a control of the number of parameters. It is no control of computation, "
        "and no Mamba baseline (section 13).",
        "Angles given as cosine and sine are circular where they are used, which is nowhere in the "
        "model; no topology of learned trajectories follows (section 16).",
        "No superiority: neither directions, metric nor naturalization are shown to help.",
    ),
    switches=tuple(SWITCHES.values()),
    tables=TABLES,
    deviations=(
        Deviation(
            "The state of step t has absorbed the token of step t, and the logits of step t are "
            "read from it",
            "the notes write both that the state moves after it is read and that its logits "
            "predict the next token, which is off by one",
            "the logits of a token depend on it, as language modelling needs",
            "drm-causality",
        ),
        Deviation(
            "There is a risk field, in the energy only; its powers are taken through logarithms",
            "section 11 names risk among the regularisers without a formula; this is that of the "
            "published system, whose slope is infinite at 0 for powers below 1",
            "absent by default",
            "tests/drm/test_small_parts.py",
        ),
        Deviation(
            "Terms of the loss with weight 0 are not computed",
            "the published system multiplies them by 0, which makes NaN of an infinite term and "
            "lets weight decay act on parameters that nothing else moves",
            "none on finite losses",
            "drm-terms",
        ),
        Deviation(
            "A weight of the metric's diversity above that of its size is an error",
            "the loss would have no lower bound",
            "metric_diversity is at most metric_reg",
            "tests/drm/test_losses.py",
        ),
        Deviation(
            "Every part draws its first weights from a stream of its own",
            "section 5 compares variants whose shared parts start alike",
            "parts of equal size start with the same bits in all variants of a seed",
            "drm-ablation",
        ),
        Deviation(
            "Geodesic steps, directional candidates, superblocks, blocks within blocks, endpoint "
            "correction and fixed points with Anderson mixing are left out",
            "options of the published system beside the equations of the notes; the endpoint "
            "correction leaks later tokens into earlier states",
            "the recurrence itself is solved in parallel in their place",
            "drm-causality",
        ),
        Deviation(
            "Networks are two linear layers of width hidden_size with the exact GELU; those of a "
            "state alone have a GELU after both",
            "the notes only name them; these are those of the published system",
            "none",
            "drm-model",
        ),
        Deviation(
            "First weights are PyTorch's defaults, N(0, 1) for embeddings, N(0, 0.02²) for the "
            "bases and for z_0",
            "the notes do not say; the published system has these, and its z_0 is not known",
            "no output layer starts at zero",
            "tests/drm/test_small_parts.py",
        ),
        Deviation(
            "Dropout can act after the first GELU of every network, while training",
            "the published system has it, the notes do not; 0 in both by default",
            "the parallel path refuses it",
            "tests/drm/test_small_parts.py",
        ),
        Deviation(
            "The emitter is an RMS norm, a GELU layer and a linear one; emitter_layers, "
            "emitter_form and emitter_residual build others",
            "section 10 has a function without a form; these are the forms of the published "
            "system, which never ties them to the embedding",
            "one layer by default, as published",
            "tests/drm/test_small_parts.py",
        ),
        Deviation(
            "Regularisers have the formulas of LossWeights, in which entropy of the gates and "
            "variance of the metric are rewarded; the geometry of a block counts once for each of "
            "its tokens",
            "section 11 names them without formulas; these are the published ones",
            "all weights are 0 by default; the published default is AUXILIARY, the weights of "
            "variant A",
            "tests/drm/test_losses.py",
        ),
        Deviation(
            "The deviation of dimD has a floor under its root",
            "the slope of the root is infinite where dimD is constant",
            "a zero gradient there",
            "tests/drm/test_losses.py",
        ),
        Deviation(
            "The action takes applied velocities; with bound_increments=True bounded increments "
            "over dt",
            "section 11 has velocities; the published system has the latter in blocks",
            "none without a bound",
            "tests/drm/test_paths.py",
        ),
        Deviation(
            "risk='disabled' is a risk field that nothing uses",
            "the published system has one by default, so in variants A to G",
            "counts of parameters are the published ones; the default here is none",
            "tests/drm/test_variants.py",
        ),
        Deviation(
            "Text is read and generated with all parts, from the last end of a block",
            "not in the notes; the published system of their date generates by the bare "
            "recurrence, without mixer, token residual and memory",
            "reading in pieces gives the logits of the whole",
            "drm-streaming",
        ),
        Deviation(
            "There is no max_seq_len, tie_embeddings or use_toroidal_state",
            "fields of the published configuration that do nothing",
            "an unknown name is an error",
            "tests/drm/test_config.py",
        ),
        Deviation(
            "matched_memory gives the nearest width",
            "the published SSM_CONTROL has the whole part, 14,944",
            "14,945 for SSM_CONTROL at the published size; the variant has 14,944",
            "tests/drm/test_variants.py",
        ),
    ),
)
