"""The recurrent path: geometry follows the state (notes, section 6)."""

from __future__ import annotations

import torch
from torch import Tensor

from .bound import bound_state
from .dynamics import DRMDynamics, Geometry
from .rollout import Rollout


def recurrent_states(
    dynamics: DRMDynamics,
    z: Tensor,
    e: Tensor,
    strength: float,
    *,
    measure: bool = True,
    geometry: Geometry | None = None,
    taken: int = 0,
) -> Rollout:
    r"""States \(z_{t+1} = \mathrm{Bnd}(z_t + dt\,v_t)\), one token after the other.

    Geometry is evaluated anew every ``geometry_interval`` flow steps, counted from the first token
    given; coefficients always follow the state. While training, the graph is cut (and the geometry
    evaluated anew) every ``truncation`` tokens.

    Parameters
    ----------
    dynamics
        With a transition.
    z, e
        First state ``(B, d_state)`` and embeddings ``(B, T, d_token)``.
    strength
        Of naturalization.
    measure
        Evaluate the metric even where the strength is 0 and nothing but a loss looks at it.
    geometry, taken
        To go on with a sequence: the geometry of its last flow step, the last one that such a call
        returned, and how many flow steps were taken before.
    """
    c = dynamics.config
    cut = c.truncation if dynamics.training else 0
    states: list[Tensor] = []
    increments: list[Tensor] = []
    velocities: list[Tensor] = []
    current = geometry
    seen: list[Geometry] = [] if current is None else [current]
    counts = [0] * len(seen)
    for t in range(e.shape[1]):
        if cut and t and t % cut == 0:
            z, current = z.detach(), None
        start = z
        parts: list[Tensor] = []
        for _ in range(c.flow_steps):
            if current is None or taken % c.geometry_interval == 0:
                current = dynamics.geometry(z, metric=measure or strength != 0)
                seen.append(current)
                counts.append(0)
            v = dynamics.velocity(current, z, e[:, t].unsqueeze(1), strength).squeeze(1)
            parts.append(v)
            z = bound_state(z + c.dt * v, dynamics.radius)
            taken += 1
        counts[-1] += 1
        states.append(z)
        increments.append(z - start)
        velocities.append(parts[0] if len(parts) == 1 else torch.stack(parts).mean(0))
    if not states:
        empty = z.unsqueeze(1)[:, :0]
        return Rollout(empty, empty, empty, (), ())
    return Rollout(
        torch.stack(states, 1),
        torch.stack(increments, 1),
        torch.stack(velocities, 1),
        tuple(seen),
        tuple(counts),
    )
