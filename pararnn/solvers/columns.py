"""A scan for linear recurrences whose operators are known by what they do, not as matrices.

A rotation of a plane, or rounds of them in a block, is cheap to apply and dear to write down. So a
chunk's operator is found by walking the S unit states of a channel along with the state itself;
nothing of S×S numbers is formed for a single step. What the products have found is checked, as in
:mod:`pararnn.scan.chunks`: a chunk that does not start where the one before ends is walked again.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .._checks import readable
from ..scan.chunks import ROUNDOFFS, chained, differing, neighbours, per_state

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
        ``(B, T)`` bool or None; where set, the state before the step is zero.
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
    cut = None if mask is None else mask.any(2)
    ends, x = [], x0
    for i in range(count - 1, -1, -1) if reverse else range(count):
        moved = (product[:, i] * x.unsqueeze(-axes - 1)).sum(-axes - 2)
        x = (moved if cut is None else _kept(moved, cut, i)) + end[:, i]
        ends.append(x)
    starts = chained(torch.stack(ends[::-1] if reverse else ends, 1), x0, reverse)
    x = starts
    for t in order:
        x = act(tuple(c[:, :, t] for c in coefficients), _kept(x, mask, t))
        x = torch.add(x, b[:, :, t], out=target[:, :, t])
    if readable(b):
        _settle(act, coefficients, b, starts, mask, axes, reverse, target)
    return out


def _settle(
    act: Act,
    coefficients: tuple[Tensor, ...],
    b: Tensor,
    starts: Tensor,
    resets: Tensor | None,
    axes: int,
    reverse: bool,
    states: Tensor,
) -> None:
    """Walk chunks again, in place, where their start is not the end of the chunk before, row by row.
    A block counts as one: what differs counts relative to its largest state and input."""
    if not b.numel():
        return
    count, steps = b.shape[1:3]
    last, slots = 0 if reverse else -1, -axes - 1
    terms = torch.maximum(states[:, :, last].abs(), b[:, :, last].abs()).amax(slots, keepdim=True)
    limit = ROUNDOFFS * steps * b.shape[slots]
    before, after = neighbours(reverse)
    wrong = differing(states[:, before, last], starts[:, after], terms[:, before], limit)
    if wrong is None:
        return
    wrong = wrong.flatten(2).any(2)
    for edge in reversed(range(count - 1)) if reverse else range(count - 1):
        rows = wrong[:, edge].nonzero().flatten()
        if not len(rows):
            continue
        ended, chunk, following = (
            (edge + 1, edge, edge - 1) if reverse else (edge, edge + 1, edge + 1)
        )
        local = tuple(c[rows, chunk] for c in coefficients)
        given, marks = b[rows, chunk], None if resets is None else resets[rows, chunk]
        walked = torch.empty_like(given)
        _walk(act, local, given, states[rows, ended, last], marks, reverse, walked)
        states[rows, chunk] = walked
        if 0 <= following < count - 1:
            end, given = walked[:, last], given[:, last]
            terms = torch.maximum(end.abs(), given.abs()).amax(slots, keepdim=True)
            next_ = starts[rows, chunk - 1 if reverse else chunk + 1]
            missed = differing(end, next_, terms, limit)
            wrong[rows, following] = False if missed is None else missed.flatten(1).any(1)


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
    return torch.where(per_state(resets[..., t], x), 0.0, x)
