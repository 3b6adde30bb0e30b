"""ParaSLSTM: equations, stabilizer, start, ties, large gates, parallel and sequential."""

from __future__ import annotations

import itertools

import mpmath
import numpy as np
import pytest
import torch

from pararnn import NewtonConfig, ParaRNN, ParaSLSTM, sequential_apply, solve, verify_agreement
from pararnn.spec import oracle

FORGET = pytest.mark.parametrize("forget", ["sigmoid", "exp"])
DOUBLE = {"dtype": torch.float64}


def random_cell(forget="sigmoid", d_in=3, d_h=4, size=0.8, seed=0):
    """Every parameter drawn, in float64."""
    torch.manual_seed(seed)
    cell = ParaSLSTM(d_in, d_h, forget=forget, dtype=torch.float64)
    with torch.no_grad():
        cell.in_proj.bias.normal_()
        for m in cell.spec.map_list:
            getattr(cell, m.name).uniform_(-size, size)
    return cell


def still_cell(forget="sigmoid", i=0.0, f=0.0, z=1.0, o=20.0, d_h=1, **kwargs):
    """Gates that depend on nothing: their pre-activations are the given numbers."""
    cell = ParaSLSTM(1, d_h, forget=forget, **kwargs)
    with torch.no_grad():
        for p in cell.parameters():
            p.zero_()
        values = torch.tensor([i, f, z, o], **DOUBLE)
        cell.in_proj.bias.copy_(values.repeat_interleave(d_h))
    return cell


def unstabilised(cell, x):
    """Outputs by the equations without a stabilizer, where mpmath has no overflow."""
    forget = mpmath.exp if cell.forget == "exp" else lambda v: 1 / (1 + mpmath.exp(-v))
    d, outputs = cell.d_h, []
    weight, bias = cell.in_proj.weight.detach().double(), cell.in_proj.bias.detach().double()
    r = [getattr(cell, f"R_{g}").detach().double() for g in "ifzo"]
    with mpmath.workdps(60):
        for row in x.double():
            c, n, h = ([mpmath.mpf(0)] * d for _ in range(3))
            for x_t in row:
                # The products exactly, as numbers of 60 digits.
                u = [
                    mpmath.fsum(
                        mpmath.mpf(float(w)) * mpmath.mpf(float(v))
                        for w, v in zip(ws, x_t, strict=True)
                    )
                    + mpmath.mpf(float(b))
                    for ws, b in zip(weight, bias, strict=True)
                ]
                for j in range(d):
                    a = [u[k * d + j] + mpmath.mpf(float(r[k][j])) * h[j] for k in range(4)]
                    i, f = mpmath.exp(a[0]), forget(a[1])
                    c[j] = f * c[j] + i * mpmath.tanh(a[2])
                    n[j] = f * n[j] + i
                    h[j] = c[j] / n[j] / (1 + mpmath.exp(-a[3]))
                outputs.append([float(v) for v in h])
    return torch.tensor(outputs, **DOUBLE).reshape(*x.shape[:2], d)


@FORGET
@pytest.mark.parametrize("scale", [1.0, 30.0, 300.0])
def test_the_stabilizer_changes_nothing(forget, scale):
    cell = random_cell(forget)
    x = scale * torch.randn(2, 24, 3, **DOUBLE)
    states = sequential_apply(cell, x)
    torch.testing.assert_close(states[:, :, 3], unstabilised(cell, x), rtol=1e-9, atol=1e-12)


@FORGET
def test_one_step_by_the_oracle(forget):
    cell = random_cell(forget)
    state = torch.rand(5, 4, 4, **DOUBLE) * 3 + 1
    x = torch.randn(5, 3, **DOUBLE)
    drives = [u.detach().numpy() for u in cell.split(cell.drives(x))]
    params = [p.detach().numpy() for p in cell.recurrent_params()]
    with mpmath.workdps(50):
        exact = oracle.step(cell.spec, state.numpy(), drives, params, "mpmath").astype(float)
    np.testing.assert_allclose(cell.step(state, x).detach(), exact, rtol=1e-13, atol=1e-14)


def test_state():
    cell = ParaSLSTM(3, 5)
    assert cell.state_shape == (4, 5)
    assert cell.jac_structure == "block4"
    assert [s.name for s in cell.spec.slots] == ["c", "n", "m", "h"]
    assert cell.in_proj.out_features == 20
    x = torch.randn(2, 7, 3)
    output, h_n = ParaRNN(cell)(x)
    torch.testing.assert_close(output, sequential_apply(cell, x)[:, :, 3])
    assert h_n.shape == (1, 2, 4, 5)
    assert ParaSLSTM(**ParaSLSTM(3, 5, forget="exp").hyperparameters()).forget == "exp"
    with pytest.raises(ValueError, match="forget: got 'tanh', expected one of"):
        ParaSLSTM(3, 5, forget="tanh")


@FORGET
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("i", [0.0, -100.0, 100.0, -5000.0, 5000.0])
def test_first_step_is_exact(forget, dtype, i):
    for f in (-100.0, 0.0, 100.0):
        cell = still_cell(forget, i=i, f=f, z=0.7, o=0.3, dtype=dtype)
        c, n, m, h = cell.step(cell.init_state(1), torch.zeros(1, 1, dtype=dtype))[0, :, 0]
        z, o = (
            torch.tanh(torch.tensor(0.7, dtype=dtype)),
            torch.sigmoid(torch.tensor(0.3, dtype=dtype)),
        )
        assert (n, m, c) == (1, i, z)
        assert h == o * z


@FORGET
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    ("i", "f"), [(-2e4, 0.0), (-1e8, -1e8), (-1e30, 3.0), (0.0, 2e4), (0.0, 1e30), (1e30, 1e8)]
)
def test_an_empty_state_is_a_case(forget, dtype, i, f):
    """Whatever the gates, the first step gives o tanh(z), in the step and in every solve; gradients
    are finite and those that do not go through the gates."""
    cell = still_cell(forget, i=i, f=f, z=0.7, o=0.3, dtype=dtype)
    z, o = torch.tensor(0.7, **DOUBLE).tanh(), torch.tensor(0.3, **DOUBLE).sigmoid()
    x = torch.zeros(1, 1, 1, dtype=dtype)
    found = [cell.step(cell.init_state(1), x[:, 0])[:, None]]
    found += [solve(cell, x, method=m).states for m in ("auto", "sequential", "newton", "shooting")]
    bound = 4 * torch.finfo(dtype).eps
    for states in found:
        assert (states[0, 0, 3, 0].double() - o * z).abs() < bound
        cell.zero_grad()
        states[0, 0, 3, 0].backward()
        slopes = cell.in_proj.bias.grad.double()
        assert slopes[:2].eq(0).all()
        assert (slopes[2] - o * (1 - z * z)).abs() < bound
        assert all(p.grad is None or p.grad.isfinite().all() for p in cell.parameters())


@FORGET
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_large_gates(forget, dtype):
    """Pre-activations of ±100 in every combination, in random order."""
    draw = torch.Generator().manual_seed(3)
    gates = torch.tensor(list(itertools.product((-100.0, 0.0, 100.0), repeat=4)))
    order = torch.randint(len(gates), (4, 50), generator=draw)
    u = gates[order]
    cell = still_cell(forget, dtype=dtype)
    for method in ("sequential", "newton", "shooting"):
        given = u.to(dtype).requires_grad_()
        solution = solve(cell, drives=given, method=method)
        c, n, _, h = solution.states.unbind(2)
        assert solution.states.isfinite().all()
        assert (n >= 1).all()
        assert (c.abs() <= n * (1 + 1e-5)).all()
        assert (h.abs() <= 1 + 1e-5).all()
        (gradient,) = torch.autograd.grad(h.float().sum(), given)
        assert gradient.isfinite().all()
        if dtype == torch.float32:
            wide = solve(still_cell(forget, **DOUBLE), drives=u.double(), method="sequential")
            torch.testing.assert_close(h.double(), wide.states[:, :, 3], rtol=0, atol=2e-3)


@FORGET
def test_normalizer_is_at_least_one(forget):
    cell = random_cell(forget, size=4.0).float()
    states = sequential_apply(cell, 10 * torch.randn(4, 200, 3))
    assert (states[:, :, 1] >= 1).all()
    assert (states[:, :, 0].abs() <= states[:, :, 1] * (1 + 1e-5)).all()
    assert states[:, :, 3].abs().max() <= 1 + 1e-5


@FORGET
def test_scale_and_stabilizer_are_one_memory(forget):
    """h' does not change along (c, n, −1)."""
    cell = random_cell(forget)
    state = torch.rand(3, 4, 4, **DOUBLE) + 1
    x = torch.randn(3, 3, **DOUBLE)
    shift = torch.tensor(0.3, **DOUBLE)
    c, n, m, h = state.unbind(1)
    other = torch.stack([c * shift.exp(), n * shift.exp(), m - shift, h], 1)
    torch.testing.assert_close(cell.step(other, x)[:, 3], cell.step(state, x)[:, 3])
    leaf = state.clone().requires_grad_()
    (g,) = torch.autograd.grad(cell.step(leaf, x)[:, 3].sum(), leaf)
    torch.testing.assert_close(c * g[:, 0] + n * g[:, 1], g[:, 2])


@pytest.mark.parametrize("method", ["sequential", "newton", "shooting"])
def test_ties(method):
    """exp gates of 1 tie at every step; the derivative of h does not depend on who takes it."""
    cell = still_cell("exp", z=0.5, o=0.0, **DOUBLE)
    u = cell.in_proj.bias.detach().repeat(1, 12, 1).requires_grad_()
    solution = solve(cell, drives=u, method=method, config=NewtonConfig(chunk_length=None))
    c, n, m, h = solution.states[0, :, :, 0].unbind(1)
    count = torch.arange(1, 13, **DOUBLE)
    torch.testing.assert_close(n, count)
    assert not m.any()
    torch.testing.assert_close(c, count * torch.tanh(torch.tensor(0.5, **DOUBLE)))
    (gradient,) = torch.autograd.grad(h[-1], u)
    # h_T = o mean(z): raising log i or log f changes no mean of equal numbers.
    assert gradient[0, :, :2].abs().max() < 1e-15
    slope = 0.5 * (1 - torch.tanh(torch.tensor(0.5, **DOUBLE)) ** 2) / 12
    torch.testing.assert_close(gradient[0, :, 2], slope.expand(12))
    m_gradient = torch.autograd.grad(solve(cell, drives=u, method=method).states[0, 0, 2, 0], u)[0]
    assert m_gradient[0, 0].tolist() == [1, 0, 0, 0]  # the first step is no tie
    second = torch.autograd.grad(solve(cell, drives=u, method=method).states[0, 1, 2, 0], u)[0]
    assert second[0, :2, 0].tolist() == [0.5, 0.5]


@FORGET
def test_long_sequences(forget):
    torch.manual_seed(0)
    cell = ParaSLSTM(8, 16, forget=forget)
    x = torch.randn(2, 4096, 8)
    for config in (NewtonConfig(), NewtonConfig(chunk_length=256)):
        solution = solve(cell, x, config, method="shooting")
        reference = sequential_apply(cell, x)
        assert solution.converged
        torch.testing.assert_close(
            solution.states[:, :, 3], reference[:, :, 3], rtol=1e-5, atol=1e-5
        )
    assert verify_agreement(cell, x[:, :600]).passed


@FORGET
def test_gradients(forget):
    cell = random_cell(forget)
    x = torch.randn(2, 150, 3, **DOUBLE)
    resets = torch.rand(2, 150) < 0.03
    weights = torch.randn(2, 150, 4, **DOUBLE)
    found = []
    for method in ("sequential", "shooting"):
        given = x.clone().requires_grad_()
        h0 = torch.zeros(2, 4, 4, **DOUBLE).requires_grad_()
        states = solve(cell, given, method=method, h0=h0, resets=resets).states
        loss = (states[:, :, 3] * weights).sum()
        found.append(torch.autograd.grad(loss, [given, h0, *cell.parameters()]))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)
    # c, n and m of an empty state do not matter, to first order; its h does.
    assert not found[0][1][:, :3].any()
    assert found[0][1][:, 3].any()


def test_gradcheck_from_the_start():
    cell = random_cell()
    x = torch.randn(1, 4, 3, **DOUBLE).requires_grad_()
    for method in ("newton", "shooting"):
        config = NewtonConfig(chunk_length=2 if method == "shooting" else None)
        run = lambda v: solve(cell, v, config, method=method).states  # noqa: B023, E731
        assert torch.autograd.gradcheck(run, (x,))
        assert torch.autograd.gradgradcheck(run, (x,))


def test_a_reset_empties_the_state():
    cell = random_cell()
    x = torch.randn(1, 20, 3, **DOUBLE)
    resets = torch.zeros(1, 20, dtype=torch.bool)
    resets[0, 7] = True
    for method in ("sequential", "newton", "shooting"):
        states = solve(cell, x, method=method, resets=resets).states
        alone = sequential_apply(cell, x[:, 7:])
        torch.testing.assert_close(states[:, 7:], alone)
