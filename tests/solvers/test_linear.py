"""Linear recurrences: one exact correction, whatever the chunk length and the structure."""

from __future__ import annotations

import pytest
import torch

from pararnn import Cell, NewtonConfig, ParaM2RNN, sequential_apply, solve
from pararnn.solvers.adjoint import solve_linear
from pararnn.solvers.spec_recurrence import SpecRecurrence

LINEAR = ("rotation", "linear_diagonal", "linear_head", "linear_dense", "linear_right")
linear = pytest.mark.parametrize("name", LINEAR)


def build(specimen, seed=0):
    torch.manual_seed(seed)
    return Cell(2, spec=specimen.spec, sizes=specimen.sizes).double()


@linear
@pytest.mark.parametrize("chunk", [1, 2, 3, 8, 17])
@pytest.mark.parametrize("with_resets", [False, True], ids=["", "resets"])
def test_one_iteration_is_exact(zoo, name, chunk, with_resets):
    cell, x = build(zoo[name]), torch.randn(2, 17, 2, dtype=torch.float64)
    resets = torch.rand(2, 17) < 0.2 if with_resets else None
    config = NewtonConfig(chunk_length=chunk, warmup=1, jacobian="exact", tol=1e-12)
    s = solve(cell, x, config, method="shooting", resets=resets)
    assert s.iterations <= 1
    assert not s.fallback
    want = sequential_apply(cell, x, resets=resets)
    torch.testing.assert_close(s.states, want, rtol=1e-10, atol=1e-10)


@linear
@pytest.mark.parametrize("method", ["newton", "shooting", "auto"])
def test_default_settings(zoo, name, method):
    cell, x = build(zoo[name]), torch.randn(2, 40, 2, dtype=torch.float64, requires_grad=True)
    config = NewtonConfig(chunk_length=6) if method == "shooting" else None
    s = solve(cell, x, config, method=method)
    want = sequential_apply(cell, x)
    torch.testing.assert_close(s.states, want, rtol=1e-9, atol=1e-9)
    inputs = [x, *cell.parameters()]
    weight = torch.randn_like(want)
    got = torch.autograd.grad((s.states * weight).sum(), inputs)
    wanted = torch.autograd.grad((want * weight).sum(), inputs)
    torch.testing.assert_close(got, wanted, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("reverse", [False, True], ids=["tangent", "adjoint"])
@pytest.mark.parametrize("resets", [False, True], ids=["", "resets"])
@pytest.mark.parametrize("length", [1, 13, pytest.param(140, marks=pytest.mark.slow)])
def test_linearized_recurrence(specimen, reverse, resets, length):
    """``x_t = J_t x_{t−1} + b_t`` and its transpose against a loop of dense Jacobians."""
    state, drives, params = specimen.inputs(2, length, seed=5, scale=0.5)
    recurrence = SpecRecurrence(specimen.spec, specimen.sizes, params, torch.float64)
    u = torch.cat([d.reshape(2, length, -1) for d in drives], -1)
    g = torch.Generator().manual_seed(7)
    b = torch.randn(state.shape, generator=g, dtype=torch.float64)
    x0 = torch.randn(state[:, 0].shape, generator=g, dtype=torch.float64)
    mask = torch.rand(2, length, generator=g) < 0.2 if resets else None
    linear = recurrence.linearized(state, u, mask)
    got = solve_linear(linear, b, x0, reverse=reverse)
    x, want = x0, torch.empty_like(b)
    for t in reversed(range(length)) if reverse else range(length):
        rows = []
        for i in range(2):
            local = (state[i, t], tuple(d[i, t] for d in drives))
            step = lambda h, local=local: specimen.step(h, local[1], params)  # noqa: E731
            pull = torch.autograd.functional.vjp if reverse else torch.autograd.functional.jvp
            rows.append(pull(step, local[0], x[i])[1])
        moved = torch.stack(rows)
        if mask is not None:
            moved = moved.masked_fill(mask[:, t].reshape(2, *(1,) * (moved.ndim - 1)), 0)
        x = moved + b[:, t]
        want[:, t] = x
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


def test_newton_of_a_matrix_state_uses_its_factorized_jacobians():
    """It converges in a few corrections, where steps that only repeat the recurrence need dozens."""
    torch.manual_seed(0)
    cell, x = ParaM2RNN(2, 2, 3).double(), 2 * torch.randn(2, 40, 2, dtype=torch.float64)
    s = solve(cell, x, method="newton")
    assert s.converged
    assert not s.fallback
    assert 1 <= s.iterations <= 7
