"""Derivative bounds on the box: no sampled derivative may exceed them."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch

from pararnn.spec import Spec, exp, sigmoid, tanh
from pararnn.spec.bounds import _apply, _contracted, _widened, derivative_bounds
from pararnn.spec.interval import Interval

BOUNDED = (
    "gru_diag",
    "gru_head",
    "gru_dense",
    "matrix",
    "matrix_two",
    "lstm",
    "lstm_head",
    "everything",
)


def second_derivative(specimen, state, drives, params, v):
    """d²/dε² f(h + εv) at 0, by autograd through the hand-written equation."""
    eps = torch.zeros((), dtype=torch.float64, requires_grad=True)
    out = specimen.step(state + eps * v, drives, params).reshape(-1)
    firsts = [torch.autograd.grad(o, eps, create_graph=True)[0] for o in out]
    seconds = [
        torch.autograd.grad(d, eps, retain_graph=True)[0] if d.requires_grad else torch.zeros(())
        for d in firsts
    ]
    return torch.stack(firsts).detach(), torch.stack([s.double() for s in seconds])


@pytest.mark.parametrize("name", BOUNDED)
@pytest.mark.parametrize("reach", [0.0, 2.5])
def test_samples_never_exceed(zoo, name, reach):
    specimen = zoo[name]
    g = torch.Generator().manual_seed(1)
    width = max(1.0, reach)
    for seed in range(6):
        state, drives, params = specimen.inputs(seed=seed, scale=1.5)
        arrays = [p.numpy() for p in params]
        first, second = derivative_bounds(specimen.spec, arrays, specimen.sizes, reach=reach)
        assert first.shape == second.shape == state.shape
        state = width * (2 * torch.rand(state.shape, generator=g, dtype=torch.float64) - 1)
        if seed % 2:
            state = width * state.sign()  # the corners
        v = (
            torch.ones_like(state)
            if seed == 0
            else torch.randn(state.shape, generator=g).sign().double()
        )
        d1, d2 = second_derivative(specimen, state, drives, params, v)
        assert np.all(d1.abs().numpy() <= first.reshape(-1) * (1 + 1e-9) + 1e-12)
        assert np.all(d2.abs().numpy() <= second.reshape(-1) * (1 + 1e-9) + 1e-12)
        rows = torch.autograd.functional.jacobian(
            lambda h, d=drives, p=params: specimen.step(h, d, p), state
        )
        norms = rows.reshape(state.numel(), -1).abs().sum(1).numpy()
        assert np.all(norms <= first.reshape(-1) * (1 + 1e-9) + 1e-12)


def test_bounds_are_not_vacuous(zoo):
    """For a gated unit with small weights both bounds are a small number, not infinity."""
    specimen = zoo["gru_diag"]
    params = [np.full(4, 0.5)] * 3
    first, second = derivative_bounds(specimen.spec, params, specimen.sizes)
    assert np.all(first < 3)
    assert np.all(second < 2)


def test_a_tight_case():
    """h' = tanh(w h) has |J| ≤ |w| and |f''| ≤ w² · 4/(3√3), both attained (nearly)."""
    with Spec("S") as s:
        h = s.state("h", bounds=(-1, 1))
        A = s.map("A", structure="diagonal")
        s.next(h, tanh(A(h)))
    first, second = derivative_bounds(s, [np.array([0.5, -2.0])], {"d": 2})
    np.testing.assert_allclose(first, [0.5, 2.0])
    np.testing.assert_allclose(second, np.array([0.25, 4.0]) * 4 / (3 * 3**0.5))


@pytest.mark.parametrize("bounds", [(0, 1), (0.5, 1), (-3, 0)])
def test_a_wider_reach_contains_the_declared_box(bounds):
    """A box that touches or avoids zero is widened to both sides."""
    with Spec("S") as s:
        h = s.state("h", bounds=bounds)
        (u,) = s.drives("u")
        A = s.map("A", structure="diagonal")
        s.next(h, h * h * h / 3 + sigmoid(A(h) + u))
    w = np.array([0.7])
    narrow = derivative_bounds(s, [w], {"d": 1})
    wide = derivative_bounds(s, [w], {"d": 1}, reach=4.0)
    for x, (first, second) in ((max(map(abs, bounds)), narrow), (4.0, wide)):
        assert first[0] >= x * x
        assert second[0] >= 2 * x


def test_no_box_no_bound(zoo):
    with pytest.raises(ValueError, match="declares no bounds"):
        derivative_bounds(zoo["rotation"].spec, [], {"d": 3})


def test_unbounded_derivative_is_infinite_not_nan():
    """The drive may take any value: h·u has no derivative bound."""
    with Spec("S") as s:
        h = s.state("h", bounds=(-1, 1))
        (u,) = s.drives("u")
        s.next(h, h * u)
    first, second = derivative_bounds(s, [], {"d": 1})
    assert first[0] == np.inf
    assert second[0] == 0


@pytest.mark.parametrize("structure", ["diagonal", "dense"])
@pytest.mark.parametrize(
    ("equation", "f"),
    [
        (lambda A, h, u: tanh(A(h + u)) ** 3, lambda x, h: torch.tanh(x) ** 3),
        (lambda A, h, u: tanh(A(h + u)) * h, lambda x, h: torch.tanh(x) * h),
    ],
    ids=["cube", "product"],
)
def test_maps_of_unbounded_operands(structure, equation, f):
    """A drive inside the map: the operand may take any value, zero weights included."""
    with Spec("S") as s:
        h = s.state("h", bounds=(-1, 1))
        (u,) = s.drives("u")
        A = s.map("A", structure=structure)
        s.next(h, equation(A, h, u))
    w = np.array([-1.0, 2.0]) if structure == "diagonal" else np.array([[-1.0, 2.0], [0.0, 1.5]])
    first, second = derivative_bounds(s, [w], {"d": 2})
    W = torch.tensor(np.diag(w) if structure == "diagonal" else w)
    for value in np.linspace(-3, 3, 41):
        h = torch.full((2,), 0.5, dtype=torch.float64)
        u = torch.full((2,), float(value), dtype=torch.float64)
        rows = torch.autograd.functional.jacobian(lambda h, u=u: f(W @ (h + u), h), h)
        assert np.all(rows.abs().sum(1).numpy() <= first + 1e-12)
        for i in range(2):
            bent = torch.autograd.functional.hessian(lambda h, u=u, i=i: f(W @ (h + u), h)[i], h)
            for v in torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64):
                assert float((v @ bent @ v).abs()) <= second[i] + 1e-12


def test_infinite_majorants_survive_zero_weights():
    """|J| is unbounded in the first channel: a zero weight next to it must not hide that."""
    with Spec("S") as s:
        h = s.state("h", bounds=(-1, 1))
        (u,) = s.drives("u")
        A = s.map("A", structure="dense")
        s.next(h, A(h * u))
    first, _ = derivative_bounds(s, [np.array([[0.0, 1.0], [0.0, 0.0]])], {"d": 2})
    assert first[0] == np.inf
    assert first[1] == 0


@pytest.mark.parametrize("function", [tanh, sigmoid], ids=["tanh", "sigmoid"])
def test_curvature_of_the_inner_expression_counts(function):
    """h' = f(w h²): at 0 all curvature comes from the square, scaled by the slope of f."""
    with Spec("S") as s:
        h = s.state("h", bounds=(-1, 1))
        A = s.map("A", structure="diagonal")
        s.next(h, function(A(h * h)))
    w = np.array([0.1, -0.2])
    _, second = derivative_bounds(s, [w], {"d": 2})
    slope = {tanh: 1.0, sigmoid: 0.25}[function]
    assert np.all(second >= 2 * abs(w) * slope)
    assert np.all(second <= 2 * abs(w) * slope + 4 * w**2)


def test_an_infinite_end_beside_finite_ones():
    """The sum of -∞ and of positive numbers is -∞, however many these are."""
    box = Interval(np.array([-np.inf, 2.0, 5.0]), np.array([-1.0, 3.0, np.inf]))
    image = _apply("dense", np.array([[1.0, 1.0, 0.0], [-1.0, 2.0, 0.0], [0.0, 1.0, 1.0]]), box)
    assert image.lo.tolist()[:2] == [-np.inf, pytest.approx(5)]
    assert image.hi.tolist()[1:] == [np.inf, np.inf]
    assert image.hi[0] == pytest.approx(2)
    assert image.lo[2] == pytest.approx(7)


@pytest.mark.parametrize("sign", [1, -1])
def test_a_sum_that_rounds_stays_inside(sign):
    """1 + 2⁻⁶⁰ is no float64: the box must hold it all the same."""
    weight = np.array([[1.0, 2.0**-60], [0.0, 0.0]])
    image = _apply("dense", weight, Interval(np.full(2, float(sign))))
    exact = Fraction(sign) * (1 + Fraction(1, 2**60))
    assert Fraction(float(image.lo[0])) < exact < Fraction(float(image.hi[0]))
    assert (image.lo[1], image.hi[1]) == (0, 0), "what is exact is not widened"


def test_the_shortest_gap_counts():
    """h' = e^{-dt} h changes most where no time has passed."""
    with Spec("S") as s:
        h = s.state("h", bounds=(-1, 1))
        s.next(h, exp(-s.time_gap("dt")) * h)
    for gap in (0.5, 3.0):
        first, _ = derivative_bounds(s, [], {"d": 2}, gap=gap)
        np.testing.assert_allclose(first, 1.0, rtol=1e-12)


@pytest.mark.parametrize("structure", ["dense", "contract"])
def test_what_a_sum_loses_to_rounding_is_widened_for(structure):
    """Sums whose terms cancel: the box holds the exact one, of rational numbers."""
    g = np.random.default_rng(0)
    half = g.standard_normal((1, 32))
    terms = np.concatenate([half, -half * (1 + 2.0**-30 * g.random((1, 32)))], 1)
    terms = terms[:, g.permutation(64)]
    exact = sum(map(Fraction, terms[0].tolist()))
    if structure == "dense":
        image = _apply("dense", terms, Interval(np.ones(64)))
    else:
        total, lost = _contracted(-1, terms)
        image = _widened(total, total, lost)
    lo, hi = (float(np.ravel(end)[0]) for end in (image.lo, image.hi))
    assert Fraction(lo) < exact < Fraction(hi)
    assert hi - lo < 1e-11, "not vacuous"
