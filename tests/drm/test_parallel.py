"""The recurrence solved in parallel: the same model, states and gradients; what a block loses."""

from __future__ import annotations

import pytest
import torch

from pararnn import NewtonConfig
from pararnn.drm import (
    AUXILIARY,
    DRM,
    DRMConfig,
    DRMDynamics,
    LossWeights,
    block_gap,
    drm_loss,
    parallel_states,
    recurrent_states,
)

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


MODEL = {
    **SIZES,
    "vocab_size": 13,
    "block_length": 4,
    "dt": 0.3,
    "mixer": True,
    "mixer_hidden": 6,
    "mixer_kernel": 3,
    "token_residual": True,
    "memory": True,
    "memory_hidden": 5,
    "risk": "enabled",
}


@pytest.mark.parametrize("corrections", [1, 16], ids=["looped", "swept"])
@pytest.mark.parametrize(
    "changes",
    [{}, {"transition": "direct", "memory": False}, {"mixer": False}, {"metric_rank": 0}],
)
def test_the_model_of_the_recurrent_path(changes, corrections):
    """Logits, trace, loss with all geometric terms, and its gradients."""
    config = DRMConfig(**{**MODEL, **changes})
    tokens = torch.randint(13, (2, 19), generator=torch.Generator().manual_seed(3))
    weights = AUXILIARY
    if config.transition == "direct" or not config.metric_rank:
        weights = LossWeights(action=0.3, metric_reg=0.2)
    found = {}
    for path in ("recurrent", "parallel"):
        options = {"parallel_window": 8, "parallel_corrections": corrections}
        estimate = path == "parallel"
        module = DRM(config.changed(path=path, **options, parallel_estimate=estimate)).double()
        out = module(tokens[:, :-1], trace=True)
        assert torch.equal(module(tokens[:, :-1]).logits, out.logits)
        loss = drm_loss(out, tokens[:, 1:], config, weights).total
        loss.backward()
        found[path] = out, loss, {n: p.grad for n, p in module.named_parameters()}
    (a, a_loss, a_grads), (b, b_loss, b_grads) = found["recurrent"], found["parallel"]
    assert a.sweeps is None
    assert b.sweeps.converged == (corrections == 16)
    assert 0 <= b.sweeps.error_estimate < 1e-11
    for what in ("logits", "states", "base"):
        torch.testing.assert_close(getattr(b, what), getattr(a, what), rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(b.state.z, a.state.z, rtol=1e-11, atol=1e-12)
    assert torch.equal(b.trace.steps, a.trace.steps)
    for what in ("velocity", "gates", "diagonal", "factor", "risk"):
        x, y = getattr(a.trace, what), getattr(b.trace, what)
        torch.testing.assert_close(y, x, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(b_loss, a_loss, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(b_grads, a_grads, rtol=1e-8, atol=1e-10)


def test_nothing_is_measured_that_nobody_looks_at():
    """Without a mixer and a trace no geometry is evaluated but that of the steps."""
    module = DRM(DRMConfig(**{**MODEL, "mixer": False, "path": "parallel"}))
    tokens = torch.zeros(2, 5, dtype=torch.int64)
    seen = []
    module.dynamics.risk.register_forward_hook(lambda *args: seen.append(args))
    plain = module(tokens)
    steps = len(seen)
    traced = module(tokens, trace=True)
    assert len(seen) == 2 * steps + 1
    assert torch.equal(plain.logits, traced.logits)
