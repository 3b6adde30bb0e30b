"""Where the chunks of a delta rule have not the range of its states, and the loop there.

Products inside a chunk can overflow where no state does, or underflow where the state is far above
what they lose; and where a state overflows, a product with the zero of a reset is NaN. From the
first token that this befalls up to the next reset, a head is walked one micro-step after the other,
and its chunks do not see these tokens. Which tokens they are depends on their own head and on what
came since the last reset, so nothing later and nothing before a reset changes a bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from .containment import since
from .linear import linear_scan

Run = Callable[[list[Tensor], Tensor], tuple[Tensor, Tensor]]
SPARE = 24
"""Binary digits that a product keeps above the least normal number, not to be doubtful."""


def in_range(
    run: Run, sequences: list[Tensor], start: Tensor, resets: Tensor | None, size: int
) -> tuple[Tensor, Tensor]:
    """``run(sequences, start)`` with the range of the loop, for numbers that are all finite.

    Arguments are as in :func:`~.containment.contained`; ``size`` is the number of tokens of a chunk.
    """
    y, end = run(sequences, start)
    bad = ~(y.isfinite().all(-1).all(1) & end.isfinite().flatten(2).all(-1))  # (B, H)
    bad |= faint(sequences, start, size)
    if not bool(bad.any()):
        return y, end
    place = bad.nonzero(as_tuple=True)
    lanes = [s.transpose(1, 3)[place].transpose(1, 2) for s in sequences]  # (N, T, m, d)
    first = start[place]
    marks = None if resets is None else resets[place[0]]
    with torch.no_grad():
        own = [x.detach() for x in lanes]
        walked = since(
            overflowing(own, marks, size) | fading(own, first.detach(), marks, size), marks
        )
    found, last, dead, mute, close = walk(lanes, first, marks)
    walked = walked | dead
    silent = torch.zeros(y.shape[:3], dtype=torch.bool, device=y.device)
    silent.transpose(1, 2)[place] = mute
    # What the tokens before are too large for, and, if that is not all, the whole of a head.
    for more in (close, torch.ones_like(close), None):
        mask = torch.zeros_like(silent)
        mask.transpose(1, 2)[place] = walked
        q, *others = without(sequences, mask)
        y, end = run([q.masked_fill(silent[:, :, None, :, None], 0), *others], start)
        fine = y.isfinite().all(-1).all(1) & end.isfinite().flatten(2).all(-1)
        if more is None or bool(fine.all()):
            break
        walked = walked | (more & ~fine[place].unsqueeze(1))
    chosen = torch.where((walked | mute).unsqueeze(-1), found, y.transpose(1, 2)[place])
    y = y.transpose(1, 2).index_put(place, chosen).transpose(1, 2)
    kept = torch.where(walked[:, -1, None, None], last, end[place])
    return y, end.index_put(place, kept)


def without(sequences: Sequence[Tensor], mask: Tensor) -> list[Tensor]:
    """The sequences ``(B, T, m, H, d)`` with tokens that do nothing at a mask ``(B, T, H)``."""
    there = mask[:, :, None, :, None]
    fill = (0.0, 0.0, 0.0, 0.0, 1.0)
    return [s.masked_fill(there, f) for s, f in zip(sequences, fill, strict=False)]


def walk(
    lanes: list[Tensor], start: Tensor, resets: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The loop: outputs ``(N, T, dv)`` and the last state ``(N, dk, dv)``; and where ``(N, T)`` a
    state since the last reset is not finite, where the output of a finite state is not, and where
    the loop was near the largest number. What is not finite is not differentiated."""
    y, end, sizes = _loop(lanes, start, resets)
    most = torch.finfo(sizes.dtype).max
    dead = since(~sizes.isfinite(), resets)
    mute = ~y.detach().isfinite().all(-1) & ~dead
    close = since(~(sizes < most / 64 / start.shape[-2]), resets)
    if bool((dead | mute).any()):
        q, *others = without([x.unsqueeze(3) for x in lanes], dead.unsqueeze(-1))
        q = q.masked_fill(mute[:, :, None, None, None], 0)
        fine, last, _ = _loop([x.squeeze(3) for x in (q, *others)], start, resets)
        y = torch.where((dead | mute).unsqueeze(-1), y.detach(), fine)
        end = torch.where(dead[:, -1, None, None], end.detach(), last)
    return y, end, dead, mute, close


def _loop(
    lanes: list[Tensor], state: Tensor, resets: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs, the last state, and the largest entry of a state or an error at every token."""
    q, k, v, beta, *gamma = lanes
    outputs, sizes = [], []
    for t in range(q.shape[1]):
        if gamma:
            state = gamma[0][:, t] * state
        if resets is not None:
            state = torch.where(resets[:, t, None, None], 0.0, state)
        size = state.detach().abs().amax((1, 2))
        for j in range(k.shape[2]):
            key = k[:, t, j].unsqueeze(-1)
            error = v[:, t, j].unsqueeze(-2) - key.mT @ state
            state = state + (beta[:, t, j].unsqueeze(-1) * key) * error
            for x in (error, state):
                size = torch.maximum(size, x.detach().abs().amax((1, 2)))
        outputs.append((q[:, t] @ state).squeeze(-2))
        sizes.append(size)
    return torch.stack(outputs, 1), state, torch.stack(sizes, 1)


# -- doubtful tokens ---------------------------------------------------------------------------


def _chunked(x: Tensor, size: int, fill: float) -> Tensor:
    """``(N, T, ...)`` as ``(N, chunks, size, ...)``."""
    short = -x.shape[1] % size
    x = pad(x, (0, 0) * (x.ndim - 2) + (0, short), value=fill) if short else x
    return x.unflatten(1, (-1, size))


def overflowing(lanes: list[Tensor], resets: Tensor | None, size: int) -> Tensor:
    """Tokens ``(N, T)`` at which a product of their chunk is not finite: of decays, of keys, or in
    the inverse of the system; of nothing that a reset has cut off."""
    q, k, _, beta, *gamma = (_chunked(x, size, 0.0) for x in lanes)
    micro = k.shape[3]
    cuts = torch.zeros(q.shape[:3], dtype=torch.bool, device=q.device)
    if resets is not None:
        cuts = _chunked(resets, size, False)
    piece = cuts.cumsum(2)
    before = torch.ones(size, size, dtype=torch.bool, device=q.device).tril()
    seen = before & (piece.unsqueeze(-1) == piece.unsqueeze(-2))  # (N, chunks, C, C)
    left = torch.ones(seen.shape, dtype=q.dtype, device=q.device)
    bad = torch.zeros(cuts.shape, dtype=torch.bool, device=q.device)
    if gamma:
        g = _chunked(lanes[4], size, 1.0)[..., 0, 0]
        after = torch.where(before.tril(-1), g.unsqueeze(-1), 1.0).cumprod(-2)
        left = torch.where(seen, after, 0.0)
        through = torch.where(piece == 0, torch.where(cuts, 0.0, g).cumprod(2), 0.0)
        bad |= ~through.isfinite()
    bad |= ~left.isfinite().all(-1)

    def steps(x: Tensor) -> Tensor:
        return x.repeat_interleave(micro, -1)

    k, w = (x.flatten(2, 3) for x in (k, beta * k))
    seen, left = steps(seen), steps(left)
    scores = torch.where(seen, (q.flatten(2, 3) @ w.mT) * left, 0.0)
    bad |= ~scores.isfinite().all(-1)
    seen, left = (x.repeat_interleave(micro, -2) for x in (seen, left))
    system = torch.where(seen, (k @ w.mT) * left, 0.0).tril(-1)
    inverse = torch.zeros_like(system)
    inverse.diagonal(dim1=-2, dim2=-1).fill_(1)
    for i in range(1, system.shape[-1]):
        weights = system[..., i, :i].unsqueeze(-1)
        rows = torch.where(seen[..., i, :i].unsqueeze(-1), weights * inverse[..., :i, :i], 0.0)
        inverse[..., i, :i] = torch.where(seen[..., i, :i], -rows.sum(-2), 0.0)
    rows = system.isfinite().all(-1) & inverse.isfinite().all(-1) & w.isfinite().all(-1)
    bad |= ~rows.unflatten(-1, (size, micro)).all(-1)
    return bad.flatten(1)[:, : lanes[0].shape[1]]


def faint(sequences: list[Tensor], start: Tensor, size: int) -> Tensor:
    """Heads ``(B, H)`` whose states may be near what underflows in a product of decays. Few operations
    for those that forget nothing, or only what new writes are far above."""
    nowhere = torch.zeros(start.shape[:2], dtype=torch.bool, device=start.device)
    if len(sequences) < 5 or start.numel() == 0:
        return nowhere
    with torch.no_grad():
        q, k, v, beta, gamma = (s.detach() for s in sequences)
        loss = gamma[:, :, 0, :, 0].abs().log2_().neg_()
        loss = loss.masked_fill_(loss.isinf(), 0)
        falls = _chunked(loss.clamp_min(0), size, 0.0).sum(2).amax(1)
        room = -_least(start.dtype) - SPARE
        small = torch.minimum(_floors(q), torch.minimum(_floors(k), _floors(beta * k)))
        falls = falls - small.amin(1)
        if not bool((falls > room).any()):
            return nowhere
        rises = _chunked((-loss).clamp_min(0), size, 0.0).sum(2).amax(1)
        least, most = sizes([q, k, v, beta, gamma], start.detach())
        lost = most.amax(1).log2() + rises + _least(start.dtype) + SPARE
        return (falls > room) & ~(lost < least.amin(1).log2())


def _least(dtype: torch.dtype) -> int:
    """Binary logarithm of the least normal number."""
    return -126 if dtype == torch.float32 else -1022


def _floors(x: Tensor) -> Tensor:
    """Binary logarithms ``(B, T, H)`` of the largest entries of vectors ``(B, T, m, H, d)``, the
    least of a token; at most 0, which is that of a vector of zeros."""
    top = x.abs().amax(-1).log2()
    return top.masked_fill(top.isinf(), 0).clamp_max(0).amin(2)


def sizes(
    sequences: list[Tensor], start: Tensor, resets: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Of every token ``(B, T, H)``, a number below the sum of the absolute terms of a state, and one
    above the norm of the state."""
    _, k, v, beta, gamma = sequences
    gamma, beta = gamma[:, :, 0, :, 0].abs(), beta.squeeze(-1)
    added = beta.abs() * k.abs().amax(-1) * v.abs().amax(-1)
    least = linear_scan(gamma, added.amax(2), start.abs().amax((-2, -1)), resets=resets)
    long = k.norm(dim=-1)
    growth = (1 - beta * long.square()).abs().clamp_min(1)  # of a micro-step
    added = beta.abs() * long * v.norm(dim=-1)
    total = torch.zeros_like(gamma)
    for j in range(k.shape[2]):
        total = growth[:, :, j] * total + added[:, :, j]
    most = linear_scan(gamma * growth.prod(2), total, start.flatten(2).norm(dim=-1), resets=resets)
    return cast(Tensor, least), cast(Tensor, most)


def fading(lanes: list[Tensor], start: Tensor, resets: Tensor | None, size: int) -> Tensor:
    """Tokens ``(N, T)`` whose state may be near what underflows in a product of decays since the chunk
    began, or since the last decay of 0 in it."""
    length = lanes[0].shape[1]
    nowhere = torch.zeros(lanes[0].shape[:2], dtype=torch.bool, device=start.device)
    if len(lanes) < 5:
        return nowhere
    wide = [x.unsqueeze(3) for x in lanes]
    least, most = (x.squeeze(-1) for x in sizes(wide, start.unsqueeze(1), resets))
    gain = lanes[4][:, :, 0, 0].abs()
    gain = gain if resets is None else gain.masked_fill(resets, 0)
    q, k, _, beta, _ = wide
    small = torch.minimum(_floors(q), torch.minimum(_floors(k), _floors(beta * k))).squeeze(-1)
    begin = torch.cat([start.flatten(1).norm(dim=-1, keepdim=True), most[:, :-1]], 1)
    gains, floors, states, above, starts = (
        _chunked(x, size, 1.0).unbind(2) for x in (gain.log2(), small, least.log2(), most, begin)
    )
    zero = torch.zeros_like(gains[0])
    fall, worst, rise, top, low, peak = zero, zero, zero, zero, zero, starts[0]
    found = []
    for g, s, state, largest in zip(gains, floors, states, above, strict=True):
        fresh = g.isinf()
        fall, rise = (
            torch.where(fresh, 0.0, x) for x in (fall.clamp_max(0) + g, rise.clamp_min(0) + g)
        )
        worst = torch.where(fresh, 0.0, torch.minimum(worst, fall))
        top = torch.where(fresh, 0.0, torch.maximum(top, rise))
        low = torch.where(fresh, s, torch.minimum(low, s))
        peak = torch.where(fresh, largest, torch.maximum(peak, largest))
        room = _least(start.dtype) + SPARE
        lost = peak.log2() + top + room
        found.append((worst + low < room) & ~(lost < state))
    return torch.stack(found, 2).flatten(1)[:, :length]
