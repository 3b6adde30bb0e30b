"""Settings are checked where they are made."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from pararnn import NewtonConfig, ParaGRU, solve


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("chunk_length", 0, ValueError),
        ("chunk_length", -3, ValueError),
        ("chunk_length", 1.5, TypeError),
        ("chunk_length", True, TypeError),
        ("chunk_length", "8", TypeError),
        ("max_iters", -1, ValueError),
        ("max_iters", True, TypeError),
        ("max_iters", 2.0, TypeError),
        ("warmup", 0, ValueError),
        ("warmup", False, TypeError),
        ("iteration_cap", 0, ValueError),
        ("iteration_cap", 1.5, (TypeError, ValueError)),
        ("iteration_cap", None, (TypeError, ValueError)),
        ("iteration_cap", True, (TypeError, ValueError)),
        ("tol", 0.0, ValueError),
        ("tol", -1e-3, ValueError),
        ("tol", float("nan"), ValueError),
        ("tol", float("inf"), ValueError),
        ("tol", "small", (TypeError, ValueError)),
        ("tol", True, (TypeError, ValueError)),
        ("iteration_cap", True, TypeError),
        ("iteration_cap", 2.0, TypeError),
        ("iteration_cap", None, TypeError),
        ("certify", "yes", TypeError),
        ("certify", 1, TypeError),
        ("certify", None, TypeError),
        ("jacobian", None, TypeError),
        ("backend", ["auto"], TypeError),
        ("backend", "cuda", ValueError),
        ("on_divergence", True, TypeError),
        ("jacobian", "dense", ValueError),
        ("on_divergence", "panic", ValueError),
    ],
)
def test_bad_values_are_named(name, value, error):
    with pytest.raises(error, match=name):
        NewtonConfig(**{name: value})


def test_values_at_the_edge_are_fine():
    NewtonConfig(chunk_length=1, max_iters=0, warmup=1, iteration_cap=1, tol=1e-300)


def test_configs_are_values():
    a = NewtonConfig(chunk_length=4)
    with pytest.raises(dataclasses.FrozenInstanceError):
        a.chunk_length = 5
    assert a == NewtonConfig(chunk_length=4)
    assert hash(a) == hash(NewtonConfig(chunk_length=4))


def test_methods():
    cell, x = ParaGRU(2, 3), torch.randn(1, 5, 2)
    with pytest.raises(ValueError, match=r"'picard'.*'shooting'"):
        solve(cell, x, method="picard")
    with pytest.raises(ValueError, match="chunk_length 1, got 4"):
        solve(cell, x, NewtonConfig(chunk_length=4), method="newton")


@pytest.mark.parametrize(
    ("config", "method"),
    [
        (NewtonConfig(chunk_length=10**9), "shooting"),
        (NewtonConfig(chunk_length=3, warmup=10**6), "shooting"),
        (NewtonConfig(max_iters=0, on_divergence="ignore"), "newton"),
        (NewtonConfig(chunk_length=1), "shooting"),
        (NewtonConfig(iteration_cap=1), "newton"),
        (NewtonConfig(max_iters=2, on_divergence="sequential"), "newton"),
        (NewtonConfig(), "auto"),
    ],
    ids=str,
)
@pytest.mark.parametrize("length", [0, 1, 2, 3, 17])
def test_extremes_run(config, method, length):
    from pararnn import sequential_apply

    torch.manual_seed(0)
    cell, x = ParaGRU(2, 3).double(), torch.randn(2, length, 2, dtype=torch.float64)
    solution = solve(cell, x, config, method=method)
    assert solution.states.shape == (2, length, 3)
    assert solution.final_state.shape == (2, 3)
    if solution.converged:
        torch.testing.assert_close(solution.states, sequential_apply(cell, x), rtol=0, atol=1e-12)
