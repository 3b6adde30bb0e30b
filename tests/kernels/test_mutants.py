"""Kernels that are wrong on purpose: every one must be noticed by a comparison with the loop.

A mutant replaces text in the printed kernels of one Spec; a case says with which plan and inputs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import pytest
import torch

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="mutants may read and write anywhere: interpreter only"
)

GRU, LSTM, CFC, TRIO = "ParaGRU[diag]", "ParaLSTM", "ParaCfC[published]", "trio"


@dataclass(frozen=True)
class Mutant:
    """``old`` is a regular expression, in the kernel ``within``; ``case`` goes to Case."""

    name: str
    old: str
    new: str
    within: str = ""
    case: dict = field(default_factory=dict)


def several(cell=GRU, **changes):
    return {"cell": cell, "T": 6, "length": 2, "warmup": 1, **changes}


# Two Newton corrections solve what is nearly linear, so nothing is left to repair.
NEWTON = several("nearly", T=7, repaired=False)
REDUCED = several("linear", T=7, corrections=1, repaired=False)
REPAIRED = several(scale=4, corrections=1, T=8)
MUTANTS = (
    # addresses
    Mutant("drive of the next channel", r"0 \* D \* u_c", "(0 * D + 1) * u_c", "walk"),
    Mutant("stride of channels taken as 1", r" \* u_c\)", ")", "walk", {"layout": "stride 2"}),
    Mutant("strides always packed", r"if PACKED:", "if True:", case={"layout": "time-major"}),
    Mutant("stride of the batch", r"b \* u_b", "b * T * u_t", "forward", {"layout": "one sample"}),
    Mutant("time gap of another step", r"dt \+ 1 \* dt_t", "dt + 0 * dt_t", "walk", {"cell": CFC}),
    Mutant("other slots overwrite each other", r"\* 2 \+ 1\) \* D", "* 2 + 0) * D", "walk", {"cell": TRIO}),
    Mutant("parameter of channel 0", r"tl.load\(w0 \+ d,", "tl.load(w0 + 0 * d,", "forward"),
    Mutant("scalar parameter read by channel", r"tl.load\(w2\)", "tl.load(w2 + d, mask=d < 1, other=0.0)", "forward", {"cell": TRIO}),
    # the walk
    Mutant("last steps forgotten", r"for _ in range\(n\):", "for _ in range(n - 1):", "walk"),
    Mutant("steps in flight stand still", r"u \+= ahead \* u_t", "u += 0 * ahead", "walk"),
    Mutant("pointer after whole blocks", r"u \+= whole \* u_t", "u += 2 * u_t", "walk", {"T": 1}),
    Mutant("reset one step late", r"x_1 != 0", "x_0 != 0", "walk", {"resets": "some", "T": 8}),
    Mutant("Jacobian through a reset", r"e11 = tl.where\(x_\d != 0, 0.0, e11\)", "pass", "walk", {**NEWTON, "resets": "some"}),
    Mutant("Jacobians multiplied the wrong way round", r"e00\*j01 \+ e01\*j11", "j00*e01 + j01*e11", "walk", NEWTON),
    # guesses
    Mutant("start state forgotten", r"lane & \(early == 0\)", "lane & (early < 0)", "forward"),
    Mutant("no warm-up", r"begin - W", "begin", "forward", {**NEWTON, "warmup": 9}),
    Mutant("final state of another chunk", r"if begin \+ L >= T:", "if begin + L < T:", "forward", several(warmup=9)),
    Mutant("final state not corrected", r"put\(final[^\n]*", "pass", "correct", several(T=4, scale=0.1)),
    # corrections
    Mutant("no correction", r"if tl.max\(loose.to\(tl.int32\)\) > 0:", "if chunk < 0:", "correct", NEWTON),
    Mutant("only neighbours look back", r"while \(left > 0\)", "while (left > 99)", "correct", NEWTON),
    Mutant("mismatch with the wrong sign", r"a0 = jump\(e0, s0\)", "a0 = jump(s0, e0)", "correct", NEWTON),
    Mutant("mismatch not recorded", r"tl.zeros\(\[1\], tl.float32\) \+ tl.maximum\(0.0, largest.*, True, True\)", "tl.zeros([1], tl.float32), True, True)", "correct", REPAIRED),
    Mutant("stops at the first block", r"met = tl.max\(tl.where\(lane, .*", "met = n < 99", "walk", several(length=5, T=10, scale=1.5)),
    # the repair
    Mutant("no repair", r"tol:\n        record", "99:\n        record", "repair", REPAIRED),
    Mutant("only one chunk repaired", r"> 0:\n                count", "> count:\n                count", "repair", REPAIRED),
    Mutant("repair leaves the final state", r"put\(final[^\n]*", "pass", "repair", REPAIRED),
    Mutant("repair not counted", r"\+ count, True", "+ 0, True", "repair", {**REPAIRED, "repaired": True}),
    # backward
    Mutant("cotangent of the last slot dropped", r"m0 \+ g0_1.to\(DTYPE\)", "m0", "walk_back"),
    Mutant("cotangent of other slots dropped", r"m1 \+ g1_1.to\(DTYPE\)", "m1", "walk_back", {"cell": TRIO}),
    Mutant("final cotangent forgotten", r"late == T", "late < 0", "adjoint_chunks"),
    Mutant("state after instead of before", r"\(end - 1\) - 1\)", "(end - 1))", "adjoint_chunks", {"grads": ("last",)}),
    Mutant("zero start in the backward pass", r"tl.load\(h0 [^\n]*", "tl.zeros([BLOCK], DTYPE)", "adjoint_chunks"),
    Mutant("zero start where a chunk is walked again", r"f0 = tl.load\(h0 [^\n]*", "f0 = tl.zeros([BLOCK], DTYPE)", "readjoint", several(T=4)),
    Mutant("cotangent through a reset", r"(        )m0 = tl.where\(x_\d != 0, 0.0, m0\)", r"\1pass", "walk_back", {"resets": "some"}),
    Mutant("state before a reset", r"p0 = tl.where\(x_\d != 0, 0.0, p0\)", "pass", "walk_back", {"resets": "some"}),
    Mutant("parameters of the last step only", r"v0 \+= h0", "v0 = h0", "walk_back"),
    Mutant("time gap's cotangent not moved", r"dt_bar -= 2 \* D", "dt_bar -= 0", "walk_back", {"cell": CFC}),
    Mutant("drives' cotangent not moved", r"u_bar -= 2 \* WIDTH", "u_bar -= WIDTH", "walk_back"),
    Mutant("warm-up writes", r"phase == 1", "True", "forward", several(T=4)),
    Mutant("no correction of cotangents", r"if tl.max\(loose.to\(tl.int32\)\) > 0:", "if chunk < 0:", "readjoint", several(T=4)),
    Mutant("cotangents look one chunk ahead", r"while \(right < chunks - 1\)", "while (right < 0)", "readjoint", several()),
    Mutant("Jacobian not transposed", r"q10\*z1", "q01*z1", "readjoint", several(LSTM)),
    Mutant("size of cotangents not used", r"far\(a0, tl.maximum\(tl.abs\(m0\), size\), tol\)", "far(a0, 1e15, tol)", "readjoint", several(T=4)),
    Mutant("gradient of h0 of another chunk", r"if chunk == 0:", "if chunk == 1:", "adjoint_chunks", several(T=4, warmup=4)),
    Mutant("gradients of grad's strides", r"\* grad_t", "* D", "walk_back", {"flat": True, "grads": ("last",)}),
    # linear recurrences of several slots
    Mutant("the chain leaves out products", r"x0 \+= tl.where\(s1 == 0, 0.0, j01\*s1\)", "pass", "chain", REDUCED),
    Mutant("the chain hands on zeros", r"s0, s1 = x0, x1", "s0, s1 = 0 * x0, x1", "chain", REDUCED),
    Mutant("columns exchanged", r"j01, j11 = tangent\(j01, j11,", "j01, j11 = tangent(j00, j10,", "reduce_walk", REDUCED),
    Mutant("inputs forgotten", r"s0 \+= i0", "pass", "reduce_walk", REDUCED),
    Mutant("product through a reset", r"j11 = tl.where\(x_\d != 0, 0.0, j11\)", "pass", "reduce_walk", {**REDUCED, "resets": "some"}),
    Mutant("start state not reduced", r"tl.load\(h0 [^\n]*", "tl.zeros([BLOCK], DTYPE)", "reduce", REDUCED),
    Mutant("chunks start from zero", r"if chunk > 0:", "if chunk > 99:", "forward", REDUCED),
    Mutant("rows not transposed", r"transpose\(j00,", "tangent(j00,", "reduce_walk_back", REDUCED),
    Mutant("cotangents not reduced", r"m0 \+= g0_\d.to\(DTYPE\)", "pass", "reduce_walk_back", {**REDUCED, "grads": ("others",)}),
    Mutant("final cotangent not reduced", r"end == T", "end < 0", "reduce_back", REDUCED),
    Mutant("the chain back is not transposed", r"j10\*m1", "j01*m1", "chain_back", REDUCED),
    Mutant("nothing enters on the right", r"if chunk < chunks - 1:", "if chunk < 0:", "adjoint_chunks", REDUCED),
    # the printed step
    Mutant("a sign in the step", r"1 - z", "1 + z", "step"),
    Mutant("a sign in the adjoint", r"1 - z", "1 + z", "adjoint"),
    Mutant("a derivative", r"1 - square\(n\)", "1 + square(n)", "adjoint"),
    Mutant("a sign in the Jacobian", r", u, -A,", ", u, A,", "step_jacobian", NEWTON),
)  # fmt: skip


def mutate(text: str, mutant: Mutant) -> tuple[str, int]:
    """Replace inside one function, or everywhere, and count."""
    start, stop = 0, len(text)
    if mutant.within:
        start = re.search(rf"^def {mutant.within}\(", text, re.M).start()
        following = re.compile(r"^@triton", re.M).search(text, start)
        stop = following.start() if following else len(text)
    body, count = re.subn(mutant.old, mutant.new, text[start:stop])
    return text[:start] + body + text[stop:], count


def check(kit, case):
    miss = kit.verify(case)
    if case.warmup >= case.T and miss.numel():  # guesses that are walked from the start are exact
        assert float(miss[0].max()) == 0, "repairs: a guess is off"


QUICK = {
    "repair leaves the final state",
    "cotangents look one chunk ahead",
}


def chosen():
    """All mutants; those of several chunks take a second or two, so most are slow tests."""
    for m in MUTANTS:
        slow = "length" in m.case and m.name not in QUICK
        yield pytest.param(m, id=m.name, marks=[pytest.mark.slow] if slow else [])


@pytest.mark.parametrize("mutant", chosen())
def test_every_mutant_is_noticed(kit, mutant, monkeypatch):
    from pararnn.kernels import launch
    from pararnn.kernels.template import Template

    case = kit.Case(**mutant.case)
    original, counts = Template.text, []

    def text(self):
        mutated, count = mutate(original(self), mutant)
        counts.append(count)
        return mutated

    monkeypatch.setattr(Template, "text", text)
    launch.kernels.cache_clear()
    try:
        with pytest.raises(AssertionError, match=r"off by|NaN in|infinities|repairs"):
            check(kit, case)
    finally:
        monkeypatch.undo()
        launch.kernels.cache_clear()
    assert any(counts), "the mutant no longer fits the text"


@pytest.mark.slow
def test_the_cases_pass_without_mutants(kit):
    """What notices is the mutant, not the case."""
    for case in dict.fromkeys(kit.Case(**m.case) for m in MUTANTS):
        check(kit, case)


def test_fresh_memory_is_poisoned(kit):
    with kit.poisoned():
        assert bool(torch.empty(3).isnan().all())
        assert int(torch.empty(2, dtype=torch.int32)[0]) == 2**31 - 1
