"""Controls of the step's length and of the basis of the directions."""

from __future__ import annotations

import math

import pytest
import torch

from pararnn.drm import CONTROLS, DRM, VARIANTS, DRMConfig, DRMDynamics, parameter_count, variant
from pararnn.drm.flow import DirectStateTransition
from pararnn.drm.variants import TINY


def test_rows():
    """One change each; counts of built models; the published ones are not among them."""
    assert set(CONTROLS) == {"J_NO_DIRECTION_SCALED", "J_FREE_DIRECTIONS"}
    assert not set(CONTROLS) & set(VARIANTS)
    scaled, free = (variant(name).config() for name in CONTROLS)
    assert scaled.changed(direct_scale="one") == variant("J_NO_DIRECTION").config()
    assert free.changed(direction_basis=128) == variant("J").config()
    for name, row in CONTROLS.items():
        with torch.device("meta"):
            counted = sum(p.numel() for p in DRM(row.config()).parameters())
        assert counted == row.parameters == parameter_count(row.config()), name
    assert CONTROLS["J_NO_DIRECTION_SCALED"].parameters == VARIANTS["J_NO_DIRECTION"].parameters


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("J_FREE_DIRECTIONS", {"direction_basis": 6}),
        ("J_NO_DIRECTION_SCALED", {"direct_scale": "one"}),
    ],
)
def test_what_makes_a_control_stays(name, change):
    """Sizes that would undo it are an error."""
    with pytest.raises(ValueError, match=f"{next(iter(change))}: got .* for {name}"):
        variant(name).config(**change)
    assert variant(name).config(**dict(CONTROLS[name].changes)) == variant(name).config()


def lengths(config, seeds=8):
    """Mean length of the first raw velocities, over initial weights, states and tokens."""
    d, e, found = config.d_state, config.d_token, []
    for seed in range(seeds):
        dynamics = DRMDynamics(config.changed(seed=seed))
        g = torch.Generator().manual_seed(seed)
        z, x = 0.02 * torch.randn(4, d, generator=g), torch.randn(4, 32, e, generator=g)
        v = dynamics.velocity(dynamics.geometry(z), z, x, 0.0)
        found.append(torch.linalg.vector_norm(v, dim=-1).mean())
    return float(torch.stack(found).mean())


@pytest.mark.parametrize(
    "sizes",
    [
        {"d_state": 96, "n_directions": 12},
        {"d_state": 64, "n_directions": 64, "gate_logit_bias": 0.5, "gate_temperature": 0.8},
        {"d_state": 200, "n_directions": 40, "direction_basis": 64},
    ],
)
@torch.no_grad()
def test_first_steps_are_as_long(sizes):
    """Measured on the parts; unscaled they are several times longer."""
    directions = DRMConfig(d_token=48, hidden_size=256, **sizes)
    direct = directions.changed(transition="direct", direction_basis=0)
    scaled = direct.changed(direct_scale="matched")
    want = lengths(directions)
    assert lengths(scaled) == pytest.approx(want, rel=0.1)
    ratio = lengths(scaled, 1) / lengths(direct, 1)
    assert ratio == pytest.approx(scaled.direct_factor(), rel=1e-4)
    assert lengths(direct) > 1.4 * want


def test_published_size():
    """Measured there: 0.35 against 5.1."""
    factor = variant("J_NO_DIRECTION_SCALED").config().direct_factor()
    assert factor == pytest.approx(0.339 * math.sqrt(64 / 1536), rel=1e-3)
    assert factor == pytest.approx(0.35 / 5.1, rel=0.02)
    assert variant("J_NO_DIRECTION").config().direct_factor() == 1.0


def test_scale():
    torch.manual_seed(1)
    plain, scaled = DirectStateTransition(5, 4, 6), DirectStateTransition(5, 4, 6, scale=0.25)
    scaled.load_state_dict(plain.state_dict())
    z, e = torch.randn(2, 5), torch.randn(2, 3, 4)
    assert torch.equal(scaled(z, e), 0.25 * plain(z, e))


@pytest.mark.parametrize("published", [False, True], ids=["notes", "published"])
@pytest.mark.parametrize("name", CONTROLS)
def test_models(name, published):
    """Causal, and trainable."""
    row = variant(name)
    config = row.config(**{size: v for size, v in TINY.items() if size not in row.kept})
    config = config.published().changed(naturalization_warmup=0) if published else config
    model = DRM(config).double()
    tokens = torch.randint(17, (2, 11), generator=torch.Generator().manual_seed(0))
    logits = model(tokens).logits
    logits.logsumexp(-1).mean().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    other = tokens.clone()
    other[:, 6:] = (other[:, 6:] + 1) % 17
    assert torch.equal(model(other).logits[:, :6], logits[:, :6])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "direct_scale: got 'matched' with transition='direction'"),
        ({"transition": "direct", "normalize_directions": False}, "normalize_directions=False"),
    ],
)
def test_nothing_to_match(changes, message):
    with pytest.raises(ValueError, match=message):
        DRMConfig(direct_scale="matched", **changes)
