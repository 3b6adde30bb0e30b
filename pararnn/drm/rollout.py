"""What the two paths return."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .dynamics import Geometry
from .trace import Trace


@dataclass(frozen=True)
class Rollout:
    """Base states of some tokens, before mixer, residual and memory.

    Attributes
    ----------
    states : Tensor
        After each token, ``(B, L, d)``.
    increments : Tensor
        What each token added, ``(B, L, d)``.
    velocity : Tensor, optional
        Applied velocities ``(B, L, d)``; None without dynamics.
    geometry : tuple of Geometry
        Each that was evaluated, at states ``(B, d)``.
    counts : tuple of int
        How many tokens each served.
    """

    states: Tensor
    increments: Tensor
    velocity: Tensor | None
    geometry: tuple[Geometry, ...]
    counts: tuple[int, ...]

    def mass(self) -> Tensor | None:
        """dimD for each token, ``(B, L)``; None without directions."""
        return self._tokens(
            [None if g.directions is None else g.directions.mass for g in self.geometry]
        )

    def risk(self) -> Tensor | None:
        """Risk mass for each token, ``(B, L)``; None without."""
        return self._tokens([g.risk for g in self.geometry])

    def _tokens(self, values: Sequence[Tensor | None]) -> Tensor | None:
        known = [v for v in values if v is not None]
        if not known:
            return None
        spread = [v.unsqueeze(1).expand(-1, n) for v, n in zip(known, self.counts, strict=True)]
        return torch.cat(spread, 1)


def trace_of(rollouts: Sequence[Rollout], device: torch.device) -> Trace:
    """Velocities and geometry of consecutive rollouts, as losses look at them."""
    geometry = [g for r in rollouts for g in r.geometry]
    metrics = [g.metric for g in geometry]
    velocities = [r.velocity for r in rollouts if r.velocity is not None]
    return Trace(
        torch.tensor([n for r in rollouts for n in r.counts], dtype=torch.int64, device=device),
        torch.cat(velocities, 1) if velocities else None,
        _stacked([None if g.directions is None else g.directions.gates for g in geometry]),
        _stacked([None if m is None else m.diagonal for m in metrics]),
        _stacked([None if m is None else m.factor for m in metrics]),
        _stacked([g.risk for g in geometry]),
    )


def _stacked(values: Sequence[Tensor | None]) -> Tensor | None:
    known = [v for v in values if v is not None]
    return torch.stack(known, 1) if known else None
