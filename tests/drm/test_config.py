"""Configurations: what is accepted, and what is said of the rest."""

from __future__ import annotations

import copy
import inspect
import pickle
import re
from dataclasses import fields

import pytest

from pararnn.drm import PUBLISHED, DRMConfig
from pararnn.drm.config import CHOICES, INTEGERS, NUMBERS

NONE = {"transition": "none", "metric": False, "naturalization_strength": 0.0}


def test_every_field_is_checked():
    names = {f.name for f in fields(DRMConfig)}
    flags = {f.name for f in fields(DRMConfig) if isinstance(f.default, bool)}
    assert names == set(CHOICES) | set(INTEGERS) | set(NUMBERS) | flags
    assert names == set(DRMConfig().to_dict())
    for name in names:
        assert f"{name}" in DRMConfig.__doc__


@pytest.mark.parametrize("name", sorted(CHOICES))
def test_words(name):
    with pytest.raises(ValueError, match=f"{name}: got 'other', expected one of"):
        DRMConfig(**{name: "other"})


@pytest.mark.parametrize("name", sorted(INTEGERS))
def test_integers(name):
    for value in (1.0, True, "1", None):
        with pytest.raises(TypeError, match=f"{name}: got"):
            DRMConfig(**{name: value})
    with pytest.raises(ValueError, match=f"{name}: got {INTEGERS[name] - 1}"):
        DRMConfig(**{name: INTEGERS[name] - 1})


@pytest.mark.parametrize("name", sorted(NUMBERS))
def test_numbers(name):
    for value in (True, "1", None):
        with pytest.raises(TypeError, match=f"{name}: got"):
            DRMConfig(**{name: value})
    for value in (-11.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"{name}: got"):
            DRMConfig(**{name: value})


@pytest.mark.parametrize(
    "name", ["dt", "metric_eps", "direction_floor", "gate_temperature", "state_radius"]
)
def test_zero_is_not_a_size(name):
    with pytest.raises(ValueError, match=rf"{name}: got 0, expected a number from 1.18e-38"):
        DRMConfig(**{name: 0})


@pytest.mark.parametrize("name", ["state_radius", "dt", "metric_eps"])
@pytest.mark.parametrize("value", [1e300, 1e39, 1e-39, 1e-60])
def test_numbers_that_float32_does_not_have(name, value):
    with pytest.raises(
        ValueError, match=re.escape(f"{name}: got {value}, expected a number from ")
    ):
        DRMConfig(**{name: value})


def test_strength_is_a_share():
    with pytest.raises(ValueError, match=r"naturalization_strength: got 1\.5"):
        DRMConfig(naturalization_strength=1.5)


def test_flags():
    with pytest.raises(TypeError, match="mixer: got 1"):
        DRMConfig(mixer=1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({**NONE, "metric": True}, "metric: got True with transition='none'"),
        ({**NONE, "path": "recurrent"}, "path: got 'recurrent' with transition='none'"),
        ({**NONE, "refinement_layers": 1}, "refinement_layers: got 1 with transition='none'"),
        ({"metric": False}, "naturalization_strength: got 0.5 with metric=False"),
        (
            {"transition": "direct", "naturalization_form": "subspace"},
            "naturalization_form: got 'subspace' with transition='direct'",
        ),
        ({"gate_top_k": 13}, "gate_top_k: got 13"),
        ({"gate_top_k": 2, "transition": "direct"}, "gate_top_k: got 2 with transition='direct'"),
        ({"gate_top_k_renormalize": True}, "gate_top_k_renormalize: got True with gate_top_k=0"),
        ({"parallel_estimate": True}, "parallel_estimate: got True with path='block'"),
        (
            {"path": "recurrent", "block_carry": "final", "memory": True},
            "block_carry: got 'final' with path='recurrent'",
        ),
        ({"path": "recurrent", "refinement_layers": 1}, "refinement_layers: got 1 with path="),
        ({"flow_steps": 2}, "flow_steps: got 2 with path='block'"),
        ({"flow_steps": 2, "path": "parallel"}, "flow_steps: got 2 with path='parallel'"),
        ({**NONE, "path": "parallel"}, "path: got 'parallel' with transition='none'"),
        (
            {"path": "parallel", "block_carry": "final", "mixer": True},
            "block_carry: got 'final' with path='parallel'",
        ),
        ({"path": "parallel", "geometry_interval": 4}, "geometry_interval: got 4 with path="),
        ({"path": "parallel", "truncation": 64}, "truncation: got 64 with path='parallel'"),
    ],
)
def test_what_does_not_go_together(changes, message):
    with pytest.raises(ValueError, match=message):
        DRMConfig(**changes)


def test_all_that_a_path_cannot_do_is_one_error():
    changes = {"geometry_interval": 4, "truncation": 64, "block_carry": "final", "mixer": True}
    with pytest.raises(ValueError) as error:
        DRMConfig(path="parallel", refinement_layers=1, flow_steps=3, **changes)
    assert (
        "use flow_steps=1, geometry_interval=1, truncation=0, refinement_layers=0, "
        "block_carry='base', or"
    ) in str(error.value)


def test_corrections_that_do_not_act_forbid_nothing():
    """Every published configuration has the published recurrent path."""
    parts = {"mixer": True, "token_residual": True, "memory": True, "refinement_layers": 2}
    for path in ("recurrent", "parallel"):
        config = DRMConfig(**parts).published().changed(path=path)
        assert config.block_carry == "final"
        assert not config.corrected
        with pytest.raises(ValueError, match="refinement_layers: got 2, block_carry: got 'final'"):
            config.changed(recurrent_corrections=True)
    assert DRMConfig(**parts).published().corrected


def test_unknown_names():
    with pytest.raises(TypeError, match="no field 'metric_rnk'; did you mean metric_rank"):
        DRMConfig().changed(metric_rnk=3)
    with pytest.raises(TypeError, match="no field 'zzz'; see DRMConfig"):
        DRMConfig.from_dict({"zzz": 1})
    with pytest.raises(TypeError, match="no field 'd_sate'; did you mean d_state"):
        DRMConfig(d_sate=3)


def test_help_shows_the_fields():
    shown = inspect.signature(DRMConfig).parameters
    assert list(shown) == list(DRMConfig().to_dict())
    assert shown["d_state"].default == 96


def test_copies():
    config = DRMConfig(mixer=True)
    assert copy.deepcopy(config) == pickle.loads(pickle.dumps(config)) == config


def test_plain_values_and_back():
    config = DRMConfig(mixer=True, path="recurrent")
    assert DRMConfig.from_dict(config.to_dict()) == config


def test_published_semantics():
    config = DRMConfig().published()
    for name, value in PUBLISHED.items():
        assert getattr(config, name) == value
        assert getattr(DRMConfig(), name) != value
    assert DRMConfig(**NONE).published().naturalization_warmup == 0


def test_warm_up():
    config = DRMConfig(naturalization_warmup=500)
    assert [config.strength(s) for s in (0, 250, 500, 900)] == [0.0, 0.25, 0.5, 0.5]
    assert DRMConfig().strength(0) == 0.5
