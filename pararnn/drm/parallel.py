"""The recurrent path solved in parallel over time, and how far the block path is from it.

The notes approximate the recurrence by a cumulative sum. :func:`parallel_states` solves the
recurrence itself: multiple shooting, whose answer is that of the loop to the solver's tolerance.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .. import _checks as checks
from ..solvers import NewtonConfig, Solution, solve
from .block import block_states
from .dynamics import DRMDynamics
from .recurrent import recurrent_states


class _Steps(nn.Module):
    """The dynamics with a strength of naturalization."""

    def __init__(self, dynamics: DRMDynamics, strength: float):
        super().__init__()
        self.dynamics, self.strength = dynamics, strength
        self.state_shape = dynamics.state_shape

    def step(self, z: Tensor, e: Tensor) -> Tensor:
        return self.dynamics.step(z, e, self.strength)


def parallel_states(
    dynamics: DRMDynamics,
    z: Tensor,
    e: Tensor,
    strength: float,
    config: NewtonConfig | None = None,
) -> Solution:
    """States of the recurrent path, by :func:`pararnn.solve`.

    Parameters
    ----------
    dynamics
        With a transition. Its Jacobians are taken by ``torch.func``.
    z, e
        First state ``(B, d_state)`` and embeddings ``(B, T, d_token)``.
    strength
        Of naturalization.
    config
        Of the solver.

    Returns
    -------
    Solution
        Its states ``(B, T, d_state)``, whether and in how many iterations they converged, and the
        mismatch of each. Gradients are those of the recurrence.

    Raises
    ------
    ValueError
        If a step would depend on more than its state and token: geometry that is kept for several
        steps, a graph that is cut, or dropout in training.
    """
    c = dynamics.config
    if c.geometry_interval != 1:
        raise ValueError(
            f"geometry_interval: got {c.geometry_interval}, expected 1, geometry that belongs to "
            "its state; use recurrent_states for stale geometry."
        )
    if dynamics.training and c.truncation:
        raise ValueError(
            f"truncation: got {c.truncation} in training, expected 0; the parallel path has no "
            "graph over time to cut."
        )
    if dynamics.training and c.dropout:
        raise ValueError(
            f"dropout: got {c.dropout} in training, expected 0; the solver takes a step several "
            "times and must find it alike."
        )
    return solve(_Steps(dynamics, strength), e, config, h0=z)


@torch.no_grad()
def block_gap(
    dynamics: DRMDynamics, z: Tensor, e: Tensor, strength: float, lengths: Sequence[int]
) -> dict[int, float]:
    """Distance of the block path from the recurrence, for each block length.

    Returns
    -------
    dict
        For each length, the norm of the difference of all states, over that of the recurrence's
        movement ``z_t - z_0``. 0 for length 1, bit for bit.

    Raises
    ------
    ValueError
        If a length is not a positive integer.
    """
    exact = recurrent_states(dynamics, z, e, strength, measure=False).states
    moved = torch.linalg.vector_norm(exact - z.unsqueeze(1))
    gaps = {}
    for length in lengths:
        state, parts = z, []
        for piece in e.split(checks.positive("lengths", length), 1):
            parts.append(block_states(dynamics, state, piece, strength, measure=False).states)
            state = parts[-1][:, -1]
        gaps[length] = float(torch.linalg.vector_norm(torch.cat(parts, 1) - exact) / moved)
    return gaps
