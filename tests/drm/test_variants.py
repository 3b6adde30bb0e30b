"""The switch matrix against the published parameter counts and the parts of each variant."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pararnn.drm.cards.switches import SWITCHES
from pararnn.drm.config import DRMConfig
from pararnn.drm.emitter import LanguageEmitter
from pararnn.drm.memory import SelectiveMemory
from pararnn.drm.model import DRM
from pararnn.drm.risk import RiskField
from pararnn.drm.variants import TINY, VARIANTS, matched_memory, parameter_count, variant

# Published: facts that the rows of the matrix must reproduce, kept apart from them.
PUBLISHED = {
    "A": 127_266_438,
    "B": 127_266_438,
    "C": 127_266_438,
    "D": 129_625_734,
    "E": 129_625_734,
    "F": 132_525_446,
    "G": 125_829_830,
    "H": 127_009_664,
    "I": 127_009_664,
    "J": 126_080_896,
    "J_DILATED": 127_191_968,
    "J_NO_METRIC": 72_652_160,
    "J_NO_NATURALIZATION": 126_080_896,
    "J_NO_DIRECTION": 83_206_400,
    "J_DIRECT_CONTROL": 29_777_664,
    "J_DIRECT_CONTROL_MATCHED": 83_206_700,
    "J_METRIC_SUBSPACE": 126_080_896,
    "J_METRIC_ORTHONORMAL_DIRECTION": 126_080_896,
    "SSM_CONTROL": 126_076_000,
}


def count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def written_out(config: DRMConfig) -> int:
    """Number of parameters, from the sizes of the notes' parts."""
    c, d, e, h, n = config, config.d_state, config.d_token, config.hidden_size, config.n_directions
    trunk = (d + 1) * h + (h + 1) * h
    q, p = c.direction_basis, c.metric_basis
    directions = trunk + (q * d + (h + 1) * n * q if q else (h + 1) * n * d) + (h + 1) * n
    r = c.metric_rank
    factor = p * d + (h + 1) * r * p if p else (h + 1) * d * r
    metric = trunk + (h + 1) * d + (factor if r else 0)
    flow = (d + e + 1) * h + (h + 1) * n
    direct = (d + e + 1) * h + (h + 1) * d

    total = c.vocab_size * e + d
    total += {"direction": directions + flow, "direct": direct, "none": 0}[c.transition]
    total += metric if c.metric else 0
    total += (d + 1) * h + 2 * (h + 1) + 4 if c.risk != "absent" else 0
    if c.mixer:
        w = c.mixer_hidden
        layer = (c.mixer_kernel + 1) * w + (w + 1) * w
        total += (3 * d + e + 3) * w + c.mixer_layers * layer + (w + 1) * d
    total += e * d if c.token_residual else 0
    total += c.memory_hidden * (4 * d + e + 1) + 3 * d if c.memory else 0
    total += c.refinement_layers * (directions + metric + flow)
    total += _emitter_count(c)
    return total


def _emitter_count(c: DRMConfig) -> int:
    d, h, v = c.d_state, c.hidden_size, c.vocab_size
    if c.emitter_layers == 1 and c.emitter_form == "mlp" and not c.emitter_residual:
        return d + (d + 1) * h + (h + 1) * v
    inner = 2 * h if c.emitter_form == "swiglu" else h
    return d + c.emitter_layers * (d + (d + 1) * inner + (h + 1) * d) + (d + 1) * v


def test_every_published_variant_is_there():
    assert set(VARIANTS) == set(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_count_is_the_published_one(name):
    """Of the model, and written out."""
    row = variant(name)
    counts = parameter_count(row.config()), written_out(row.config()), row.parameters
    assert counts == (PUBLISHED[name],) * 3


def test_counting_builds_nothing_and_draws_nothing():
    torch.manual_seed(0)
    wanted = torch.rand(3)
    torch.manual_seed(0)
    parameter_count(variant("J_FREE_DIRECTIONS").config())
    assert torch.equal(torch.rand(3), wanted)


@pytest.mark.parametrize("name", PUBLISHED)
def test_count_of_a_tiny_model(name):
    config = variant(name).config(**TINY)
    assert count(DRM(config)) == parameter_count(config) == written_out(config)


@pytest.mark.parametrize(
    ("part", "published"),
    [(RiskField, 5_515_782), (LanguageEmitter, 6_427_904)],
)
def test_parts_at_the_published_size(part, published):
    with torch.device("meta"):
        assert count(part(variant("A").config())) == published


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("J", 1_970_944),
        ("J_DIRECT_CONTROL_MATCHED", 55_399_980),
        ("SSM_CONTROL", 114_789_472),
    ],
)
def test_memory_at_the_published_size(name, published):
    with torch.device("meta"):
        assert count(SelectiveMemory(variant(name).config())) == published


def test_controls_match():
    """The relations that the counts were made for."""
    assert abs(PUBLISHED["SSM_CONTROL"] / PUBLISHED["J"] - 1) < 1e-4
    assert 0 < PUBLISHED["J_DIRECT_CONTROL_MATCHED"] - PUBLISHED["J_NO_DIRECTION"] <= 1000
    assert variant("J").config().changed(naturalization_strength=0.0) == (
        variant("J_NO_NATURALIZATION").config()
    )


def test_matched_memory():
    ssm = variant("SSM_CONTROL").config()
    assert matched_memory(ssm, PUBLISHED["J"]) == 14_945
    direct = variant("J_DIRECT_CONTROL").config()
    assert matched_memory(direct, PUBLISHED["J_NO_DIRECTION"]) == 7_212
    unit = 4 * 1536 + 1536 + 1
    for target in (40_000_000, 40_000_001, 40_003_840, 40_003_841):
        got = parameter_count(direct.changed(memory_hidden=matched_memory(direct, target)))
        assert abs(got - target) <= unit / 2
    with pytest.raises(ValueError, match="memory"):
        matched_memory(direct, 29_777_664 - 1_970_944)
    with pytest.raises(ValueError, match="memory=True"):
        matched_memory(variant("A").config(), PUBLISHED["J"])


@pytest.mark.parametrize(
    "changes", [{"direction_basis": 0}, {"metric_basis": 0}, {"metric_rank": 0}]
)
def test_count_without_bases(changes):
    config = variant("J").config(**{**TINY, **changes})
    assert count(DRM(config)) == parameter_count(config) == written_out(config)


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("form", ["mlp", "swiglu"])
@pytest.mark.parametrize("residual", [False, True])
def test_count_of_every_emitter(layers, form, residual):
    a = DRMConfig(emitter_layers=layers, emitter_form=form, emitter_residual=residual)
    b = DRMConfig()
    difference = count(LanguageEmitter(a)) - count(LanguageEmitter(b))
    assert parameter_count(a) - parameter_count(b) == difference
    assert parameter_count(a) == written_out(a)


def test_unknown_names():
    with pytest.raises(ValueError, match=r"'K'.*J_NO_METRIC"):
        variant("K")
    with pytest.raises(TypeError, match="memory_hidden"):
        variant("J").config(memory_hiden=3)


@pytest.mark.parametrize("name", PUBLISHED)
def test_variants_have_the_semantics_of_the_notes(name):
    config, notes = variant(name).config(), DRMConfig()
    for switch in (*SWITCHES, "geometry_interval", "truncation"):
        assert getattr(config, switch) == getattr(notes, switch), switch


def test_names_of_variants_are_suggested():
    with pytest.raises(ValueError, match=r"variant: got 'j'.*Did you mean 'J'\?"):
        variant("j")
    with pytest.raises(ValueError, match=r"Did you mean 'J_NO_METRIC'\?"):
        variant("J_NOMETRIC")
