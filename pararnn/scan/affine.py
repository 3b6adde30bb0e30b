"""Affine scan: every state of ``x_t = A_t x_{t−1} + b_t``, in O(T) work and few, large operations.

The sequence is cut into chunks. All chunks are walked side by side from zero, carrying the
product of their operators; the true chunk starts follow from an affine scan over the chunks
(the same function again); a second walk from the true starts writes the states. Nothing but the
output and one operator a chunk is stored.

A sequence whose steps are large already is walked directly: there is nothing to win. So is a row
whose chunk products are too large for the dtype, as operators beyond 1 can be: the product of a
chunk may overflow where its states, which started from 0, do not.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._checks import readable
from .algebra import Algebra, Diagonal

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
        return _scan(op, b, x0, algebra or Diagonal(), reverse, out)


def _scan(
    op: Tensor, b: Tensor, x0: Tensor | None, algebra: Algebra, reverse: bool, out: Tensor | None
) -> Tensor:
    length = b.shape[1]
    states = torch.empty_like(b, memory_format=torch.contiguous_format) if out is None else out
    if length <= DIRECT or _wide(op, b, algebra):
        return _walk(op, b, x0, algebra, reverse, states)
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
        _scan(op[:, part], b[:, part], x0, algebra, reverse, states[:, part])
        x0 = states[:, length - rest] if reverse else states[:, rest - 1]
        body = slice(0, length - rest) if reverse else slice(rest, None)
        op, b, inner = op[:, body], b[:, body], states[:, body]
    # Step t of every chunk, in the order of the walk.
    ops, bs, targets = (
        v.unflatten(1, (count, chunk)).unbind(2)[:: -1 if reverse else 1] for v in (op, b, inner)
    )
    product, x = algebra.compose(ops[1], ops[0]), algebra.affine(ops[1], bs[0], bs[1])
    for op_t, b_t in zip(ops[2:], bs[2:], strict=True):
        x = algebra.affine(op_t, x, b_t)
        product = algebra.compose(op_t, product)
    x = _chunk_starts(product, x, x0, algebra, reverse)
    for op_t, b_t, target in zip(ops, bs, targets, strict=True):
        x = algebra.affine(op_t, x, b_t, out=target)
    for row in _overflown(product, op, algebra):
        _walk(op[row], b[row], None if x0 is None else x0[row], algebra, reverse, inner[row])
    return states


def _walk(
    op: Tensor, b: Tensor, x: Tensor | None, algebra: Algebra, reverse: bool, states: Tensor
) -> Tensor:
    """The loop itself."""
    order = -1 if reverse else 1
    steps = zip(op.unbind(1)[::order], b.unbind(1)[::order], states.unbind(1)[::order], strict=True)
    for op_t, b_t, target in steps:
        x = target.copy_(b_t) if x is None else algebra.affine(op_t, x, b_t, out=target)
    return states


def _wide(op: Tensor, b: Tensor, algebra: Algebra) -> bool:
    work = b[:, 0].numel() * algebra.order(op)
    return work >= WIDE.get(b.device.type, WIDE["cuda"])


def _overflown(product: Tensor, op: Tensor, algebra: Algebra) -> list[slice]:
    """Rows where a chunk's product is not finite though its operators are: their states may be. A NaN
    that was given is no such case, and other rows keep their bits. None, where nobody can look."""
    if not readable(product) or algebra.finite(product):
        return []
    rows = [slice(i, i + 1) for i in range(product.shape[0])]
    return [r for r in rows if not algebra.finite(product[r]) and algebra.finite(op[r])]


def _chunk_starts(
    product: Tensor, ends: Tensor, x0: Tensor | None, algebra: Algebra, reverse: bool
) -> Tensor:
    """True start of every chunk, from ends that were computed with zero starts."""
    first = torch.zeros_like(ends[:, 0]) if x0 is None else x0
    after = _scan(product, ends, first, algebra, reverse, None)
    if reverse:
        return torch.cat([after[:, 1:], first.unsqueeze(1)], 1)
    return torch.cat([first.unsqueeze(1), after[:, :-1]], 1)
