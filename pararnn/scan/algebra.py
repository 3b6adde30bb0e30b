"""Algebras of transition operators: how the maps of a linear recurrence act and compose.

A linear recurrence ``x_t = A_t x_{t−1} + b_t`` needs two operations on its operators: apply one
to a state, and compose two. Everything that solves linear recurrences is written against these
two, so one scan serves every Jacobian class.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor


class Algebra:
    """Operators with leading dimensions ``(...)``, acting on states ``(..., *state_shape)``.

    Attributes
    ----------
    multiplies
        Whether operators multiply, so that a product of them has a range.
    entrywise
        Whether every entry of the state is a recurrence of its own.
    """

    multiplies = True
    entrywise = False

    def apply(self, op: Tensor, x: Tensor) -> Tensor:
        """``A x``."""
        raise NotImplementedError

    def affine(self, op: Tensor, x: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
        """``A x + b``."""
        return torch.add(b, self.apply(op, x), out=out)

    def compose(self, after: Tensor, before: Tensor) -> Tensor:
        """The operator that first applies ``before``, then ``after``."""
        raise NotImplementedError

    def transpose(self, op: Tensor) -> Tensor:
        """The operator of the adjoint recurrence."""
        raise NotImplementedError

    def outer(self, cotangent: Tensor, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Cotangent of the operator, from that of ``A x``."""
        raise NotImplementedError

    def spread(self, idle: Tensor, op: Tensor) -> Tensor:
        """Of a mask with the dimensions of :meth:`size`, where it is true of all states that an
        entry of an operator moves."""
        raise NotImplementedError

    def order(self, op: Tensor) -> int:
        """Multiplications for one entry of a composed operator."""
        return op.shape[-1]

    def norm(self, op: Tensor) -> Tensor:
        """Spectral norm of every block that acts on a vector of its own."""
        return torch.linalg.matrix_norm(op, 2)

    def size(self, x: Tensor) -> Tensor:
        """Largest absolute entry of a state among those that operators mix, with the dimensions of
        the state."""
        raise NotImplementedError


@dataclass(frozen=True)
class Diagonal(Algebra):
    """One number a coordinate: operators have the shape of a state."""

    entrywise = True

    def size(self, x: Tensor) -> Tensor:
        return x.abs()

    def spread(self, idle: Tensor, op: Tensor) -> Tensor:
        return idle

    def apply(self, op: Tensor, x: Tensor) -> Tensor:
        return op * x

    def affine(self, op: Tensor, x: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
        return torch.addcmul(b, op, x, out=out)

    def compose(self, after: Tensor, before: Tensor) -> Tensor:
        return after * before

    def transpose(self, op: Tensor) -> Tensor:
        return op

    def outer(self, cotangent: Tensor, x: Tensor, out: Tensor | None = None) -> Tensor:
        return torch.mul(cotangent, x, out=out)

    def order(self, op: Tensor) -> int:
        return 1

    def norm(self, op: Tensor) -> Tensor:
        return op.abs()


@dataclass(frozen=True)
class Block(Algebra):
    """One S×S block a channel: operators ``(..., S, S, *axes)``, states ``(..., S, *axes)``, with
    this many ``axes``."""

    axes: int = 1

    def size(self, x: Tensor) -> Tensor:
        return x.abs().amax(-self.axes - 1, keepdim=True)

    def spread(self, idle: Tensor, op: Tensor) -> Tensor:
        return idle.unsqueeze(-self.axes - 1)

    # Column by column: each is one operation on rows of contiguous channels.

    def apply(self, op: Tensor, x: Tensor) -> Tensor:
        return self._columns(op, x, None, None)

    def affine(self, op: Tensor, x: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
        return self._columns(op, x, b, out)

    def _columns(self, op: Tensor, x: Tensor, y: Tensor | None, out: Tensor | None) -> Tensor:
        dim = -self.axes - 1
        for column, entry in zip(op.unbind(dim), x.split(1, dim), strict=True):
            y = column * entry if y is None else torch.addcmul(y, column, entry, out=out)
        return cast(Tensor, y)

    def compose(self, after: Tensor, before: Tensor) -> Tensor:
        # out[i, k] = Σ_j after[i, j] before[j, k], in every channel
        columns, rows = after.split(1, -self.axes - 1), before.split(1, -self.axes - 2)
        product = columns[0] * rows[0]
        for column, row in zip(columns[1:], rows[1:], strict=True):
            product = torch.addcmul(product, column, row)
        return product

    def transpose(self, op: Tensor) -> Tensor:
        return op.transpose(-self.axes - 2, -self.axes - 1)

    def outer(self, cotangent: Tensor, x: Tensor, out: Tensor | None = None) -> Tensor:
        left, right = cotangent.unsqueeze(-self.axes - 1), x.unsqueeze(-self.axes - 2)
        return torch.mul(left, right, out=out)

    def order(self, op: Tensor) -> int:
        return op.shape[-self.axes - 1]

    def norm(self, op: Tensor) -> Tensor:
        blocks = op.movedim((-self.axes - 2, -self.axes - 1), (-2, -1))
        return torch.linalg.matrix_norm(blocks, 2)


@dataclass(frozen=True)
class Dense(Algebra):
    """One dense matrix a head: operators ``(..., n, S*w, S*w)`` on ``(..., [S,] n*w)`` states.

    ``slots`` is S, ``heads`` is n. With one head and one slot this is a plain dense matrix.
    """

    heads: int = 1
    slots: int = 1

    def size(self, x: Tensor) -> Tensor:
        blocks = self.pack(x).abs().amax(-1, keepdim=True)
        return self.unpack(
            blocks.expand(*blocks.shape[:-1], x.shape[-1] // self.heads * self.slots)
        )

    def pack(self, x: Tensor) -> Tensor:
        if self.slots == 1:
            return x.unflatten(-1, (self.heads, -1))
        blocks = x.unflatten(-1, (self.heads, -1)).transpose(-3, -2)
        return blocks.flatten(-2)

    def unpack(self, y: Tensor) -> Tensor:
        if self.slots == 1:
            return y.flatten(-2)
        return y.unflatten(-1, (self.slots, -1)).transpose(-3, -2).flatten(-2)

    def apply(self, op: Tensor, x: Tensor) -> Tensor:
        return self.unpack((op @ self.pack(x).unsqueeze(-1)).squeeze(-1))

    def compose(self, after: Tensor, before: Tensor) -> Tensor:
        return after @ before

    def transpose(self, op: Tensor) -> Tensor:
        return op.mT


@dataclass(frozen=True)
class Flat(Algebra):
    """One dense matrix on the flattened state of any shape: operators ``(..., n, n)``."""

    shape: tuple[int, ...]

    def size(self, x: Tensor) -> Tensor:
        return x.abs().amax(tuple(range(-len(self.shape), 0)), keepdim=True)

    def apply(self, op: Tensor, x: Tensor) -> Tensor:
        flat = x.reshape(*x.shape[: x.ndim - len(self.shape)], math.prod(self.shape))
        return (op @ flat.unsqueeze(-1)).squeeze(-1).reshape(x.shape)

    def compose(self, after: Tensor, before: Tensor) -> Tensor:
        return after @ before

    def transpose(self, op: Tensor) -> Tensor:
        return op.mT


@dataclass(frozen=True)
class Left(Algebra):
    """Left multiplication of a matrix state ``(..., k, v)`` by operators ``(..., k, k)``."""

    def size(self, x: Tensor) -> Tensor:
        return x.abs().amax(-2, keepdim=True)

    def spread(self, idle: Tensor, op: Tensor) -> Tensor:
        return idle.all(-1, keepdim=True)

    def apply(self, op: Tensor, x: Tensor) -> Tensor:
        return op @ x

    def compose(self, after: Tensor, before: Tensor) -> Tensor:
        return after @ before

    def transpose(self, op: Tensor) -> Tensor:
        return op.mT

    def outer(self, cotangent: Tensor, x: Tensor, out: Tensor | None = None) -> Tensor:
        if x.shape[-1] == 1:
            return torch.mul(cotangent, x.mT, out=out)
        return torch.matmul(cotangent, x.mT, out=out)


@dataclass(frozen=True)
class MaxPlus(Algebra):
    """``x ↦ max(a + x, b)`` a coordinate: a diagonal recurrence of logarithms in which a sum is
    replaced by its largest term."""

    multiplies = False

    def apply(self, op: Tensor, x: Tensor) -> Tensor:
        return op + x

    def affine(self, op: Tensor, x: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
        return torch.maximum(op + x, b, out=out)

    def compose(self, after: Tensor, before: Tensor) -> Tensor:
        return after + before

    def order(self, op: Tensor) -> int:
        return 1


@dataclass(frozen=True)
class Right(Algebra):
    """Right multiplication of a matrix state ``(..., K, V)``: by one matrix for all rows,
    operators ``(..., V, V)``, or by one a row, ``(..., K, V, V)``."""

    by_row: bool = False

    def size(self, x: Tensor) -> Tensor:
        return x.abs().amax(-1, keepdim=True)

    def apply(self, op: Tensor, x: Tensor) -> Tensor:
        return (x.unsqueeze(-2) @ op).squeeze(-2) if self.by_row else x @ op

    def compose(self, after: Tensor, before: Tensor) -> Tensor:
        return before @ after

    def transpose(self, op: Tensor) -> Tensor:
        return op.mT
