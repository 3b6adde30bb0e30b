"""Bounds on recurrent weights (Danieli et al., arXiv:2510.21450, App. C.1)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import _checks as checks
from .._operators import watched
from .cell import Cell


def project_entries(weight: Tensor, bound: float | None) -> Tensor:
    """Entries clipped to ``[-bound, bound]``; the gradient passes straight through.

    The value is ``clamp(weight)``. Its gradient is that of the identity, also outside the box, so
    an entry that was pushed out can come back (the derivative of ``clamp`` is zero there, and
    would leave it stuck). This is what projecting the weights after every optimizer step computes.
    """
    if bound is None:
        return weight
    if not (torch.is_grad_enabled() and weight.requires_grad):
        return weight.clamp(-bound, bound)
    if watched((weight,)):  # what transforms and compilers see through
        return weight.clamp(-bound, bound).detach() + (weight - weight.detach())
    return Projected.apply(weight, bound)


class Projected(torch.autograd.Function):
    """The same as one node."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, bound: float) -> Tensor:
        return weight.clamp(-bound, bound)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return g, None


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


class BoundedCell(Cell):
    """A cell whose recurrent maps are kept within ``max_recurrent_norm``.

    Entries of diagonal maps are projected to ``[-c, c]`` (:func:`project_entries`), matrices are
    rescaled to spectral norm at most ``c`` (:func:`limit_spectral_norm`). Elementwise parameters
    are left alone.

    Raises
    ------
    ValueError
        If the bound is neither None nor a positive number.
    """

    def __init__(self, *args: Any, max_recurrent_norm: float | str | None, **kwargs: Any):
        self.max_recurrent_norm = checks.bound("max_recurrent_norm", max_recurrent_norm)
        super().__init__(*args, **kwargs)
        self._diagonal = all(m.structure == "diagonal" for m in self.spec.map_list)

    def recurrent_params(self) -> tuple[Tensor, ...]:
        weights = super().recurrent_params()
        bound, maps = self.max_recurrent_norm, self.spec.map_list
        if bound is None:
            return weights
        if self._diagonal:  # one operation for all of them
            bounded = project_entries(torch.stack(weights[: len(maps)]), bound).unbind(0)
        else:
            bounded = tuple(
                (project_entries if m.structure == "diagonal" else limit_spectral_norm)(w, bound)
                for m, w in zip(maps, weights, strict=False)
            )
        return bounded + weights[len(maps) :]

    def hyperparameters(self) -> dict[str, Any]:
        return {
            "d_in": self.d_in,
            "d_h": self.d_h,
            "max_recurrent_norm": self.max_recurrent_norm,
            "bias": self.has_bias,
        }

    @torch.no_grad()
    def project_(self) -> None:
        """Replace the recurrent weights by their bounded values, in place.

        Called after every optimizer step this is the paper's clip: weights then never leave their
        bound. Without it they may, while the effective ones (:meth:`recurrent_params`) do not.
        """
        for m, bounded in zip(self.spec.map_list, self.recurrent_params(), strict=False):
            getattr(self, m.name).copy_(bounded)
