"""Affine scan: every state of ``x_t = A_t x_{t−1} + b_t``, in O(T) work and few, large operations.

The sequence is cut into chunks. All chunks are walked side by side from zero, carrying the
product of their operators; the true chunk starts follow from an affine scan over the chunks
(the same function again); a second walk from the true starts writes the states. Nothing but the
output and one operator a chunk is stored. What the products have found is checked
(:mod:`.chunks`), so their range is no limit.

A sequence whose steps are large already is walked directly: there is nothing to win.

Where a reset is set, the state is the step's input, selected: neither what came before it nor the
operator is multiplied by zero, which a NaN or an infinity would survive.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._checks import readable
from .algebra import Algebra, Diagonal
from .chunks import Chunks, chained, marks_of, per_state, restarted, walk

DIRECT = 32  # at most this many steps are walked directly, without chunks
# Numbers in a step, times what it costs to compose one, from which a direct walk is faster.
WIDE = {"cpu": 1 << 13, "cuda": 1 << 23}
PIECE = 1 << 17  # states of all chunks at a time that fit the cache of a CPU


def affine_scan(
    op: Tensor,
    b: Tensor,
    x0: Tensor | None = None,
    *,
    algebra: Algebra | None = None,
    resets: Tensor | None = None,
    reverse: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """States of a linear recurrence over dimension 1.

    Parameters
    ----------
    op
        Operators ``(B, T, ...)`` of the algebra.
    b
        Inputs ``(B, T, *state_shape)``.
    x0
        Initial state ``(B, *state_shape)``; zero if not given. With ``reverse`` it is the state
        after the last step.
    algebra
        How operators act; :class:`~pararnn.scan.algebra.Diagonal` if not given.
    resets
        ``(B, T)`` bool; where set, the state is the step's input, whatever came before.
    reverse
        Run from the last step to the first: ``x_t = A_t x_{t+1} + b_t``.
    out
        Tensor to write the states to, of the shape of ``b``.

    Returns
    -------
    Tensor
        States ``(B, T, *state_shape)``. Not recorded by autograd.

    Raises
    ------
    ValueError
        If ``op`` and ``b`` differ in batch or length.
    """
    if op.shape[:2] != b.shape[:2]:
        raise ValueError(
            f"op and b: got leading shapes {tuple(op.shape[:2])} and {tuple(b.shape[:2])}, "
            "expected equal (batch, time)."
        )
    with torch.no_grad():
        return _scan(op, b, x0, algebra or Diagonal(), resets, reverse, out)


def _scan(
    op: Tensor,
    b: Tensor,
    x0: Tensor | None,
    algebra: Algebra,
    resets: Tensor | None,
    reverse: bool,
    out: Tensor | None,
) -> Tensor:
    length = b.shape[1]
    states = torch.empty_like(b, memory_format=torch.contiguous_format) if out is None else out
    if length <= DIRECT or _wide(op, b, algebra):
        return walk(op, b, x0, algebra, resets, reverse, states)
    # About 3·T^0.4 operations on large pieces at the top, and few below, instead of T small ones.
    chunk = max(2, round(length**0.4))
    if b.device.type == "cpu":
        chunk = max(chunk, min(b.numel() // PIECE, length // 8))
    count = length // chunk
    # The remainder that does not fill a chunk is walked first, so that all chunks are equal.
    rest = length - count * chunk
    inner = states
    if rest:
        part = slice(length - rest, None) if reverse else slice(0, rest)
        first = None if resets is None else resets[:, part]
        _scan(op[:, part], b[:, part], x0, algebra, first, reverse, states[:, part])
        x0 = states[:, length - rest] if reverse else states[:, rest - 1]
        body = slice(0, length - rest) if reverse else slice(rest, None)
        op, b, inner = op[:, body], b[:, body], states[:, body]
        resets = None if resets is None else resets[:, body]
    op, b, inner = (v.unflatten(1, (count, chunk)) for v in (op, b, inner))
    mask = None if resets is None else resets.unflatten(1, (count, chunk))
    # Step t of every chunk, in the order of the walk.
    order = slice(None, None, -1 if reverse else 1)
    ops, bs, targets = (v.unbind(2)[order] for v in (op, b, inner))
    marks = marks_of(mask, chunk, 2)[order]
    product, x = ops[0], bs[0]
    for op_t, b_t, mark in zip(ops[1:], bs[1:], marks[1:], strict=True):
        x = restarted(algebra.affine(op_t, x, b_t), b_t, mark)
        product = algebra.compose(op_t, product)
    cut = None
    if mask is not None:
        cut = mask.any(2)
        product = product.masked_fill(per_state(cut, product), 0)
    first = torch.zeros_like(x[:, 0]) if x0 is None else x0
    starts = chained(_scan(product, x, first, algebra, cut, reverse, None), first, reverse)
    x = starts
    for op_t, b_t, target, mark in zip(ops, bs, targets, marks, strict=True):
        x = restarted(algebra.affine(op_t, x, b_t, out=target), b_t, mark)
    if readable(b):
        Chunks(op, b, starts, inner, mask, algebra, reverse).settle()
    return states


def _wide(op: Tensor, b: Tensor, algebra: Algebra) -> bool:
    work = b[:, 0].numel() * algebra.order(op)
    return work >= WIDE.get(b.device.type, WIDE["cuda"])
