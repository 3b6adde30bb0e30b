"""More geometry, evaluated at every position (variant G of the published matrix)."""

from __future__ import annotations

from torch import Tensor, nn

from .config import DRMConfig
from .dynamics import DRMDynamics
from .networks import shifted


class DRMRefinementLayer(nn.Module):
    r"""\(z_t \leftarrow z_t + \eta\,dt\,v(z_{t-1}, e_t)\), with directions, metric and flow of its
    own, evaluated at the previous position of the states that come in.

    Parameters
    ----------
    config
        Of the model; \(\eta\) is ``refinement_scale``.
    index
        Which of several it is, from 1.
    """

    def __init__(self, config: DRMConfig, index: int = 1):
        super().__init__()
        self.dynamics = DRMDynamics(config, index)
        self.scale = config.refinement_scale

    def forward(self, states: Tensor, start: Tensor, e: Tensor, strength: float) -> Tensor:
        """Refined states ``(B, L, d_state)``; ``start (B, d_state)`` is the state before them."""
        previous = shifted(start, states)
        geometry = self.dynamics.geometry(previous)
        v = self.dynamics.velocity(geometry, previous, e.unsqueeze(-2), strength).squeeze(-2)
        return states + self.scale * self.dynamics.config.dt * v
