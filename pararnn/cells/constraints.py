"""Bounds on recurrent weights (Danieli et al., arXiv:2510.21450, App. C.1)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _Project(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(weight: Tensor, bound: float) -> Tensor:
        return weight.clamp(-bound, bound)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
        weight, ctx.bound = inputs
        ctx.save_for_backward(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (weight,) = ctx.saved_tensors
        # A descent step moves against the gradient: out of the box where sign(w) and grad differ.
        outward = (weight.abs() >= ctx.bound) & (weight * grad < 0)
        return grad.masked_fill(outward, 0.0), None


def project_entries(weight: Tensor, bound: float | None) -> Tensor:
    """Entries clipped to ``[-bound, bound]``, with the gradient of projected descent.

    The value is ``clamp(weight)``. The gradient passes everywhere inside the box; on or outside
    its faces it passes only if a descent step would move the entry inwards. So an entry never
    drifts further out, and never gets stuck outside, which the plain derivative of ``clamp`` (zero
    outside) would cause. Inside the box this is the ordinary gradient.
    """
    return weight if bound is None else _Project.apply(weight, bound)


def limit_spectral_norm(weight: Tensor, bound: float | None) -> Tensor:
    """Matrices ``(..., n, n)`` rescaled so that each spectral norm is at most ``bound``.

    A reparametrisation: differentiable, and the identity where the norm is already within bounds.
    """
    if bound is None:
        return weight
    wide = weight if weight.dtype == torch.float64 else weight.float()
    norm = torch.linalg.matrix_norm(wide, ord=2, keepdim=True)
    return (wide * (bound / norm.clamp_min(bound))).to(weight.dtype)
