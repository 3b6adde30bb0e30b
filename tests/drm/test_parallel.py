"""The recurrence solved in parallel: the same states and gradients, and what a block loses."""

from __future__ import annotations

import pytest
import torch

from pararnn import NewtonConfig
from pararnn.drm import DRMConfig, DRMDynamics, block_gap, parallel_states, recurrent_states

SIZES = {"d_state": 7, "d_token": 5, "hidden_size": 9, "n_directions": 4, "metric_rank": 3}


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def dynamics(**changes):
    return DRMDynamics(DRMConfig(**{**SIZES, "dt": 0.5, "state_radius": 2.0, **changes})).double()


@pytest.mark.parametrize(
    "changes", [{}, {"transition": "direct"}, {"path": "recurrent", "flow_steps": 2}]
)
@pytest.mark.parametrize("chunk", [1, 4, None])
def test_states_and_gradients(changes, chunk):
    module = dynamics(**changes)
    z, e = normal(2, 7).requires_grad_(), normal(2, 13, 5, seed=1).requires_grad_()
    weight = normal(2, 13, 7, seed=2)
    want = recurrent_states(module, z, e, 0.4).states
    found = parallel_states(module, z, e, 0.4, NewtonConfig(chunk_length=chunk))
    assert found.converged
    torch.testing.assert_close(found.states, want, rtol=1e-10, atol=1e-12)
    inputs = [z, e, *module.parameters()]
    slopes = torch.autograd.grad((want * weight).sum(), inputs, allow_unused=True)
    others = torch.autograd.grad((found.states * weight).sum(), inputs, allow_unused=True)
    for a, b in zip(slopes, others, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-8, atol=1e-10)


def test_gap_grows_with_the_block():
    gaps = block_gap(dynamics(), normal(4, 7), normal(4, 32, 5, seed=1), 0.4, [1, 2, 8, 32])
    assert gaps[1] == 0.0
    assert 0 < gaps[2] < gaps[8] < gaps[32]


@pytest.mark.parametrize("changes", [{"geometry_interval": 2}, {"truncation": 3}, {"dropout": 0.1}])
def test_steps_that_depend_on_more(changes):
    module = dynamics(**changes, path="recurrent")
    (name,) = changes
    with pytest.raises(ValueError, match=f"{name}: got"):
        parallel_states(module, normal(2, 7), normal(2, 3, 5), 0.4)
    if name != "geometry_interval":
        assert parallel_states(module.eval(), normal(2, 7), normal(2, 3, 5), 0.4).converged


def test_lengths():
    with pytest.raises(ValueError, match="lengths: got 0"):
        block_gap(dynamics(), normal(2, 7), normal(2, 3, 5), 0.4, [0])
