"""A scan for linear recurrences whose operators are known by what they do, not as matrices.

A rotation of a plane, or rounds of them in a block, is cheap to apply and dear to write down. So a
chunk's operator is found by walking the S unit states of a channel along with the state itself;
nothing of S×S numbers is formed for a single step.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Act = Callable[[tuple[Tensor, ...], Tensor], Tensor]
DIRECT = 32  # at most this many steps are walked directly


def column_scan(
    act: Act,
    coefficients: tuple[Tensor, ...],
    b: Tensor,
    x0: Tensor,
    resets: Tensor | None,
    *,
    axes: int,
    reverse: bool,
    out: Tensor,
) -> Tensor:
    """States of ``x_t = A_t x_{t−1} + b_t`` (``reverse``: ``x_t = A_t x_{t+1} + b_t``).

    Parameters
    ----------
    act
        ``act(coefficients, x)``: what ``A`` does to states ``(..., S, *axes)``.
    coefficients
        Of every step, ``(B, T, *axes)`` each.
    b
        Inputs ``(B, T, S, *axes)``.
    x0
        State before the first step (``reverse``: after the last), ``(B, S, *axes)``.
    resets
        ``(B, T)`` bool or None; where set, ``A_t`` is zero.
    axes
        Number of axes behind the slots.
    out
        Where the states are written.
    """
    length, slots = b.shape[1], b.shape[-axes - 1]
    if length <= DIRECT:
        return _walk(act, coefficients, b, x0, resets, reverse, out)
    chunk = round(length**0.5)
    count = length // chunk
    rest = length - count * chunk
    if rest:  # what does not fill a chunk is walked first, so that all chunks are equal
        part = slice(length - rest, None) if reverse else slice(0, rest)
        local = tuple(c[:, part] for c in coefficients)
        first = None if resets is None else resets[:, part]
        _walk(act, local, b[:, part], x0, first, reverse, out[:, part])
        x0 = out[:, length - rest] if reverse else out[:, rest - 1]
        body = slice(0, length - rest) if reverse else slice(rest, None)
    else:
        body = slice(None)
    coefficients = tuple(c[:, body].unflatten(1, (count, chunk)) for c in coefficients)
    b, target = (v[:, body].unflatten(1, (count, chunk)) for v in (b, out))
    mask = None if resets is None else resets[:, body].unflatten(1, (count, chunk))
    order = range(chunk - 1, -1, -1) if reverse else range(chunk)

    # S unit states, and the state from zero, side by side in the dimension before the slots.
    unit = torch.eye(slots, dtype=b.dtype, device=b.device).reshape(slots, slots, *(1,) * axes)
    columns = torch.cat([unit, torch.zeros_like(unit[:1])])
    columns = columns.expand(*b.shape[:2], slots + 1, slots, *b.shape[-axes:])
    for t in order:
        local = tuple(c[:, :, t].unsqueeze(-axes - 1) for c in coefficients)
        columns = act(local, _kept(columns, mask, t))
        columns.select(-axes - 2, slots).add_(b[:, :, t])
    product, end = columns.split([slots, 1], -axes - 2)
    end = end.squeeze(-axes - 2)
    starts, x = [], x0
    for i in range(count - 1, -1, -1) if reverse else range(count):
        starts.append(x)
        x = (product[:, i] * x.unsqueeze(-axes - 1)).sum(-axes - 2) + end[:, i]
    x = torch.stack(starts[::-1] if reverse else starts, 1)
    for t in order:
        x = act(tuple(c[:, :, t] for c in coefficients), _kept(x, mask, t))
        x = torch.add(x, b[:, :, t], out=target[:, :, t])
    for row in _overflown(columns, coefficients, b):
        local = tuple(c[row].flatten(1, 2) for c in coefficients)
        every = None if mask is None else mask[row].flatten(1, 2)
        _walk(act, local, b[row].flatten(1, 2), x0[row], every, reverse, out[row, body])
    return out


def _overflown(columns: Tensor, coefficients: tuple[Tensor, ...], b: Tensor) -> list[slice]:
    """Rows where a product over a chunk is not finite though all that was given is: their states may
    be. Rows with a NaN are none of them. Only the CPU looks."""
    if b.device.type != "cpu" or bool(columns.isfinite().all()):
        return []
    bad = ~columns.isfinite().flatten(1).all(1)
    for given in (*coefficients, b):
        bad &= given.isfinite().flatten(1).all(1)
    return [slice(i, i + 1) for i in bad.nonzero().flatten().tolist()]


def _walk(
    act: Act,
    coefficients: tuple[Tensor, ...],
    b: Tensor,
    x: Tensor,
    resets: Tensor | None,
    reverse: bool,
    out: Tensor,
) -> Tensor:
    """The loop itself."""
    length = b.shape[1]
    for t in range(length - 1, -1, -1) if reverse else range(length):
        x = act(tuple(c[:, t] for c in coefficients), _kept(x, resets, t))
        x = torch.add(x, b[:, t], out=out[:, t])
    return out


def _kept(x: Tensor, resets: Tensor | None, t: int) -> Tensor:
    """``x`` with zero where step ``t`` restarts. The mask has time last."""
    if resets is None:
        return x
    mask = resets[..., t]
    return torch.where(mask.reshape(*mask.shape, *(1,) * (x.ndim - mask.ndim)), 0.0, x)
