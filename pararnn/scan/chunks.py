"""Chunks of a linear recurrence, walked from starts that products have found, and a check of these.

The product of a chunk's operators can overflow, or underflow and lose its digits, where the states
do neither, and in a recurrence that grows it can cancel. So nothing is taken on trust: after the
last walk, the end of every chunk is compared with the start that was used for the next one. They are
the same number but for rounding, which is at most some roundoffs of

    ``σ_t = |A_t| σ_{t−1} + |b_t|``,

the sum of the absolute values of all terms of a state. Where they differ by more, the next chunk is
walked again, from that end. Whether one is depends on its own lane and on what came before only, so
no later step and no other row changes a bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._checks import readable
from .algebra import Algebra

ROUNDOFFS = 8
"""How many of them a term of a step may add to the difference of an end and a start."""


def per_state(mask: Tensor, state: Tensor) -> Tensor:
    """A mask ``(B, ...)`` with the trailing dimensions of a state."""
    return mask.reshape(*mask.shape, *(1,) * (state.ndim - mask.ndim))


def marks_of(resets: Tensor | None, steps: int, dim: int = 1) -> list[Tensor | None]:
    """The resets of every step along a dimension; None for a step that is known to have none."""
    if resets is None:
        return [None] * steps
    marks = resets.unbind(dim)
    if not readable(resets):
        return list(marks)
    there = resets.movedim(dim, 0).flatten(1).any(1).tolist()
    return [mark if some else None for mark, some in zip(marks, there, strict=True)]


def restarted(x: Tensor, b: Tensor, mark: Tensor | None) -> Tensor:
    """The new state ``x``, in place its input ``b`` where it starts anew."""
    return x if mark is None else torch.where(per_state(mark, x), b, x, out=x)


def walk(
    op: Tensor,
    b: Tensor,
    x: Tensor | None,
    algebra: Algebra,
    resets: Tensor | None,
    reverse: bool,
    states: Tensor,
) -> Tensor:
    """The recurrence as a loop over dimension 1, from the state ``x``, written to ``states``."""
    order = slice(None, None, -1 if reverse else 1)
    steps = (v.unbind(1)[order] for v in (op, b, states))
    for op_t, b_t, target, mark in zip(*steps, marks_of(resets, b.shape[1])[order], strict=True):
        if x is None:
            x = target.copy_(b_t)
        else:
            x = restarted(algebra.affine(op_t, x, b_t, out=target), b_t, mark)
    return states


def chained(ends: Tensor, first: Tensor, reverse: bool) -> Tensor:
    """Starts of all chunks, from the first start and the ends of the chunks, along dimension 1."""
    if reverse:
        return torch.cat([ends[:, 1:], first.unsqueeze(1)], 1)
    return torch.cat([first.unsqueeze(1), ends[:, :-1]], 1)


def neighbours(reverse: bool) -> tuple[slice, slice]:
    """Of chunks along a dimension: those that end at edge i, and those that start there, in the
    direction of the recurrence."""
    before, after = slice(None, -1), slice(1, None)
    return (after, before) if reverse else (before, after)


def differing(end: Tensor, start: Tensor, terms: Tensor, roundoffs: int) -> Tensor | None:
    """Where the end of a chunk is not the start of the next, by more roundoffs of ``terms``, or of
    the least normal number, than given; None if nowhere. Equal infinities and two NaNs are one
    state."""
    info = torch.finfo(end.dtype)
    unit = roundoffs * info.eps / 2
    close = (end - start).abs_() < (terms + info.tiny).mul_(unit)
    if bool(close.all()):
        return None
    found = ~(close | (end == start) | (end.isnan() & start.isnan()))
    return found if bool(found.any()) else None


Place = tuple[Any, ...]
"""Row, chunk and, where lanes can be taken apart, lane."""


@dataclass
class Chunks:
    """Operators, inputs and states ``(B, chunks, steps, ...)`` of a recurrence whose chunks were
    walked from ``starts (B, chunks, ...)``; resets ``(B, chunks, steps)`` or None."""

    op: Tensor
    b: Tensor
    starts: Tensor
    states: Tensor
    resets: Tensor | None
    algebra: Algebra
    reverse: bool

    def settle(self) -> None:
        """Walk chunks again, in place, where their start is not the end of the chunk before."""
        if not self.algebra.multiplies or self.b.numel() == 0:
            return
        edges, size = self.starts.shape[1] - 1, self.algebra.size
        before, after = neighbours(self.reverse)
        end, start = self._last(self.states)[:, before], self.starts[:, after]
        # Some of the terms of σ: who agrees by these agrees.
        terms = torch.maximum(size(end), size(self._last(self.b)[:, before]))
        wrong = differing(end, start, terms, self._roundoffs())
        if wrong is None:
            return
        wrong = wrong if self.algebra.entrywise else wrong.flatten(2).any(2)
        lane: list[Any]
        row, edge, *lane = wrong.nonzero(as_tuple=True)
        place: Place = (row, edge + 1 if self.reverse else edge, *lane)
        wrong[(row, edge, *lane)] = self._misses(place, self.starts[place])
        for i in reversed(range(edges)) if self.reverse else range(edges):
            row, *lane = wrong[:, i].nonzero(as_tuple=True)
            if not len(row):
                continue
            ended, chunk, following = (i + 1, i, i - 1) if self.reverse else (i, i + 1, i + 1)
            place = (row, chunk, *lane)
            before_it: Place = (row, ended, *lane)
            x0 = self._lanes(self.states)[before_it][:, 0 if self.reverse else -1]
            self._lanes(self.states)[place] = self._walked(place, x0)
            if 0 <= following < edges:
                next_edge: Place = (row, following, *lane)
                wrong[next_edge] = self._misses(place, x0)

    def _last(self, x: Tensor) -> Tensor:
        return x[:, :, 0 if self.reverse else -1]

    def _lanes(self, x: Tensor) -> Tensor:
        """Steps of every lane of a chunk, to be picked by row, chunk and lane; all lanes of a chunk
        are one where they cannot be taken apart."""
        return x.movedim(2, -1) if self.algebra.entrywise else x

    def _roundoffs(self) -> int:
        """Roundoffs of ``σ`` by which a walk and a product of as many steps may differ."""
        return ROUNDOFFS * self.b.shape[2] * self.algebra.order(self.op)

    def _walked(self, place: Place, x0: Tensor, absolute: bool = False) -> Tensor:
        """States ``(places, steps, ...)`` from some starts; or ``σ``."""
        op, b = self._lanes(self.op)[place], self._lanes(self.b)[place]
        if absolute:
            op, b, x0 = op.abs(), b.abs().add_(torch.finfo(b.dtype).tiny), x0.abs()
        marks = None if self.resets is None else self.resets[place[:2]]
        return walk(op, b, x0, self.algebra, marks, self.reverse, torch.empty_like(b))

    def _misses(self, place: Place, x0: Tensor) -> Tensor:
        """Whether chunks that were walked from ``x0`` end elsewhere than the next ones start."""
        row, chunk, *lane = place
        last = 0 if self.reverse else -1
        end = self._lanes(self.states)[place][:, last]
        start = self.starts[(row, chunk + (-1 if self.reverse else 1), *lane)]
        terms = self._walked(place, x0, absolute=True)[:, last]
        terms = terms.masked_fill(terms.isinf(), 0)  # too large to say anything
        found = differing(end, start, terms, self._roundoffs())
        if found is None:
            return torch.zeros(len(x0), dtype=torch.bool, device=x0.device)
        return found.reshape(len(x0), -1).any(1)
