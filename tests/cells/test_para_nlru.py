"""ParaNLRU: equation, the scale near a = 1 and its derivatives, growth, initialisation."""

from __future__ import annotations

import math

import mpmath
import numpy as np
import pytest
import torch

from pararnn import NewtonConfig, ParaNLRU, ParaRNN, sequential_apply, solve, verify_agreement
from pararnn.cells.para_nlru import LEAST_DECAY
from pararnn.spec import oracle
from pararnn.spec.bounds import derivative_bounds

DIGITS = 60
GATES = (-1000.0, -200.0, -110.0, -87.0, -60.0, -55.0, -40.0, -20.0, -10.0, -3.0, 0.0, 3.0, 20.0)
"""Logits of the recurrence gate, from shut to the last bit to open."""


def random_cell(d_in=3, d_h=4, size=0.5, seed=0, **kwargs):
    torch.manual_seed(seed)
    cell = ParaNLRU(d_in, d_h, **kwargs).double()
    with torch.no_grad():
        cell.in_proj.bias.normal_()
        cell.w.uniform_(-size, size)
    return cell


def step_in_digits(h, u_r, u_i, u_n, w, big, floor=True):
    """One channel of section 2.4 of De et al. as powers of σ(−Λ), in many digits."""
    with mpmath.workdps(DIGITS):
        h, u_r, u_i, u_n, w, big = (mpmath.mpf(float(v)) for v in (h, u_r, u_i, u_n, w, big))

        def sigmoid(v):
            return 1 / (1 + mpmath.exp(-v))

        a = sigmoid(-big) ** (8 * sigmoid(u_r))
        if floor:
            a = a * mpmath.exp(-mpmath.mpf(LEAST_DECAY))
        return a * h + mpmath.sqrt(1 - a**2) * sigmoid(u_i) * mpmath.tanh(w * h + u_n)


def test_equation():
    cell = random_cell()
    h, x = torch.randn(5, 4, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64)
    got = cell.step(h, x)
    u = (x @ cell.in_proj.weight.T + cell.in_proj.bias).detach()
    for b in range(5):
        for j in range(4):
            drives = (u[b, j], u[b, 4 + j], u[b, 8 + j])
            args = (h[b, j], *drives, cell.w[j].detach(), cell.Lambda[j].detach())
            for floor in (True, False):
                want = float(step_in_digits(*args, floor=floor))
                assert math.isclose(float(got[b, j].detach()), want, rel_tol=1e-13)


def one_channel(dtype, h, u_r, big):
    """A cell of one channel, its state and its drives (input gate half open, candidate positive)."""
    cell = ParaNLRU(1, 1).to(dtype)
    with torch.no_grad():
        cell.w.fill_(0.25)
        cell.Lambda.fill_(big)
    drives = torch.tensor([[u_r, 0.0, 0.5]], dtype=dtype, requires_grad=True)
    return cell, torch.full((1, 1), h, dtype=dtype), drives


def both_steps(cell, h, drives):
    """The hand-written step and the derived one, which the solver runs."""
    yield cell.step(h, drives=drives)
    yield solve(cell, drives=drives[:, None], h0=h, method="newton").states[:, 0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("big", [-200.0, -90.0, -7.0, -3.0, 2.0])
@pytest.mark.parametrize("gate", GATES)
def test_the_scale_keeps_its_digits(dtype, big, gate):
    """From h = 0 the step is the scale times a number, which must be right to a few roundings."""
    cell, h, drives = one_channel(dtype, 0.0, gate, big)
    want = step_in_digits(0.0, gate, 0.0, 0.5, 0.25, big)
    for got in both_steps(cell, h, drives):
        assert math.isclose(float(got.detach()), float(want), rel_tol=40 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("big", [-200.0, -90.0, -7.0, -3.0, 2.0])
@pytest.mark.parametrize("gate", GATES)
def test_derivatives_at_a_gate_that_shuts(dtype, big, gate):
    """First derivatives by drive and Λ are the true ones, and finite; second ones are finite."""
    cell, h, drives = one_channel(dtype, 0.5, gate, big)
    with mpmath.workdps(DIGITS):
        by_gate = mpmath.diff(lambda u: _along(u, big), gate, h=mpmath.mpf(10) ** -25)
        by_big = mpmath.diff(lambda v: _along(gate, v), big, h=mpmath.mpf(10) ** -25)
    # sqrt(2ℓ)'s derivative by the logit is sqrt(ℓ/2), less than 1e-12 below the floor's rate.
    eps, floor = torch.finfo(dtype).eps, 2e-12
    for got in both_steps(cell, h, drives):
        first = torch.autograd.grad(got.sum(), (drives, cell.Lambda), create_graph=True)
        assert math.isclose(
            float(first[0][0, 0]), float(by_gate), rel_tol=200 * eps, abs_tol=max(floor, 4 * eps)
        )
        assert math.isclose(
            float(first[1]), float(by_big), rel_tol=200 * eps, abs_tol=max(floor, 4 * eps)
        )
        second = torch.autograd.grad(
            first[0].sum() + first[1].sum(), (drives, cell.Lambda), retain_graph=True
        )
        assert all(bool(g.isfinite().all()) for g in (*first, *second))


def _along(u_r, big):
    a = (1 / (1 + mpmath.exp(big))) ** (8 / (1 + mpmath.exp(-u_r)))
    a *= mpmath.exp(-mpmath.mpf(LEAST_DECAY))
    n = mpmath.tanh(mpmath.mpf("0.25") / 2 + mpmath.mpf("0.5"))
    return a / 2 + mpmath.sqrt(1 - a**2) / 2 * n


@pytest.mark.parametrize("method", ["sequential", "newton", "shooting"])
def test_a_sequence_of_shut_gates_has_finite_gradients(method):
    cell = ParaNLRU(2, 3)
    drives = torch.zeros(1, 12, 9)
    drives[..., :3] = -1000.0
    drives[0, 5, :3] = -torch.inf
    drives.requires_grad_()
    h0 = torch.full((1, 3), 0.5, requires_grad=True)
    states = solve(cell, drives=drives, h0=h0, method=method).states
    torch.testing.assert_close(states, torch.full_like(states, 0.5), rtol=0, atol=1e-10)
    grads = torch.autograd.grad(states.sum(), (drives, h0, cell.w, cell.Lambda))
    assert all(bool(g.isfinite().all()) for g in grads)
    torch.testing.assert_close(grads[1], torch.full_like(grads[1], 12.0), rtol=1e-5, atol=0)


def test_the_floor_is_the_same_in_both_sources():
    params = (np.array([0.0]), np.array([0.0]))
    drives = (np.array([-np.inf]), np.array([np.inf]), np.array([np.inf]))
    scale = float(oracle.step(ParaNLRU(1, 1).spec, np.array([0.0]), drives, params)[0])
    assert math.isclose(scale, math.sqrt(2 * LEAST_DECAY), rel_tol=1e-12)


def test_a_step_expands_by_a_proven_factor_at_most():
    cell = random_cell(3, 64, size=2.0, max_recurrent_norm=None)
    h = (torch.randn(500, 64, dtype=torch.float64) * 3).requires_grad_()
    drives = 4 * torch.randn(500, 192, dtype=torch.float64)
    (slope,) = torch.autograd.grad(cell.step(h, drives=drives).sum(), h)
    limit = (1 + cell.w.detach() ** 2).sqrt()
    assert bool((slope.abs() <= limit * (1 + 1e-12)).all())
    assert float((slope.abs() / limit).max()) > 0.8, "the bound is not loose"


def test_growth_is_bounded_by_a_random_walks():
    cell = random_cell(3, 16, size=3.0, max_recurrent_norm=None)
    h0 = torch.randn(4, 16, dtype=torch.float64)
    x = 5 * torch.randn(4, 300, 3, dtype=torch.float64)
    states = sequential_apply(cell, x, h0=h0)
    times = torch.arange(1, 301, dtype=torch.float64)[:, None]
    assert bool((states**2 <= (h0**2)[:, None] + times).all())


def test_the_bound_of_the_growth_is_reached():
    """Full gates and a decay of h/√(h² + 1) add 1 to h² in every step, so no interval holds h."""
    cell = ParaNLRU(1, 1).double()
    with torch.no_grad():
        cell.Lambda.fill_(2.0)
    fastest = 8 * math.log1p(math.exp(2.0))
    h = torch.zeros(1, 1, dtype=torch.float64)
    for t in range(60):
        value = float(h)
        decay = -math.log(value / math.hypot(value, 1.0)) if t else 0.99 * fastest
        gate = math.log(decay / fastest) - math.log1p(-decay / fastest)
        h = cell.step(h, drives=torch.tensor([[gate, 50.0, 50.0]], dtype=torch.float64)).detach()
        assert math.isclose(float(h), math.sqrt(t + 1), rel_tol=1e-6)


def test_derivative_bounds_hold_far_out():
    """No interval holds the state, and the second derivative is bounded all the same."""
    cell = random_cell(size=2.0, max_recurrent_norm=None)
    params = [p.detach().numpy() for p in cell.recurrent_params()]
    first, second = derivative_bounds(cell.spec, params, cell.sizes)
    assert np.isfinite(first).all()
    assert np.isfinite(second).all()
    h = torch.cat([torch.randn(200, 4), 1e3 * torch.randn(200, 4)]).double().requires_grad_()
    drives = 3 * torch.randn(400, 12, dtype=torch.float64)
    (slope,) = torch.autograd.grad(cell.step(h, drives=drives).sum(), h, create_graph=True)
    (bend,) = torch.autograd.grad(slope.sum(), h)
    assert bool((slope.detach().abs().amax(0).numpy() <= first).all())
    assert bool((bend.abs().amax(0).numpy() <= second).all())


def test_a_solve_is_certified_without_an_interval():
    cell = random_cell(4, 8, size=0.2).float()
    u = torch.randn(2, 60, 24)
    solution = solve(cell, drives=u, config=NewtonConfig(certify=True))
    exact = solve(cell.double(), drives=u.double(), method="sequential").states
    assert float((solution.states.double() - exact).abs().max()) <= solution.error_bound < 1e-3


def test_without_w_one_iteration_is_exact():
    cell = random_cell()
    with torch.no_grad():
        cell.w.zero_()
    x = torch.randn(2, 200, 3, dtype=torch.float64)
    states = solve(cell, x, NewtonConfig(max_iters=1), method="newton").states
    torch.testing.assert_close(states, sequential_apply(cell, x), rtol=0, atol=1e-12)


@pytest.mark.parametrize("method", ["newton", "shooting"])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-11), (torch.float32, 1e-4)])
@pytest.mark.parametrize("length", [4096, 1009])
def test_long_sequences(method, dtype, bound, length):
    """States reach about 5 and remember thousands of steps, so float32 is off by more than 1e-5."""
    cell = random_cell(4, 8, size=0.25).to(dtype)
    x = torch.randn(2, length, 4, dtype=torch.float64).to(dtype)
    with torch.no_grad():
        solution = solve(cell, x, method=method)
        assert solution.converged
        assert not solution.fallback
        gap = (solution.states - sequential_apply(cell, x)).abs().max()
    assert float(gap) < bound


def test_gradients_and_resets():
    cell = random_cell(3, 4)
    x = torch.randn(2, 50, 3, dtype=torch.float64)
    h0 = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    resets = torch.zeros(2, 50, dtype=torch.bool)
    resets[0, 17] = resets[1, 30] = resets[1, 31] = True
    inputs = (h0, *cell.parameters())
    want = sequential_apply(cell, x, h0=h0, resets=resets)
    expected = torch.autograd.grad(want.cos().sum(), inputs)
    for method in ("newton", "shooting"):
        got = solve(cell, x, method=method, h0=h0, resets=resets).states
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
        found = torch.autograd.grad(got.cos().sum(), inputs)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_dtypes(dtype):
    torch.manual_seed(0)
    cell = ParaNLRU(4, 8).to(dtype)
    u = torch.randn(2, 40, 24).to(dtype)
    u[:, 10, :8] = -60000.0 if dtype == torch.float16 else -1e30
    u.requires_grad_()
    solution = solve(cell, drives=u)
    assert solution.states.dtype == dtype
    assert solution.final_state.dtype == torch.float32
    grads = torch.autograd.grad(solution.states.float().sum(), (u, cell.w, cell.Lambda))
    assert all(g.dtype == dtype and bool(g.isfinite().all()) for g in grads)


def test_initial_decay():
    """An open gate decays by a factor that is uniform in (0.9, 0.999), as in the paper."""
    torch.manual_seed(0)
    cell = ParaNLRU(2, 20_000)
    slowest = torch.exp(-8 * torch.nn.functional.softplus(cell.Lambda.detach().double()))
    assert float(slowest.min()) >= 0.9 - 1e-6
    assert float(slowest.max()) <= 0.999 + 1e-6
    for quantile in (0.1, 0.25, 0.5, 0.75, 0.9):
        want = 0.9 + 0.099 * quantile
        assert math.isclose(float(slowest.quantile(quantile)), want, abs_tol=2e-3)
    assert math.isclose(float(cell.w.detach().std()), 20_000**-0.5, rel_tol=0.05)
    before = cell.Lambda.detach().clone()
    cell.reset_parameters()
    assert not torch.equal(before, cell.Lambda)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_initial_values_in_narrow_dtypes_are_finite(dtype):
    cell = ParaNLRU(3, 100, dtype=dtype)
    assert all(bool(p.isfinite().all()) for p in cell.parameters())


def test_only_w_is_bounded():
    cell = ParaNLRU(3, 4)
    with torch.no_grad():
        cell.w.copy_(torch.tensor([0.2, -0.4, 3.0, -7.0]))
        cell.Lambda.fill_(-5.0)
    w, big = cell.recurrent_params()
    assert torch.equal(w.detach(), torch.tensor([0.2, -0.4, 0.5, -0.5]))
    assert big is cell.Lambda
    cell.project_()
    assert torch.equal(cell.w.detach(), torch.tensor([0.2, -0.4, 0.5, -0.5]))
    assert bool((cell.Lambda == -5.0).all())
    assert ParaNLRU(3, 4, max_recurrent_norm=None).rebuilt().max_recurrent_norm is None
    with pytest.raises(ValueError, match="max_recurrent_norm: got -1"):
        ParaNLRU(3, 4, max_recurrent_norm=-1)


def test_in_a_layer():
    torch.manual_seed(0)
    rnn = ParaRNN(ParaNLRU(3, 4), num_layers=2)
    x = torch.randn(2, 64, 3)
    output, last = rnn(x)
    assert output.shape == (2, 64, 4)
    torch.testing.assert_close(output[:, -1], last[-1])
    assert verify_agreement(rnn, x).passed


def test_printed_equations():
    spec = ParaNLRU(3, 4).spec
    assert spec.jac_structure == "diag"
    assert [e.latex for e in spec.latex()] == [
        r"r_t = \sigma(W_r x_t + b_r)",
        r"i_t = \sigma(W_i x_t + b_i)",
        r"\ell_t = 8 \operatorname{softplus}(\Lambda) \odot r_t + 10^{-24}",
        r"a_t = \exp(-\ell_t)",
        r"q_t = \tanh(\ell_t) \odot (1 + a_t^{2})",
        r"n_t = \tanh(w \odot h_{t-1} + W_n x_t + b_n)",
        r"h_t = a_t \odot h_{t-1} + \sqrt{q_t} \odot (i_t \odot n_t)",
    ]
