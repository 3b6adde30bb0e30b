"""A time gap in a Spec: a drive that is given, last in order, and no part of the projection."""

import math
import warnings

import numpy as np
import pytest

from pararnn import Spec, SpecError, SpecWarning, exp, softplus, tanh
from pararnn.cards import card_text
from pararnn.spec import bounds, oracle


def decaying(axes=("d",)):
    with Spec("Decaying", axes=axes) as s:
        h = s.state("h", bounds=(-1, 1))
        dt = s.time_gap("dt")
        f, k = s.drives("f k")
        a = s.let("a", exp(-(softplus(f) * dt)))
        s.next(h, a * h + (1 - a) * tanh(k))
    return s


def test_it_is_the_last_drive_and_not_projected():
    spec = decaying()
    assert [d.name for d in spec.drive_list] == ["f", "k", "dt"]
    assert [d.name for d in spec.projected] == ["f", "k"]
    assert spec.gap is spec.drive_list[-1]
    assert spec.gap.given
    assert spec.gap.axes == ()
    assert spec.packed_width({"d": 5}) == 10
    assert spec.drive_shapes({"d": 5}) == ((5,), (5,), ())
    assert spec.source().startswith("def step(h, f, k, dt")
    with Spec("None") as other:
        h = other.state("h")
        other.next(h, 0.5 * h)
    assert other.gap is None


def test_printed():
    assert [line.latex for line in decaying().latex()] == [
        r"a_t = \exp(-\operatorname{softplus}(W_f x_t + b_f)\, \Delta t_t)",
        r"h_t = a_t \odot h_{t-1} + (1 - a_t) \odot \tanh(W_k x_t + b_k)",
    ]
    card = card_text(decaying())
    assert "Δ t_t" in card
    assert "time since the step before, given" in card


def test_one_drive_beside_a_time_gap_keeps_short_names():
    with Spec("One") as s:
        h = s.state("h")
        (u,) = s.drives("u")
        s.next(h, tanh(h * s.time_gap("dt") + u))
    assert s.latex()[0].latex == r"h_t = \tanh(h_{t-1}\, \Delta t_t + W x_t + b)"


def test_a_second_one_is_refused():
    with Spec("Two") as s:
        h = s.state("h")
        s.next(h, h * s.time_gap("dt"))
        with pytest.raises(SpecError, match="second time gap 'du' beside 'dt'"):
            s.time_gap("du")


def test_it_is_part_of_the_fingerprint():
    def decaying_in(dt):
        with Spec("Decaying") as s:
            h = s.state("h")
            f = s.drives("f")[0]
            s.next(h, h * exp(-(softplus(f) * dt(s))))
        return s.fingerprint

    given, projected = lambda s: s.time_gap(), lambda s: s.drives("dt", axes=())[0]
    assert decaying_in(given) == decaying_in(given) != decaying_in(projected)


def test_bounds_know_that_it_is_not_negative():
    with warnings.catch_warnings():
        warnings.simplefilter("error", SpecWarning)  # a sampled step leaves no bounds
        spec = decaying()
    first, _ = bounds.derivative_bounds(spec, [], {"d": 2})
    assert (first <= 1).all()


@pytest.mark.parametrize("axes", [("d",), ("K", "V")])
def test_oracle_and_jacobian(axes):
    spec = decaying(axes)
    sizes = {a: 2 + i for i, a in enumerate(axes)}
    assert oracle.prove_jacobian(spec, sizes)
    rng = np.random.default_rng(0)
    shape = tuple(sizes.values())
    h, f, k = (rng.standard_normal(shape) for _ in range(3))
    state = oracle.step(spec, h, [f, k, np.array(0.3)], [])
    a = np.exp(-np.logaddexp(0, f) * 0.3)
    np.testing.assert_allclose(state, a * h + (1 - a) * np.tanh(k), rtol=1e-14)
    assert math.isclose(oracle.step(spec, h, [f, k, np.array(0.0)], []).sum(), h.sum())
