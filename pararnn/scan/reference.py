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


def linear(
    a: Tensor,
    b: Tensor,
    h0: Tensor | None = None,
    *,
    resets: Tensor | None = None,
    reverse: bool = False,
) -> Tensor:
    """:func:`~pararnn.scan.linear_scan`."""
    a, b = a.double(), b.double()
    h = b.new_zeros((b.shape[0], *b.shape[2:])) if h0 is None else h0.double()
    states = []
    for t in _steps(b.shape[1], reverse):
        h = a[:, t] * _reset(h, resets, t) + b[:, t]
        states.append(h)
    return _stack(states, b, reverse)


def matrix(
    a: Tensor,
    b: Tensor,
    h0: Tensor | None = None,
    *,
    resets: Tensor | None = None,
    reverse: bool = False,
) -> Tensor:
    """:func:`~pararnn.scan.matrix_affine_scan`, and :func:`~pararnn.scan.matrix_scan` for inputs
    ``(B, T, n, k)``."""
    a, b = a.double(), b.double()
    vector = b.ndim == a.ndim - 1
    if vector:
        b = b.unsqueeze(-1)
    h = b.new_zeros((b.shape[0], *b.shape[2:]))
    if h0 is not None:
        h = h0.double().unsqueeze(-1) if vector else h0.double()
    states = []
    for t in _steps(b.shape[1], reverse):
        h = a[:, t] @ _reset(h, resets, t) + b[:, t]
        states.append(h)
    stacked = _stack(states, b, reverse)
    return stacked.squeeze(-1) if vector else stacked


def log(
    log_coeffs: Tensor,
    log_values: Tensor,
    h0: Tensor | None = None,
    *,
    resets: Tensor | None = None,
    reverse: bool = False,
) -> Tensor:
    """:func:`~pararnn.scan.parallel_scan_log`, with the logarithm of the state as the state, so
    that nothing overflows on the way."""
    c, v = log_coeffs.double(), log_values.double()
    if h0 is None:
        state, v = v[:, 0], v[:, 1:]
    else:
        state = h0.double().log()
    states = []
    for t in _steps(c.shape[1], reverse):
        if resets is not None:
            state = torch.where(resets[:, t].unsqueeze(-1), -torch.inf, state)
        state = torch.logaddexp(state + c[:, t], v[:, t])
        states.append(state.exp())
    return _stack(states, v, reverse)


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
