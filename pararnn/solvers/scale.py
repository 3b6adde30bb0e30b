"""What a difference of states is measured against: the trajectory, never a constant.

The size of a state is the larger of the state itself and of the largest one that its lane has had
before it, since the last reset. It looks back only, so it keeps causality; it belongs to one lane,
or to the lanes that a recurrent map mixes; and it is not bounded below, but by the smallest normal
number. A state that crosses zero is thus compared to what its rounding errors come from, and a small
trajectory to itself. Where states have been larger than :data:`CAP`, the past counts as that much:
what is small after a large start has to be right too. The fused kernels follow the same rule
(``pararnn.kernels.functions.sized``), and look back over the chunk before.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..scan import Algebra, Block, Dense, Diagonal, Left, Right
from .partition import Partition

CAP = 1.0
"""The most that past states count, so that a large start is forgotten."""
SEEN = 16
"""States at the end of every chunk of a cell that are looked at."""


def spread(size: Tensor, algebra: Algebra | None, dims: int) -> Tensor:
    """Sizes ``(B, P, *state_shape)`` with the largest one of lanes that the recurrence mixes: of a
    head, of a row (or column) of a matrix state that it treats alike, or of a whole state."""
    if isinstance(algebra, Diagonal | Block):
        return size
    if isinstance(algebra, Dense):
        heads = size.unflatten(-1, (algebra.heads, -1))
        return heads.amax(-1, keepdim=True).expand_as(heads).flatten(-2)
    axes = {Right: [-1], Left: [-2]}.get(type(algebra), list(range(-dims, 0)))
    return size.amax(axes, keepdim=True).expand_as(size) if axes else size


def _tails(x: Tensor, part: Partition, seen: int) -> Tensor:
    """The last states of every chunk, ``(B, P, seen, ...)``, in the order of the walk; those that a
    short chunk lacks are zero."""
    whole = part.total // part.length
    if part.reverse:
        first = part.total - whole * part.length
        tails = x[:, first:].unflatten(1, (whole, part.length))[:, :, :seen].flip(1, 2)
        short = x[:, :first][:, :seen].flip(1)
    else:
        tails = x[:, : whole * part.length].unflatten(1, (whole, part.length))[:, :, -seen:]
        short = x[:, whole * part.length :][:, -seen:]
    if short.shape[1] == 0:
        return tails
    missing = x.new_zeros(x.shape[0], seen - short.shape[1], *x.shape[2:])
    return torch.cat([tails, torch.cat([missing, short], 1).unsqueeze(1)], 1)


def _largest(tails: Tensor) -> Tensor:
    """Largest of the last states of every chunk; what is not finite has no size."""
    largest = tails.abs().amax(2)
    if not bool(largest.isfinite().all()):
        largest = torch.where(tails.isfinite(), tails.abs(), 0).amax(2)
    return largest


def _running(x: Tensor) -> Tensor:
    """Running maximum along dimension 1. Where it is long, that of groups is enough, but in the
    first group."""
    if x.shape[1] <= 4 * SEEN:
        return x.cummax(1).values if x.shape[1] else x
    groups = x.shape[1] // SEEN
    before = x[:, : groups * SEEN].unflatten(1, (groups, SEEN)).amax(2).cummax(1).values
    later = before.repeat_interleave(SEEN, 1)[:, : x.shape[1] - SEEN]
    return torch.cat([x[:, :SEEN].cummax(1).values, later], 1)


def _running_since(x: Tensor, reset: Tensor) -> Tensor:
    """Running maximum along dimension 1 over what has the same number ``reset`` ``(B, P)``."""
    back, dims = 1, x.ndim - 2
    while back < x.shape[1]:
        same = reset[:, back:] == reset[:, :-back]
        same = same.reshape(*same.shape, *(1,) * dims)
        later = torch.maximum(x[:, back:], torch.where(same, x[:, :-back], 0))
        x, back = torch.cat([x[:, :back], later], 1), 2 * back
    return x


def sizes(
    states: Tensor,
    first: Tensor,
    part: Partition,
    resets: Tensor | None,
    algebra: Algebra | None,
    cap: float = CAP,
    seen: int = SEEN,
) -> Tensor:
    """What past states count at the end of every chunk, ``(B, P, *state_shape)``, from the ``first``
    state and the states ``(B, T, *state_shape)`` that a walk wrote, of which the last ``seen`` of
    every chunk are looked at. ``resets`` ``(B, T)`` say where a step forgets."""
    seen = min(seen, part.length)
    tails = _tails(states, part, seen)
    start = torch.where(first.isfinite(), first.abs(), 0)
    if resets is None:
        size = _largest(tails)
        size[:, 0] = torch.maximum(size[:, 0], start)
        size = _running(size)
    else:
        count = resets.flip(1).cumsum(1).flip(1) if part.reverse else resets.cumsum(1)
        of = _tails(count, part, seen)
        now, shape = of[:, :, -1], (1,) * (states.ndim - 2)
        since = (of == now.unsqueeze(2)).reshape(*of.shape, *shape)
        size = _largest(torch.where(since, tails, 0))
        held = (now[:, 0] == 0).reshape(now.shape[0], *shape)
        size[:, 0] = torch.maximum(size[:, 0], torch.where(held, start, 0))
        size = _running_since(size, now)
    size = spread(size, algebra, states.ndim - 2)
    return size.clamp(torch.finfo(states.dtype).tiny, cap)


def trajectory(
    states: Tensor, first: Tensor, resets: Tensor | None, algebra: Algebra | None
) -> Tensor:
    """Size of every state ``(B, T, *state_shape)``, to compare two whole trajectories: the largest
    one of its lane since the reset before, up to the end of its block of :data:`SEEN` steps. What a
    sequence begins with may be small by cancellation, and its rounding errors are not."""
    total = states.shape[1]
    if total == 0:
        return states
    part = Partition(total, min(SEEN, total))
    size = sizes(states, first, part, resets, algebra, cap=torch.inf)
    block = spread(_largest(_tails(states, part, part.length)), algebra, states.ndim - 2)
    size = torch.maximum(size, block)
    return size.repeat_interleave(part.length, 1)[:, :total]
