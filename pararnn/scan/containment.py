"""NaN and infinity stay in their token and what follows it, though a chunk is computed as a whole.

A product with a zero does not stop a NaN, so one bad token would spoil earlier ones of its chunk.
Here bad numbers are taken out, and what depends on them is set to NaN afterwards.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

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
    step = torch.arange(1, bad.shape[1] + 1, device=bad.device).reshape(1, -1, 1, 1)
    before = torch.where((~start.isfinite()).any(-2), 0, -1).unsqueeze(1)
    last = torch.maximum(torch.where(bad, step, -1).cummax(1).values, before)
    if resets is not None:
        reset = resets[..., None, None]
        spoiled = last >= torch.where(reset, step, 0).cummax(1).values
    else:
        spoiled = last >= 0
    y, end = run([_finite(s) for s in sequences], _finite(start))
    lost = spoiled | q_bad.any(-1, keepdim=True)
    return (
        torch.where(lost, torch.nan, y),
        torch.where(spoiled[:, -1].unsqueeze(-2), torch.nan, end),
    )


def _finite(x: Tensor) -> Tensor:
    return torch.where(x.isfinite(), x, torch.zeros_like(x))
