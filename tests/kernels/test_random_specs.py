"""Random Specs through the kernels, against autograd through the expressions as they were written.

The Specs and their interpreter are those of ``pararnn/testing/random_specs.py``.
"""

from __future__ import annotations

import pytest
import torch

from pararnn import NewtonConfig, sequential_apply, solve
from pararnn.testing.random_specs import build

pytestmark = pytest.mark.filterwarnings("ignore::pararnn.SpecWarning")

# Channelwise ones whose drives have one number a channel.
SEEDS = (20, 24, 0, 2, 22, 23, 25, 27, 34, 62, 74, 77, 83, 86, 88, 93, 96, 99, 105, 118, 124, 132,
         140, 143)  # fmt: skip


@pytest.mark.parametrize(
    "kinks", [pytest.param(False, marks=pytest.mark.slow), True], ids=["smooth", "kinks"]
)
@pytest.mark.parametrize(
    "seed", [pytest.param(s, marks=pytest.mark.slow) if i > 0 else s for i, s in enumerate(SEEDS)]
)
def test_states_and_gradients(kit, seed, kinks):
    cell = build(seed, kinks).to(kit.DEVICE)
    torch.manual_seed(seed)

    def draw(*shape):
        return torch.randn(shape, dtype=torch.float64).to(kit.DEVICE)

    x = draw(2, 5, 2).requires_grad_()
    h0 = draw(2, *cell.state_shape).tanh().requires_grad_()
    resets = torch.rand(2, 5, device=kit.DEVICE) < 0.2
    timed = {"dt": (2 * torch.rand(2, 5, dtype=torch.float64)).to(kit.DEVICE).requires_grad_()}
    timed = timed if kinks else {}
    want = sequential_apply(cell, x, h0=h0, resets=resets, **timed)
    leaves = [x, h0, *timed.values(), *cell.parameters()]
    weight = torch.randn_like(want)

    def gradients(states):
        loss = (states * weight + states**2).sum()
        return torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)

    right = gradients(want)
    for length in (5, 3):
        config = NewtonConfig(backend="fused", chunk_length=length, warmup=1)
        states = solve(cell, x, config, h0=h0, resets=resets, **timed).states
        torch.testing.assert_close(states, want, rtol=1e-10, atol=1e-10)
        for got, expected in zip(gradients(states), right, strict=True):
            size = expected.abs().max().clamp_min(1)
            torch.testing.assert_close(got / size, expected / size, rtol=0, atol=1e-8)
