# ruff: noqa: PT012 (a Spec is written in a block of several statements)
"""Writing a Spec: what is accepted, what is refused with which sentence, and what follows."""

from __future__ import annotations

import math
import pickle

import numpy
import pytest
import sympy
import torch

import pararnn.spec
from pararnn.spec import Spec, SpecError, exp, log, sigmoid, softplus, tanh


def elman(name="Elman", structure="diagonal", axes=("d",)):
    with Spec(name, axes=axes) as s:
        h = s.state("h", bounds=(-1, 1))
        (u,) = s.drives("u")
        w = s.map("w", structure=structure)
        s.next(h, tanh(w(h) + u))
    return s


def test_undeclared_symbol():
    with (
        pytest.raises(SpecError, match=r"'h_next': v is used before it is defined"),
        Spec("S") as s,
    ):
        h = s.state("h")
        s.next(h, h + sympy.Symbol("v", real=True))


def test_symbol_of_another_kind_is_undeclared():
    """A SymPy symbol with other assumptions is another symbol, even under a declared name."""
    with pytest.raises(SpecError, match="before it is"), Spec("S") as s:
        h = s.state("h")
        s.next(h, sympy.Symbol("h"))


def test_stage_used_before_it_is_written():
    with pytest.raises(SpecError, match="z is used before"), Spec("S") as s:
        h = s.state("h")
        s.let("r", sympy.Symbol("z", real=True) * h)


def test_updated_before_the_update():
    with pytest.raises(SpecError, match="c_next is used before"), Spec("S") as s:
        c = s.state("c")
        h = s.state("h")
        s.next(h, tanh(s.updated(c)))


@pytest.mark.parametrize("again", ["h", "u", "A", "z", "h_next"])
def test_a_name_is_used_once(again):
    with pytest.raises(SpecError, match=f"{again!r} is already used"), Spec("S") as s:
        h = s.state("h")
        s.drives("u")
        s.maps("A", structure="diagonal")
        s.let("z", sigmoid(h))
        s.let(again, h)


@pytest.mark.parametrize("name", ["2h", "a-b", "a b.", ""])
def test_names_are_identifiers(name):
    with pytest.raises(SpecError), Spec("S") as s:
        s.let(name, s.state("h"))


def test_slot_without_update():
    with pytest.raises(SpecError, match="slot 'c' has no update"), Spec("S") as s:
        h = s.state("h")
        s.state("c")
        s.next(h, h)


def test_two_updates_of_a_slot():
    with pytest.raises(SpecError, match="already has an update"), Spec("S") as s:
        h = s.state("h")
        s.next(h, h)
        s.next(h, 2 * h)


def test_update_of_something_else():
    with pytest.raises(SpecError, match="not a state slot"), Spec("S") as s:
        h = s.state("h")
        (u,) = s.drives("u")
        s.next(u, h)
    with pytest.raises(SpecError, match="not a state slot"), Spec("S") as s:
        s.updated(s.drives("u")[0])


def test_no_state():
    with pytest.raises(SpecError, match="has no state"), Spec("S") as s:
        s.drives("u")


@pytest.mark.parametrize("bounds", [(1, -1), (0, 0), (float("nan"), 1)])
def test_bounds_are_an_interval(bounds):
    with pytest.raises(SpecError, match="low < high"), Spec("S") as s:
        s.state("h", bounds=bounds)


def test_structures():
    with pytest.raises(SpecError, match="'banded'"), Spec("S") as s:
        s.maps("A", structure="banded")
    with pytest.raises(SpecError, match="matrix state from the right"), Spec("S") as s:
        s.maps("A", structure="right")
    for structure in ("head", "dense"):
        with pytest.raises(SpecError, match="vector state"), Spec("S", axes=("K", "V")) as s:
            s.maps("A", structure=structure)


@pytest.mark.parametrize("axes", [("V", "K"), ("d",), ("K", "K")])
def test_axes_are_a_subsequence(axes):
    with pytest.raises(SpecError, match="sub-sequence"), Spec("S", axes=("K", "V")) as s:
        s.drives("u", axes=axes)
    with pytest.raises(SpecError, match="sub-sequence"), Spec("S", axes=("K", "V")) as s:
        s.params("p", axes=axes)


@pytest.mark.parametrize(
    "expression",
    [abs, lambda h: sympy.Max(h, 0), sympy.atan, lambda h: h * sympy.I, sympy.Heaviside],
    ids=["abs", "max", "atan", "complex", "step"],
)
def test_functions_outside_the_language(expression):
    """Refused where they are written, not when something first computes."""
    with pytest.raises(SpecError), Spec("S") as s:
        h = s.state("h")
        s.next(h, expression(h))


def test_frozen_afterwards():
    s = elman()
    for declare in (
        lambda: s.state("g"),
        lambda: s.drives("v"),
        lambda: s.maps("B", structure="diagonal"),
        lambda: s.params("p"),
        lambda: s.let("z", s.slots[0].symbol),
        lambda: s.next(s.slots[0].symbol, s.slots[0].symbol),
        lambda: s.map_list[0](s.drive_list[0].symbol),
        lambda: s.__enter__(),
    ):
        with pytest.raises(SpecError):
            declare()
    assert len(s.stages) == 2
    assert s.fingerprint == elman().fingerprint


def test_declaring_before_the_block():
    with pytest.raises(SpecError, match="with Spec"):
        Spec("S").state("h")


def test_an_error_in_the_block_is_not_hidden_and_evaluation_comes_back():
    with pytest.raises(RuntimeError, match="mine"), Spec("S") as s:
        s.state("h")
        raise RuntimeError("mine")
    x = sympy.Symbol("x")
    assert x + x == 2 * x, "SymPy stayed in unevaluated mode"
    elman()
    assert x + x == 2 * x


def test_the_same_application_is_one_stage():
    with Spec("S") as s:
        h = s.state("h", bounds=(-1, 1))
        A = s.map("A", structure="dense")
        first, second, third = A(h), A(h), A(h * h)
        s.next(h, tanh(first + second + third))
    assert first == second != third
    assert sum(type(st).__name__ == "Linear" for st in s.stages) == 2


def test_canonical_form_ignores_spelling_but_the_page_does_not():
    def build(flip):
        with Spec("S") as s:
            h = s.state("h")
            u_z, u_n = s.drives("u_z u_n")
            z = s.let("z", sigmoid(u_z))
            s.next(h, u_n * z + h * (1 - z) if flip else (1 - z) * h + z * u_n)
        return s

    a, b = build(False), build(True)
    assert a.fingerprint == b.fingerprint
    assert a.source("step") == b.source("step")
    assert [e.latex for e in a.latex()] != [e.latex for e in b.latex()]


def test_fingerprints_tell_recurrences_apart():
    prints = {elman().fingerprint, elman("Other").fingerprint, elman(structure="dense").fingerprint}
    with Spec("Elman") as s:
        h = s.state("h", bounds=(-1, 1))
        (u,) = s.drives("u")
        w = s.map("w", structure="diagonal")
        s.next(h, tanh(w(h) - u))
    prints.add(s.fingerprint)
    assert len(prints) == 4
    assert all(len(p) == 64 and set(p) <= set("0123456789abcdef") for p in prints)


def test_nested_calls_are_hoisted():
    with Spec("S") as s:
        h = s.state("h", bounds=(-1, 1))
        (u,) = s.drives("u")
        A = s.map("A", structure="diagonal")
        s.next(h, tanh(sigmoid(A(softplus(h))) * exp(-softplus(h)) + u * sigmoid(u)))
    hidden = [st for st in s.stages if getattr(st, "hidden", False)]
    assert len(hidden) == 4  # softplus(h) once, sigmoid(A …), exp(-softplus(h)), sigmoid(u)
    for st in s.stages:
        inner = st.expr.args if hasattr(st, "expr") and st.expr.is_Function else ()
        inner = inner or ((st.operand,) if hasattr(st, "operand") else (st.expr,))
        assert not any(e.atoms(sympy.Function) for e in inner), st
    assert len(s.latex()) == 1, "hidden stages have no line of their own"


def test_log_and_exp_cancel_without_harm():
    with Spec("S") as s:
        h = s.state("h")
        s.next(h, log(exp(h)))
    assert s.jac_structure == "linear"


def test_shapes():
    s = elman("E", "diagonal", ("K", "V"))
    assert s.state_shape({"K": 2, "V": 3}) == (2, 3)
    assert s.parameter_shapes({"K": 2, "V": 3}) == {"w": (2, 3)}
    assert s.packed_width({"K": 2, "V": 3}) == 6
    assert elman(structure="dense").parameter_shapes({"d": 5}) == {"w": (5, 5)}
    assert elman(structure="head").parameter_shapes({"d": 6, "heads": 3}) == {"w": (3, 2, 2)}


def test_specs_survive_pickling():
    s = elman()
    s.fingerprint, s.jac_structure, s.factorization.state_edges  # noqa: B018 fills the caches
    again = pickle.loads(pickle.dumps(s))
    assert again.fingerprint == s.fingerprint
    assert again.source("step") == s.source("step")
    assert again.jac_structure == "diag"


def _branch(h, u):
    return h if u > 0 else u


@pytest.mark.parametrize(
    "stage",
    [
        lambda h, u: torch.tanh(u) * h,
        lambda h, u: numpy.tanh(u) * h,
        lambda h, u: math.tanh(u) * h,
        lambda h, u: [u] * h,
        _branch,
        max,
        lambda h, u: u @ h,
    ],
)
def test_what_python_itself_refuses(stage):
    with (
        pytest.raises(
            SpecError, match=r"Spec 'S': got TypeError \(.*unpack what drives\(\)"
        ) as caught,
        Spec("S") as s,
    ):
        h = s.state("h")
        (u,) = s.drives("u")
        s.next(h, stage(h, u))
    assert isinstance(caught.value.__cause__, TypeError)
    assert "torch, numpy or math" in str(caught.value)


def test_another_number_of_drives():
    with pytest.raises(SpecError, match="not enough values to unpack"), Spec("S") as s:
        _, _ = s.drives("u")


def test_other_errors_pass():
    with pytest.raises(KeyError), Spec("S"):
        {}["x"]


EVIL = "__import__('pathlib').Path('{0}').touch()"


def test_text_is_no_expression(tmp_path):
    """SymPy would run it."""
    mark = tmp_path / "executed"
    text = EVIL.format(mark)
    places = {
        "let": lambda s, h, w: s.let("z", text),
        "next": lambda s, h, w: s.next(h, text),
        "map": lambda s, h, w: w(text),
        "contract": lambda s, h, w: s.contract("q", text, over="d"),
        "read": lambda s, h, w: s.read("q", text, over="d"),
        "sum": lambda s, h, w: s.let("z", h + text),
        "list": lambda s, h, w: s.let("z", [text]),
    }
    language = pararnn.spec
    for f in (language.cos, language.exp, language.expm1, language.log, language.log1p,
              language.positive, language.sigmoid, language.sin, language.softplus,
              language.tanh):  # fmt: skip
        places[f.__name__] = lambda s, h, w, f=f: s.let("z", f(text))
    for f in (language.maximum, language.snap):
        places[f.__name__] = lambda s, h, w, f=f: s.let("z", f(h, text))
    for place, write in places.items():
        with pytest.raises((SpecError, TypeError)), Spec("S") as s:
            h = s.state("h")
            s.drives("u")
            write(s, h, s.map("w", structure="diagonal"))
        assert not mark.exists(), place


@pytest.mark.parametrize(
    "name", ['a""" + x', "a\nimport os", "\x1b[2J", "a\\", "\u202eabc", 3, None]
)
def test_names_that_would_leave_what_they_are_printed_in(name):
    with pytest.raises(SpecError, match="expected"):
        Spec(name)
    with pytest.raises(SpecError, match="expected"):
        Spec("S", axes=("d;", "e"))
    with pytest.raises(SpecError, match="expected"):
        Spec("S", axes="d")
    with pytest.raises(SpecError, match="latex"), Spec("S") as s:
        s.state("h", latex="\x1b[2J")


def test_the_channels_are_mixed_by_any_map_that_does():
    with Spec("S") as s:
        h = s.state("h", bounds=(-1, 1))
        (u,) = s.drives("u")
        w, R = s.map("w", structure="diagonal"), s.map("R", structure="dense")
        s.next(h, tanh(w(h) + R(h) + u))
    assert not s.channelwise
    assert elman().channelwise
    assert not elman(structure="dense").channelwise


def test_parameters_are_part_of_the_fingerprint():
    def spec(*names, trained=True):
        with Spec("S") as s:
            h = s.state("h")
            (u,) = s.drives("u")
            found = [s.params(n)[0] if trained else s.constants(n)[0] for n in names]
            s.next(h, h / 2 + u * found[0])
        return s.fingerprint

    assert spec("p") == spec("p")
    assert len({spec("p"), spec("p", trained=False)}) == 2


def test_names_are_words_and_no_keywords():
    for name, said in (("lambda", "not an identifier"), ("1a", "not an identifier")):
        with pytest.raises(SpecError, match=said), Spec("S") as s:
            s.state(name)


def test_given_values_have_axes_of_the_fragment():
    from pararnn.spec.fragment import Fragment

    with pytest.raises(SpecError, match="given value"), Fragment("F", axes=("n", "d")) as f:
        f.given("x", axes=("k",))


def test_operands_of_maps_are_in_canonical_form():
    def fingerprint(operand):
        with Spec("S") as s:
            h = s.state("h")
            (u,) = s.drives("u")
            A = s.map("A", structure="dense")
            s.next(h, tanh(A(operand(h, u))))
        return s.fingerprint

    assert fingerprint(lambda h, u: (h + h) * u) == fingerprint(lambda h, u: u * h * 2)
    assert fingerprint(lambda h, u: h * u) != fingerprint(lambda h, u: u * h * 2)
