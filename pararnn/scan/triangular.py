"""Inverses of unit lower triangular matrices, many at a time.

A batched triangular solve of LAPACK's kind runs one matrix after the other, row by row. Here all
diagonal blocks of all matrices are inverted together by forward substitution, and then joined in
pairs,

    ``[[A, 0], [C, B]]⁻¹ = [[A⁻¹, 0], [−B⁻¹ C A⁻¹, B⁻¹]]``,

which is nothing but matrix products.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

BLOCK = 16


def unit_lower_inverse(below: Tensor) -> Tensor:
    """``(I + L)⁻¹`` for strictly lower triangular ``L (..., n, n)``; other entries are not read.
    Written in place, so not for autograd."""
    size = below.shape[-1]
    levels = max(0, (size - 1) // BLOCK).bit_length()
    whole = BLOCK << levels if levels else size
    given = pad(below, (0, whole - size, 0, whole - size)) if whole > size else below
    width = whole >> levels
    joined = _by_rows(_diagonal_blocks(given, width))
    for _ in range(levels):
        width *= 2
        upper, lower = joined.unflatten(-3, (-1, 2)).unbind(-3)
        corner = _diagonal_blocks(given, width)[..., width // 2 :, : width // 2]
        corner = -(lower @ (corner @ upper))
        joined = torch.cat([pad(upper, (0, width // 2)), torch.cat([corner, lower], -1)], -2)
    return joined.squeeze(-3)[..., :size, :size].clone(memory_format=torch.contiguous_format)


def _diagonal_blocks(x: Tensor, width: int) -> Tensor:
    """Blocks ``(..., n / width, width, width)`` on the diagonal of ``(..., n, n)``."""
    count = x.shape[-1] // width
    blocks = x.unflatten(-2, (count, width)).unflatten(-1, (count, width))
    return blocks.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)


def _by_rows(below: Tensor) -> Tensor:
    """Forward substitution on small blocks: row ``i`` of ``X`` is ``e_i − L_i X``. The matrices are
    the last dimension here, so that all are worked on side by side."""
    size = below.shape[-1]
    given = below.reshape(-1, size, size).permute(1, 2, 0).contiguous()
    inverse = torch.zeros_like(given)
    inverse.diagonal().fill_(1)
    for i in range(1, size):
        inverse[i, :i] = -(given[i, :i, None] * inverse[:i, :i]).sum(0)
    return inverse.permute(2, 0, 1).contiguous().reshape(below.shape)
