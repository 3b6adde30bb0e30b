"""The two recurrences that the engine walks: the cell itself, and its linearization."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from ..scan import Algebra
from ..scan.chunks import per_state
from ..scan.inputs import cut
from .partition import Partition
from .recurrence import Linearization, Recurrence
from .scale import CAP, SEEN, sizes


class _Walker:
    """What both walkers share: chunk bookkeeping, writing, carrying operators."""

    recurrence: Recurrence
    resets: Tensor | None
    partition: Partition
    out: Tensor
    cap, seen = CAP, SEEN  # of past states; see sizes

    def _advance(self, h: Tensor, time: slice, rows: slice, out: Tensor | None) -> Tensor:
        raise NotImplementedError

    def _advance_with_operator(
        self, h: Tensor, time: slice, rows: slice, kind: str, out: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def algebra(self, kind: str) -> Algebra | None:
        return self.recurrence.algebra(kind)

    def _resets_at(self, time: slice, rows: slice) -> Tensor | None:
        return None if self.resets is None else self.resets[:, time][:, rows]

    def cuts(self) -> Tensor | None:
        """Chunks ``(B, P)``, in the order of the walk, whose end does not depend on their start; None
        without resets."""
        if self.resets is None:
            return None
        part = self.partition
        marks = part.ordered(self.resets)
        marks = torch.nn.functional.pad(marks, (0, part.count * part.length - part.total))
        return marks.unflatten(1, (part.count, part.length)).any(2)

    def walk(
        self,
        starts: Tensor,
        *,
        write: bool,
        kind: str = "none",
        chunks: slice = slice(None),
        first: int = 0,
        keep: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        algebra = self.algebra(kind)
        product: Tensor | None = None
        finished: list[Tensor] = []
        part = self.partition

        def advance(h: Tensor, time: slice, rows: slice) -> Tensor:
            nonlocal product
            target = self.out[:, time][:, rows] if write else None
            direct = target if keep is None else None
            if algebra is None:
                h = self._advance(h, time, rows, direct)
            else:
                h, op = self._advance_with_operator(h, time, rows, kind, direct)
                if product is None:
                    product = op
                else:
                    if product.shape[1] > op.shape[1]:  # the short chunk has ended
                        reverse = part.reverse
                        finished.append(product[:, :1] if reverse else product[:, -1:])
                        product = product[:, 1:] if reverse else product[:, :-1]
                    product = cut(algebra.compose(op, product), self._resets_at(time, rows))
            if target is not None and h is not target:
                target.copy_(h if keep is None else torch.where(per_state(keep, h), target, h))
            return h

        ends = part.walk(advance, starts, chunks=chunks, first=first)
        if product is None:
            return ends, None
        if finished:
            product = torch.cat([*finished, product] if part.reverse else [product, *finished], 1)
        return ends, part.ordered(product)

    def correct(self, mismatch: Tensor, starts: Tensor) -> Tensor | None:
        return None

    def project(self, starts: Tensor) -> Tensor:
        return starts

    def sizes(self, first: Tensor) -> Tensor:
        part, algebra = self.partition, self.recurrence.algebra("exact")
        return sizes(self.out, first, part, self.resets, algebra, self.cap, self.seen)


class CellWalker(_Walker):
    """``h ← f(h, u_t)``, restarted from zero where ``resets`` is set."""

    def __init__(
        self,
        recurrence: Recurrence,
        u: Tensor,
        resets: Tensor | None,
        partition: Partition,
        out: Tensor,
        box: tuple[Tensor, Tensor] | None,
        linear_solver: Callable[[Tensor, Tensor], Tensor],
    ):
        self.recurrence, self.u, self.resets = recurrence, u, resets
        self.partition, self.out, self.box = partition, out, box
        self.linear_solver = linear_solver

    def _advance(self, h: Tensor, time: slice, rows: slice, out: Tensor | None) -> Tensor:
        h = cut(h, self._resets_at(time, rows))
        return self.recurrence.step(h, self.u[:, time][:, rows], out)

    def _advance_with_operator(
        self, h: Tensor, time: slice, rows: slice, kind: str, out: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        resets = self._resets_at(time, rows)
        u = self.u[:, time][:, rows]
        h, op = self.recurrence.step_with_operator(cut(h, resets), u, kind, out)
        return h, cut(op, resets)

    def correct(self, mismatch: Tensor, starts: Tensor) -> Tensor | None:
        """Exact Newton on single steps with factorized products: the linearized recurrence."""
        return self.linear_solver(mismatch, starts) if self.partition.length == 1 else None

    def project(self, starts: Tensor) -> Tensor:
        return starts if self.box is None else torch.clamp(starts, *self.box)


class LinearWalker(_Walker):
    """``x ← J_t x + b_t`` forwards, or ``x ← J_tᵀ x + b_t`` backwards.

    The states of a linear recurrence have no units, so their past counts as large as it is; and all
    of it is looked at, as inputs may be zero but at a few steps.
    """

    cap, seen = math.inf, sys.maxsize

    def __init__(self, linear: Linearization, b: Tensor, partition: Partition, out: Tensor):
        self.recurrence, self.resets = linear.recurrence, linear.resets
        self.linear, self.b, self.partition, self.out = linear, b, partition, out

    def _advance(self, h: Tensor, time: slice, rows: slice, out: Tensor | None) -> Tensor:
        local = tuple(c[:, time][:, rows] for c in self.linear.coefficients)
        act = self.recurrence.transpose if self.partition.reverse else self.recurrence.tangent
        moved = cut(act(local, h), self._resets_at(time, rows))
        return torch.add(moved, self.b[:, time][:, rows], out=out)

    def _advance_with_operator(
        self, h: Tensor, time: slice, rows: slice, kind: str, out: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        local = tuple(c[:, time][:, rows] for c in self.linear.coefficients)
        op = self.recurrence.operator(local, kind, h)
        if self.partition.reverse:
            op = cast(Algebra, self.algebra(kind)).transpose(op)
        return self._advance(h, time, rows, out), cut(op, self._resets_at(time, rows))
