"""Keeping a state within a radius (notes, section 6)."""

from __future__ import annotations

import math
import sys

import torch
from torch import Tensor

from .. import _checks as checks


def bound_state(z: Tensor, radius: float | None) -> Tensor:
    r"""\(R\tanh\bigl(z\min(1, R/\lVert z\rVert)/R\bigr)\), last axis; ``z`` itself for None.

    Clipping of the norm, then tanh of each coordinate. It is not a projection: applied twice, it
    moves the state again. Both scalings are one division, by \(\max(R, \lVert z\rVert)\).

    Raises
    ------
    TypeError, ValueError
        If ``z`` is not a floating-point tensor, or the radius is not finite and above 0.
    """
    if radius is None:
        return z
    checks.floating("bound_state: z", z)
    if not checks.within(radius, math.ulp(0.0), sys.float_info.max):
        raise ValueError(
            f"bound_state: radius: got {radius}, expected a finite number > 0; use None for no bound."
        )
    norm = torch.linalg.vector_norm(z, dim=-1, keepdim=True).clamp(min=radius)
    return radius * torch.tanh(z / norm)
