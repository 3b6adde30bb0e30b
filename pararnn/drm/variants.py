"""The switch matrix: every variant as changes to one base, with its published parameter count."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any

import torch

from .config import DRMConfig
from .losses import LossWeights
from .model import DRM

BASE: Mapping[str, Any] = MappingProxyType(
    {
        "vocab_size": 256,
        "d_token": 1536,
        "d_state": 1536,
        "n_directions": 64,
        "metric_rank": 64,
        "hidden_size": 3584,
        "dt": 0.08,
        "direction_basis": 128,
        "metric_basis": 128,
        "block_length": 64,
        "mixer": True,
        "mixer_hidden": 256,
        "mixer_kernel": 8,
        "mixer_layers": 2,
        "mixer_scale": 0.2,
        "risk": "disabled",
    }
)
"""What all variants share, at the published 125M size, with the semantics of the notes. The published
file also has ``geometry_interval=4`` and ``truncation=64``, which act in the recurrent path only, and
these models take the block path."""

TINY: Mapping[str, Any] = MappingProxyType(
    {
        "vocab_size": 17,
        "d_token": 7,
        "d_state": 10,
        "n_directions": 5,
        "metric_rank": 3,
        "hidden_size": 12,
        "direction_basis": 6,
        "metric_basis": 4,
        "block_length": 4,
        "mixer_hidden": 6,
        "mixer_kernel": 3,
        "memory_hidden": 9,
    }
)
"""Sizes for tests: every variant in microseconds. They replace those of the variant."""

_GATES = {"gate_logit_bias": 0.0}
_GATE_TARGET = LossWeights(active_fraction=0.01, fraction=0.5, fraction_mode="target")
_RESIDUAL = {"token_residual": True}
_WIDE = {"mixer_hidden": 512, "mixer_layers": 4, "mixer_dilation_growth": 2}
_NO_RISK = {"risk": "absent"}
_J = {**_RESIDUAL, **_NO_RISK, "memory": True, "memory_hidden": 256}
_NO_METRIC = {"metric": False, "naturalization_strength": 0.0}
_DIRECT = {"transition": "direct"}


@dataclass(frozen=True)
class Variant:
    """One row of the switch matrix.

    Attributes
    ----------
    name
        As published.
    about
        What it is for, in a line.
    changes
        What it changes of :data:`BASE`.
    parameters
        Parameter count at the sizes of :data:`BASE`; those of :data:`VARIANTS` are published.
    losses
        Weights of the auxiliary losses; none for the variants trained by cross entropy alone.
    kept
        Fields that make it what it is, so that no other sizes may change them.
    """

    name: str
    about: str
    changes: Mapping[str, Any]
    parameters: int
    losses: LossWeights = field(default_factory=LossWeights)
    kept: tuple[str, ...] = ()

    def config(self, **changes: Any) -> DRMConfig:
        """Its configuration; ``changes`` come last, such as ``**TINY``.

        Raises
        ------
        TypeError, ValueError
            As :class:`DRMConfig`; and if a field that is kept would change.
        """
        for name in self.kept:
            if changes.get(name, self.changes[name]) != self.changes[name]:
                raise ValueError(
                    f"{name}: got {changes[name]!r} for {self.name}, expected "
                    f"{self.changes[name]!r}, which makes it this control; leave it out."
                )
        return DRMConfig().changed(**{**BASE, **self.changes, **changes})


AUXILIARY = LossWeights(
    action=0.01,
    dim_sparsity=0.001,
    dim_entropy=0.001,
    dim_variance=0.01,
    active_fraction=0.01,
    metric_reg=0.001,
    metric_diversity=0.001,
    factor_floor=0.001,
    factor_target=0.001,
    condition=0.001,
)
"""The auxiliary losses of variant A."""

_ROWS = (
    Variant("A", "all auxiliary losses", {}, 127_266_438, AUXILIARY),
    Variant("B", "cross entropy alone", {}, 127_266_438),
    Variant("C", "half of the gates open", _GATES, 127_266_438, _GATE_TARGET),
    Variant("D", "C with the token residual", {**_GATES, **_RESIDUAL}, 129_625_734, _GATE_TARGET),
    Variant(
        "E",
        "D with short blocks",
        {**_GATES, **_RESIDUAL, "block_length": 16},
        129_625_734,
        _GATE_TARGET,
    ),
    Variant(
        "F",
        "D with a wide, dilated mixer",
        {**_GATES, **_RESIDUAL, **_WIDE},
        132_525_446,
        _GATE_TARGET,
    ),
    Variant(
        "G",
        "D, narrower, with a refinement layer",
        {
            **_GATES,
            **_RESIDUAL,
            "d_token": 1024,
            "d_state": 1024,
            "n_directions": 48,
            "metric_rank": 48,
            "hidden_size": 3200,
            "direction_basis": 64,
            "metric_basis": 64,
            "mixer_hidden": 512,
            "refinement_layers": 1,
        },
        125_829_830,
        _GATE_TARGET,
    ),
    Variant("H", "F without gate target and risk", {**_RESIDUAL, **_WIDE, **_NO_RISK}, 127_009_664),
    Variant(
        "I",
        "F without risk",
        {**_GATES, **_RESIDUAL, **_WIDE, **_NO_RISK},
        127_009_664,
        _GATE_TARGET,
    ),
    Variant("J", "selective memory", _J, 126_080_896),
    Variant(
        "J_DILATED",
        "J with a dilated mixer",
        {**_J, "mixer_hidden": 352, "mixer_layers": 4, "mixer_dilation_growth": 2},
        127_191_968,
    ),
    Variant("J_NO_METRIC", "J without the metric", {**_J, **_NO_METRIC}, 72_652_160),
    Variant(
        "J_NO_NATURALIZATION",
        "J with a metric that nothing uses",
        {**_J, "naturalization_strength": 0.0},
        126_080_896,
    ),
    Variant("J_NO_DIRECTION", "J with a direct transition", {**_J, **_DIRECT}, 83_206_400),
    Variant(
        "J_DIRECT_CONTROL",
        "J with neither directions nor metric",
        {**_J, **_DIRECT, **_NO_METRIC},
        29_777_664,
    ),
    Variant(
        "J_DIRECT_CONTROL_MATCHED",
        "J_DIRECT_CONTROL as large as J_NO_DIRECTION",
        {**_J, **_DIRECT, **_NO_METRIC, "memory_hidden": 7212},
        83_206_700,
    ),
    Variant(
        "J_METRIC_SUBSPACE",
        "J naturalized in the span of its directions",
        {**_J, "naturalization_form": "subspace"},
        126_080_896,
    ),
    Variant(
        "J_METRIC_ORTHONORMAL_DIRECTION",
        "J with directions made orthonormal in the metric",
        {**_J, "naturalization_form": "orthonormal"},
        126_080_896,
    ),
    Variant(
        "SSM_CONTROL",
        "mixer, token residual and memory alone, as large as J",
        {**_J, **_NO_METRIC, "transition": "none", "memory_hidden": 14944},
        126_076_000,
    ),
)

VARIANTS: Mapping[str, Variant] = MappingProxyType({row.name: row for row in _ROWS})
"""All published variants by name."""

CONTROLS: Mapping[str, Variant] = MappingProxyType(
    {
        row.name: row
        for row in (
            Variant(
                "J_NO_DIRECTION_SCALED",
                "J_NO_DIRECTION with first steps as long as those of J",
                {**_J, **_DIRECT, "direct_scale": "matched"},
                83_206_400,
                kept=("direct_scale",),
            ),
            Variant(
                "J_FREE_DIRECTIONS",
                "J with directions of any kind, not of one basis",
                {**_J, "direction_basis": 0},
                448_935_808,
                kept=("direction_basis",),
            ),
        )
    }
)
"""Controls of J against J_NO_DIRECTION, which were not published: at first J_NO_DIRECTION takes steps 15
times longer at the published size, and all directions of J lie in one space of 128 dimensions."""


def variant(name: str) -> Variant:
    """A variant or control by name.

    Raises
    ------
    ValueError
        If there is none of this name.
    """
    known = {**VARIANTS, **CONTROLS}
    if name not in known:
        near = get_close_matches(str(name).upper(), known, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"variant: got {name!r}, expected one of {', '.join(known)}.{hint}")
    return known[name]


def parameter_count(config: DRMConfig) -> int:
    """Number of parameters of a model. It is built without numbers, so any size takes no memory.

    Parameters
    ----------
    config
        Of any model.
    """
    with torch.device("meta"):
        return sum(p.numel() for p in DRM(config).parameters())


def matched_memory(config: DRMConfig, parameters: int) -> int:
    """The ``memory_hidden`` with which a model has as nearly as possible so many parameters.

    For SSM_CONTROL to match J this is 14,945; the published model has 14,944, the whole part.

    Parameters
    ----------
    config
        Of the model to widen; it has a memory.
    parameters
        The number to reach.

    Raises
    ------
    ValueError
        If the model has no memory, or is too large without one.
    """
    if not config.memory:
        raise ValueError("matched_memory: got a model without memory; set memory=True.")
    unit = 4 * config.d_state + config.d_token + 1
    rest = parameter_count(config) - config.memory_hidden * unit
    if parameters < rest + unit // 2 + 1:
        raise ValueError(
            f"matched_memory: got {parameters} parameters to reach, but the model has {rest} "
            "without memory; shrink it first."
        )
    return (parameters - rest + unit // 2) // unit
