"""Coefficients of the directions, and the transition that does without (notes, section 3)."""

from __future__ import annotations

from torch import Tensor

from .networks import StateTokenNetwork


class DRMFlow(StateTokenNetwork):
    r"""Coefficients \(c_i(z, e) \in [-1, 1]\) of ``n_directions`` directions.

    \(c = \tanh(C_2\,\mathrm{GELU}(C_1 [z; e]))\); the raw velocity is
    :meth:`Directions.velocity <pararnn.drm.Directions.velocity>` of them.
    """

    def __init__(
        self, d_state: int, d_token: int, hidden: int, n_directions: int, dropout: float = 0.0
    ):
        super().__init__(d_state, d_token, hidden, n_directions, dropout)


class DirectStateTransition(StateTokenNetwork):
    r"""A velocity \(T(z, e) \in [-1, 1]^d\) without directions, as in J_NO_DIRECTION, times
    ``scale``."""

    def __init__(
        self, d_state: int, d_token: int, hidden: int, dropout: float = 0.0, *, scale: float = 1.0
    ):
        super().__init__(d_state, d_token, hidden, d_state, dropout)
        self.scale = scale

    def forward(self, z: Tensor, e: Tensor) -> Tensor:
        """Velocities ``(..., m, d_state)``, as :class:`StateTokenNetwork` takes its inputs."""
        velocity: Tensor = super().forward(z, e)
        return velocity if self.scale == 1 else self.scale * velocity

    def extra_repr(self) -> str:
        return f"scale={self.scale:.4g}"
