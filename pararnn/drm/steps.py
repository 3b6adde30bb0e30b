"""The recurrence as a map of many states at once, and linear recurrences of the bound's Jacobians.

Where the bound clips the norm, its Jacobian is ``D (I - u uᵀ)``: D the slopes of clip and tanh, u the
unit vector along the state, in which a change is lost. A recurrence of such maps is one linear scan
for D and a triangular system for what is lost, of one number a step.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from pararnn import checks
from pararnn.scan import linear_scan

from .bound import Clipped, bound_state
from .dynamics import DRMDynamics
from .networks import shifted


def require_plain_steps(dynamics: DRMDynamics) -> None:
    """Refuse dynamics whose step depends on more than a state and a token.

    Raises
    ------
    ValueError
        If geometry is kept for several steps, a graph would be cut, or dropout is on.
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
            f"dropout: got {c.dropout} in training, expected 0; a step is taken several times and "
            "must be found alike."
        )


class Steps(nn.Module):
    """The dynamics' step, from states and tokens of any leading shape, at a given strength of
    naturalization; called, what the step bounds at its end."""

    def __init__(self, dynamics: DRMDynamics, strength: float):
        super().__init__()
        self.dynamics, self.strength = dynamics, strength
        self.state_shape = dynamics.state_shape

    def forward(self, z: Tensor, e: Tensor) -> Tensor:
        return self.dynamics.unbounded_step(z, e, self.strength)

    def step(self, z: Tensor, e: Tensor) -> Tensor:
        return self.bounded(self(z, e))

    def bounded(self, z: Tensor) -> Tensor:
        return bound_state(z, self.dynamics.radius)

    def slopes(self, z: Tensor) -> Slopes:
        """The bound's Jacobians at states ``z (B, T, d)``."""
        radius = self.dynamics.radius
        if radius is None:
            return Slopes(torch.ones_like(z), None, None)
        unit, share, there = Clipped.of(z, radius)
        diagonal = (1 - torch.tanh(unit).square()) * share
        lost = torch.where(there, unit, 0.0)
        return Slopes(diagonal, lost, diagonal * lost)


class Slopes(NamedTuple):
    """Matrices ``D - y wᵀ`` of every step, each ``(B, T, d)``; without ``w`` and ``y``, ``D``."""

    diagonal: Tensor
    w: Tensor | None
    y: Tensor | None

    def to(self, dtype: torch.dtype) -> Slopes:
        w, y = (None if x is None else x.to(dtype) for x in (self.w, self.y))
        return Slopes(self.diagonal.to(dtype), w, y)

    def adjoint(self) -> Slopes:
        """Their transposes for the steps backwards in time: the last step has none after it."""

        def turned(x: Tensor | None) -> Tensor | None:
            return None if x is None else shifted(torch.zeros_like(x[:, 0]), x.flip(1))

        return Slopes(cast(Tensor, turned(self.diagonal)), turned(self.y), turned(self.w))

    def applied(self, x: Tensor) -> Tensor:
        """``(D - y wᵀ) x`` of each step."""
        moved = self.diagonal * x
        if self.w is None or self.y is None:
            return moved
        return moved - self.y * (self.w * x).sum(-1, keepdim=True)

    def carried(self, b: Tensor) -> Tensor:
        """States of ``x_t = (D_t - y_t w_tᵀ) x_{t-1} + b_t``, from zero.

        With ``α_t = w_tᵀ x_{t-1}``, x is a scan of ``b - y α``, and α solves a triangular system. In
        that system alone, products of D are taken as those of its mean.
        """
        x = cast(Tensor, linear_scan(self.diagonal, b))
        if self.w is None or self.y is None:
            return x
        with checks.full_precision(b.device):
            first = torch.zeros_like(b[:, 0])
            seen = (self.w * shifted(first, x)).sum(-1, keepdim=True)
            mean = self.diagonal.mean(-1).clamp(min=torch.finfo(b.dtype).tiny).log().cumsum(1)
            since = shifted(first[:, 0], mean).unsqueeze(2) - mean.unsqueeze(1)
            system = (self.w @ self.y.mT * since.clamp(max=0).exp()).tril(-1)
            # What is not finite reaches later states through the scan, and no earlier ones.
            alpha = torch.linalg.solve_triangular(
                system.nan_to_num(0.0, 0.0, 0.0),
                seen.nan_to_num(0.0, 0.0, 0.0),
                upper=False,
                unitriangular=True,
            )
        return cast(Tensor, linear_scan(self.diagonal, b - self.y * alpha))
