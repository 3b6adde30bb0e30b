"""Cutting a sequence into chunks that are walked side by side."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class Partition:
    """Chunks of ``length`` steps; only the last in the order of the walk may be shorter.

    Step ``j`` of all chunks is the strided slice ``at(j)`` of the time dimension, so no data is
    moved or padded. With ``reverse`` the walk runs backwards in time: chunk 0 ends the sequence.
    Tensors over chunks, ``(B, P, ...)``, are always in the order of the walk.
    """

    def __init__(self, total: int, length: int, reverse: bool = False):
        self.total, self.length, self.reverse = total, length, reverse
        self.count = -(-total // length)
        self.last = total - (self.count - 1) * length

    def at(self, j: int) -> slice:
        """Time slice that holds step ``j`` of every chunk that has one, in order of time."""
        start = (self.total - 1 - j) % self.length if self.reverse else j
        return slice(start, None, self.length)

    def ordered(self, x: Tensor) -> Tensor:
        """Between order of time and order of the walk, along dimension 1 (its own inverse)."""
        return x.flip(1) if self.reverse else x

    def walk(
        self,
        advance: Callable[[Tensor, slice, slice], Tensor],
        starts: Tensor,
        *,
        chunks: slice = slice(None),
        first: int = 0,
    ) -> Tensor:
        """Advance a range of chunks through their steps ``first, first+1, …``; return their ends.

        ``advance(h, time, rows)`` gets the states of the active chunks, in order of time, the
        time slice, and which rows of that slice belong to them.
        """
        lo, hi, _ = chunks.indices(self.count)
        has_last = hi == self.count
        h = self.ordered(starts)
        done: Tensor | None = None
        for j in range(first, self.length):
            if has_last and j == max(self.last, first) and self.last < self.length:
                # The short chunk ends here: first in time if the walk is reversed, else last.
                done, h = (h[:, :1], h[:, 1:]) if self.reverse else (h[:, -1:], h[:, :-1])
                if h.shape[1] == 0:
                    break
            active = self.count if j < self.last else self.count - 1
            top = min(hi, active)
            rows = slice(active - top, active - lo) if self.reverse else slice(lo, top)
            h = advance(h, self.at(j), rows)
        if done is not None:
            h = torch.cat([done, h] if self.reverse else [h, done], 1)
        return self.ordered(h)
