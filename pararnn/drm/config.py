"""What a DRM is built from. The defaults are the notes; :data:`PUBLISHED` is the published system."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from difflib import get_close_matches
from inspect import signature
from types import MappingProxyType
from typing import Any

CHOICES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "transition": ("direction", "direct", "none"),
        "direct_scale": ("one", "matched"),
        "naturalization_form": ("post", "subspace", "orthonormal"),
        "naturalization_precision": ("safe", "single", "published"),
        "evaluation_strength": ("scheduled", "maximum"),
        "path": ("block", "recurrent", "parallel"),
        "block_carry": ("base", "final"),
        "memory_start": ("carried", "block_state"),
        "action_form": ("sum", "mean"),
        "risk": ("absent", "disabled", "enabled"),
        "emitter_form": ("mlp", "swiglu"),
    }
)
"""The words that a field takes."""

SMALLEST, LARGEST = 2.0**-126, (2.0 - 2.0**-23) * 2.0**127
"""The normal numbers of float32. What is not among them would be 0, infinite, or without digits there."""

# Lowest value of an integer; a real number's range is (least, greatest); 0 means that 0 is allowed beside the
# normal numbers of float32.
INTEGERS = {
    "vocab_size": 1,
    "d_token": 1,
    "d_state": 1,
    "n_directions": 1,
    "metric_rank": 0,
    "hidden_size": 1,
    "direction_basis": 0,
    "metric_basis": 0,
    "gate_top_k": 0,
    "naturalization_warmup": 0,
    "flow_steps": 1,
    "geometry_interval": 1,
    "truncation": 0,
    "block_length": 0,
    "parallel_window": 0,
    "parallel_corrections": 1,
    "mixer_hidden": 1,
    "mixer_kernel": 1,
    "mixer_layers": 1,
    "mixer_dilation_growth": 1,
    "memory_hidden": 1,
    "refinement_layers": 0,
    "emitter_layers": 1,
    "seed": 0,
}
NUMBERS = {
    "dropout": (0.0, 1.0),
    "direction_floor": (SMALLEST, LARGEST),
    "gate_temperature": (SMALLEST, LARGEST),
    "gate_logit_bias": (-10.0, 10.0),
    "metric_eps": (SMALLEST, LARGEST),
    "naturalization_strength": (0.0, 1.0),
    "naturalization_damping": (0.0, LARGEST),
    "dt": (SMALLEST, LARGEST),
    "state_radius": (SMALLEST, LARGEST),
    "parallel_tolerance": (0.0, 1.0),
    "mixer_scale": (0.0, LARGEST),
    "token_residual_scale": (0.0, LARGEST),
    "memory_scale": (0.0, LARGEST),
    "memory_forget_bias": (-10.0, 10.0),
    "refinement_scale": (0.0, LARGEST),
}


@dataclass(frozen=True, kw_only=True)
class DRMConfig:
    """Sizes, parts and semantics of a DRM. Section numbers are those of the notes.

    Parameters
    ----------
    vocab_size, d_token, d_state, hidden_size, n_directions, metric_rank
        Sizes: tokens, width of an embedding, width of the state, width inside every network, number
        of directions, columns of ``U``.
    dropout
        Between the two layers of every network, while training.
    seed
        Every part draws its start from a stream of its own, so that parts which two models share
        start alike, bit for bit; the global generator is not touched.
    transition
        ``'direction'``: a :class:`DirectionField` and a :class:`DRMFlow` (sections 2, 3);
        ``'direct'``: a :class:`DirectStateTransition`; ``'none'``: no base dynamics (section 13).
    direct_scale
        With a direct transition, ``'one'``: as it is; ``'matched'``: times ``σ(bias / temperature)
        √(n_directions / d_state)``, so that its velocities start as long as those of as many directions
        with these gates would.
    direction_basis, metric_basis
        With q > 0, directions (columns of ``U``) are combinations of q learned vectors, so they
        stay in one q-dimensional space, whatever the state. 0: free.
    normalize_directions, direction_floor
        Divide each direction by its Euclidean norm, taken as at least the floor.
    gate_temperature, gate_logit_bias, gate_top_k, gate_top_k_renormalize
        Gates are ``σ((logit + bias) / temperature)``; with k > 0 all but the k largest are 0, and
        the rest is rescaled to the former sum if asked.
    metric, metric_eps
        Whether there is a :class:`RelationalMetric` (section 4), and the floor of its diagonal.
    naturalization_strength, naturalization_damping, naturalization_warmup
        ``s``, ``λ`` of section 5, and the number of training steps over which ``s`` grows from 0. With
        ``s = 0`` the model freezes its metric.
    naturalization_form
        ``'post'``: section 5; ``'subspace'``, ``'orthonormal'``: solved in the span of the
        directions, so that the velocity stays in it.
    naturalization_precision
        ``'safe'``: solved in float64 and rounded once, at the end; ``'single'``: the same in
        float32 (float64 stays); ``'published'``: the correction is rounded to the dtype of the
        velocity before it is subtracted.
    evaluation_strength
        Strength in evaluation: ``'scheduled'``, that of the last training step (the maximum if there
        was none), or ``'maximum'``.
    dt, flow_steps, bounded_state, state_radius
        Section 6: step size, steps a token (recurrent path), whether the state is kept within the
        radius.
    path, block_length
        ``'block'`` (section 7) with blocks of this length, 0 for the whole sequence;
        ``'recurrent'`` (section 6), where blocks only bound the mixer; or ``'parallel'``, the
        states of the recurrent path, solved for all tokens of a window at once.
    geometry_interval, truncation
        Recurrent path: flow steps between two evaluations of the geometry; tokens after which the
        graph is cut while training, 0 for never.
    parallel_window, parallel_corrections, parallel_tolerance, parallel_estimate
        Parallel path: tokens of a window, 0 for the whole sequence; corrections after which a
        window is left to the loop; estimated error to end at, 0 for that of the dtype; whether to
        estimate the error from above as well, growth included (see :func:`sweep_states`).
    bound_increments
        Whether each increment of a block is bounded before the sum is. The notes bound the sum.
    bound_corrections
        Whether the state is bounded again after the mixer, the token residual, the memory and each
        refinement.
    block_carry
        The start of the next block: ``'base'``, ``z̃`` at the end (section 7), or ``'final'``, the
        state with mixer, residual and memory.
    recurrent_corrections
        Whether mixer, token residual, memory and refinement act on the states of the recurrent and
        the parallel path too. If not, they are there, unused and frozen, as in the published system,
        which has them on the block path only.
    mixer, mixer_hidden, mixer_kernel, mixer_layers, mixer_dilation_growth, mixer_scale
        The causal convolution of section 7.
    token_residual, token_residual_scale
        Section 8.
    memory, memory_hidden, memory_scale, memory_forget_bias
        Section 9.
    memory_start
        ``'carried'``: one recurrence over the sequence, from zero; ``'block_state'``: it restarts
        in every block, from the state at the block's start.
    risk
        A :class:`RiskField`: ``'absent'``, ``'disabled'`` (its parameters are there, unused and frozen)
        or ``'enabled'``.
    refinement_layers, refinement_scale
        More geometry, at every position.
    emitter_layers, emitter_form, emitter_residual
        Section 10.
    action_form
        ``'sum'``: ``Σ_t dt E_t`` (section 11); ``'mean'``: the mean of ``E_t``, without dt.

    Raises
    ------
    TypeError
        If a name is unknown, or a value of another type.
    ValueError
        If a value is out of its range, or two do not go together, or one would do nothing; but
        ``block_carry``, ``memory_start`` and ``recurrent_corrections``, switches of the published
        system, may be set in any model.
    """

    vocab_size: int = 256
    d_token: int = 64
    d_state: int = 96
    hidden_size: int = 128
    n_directions: int = 12
    metric_rank: int = 8
    dropout: float = 0.0
    seed: int = 0
    transition: str = "direction"
    direct_scale: str = "one"
    direction_basis: int = 0
    normalize_directions: bool = True
    direction_floor: float = 1e-12
    gate_temperature: float = 1.5
    gate_logit_bias: float = -1.0
    gate_top_k: int = 0
    gate_top_k_renormalize: bool = False
    metric: bool = True
    metric_basis: int = 0
    metric_eps: float = 1e-4
    naturalization_strength: float = 0.5
    naturalization_damping: float = 0.3
    naturalization_warmup: int = 0
    naturalization_form: str = "post"
    naturalization_precision: str = "safe"
    evaluation_strength: str = "scheduled"
    dt: float = 0.1
    flow_steps: int = 1
    bounded_state: bool = True
    state_radius: float = 8.0
    path: str = "block"
    block_length: int = 64
    parallel_window: int = 64
    parallel_corrections: int = 16
    parallel_tolerance: float = 0.0
    parallel_estimate: bool = False
    geometry_interval: int = 1
    truncation: int = 0
    bound_increments: bool = False
    bound_corrections: bool = False
    block_carry: str = "base"
    recurrent_corrections: bool = True
    mixer: bool = False
    mixer_hidden: int = 256
    mixer_kernel: int = 8
    mixer_layers: int = 1
    mixer_dilation_growth: int = 1
    mixer_scale: float = 0.1
    token_residual: bool = False
    token_residual_scale: float = 0.1
    memory: bool = False
    memory_hidden: int = 256
    memory_scale: float = 0.1
    memory_forget_bias: float = 2.0
    memory_start: str = "carried"
    risk: str = "absent"
    refinement_layers: int = 0
    refinement_scale: float = 0.1
    emitter_layers: int = 1
    emitter_form: str = "mlp"
    emitter_residual: bool = False
    action_form: str = "sum"

    def __new__(cls, *values: Any, **named: Any) -> DRMConfig:
        """An unknown name is an error that suggests a known one, here and in all copies."""
        _known(named)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for field in fields(self):
            _check(field.name, getattr(self, field.name))
        self._combined()

    def _combined(self) -> None:
        """What does not go together."""
        if self.transition == "none":
            if self.metric:
                raise ValueError(
                    "metric: got True with transition='none', where there is no velocity to "
                    "naturalize; set metric=False and naturalization_strength=0."
                )
            if self.path != "block":
                raise ValueError(
                    f"path: got {self.path!r} with transition='none', where the state does not "
                    "move; use path='block'."
                )
            if self.refinement_layers:
                raise ValueError(
                    f"refinement_layers: got {self.refinement_layers} with transition='none'; "
                    "set it to 0."
                )
        if not self.metric and self.naturalization_strength:
            raise ValueError(
                f"naturalization_strength: got {self.naturalization_strength} with metric=False; "
                "set it to 0."
            )
        if self.naturalization_form != "post" and self.transition != "direction":
            raise ValueError(
                f"naturalization_form: got {self.naturalization_form!r} with transition="
                f"{self.transition!r}, which has no directions; use 'post'."
            )
        if self.direct_scale == "matched" and self.transition != "direct":
            raise ValueError(
                f"direct_scale: got 'matched' with transition={self.transition!r}, which has nothing to "
                "scale; use transition='direct', or direct_scale='one'."
            )
        if self.direct_scale == "matched" and not self.normalize_directions:
            raise ValueError(
                "direct_scale: got 'matched' with normalize_directions=False, where directions have "
                "any length; set normalize_directions=True."
            )
        if self.gate_top_k > self.n_directions:
            raise ValueError(
                f"gate_top_k: got {self.gate_top_k}, expected at most n_directions="
                f"{self.n_directions}; 0 keeps all."
            )
        if self.gate_top_k and self.transition != "direction":
            raise ValueError(
                f"gate_top_k: got {self.gate_top_k} with transition={self.transition!r}, which has "
                "no gates; use 0."
            )
        if self.gate_top_k_renormalize and not self.gate_top_k:
            raise ValueError(
                "gate_top_k_renormalize: got True with gate_top_k=0, which keeps all gates; give a "
                "gate_top_k, or set it to False."
            )
        if self.parallel_estimate and self.path != "parallel":
            raise ValueError(
                f"parallel_estimate: got True with path={self.path!r}, whose error is not estimated; "
                "use path='parallel', or set it to False."
            )
        self._fits_path()

    def _fits_path(self) -> None:
        """What the path cannot do, all of it in one error."""
        plain: dict[str, Any] = {}
        if self.path != "recurrent":
            plain["flow_steps"] = 1
        if self.path == "parallel":
            plain |= {"geometry_interval": 1, "truncation": 0}
        if self.path != "block" and self.corrected:
            plain["refinement_layers"] = 0
            if self.mixer or self.token_residual or self.memory:
                plain["block_carry"] = "base"
        wrong = {name: value for name, value in plain.items() if getattr(self, name) != value}
        if wrong:
            got = ", ".join(f"{name}: got {getattr(self, name)!r}" for name in wrong)
            fix = ", ".join(f"{name}={value!r}" for name, value in wrong.items())
            raise ValueError(
                f"{got} with path={self.path!r}, {_PATHS[self.path]}; use {fix}, or another path."
            )

    @property
    def corrected(self) -> bool:
        """Whether mixer, token residual, memory and refinement act on the states of this path."""
        return self.path == "block" or self.recurrent_corrections

    def changed(self, **changes: Any) -> DRMConfig:
        """A copy with other values."""
        return replace(self, **changes)

    def published(self) -> DRMConfig:
        """A copy with the semantics of the published system, :data:`PUBLISHED`; without
        naturalization there is no warm-up."""
        still = {} if self.naturalization_strength else {"naturalization_warmup": 0}
        return self.changed(**{**PUBLISHED, **still})

    def to_dict(self) -> dict[str, Any]:
        """All fields, as plain values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> DRMConfig:
        """A configuration of plain values.

        Raises
        ------
        TypeError
            If a name is unknown.
        """
        return cls(**values)

    def direct_factor(self) -> float:
        """What a direct transition is multiplied by.

        With unit directions whose signs are independent, ``E‖v_raw‖² = a² n E c²``, with the gates a
        at first; and ``E‖T‖² = d E c²``, as the coordinates of T are drawn like the coefficients.
        """
        if self.direct_scale == "one":
            return 1.0
        gate = 1 / (1 + math.exp(-self.gate_logit_bias / self.gate_temperature))
        return gate * math.sqrt(self.n_directions / self.d_state)

    def strength(self, step: int) -> float:
        """``s`` in a training step: it grows linearly over the warm-up."""
        warmup = self.naturalization_warmup
        if not warmup:
            return self.naturalization_strength
        return self.naturalization_strength * min(step / warmup, 1.0)


_fields = signature(DRMConfig.__init__)
DRMConfig.__signature__ = _fields.replace(  # type: ignore[attr-defined]
    parameters=[p for name, p in _fields.parameters.items() if name != "self"]
)
"""What help and editors show: the fields, not what ``__new__`` takes."""

PUBLISHED: Mapping[str, Any] = MappingProxyType(
    {
        "naturalization_precision": "published",
        "evaluation_strength": "maximum",
        "naturalization_warmup": 500,
        "bound_increments": True,
        "bound_corrections": True,
        "block_carry": "final",
        "recurrent_corrections": False,
        "memory_start": "block_state",
        "action_form": "mean",
    }
)
"""Where the published system differs from its notes."""

_PATHS = {
    "block": "which takes one step a token",
    "recurrent": "whose recurrence carries its own state and has no blocks to refine",
    "parallel": "whose steps depend on nothing but their state and token",
}


def _known(values: Mapping[str, Any]) -> None:
    names = [field.name for field in fields(DRMConfig)]
    for name in values:
        if name not in names:
            close = get_close_matches(name, names, n=1)
            hint = f"did you mean {close[0]}?" if close else "see DRMConfig for the names."
            raise TypeError(f"DRMConfig has no field {name!r}; {hint}")


def _check(name: str, value: object) -> None:
    if name in CHOICES:
        if value not in CHOICES[name]:
            raise ValueError(f"{name}: got {value!r}, expected one of {CHOICES[name]}.")
    elif name in INTEGERS:
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name}: got {value!r}, expected an integer.")
        if value < INTEGERS[name]:
            raise ValueError(f"{name}: got {value}, expected an integer ≥ {INTEGERS[name]}.")
    elif name in NUMBERS:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TypeError(f"{name}: got {value!r}, expected a number.")
        least, greatest = NUMBERS[name]
        tiny = 0 < abs(value) < SMALLEST
        if tiny or not least <= value <= greatest:
            low = f"0, or {SMALLEST:.3g}" if least == 0 else f"{least:.3g}"
            raise ValueError(
                f"{name}: got {value}, expected a number from {low} to {greatest:.3g}, that float32 has."
            )
    elif not isinstance(value, bool):
        raise TypeError(f"{name}: got {value!r}, expected True or False.")
