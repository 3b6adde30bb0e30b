"""What is known of the published system at its start and size, as it was measured on that system."""

from __future__ import annotations

import pytest
import torch

from pararnn.drm import (
    DRM,
    PUBLISHED,
    DRMConfig,
    DRMDynamics,
    block_states,
    bound_state,
    variant,
)
from pararnn.drm.variants import TINY

WIDTH = 1536


@pytest.fixture(scope="module", params=["J", "J_NO_DIRECTION"])
def started(request):
    """The first dynamics, at a state and for 64 tokens that are distributed as the first ones."""
    dynamics = DRMDynamics(variant(request.param).config().published())
    g = torch.Generator().manual_seed(3)
    return (
        dynamics,
        0.02 * torch.randn(1, WIDTH, generator=g),
        torch.randn(1, 64, WIDTH, generator=g),
    )


def norms(x):
    return torch.linalg.vector_norm(x, dim=-1)


@pytest.mark.slow
@torch.no_grad()
def test_start(started):
    """Naturalization starts as nearly the identity; without directions, steps are 15 times longer,
    and the state is at its radius after one block."""
    dynamics, z, e = started
    geometry = dynamics.geometry(z)
    raw, natural = (dynamics.velocity(geometry, z, e, s) for s in (0.0, 1.0))
    direct = dynamics.direct is not None
    assert float(norms(raw).mean()) == pytest.approx(5.1 if direct else 0.35, rel=0.03)
    assert float((norms(natural - raw) / norms(raw)).mean()) == pytest.approx(0.0085, abs=5e-4)
    assert float((norms(natural) / norms(raw)).mean()) == pytest.approx(1.0069, abs=3e-4)
    assert float(torch.cosine_similarity(natural, raw, -1).min()) > 0.9999
    damped = geometry.metric.diagonal + dynamics.config.naturalization_damping
    assert float(damped.mean()) == pytest.approx(0.993, abs=1e-3)
    assert float(geometry.metric.factor.norm()) == pytest.approx(0.09, abs=3e-3)
    end = float(norms(block_states(dynamics, z, e, 0.5).states[0, -1]))
    if direct:
        assert end == pytest.approx(7.995, abs=0.01)
    else:
        assert end < 2
        assert float(geometry.directions.gates.mean()) == pytest.approx(0.339, abs=2e-3)
        assert float(geometry.directions.mass) == pytest.approx(0.339 * 64, rel=0.01)


@torch.no_grad()
def test_bounded_increments_overshoot_in_small_models():
    """Zero velocities at the radius, 64 tokens: a small state ends far beyond it and points back,
    one of the published width hardly moves."""
    for width, length, cosine, loop in ((12, 31.7, -0.79, 3.22), (WIDTH, None, None, 7.69)):
        z = torch.randn(50, width, generator=torch.Generator().manual_seed(1))
        z = 8 * z / norms(z).unsqueeze(-1)
        summed, exact = z + 64 * (bound_state(z, 8.0) - z), z
        for _ in range(64):
            exact = bound_state(exact, 8.0)
        assert float(norms(exact).mean()) == pytest.approx(loop, rel=0.03)
        if length is None:
            assert float(norms(bound_state(summed, 8.0)).mean()) == pytest.approx(7.66, abs=0.02)
            assert float(torch.cosine_similarity(summed, z).min()) > 0.99
        else:
            assert float(norms(summed).mean()) == pytest.approx(length, rel=0.1)
            assert float(torch.cosine_similarity(summed, z).mean()) == pytest.approx(
                cosine, abs=0.05
            )


def test_strengths():
    """The strength grows over 500 steps; evaluation has the largest: after 1M and 2M tokens of 8192 a
    step it was 0.123 and 0.245 in training."""
    config = variant("J").config().published()
    assert config.strength(123) == pytest.approx(0.123)
    assert config.strength(245) == pytest.approx(0.245)
    assert config.strength(10_000) == config.naturalization_strength == 0.5
    assert config.evaluation_strength == "maximum"


def test_where_the_published_system_differs_is_a_switch():
    """And the notes are the other position of each."""
    notes = DRMConfig().to_dict()
    assert all(notes[name] != value for name, value in PUBLISHED.items())
    published = variant("J").config().published().to_dict()
    assert {name: published[name] for name in PUBLISHED} == PUBLISHED
    assert published["naturalization_warmup"] == 500


def test_published_recurrent_path():
    """Written out from the facts: geometry anew every third flow step and after a cut, coefficients at
    every state, one bound a step, logits after the token; mixer, residual, memory and refinement ignored."""
    parts = {"mixer": True, "token_residual": True, "memory": True, "refinement_layers": 1}
    config = variant("J").config(**{**TINY, **parts}).published()
    config = config.changed(
        path="recurrent", geometry_interval=3, truncation=4, flow_steps=2, dt=0.5, state_radius=1.5
    )
    model = DRM(config).double().train()
    dynamics, emitter = model.dynamics, model.emitter
    x = torch.randint(17, (2, 11), generator=torch.Generator().manual_seed(3))
    found = model(x, step=200).logits
    for row in range(2):
        z = model.initializer.z0
        for t in range(11):
            cut = t > 0 and t % 4 == 0
            e = model.embedding.table.weight[x[row, t]]
            for flow_step in range(2):
                if (2 * t + flow_step) % 3 == 0 or (cut and flow_step == 0):
                    at = z
                directions, metric = dynamics.direction(at), dynamics.metric(at)
                c = dynamics.flow(z, e[None])[0]
                raw = (directions.gates * c) @ directions.vectors
                damped = metric.dense() + 0.3 * torch.eye(10, dtype=torch.float64)
                v = 0.8 * raw + 0.2 * torch.linalg.solve(damped, raw)
                q = z + 0.5 * v
                q = q * min(1.0, 1.5 / float(q.detach().norm()))
                z = 1.5 * torch.tanh(q / 1.5)
            torch.testing.assert_close(found[row, t], emitter(z), rtol=1e-12, atol=1e-13)
    (slope,) = torch.autograd.grad(found[:, 4:].sum(), model.initializer.z0, retain_graph=True)
    assert not slope.any()
    (slope,) = torch.autograd.grad(found[:, :4].sum(), model.initializer.z0)
    assert slope.any()
