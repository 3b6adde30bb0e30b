"""NaN and infinity stay in their token and what follows it, though a chunk is computed as a whole.

A product with a zero does not stop a NaN, so one bad token would spoil earlier ones of its chunk.
Here bad numbers are taken out, and what depends on them is set to NaN afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from .linear import linear_scan

Run = Callable[[list[Tensor], Tensor], tuple[Tensor, Tensor]]


def contained(
    run: Run, sequences: list[Tensor], start: Tensor, resets: Tensor | None
) -> tuple[Tensor, Tensor]:
    """``run(sequences, start)`` without the numbers that are not finite, and NaN where these reach.

    ``sequences`` are queries, keys, values, step sizes and, if there are any, decays, all of shape
    ``(B, T, m, H, d)``; ``start`` is ``(B, H, dk, dv)``, ``resets`` ``(B, T)``.
    """
    q, k, v, *others = masks = [s.isfinite() for s in sequences]
    head = k.all(2).all(-1, keepdim=True)
    for mask in others:
        head = head & mask.all(2)
    # A value spoils its column of the state, a key all columns.
    fine = v.all(2) & head  # (B, T, H, dv)
    begin = start.isfinite()
    spoiled = since(~fine, resets, ~begin.all(-2))
    given = [torch.where(mask, s, 0.0) for mask, s in zip(masks, sequences, strict=True)]
    y, end = run(given, torch.where(begin, start, 0.0))
    lost = spoiled | ~q.all(2).all(-1, keepdim=True)
    return (
        torch.where(lost, torch.nan, y),
        torch.where(spoiled[:, -1].unsqueeze(-2), torch.nan, end),
    )


def since(bad: Tensor, resets: Tensor | None, before: Tensor | None = None) -> Tensor:
    """Whether there was a bad number up to each step, or ``before`` them, since the state was last
    forgotten."""
    before = torch.zeros_like(bad[:, 0]) if before is None else before
    if resets is None:
        length = bad.shape[1]
        time = torch.arange(length, dtype=torch.int32, device=bad.device)
        time = time.reshape(-1, *(1,) * (bad.ndim - 2))
        first = torch.where(bad, time, length).amin(1).masked_fill(before, 0)
        return time >= first.unsqueeze(1)
    count, begin = bad.float(), before.float()
    return cast(Tensor, linear_scan(torch.ones_like(count), count, begin, resets=resets)) > 0
