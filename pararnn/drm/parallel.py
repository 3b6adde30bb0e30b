"""The recurrent path solved in parallel over time, and how far the block path is from it.

The notes approximate the recurrence by a cumulative sum. Here the recurrence itself is solved, in
two ways whose answers are that of the loop to a tolerance. :func:`parallel_rollout`, which the model
uses, sweeps without derivatives of the networks: cheap, and fast where a step is small.
:func:`parallel_states` is multiple shooting with the Jacobians of the step, dense for small states:
few corrections whatever the step, each of them dear.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pararnn import checks
from pararnn.solvers import NewtonConfig, Solution, solve

from .block import blockwise_states
from .bound import length as norm
from .dynamics import DRMDynamics, Geometry
from .networks import shifted
from .recurrent import recurrent_states
from .rollout import Rollout
from .steps import Steps, require_plain_steps
from .sweeps import Sweeps, sweep_states


def parallel_rollout(
    dynamics: DRMDynamics, z: Tensor, e: Tensor, strength: float, *, measure: bool = True
) -> tuple[Rollout, Sweeps]:
    """The recurrent path by sweeps, then the geometry of all states before a step in one batch.

    Parameters
    ----------
    dynamics
        With a transition; its configuration says how to sweep.
    z, e
        First state ``(B, d_state)`` and embeddings ``(B, T, d_token)``.
    strength
        Of naturalization.
    measure
        Evaluate metric and velocities, which a loss looks at. Directions and risk are evaluated
        then, or where a mixer takes their masses.

    Raises
    ------
    ValueError
        As :func:`sweep_states`.
    """
    c = dynamics.config
    found = sweep_states(
        dynamics,
        z,
        e,
        strength,
        window=c.parallel_window,
        max_corrections=c.parallel_corrections,
        tol=c.parallel_tolerance,
        estimate=c.parallel_estimate,
    )
    before = shifted(z, found.states)
    geometry: tuple[Geometry, ...] = ()
    velocity = None
    if measure or (c.mixer and c.corrected):
        geometry = (dynamics.geometry(before, metric=measure),)
    if measure:
        velocity = dynamics.velocity(geometry[0], before, e.unsqueeze(-2), strength).squeeze(-2)
    counts = (1,) * e.shape[1] if geometry else ()
    return Rollout(found.states, found.states - before, velocity, geometry, counts), found


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
    require_plain_steps(dynamics)
    return solve(Steps(dynamics, strength), e, config, h0=z)


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
    moved = norm(exact - z.unsqueeze(1), (0, 1, 2))
    gaps = {}
    for length in lengths:
        checks.positive("lengths", length)
        blocks = blockwise_states(dynamics, z, e, strength, length, measure=False).states
        gaps[length] = float(norm(blocks - exact, (0, 1, 2)) / moved)
    return gaps
