"""Gates of the hand-written steps."""

from __future__ import annotations

import torch
from torch import Tensor


def shares(x: Tensor) -> tuple[Tensor, Tensor]:
    """``σ(x)`` and ``1 − σ(x)``, each right relative to itself, and so are their derivatives.

    The smaller of the two is computed, and the other is what is left of 1. Autograd's derivative of
    a sigmoid is ``y (1 − y)``, which loses its digits where ``y`` is the larger one.
    """
    small = torch.sigmoid(torch.where(x > 0, -x, x))
    return torch.where(x > 0, 1 - small, small), torch.where(x > 0, small, 1 - small)
