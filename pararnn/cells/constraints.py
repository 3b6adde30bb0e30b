"""Bounds on recurrent weights (Danieli et al., arXiv:2510.21450, App. C.1)."""

from __future__ import annotations

import torch
from torch import Tensor


def project_entries(weight: Tensor, bound: float | None) -> Tensor:
    """Entries clipped to ``[-bound, bound]``; the gradient passes straight through.

    The value is ``clamp(weight)``. Its gradient is that of the identity, also outside the box, so
    an entry that was pushed out can come back (the derivative of ``clamp`` is zero there, and
    would leave it stuck). This is what projecting the weights after every optimizer step computes.
    """
    if bound is None:
        return weight
    return weight.clamp(-bound, bound).detach() + (weight - weight.detach())


def limit_spectral_norm(weight: Tensor, bound: float | None) -> Tensor:
    """Matrices ``(..., n, n)`` rescaled so that each spectral norm is at most ``bound``.

    A reparametrisation: differentiable, and the identity where the norm is already within bounds.
    Second derivatives are those of a singular value: undefined (NaN) where the two largest tie.
    """
    if bound is None:
        return weight
    wide = weight if weight.dtype == torch.float64 else weight.float()
    norm = torch.linalg.matrix_norm(wide, ord=2, keepdim=True)
    return (wide * (bound / norm.clamp_min(bound))).to(weight.dtype)
