"""What the paths return."""

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
        Each that was evaluated, at states ``(B, d)``, or at several points ``(B, m, d)``.
    counts : tuple of int
        How many tokens each point served.
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
        points = _points(values, 0)
        if points is None or set(self.counts) <= {1}:
            return points
        spread = zip(points.split(1, 1), self.counts, strict=True)
        return torch.cat([v.expand(-1, n) for v, n in spread], 1)


def joined(rollouts: Sequence[Rollout]) -> Rollout:
    """One rollout of consecutive ones, at least one."""
    velocities = [r.velocity for r in rollouts if r.velocity is not None]
    return Rollout(
        torch.cat([r.states for r in rollouts], 1),
        torch.cat([r.increments for r in rollouts], 1),
        torch.cat(velocities, 1) if velocities else None,
        tuple(g for r in rollouts for g in r.geometry),
        tuple(n for r in rollouts for n in r.counts),
    )


def trace_of(rollout: Rollout) -> Trace:
    """Velocities and geometry, as losses look at them."""
    geometry = rollout.geometry
    directions = [g.directions for g in geometry]
    metrics = [g.metric for g in geometry]
    return Trace(
        torch.tensor(rollout.counts, dtype=torch.int64, device=rollout.states.device),
        rollout.velocity,
        _points([None if d is None else d.gates for d in directions], 1),
        _points([None if m is None else m.diagonal for m in metrics], 1),
        _points([None if m is None else m.factor for m in metrics], 2),
        _points([g.risk for g in geometry], 0),
    )


def _points(values: Sequence[Tensor | None], trailing: int) -> Tensor | None:
    """Values ``(B, ...)`` or ``(B, m, ...)`` with so many trailing dimensions, as ``(B, N, ...)``."""
    known = [v if v.ndim == 2 + trailing else v.unsqueeze(1) for v in values if v is not None]
    return torch.cat(known, 1) if known else None
