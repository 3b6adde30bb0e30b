r"""Cross entropy, action and regularisers (notes, sections 10 and 11).

The loss is \(\mathcal{L}_{CE} + \sum_k \lambda_k \mathcal{R}_k\). A term of weight 0 is **not
computed**: it can neither turn the loss into NaN nor give parameters a zero gradient, which an
optimizer with weight decay would act on.

Means over time count the geometry of a block once a step, as :class:`Trace` records it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from pararnn import checks

from .bound import length
from .config import DRMConfig
from .consistency import Blocks
from .metric import Metric
from .trace import Trace

FRACTION_MODES = ("upper_bound", "target")
SMALLEST_GATE = 1e-8
IGNORED = -100  # the target of a position that does not count


class Rollout(Protocol):
    """What the losses look at of a model's output."""

    @property
    def logits(self) -> Tensor:
        """``(B, T, V)``."""

    @property
    def states(self) -> Tensor:
        """Emitted states, ``(B, T, d)``."""

    @property
    def trace(self) -> Trace:
        """Velocities and geometry."""

    @property
    def blocks(self) -> Blocks | None:
        """What to run blocks again with."""


@dataclass(frozen=True)
class LossWeights:
    """Weights and targets of the terms; all weights are 0 unless given.

    Attributes
    ----------
    action
        Energy of the velocities along the path, by ``DRMConfig.action_form``: ``'sum'``, the mean
        over the batch of \\(\\sum_t dt\\,E_t\\), or ``'mean'``, the mean of \\(E_t\\).
    dim_sparsity
        Mean of dimD, the sum of the gates.
    dim_entropy
        Minus the mean Bernoulli entropy of the gates: entropy is rewarded.
    dim_variance
        ``(dim_std - std(dimD))₊²`` with the population deviation over batch and time.
    active_fraction
        With ``q`` the mean of dimD/n: ``(q - fraction)₊²`` with ``fraction_mode='upper_bound'``,
        ``(q - fraction)²`` with ``'target'``.
    metric_reg
        ``mean(D²) + mean(U²)``.
    metric_diversity
        Minus the mean population variance of ``D`` over time. Unbounded below if its weight exceeds
        that of ``metric_reg``, which is an error here.
    factor_floor
        Mean of ``(factor_least - ‖U‖_F)₊²``.
    factor_target
        ``(mean ‖U‖_F - factor_norm)²``.
    condition
        ``(log mean κ - log condition_target)₊²``, with κ the upper bound of the condition number,
        ``(max D + ‖U‖_F²) / max(min D, 1e-8)``.
    recurrence
        Mean over the batch of ``(‖z_T‖ - ‖z_1‖)²``.
    stability
        Mean of ``(ℓ_{t+1} - ℓ_t)²`` over the logits.
    risk
        Mean risk mass.
    block_consistency
        Mean square of base states of the block path minus states of the recurrence that starts where
        their block does, which get no gradient (:func:`block_consistency`): of every
        ``consistency_every``-th block from the first on, its first ``consistency_length`` tokens, 0
        for all. It runs the recurrence, ``consistency_length`` steps one after the other.
    """

    action: float = 0.0
    dim_sparsity: float = 0.0
    dim_entropy: float = 0.0
    dim_variance: float = 0.0
    active_fraction: float = 0.0
    metric_reg: float = 0.0
    metric_diversity: float = 0.0
    factor_floor: float = 0.0
    factor_target: float = 0.0
    condition: float = 0.0
    recurrence: float = 0.0
    stability: float = 0.0
    risk: float = 0.0
    block_consistency: float = 0.0
    dim_std: float = field(default=0.15, metadata={"target": True})
    fraction: float = field(default=0.65, metadata={"target": True})
    fraction_mode: str = field(default="upper_bound", metadata={"target": True})
    factor_least: float = field(default=0.05, metadata={"target": True})
    factor_norm: float = field(default=1.0, metadata={"target": True})
    condition_target: float = field(default=100.0, metadata={"target": True})
    consistency_every: int = field(default=1, metadata={"target": True})
    consistency_length: int = field(default=0, metadata={"target": True})

    def __post_init__(self) -> None:
        for item in fields(self):
            if isinstance(item.default, float):
                least = 1.0 if item.name == "condition_target" else 0.0
                checks.number(f"LossWeights: {item.name}", getattr(self, item.name), least)
        if self.fraction_mode not in FRACTION_MODES:
            raise ValueError(
                f"LossWeights: fraction_mode: got {self.fraction_mode!r}, expected one of "
                f"{FRACTION_MODES}."
            )
        checks.positive("LossWeights: consistency_every", self.consistency_every)
        checks.whole("LossWeights: consistency_length", self.consistency_length)
        if self.fraction > 1:
            raise ValueError(
                f"LossWeights: fraction: got {self.fraction}, expected a share of the gates, from 0 "
                "to 1."
            )
        if self.metric_diversity > self.metric_reg:
            raise ValueError(
                f"LossWeights: got metric_diversity={self.metric_diversity} above "
                f"metric_reg={self.metric_reg}, with which the loss has no lower bound; raise "
                "metric_reg to at least as much."
            )

    def terms(self) -> dict[str, float]:
        """Weight of every term, by name, the zero ones included."""
        return {
            item.name: getattr(self, item.name)
            for item in fields(self)
            if not item.metadata.get("target")
        }


@dataclass(frozen=True)
class Loss:
    """The total, a scalar, and the terms that it is made of, unweighted, by name."""

    total: Tensor
    terms: Mapping[str, Tensor]


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy in nats a token.

    The targets are already shifted: ``targets[:, t]`` is the token after position ``t``. Nothing is
    shifted here.

    Parameters
    ----------
    logits
        ``(B, T, V)``.
    targets
        ``(B, T)`` int64 or int32. A position with the target -100 does not count.

    Raises
    ------
    TypeError, ValueError
        If shapes or dtypes do not fit; if there is no token; and on the CPU if none of them counts,
        or one is neither -100 nor in the vocabulary.
    """
    checks.floating("cross_entropy: logits", logits)
    if not isinstance(targets, Tensor) or targets.dtype not in (torch.int64, torch.int32):
        kind = targets.dtype if isinstance(targets, Tensor) else type(targets).__name__
        raise TypeError(
            f"cross_entropy: targets: got {kind}, expected an int64 or int32 tensor; convert with "
            ".long()."
        )
    if logits.ndim != 3 or targets.shape != logits.shape[:2]:
        raise ValueError(
            f"cross_entropy: got logits {tuple(logits.shape)} and targets {tuple(targets.shape)}, "
            "expected (B, T, V) and (B, T)."
        )
    if targets.numel() == 0:
        raise ValueError("cross_entropy: got no tokens, expected at least one.")
    if checks.readable(targets):
        _in_vocabulary(targets, logits.shape[-1])
    logits = logits.to(checks.state_dtype(logits.dtype))
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten().long(), ignore_index=IGNORED)


def _in_vocabulary(targets: Tensor, size: int) -> None:
    counted = targets[targets != IGNORED]
    if not counted.numel():
        raise ValueError(
            f"cross_entropy: targets: got {IGNORED} everywhere, expected a token that counts; their "
            "mean is of nothing."
        )
    low, high = (int(v) for v in counted.aminmax())
    if low < 0 or high >= size:
        raise ValueError(
            f"cross_entropy: targets: got values from {low} to {high}, expected 0 to {size - 1}, or "
            f"{IGNORED} where none counts; check vocab_size."
        )


def drm_loss(
    output: Rollout, targets: Tensor, config: DRMConfig, weights: LossWeights | None = None
) -> Loss:
    """Cross entropy plus every term whose weight is not 0.

    Parameters
    ----------
    output
        What the model returned.
    targets
        ``(B, T)`` integers, already shifted, as for :func:`cross_entropy`.
    config
        The model's; ``dt``, ``action_form`` and ``flow_steps`` are read.
    weights
        All 0 if not given: cross entropy alone.

    Raises
    ------
    TypeError, ValueError
        As :func:`cross_entropy`; if an argument is of another type; and if a term is asked for that
        the model has nothing for; one that reads the trace with ``flow_steps`` above 1, as a trace
        keeps one velocity and one geometry a token; or, while gradients are recorded, one that trains nothing:
        it depends on no trained parameter, or on a metric alone that is frozen and unused.
    """
    if not isinstance(config, DRMConfig):
        raise TypeError(
            f"drm_loss: config: got {type(config).__name__}, expected a DRMConfig; use model.config."
        )
    if weights is None:
        weights = LossWeights()
    if not isinstance(weights, LossWeights):
        raise TypeError(
            f"drm_loss: weights: got {type(weights).__name__}, expected LossWeights; a dict goes in "
            "as LossWeights(**weights)."
        )
    if not hasattr(output, "logits"):
        raise TypeError(
            f"drm_loss: output: got {type(output).__name__}, expected what the model returned, "
            "model(tokens), not its logits."
        )
    terms = {"ce": cross_entropy(output.logits, targets)}
    total = terms["ce"]
    for name, weight in weights.terms().items():
        if weight != 0:
            if config.flow_steps > 1 and name not in _OF_STATES:
                raise ValueError(
                    f"drm_loss: {name}: got a weight with flow_steps={config.flow_steps}, expected "
                    "one step a token, of which the trace keeps velocity and geometry; set the "
                    "weight to 0, or flow_steps=1 with a smaller dt."
                )
            terms[name] = _TERMS[name](output, config, weights)
            if terms["ce"].requires_grad:
                _trains(name, terms[name], output, config)
            total = total + weight * terms[name]
    return Loss(total, terms)


def _trains(name: str, term: Tensor, output: Rollout, config: DRMConfig) -> None:
    """Refuse a term that nothing of the model gets a gradient from, or only states that an unused metric
    would push about."""
    if name in _OF_METRIC and output.trace.metric_frozen and not config.naturalization_strength:
        raise ValueError(
            f"drm_loss: {name}: got a weight with naturalization_strength=0, where the metric is frozen and nothing "
            "uses it, so that the term would train states to suit an untrained metric; set the weight to 0, or "
            "train the metric for it: model.dynamics.metric.requires_grad_(True)."
        )
    if not term.requires_grad:
        raise ValueError(
            f"drm_loss: {name}: got a weight for a term that depends on no trained parameter, expected one that can "
            "be trained; set the weight to 0, or unfreeze the part that the term measures."
        )


def block_consistency(base: Tensor, exact: Tensor) -> Tensor:
    """Mean square of block states minus exact ones, which get no gradient.

    Parameters
    ----------
    base
        Base states of the block path, ``(B, T, d)``.
    exact
        Of the recurrence, from the same start and tokens, as :func:`recurrent_states` or
        :meth:`Blocks.sampled <pararnn.drm.Blocks.sampled>` gives them.

    Raises
    ------
    TypeError, ValueError
        If they are not floating-point tensors of one shape, or empty.
    """
    checks.floating("block_consistency: base", base)
    name = "block_consistency: exact"
    checks.shaped(name, exact, tuple(base.shape), 0, "that both have this shape")
    if base.numel() == 0:
        raise ValueError("block_consistency: got no states, expected at least one.")
    gap = (base - exact.detach()).to(checks.state_dtype(base.dtype))
    return gap.square().mean()


def _geometry(output: Rollout, what: str) -> tuple[Tensor, Tensor]:
    """A field of the trace, and the share of the steps that each of its points has, ``(N,)``."""
    value: Tensor | None = getattr(output.trace, what)
    if value is None:
        raise ValueError(
            f"drm_loss: got a weight for a term that needs the {what} of the trace, which this "
            "model does not have; set the weight to 0."
        )
    dtype = checks.state_dtype(value.dtype)
    share = output.trace.steps.to(value.device, dtype)
    return value.to(dtype), share / share.sum()


def _over_time(value: Tensor, share: Tensor) -> Tensor:
    """Mean over time, dimension 1, with the shares of the steps."""
    return torch.tensordot(value, share, ([1], [0]))


def _dimension(output: Rollout) -> tuple[Tensor, Tensor]:
    gates, share = _geometry(output, "gates")
    return gates.sum(-1), share


def _factor_norm(output: Rollout) -> tuple[Tensor, Tensor]:
    factor, share = _geometry(output, "factor")
    if not factor.shape[-1]:
        raise ValueError(
            "drm_loss: got a weight for factor_floor or factor_target with metric_rank=0, where "
            "there is no U; set it to 0."
        )
    return length(factor, (-2, -1)), share


def _action(output: Rollout, config: DRMConfig, weights: LossWeights) -> Tensor:
    if output.trace.velocity is None:
        raise ValueError(
            "drm_loss: got a weight for action, but this model has no velocity; set it to 0."
        )
    energy = output.trace.energy()
    return energy.mean() if config.action_form == "mean" else config.dt * energy.sum(1).mean()


def _dim_sparsity(output: Rollout, config: DRMConfig, weights: LossWeights) -> Tensor:
    return _over_time(*_dimension(output)).mean()


def _dim_entropy(output: Rollout, config: DRMConfig, weights: LossWeights) -> Tensor:
    gates, share = _geometry(output, "gates")
    on, off = gates.clamp(min=SMALLEST_GATE), (1 - gates).clamp(min=SMALLEST_GATE)
    return _over_time(gates * on.log() + (1 - gates) * off.log(), share).mean()


def _dim_variance(output: Rollout, config: DRMConfig, weights: LossWeights) -> Tensor:
    dim, share = _dimension(output)
    mean = _over_time(dim, share).mean()
    variance = _over_time((dim - mean).square(), share).mean()
    # The deviation has an infinite slope at 0.
    deviation = torch.sqrt(variance.clamp(min=torch.finfo(dim.dtype).tiny))
    return F.relu(weights.dim_std - deviation).square()


def _active_fraction(output: Rollout, config: DRMConfig, weights: LossWeights) -> Tensor:
    gates, share = _geometry(output, "gates")
    excess = _over_time(gates.mean(-1), share).mean() - weights.fraction
    return (F.relu(excess) if weights.fraction_mode == "upper_bound" else excess).square()


def _metric_reg(output: Rollout, config: DRMConfig, weights: LossWeights) -> Tensor:
    diagonal, share = _geometry(output, "diagonal")
    value = _over_time(diagonal.square().mean(-1), share).mean()
    factor, _ = _geometry(output, "factor")
    if factor.numel() == 0:  # a diagonal metric: the mean of nothing is NaN
        return value
    return value + _over_time(factor.square().mean((-2, -1)), share).mean()


def _metric_diversity(output: Rollout, config: DRMConfig, weights: LossWeights) -> Tensor:
    diagonal, share = _geometry(output, "diagonal")
    mean = _over_time(diagonal, share).unsqueeze(1)
    return -_over_time((diagonal - mean).square(), share).mean()


def _factor_floor(output: Rollout, config: DRMConfig, weights: LossWeights) -> Tensor:
    norm, share = _factor_norm(output)
    return _over_time(F.relu(weights.factor_least - norm).square(), share).mean()


def _factor_target(output: Rollout, config: DRMConfig, weights: LossWeights) -> Tensor:
    return (_over_time(*_factor_norm(output)).mean() - weights.factor_norm).square()


def _condition(output: Rollout, config: DRMConfig, weights: LossWeights) -> Tensor:
    diagonal, share = _geometry(output, "diagonal")
    factor, _ = _geometry(output, "factor")
    mean = _over_time(Metric(diagonal, factor).condition_bound(), share).mean()
    return F.relu(mean.log() - math.log(weights.condition_target)).square()


def _recurrence(output: Rollout, config: DRMConfig, weights: LossWeights) -> Tensor:
    norm = length(output.states[:, [0, -1]])
    return (norm[:, 1] - norm[:, 0]).square().mean()


def _stability(output: Rollout, config: DRMConfig, weights: LossWeights) -> Tensor:
    change = output.logits.diff(dim=1).square()
    return change.mean() if change.numel() else change.sum()


def _risk(output: Rollout, config: DRMConfig, weights: LossWeights) -> Tensor:
    return _over_time(*_geometry(output, "risk")).mean()


def _block_consistency(output: Rollout, config: DRMConfig, weights: LossWeights) -> Tensor:
    if output.blocks is None:
        raise ValueError(
            "drm_loss: got a weight for block_consistency and an output without blocks that "
            f"approximate a recurrence, from a model with path={config.path!r} and "
            f"transition={config.transition!r}; set the weight to 0, or call a model on the block "
            "path with trace=True."
        )
    every, length = weights.consistency_every, weights.consistency_length
    return block_consistency(*output.blocks.sampled(every, length))


_TERMS = {
    "action": _action,
    "dim_sparsity": _dim_sparsity,
    "dim_entropy": _dim_entropy,
    "dim_variance": _dim_variance,
    "active_fraction": _active_fraction,
    "metric_reg": _metric_reg,
    "metric_diversity": _metric_diversity,
    "factor_floor": _factor_floor,
    "factor_target": _factor_target,
    "condition": _condition,
    "recurrence": _recurrence,
    "stability": _stability,
    "risk": _risk,
    "block_consistency": _block_consistency,
}

_OF_METRIC = ("metric_reg", "metric_diversity", "factor_floor", "factor_target", "condition")
"""Terms that look at the metric alone."""

_OF_STATES = ("recurrence", "stability")
"""Terms that look at states and logits alone."""
