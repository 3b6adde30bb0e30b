# ruff: noqa: PT031 (a Spec is written in a block of several statements)
"""What a Spec's author is told about slips that are no errors, and how drives are labelled."""

import math
import warnings

import pytest

from pararnn import Spec, SpecError, SpecWarning, sigmoid, tanh


def test_bounds_that_a_step_leaves_are_doubted():
    with pytest.warns(SpecWarning, match="reached"), Spec("too_narrow") as s:
        h = s.state("h", bounds=(-1, 1))
        (u,) = s.drives("u")
        s.next(h, 2 * tanh(h + u))


def test_bounds_that_hold_are_not_doubted():
    with warnings.catch_warnings(), Spec("gated") as s:
        warnings.simplefilter("error")
        h = s.state("h", bounds=(-1, 1))
        f, c = s.drives("f", "c")
        s.next(h, sigmoid(f) * h + (1 - sigmoid(f)) * tanh(c))


@pytest.mark.parametrize(
    "bounds", [(-math.inf, math.inf), (0, math.inf), (5, math.inf), (-math.inf, -5)]
)
def test_infinite_bounds_are_sampled(bounds):
    with warnings.catch_warnings(), Spec("half_line") as s:
        warnings.simplefilter("error")
        h = s.state("h", bounds=bounds)
        (u,) = s.drives("u")
        s.next(h, h * (2 - sigmoid(u)))
    with pytest.warns(SpecWarning, match="reached"), Spec("out") as s:
        h = s.state("h", bounds=(0, math.inf))
        s.next(h, -h)


def test_what_is_never_used_is_named():
    with pytest.warns(SpecWarning, match="v, w is declared but never used"), Spec("idle") as s:
        h = s.state("h")
        u, _ = s.drives("u v")
        s.map("w", structure="diagonal")
        s.next(h, tanh(h + u))


def test_a_map_is_called_not_multiplied():
    with Spec("product") as s:
        h = s.state("h")
        w = s.map("w", structure="diagonal")
        for product in (lambda: w * h, lambda: h * w):
            with pytest.raises(SpecError, match=r"call it, w\(h\)"):
                product()
        s.next(h, tanh(w(h)))


def test_several_drives_have_weights_of_their_own_name():
    with Spec("two") as s:
        h = s.state("h")
        u, v = s.drives("u, v")
        wf = s.map("wf", structure="diagonal")
        s.next(h, tanh(wf(h) + u) * sigmoid(v))
    (line,) = s.latex()
    assert "W_u x_t + b_u" in line.latex
    assert "W_v x_t + b_v" in line.latex
    assert r"\mathrm{wf} \odot" in line.latex


def test_a_slot_without_bounds_beside_one_that_leaves_its_own():
    with pytest.warns(SpecWarning, match=r"slot 'a'"), Spec("S") as s:
        a, b = s.state("a", bounds=(-1, 1)), s.state("b")
        (u,) = s.drives("u")
        s.next(a, a + tanh(b))
        s.next(b, b / 2 + u)
