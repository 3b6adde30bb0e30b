"""The scans as loops in float64: what each of them computes, step by step.

For tests, documentation and doubt. Arguments are those of the scans; autograd runs through them.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _steps(length: int, reverse: bool) -> range:
    return range(length - 1, -1, -1) if reverse else range(length)


def _stack(states: list[Tensor], like: Tensor, reverse: bool) -> Tensor:
    if not states:
        return like.double()
    return torch.stack(states[::-1] if reverse else states, 1)


def _reset(h: Tensor, resets: Tensor | None, t: int) -> Tensor:
    if resets is None:
        return h
    return torch.where(resets[:, t].reshape(-1, *(1,) * (h.ndim - 1)), 0.0, h)


def delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    h0: Tensor | None = None,
    *,
    gamma: Tensor | None = None,
    resets: Tensor | None = None,
    reverse: bool = False,
) -> tuple[Tensor, Tensor]:
    """:func:`~pararnn.scan.delta_scan`, one micro-step after the other."""
    if k.ndim == 4:
        k, v, beta = k.unsqueeze(2), v.unsqueeze(2), beta.unsqueeze(2)
    q, k, v, beta = q.double(), k.double(), v.double(), beta.double()
    batch, length, micro, heads, dk = k.shape
    dv = v.shape[-1]
    h = q.new_zeros((batch, heads, dk, dv)) if h0 is None else h0.double()
    outputs = []
    for t in _steps(length, reverse):
        h = _reset(h, resets, t)
        if gamma is not None:
            h = gamma[:, t, :, None, None].double() * h
        for j in range(micro):
            key = k[:, t, j]
            error = v[:, t, j] - torch.einsum("bhkv,bhk->bhv", h, key)
            h = h + beta[:, t, j, :, None, None] * key.unsqueeze(-1) * error.unsqueeze(-2)
        outputs.append(torch.einsum("bhkv,bhk->bhv", h, q[:, t]))
    return _stack(outputs, q.new_zeros((batch, 0, heads, dv)), reverse), h
