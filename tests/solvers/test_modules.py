"""Any module with ``step(h, x)`` and ``state_shape``: no Spec, Jacobians by automatic
differentiation."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from pararnn import NewtonConfig, sequential_apply, solve
from pararnn.testing.reference import loop


class FromGRUCell(nn.Module):
    def __init__(self, d_in=3, d_h=4):
        super().__init__()
        self.inner, self.d_in, self.state_shape = nn.GRUCell(d_in, d_h), d_in, (d_h,)

    def step(self, h, x):
        return self.inner(x, h)


class FromLSTMCell(nn.Module):
    def __init__(self, d_in=3, d_h=4):
        super().__init__()
        self.inner, self.d_in, self.state_shape = nn.LSTMCell(d_in, d_h), d_in, (2, d_h)

    def step(self, h, x):
        return torch.stack(self.inner(x, (h[:, 0], h[:, 1])), 1)


class WithBuffer(nn.Module):
    def __init__(self, d_in=3):
        super().__init__()
        self.w = nn.Parameter(torch.randn(d_in, d_in) * 0.3)
        self.norm = nn.LayerNorm(d_in)
        self.register_buffer("gain", torch.randn(d_in))
        self.d_in, self.state_shape = d_in, (d_in,)

    def step(self, h, x):
        return torch.tanh(0.5 * self.norm(h @ self.w + x) + self.gain * x)


class Tied(nn.Module):
    """One parameter under two names."""

    def __init__(self, d_in=3):
        super().__init__()
        self.a = nn.Linear(d_in, d_in)
        self.b = self.a
        self.d_in, self.state_shape = d_in, (d_in,)

    def step(self, h, x):
        return torch.tanh(self.a(h) + self.b(x))


class Free(nn.Module):
    """No parameters at all."""

    d_in, state_shape = 3, (3,)

    def step(self, h, x):
        return torch.tanh(h.roll(1, -1) * 0.9 + x)


class Large(nn.Module):
    """More state than a dense Jacobian is formed for."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(10, 10) * 0.2)
        self.d_in, self.state_shape = 3, (10, 10)

    def step(self, h, x):
        return torch.tanh(h @ self.w + x.sum(-1)[:, None, None])


MODULES = [FromGRUCell, FromLSTMCell, WithBuffer, Tied, Free, Large]
module = pytest.mark.parametrize("make", MODULES, ids=lambda c: c.__name__)
MODES = {
    "newton": ("newton", None),
    "chunks": ("shooting", NewtonConfig(chunk_length=7)),
    "auto": ("auto", None),
}
modes = pytest.mark.parametrize("mode", MODES.values(), ids=MODES)


def build(make, dtype=torch.float64):
    torch.manual_seed(0)
    return make().to(dtype)


def same(got, want, inputs, **close):
    for a, b, t in zip(got, want, inputs, strict=True):
        a, b = (torch.zeros_like(t) if g is None else g for g in (a, b))
        torch.testing.assert_close(a, b, **close)


@module
@modes
def test_states_and_gradients(make, mode):
    method, config = mode
    cell = build(make)
    x = torch.randn(2, 22, 3, dtype=torch.float64, requires_grad=True)
    h0 = torch.randn(2, *cell.state_shape, dtype=torch.float64, requires_grad=True)
    resets = torch.zeros(2, 22, dtype=torch.bool)
    resets[0, 7] = resets[1, 0] = resets[1, 12] = resets[1, 13] = True
    s = solve(cell, x, config, method=method, h0=h0, resets=resets)
    want = loop(cell, x, h0, resets)
    assert s.converged
    torch.testing.assert_close(s.states, want, rtol=0, atol=1e-12)
    inputs = [x, h0, *cell.parameters()]
    weight = torch.randn_like(want)
    got = torch.autograd.grad((s.states * weight).sum(), inputs, allow_unused=True)
    want = torch.autograd.grad((want * weight).sum(), inputs, allow_unused=True)
    same(got, want, inputs, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("make", [FromGRUCell, FromLSTMCell, Free], ids=lambda c: c.__name__)
def test_second_derivatives(make):
    cell = build(make)
    x = torch.randn(1, 6, 3, dtype=torch.float64, requires_grad=True)
    h0 = torch.randn(1, *cell.state_shape, dtype=torch.float64, requires_grad=True)
    inputs = [x, h0, *cell.parameters()]

    def second(states):
        first = torch.autograd.grad(states.pow(3).sum(), inputs, create_graph=True)
        return torch.autograd.grad(sum(g.pow(2).sum() for g in first), inputs)

    got = second(solve(cell, x, NewtonConfig(chunk_length=2), method="shooting", h0=h0).states)
    torch.testing.assert_close(got, second(loop(cell, x, h0)), rtol=1e-8, atol=1e-9)


@module
def test_without_gradients(make):
    cell = build(make)
    x = torch.randn(2, 8, 3, dtype=torch.float64)
    want = loop(cell, x, torch.zeros(2, *cell.state_shape, dtype=torch.float64))
    for guard in (torch.no_grad, torch.inference_mode):
        with guard():
            for method in ("newton", "shooting", "sequential"):
                s = solve(cell, x, method=method)
                assert not s.states.requires_grad
                torch.testing.assert_close(s.states, want.detach(), rtol=0, atol=1e-12)


@module
def test_frozen_parameters(make):
    cell = build(make)
    parameters = list(cell.parameters())
    for p in parameters[:-1]:
        p.requires_grad_(False)
    x = torch.randn(2, 7, 3, dtype=torch.float64)
    y = solve(cell, x, method="newton").states
    assert y.requires_grad == bool(parameters)
    if parameters:
        want = loop(cell, x, torch.zeros(2, *cell.state_shape, dtype=torch.float64))
        got = torch.autograd.grad(y.pow(2).sum(), parameters[-1])[0]
        torch.testing.assert_close(got, torch.autograd.grad(want.pow(2).sum(), parameters[-1])[0])
        y = solve(cell, x, method="newton").states
        y.sum().backward()
        assert all(p.grad is None for p in parameters[:-1])


@pytest.mark.parametrize("make", [FromGRUCell, WithBuffer, Free], ids=lambda c: c.__name__)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(make, dtype):
    cell = build(make, dtype)
    x = torch.randn(2, 8, 3).to(dtype)
    wide = copy.deepcopy(cell).double()
    want = loop(wide, x.double(), torch.zeros(2, *cell.state_shape, dtype=torch.float64))
    eps = torch.finfo(dtype).eps
    for method in ("newton", "sequential", "auto"):
        s = solve(cell, x, method=method)
        assert s.states.dtype == dtype
        assert s.final_state.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert float((s.states.double() - want).abs().max()) < 60 * eps, method
    pair = solve(cell, x, method="newton").states, sequential_apply(cell, x)
    torch.testing.assert_close(*pair, rtol=0, atol=60 * eps)


class WrongShape(nn.Module):
    d_in, state_shape = 3, (3,)

    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def step(self, h, x):
        h = torch.tanh(h + x)
        if self.kind == "narrow":
            return h[:, :1]
        if self.kind == "flat":
            return h.sum()
        return h.unsqueeze(1)


@pytest.mark.parametrize("kind", ["narrow", "flat", "extra"])
@pytest.mark.parametrize("method", ["sequential", "newton", "shooting", "auto"])
def test_a_step_of_another_shape_is_refused(kind, method):
    cell, x = WrongShape(kind), torch.randn(2, 20, 3)
    with pytest.raises(ValueError, match="shape"):
        solve(
            cell, x, NewtonConfig(chunk_length=4) if method == "shooting" else None, method=method
        )
    with pytest.raises(ValueError, match="shape"):
        sequential_apply(cell, x)


def test_what_is_no_cell():
    x = torch.randn(2, 5, 3)
    with pytest.raises(TypeError, match=r"Linear.*step"):
        solve(nn.Linear(3, 3), x)
    with pytest.raises(TypeError, match="no Spec"):
        solve(Free(), None, drives=x)
    config = NewtonConfig(chunk_length=3, jacobian="exact", warmup=1)
    with pytest.raises(ValueError, match="not formed"):
        solve(build(Large), x.double(), config, method="shooting")


def test_no_certificate_without_a_spec():
    s = solve(build(FromGRUCell), torch.randn(1, 5, 3).double(), NewtonConfig(certify=True))
    assert s.error_bound == float("inf")


class WritesState(nn.Module):
    d_in, state_shape = 3, (3,)

    def step(self, h, x):
        h *= 0.5
        h += x
        return torch.tanh(h)


@pytest.mark.parametrize("method", ["sequential", "newton", "shooting"])
def test_a_step_that_writes_into_its_arguments(method):
    """Right, or refused; and the caller's tensors stay as they were."""
    x, h0 = torch.randn(2, 20, 3), torch.randn(2, 3)
    kept, h, want = h0.clone(), h0, []
    for t in range(20):
        h = torch.tanh(0.5 * h + x[:, t])
        want.append(h)
    config = NewtonConfig(chunk_length=4) if method == "shooting" else None
    try:
        got = solve(WritesState(), x, config, method=method, h0=h0).states
    except (RuntimeError, ValueError):
        return
    assert torch.equal(h0, kept)
    torch.testing.assert_close(got, torch.stack(want, 1), rtol=0, atol=2e-6)


def test_the_output_of_a_matrix_state_is_flat():
    class Outer(nn.Module):
        d_in, state_shape = 3, (3, 2)

        def step(self, h, x):
            return 0.5 * h + x.unsqueeze(-1)

    x = torch.randn(2, 5, 3, dtype=torch.float64)
    want, h = [], torch.zeros(2, 3, 2, dtype=torch.float64)
    for t in range(5):
        h = 0.5 * h + x[:, t].unsqueeze(-1)
        want.append(h.reshape(2, 6))
    for method in ("sequential", "newton"):
        s = solve(Outer(), x, method=method)
        assert s.states.shape == (2, 5, 3, 2)
        torch.testing.assert_close(s.output, torch.stack(want, 1), rtol=1e-12, atol=1e-12)
