"""MinGRU and MinLSTM: the papers' equations, gates at their ends, and where a sequence starts."""

from __future__ import annotations

import mpmath
import pytest
import torch

from pararnn import MinGRU, MinLSTM, ParaRNN, kernels, solve

EACH = pytest.mark.parametrize("cls", [MinGRU, MinLSTM])


def g(x):
    return x + 0.5 if x >= 0 else 1 / (1 + mpmath.exp(-x))


def sigmoid(x):
    return 1 / (1 + mpmath.exp(-x))


def paper(cls, h, u):
    """One channel of Feng et al., arXiv:2410.01201, as it is written there."""
    if cls is MinGRU:
        z = sigmoid(u[0])
        return (1 - z) * h + z * g(u[1])
    f, i = sigmoid(u[0]), sigmoid(u[1])
    return f / (f + i) * h + i / (f + i) * g(u[2])


ENDS = [-700.0, -90.0, -20.0, -1.0, -1e-9, 0.0, 1e-9, 1.0, 20.0, 90.0, 700.0]


@EACH
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_gates_near_their_ends(cls, dtype):
    """Every combination of drives, relative to the value itself: nothing cancels. Exponentials have
    the error of their argument, and what is denormal has fewer digits."""
    cell = cls(1, 1, dtype=dtype)
    count = cell.in_proj.out_features
    drives = torch.cartesian_prod(*[torch.tensor(ENDS, dtype=dtype)] * count)
    for start in (0.7, 1e-20, 1e20):
        h = torch.full((len(drives), 1), start, dtype=dtype)
        got = cell.step(h, drives=drives)[:, 0].tolist()
        with mpmath.workdps(400):
            for u, value in zip(drives.tolist(), got, strict=True):
                want = paper(cls, mpmath.mpf(h[0, 0].item()), [mpmath.mpf(x) for x in u])
                size = 32 + 4 * max(map(abs, u))
                slack = size * torch.finfo(dtype).eps * want + 1e-37 * max(1.0, start)
                assert abs(value - want) <= slack, (u, start, value, float(want))


@EACH
def test_states_are_positive(cls):
    torch.manual_seed(0)
    layer = cls(4, 16)
    y = layer(torch.randn(2, 3000, 4))
    assert bool((y > 0).all())
    assert layer.spec.slots[0].bounds == (0, float("inf"))
    assert bool((layer(torch.randn(2, 50, 4), torch.zeros(2, 16)) > 0).all())


@EACH
def test_no_digits_are_lost_with_length(cls):
    torch.manual_seed(1)
    layer = cls(2, 4)
    x = 3 * torch.randn(1, 100_000, 2)
    got = layer(x).double()
    want = layer.double()(x.double())
    assert float(((got - want) / want).abs().max()) < 1e-5


@EACH
def test_the_start(cls):
    layer = cls(3, 5, learnable_h0=True, dtype=torch.float64)
    assert torch.equal(layer.init_state(2), torch.full((2, 5), 0.5, dtype=torch.float64))
    assert torch.equal(cls(3, 5).init_state(4), torch.full((4, 5), 0.5))
    (slope,) = torch.autograd.grad(layer.init_state(1).sum(), layer.h0_pre)
    assert torch.equal(slope, torch.ones(5, dtype=torch.float64)), "the kink: from the right"
    x = torch.randn(2, 9, 3, dtype=torch.float64)
    (slope,) = torch.autograd.grad(layer(x).sum(), layer.h0_pre)
    assert bool((slope > 0).all())
    with torch.no_grad():
        layer.h0_pre.copy_(torch.tensor([-3.0, -0.1, 0, 0.1, 2]))
    want = torch.tensor([sigmoid(-3), sigmoid(-0.1), 0.5, 0.6, 2.5], dtype=torch.float64)
    torch.testing.assert_close(layer.init_state(1)[0], want)
    layer.reset_parameters()
    assert torch.equal(layer.h0_pre, torch.zeros(5, dtype=torch.float64))
    assert cls(3, 5).h0_pre is None


@EACH
@pytest.mark.parametrize("bad", [-1.0, -1e-30, float("nan"), -float("inf")])
def test_states_below_zero_are_errors(cls, bad):
    layer = cls(3, 5)
    x, h = torch.randn(2, 4, 3), torch.ones(2, 1, 5)
    h[1, 0, 4] = bad
    with pytest.raises(ValueError, match="h0: got a negative entry or a NaN"):
        layer(x, h)
    for call in (
        lambda: solve(layer, x, h0=h[:, 0]),
        lambda: solve(layer, x, h0=h[:, 0], method="sequential"),
        lambda: ParaRNN(layer)(x, h.transpose(0, 1)),
    ):
        with pytest.raises(ValueError, match="h0: got a negative entry or a NaN"):
            call()
    if bad != bad:  # of a step before
        y, _ = layer.stream(x[:, 0], h)
        assert y.isnan().nonzero().tolist() == [[1, 4]]
        return
    with pytest.raises(ValueError, match="h: got a negative entry"):
        layer.stream(x[:, 0], h)
    with pytest.raises(ValueError, match="h: got a negative entry"):
        layer.step(h[:, 0], x[:, 0])
    with pytest.raises(ValueError, match="h: got a negative entry"):
        ParaRNN(layer).step(x[:, 0], h.transpose(0, 1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("size", [0.0, 1e1, 1e3, 1e5, 1e8])
def test_two_closed_gates_have_their_ratio(dtype, size):
    """By 50 digits, in the step, the loop, the scan and shooting: f/(f + i) of the drives as they
    are rounded, however small both gates."""
    torch.manual_seed(0)
    layer = MinLSTM(3, 5, dtype=dtype)
    u = torch.randn(2, 4, 3, 5, dtype=torch.float64)
    u[:, :, :2] -= size
    u = u.flatten(2).to(dtype)
    h, want = torch.full((2, 5), 0.5, dtype=torch.float64), []
    with mpmath.workdps(50):
        for t in range(4):
            f, i, n = u[:, t].double().unflatten(-1, (3, 5)).unbind(1)
            new = torch.empty_like(h)
            for b in range(2):
                for j in range(5):
                    a, c, v = (mpmath.mpf(float(k[b, j])) for k in (f, i, n))
                    ratio = (
                        mpmath.log1p(mpmath.exp(-c)) - mpmath.log1p(mpmath.exp(-a))
                        if (size < 1e2)
                        else a - c
                    )  # log(1 + exp(x)) is x, to more than 400 digits
                    keep = 1 / (1 + mpmath.exp(-ratio))
                    g = v + 0.5 if v >= 0 else 1 / (1 + mpmath.exp(-v))
                    new[b, j] = float(keep * mpmath.mpf(float(h[b, j])) + (1 - keep) * g)
            h = new
            want.append(h)
    want = torch.stack(want, 1)
    bound = 1e-13 if dtype == torch.float64 else 5e-6  # log f of size 10 is rounded to 1e-6
    for method in ("auto", "sequential", "newton", "shooting"):
        states = solve(layer, drives=u, method=method).states.double()
        assert ((states - want) / want).abs().max() < bound, method
    state = layer.init_state(2)
    for t in range(4):
        state = layer.step(state, drives=u[:, t])
        assert ((state.double() - want[:, t]) / want[:, t]).abs().max() < bound


@EACH
def test_a_zero_state_has_a_gradient(cls):
    """The log-space form has none, or an infinite one."""
    layer = cls(3, 5, dtype=torch.float64)
    x = torch.randn(1, 6, 3, dtype=torch.float64)
    h = torch.zeros(1, 5, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(layer(x, h).sum(), h)
    eps = 1e-6
    for i in range(5):
        up = torch.zeros(1, 5, dtype=torch.float64)
        up[0, i] = eps
        want = (layer(x, up) - layer(x, 0 * up)).sum() / eps
        assert abs(float(slope[0, i] - want)) < 1e-8 * abs(float(want))


@EACH
def test_large_states_and_inputs_stay_finite(cls):
    layer = cls(3, 5)
    y = layer(1e30 * torch.randn(1, 20, 3), torch.full((1, 5), 1e30))
    assert bool(y.isfinite().all())


@EACH
def test_class_and_kernels(cls):
    for decay in (None, "fixed", "learnable"):
        spec = cls(3, 5, decay=decay).spec
        assert (spec.jac_structure, spec.linear_class) == ("linear", "diag")
        assert kernels.channelwise(spec) is None
    assert cls(64, 64).in_proj.weight.numel() + cls(64, 64).in_proj.bias.numel() == (
        8320 if cls is MinGRU else 12480
    )


def test_min_lstm_forgets_by_the_quotient():
    """Both gates closed: f and i underflow, their quotient does not."""
    cell = MinLSTM(1, 1)
    u = torch.tensor([[-130.0, -131.0, 0.0], [-131.0, -130.0, 0.0], [-130.0, -300.0, 0.0]])
    got = cell.step(torch.ones(3, 1), drives=u)[:, 0]
    f = torch.sigmoid(torch.tensor([1.0, -1.0, 170.0]))
    torch.testing.assert_close(got, f + (1 - f) * 0.5)
