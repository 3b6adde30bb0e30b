"""Keeping a state within a radius (notes, section 6)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pararnn import checks


def bound_state(z: Tensor, radius: float | None) -> Tensor:
    r"""\(R\tanh\bigl(z\min(1, R/\lVert z\rVert)/R\bigr)\), last axis; ``z`` itself for None.

    Clipping of the norm, then tanh of each coordinate; half precision is computed in float32. It is not
    a projection: applied twice, it moves the state again. Both scalings are one division, by
    \(\max(R, \lVert z\rVert)\), whose squares neither overflow nor underflow.

    Raises
    ------
    TypeError, ValueError
        If ``z`` is not a floating-point tensor, or the radius is not above 0, or no normal number of
        the dtype of ``z``.
    """
    if radius is None:
        return z
    checks.floating("bound_state: z", z)
    fits_dtype("bound_state: radius", radius, z.dtype)
    return (radius * torch.tanh(Clipped.of(z, radius).unit)).to(z.dtype)


def fits_dtype(name: str, value: float, dtype: torch.dtype) -> float:
    """``value``, a positive normal number of ``dtype``: others become 0 or infinite in it, or lose their
    digits.

    Raises
    ------
    ValueError
        If it is none.
    """
    info = torch.finfo(dtype)
    if not checks.within(value, info.smallest_normal, info.max):
        raise ValueError(
            f"{name}: got {value}, expected a finite number > 0 that {dtype} has, {info.smallest_normal:.3g} to "
            f"{info.max:.3g}; change it, or the dtype."
        )
    return value


class Clipped(NamedTuple):
    r"""States clipped to a radius, of which they are measured.

    Attributes
    ----------
    unit : Tensor
        \(z / \max(R, \lVert z\rVert)\), ``(..., d)``.
    share : Tensor
        \(R / \max(R, \lVert z\rVert)\), ``(..., 1)``.
    there : Tensor
        Whether the norm exceeds the radius, ``(..., 1)``.
    """

    unit: Tensor
    share: Tensor
    there: Tensor

    @staticmethod
    def of(z: Tensor, radius: float) -> Clipped:
        """Of states ``z (..., d)``, in float32 at least. No square overflows or underflows: they are
        scaled by a power of two first, near the larger of R and the largest entry, which changes no
        digit."""
        z = z.to(checks.state_dtype(z.dtype))
        top = torch.linalg.vector_norm(z.detach(), torch.inf, dim=-1, keepdim=True)
        scale = power(top.clamp(min=radius))
        small, limit = z * scale, radius * scale
        norm = torch.linalg.vector_norm(small, dim=-1, keepdim=True)
        size = norm.clamp(min=limit)
        return Clipped(small / size, limit / size, norm > limit)


def length(x: Tensor, dim: int | tuple[int, ...] = -1) -> Tensor:
    """Euclidean norm over some dimensions, in float32 at least, whose squares neither overflow nor underflow; its gradient at
    0 is 0."""
    x = x.to(checks.state_dtype(x.dtype))
    scale = power(torch.linalg.vector_norm(x.detach(), torch.inf, dim=dim, keepdim=True))
    return torch.linalg.vector_norm(x * scale, dim=dim) / scale.sum(dim)


def power(size: Tensor) -> Tensor:
    """A power of two with which ``size`` becomes about 1; 1 where that is not finite. It stays a normal
    number of the dtype."""
    least = torch.finfo(size.dtype).smallest_normal
    inverse = torch.exp2(-torch.frexp(size).exponent.to(size.dtype))
    return torch.where(size.isfinite(), inverse.clamp(least, 1 / least), 1.0)
