"""Functions of two arguments: ``maximum``, its tie, its bounds; and ``expm1`` near zero."""

import mpmath
import numpy as np
import pytest
import torch

import pararnn
from pararnn import Cell, Spec, SpecError, expm1, maximum, sigmoid, tanh
from pararnn.solvers.torch_backend import compiled
from pararnn.spec import bounds, oracle
from pararnn.spec.functions import PRIMITIVES, heaviside
from pararnn.spec.interval import Interval


def larger_of_two():
    with Spec("Larger") as s:
        h = s.state("h")
        u, v = s.drives("u v")
        a = s.map("a", structure="diagonal")
        s.next(h, maximum(a(h) + u, tanh(v) * h))
    return s


def rectified():
    with Spec("Rectified") as s:
        h = s.state("h")
        (u,) = s.drives("u")
        s.next(h, sigmoid(u) * maximum(h, 0) - 0.5 * maximum(0, -h))
    return s


def jump():
    with Spec("Jump") as s:
        h = s.state("h")
        s.next(h, heaviside(h))


@pytest.mark.parametrize("make", [larger_of_two, rectified])
@pytest.mark.parametrize("backend", ["float64", "mpmath"])
def test_value_and_jacobian(make, backend):
    spec, rng = make(), np.random.default_rng(0)
    for _ in range(20):
        h = rng.standard_normal(3)
        drives = [rng.standard_normal(3) for _ in spec.drive_list]
        params = [rng.standard_normal(3) for _ in spec.map_list]
        got = oracle.step(spec, h, drives, params, backend).astype(float)
        if spec.name == "Larger":
            u, v = drives
            want = np.maximum(params[0] * h + u, np.tanh(v) * h)
        else:
            want = np.maximum(h, 0) / (1 + np.exp(-drives[0])) - 0.5 * np.maximum(0, -h)
        np.testing.assert_allclose(got, want, rtol=1e-14, atol=1e-14)
        np.testing.assert_allclose(
            oracle.factorized_jacobian(spec, h, drives, params, backend).astype(float),
            oracle.dense_jacobian(spec, h, drives, params),
            rtol=1e-12,
            atol=1e-13,
        )


@pytest.mark.parametrize("make", [larger_of_two, rectified])
def test_jacobian_is_proven(make):
    assert oracle.prove_jacobian(make(), {"d": 2})


def test_tie_is_shared_in_every_backend():
    spec = larger_of_two()
    h, u, v, a = 0.5, 0.25, 0.0, -0.5  # a h + u = 0 = tanh(v) h
    for backend in ("float64", "mpmath"):
        args = (spec, np.array([h]), [np.array([u]), np.array([v])], [np.array([a])])
        jacobian = oracle.factorized_jacobian(*args, backend).astype(float)
        assert jacobian == pytest.approx(0.5 * a + 0.5 * np.tanh(v), abs=0)
    inputs = [torch.tensor([x], dtype=torch.float64) for x in (h, u, v, a)]
    _, entry = compiled(spec, "step_jacobian")(*inputs)
    leaf = inputs[0].requires_grad_()
    (derivative,) = torch.autograd.grad(compiled(spec, "step")(leaf, *inputs[1:])[0], leaf)
    assert entry.item() == derivative.item() == 0.5 * a


def test_what_is_compared_is_rounded_once():
    """Value and derivative see the same two numbers, so a tie in one is a tie in the other."""
    text = larger_of_two().source("step_jacobian")
    assert "maximum(h_next_left, h_next_right)" in text
    assert "heaviside(h_next_left - h_next_right)" in text


def test_gradients_are_those_of_autograd_through_the_loop():
    cell = Cell(3, 4, spec=larger_of_two(), dtype=torch.float64)
    x = torch.randn(2, 23, 3, dtype=torch.float64, requires_grad=True)

    def gradients(method):
        states = pararnn.solve(cell, x, method=method).states
        return torch.autograd.grad(states.square().sum(), [x, *cell.parameters()])

    for a, b in zip(gradients("newton"), gradients("sequential"), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_latex():
    (line,) = larger_of_two().latex()
    assert line.latex == (
        r"h_t = \max(a \odot h_{t-1} + W_u x_t + b_u, \tanh(W_v x_t + b_v) \odot h_{t-1})"
    )


def test_intervals():
    row = PRIMITIVES[maximum]
    below, across, above = Interval(-3, -2), Interval(-1, 1), Interval(2, 3)
    image = row.image(across, Interval(0, 5))
    assert (image.lo, image.hi) == (0, 5)
    assert row.slopes([below, above]) == (0, 1)
    assert row.slopes([above, below]) == (1, 0)
    assert row.slopes([across, Interval(0)]) == (1, 1)
    assert row.curvature(below, above) == 0
    assert row.curvature(across, across) == np.inf
    step = PRIMITIVES[heaviside]
    assert [step.slope(i) for i in (below, across, above)] == [0, np.inf, 0]
    assert [float(step.image(i).hi) for i in (below, across, above)] == [0, 1, 1]


def test_derivative_bounds():
    with Spec("Kink") as s:
        h = s.state("h", bounds=(-1, 1))
        (u,) = s.drives("u")
        a = s.map("a", structure="diagonal")
        s.next(h, tanh(maximum(a(h), 2) + u))
    sizes = {"d": 2}
    flat = bounds.derivative_bounds(s, [np.array([0.5, 1.5])], sizes)
    assert not flat[0].any()  # 2 is always the larger
    assert not flat[1].any()
    first, second = bounds.derivative_bounds(s, [np.array([0.5, 3.0])], sizes)
    assert first[1] >= 3
    assert second[1] == np.inf


def test_numbers_are_evaluated():
    assert maximum(3, 2) == 3
    assert heaviside(-1) == 0
    assert float(heaviside(0)) == 0.5
    assert float(expm1(1e-20)) == 1e-20


def test_the_unit_step_is_no_function_of_the_language():
    with pytest.raises(SpecError, match="got heaviside"):
        jump()
    with pytest.raises(SpecError, match="'maximum' is that of a function"), Spec("named") as s:
        s.state("maximum")


@pytest.mark.parametrize("backend", ["float64", "mpmath", "torch"])
def test_expm1_keeps_its_digits(backend):
    with Spec("Slow") as s:
        h = s.state("h")
        (u,) = s.drives("u")
        s.next(h, h * expm1(-u))
    u = np.array([1e-9, 3e-14, 2.0])
    if backend == "torch":
        one = torch.ones(3, dtype=torch.float64)
        got = compiled(s, "step")(one, torch.from_numpy(u))[0].numpy()
    else:
        got = oracle.step(s, np.ones(3), [u], [], backend).astype(float)
    with mpmath.workdps(40):
        want = [float(mpmath.expm1(-mpmath.mpf(float(x)))) for x in u]
    np.testing.assert_allclose(got, want, rtol=4e-16)
    assert oracle.prove_jacobian(s, {"d": 1})


def test_a_number_that_is_compared_gets_no_stage():
    with Spec("leaky") as s:
        h = s.state("h")
        (u,) = s.drives("u")
        s.next(h, maximum(h + u, 0) / 2)
    assert not [stage for stage in s.stages if stage.expr.is_number]
