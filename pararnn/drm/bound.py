"""Keeping a state within a radius (notes, section 6)."""

from __future__ import annotations

import torch
from torch import Tensor

SMALLEST_NORM = 1e-8


def bound_state(z: Tensor, radius: float | None) -> Tensor:
    r"""\(R\tanh\bigl(z\min(1, R/\lVert z\rVert)/R\bigr)\), last axis; ``z`` itself for None.

    Clipping of the norm, then tanh of each coordinate. It is not a projection: applied twice, it
    moves the state again.
    """
    if radius is None:
        return z
    norm = torch.linalg.vector_norm(z, dim=-1, keepdim=True).clamp(min=SMALLEST_NORM)
    return radius * torch.tanh(z * (radius / norm).clamp(max=1.0) / radius)
