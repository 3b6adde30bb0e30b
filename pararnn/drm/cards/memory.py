"""Card of the selective memory (notes, section 9)."""

from __future__ import annotations

from dataclasses import replace

from pararnn.cells import Deviation, Formula, Part, Source, Symbol
from pararnn.spec import Fragment, Spec, sigmoid, tanh

from ..memory import SelectiveMemory
from .notes import NOTES
from .switches import switches

SCAN = Source(
    key="martin2018parallelizing",
    authors="Martin, Cundy",
    title="Parallelizing Linear Recurrent Neural Nets Over Sequence Length",
    venue="ICLR 2018",
    year=2018,
    arxiv="1709.04057",
    equations="the scan of affine maps over time",
    bibtex="""@inproceedings{martin2018parallelizing,
  title     = {Parallelizing Linear Recurrent Neural Nets Over Sequence Length},
  author    = {Martin, Eric and Cundy, Chris},
  booktitle = {International Conference on Learning Representations},
  year      = {2018},
  eprint    = {1709.04057},
  archivePrefix = {arXiv}
}""",
)

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

MEMORY = Part(
    name="SelectiveMemory",
    title="DRM: selective memory",
    slug="drm_memory",
    family="DRM",
    checked_by="pytest conformance --cell DRM",
    fidelity=("notes-faithful",),
    modules=(SelectiveMemory,),
    summary="A memory that forgets and writes coordinate by coordinate, with gates that see the "
    "state before it and the token. It is linear in itself, so one associative scan solves it.",
    sources=(replace(NOTES, equations="section 9"), SCAN),
    symbols=(
        Symbol("z'_t", "(B, d_state)", "state of step t before the memory"),
        Symbol("e_t", "(B, d_token)", "embedding of the token"),
        Symbol("h_t", "(B, memory_hidden)", "features that the gates see"),
        Symbol("f_t", "(B, d_state)", "forget gate: what stays"),
        Symbol("w_t", "(B, d_state)", "write gate"),
        Symbol("c_t", "(B, d_state)", "candidate, in [-1, 1]"),
        Symbol("m_t", "(B, d_state)", "memory"),
        Symbol("z^{J}_t", "(B, d_state)", "state with the memory"),
        Symbol(r"\beta", "scalar", "memory_forget_bias, 2 at first and not trained"),
        Symbol(r"\eta_{\mathrm{mem}}", "scalar", "memory_scale"),
        Symbol("W_*, b_*", "(d_state, memory_hidden), (d_state,)", "weights and biases"),
    ),
    equations=(
        Formula(
            "h", r"h_t = \operatorname{SiLU}(W_{\mathrm{in}} [z'_{t-1}; e_t] + b_{\mathrm{in}})"
        ),
        RECURRENCE,
        READ,
        Formula(
            "composition",
            r"(f_2, u_2) \circ (f_1, u_1) = (f_2 \odot f_1,\; u_2 + f_2 \odot u_1)",
        ),
    ),
    update="m",
    structure=("linear", "diag"),
    path="linear scan",
    parallel_path="One affine scan over time, one number a channel. The gates see states without "
    "the memory, so they are known before it starts. d_h is d_state here.",
    numerics="Affine maps are composed; nothing is divided by a product of gates, so gates near 0 "
    "are as exact as others. Under half precision gates, candidate and memory are in float32.",
    not_claimed=(
        "It is no implementation of Mamba: neither its parameterization of a selective state "
        "space nor its block (section 9).",
        "It is no associative memory: coordinates are added to, not looked up by a key.",
    ),
    switches=switches("memory_start", "bound_corrections"),
    deviations=(
        Deviation(
            "The first step of a block sees the state at the block's start in place of the state "
            "before it",
            "the notes say 'the previous causal base state' and nothing about blocks",
            "none within a block; with block_carry='base' the two differ by what mixer and token "
            "residual added to the last state of the block before",
            "drm-model",
        ),
        Deviation(
            "The memory is zero before the first token",
            "the notes leave the start open",
            "the first tokens read what they wrote, and nothing else",
            "drm-model",
        ),
        Deviation(
            "The forget gate has a fixed bias of 2 beside its trained one",
            "the published system has it, the notes do not",
            "where the trained part is 0, a step keeps σ(2) = 0.88 of the memory",
            "drm-model",
        ),
        Deviation(
            "h_t is one linear layer with a SiLU, of the token and the state before, which has mixer "
            "and token residual",
            "section 9 has no formula of h_t and says base state; as in the published system",
            "the gates see what the mixer saw",
            "drm-model",
        ),
        Deviation(
            "The scale of the memory is 0.1 by default",
            "the notes give no number; as published",
            "none beside its size",
            "drm-model",
        ),
        Deviation(
            "In half precision the product of write gate and candidate is taken in float32",
            "the published system rounds it to half precision first",
            "one rounding less",
            "tests/drm/test_memory.py",
        ),
        Deviation(
            "The scan goes through chunks, on a GPU in one kernel",
            "the published one doubles its reach log2(L) times",
            "work grows with L, not with L log L; the same recurrence",
            "drm-memory",
        ),
    ),
)
