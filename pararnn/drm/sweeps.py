"""The recurrent path by repeated sweeps, each one batch of velocities and one linear scan.

The step is near the identity, ``z ↦ Bnd(z + dt v)``, so the Jacobian of the bound alone, without
that of the velocity, makes a good correction: no derivative of a network is taken. Without a bound
this is Picard's iteration for an integral equation, ``z_t = z_0 + Σ dt v(z_{j-1})``, whose first
sweep from a constant guess is the block path of the notes over the whole sequence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from .. import _checks as checks
from ..scan import linear_scan
from .dynamics import DRMDynamics

TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-6}


@dataclass(frozen=True)
class Sweeps:
    """States and how they were reached.

    Attributes
    ----------
    states : Tensor
        ``(B, T, d_state)``, without a graph.
    history : tuple of float
        Largest mismatch ``|f(z_{t-1}) - z_t|`` before each correction, and after the last.
    converged : bool
        Whether the last is within the tolerance.
    """

    states: Tensor
    history: tuple[float, ...]
    converged: bool

    @property
    def corrections(self) -> int:
        """How many were made."""
        return len(self.history) - 1


@torch.no_grad()
def sweep_states(
    dynamics: DRMDynamics,
    z: Tensor,
    e: Tensor,
    strength: float,
    *,
    tol: float | None = None,
    max_corrections: int | None = None,
) -> Sweeps:
    r"""States of the recurrent path by quasi-Newton corrections from the constant guess.

    With mismatches \(r_t = f(z_{t-1}, e_t) - z_t\), corrections solve
    \(\Delta_t = a_t\,\Delta_{t-1} + r_t\), where \(a_t\) is the diagonal of the bound's slope, 1
    without one. After k corrections the first k states are those of the loop.

    Parameters
    ----------
    dynamics
        With a transition.
    z, e
        First state ``(B, d_state)`` and embeddings ``(B, T, d_token)``.
    strength
        Of naturalization.
    tol
        Largest mismatch to end at, over ``max(1, |state|)``. None: 1e-6 for float32, 1e-13 for
        float64.
    max_corrections
        None is the sequence length, which always suffices but for rounding.

    Raises
    ------
    ValueError
        If geometry is kept for several steps, or dropout is on.
    """
    c = dynamics.config
    if c.geometry_interval != 1:
        raise ValueError(
            f"geometry_interval: got {c.geometry_interval}, expected 1, geometry that belongs to "
            "its state; use recurrent_states for stale geometry."
        )
    if dynamics.training and c.dropout:
        raise ValueError(
            f"dropout: got {c.dropout} in training, expected 0; a step is taken several times and "
            "must be found alike."
        )
    batch, length = e.shape[:2]
    limit = length if max_corrections is None else max_corrections
    dtype = checks.state_dtype(z.dtype)
    bar = TOLERANCE[dtype] if tol is None else tol
    start = z.to(dtype).unsqueeze(1)
    states = start.expand(-1, length, -1)
    history: list[float] = []
    while True:
        before = torch.cat([start, states], 1)[:, :length]
        flat = before.flatten(0, 1).to(z.dtype)
        reached = dynamics.step(flat, e.flatten(0, 1), strength).to(dtype)
        reached = reached.unflatten(0, (batch, length))
        mismatch = reached - states
        scale = max(1.0, float(states.abs().max())) if states.numel() else 1.0
        history.append(float(mismatch.abs().max()) / scale if states.numel() else 0.0)
        done = history[-1] <= bar
        if done or len(history) > limit or not math.isfinite(history[-1]):
            return Sweeps(states.to(z.dtype), tuple(history), done)
        slope = _slope(reached, before, dynamics.radius)
        states = states + cast(Tensor, linear_scan(slope, mismatch))


def _slope(reached: Tensor, before: Tensor, radius: float | None) -> Tensor:
    """Diagonal of the bound's Jacobian, at the state it returned."""
    if radius is None:
        return torch.ones_like(reached)
    norm = torch.linalg.vector_norm(before, dim=-1, keepdim=True).clamp(min=radius)
    return (1 - (reached / radius).square()) * (radius / norm)
