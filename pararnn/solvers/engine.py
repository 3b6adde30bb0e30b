"""The engine: multiple shooting on the starts of chunks, for any recurrence, in both directions.

Guess each chunk's start; walk all chunks side by side; compare each end with the next start; if
they do not meet, correct all starts by one Newton step, a linear recurrence over the chunks; walk
again. A chunk whose start agrees, and all before it, is frozen: its states depend on nothing that
comes later, so causality is exact. ``k`` corrections make at least ``k + 1`` chunks exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..scan import Algebra, affine_scan
from .partition import Partition


class Walker(Protocol):
    """One recurrence on one sequence, cut into chunks."""

    partition: Partition

    def walk(
        self,
        starts: Tensor,
        *,
        write: bool,
        kind: str = "none",
        chunks: slice = slice(None),
        first: int = 0,
        keep: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Ends of the chunks, and (if ``kind`` is formed) the operator of each chunk.

        ``write`` stores the states; rows where ``keep`` is True retain what they hold.
        """

    def algebra(self, kind: str) -> Algebra | None: ...

    def cuts(self) -> Tensor | None:
        """Chunks ``(B, P)`` whose end does not depend on their start; None if there are none."""

    def correct(self, mismatch: Tensor, starts: Tensor) -> Tensor | None:
        """Solution of ``e_p = J_p e_{p−1} + m_p`` without operators, or None to use them."""

    def project(self, starts: Tensor) -> Tensor:
        """Starts moved into the invariant box."""

    def sizes(self, first: Tensor) -> Tensor:
        """What mismatches at the chunk ends count relative to, where the states there are smaller,
        after a walk from the ``first`` state; see :mod:`~pararnn.solvers.scale`."""


@dataclass
class Schedule:
    """What the engine has been told; see :class:`~pararnn.solvers.config.NewtonConfig`."""

    tol: float
    warmup: int
    first_kind: str  # operator of the first pass
    later_kind: str  # and of the following ones, if that was not enough
    max_iters: int | None
    cap: int
    fallback: bool


@dataclass
class Outcome:
    iterations: int
    passes: float
    history: list[float]
    converged: bool
    fallback: bool
    ends: Tensor
    iterate: Tensor  # the corrected chunk ends; for chunks of one step, the Newton iterate


def mismatch_of(ends: Tensor, starts: Tensor, sizes: Tensor, dims: int) -> tuple[Tensor, Tensor]:
    """Difference of two states and its size relative to ``max(sizes, |end|)``, per (row, chunk).

    Equal infinities and two NaNs agree; anything else that is not finite disagrees infinitely.
    """
    same = (ends == starts) | (ends.isnan() & starts.isnan())
    difference = torch.where(same, torch.zeros_like(ends), ends - starts)
    relative = difference.abs() / torch.maximum(ends.abs(), sizes)
    relative = torch.where(same, torch.zeros_like(relative), relative)
    relative = torch.where(relative.isnan(), torch.full_like(relative, torch.inf), relative)
    return difference, relative.flatten(-dims).amax(-1) if dims else relative


def run(walker: Walker, first: Tensor, schedule: Schedule) -> Outcome:
    """Solve from the known first state ``(B, *state_shape)``; states go to the walker's output."""
    part, dims = walker.partition, first.ndim - 1
    if part.count == 1 and (part.length > 1 or schedule.max_iters is None):
        ends, _ = walker.walk(first.unsqueeze(1), write=True)
        return Outcome(0, 1.0, [0.0], True, False, ends, ends)
    single = part.length == 1
    iterate, passes = _guess(walker, first, schedule.warmup)
    starts = torch.cat([first.unsqueeze(1), iterate[:, :-1]], 1)
    kind = schedule.first_kind
    pinned = schedule.max_iters is not None
    limit = schedule.max_iters if pinned else schedule.cap
    history: list[float] = []
    iterations = 0
    while True:
        ends, op = walker.walk(starts, write=True, kind=kind)
        passes += 1
        difference, relative = mismatch_of(ends, iterate, walker.sizes(first), dims)
        if not single:  # nothing starts at the end of the last chunk
            difference[:, -1], relative[:, -1] = 0, 0
        residual = float(relative.max()) if relative.numel() else 0.0
        history.append(residual)
        agreed = _agreed(relative <= schedule.tol, walker.cuts())
        if (not pinned and bool(agreed.all())) or iterations == limit:
            break
        if op is None and kind != schedule.later_kind:
            kind = schedule.later_kind
            if walker.algebra(kind) is not None:
                _, op = walker.walk(starts, write=False, kind=kind)
                passes += 1
        frozen = agreed if not pinned else torch.zeros_like(agreed)
        held = frozen.reshape(*frozen.shape, *(1,) * dims)
        iterate = torch.where(
            held, iterate, _corrected(walker, starts, ends, difference, held, op, kind)
        )
        starts = torch.cat([first.unsqueeze(1), iterate[:, :-1]], 1)
        iterations += 1
    converged = residual <= schedule.tol
    if converged or not schedule.fallback:
        return Outcome(iterations, passes, history, converged, False, ends, iterate)
    history.append(float(relative[agreed].max()) if bool(agreed.any()) else 0.0)
    ends, share = _sequential_rest(walker, starts, ends, agreed, dims)
    return Outcome(iterations, passes + share, history, True, True, ends, ends)


def _agreed(close: Tensor, cuts: Tensor | None) -> Tensor:
    """Chunks ``(B, P)`` that are right with all before them, back to the last one that was cut off:
    what comes before a reset is nothing to what comes after."""
    if cuts is None:
        return close.cumprod(1).bool()
    apart = (~close).float()
    return affine_scan(torch.ones_like(apart), apart, resets=cuts) == 0


def _guess(walker: Walker, first: Tensor, warmup: int) -> tuple[Tensor, float]:
    """Guessed state at the end of every chunk: its last steps, run from zero."""
    part = walker.partition
    zeros = torch.zeros_like(first).unsqueeze(1).expand(-1, part.count, *first.shape[1:])
    if part.length == 1:
        ends, _ = walker.walk(zeros.contiguous(), write=False)
        return ends, 1.0
    steps = min(warmup, part.length)
    starts = zeros[:, :-1].contiguous()
    if steps == part.length:
        starts[:, 0] = first
    ends, _ = walker.walk(
        starts, write=False, chunks=slice(0, part.count - 1), first=part.length - steps
    )
    # Nothing starts at the end of the last chunk, so it needs no guess.
    return torch.cat([ends, torch.zeros_like(ends[:, :1])], 1), steps / part.length


def _corrected(
    walker: Walker,
    starts: Tensor,
    ends: Tensor,
    difference: Tensor,
    held: Tensor,
    op: Tensor | None,
    kind: str,
) -> Tensor:
    """One Newton (or Picard) step on the states at the ends of the chunks."""
    difference = difference.masked_fill(held, 0)
    shift = walker.correct(difference, starts) if kind == "factorized" else None
    if shift is None and op is not None:
        shift = affine_scan(op, difference, algebra=walker.algebra(kind), resets=walker.cuts())
    if shift is None:
        return walker.project(ends)
    corrected = ends + (shift - difference)
    # A diverging operator must not spoil a finite end: fall back to Picard there.
    corrected = torch.where(corrected.isfinite(), corrected, ends)
    return walker.project(corrected)


def _sequential_rest(
    walker: Walker, starts: Tensor, ends: Tensor, agreed: Tensor, dims: int
) -> tuple[Tensor, float]:
    """Walk chunk after chunk where the chunks have not converged, row by row."""
    ends = ends.clone()
    # ``agreed[:, p]`` speaks of the end of chunk p as the start of chunk p+1.
    settled = torch.cat([torch.ones_like(agreed[:, :1]), agreed[:, :-1]], 1)
    todo = (~settled).any(0).nonzero().flatten().tolist()
    for p in todo:
        keep = settled[:, p]
        mask = keep.reshape(-1, *(1,) * dims)
        start = torch.where(mask, starts[:, p], ends[:, p - 1])
        out, _ = walker.walk(start.unsqueeze(1), write=True, chunks=slice(p, p + 1), keep=keep)
        ends[:, p] = torch.where(mask, ends[:, p], out[:, 0])
    return ends, len(todo) / walker.partition.count
