"""Sweeps reach the states of the loop, and the first is the block path."""

from __future__ import annotations

import pytest
import torch

from pararnn.drm import DRMConfig, DRMDynamics, block_states, recurrent_states
from pararnn.drm.sweeps import sweep_states

SIZES = {"d_state": 7, "d_token": 5, "hidden_size": 9, "n_directions": 4, "metric_rank": 3}


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def dynamics(**changes):
    return DRMDynamics(DRMConfig(**{**SIZES, "dt": 0.1, "state_radius": 2.0, **changes})).double()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"bounded_state": False},
        {"transition": "direct"},
        {"path": "recurrent", "flow_steps": 2},
    ],
)
def test_states(changes):
    module, z, e = dynamics(**changes), normal(2, 7) / 3, normal(2, 33, 5, seed=1)
    want = recurrent_states(module, z, e, 0.4).states
    found = sweep_states(module, z, e, 0.4)
    assert found.converged
    assert found.corrections < 33
    torch.testing.assert_close(found.states, want, rtol=1e-11, atol=1e-12)
    assert not found.states.requires_grad


def test_each_correction_makes_one_more_state_exact():
    module, z, e = dynamics(dt=2.0), normal(2, 7), normal(2, 12, 5, seed=1)
    want = recurrent_states(module, z, e, 0.4).states
    for k in range(1, 13):
        found = sweep_states(module, z, e, 0.4, max_corrections=k).states
        torch.testing.assert_close(found[:, :k], want[:, :k], rtol=1e-11, atol=1e-12)


def test_the_first_sweep_is_the_block_path():
    module, z, e = dynamics(bounded_state=False), normal(2, 7), normal(2, 9, 5, seed=1)
    found = sweep_states(module, z, e, 0.4, max_corrections=1).states
    torch.testing.assert_close(found, block_states(module, z, e, 0.4).states)


def test_no_end_is_said():
    module, z, e = dynamics(dt=2.0), normal(2, 7), normal(2, 12, 5, seed=1)
    found = sweep_states(module, z, e, 0.4, max_corrections=2)
    assert not found.converged
    assert found.corrections == 2


def test_empty_and_errors():
    assert sweep_states(dynamics(), normal(2, 7), normal(2, 0, 5), 0.4).states.shape == (2, 0, 7)
    with pytest.raises(ValueError, match="geometry_interval: got 2"):
        sweep_states(dynamics(geometry_interval=2), normal(2, 7), normal(2, 3, 5), 0.4)
    with pytest.raises(ValueError, match="dropout: got"):
        sweep_states(dynamics(dropout=0.2), normal(2, 7), normal(2, 3, 5), 0.4)
