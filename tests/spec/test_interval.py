"""Interval arithmetic: sampled values must lie inside."""

from __future__ import annotations

import numpy as np
import pytest
import sympy

from pararnn.spec.bounds import evaluate
from pararnn.spec.functions import PRIMITIVES
from pararnn.spec.interval import Interval

RNG = np.random.default_rng(0)
X, Y = sympy.symbols("x y", real=True)

NUMPY = {
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "tanh": np.tanh,
    "softplus": lambda x: np.log1p(np.exp(x)),
    "exp": np.exp,
    "expm1": np.expm1,
    "log": np.log,
    "log1p": np.log1p,
    "sin": np.sin,
    "cos": np.cos,
}
SLOPE = {
    "sigmoid": lambda x: NUMPY["sigmoid"](x) * NUMPY["sigmoid"](-x),
    "tanh": lambda x: 1 / np.cosh(x) ** 2,
    "softplus": NUMPY["sigmoid"],
    "exp": np.exp,
    "expm1": np.exp,
    "log": lambda x: 1 / x,
    "log1p": lambda x: 1 / (1 + x),
    "sin": lambda x: abs(np.cos(x)),
    "cos": lambda x: abs(np.sin(x)),
}
CURVATURE = {
    "sigmoid": lambda x: abs(SLOPE["sigmoid"](x) * (1 - 2 * NUMPY["sigmoid"](x))),
    "tanh": lambda x: abs(2 * np.tanh(x) / np.cosh(x) ** 2),
    "softplus": SLOPE["sigmoid"],
    "exp": np.exp,
    "expm1": np.exp,
    "log": lambda x: 1 / x**2,
    "log1p": lambda x: 1 / (1 + x) ** 2,
    "sin": lambda x: abs(np.sin(x)),
    "cos": lambda x: abs(np.cos(x)),
}
INTERVALS = [(-1, 1), (0, 1), (0.5, 3), (-3, -0.5), (-8, 0), (2, 2), (-0.25, 20)]


def contains(interval, values):
    slack = 1e-12 * (1 + np.abs(values))
    return bool(np.all((interval.lo - slack <= values) & (values <= interval.hi + slack)))


SMOOTH = [p for p in PRIMITIVES.values() if p.name in SLOPE]


def test_all_but_those_with_kinks_are_here():
    kinks = {"maximum", "heaviside", "positive", "positive_slope", "snap", "snap_angle"}
    assert {p.name for p in PRIMITIVES.values()} - set(SLOPE) == kinks


@pytest.mark.parametrize("primitive", SMOOTH, ids=lambda p: p.name)
@pytest.mark.parametrize("ends", INTERVALS, ids=str)
def test_primitives(primitive, ends):
    least = {"log": 1e-3, "log1p": -0.999}.get(primitive.name, -np.inf)
    lo, hi = (max(e, least) for e in ends)
    x = np.concatenate([np.linspace(lo, hi, 2001), RNG.uniform(lo, hi, 500)])
    box = Interval(lo, hi)
    assert contains(primitive.image(box), NUMPY[primitive.name](x))
    assert np.all(SLOPE[primitive.name](x) <= primitive.slope(box) * (1 + 1e-9) + 1e-15)
    assert np.all(CURVATURE[primitive.name](x) <= primitive.curvature(box) * (1 + 1e-9) + 1e-15)


EXPRESSIONS = [
    X + Y,
    X - Y,
    X * Y,
    -3 * X * Y + 2,
    X**2,
    X**3 - Y**2 * X,
    (1 + X**2) ** sympy.Rational(1, 2),
    1 / (3 + X),
    Y / (2 + X**2),
    (4 + X) ** sympy.Rational(-3, 2),
    X / 3 + sympy.Rational(1, 7) - 0.3 * Y,
]


@pytest.mark.parametrize("expression", EXPRESSIONS, ids=str)
@pytest.mark.parametrize("ends", [(-1, 1), (0, 1), (-2, -1), (-2, 0.5)], ids=str)
def test_expressions(expression, ends):
    lo, hi = ends
    f = sympy.lambdify([X, Y], expression, "numpy")
    x, y = RNG.uniform(lo, hi, (2, 4000))
    x[:4], y[:4] = (lo, lo, hi, hi), (lo, hi, lo, hi)
    box = Interval(np.array(lo), np.array(hi))
    assert contains(evaluate(expression, {X: box, Y: box}), f(x, y))


def test_unbounded_ends():
    everything = Interval(-np.inf, np.inf)
    zero, unit = Interval(0.0), Interval(-1.0, 1.0)
    assert (everything * zero).magnitude == 0, "a factor that is exactly zero wins"
    assert (everything * unit).lo == -np.inf
    assert (everything + unit).hi == np.inf
    assert everything.power(2).lo == 0
    assert everything.power(2).hi == np.inf
    assert unit.reciprocal().lo == -np.inf
    assert unit.reciprocal().hi == np.inf
    assert Interval(2.0, 4.0).reciprocal().lo == 0.25
    assert (-Interval(1.0, 2.0)).lo == -2


def test_even_powers_touch_zero_and_odd_ones_do_not():
    assert (Interval(-2, 1).power(2).lo, Interval(-2, 1).power(2).hi) == (0, 4)
    assert (Interval(-2, 1).power(3).lo, Interval(-2, 1).power(3).hi) == (-8, 1)
    assert (Interval(-3, -2).power(2).lo, Interval(-3, -2).power(2).hi) == (4, 9)


def test_unknown_function():
    with pytest.raises(NotImplementedError, match="atan"):
        evaluate(sympy.atan(X), {X: Interval(0, 1)})


@pytest.mark.parametrize(
    ("name", "ends"),
    [("sigmoid", (0, 1)), ("tanh", (-1, 1)), ("exp", (0, np.inf)), ("expm1", (-1, np.inf))],
)
def test_images_do_not_leave_the_range(name, ends):
    """Rounded outwards, but not beyond what the function can be."""
    (primitive,) = (p for p in SMOOTH if p.name == name)
    with np.errstate(over="ignore"):
        image = primitive.image(Interval(-800.0, 800.0))
    assert (image.lo, image.hi) == ends


@pytest.mark.parametrize("name", ["sigmoid", "tanh", "softplus", "exp", "expm1", "log", "log1p"])
@pytest.mark.parametrize("ends", [(0.5, 2.0), (1.0, 1.5)], ids=str)
def test_slopes_are_attained(name, ends):
    (primitive,) = (p for p in SMOOTH if p.name == name)
    box, x = Interval(*ends), np.array(ends)
    assert primitive.slope(box) <= SLOPE[name](x).max() * (1 + 1e-12)
    if name in ("exp", "expm1", "log", "log1p"):
        assert primitive.curvature(box) <= CURVATURE[name](x).max() * (1 + 1e-12)


def test_a_factor_of_zero_is_exact():
    for other in (3.0, 1e-300, 0.1):
        for product in (Interval(0.0) * Interval(other), Interval(other) * Interval(0.0)):
            assert (product.lo, product.hi) == (0, 0)


def test_an_even_power_away_from_zero_keeps_its_lower_end():
    square = Interval(0.5, 2).power(2)
    assert (square.lo, square.hi) == (pytest.approx(0.25), pytest.approx(4))
