"""What the linear family adds to the language: g, the grid of angles, constants, nodes, outputs."""

from __future__ import annotations

import math

import mpmath
import numpy as np
import pytest
import sympy
import torch

from pararnn.solvers.torch_backend import NAMESPACE
from pararnn.spec import Spec, SpecError, cos, oracle, positive, sigmoid, sin, snap, tanh
from pararnn.spec.backends import BACKENDS
from pararnn.spec.functions import PRIMITIVES, positive_slope
from pararnn.spec.interval import Interval

ROW = {p.name: p for p in PRIMITIVES.values()}
X = np.array([-700.0, -30, -1.5, -1e-9, -0.0, 0.0, 1e-9, 0.25, 1e6])


def numbers(backend, name, *args):
    function = BACKENDS[backend][name]
    if backend == "mpmath":
        args = [np.array([mpmath.mpf(float(v)) for v in np.atleast_1d(a)], object) for a in args]
    return np.asarray(function(*args)).astype(float)


@pytest.mark.parametrize("backend", ["float64", "mpmath", "torch"])
def test_positive(backend):
    want = np.where(X >= 0, X + 0.5, np.exp(np.minimum(X, 0)) / (1 + np.exp(np.minimum(X, 0))))
    slope = np.where(X >= 0, 1.0, want * (1 - want))
    if backend == "torch":
        x = torch.tensor(X, requires_grad=True)
        got = NAMESPACE["positive"](x)
        (by_autograd,) = torch.autograd.grad(got.sum(), x)
        np.testing.assert_allclose(by_autograd, slope, 1e-15)
        found = NAMESPACE["positive_slope"](torch.tensor(X), got.detach())
        got = got.detach().numpy()
    else:
        got = numbers(backend, "positive", X)
        found = numbers(backend, "positive_slope", X, want)
    np.testing.assert_allclose(got, want, 1e-15)
    np.testing.assert_allclose(found, slope, 1e-14)
    assert slope[X == 0].tolist() == [1.0, 1.0], "the derivative at 0 is that from the right"
    assert (got > 0).all()


@pytest.mark.parametrize("backend", ["float64", "mpmath", "torch"])
@pytest.mark.parametrize("m", [1, 2, 3, 4, 6, 250])
@pytest.mark.parametrize("function", ["snap", "snap_angle"])
def test_snap_is_the_nearest_multiple(backend, m, function):
    x = np.random.default_rng(m).normal(scale=4, size=500)
    if backend == "torch":
        got = NAMESPACE[function](torch.tensor(x), torch.tensor(float(m))).numpy()
    else:
        got = numbers(backend, function, x, float(m))
    step = 2 * math.pi / m
    k = got / step
    np.testing.assert_allclose(k, np.round(k), atol=1e-12)
    turns = np.round((x - got) / (2 * math.pi))  # are taken off an angle, and only there
    assert function == "snap_angle" or (turns == 0).all() or m == 1
    assert (np.abs(got + 2 * math.pi * turns - x) <= step / 2 * (1 + 1e-12)).all()
    if function == "snap_angle":
        assert (np.abs(got) <= np.nextafter(math.pi, 4)).all()
    else:
        assert (np.abs(got - x) <= step / 2 * (1 + 1e-12)).all()


@pytest.mark.parametrize("m", [1, 2, 3, 4, 6, 250])
@pytest.mark.parametrize("size", [1e3, 1e6, 1e9])
def test_large_angles_keep_their_digits(m, size):
    """Sine and cosine of the multiple that is nearest to a float32 angle, by 40 digits."""
    x = (size * torch.randn(300, dtype=torch.float64)).float()
    got = NAMESPACE["snap_angle"](x, torch.tensor(float(m)))
    with mpmath.workdps(40):
        step = 2 * mpmath.pi / m
        want = [mpmath.nint(mpmath.mpf(v) / step) * step for v in x.tolist()]
        cosine = torch.tensor([float(mpmath.cos(v)) for v in want])
        sine = torch.tensor([float(mpmath.sin(v)) for v in want])
    assert (torch.cos(got) - cosine).abs().max() < 3e-7  # |θ| ≤ π: half an ulp of θ, and one
    assert (torch.sin(got) - sine).abs().max() < 3e-7


def test_snap_rounds_halves_to_even():
    halves = torch.tensor([-1.5, -0.5, 0.5, 1.5, 2.5], dtype=torch.float64)
    got = NAMESPACE["snap"](halves, 2 * math.pi)  # a grid of whole numbers
    assert got.tolist() == [-2.0, 0.0, 0.0, 2.0, 2.0]
    assert numbers("float64", "snap", halves.numpy(), 2 * math.pi).tolist() == got.tolist()


def test_snap_passes_gradients_through_and_keeps_its_value():
    x = torch.randn(200, requires_grad=True)  # float32: x + (s - x) would be off by a rounding
    m = torch.full((200,), 3.0)
    s = NAMESPACE["snap"](x, m)
    assert torch.equal(s.detach(), NAMESPACE["snap"](x.detach(), m))
    (slope,) = torch.autograd.grad(s.sum(), x)
    assert torch.equal(slope, torch.ones(200))


def test_symbolic_derivatives():
    x, m = sympy.symbols("x m", real=True)
    assert sympy.diff(snap(x**2, m), x) == 2 * x
    assert sympy.diff(snap(x, m), m) == 0
    assert sympy.diff(positive(2 * x), x) == 2 * positive_slope(2 * x, positive(2 * x))


@pytest.mark.parametrize("ends", [(-3, -1), (-2, 3), (0, 0), (1, 4), (-1e-3, 0)])
def test_bounds(ends):
    lo, hi = ends
    box, x = Interval(float(lo), float(hi)), np.linspace(lo, hi, 4001)
    value = numbers("float64", "positive", x)
    image = ROW["positive"].image(box)
    assert image.lo <= value.min() * (1 + 1e-15)
    assert value.max() <= image.hi * (1 + 1e-15)
    slopes = numbers("float64", "positive_slope", x, value)
    assert slopes.max() <= ROW["positive"].slope(box)
    curvature = ROW["positive"].curvature(box)
    if lo <= 0 <= hi:
        assert curvature == np.inf, "the kink"
    else:
        assert (np.abs(np.where(x < 0, slopes * (1 - 2 * value), 0)) <= curvature).all()
    for m in (1.0, 3.0, -4.0):
        for function in ("snap", "snap_angle"):
            image = ROW[function].image(box, Interval(m))
            value = numbers("float64", function, x, m)
            assert image.lo <= value.min()
            assert value.max() <= image.hi
    assert ROW["snap"].slopes((box, Interval(2.0)))[0] == 1
    assert ROW["snap"].curvature(box, Interval(2.0)) == 0
    assert ROW["snap"].image(box, Interval(-1.0, 1.0)).hi == np.inf


# -- constants, outputs, classes ---------------------------------------------------------------


def one(**changes):
    with Spec("S", output=changes.get("output", "last")) as s:
        a, b = s.state("a"), s.state("b")
        (u,) = s.drives("u")
        (m,) = s.constants("m") if changes.get("constant") else s.params("m")
        g = s.let("g", m * a + b, node=changes.get("node", False))
        s.next(a, g + u)
        s.next(b, g - b)
    return s


def test_constants_are_parameters_that_are_not_trained():
    assert [p.trained for p in one(constant=True).param_list] == [False]
    assert one(constant=True).parameter_shapes({"d": 3}) == {"m": (3,)}
    assert one().param_list[0].trained


def test_fingerprints_tell_them_apart():
    kinds = [one(), one(constant=True), one(node=True), one(output="all")]
    assert len({s.fingerprint for s in kinds}) == 4


def test_unknown_output():
    with pytest.raises(SpecError, match="got output 'first', expected 'last' or 'all'"):
        Spec("S", output="first")


def test_a_node_ends_the_expansion():
    """Two rounds that each mix: with nodes, every coefficient belongs to one round."""

    def spec(node):
        with Spec("S") as s:
            a, b = s.state("a"), s.state("b")
            p, q = s.drives("p q")
            c = s.let("c", cos(p) * a - sin(p) * b, node=node)
            d = s.let("d", sin(p) * a + cos(p) * b, node=node)
            s.next(a, cos(q) * c - sin(q) * d)
            s.next(b, sin(q) * c + cos(q) * d)
        return s

    plain, chained = spec(False), spec(True)
    assert any(c.is_Add for c in plain.factorization.coefficients[: plain.factorization.n_state])
    state = chained.factorization.coefficients[: chained.factorization.n_state]
    assert all(len(c.free_symbols) == 1 for c in state)
    h, u = np.array([[0.3, -0.7], [1.1, 0.2]]), (np.array([0.4, 2.0]), np.array([-1.0, 0.6]))
    for f in (oracle.factorized_jacobian, oracle.dense_jacobian):
        np.testing.assert_allclose(f(plain, h, u, ()), f(chained, h, u, ()), 1e-13, 1e-15)
    assert chained.jacobian_latex()[0].startswith(r"\dot{c}_t = ")


def test_linear_classes(zoo):
    assert zoo["rotation"].spec.linear_class == "planar"
    assert zoo["linear_diagonal"].spec.linear_class == "diag"
    assert zoo["linear_head"].spec.linear_class == "head"
    assert zoo["linear_right"].spec.linear_class == "right"
    assert zoo["gru_diag"].spec.linear_class is None
    with Spec("three") as s:
        a, b, c = s.state("a"), s.state("b"), s.state("c")
        (u,) = s.drives("u")
        s.next(a, sigmoid(u) * b)
        s.next(b, tanh(u) * c + u)
        s.next(c, a)
    assert s.jac_structure == "linear"
    assert s.linear_class == "block3"
