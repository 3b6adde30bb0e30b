"""Card of the block path, the mixer and the token residual (notes, sections 7 and 8)."""

from __future__ import annotations

from dataclasses import replace

from pararnn.cells import Deviation, Formula, Part, Symbol
from pararnn.spec import Spec, tanh

from ..mixer import CausalLocalMixer
from ..residual import TokenStateResidual
from .notes import NOTES
from .switches import switches

with Spec("block path", axes=("n",)) as DISPLACEMENT:
    _p = DISPLACEMENT.state("p")
    (_u_c,) = DISPLACEMENT.drives("u_c", of="y")
    (_a,) = DISPLACEMENT.params("a")
    (_dt,) = DISPLACEMENT.constants("dt", axes=())
    _c = DISPLACEMENT.let("c", tanh(_u_c))
    DISPLACEMENT.next(_p, _p + _dt * _a * _c)

BLOCK = Part(
    name="block_states",
    title="DRM: block path",
    slug="drm_block",
    family="DRM",
    checked_by="pytest conformance --cell DRM",
    fidelity=("notes-faithful",),
    modules=(CausalLocalMixer, TokenStateResidual),
    summary="The approximation of the recurrent path by cumulative sums: geometry at the start of "
    "a block, one velocity a token, their sum. A causal convolution and a token residual correct it.",
    sources=(replace(NOTES, equations="sections 7 and 8"),),
    symbols=(
        Symbol("z_b", "(B, d_state)", "state at the start of the block"),
        Symbol("v_{b,j}", "(B, d_state)", "velocity of token j, with the geometry at z_b"),
        Symbol(r"\tilde{z}_{b,t}", "(B, d_state)", "base state after t tokens of the block"),
        Symbol("L", "scalar", "block_length"),
        Symbol("y_t", "(B, hidden_size)", "features of z_b and the token"),
        Symbol("c_t", "(B, n_directions)", "coefficients of the directions"),
        Symbol("p_t", "(B, n_directions)", "displacement along each direction, 0 at the start"),
        Symbol("a", "(B, n_directions)", "gates at z_b"),
        Symbol("V", "(B, n_directions, d_state)", "directions at z_b, one a row"),
        Symbol("N", "(B, d_state, d_state)", "naturalization at z_b, never formed"),
        Symbol(r"\mathrm{Bnd}", "function", "the bound of the flow's card"),
        Symbol(r"\bar{z}_t, z'_t", "(B, d_state)", "after the mixer, and after the token residual"),
        Symbol(r"F", "function", "linear, SiLU, causal depthwise convolutions, linear"),
        Symbol(
            r"\eta_{\mathrm{mix}}, \eta_{\mathrm{tok}}",
            "scalar",
            "mixer_scale, token_residual_scale",
        ),
    ),
    equations=(
        Formula(
            "base",
            r"\tilde{z}_{b,t} = \mathrm{Bnd}(z_b + \sum_{j \le t} \mathrm{dt}\, v_{b,j})",
        ),
        Formula("carry", r"z_{b+1} = \tilde{z}_{b,L}"),
        DISPLACEMENT,
        Formula("naturalization", r"N = (1 - s) I + s (G(z_b) + \lambda I)^{-1}"),
        Formula("span", r"\tilde{z}_{b,t} = \mathrm{Bnd}(z_b + N V^\top p_t)"),
        Formula(
            "mixer",
            r"\bar{z}_{1:L} = \tilde{z}_{1:L} + \eta_{\mathrm{mix}} "
            r"F(\tilde{z}, \Delta \tilde{z}, \mathrm{dt}\, v, e, \mathrm{dimD}, \rho)",
        ),
        Formula("residual", r"z'_t = \bar{z}_t + \eta_{\mathrm{tok}} W_{\mathrm{tok}} e_t"),
    ),
    update="base",
    structure=("linear", "diag"),
    path="prefix sum",
    parallel_path="Within a block everything is one batch and one prefix sum, one kernel on a GPU; base "
    "states of blocks come one after the other. With block_carry='base' the corrections of all blocks run at "
    "once. With directions a block moves along n fixed vectors, so its state is one "
    "number a direction, and that recurrence is linear, unless increments are bounded by "
    "themselves; its size is below, with d_h for n_directions.",
    numerics="With one token a block is the recurrent step, bit for bit, if increments are not "
    "bounded by themselves. The gap to the recurrent "
    "path grows with the length of the block, and at first weights with dt; block_gap measures it.",
    not_claimed=(
        "Block states are not those of the recurrent path. Causality holds for both, and says "
        "nothing about their difference (sections 7 and 12).",
        "The base path of a block does not see the order of its tokens: the sum at its end is the "
        "same for every permutation. Order within a block comes from the mixer and the memory.",
        "The end of a block moves within a space of n directions, naturalized; with a basis of q "
        "vectors, within q dimensions. That is a limit of the path, not a property of language. It "
        "holds before the bound, and for raw increments only: with bound_increments=True, as "
        "published, each increment goes through Bnd, which keeps no subspace, and a block can move in "
        "all d_state dimensions.",
    ),
    switches=switches(
        "block_carry", "recurrent_corrections", "bound_increments", "bound_corrections"
    ),
    deviations=(
        Deviation(
            "The mixer's padding starts anew in each block",
            "the notes say that only left padding is used",
            "the first tokens of a block see fewer tokens than the mixer reaches",
            "drm-model",
        ),
        Deviation(
            "Blocks are counted from the first token that a call is given; the last may be "
            "shorter; block_length=0 is one block",
            "the notes speak of one block",
            "the model takes a sequence up between blocks; read and generate take it up at any token, and "
            "keep the sum of the open block and what its corrections look at",
            "drm-streaming",
        ),
        Deviation(
            "With path='recurrent' mixer, token residual and memory correct the recurrent states, "
            "block by block",
            "the notes describe them for blocks; recurrent_corrections=False leaves them out, as the "
            "published system does",
            "a model can be trained on one path and compared with the other; where they act there, "
            "block_carry='final' is an error, as the recurrence carries its own state",
            "drm-model",
        ),
        Deviation(
            "The consistency of blocks is the mean square of base states minus states of the "
            "recurrence from the start of their block, of some blocks and of their first tokens",
            "section 11 names consistency proxies without a formula; that of the published system is "
            "a mean square against a detached rollout, also of one segment every few blocks, and "
            "where its segments lie is not known",
            "LossWeights: block_consistency, consistency_every and consistency_length; off by default, "
            "as published",
            "tests/drm/test_consistency.py",
        ),
        Deviation(
            "A refinement layer can evaluate more geometry at every position",
            "variant G of the published matrix, not in the notes; off by default",
            "refinement_layers=0 leaves it out",
            "tests/drm/test_model.py",
        ),
        Deviation(
            "F is a linear map, SiLU, residual layers of a causal depthwise convolution, SiLU and "
            "a linear map, and a linear map; it reads states, their differences, increments, "
            "embeddings, dimD and the risk mass",
            "section 7 names what it reads, not its form; this is that of the published system",
            "dimD, from 0 to n_directions, is not normalised",
            "drm-model",
        ),
        Deviation(
            "Scales of mixer and token residual are 0.1 by default; the variants have 0.2 for the "
            "mixer",
            "the notes give no numbers; as published",
            "none beside their size",
            "drm-model",
        ),
        Deviation(
            "Blocks of 64 tokens are the default",
            "the published classes take the recurrent path by default, the published runs took "
            "blocks of 64",
            "path and block_length choose",
            "drm-model",
        ),
        Deviation(
            "Without base dynamics the base state of a block is its start, and increments, dimD "
            "and risk mass are 0 for the mixer",
            "section 13 has no base state; as in the published system",
            "with block_carry='base' every block of SSM_CONTROL starts from z_0, and the memory "
            "alone goes on",
            "drm-model",
        ),
    ),
)
