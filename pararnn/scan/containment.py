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
    q_bad, k_bad, v_bad, *others = ((~s.isfinite()).any(2) for s in sequences)
    head = k_bad.any(-1, keepdim=True)
    for bad in others:
        head = head | bad
    bad = v_bad | head  # (B, T, H, dv): a value spoils its column of the state, a key all columns
    before = (~start.isfinite()).any(-2)
    # How many came since the state was last forgotten.
    count, begin = bad.to(start.dtype), before.to(start.dtype)
    spoiled = cast(Tensor, linear_scan(torch.ones_like(count), count, begin, resets=resets)) > 0
    y, end = run([_finite(s) for s in sequences], _finite(start))
    lost = spoiled | q_bad.any(-1, keepdim=True)
    return (
        torch.where(lost, torch.nan, y),
        torch.where(spoiled[:, -1].unsqueeze(-2), torch.nan, end),
    )


def _finite(x: Tensor) -> Tensor:
    return torch.where(x.isfinite(), x, torch.zeros_like(x))
