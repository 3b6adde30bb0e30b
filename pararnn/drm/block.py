"""The block path: geometry at a block's start, then one scan of sums (notes, section 7)."""

from __future__ import annotations

import torch
from torch import Tensor

from pararnn.scan import prefix_sum

from .bound import bound_state
from .dynamics import DRMDynamics, Geometry
from .rollout import Rollout, joined


def block_states(
    dynamics: DRMDynamics,
    z: Tensor,
    e: Tensor,
    strength: float,
    *,
    measure: bool = True,
    geometry: Geometry | None = None,
    reached: Tensor | None = None,
) -> Rollout:
    r"""States of one block, \(\tilde z_t = \mathrm{Bnd}(z_b + \sum_{j \le t} dt\,v_j)\).

    All velocities are those at \(z_b\): within a block each depends on its own token only, so the
    last state does not know the order of the tokens. With one token it is the recurrent step. The
    inner system of the metric is factored once.

    With ``bound_increments`` the sum is of \(\mathrm{Bnd}(z_b + dt\,v_j) - z_b\); as Bnd is no
    projection, a block of zero velocities then moves a state of large norm.

    Parameters
    ----------
    dynamics
        With transition ``'none'`` the state stays.
    z, e
        State at the start ``(B, d_state)`` and embeddings ``(B, L, d_token)``.
    strength
        Of naturalization.
    measure
        Evaluate the metric even where the strength is 0 and nothing but a loss looks at it.
    geometry, reached
        To go on inside of a block that starts at ``z``: its geometry, and the start plus the increments
        of the tokens before, ``(B, d_state)``, in float32 at least. Evaluated, and ``z``, if not given.
    """
    c, radius = dynamics.config, dynamics.radius
    start = z.unsqueeze(1)
    if c.transition == "none":
        states = start.expand(-1, e.shape[1], -1)
        return Rollout(states, states.new_zeros(()).expand_as(states), None, (), ())
    if geometry is None:
        geometry = dynamics.geometry(z, metric=measure or strength != 0)
    velocity = dynamics.velocity(geometry, z, e, strength)
    if c.bound_increments and radius is not None:
        increments = bound_state(start + c.dt * velocity, radius) - start
        velocity = increments / c.dt
    else:
        increments = c.dt * velocity
    sums = prefix_sum(increments, z if reached is None else reached)
    states = bound_state(sums.to(torch.promote_types(increments.dtype, z.dtype)), radius)
    return Rollout(states, increments, velocity, (geometry,), (e.shape[1],))


def blockwise_states(
    dynamics: DRMDynamics,
    z: Tensor,
    e: Tensor,
    strength: float,
    length: int,
    *,
    measure: bool = True,
) -> Rollout:
    r"""States of a sequence, block by block: \(z_{b+1} = \tilde z_{b,L}\).

    Parameters
    ----------
    dynamics, z, e, strength, measure
        As for :func:`block_states`.
    length
        Of a block; the last one may be shorter. 0: one block.
    """
    rollouts = []
    for piece in e.split(length or max(1, e.shape[1]), 1):
        rollouts.append(block_states(dynamics, z, piece, strength, measure=measure))
        z = rollouts[-1].states[:, -1] if piece.shape[1] else z
    return joined(rollouts)
