"""What a solve reports is what happened."""

from __future__ import annotations

import warnings

import pytest
import torch

import pararnn
from pararnn import (
    NewtonConfig,
    NewtonDivergenceError,
    NewtonWarning,
    ParaGRU,
    ParaM2RNN,
    sequential_apply,
    solve,
)

CELLS = {
    "diag": lambda: ParaGRU(3, 4),
    "head": lambda: ParaGRU(3, 4, mix="head", n_heads=2),
    "matrix": lambda: ParaM2RNN(3, 2, 3),
}
cells = pytest.mark.parametrize("make", CELLS.values(), ids=CELLS)


def wild(scale=3.0, length=60):
    """A head cell with large weights: sensitive, so that few iterations are not enough."""
    torch.manual_seed(0)
    cell = ParaGRU(3, 4, mix="head", n_heads=2).double()
    with torch.no_grad():
        for w in (cell.A_z, cell.A_r, cell.A_n):
            w.mul_(scale)
    return cell, torch.randn(2, length, 3, dtype=torch.float64)


@cells
def test_fields(make):
    torch.manual_seed(0)
    cell, x = make(), torch.randn(2, 40, 3)
    one = solve(cell, x, method="sequential")
    assert (one.method, one.iterations, one.passes, one.chunks) == ("sequential", 0, 1.0, 1)
    assert one.converged
    assert not one.fallback
    s = solve(cell, x, NewtonConfig(chunk_length=8), method="shooting")
    assert (s.method, s.chunk_length, s.chunks) == ("shooting", 8, 5)
    assert s.residual == s.residual_history[-1]
    assert len(s.residual_history) == s.iterations + 1
    assert s.error_bound is None
    assert "chunk_length=8" in s.reason
    n = solve(cell, x, method="newton")
    assert (n.method, n.chunk_length, n.chunks) == ("newton", 1, 40)
    assert n.converged
    assert torch.equal(n.final_state, n.states[:, -1])
    auto = solve(cell, x)
    assert auto.method == "sequential"
    assert "cost model" in auto.reason


@cells
def test_half_precision_keeps_a_wide_final_state(make):
    torch.manual_seed(0)
    for dtype in (torch.bfloat16, torch.float16):
        cell, x = make().to(dtype), torch.randn(2, 40, 3).to(dtype)
        s = solve(cell, x, method="newton")
        assert s.states.dtype == dtype
        assert s.final_state.dtype == torch.float32
        assert torch.equal(s.final_state.to(dtype), s.states[:, -1])


def test_the_reported_residual_is_measured():
    """The last entry is the mismatch of what is returned, computed here from the states alone."""
    cell, x = wild()
    for config in (NewtonConfig(chunk_length=5), NewtonConfig(chunk_length=5, iteration_cap=1)):
        s = solve(cell, x, config, method="shooting")
        states = s.states.detach()
        h = torch.cat([torch.zeros_like(states[:, :1]), states[:, :-1]], 1)
        again = cell.step(h.reshape(-1, 4), x.reshape(-1, 3)).reshape(states.shape)
        gap = float(((again - states).abs() / states.abs().clamp_min(1)).max())
        assert s.converged
        assert gap <= s.residual + 1e-15


@pytest.mark.parametrize("pin", [0, 1, 2, 3])
@cells
def test_pins_are_exact(make, pin):
    torch.manual_seed(0)
    cell, x = make(), torch.randn(2, 60, 3) * 2
    for method, config in (
        ("newton", NewtonConfig(max_iters=pin, on_divergence="ignore")),
        ("shooting", NewtonConfig(max_iters=pin, chunk_length=4, warmup=1, on_divergence="ignore")),
    ):
        s = solve(cell, x, config, method=method)
        assert s.iterations == pin
        assert not s.fallback
        assert s.converged == (s.residual <= 5e-7)


def test_a_pinned_newton_is_algorithm_1():
    """Guess f(0, x_t), then dense Newton on the whole trajectory, in a loop written here."""
    torch.manual_seed(0)
    cell = ParaGRU(3, 2, mix="head", n_heads=1).double()
    with torch.no_grad():
        cell.A_n.mul_(3)
    x = torch.randn(1, 7, 3, dtype=torch.float64)

    def residual(flat):
        states = flat.reshape(7, 2)
        before = torch.cat([torch.zeros(1, 2, dtype=torch.float64), states[:-1]])
        return (states - cell.step(before, x[0])).reshape(-1)

    flat = cell.step(torch.zeros(7, 2, dtype=torch.float64), x[0]).detach().reshape(-1)
    for pin in range(4):
        config = NewtonConfig(max_iters=pin, on_divergence="ignore")
        got = solve(cell, x, config, method="newton").states
        torch.testing.assert_close(got.reshape(-1), flat, rtol=1e-10, atol=1e-12)
        jacobian = torch.autograd.functional.jacobian(residual, flat)
        flat = flat - torch.linalg.solve(jacobian, residual(flat).detach())


def test_divergence_is_reported_as_asked():
    cell, x = wild(4.0)
    pinned = {"max_iters": 1}
    with pytest.warns(NewtonWarning, match="residual"):
        solve(cell, x, NewtonConfig(**pinned), method="newton")
    with pytest.warns(NewtonWarning):
        solve(cell, x, NewtonConfig(**pinned, on_divergence="warn"), method="newton")
    with pytest.raises(NewtonDivergenceError, match="after 1 iterations") as info:
        solve(cell, x, NewtonConfig(**pinned, on_divergence="raise"), method="newton")
    assert len(info.value.residual_history) == 2
    assert all(isinstance(r, float) for r in info.value.residual_history)
    config = NewtonConfig(iteration_cap=1, on_divergence="raise")
    with pytest.raises(NewtonDivergenceError):
        solve(cell, x, config, method="newton")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        s = solve(cell, x, NewtonConfig(**pinned, on_divergence="ignore"), method="newton")
    assert not s.converged


def test_fallback_is_right():
    """One iteration is not enough; what is left is run sequentially, row by row."""
    for method, extra in (("newton", {}), ("shooting", {"chunk_length": 4, "warmup": 1})):
        cell, x = wild(4.0)
        s = solve(cell, x, NewtonConfig(iteration_cap=1, **extra), method=method)
        assert s.fallback
        assert s.converged
        torch.testing.assert_close(s.states, sequential_apply(cell, x), rtol=0, atol=1e-11)
    # Also when pinned, if asked for.
    config = NewtonConfig(max_iters=1, on_divergence="sequential")
    s = solve(cell, x, config, method="newton")
    assert s.fallback
    torch.testing.assert_close(s.states, sequential_apply(cell, x), rtol=0, atol=1e-11)


def test_fallback_has_right_gradients():
    cell, x = wild(4.0, 24)
    x.requires_grad_()
    inputs = [x, *cell.parameters()]
    config = NewtonConfig(iteration_cap=1, chunk_length=4, warmup=1)
    s = solve(cell, x, config, method="shooting")
    assert s.fallback
    weight = torch.randn_like(s.states)
    got = torch.autograd.grad((s.states * weight).sum(), inputs)
    want = torch.autograd.grad((sequential_apply(cell, x) * weight).sum(), inputs)
    torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-10)


def test_the_final_state_has_memory_of_its_own():
    cell, x = ParaGRU(3, 4), torch.randn(2, 9, 3)
    for method in ("sequential", "newton", "shooting"):
        with torch.no_grad():
            s = solve(cell, x, method=method)
            kept = s.states.clone()
            s.final_state.fill_(7.0)
            assert torch.equal(s.states, kept), method


def test_detached():
    cell, x = ParaGRU(3, 4), torch.randn(2, 9, 3)
    s = solve(cell, x)
    assert s.states.requires_grad
    assert not s.detached().states.requires_grad
    assert not s.detached().final_state.requires_grad
    assert s.detached().residual == s.residual


def test_same_call_same_bits():
    cell, x = ParaGRU(3, 8, mix="head", n_heads=2), torch.randn(3, 70, 3)
    for method in ("sequential", "newton", "shooting"):
        config = NewtonConfig(chunk_length=9) if method == "shooting" else None
        a = solve(cell, x, config, method=method).states
        assert torch.equal(a, solve(cell, x, config, method=method).states)


def test_shortcuts_return_states():
    cell, x = ParaM2RNN(3, 2, 3), torch.randn(2, 20, 3)
    full = sequential_apply(cell, x)
    for apply in (pararnn.newton_apply, pararnn.shooting_apply, pararnn.newton_m2rnn_factorized):
        torch.testing.assert_close(apply(cell, x), full, rtol=0, atol=2e-6)
    with pytest.raises(ValueError, match="'diag', expected 'm2rnn'"):
        pararnn.newton_m2rnn_factorized(ParaGRU(3, 4), x)


def test_printed():
    cell, x = ParaGRU(3, 4), torch.randn(2, 40, 3)
    shown = repr(solve(cell, x, NewtonConfig(chunk_length=8, certify=True)))
    assert shown.startswith("Solution(output (2, 40, 4), shooting of 5 × 8 steps, eager: asked for")
    for part in ("converged=True", "iterations=", "residual=", "fallback=False", "error_bound="):
        assert part in shown
    few = NewtonConfig(max_iters=1, on_divergence="ignore", tol=1e-9)
    assert "converged=False, iterations=1" in repr(solve(cell, 9 * x, few, method="newton"))
    assert "error_bound" not in repr(solve(cell, x))


def test_chunks_behind_a_reset_are_not_walked_again():
    """Of four chunks only the second starts wrong: the others' guesses begin at a reset."""
    torch.manual_seed(0)
    cell, x = ParaGRU(3, 4).double(), torch.randn(1, 40, 3, dtype=torch.float64)
    resets = torch.zeros(1, 40, dtype=torch.bool)
    resets[0, [18, 28]] = True
    config = NewtonConfig(chunk_length=10, warmup=5, max_iters=0, on_divergence="sequential")
    s = solve(cell, x, config, resets=resets)
    assert s.fallback
    assert s.passes == pytest.approx(5 / 10 + 1 + 1 / 4)
    want = sequential_apply(cell, x, resets=resets)
    torch.testing.assert_close(s.states, want, rtol=1e-13, atol=1e-13)
