"""Kernels that are wrong on purpose: every one must be noticed by a comparison with the loop.

A mutant replaces text in one device function, or in a printed program; a case says with which plan
and inputs.
"""

from __future__ import annotations

import dataclasses
import importlib
import linecache
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest
import torch

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="mutants may read and write anywhere: interpreter only"
)

GRU, LSTM, CFC, TRIO = "ParaGRU[diag]", "ParaLSTM", "ParaCfC[published]", "trio"


@dataclass(frozen=True)
class Mutant:
    """``old`` is a regular expression, in the function ``within`` (its module and name);
    ``case`` goes to Case."""

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
    Mutant("drive of the next channel", r"(column = drive_column\([^\n]*)", r"\1 + 1", "tuples.fetch_drives"),
    Mutant("stride of channels taken as 1", r" \* channels\[0\]", "", "tuples.drive_column", {"layout": "stride 2"}),
    Mutant("strides always packed", r"if shape.packed and", "if", "tuples.time_strides", {"layout": "time-major"}),
    Mutant("stride of the batch", r"b \* batch\[i\]", "0 * b", "tuples.placed"),
    Mutant("time gap of another step", r"at = j \*", "at = (0 if body.given[k] else j) *", "tuples.fetch_drives", {"cell": CFC}),
    Mutant("other slots overwrite each other", r"body.others \+ i\)", "body.others + 0)", "tuples.slot_at", {"cell": TRIO}),
    Mutant("parameter of channel 0", r"weights\[i\] \+ d,", "weights[i] + 0 * d,", "tuples.load_params"),
    Mutant("scalar parameter read by channel", r"tl.load\(weights\[i\]\)", "tl.load(weights[i] + d, mask=d < 1, other=0.0)", "tuples.load_params", {"cell": TRIO}),
    # the walk
    Mutant("last steps forgotten", r"for _ in range\(n\):", "for _ in range(n - 1):", "walk.walk"),
    Mutant("steps in flight stand still", r"tl.where\(n >= 2 \* U, U, 0\)", "0 * n", "walk.walk"),
    Mutant("pointer after whole blocks", r"steps, whole\)", "steps, 2)", "walk.walk", {"T": 1}),
    Mutant("reset one step late", r"rows\[j\]", "rows[j][:-1] + rows[max(j - 1, 0)][-1:]", "walk.forward_block", {"resets": "some", "T": 8}),
    Mutant("Jacobian through a reset", r"clear\(row, entries_of\(result\[body.slots :\], body\), body\)", "entries_of(result[body.slots :], body)", "walk.forward_step", {**NEWTON, "resets": "some"}),
    Mutant("Jacobians multiplied the wrong way round", r'multiply\(entries, jac, body, "step_product"\)', 'multiply(jac, entries, body, "product_step")', "walk.forward_step", NEWTON),
    # guesses
    Mutant("start state forgotten", r"lane & \(early == 0\)", "lane & (early < 0)", "walk.forward"),
    Mutant("no warm-up", r"begin - W", "begin", "walk.forward", {**NEWTON, "warmup": 9}),
    Mutant("final state of another chunk", r"if begin \+ L >= T:", "if begin + L < T:", "walk.forward", several(warmup=9)),
    Mutant("final state not corrected", r"store_slots\(final[^\n]*", "pass", "walk.correct", several(T=4, scale=0.1)),
    # corrections
    Mutant("no correction", r"if tl.max\(loose.to\(tl.int32\)\) > 0:", "if chunk < 0:", "walk.correct", NEWTON),
    Mutant("only neighbours look back", r"while \(left > 0\)", "while (left > 99)", "walk.shift_of", NEWTON),
    Mutant("mismatch with the wrong sign", r"shift = jumps\(ends, state\)", "shift = jumps(state, ends)", "walk.shift_of", NEWTON),
    Mutant("mismatch not recorded", r"note\(noted, missed\)", "note(noted, 0.0)", "walk.correct", REPAIRED),
    Mutant("stops at the first block", r"met = tl.max\(.*", "met = n < 99", "walk.walk", several(length=5, T=10, scale=1.5)),
    # the repair
    Mutant("no repair", r"if not good:", "if chunks < 0:", "repair.repair", REPAIRED),
    Mutant("only one chunk repaired", r"> 0:\n                total", "> total:\n                total", "repair.repair", REPAIRED),
    Mutant("repair leaves the final state", r"store_slots\(final[^\n]*", "pass", "repair.repair", REPAIRED),
    Mutant("repair not counted", r"index, total\)", "index, 0.0)", "repair.repair", {**REPAIRED, "repaired": True}),
    # backward
    Mutant("cotangent of the last slot dropped", r"cotangent\[i\] \+ row\[len\(row\)[^\n]*", "cotangent[i],)", "walk_back.with_grads"),
    Mutant("cotangent of other slots dropped", r"cotangent\[i\] \+ row\[i\][^\n]*", "cotangent[i],)", "walk_back.with_grads", {"cell": TRIO}),
    Mutant("final cotangent forgotten", r"late == T", "late < 0", "walk_back.adjoint_chunks"),
    Mutant("state after instead of before", r"placed_states\(stored, b, d, t - 1,", "placed_states(stored, b, d, t,", "walk_back.adjoint_chunks", {"grads": ("last",)}),
    Mutant("zero start in the backward pass", r"first = load_slots\(h0,", "first = load_slots(None,", "walk_back.adjoint_chunks"),
    Mutant("zero start where a chunk is walked again", r"first = load_slots\(h0,", "first = load_slots(None,", "walk_back.readjoint", several(T=4)),
    Mutant("cotangent through a reset", r"clear\(row, result\[: body.slots\], body\)", "result[: body.slots]", "walk_back.backward_step", {"resets": "some"}),
    Mutant("state before a reset", r"before = clear\(row, before, body\)", "pass", "walk_back.backward_step", {"resets": "some"}),
    Mutant("parameters of the last step only", r"sums\[i\] \+ result", "result", "walk_back.backward_step"),
    Mutant("time gap's cotangent not moved", r"\(shape.width,\)", "(0,)", "walk_back.bar_steps", {"cell": CFC}),
    Mutant("drives' cotangent not moved", r"bar_step, -U\)", "bar_step, -1)", "walk_back.walk_back"),
    Mutant("warm-up writes", r"phase == 1", "True", "walk.forward", several(T=4)),
    Mutant("no correction of cotangents", r"if tl.max\(loose.to\(tl.int32\)\) > 0:", "if chunk < 0:", "walk_back.readjoint", several(T=4)),
    Mutant("cotangents look one chunk ahead", r"while \(right < chunks - 1\)", "while (right < 0)", "walk_back.shift_back_of", several()),
    Mutant("Jacobian not transposed", r"more, body, True\)", "more, body, False)", "walk_back.shift_back_of", several(LSTM)),
    Mutant("size of cotangents not used", r"far\(shift\[i\], scale, tol\)", "far(shift[i], 1e15, tol)", "walk_back.loose_back", several(T=4)),
    Mutant("gradient of h0 of another chunk", r"if chunk == 0:", "if chunk == 1:", "walk_back.store_sums", several(T=4, warmup=4)),
    Mutant("gradients of grad's strides", r"tl.cast\(grad_strides\[1\], tl.int64\)", "shape.width", "walk_back.grad_steps", {"flat": True, "grads": ("last",)}),
    # linear recurrences of several slots
    Mutant("the chain leaves out products", r"total \+= tl.where", "total += 0 * tl.where", "tuples.add_applied", REDUCED),
    Mutant("the chain hands on zeros", r"(state = add_applied[^\n]*)", r"\1; state = (0 * state[0], state[1])", "reduce.chain", REDUCED),
    Mutant("columns exchanged", r"column_of\(jac, k,", "column_of(jac, 0,", "reduce.reduce_step", REDUCED),
    Mutant("inputs forgotten", r"carried\[i\] \+ result\[body.coefficients \+ i\]", "carried[i]", "reduce.reduce_step", REDUCED),
    Mutant("product through a reset", r"(state = clear\(row, state, body\)\n +)jac = [^\n]*", r"\1pass", "reduce.reduce_step", {**REDUCED, "resets": "some"}),
    Mutant("start state not reduced", r"load_slots\(h0,", "load_slots(None,", "reduce.reduce", REDUCED),
    Mutant("chunks start from zero", r"if chunk > 0:", "if chunk > 99:", "walk.forward", REDUCED),
    Mutant("rows not transposed", r"column = body.transpose\(", "column = body.tangent(", "reduce.reduce_step", REDUCED),
    Mutant("cotangents not reduced", r"state = with_grads\([^\n]*", "pass", "reduce.reduce_step", {**REDUCED, "grads": ("others",)}),
    Mutant("final cotangent not reduced", r"end == T", "end < 0", "reduce.reduce_back", REDUCED),
    Mutant("the chain back is not transposed", r"(state = add_applied\([^\n]*)BACK\)", r"\1False)", "reduce.chain", REDUCED),
    Mutant("nothing enters on the right", r"if chunk < chunks - 1:", "if chunk < 0:", "walk_back.adjoint_chunks", REDUCED),
    # the printed programs
    Mutant("a sign in the step", r"h\*_z_co", "-h*_z_co", "programs.step"),
    Mutant("a sign in the adjoint", r"_c2 = _z_co", "_c2 = -_z_co", "programs.adjoint"),
    Mutant("a derivative", r"1 - square\(n\)", "1 + square(n)", "programs.adjoint"),
    Mutant("a sign in the Jacobian", r", u, -A,", ", u, A,", "programs.step_jacobian", NEWTON),
)  # fmt: skip


MODULES = ("tuples", "walk", "walk_back", "repair", "reduce", "body", "launch")


def mutate(text: str, mutant: Mutant, function: str) -> tuple[str, int]:
    """Replace inside one function, and count."""
    start = re.search(rf"^def {function}\(", text, re.M).start()
    following = re.compile(r"^@triton", re.M).search(text, start)
    stop = following.start() if following else len(text)
    body, count = re.subn(mutant.old, mutant.new, text[start:stop])
    return text[:start] + body + text[stop:], count


@pytest.fixture
def mutated(monkeypatch):
    """Loads a copy of the device code in which one function is mutated; returns how often."""

    def load(mutant: Mutant) -> int:
        from pararnn import kernels
        from pararnn.kernels import programs, support

        support.launcher.cache_clear()  # which remembers the module that it has found
        place, function = mutant.within.split(".")
        counts = []
        if place == "programs":
            original = programs.programs_text

            def text(spec):
                changed, count = mutate(original(spec), mutant, function)
                counts.append(count)
                return changed

            monkeypatch.setattr(programs, "programs_text", text)
        for name in MODULES:
            source = (Path(kernels.__file__).parent / f"{name}.py").read_text()
            if name == place:
                source, count = mutate(source, mutant, function)
                counts.append(count)
            file = f"<{name} with {mutant.name}>"
            linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
            module = ModuleType(f"pararnn.kernels.{name}")
            module.__package__ = "pararnn.kernels"
            monkeypatch.setitem(sys.modules, module.__name__, module)
            monkeypatch.setattr(kernels, name, module, raising=False)
            exec(compile(source, file, "exec"), module.__dict__)
        return counts

    from pararnn.kernels import support

    yield load
    support.launcher.cache_clear()


def check(kit, case):
    """Without the last kernel of the backward pass, which mends what is wrong before it, and which no
    case needs."""
    from pararnn.kernels import launch

    with mock.patch.object(launch, "repair_back", mock.MagicMock()):
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
def test_every_mutant_is_noticed(kit, mutant, mutated):
    counts = mutated(mutant)
    with pytest.raises(AssertionError, match=r"off by|NaN in|infinities|repairs"):
        check(kit, kit.Case(**mutant.case))
    assert any(counts), "the mutant no longer fits the text"


def small(kit):
    case = kit.Case("ParaGRU[diag]", T=8, length=2, warmup=1, h0=False)
    data = kit.draw(case)
    return case, dataclasses.replace(data, u=data.u * 1e-8)


def test_an_absolute_scale_is_noticed(kit, mutated):
    kit.verify(*small(kit))
    scale = r"return sized\(values\[i\], past\[i\]\)"
    absolute = "return tl.maximum(tl.abs(values[i]), 1.0)"
    assert any(mutated(Mutant("absolute scale", scale, absolute, "tuples.scale_of")))
    with pytest.raises(AssertionError, match="off by"):
        kit.verify(*small(kit))


RANGES = (
    ("ranges", Mutant("starts taken on trust", r"good = fits\([^)]*\)", "good = True", "repair.repair")),
    ("ranges", Mutant("cotangents taken on trust", r"good = fits\([^)]*\)", "good = True", "repair.repair_back")),
    ("ranges", Mutant("terms without bound", r"scale \+ least_of\(scale\)", "1e30", "repair.any_apart")),
    ("not_finite", Mutant("cotangents not handed on", r"end = choose\(loose, found, end\)", "pass", "repair.repair_back")),
    ("not_finite", Mutant("NaN is small", r"far\(values\[0\], floor, 1.0\)", "(tl.abs(values[0]) > floor)", "walk_back.any_above")),
    ("not_finite", Mutant("NaN fits", r"far\(difference, float\(.inf.\), 1.0\)", "(tl.abs(difference) > 3e38)", "repair.any_apart")),
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("check", "mutant"), [pytest.param(*m, id=m[1].name) for m in RANGES])
def test_mutants_of_the_range_are_noticed(kit, check, mutant, mutated, monkeypatch):
    """By the checks of ``benchmarks/gpu_ranges.py``, which pass without (test_ranges.py)."""
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "benchmarks"))
    run = getattr(importlib.import_module("gpu_ranges"), check)
    counts = mutated(mutant)
    more = [["a product of zero"]] if check == "ranges" else []
    sizes = (20, 1) if check == "not_finite" else (4, 2)  # of chunks and of the state
    assert not all(result["good"] for result in run(*sizes, kit.DEVICE, *more))
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
