"""ParaLSTM: equations, the paper's Jacobian, slots, initialisation and bounds."""

from __future__ import annotations

import math

import mpmath
import numpy as np
import pytest
import torch

from pararnn import (
    NewtonConfig,
    ParaLSTM,
    ParaRNN,
    newton_apply,
    sequential_apply,
    solve,
    verify_agreement,
)
from pararnn.spec import oracle

NAMES = ("A_f", "A_z", "A_o", "C_f", "C_o")


def weights(cell):
    return [getattr(cell, name) for name in NAMES]


def random_cell(d_in=3, d_h=4, size=0.5, seed=0, **kwargs):
    """Every parameter drawn, in float64; recurrent entries uniform in ± size."""
    torch.manual_seed(seed)
    cell = ParaLSTM(d_in, d_h, **kwargs).double()
    with torch.no_grad():
        cell.in_proj.bias.normal_()
        for a in weights(cell):
            a.uniform_(-size, size)
    return cell


def scalar_step(a, u, c, h):
    """Eq. 3.1b for one channel; ``a`` are the five weights, ``u`` the three drives."""
    a_f, a_z, a_o, c_f, c_o = a
    u_f, u_z, u_o = u
    f = 1 / (1 + math.exp(-(a_f * h + u_f + c_f * c)))
    z = math.tanh(a_z * h + u_z)
    new = f * c + (1 - f) * z
    o = 1 / (1 + math.exp(-(a_o * h + u_o + c_o * new)))
    return new, o * math.tanh(new)


def test_equation():
    cell = random_cell()
    state, x = torch.randn(5, 2, 4, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64)
    got = cell.step(state, x)
    u = (x @ cell.in_proj.weight.T + cell.in_proj.bias).detach()
    assert got.shape == (5, 2, 4)
    for b in range(5):
        for j in range(4):
            drives = [float(u[b, j + 4 * k]) for k in range(3)]
            a = [float(w[j].detach()) for w in weights(cell)]
            want = scalar_step(a, drives, float(state[b, 0, j]), float(state[b, 1, j]))
            torch.testing.assert_close(got[b, :, j].tolist(), list(want), rtol=1e-13, atol=1e-14)


def paper_jacobian(a, u, c_old, h_old):
    """Eq. 3.2b of the paper, entry by entry, over arrays of channels."""
    a_f, a_z, a_o, c_f, c_o = a
    u_f, u_z, u_o = u
    f = 1 / (1 + np.exp(-(a_f * h_old + u_f + c_f * c_old)))
    z = np.tanh(a_z * h_old + u_z)
    c = f * c_old + (1 - f) * z
    o = 1 / (1 + np.exp(-(a_o * h_old + u_o + c_o * c)))
    df, dz, do, dh = f * (1 - f), 1 - z**2, o * (1 - o), 1 - np.tanh(c) ** 2
    j_cc = f + (c_old - z) * df * c_f
    j_ch = (c_old - z) * df * a_f + (1 - f) * dz * a_z
    j_hc = (np.tanh(c) * do * c_o + o * dh) * j_cc
    j_hh = np.tanh(c) * do * (a_o + c_o * j_ch) + o * dh * j_ch
    return j_cc, j_ch, j_hc, j_hh


@pytest.mark.parametrize("size", [0.5, 4.0])
def test_jacobian_is_the_papers(size):
    """The derived Jacobian and autograd of the hand-written step are eq. 3.2b."""
    d = 4
    cell = random_cell(d_h=d, size=size, max_recurrent_norm=None)
    state, x = torch.rand(2, d, dtype=torch.float64) * 2 - 1, torch.randn(3, dtype=torch.float64)
    drives = tuple(u.detach().numpy() for u in cell.split(cell.drives(x)))
    params = tuple(p.detach().numpy() for p in cell.recurrent_params())
    j_cc, j_ch, j_hc, j_hh = (np.diag(j) for j in paper_jacobian(params, drives, *state.numpy()))
    want = np.block([[j_cc, j_ch], [j_hc, j_hh]])
    derived = oracle.factorized_jacobian(cell.spec, state.numpy(), drives, params)
    np.testing.assert_allclose(derived, want, rtol=1e-13, atol=1e-15)
    autograd = torch.func.jacrev(lambda s: cell.step(s, x))(state).reshape(2 * d, 2 * d)
    np.testing.assert_allclose(autograd.detach().numpy(), want, rtol=1e-12, atol=1e-14)


def test_printed_equations_and_jacobian():
    spec = ParaLSTM(3, 4).spec
    assert [e.latex for e in spec.latex()] == [
        r"p_t = a_f \odot h_{t-1} + c_f \odot c_{t-1} + W_f x_t + b_f",
        r"f_t = \sigma(p_t)",
        r"i_t = \sigma(-p_t)",
        r"z_t = \tanh(a_z \odot h_{t-1} + W_z x_t + b_z)",
        r"c_t = f_t \odot c_{t-1} + i_t \odot z_t",
        r"o_t = \sigma(a_o \odot h_{t-1} + c_o \odot c_t + W_o x_t + b_o)",
        r"h_t = o_t \odot \tanh(c_t)",
    ]
    memory, output = spec.jacobian_latex()
    assert memory == (
        r"\dot{c}_t = f_t \odot \dot{c}_{t-1}"
        r" + (c_{t-1} \odot f_t \odot (1 - f_t) - i_t \odot z_t \odot (1 - i_t))"
        r" \odot (a_f \odot \dot{h}_{t-1})"
        r" + (c_{t-1} \odot f_t \odot (1 - f_t) - i_t \odot z_t \odot (1 - i_t))"
        r" \odot (c_f \odot \dot{c}_{t-1})"
        r" + i_t \odot (1 - z_t^{2}) \odot (a_z \odot \dot{h}_{t-1})"
    )
    assert output == (
        r"\dot{h}_t = \tanh(c_t) \odot o_t \odot (1 - o_t) \odot (a_o \odot \dot{h}_{t-1})"
        r" + \tanh(c_t) \odot o_t \odot (1 - o_t) \odot (c_o \odot \dot{c}_t)"
        r" + o_t \odot (1 - \tanh(c_t)^{2}) \odot \dot{c}_t"
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("size", [1e-6, 1.0, 40.0])
def test_step_against_fifty_digits(dtype, size):
    """Small inputs and gates open or shut keep all digits, in both sources of the step."""
    cell = random_cell().to(dtype)
    state = (torch.rand(6, 2, 4, dtype=torch.float64) * 2 - 1).to(dtype) * min(size, 1.0)
    u = torch.randn(6, 12, dtype=torch.float64).to(dtype) * size
    with mpmath.workdps(50):
        drives = tuple(d.double().numpy() for d in cell.split(u))
        params = tuple(p.detach().double().numpy() for p in cell.recurrent_params())
        exact = oracle.step(cell.spec, state.double().numpy(), drives, params, "mpmath")
    exact = torch.tensor(exact.astype(np.float64))
    eps = torch.finfo(dtype).eps
    for got in (cell.step(state, drives=u), solve(cell, drives=u[:, None], h0=state).states[:, 0]):
        gap = (got.double() - exact).abs()
        assert float((gap / exact.abs().clamp_min(exact.abs().max() * 1e-6)).max()) < 64 * eps


def test_a_full_forget_gate_keeps_the_memory():
    cell = ParaLSTM(3, 4)
    with torch.no_grad():
        cell.in_proj.bias[:4] = 200.0
    state = torch.rand(2, 2, 4)
    assert torch.equal(cell.step(state, torch.zeros(2, 3))[:, 0], state[:, 0])


@pytest.mark.parametrize("method", ["newton", "shooting"])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("length", [4096, 1009])
def test_long_sequences(method, dtype, bound, length):
    cell = random_cell(4, 8, size=1.0, max_recurrent_norm=1.0).to(dtype)
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
    h0 = torch.rand(2, 2, 4, dtype=torch.float64, requires_grad=True)
    resets = torch.zeros(2, 50, dtype=torch.bool)
    resets[0, 17] = resets[1, 30] = resets[1, 31] = True
    inputs = (h0, *cell.parameters())
    want = sequential_apply(cell, x, h0=h0, resets=resets)
    expected = torch.autograd.grad(want.cos().sum(), inputs)
    for method in ("newton", "shooting"):
        got = solve(cell, x, method=method, h0=h0, resets=resets).states
        torch.testing.assert_close(got, want, rtol=0, atol=1e-13)
        found = torch.autograd.grad(got.cos().sum(), inputs)
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_dtypes_carry_float32(dtype):
    torch.manual_seed(0)
    cell = ParaLSTM(4, 8).to(dtype)
    twin = ParaLSTM(4, 8)
    twin.load_state_dict(cell.float().state_dict())
    cell = cell.to(dtype)
    u = torch.randn(2, 40, 24).to(dtype)
    solution = solve(cell, drives=u)
    wide = solve(twin, drives=u.float())
    assert solution.states.dtype == dtype
    assert solution.final_state.dtype == torch.float32
    gap = (solution.states.float() - wide.states).abs().max()
    assert float(gap) <= torch.finfo(dtype).eps
    torch.testing.assert_close(solution.final_state, wide.final_state, rtol=0, atol=1e-5)


def test_three_iterations_of_the_papers_newton():
    torch.manual_seed(0)
    cell = ParaLSTM(8, 16)
    x = torch.randn(2, 200, 8)
    solution = solve(cell, x, NewtonConfig(max_iters=3), method="newton")
    assert solution.converged
    assert torch.equal(solution.states, newton_apply(cell, x, NewtonConfig(max_iters=3)))


def test_a_layer_passes_the_output_slot_on():
    torch.manual_seed(0)
    rnn = ParaRNN(ParaLSTM(3, 4), num_layers=2)
    x = torch.randn(2, 20, 3)
    output, last = rnn(x)
    assert output.shape == (2, 20, 4)
    assert last.shape == (2, 2, 2, 4)
    torch.testing.assert_close(output[:, -1], last[-1, :, 1])
    first = sequential_apply(rnn.cells[0], x)
    second = sequential_apply(rnn.cells[1], first[..., 1, :])
    torch.testing.assert_close(output, second[..., 1, :], rtol=0, atol=1e-5)
    state, streamed = None, []
    for t in range(20):
        y, state = rnn.step(x[:, t], state)
        streamed.append(y)
    torch.testing.assert_close(torch.stack(streamed, 1), output, rtol=0, atol=1e-5)
    assert verify_agreement(rnn, x).passed


def test_initial_statistics():
    torch.manual_seed(0)
    cell = ParaLSTM(256, 4096)
    w = cell.in_proj.weight.detach()
    assert math.isclose(float(w.std()), 256**-0.5, rel_tol=0.02)
    assert float(w.abs().max()) <= 3**0.5 * 256**-0.5 * (1 + 1e-6)  # uniform
    assert not cell.in_proj.bias.any()
    for a in weights(cell):
        a = a.detach()
        assert a.shape == (4096,)
        assert math.isclose(float(a.std()), 4096**-0.5, rel_tol=0.06)
        assert abs(float(a.mean())) < 4 * 4096**-0.5 / 4096**0.5


def test_recurrent_vectors_and_peepholes_are_bounded():
    cell = ParaLSTM(3, 4)
    assert cell.max_recurrent_norm == 0.5
    raw = torch.tensor([0.2, -0.4, 3.0, -7.0])
    with torch.no_grad():
        for a in weights(cell):
            a.copy_(raw)
    clipped = torch.tensor([0.2, -0.4, 0.5, -0.5])
    for effective, stored in zip(cell.recurrent_params(), weights(cell), strict=True):
        assert torch.equal(effective.detach(), clipped)
        assert torch.equal(stored.detach(), raw)
    cell.project_()
    assert all(torch.equal(a.detach(), clipped) for a in weights(cell))
    free = ParaLSTM(3, 4, max_recurrent_norm=None)
    assert free.rebuilt().max_recurrent_norm is None


@pytest.mark.parametrize("bad", [0, -0.5, "default", float("nan"), float("inf"), [0.5]])
def test_bad_bounds(bad):
    with pytest.raises(ValueError, match="max_recurrent_norm: got"):
        ParaLSTM(3, 4, max_recurrent_norm=bad)


def test_states_stay_in_the_box():
    cell = random_cell(size=20.0, max_recurrent_norm=None)
    x = 10 * torch.randn(4, 100, 3, dtype=torch.float64)
    states = sequential_apply(cell, x)
    assert float(states[:, :, 0].abs().max()) <= 1
    assert float(states[:, :, 1].abs().max()) <= math.tanh(1)
    # From outside, the memory does not grow, and the output is in its box after one step.
    outside = sequential_apply(cell, x, h0=torch.full((4, 2, 4), 5.0, dtype=torch.float64))
    memory = outside[:, :, 0].abs().clamp_min(1).amax((0, 2))
    assert bool((memory.diff() <= 1e-15).all())
    assert float(memory[0]) <= 5
    assert float(outside[:, :, 1].abs().max()) <= 1


def test_a_solve_is_certified():
    cell = random_cell(4, 8).float()
    u = torch.randn(2, 60, 24)
    solution = solve(cell, drives=u, config=NewtonConfig(certify=True))
    exact = solve(cell.double(), drives=u.double(), method="sequential").states
    assert float((solution.states.double() - exact).abs().max()) <= solution.error_bound < 1e-4


@pytest.mark.parametrize(
    ("dtype", "bias", "limit"), [(torch.float32, 10.0, 1e-6), (torch.float64, 40.0, 1e-14)]
)
@pytest.mark.parametrize("method", ["newton", "shooting"])
def test_a_memory_that_forgets_little_keeps_what_is_written(dtype, bias, limit, method):
    """``1 - f`` by a subtraction loses the digits of what a nearly open gate lets in."""
    torch.manual_seed(0)
    cell, x = ParaLSTM(3, 4, dtype=dtype), torch.randn(2, 60, 3, dtype=dtype)
    with torch.no_grad():
        cell.in_proj.bias[:4] = bias
    want = solve(cell, x, method="sequential").states
    found = solve(cell, x, method=method).states
    assert float((found - want).abs().max() / want.abs().max()) < limit
