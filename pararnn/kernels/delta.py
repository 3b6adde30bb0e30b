"""Kernels of the delta rule: chunks of micro-steps, each one on a program, all at once.

:mod:`pararnn.scan.delta` says what is computed, and names are as there. ``prepare`` inverts the
system of a chunk and makes the chunk one affine map of its start; :mod:`.chain` finds all starts;
``emit`` has the outputs. Backwards, ``pull`` has what the outputs say about the start of a chunk,
:mod:`.chain` the cotangents of all starts, ``pull_values`` those of values, and ``gradients`` all
others. Between kernels there are a few matrices a chunk, and a row for a single step.

A chunk has ``M`` micro-steps and may begin within a token. The decay of a token belongs to its
first micro-step, its query and output to its last. Micro-steps past the end write nothing. What a
reset cuts off is not multiplied but left out (:mod:`.cuts`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .chain import precision, run_chain
from .cuts import (
    heard,
    of_end,
    of_start,
    pairs,
    pieces,
    scaled,
    seen,
    times,
    told,
    weigh,
    weigh_by,
    whole,
)

STEPS = 32
"""Micro-steps of a chunk, at most."""


# -- pieces ------------------------------------------------------------------------------------


@triton.jit
def rows(s, b, h, m, NH: tl.constexpr):
    """Where micro-steps ``m`` begin in a tensor of strides (batch, token, micro-step, head, -)."""
    return b * s[0] + (m // NH) * s[1] + (m % NH) * s[2] + h * s[3]


@triton.jit
def tile(x, s, b, h, m, j, exists, width, NH: tl.constexpr):
    """Micro-steps ``m``, columns ``j``; zero where there is none."""
    at = rows(s, b, h, m, NH)[:, None] + j[None, :] * s[4]
    return tl.load(x + at, mask=exists[:, None] & (j < width)[None, :], other=0.0)


@triton.jit
def put(x, s, b, h, m, j, value, exists, width, NH: tl.constexpr):
    at = rows(s, b, h, m, NH)[:, None] + j[None, :] * s[4]
    tl.store(x + at, value, mask=exists[:, None] & (j < width)[None, :])


@triton.jit
def block(x, i, j, K, V):
    """Rows ``i`` and columns ``j`` of a matrix ``(K, V)``; zero outside."""
    inside = (i < K)[:, None] & (j < V)[None, :]
    return tl.load(x + i[:, None] * V + j[None, :], mask=inside, other=0.0)


@triton.jit
def keep(x, i, j, value, K, V):
    tl.store(x + i[:, None] * V + j[None, :], value, mask=(i < K)[:, None] & (j < V)[None, :])


@triton.jit
def decays(gamma, s, b, h, m, i, exists, NH: tl.constexpr, BEFORE: tl.constexpr):
    """Products of decays, without a division: after ``j`` up to ``i`` (zero above the diagonal), and
    from the start up to ``i``. ``BEFORE=1``: up to the one before ``i``."""
    at = m - BEFORE
    given = exists & (i >= BEFORE) & (at % NH == 0)
    g = tl.load(gamma + rows(s, b, h, at, NH), mask=given, other=1.0)
    after = tl.where(i[:, None] > i[None, :] + BEFORE, g[:, None], 1.0)
    between = tl.where(i[:, None] >= i[None, :] + BEFORE, tl.cumprod(after, 0), 0.0)
    return between, tl.cumprod(g, 0)


@triton.jit
def unit_lower_inverse(below, i, piece, M: tl.constexpr):
    """``(I + L)⁻¹`` of a strictly lower triangular ``L``, row by row; a row has only what it sees."""
    inverse = tl.where(i[:, None] == i[None, :], 1.0, 0.0).to(below.dtype)
    columns = tl.trans(below)
    for row in range(1, M):
        weights = tl.sum(tl.where(i[None, :] == row, columns, 0.0), 1)
        known = weights[:, None] * inverse
        if piece is not None:
            own = tl.sum(tl.where(i == row, piece, 0), 0)
            there = (piece == own) & (i < row)
            known = tl.where(there[:, None] & there[None, :], known, 0.0)
        known = tl.sum(known, 0)
        inverse = tl.where(i[:, None] == row, inverse - known[None, :], inverse)
    return inverse


@triton.jit
def place(chunks, HEADS, M: tl.constexpr):
    """Of a program: chunk and copy, batch row and head, micro-steps and their places."""
    program = tl.program_id(0).to(tl.int64)
    chunk, n = program % chunks, program // chunks
    i = tl.arange(0, M)
    return chunk, n, n // HEADS, n % HEADS, chunk * M + i, i


@triton.jit
def writes(
    k, k_s, beta, beta_s, gamma, gamma_s, b, h, m, i, d, exists,
    K, NH: tl.constexpr, M: tl.constexpr, DECAY: tl.constexpr,
):  # fmt: skip
    """Keys, step sizes, what is written ``βk``, and the products of decays (:func:`decays`)."""
    keys = tile(k, k_s, b, h, m, d, exists, K, NH)
    sizes = tl.load(beta + rows(beta_s, b, h, m, NH), mask=exists, other=0.0)
    if DECAY:
        between, through = decays(gamma, gamma_s, b, h, m, i, exists, NH, 0)
    else:
        between = tl.where(i[:, None] >= i[None, :], 1.0, 0.0).to(keys.dtype)
        through = tl.full([M], 1.0, keys.dtype)
    return keys, sizes, sizes[:, None] * keys, between, through


@triton.jit
def reads(
    q, q_s, w, between, piece, b, h, m, i, d, exists, K, NH: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """Queries, and how much each reads of what was written up to it."""
    queries = tile(q, q_s, b, h, m, d, exists & (m % NH == NH - 1), K, NH)
    scores = times(queries, tl.trans(w), PRECISION)
    return queries, pairs(tl.where(i[:, None] >= i[None, :], scores * between, 0.0), piece)


@triton.jit
def last(x, i, M: tl.constexpr):
    """The last row of a matrix, or the last of a vector's numbers."""
    if len(x.shape) == 2:
        return tl.sum(tl.where(i[:, None] == M - 1, x, 0.0), 0)
    else:
        return tl.sum(tl.where(i == M - 1, x, 0.0), 0)


# -- kernels -----------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["steps", "chunks"])
def prepare(
    k, k_s, v, v_s, beta, beta_s, gamma, gamma_s, inverse, op, forcing, resets, steps, chunks, HEADS,
    K: tl.constexpr, V: tl.constexpr, NH: tl.constexpr, M: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, DECAY: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The inverse ``X = (I + A)⁻¹``, and the chunk as ``S ↦ (gI − Wᵀ X F) S + Wᵀ X v``."""
    chunk, n, b, h, m, i = place(chunks, HEADS, M)
    d, exists = tl.arange(0, BK), m < steps
    piece = pieces(resets, b, m, exists, steps, NH)
    keys, _, w, between, through = writes(
        k, k_s, beta, beta_s, gamma, gamma_s, b, h, m, i, d, exists, K, NH, M, DECAY
    )
    system = pairs(times(keys, tl.trans(w), PRECISION) * between, piece)
    x = unit_lower_inverse(tl.where(i[:, None] > i[None, :], system, 0.0), i, piece, M)
    this = n * chunks + chunk
    keep(inverse + this * M * M, i, i, x, M, M)
    # Wᵀ X first: it serves the transition and the inputs.
    w = of_end(w * last(between, i, M)[:, None], piece)
    moved = times(tl.trans(w), of_end(x, piece), PRECISION)
    moved = tl.trans(of_end(tl.trans(moved), piece)) if piece is not None else moved
    transition = times(moved, -through[:, None] * keys, PRECISION)
    transition = tl.where(d[:, None] == d[None, :], transition + last(through, i, M), transition)
    keep(op + this * K * K, d, d, whole(transition, piece), K, K)
    for first in range(0, V, BV):
        j = first + tl.arange(0, BV)
        values = of_end(tile(v, v_s, b, h, m, j, exists, V, NH), piece)
        keep(forcing + this * K * V, d, j, times(moved, values, PRECISION), K, V)


@triton.jit(do_not_specialize=["steps", "chunks"])
def emit(
    q, q_s, k, k_s, v, v_s, beta, beta_s, gamma, gamma_s, inverse, starts, errors, errors_s, y, y_s,
    resets, steps, chunks, HEADS,
    K: tl.constexpr, V: tl.constexpr, NH: tl.constexpr, M: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, DECAY: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Errors ``u = X (v − F S)`` and outputs ``Q S + P u``."""
    chunk, n, b, h, m, i = place(chunks, HEADS, M)
    d, exists = tl.arange(0, BK), m < steps
    piece = pieces(resets, b, m, exists, steps, NH)
    read = exists & (m % NH == NH - 1)
    keys, _, w, between, through = writes(
        k, k_s, beta, beta_s, gamma, gamma_s, b, h, m, i, d, exists, K, NH, M, DECAY
    )
    queries, scores = reads(q, q_s, w, between, piece, b, h, m, i, d, exists, K, NH, PRECISION)
    x = block(inverse + (n * chunks + chunk) * M * M, i, i, M, M)
    faded, queries = through[:, None] * keys, through[:, None] * queries
    start = starts + (n * (chunks + 1) + chunk) * K * V
    for first in range(0, V, BV):
        j = first + tl.arange(0, BV)
        state = block(start, d, j, K, V)
        rest = tile(v, v_s, b, h, m, j, exists, V, NH)
        rest -= of_start(times(faded, state, PRECISION), piece)
        u = weigh(x, rest, seen(i, piece, False), PRECISION)
        put(errors, errors_s, b, h, m, j, u, exists, V, NH)
        out = of_start(times(queries, state, PRECISION), piece)
        out += weigh(scores, u, seen(i, piece, False), PRECISION)
        put(y, y_s, b, h, m, j, out, read, V, NH)


@triton.jit(do_not_specialize=["steps", "chunks"])
def pull(
    q, q_s, k, k_s, beta, beta_s, gamma, gamma_s, inverse, d_y, d_y_s, d_start,
    resets, steps, chunks, HEADS,
    K: tl.constexpr, V: tl.constexpr, NH: tl.constexpr, M: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, DECAY: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Cotangents of a chunk's start by its outputs, ``(Q − P X F)ᵀ dy``."""
    chunk, n, b, h, m, i = place(chunks, HEADS, M)
    d, exists = tl.arange(0, BK), m < steps
    piece = pieces(resets, b, m, exists, steps, NH)
    read = exists & (m % NH == NH - 1)
    keys, _, w, between, through = writes(
        k, k_s, beta, beta_s, gamma, gamma_s, b, h, m, i, d, exists, K, NH, M, DECAY
    )
    queries, scores = reads(q, q_s, w, between, piece, b, h, m, i, d, exists, K, NH, PRECISION)
    this = n * chunks + chunk
    x = block(inverse + this * M * M, i, i, M, M)
    moved = weigh(scores, x, seen(i, piece, False), PRECISION)
    queries = through[:, None] * queries
    faded = of_start(through[:, None] * keys, piece)
    queries -= weigh(moved, faded, seen(i, piece, False), PRECISION)
    queries = tl.trans(of_start(queries, piece))
    for first in range(0, V, BV):
        j = first + tl.arange(0, BV)
        bar = tile(d_y, d_y_s, b, h, m, j, read, V, NH)
        bar = of_start(bar, piece)
        told_by = tl.trans(told(bar, tl.trans(queries), piece)) if piece is not None else queries
        keep(d_start + this * K * V, d, j, times(told_by, bar, PRECISION), K, V)


@triton.jit(do_not_specialize=["steps", "chunks"])
def pull_values(
    q, q_s, k, k_s, beta, beta_s, gamma, gamma_s, inverse, d_y, d_y_s, d_starts, d_v, d_v_s,
    resets, steps, chunks, HEADS,
    K: tl.constexpr, V: tl.constexpr, NH: tl.constexpr, M: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, DECAY: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Cotangents of the values, ``Xᵀ (Pᵀ dy + W dS)`` with that of the chunk's end."""
    chunk, n, b, h, m, i = place(chunks, HEADS, M)
    d, exists = tl.arange(0, BK), m < steps
    piece = pieces(resets, b, m, exists, steps, NH)
    read = exists & (m % NH == NH - 1)
    _, _, w, between, _ = writes(
        k, k_s, beta, beta_s, gamma, gamma_s, b, h, m, i, d, exists, K, NH, M, DECAY
    )
    _, scores = reads(q, q_s, w, between, piece, b, h, m, i, d, exists, K, NH, PRECISION)
    scores = tl.trans(scores)
    w *= last(between, i, M)[:, None]
    x = tl.trans(block(inverse + (n * chunks + chunk) * M * M, i, i, M, M))
    end = d_starts + (n * (chunks + 1) + chunk + 1) * K * V
    for first in range(0, V, BV):
        j = first + tl.arange(0, BV)
        bar = tile(d_y, d_y_s, b, h, m, j, read, V, NH)
        bar = weigh(scores, bar, seen(i, piece, True), PRECISION)
        late = block(end, d, j, K, V)
        bar += heard(of_end(times(w, late, PRECISION), piece), late, piece)
        bar = weigh(x, bar, seen(i, piece, True), PRECISION)
        put(d_v, d_v_s, b, h, m, j, bar, exists, V, NH)


@triton.jit
def outer(
    x, x_s, state, piece, b, h, m, d, exists, K, V: tl.constexpr, NH: tl.constexpr,
    BV: tl.constexpr, BARS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``x Sᵀ``, of micro-steps with rows of a state; cotangents are ``x``, or (``BARS=1``) ``S``."""
    total = tl.zeros([m.shape[0], d.shape[0]], x.dtype.element_ty)
    for first in range(0, V, BV):
        j = first + tl.arange(0, BV)
        part = block(state, d, j, K, V)
        given = tile(x, x_s, b, h, m, j, exists, V, NH)
        product = times(given, tl.trans(part), PRECISION)
        total += heard(product, part, piece) if BARS else told(given, product, piece)
    return total


@triton.jit(do_not_specialize=["steps", "chunks"])
def gradients(
    q, q_s, k, k_s, beta, beta_s, gamma, gamma_s, starts, errors, errors_s, d_y, d_y_s,
    d_starts, d_v, d_v_s, d_q, d_q_s, d_k, d_k_s, d_beta, d_beta_s, d_gamma, d_gamma_s,
    resets, steps, chunks, HEADS,
    K: tl.constexpr, V: tl.constexpr, NH: tl.constexpr, M: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, DECAY: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Cotangents of queries, keys, step sizes and decays, from those of values and all starts."""
    chunk, n, b, h, m, i = place(chunks, HEADS, M)
    d, exists = tl.arange(0, BK), m < steps
    piece = pieces(resets, b, m, exists, steps, NH)
    read = exists & (m % NH == NH - 1)
    d_system = tl.zeros([M, M], k.dtype.element_ty)
    d_scores = tl.zeros([M, M], k.dtype.element_ty)
    for first in range(0, V, BV):
        j = first + tl.arange(0, BV)
        u = tl.trans(tile(errors, errors_s, b, h, m, j, exists, V, NH))
        bar = tile(d_v, d_v_s, b, h, m, j, exists, V, NH)
        d_system -= told(bar, times(bar, u, PRECISION), piece)
        bar = tile(d_y, d_y_s, b, h, m, j, read, V, NH)
        d_scores += told(bar, times(bar, u, PRECISION), piece)
    d_system = pairs(tl.where(i[:, None] > i[None, :], d_system, 0.0), piece)
    if piece is not None:
        d_scores = tl.where(seen(i, piece, False), d_scores, 0.0)

    state = (n * (chunks + 1) + chunk) * K * V
    start, end = starts + state, d_starts + state + K * V
    d_faded = outer(d_v, d_v_s, start, piece, b, h, m, d, exists, K, V, NH, BV, 0, PRECISION)
    d_read = outer(d_y, d_y_s, start, piece, b, h, m, d, read, K, V, NH, BV, 0, PRECISION)
    d_w = outer(errors, errors_s, end, piece, b, h, m, d, exists, K, V, NH, BV, 1, PRECISION)
    d_faded, d_read, d_w = of_start(d_faded, piece), of_start(d_read, piece), of_end(d_w, piece)
    keys, sizes, w, between, through = writes(
        k, k_s, beta, beta_s, gamma, gamma_s, b, h, m, i, d, exists, K, NH, M, DECAY
    )
    queries = tile(q, q_s, b, h, m, d, read, K, NH)
    if DECAY:
        changes = scaled(d_system, d_system * times(keys, tl.trans(w), PRECISION), piece)
        changes += scaled(d_scores, d_scores * times(queries, tl.trans(w), PRECISION), piece)
        d_through = tl.sum(d_read * queries, 1) - tl.sum(d_faded * keys, 1)
        # The end of the chunk has what its micro-steps wrote, and what is left of its start.
        written = tl.sum(scaled(d_w, d_w * w, piece), 1)
        changes = tl.where(i[:, None] == M - 1, changes + written[None, :], changes)
        left = tl.zeros([BK], k.dtype.element_ty)
        for first in range(0, V, BV):
            j = first + tl.arange(0, BV)
            early, late = block(start, d, j, K, V), block(end, d, j, K, V)
            left += tl.sum(scaled(late, early * late, piece), 1)
        left = whole(tl.sum(left, 0), piece)
        d_through = tl.where(i == M - 1, d_through + left, d_through)
        # The product after j up to i has the factor γ_s between those up to s − 1 and after s.
        before, through_before = decays(gamma, gamma_s, b, h, m, i, exists, NH, 1)
        between = pairs(between, piece)
        changes = weigh(tl.trans(between), changes, seen(i, piece, True), PRECISION)
        changes = scaled(changes, changes * before, piece)
        if piece is not None:
            changes = tl.where(seen(i, piece, False) & (i[:, None] > i[None, :]), changes, 0.0)
        d_g = tl.sum(changes, 1)
        d_through = d_through[:, None]
        faded = scaled(d_through, between * d_through, piece)
        if piece is not None:
            faded = tl.where(seen(i, piece, False), faded, 0.0)
        d_through = tl.sum(faded, 0)
        d_g += scaled(d_through, d_through * through_before, piece)
        tl.store(d_gamma + rows(d_gamma_s, b, h, m, NH), d_g, mask=exists & (m % NH == 0))

    d_system = scaled(d_system, d_system * between, piece)
    d_scores = scaled(d_scores, d_scores * between, piece)
    d_w = scaled(d_w, d_w * last(between, i, M)[:, None], piece)
    d_w += weigh_by(tl.trans(d_system), keys, piece, PRECISION)
    d_w += weigh_by(tl.trans(d_scores), queries, piece, PRECISION)
    d_queries = weigh_by(d_scores, w, piece, PRECISION)
    d_queries += scaled(d_read, through[:, None] * d_read, piece)
    put(d_q, d_q_s, b, h, m, d, d_queries, read, K, NH)
    d_keys = weigh_by(d_system, w, piece, PRECISION)
    d_keys = d_keys - scaled(d_faded, through[:, None] * d_faded, piece) + sizes[:, None] * d_w
    put(d_k, d_k_s, b, h, m, d, d_keys, exists, K, NH)
    tl.store(d_beta + rows(d_beta_s, b, h, m, NH), tl.sum(d_w * keys, 1), mask=exists)


# -- launches ----------------------------------------------------------------------------------

Strided = tuple[Tensor, tuple[int, ...]]


def strided(x: Tensor) -> Strided:
    """A tensor and its strides; what a token has once is there for all of its micro-steps."""
    sizes = zip(x.shape, x.stride(), strict=True)
    return x, tuple(0 if size == 1 else stride for size, stride in sizes)


class Chunks:
    """Sizes and launches of one problem, cut into chunks of at most ``most`` tokens or so.

    ``sequences`` are queries ``(B, T, 1, H, K)``, keys and values ``(B, T, NH, H, K or V)``, step
    sizes ``(B, T, NH, H, 1)`` and, if there are any, decays ``(B, T, 1, H, 1)``, of one dtype and
    any strides. ``resets`` are ``(B, T)`` bool, or None.
    """

    def __init__(self, sequences: Sequence[Tensor], most: int, resets: Tensor | None = None):
        q, k, v, beta, *gamma = sequences
        B, T, NH, self.heads, self.K = k.shape
        self.V, self.copies, self.steps = v.shape[-1], B * self.heads, T * NH
        wide = triton.next_power_of_2(max(16, self.K))
        self.M = min(STEPS, max(16, triton.next_power_of_2(min(T, most) * NH)))
        self.count = triton.cdiv(self.steps, self.M)
        self.q, self.k, self.v, self.beta = (strided(x) for x in (q, k, v, beta))
        self.resets, self.cuts = None, None
        if resets is not None:
            self.resets = resets.contiguous().view(torch.uint8)
            # Which chunks have one: a reset belongs to the first micro-step of its token.
            chunk = torch.arange(T, device=resets.device) * NH // self.M
            marks = resets.new_zeros(B, self.count, dtype=torch.int32)
            marks.index_add_(1, chunk, resets.int())
            self.cuts = (marks > 0).repeat_interleave(self.heads, 0).view(torch.uint8)
        self.gamma = strided(gamma[0]) if gamma else self.beta  # a stand-in that is not read
        self.constants: dict[str, Any] = {
            "K": self.K,
            "V": self.V,
            "NH": NH,
            "M": self.M,
            "BK": wide,
            "BV": min(32, max(16, triton.next_power_of_2(self.V))),
            "DECAY": bool(gamma),
            "PRECISION": precision(k),
            "num_warps": 2 if wide <= 64 else 4,
        }

    def empty(self, *shape: int) -> Tensor:
        """Something for every copy, ``B·H``, of the recurrence."""
        return self.k[0].new_empty(self.copies, *shape)

    def outputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Outputs ``(B, T, 1, H, V)``, and what the backward pass reads (:func:`run_delta`)."""
        n, v = self.count, self.v[0]
        return (
            v.new_empty(*v.shape[:2], 1, *v.shape[3:]),
            v.new_empty(v.shape),
            self.empty(n + 1, self.K, self.V),
            self.empty(n, self.M, self.M),
            self.empty(n, self.K, self.K),
        )

    def run(self, kernel: Any, *given: Tensor | Strided, **others: int) -> None:
        flat = [y for x in given for y in (x if isinstance(x, tuple) else (x,))]
        grid = (self.count * self.copies,)
        kernel[grid](
            *flat, self.resets, self.steps, self.count, self.heads, **self.constants | others
        )


def run_delta(
    sequences: Sequence[Tensor], start: Tensor, most: int, resets: Tensor | None = None
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Outputs ``(B, T, H, V)``, the final state, and for the backward pass all errors
    ``(B, T, NH, H, V)``, the starts of all chunks and the end ``(B·H, n + 1, K, V)``, inverses
    ``(B·H, n, M, M)`` and transitions ``(B·H, n, K, K)``. States are ``(B·H, K, V)``."""
    c = Chunks(sequences, most, resets)
    y, *kept = c.outputs()
    errors, starts, inverse, op = kept
    forcing = c.empty(c.count, c.K, c.V)
    c.run(prepare, c.k, c.v, c.beta, c.gamma, inverse, op, forcing)
    starts[:, 0] = start
    run_chain(op, forcing, starts, back=False, cuts=c.cuts)
    out = strided(errors), strided(y)
    # With many rows, narrow products are spread badly over the warps.
    columns = c.constants["BV"] if c.K <= 64 or c.V <= 32 else 64
    c.run(emit, c.q, c.k, c.v, c.beta, c.gamma, inverse, starts, *out, BV=columns)
    return y.squeeze(2), starts[:, -1].clone(), kept


def run_delta_back(
    sequences: Sequence[Tensor],
    kept: Sequence[Tensor],
    most: int,
    d_y: Tensor,
    d_end: Tensor,
    resets: Tensor | None = None,
) -> tuple[list[Tensor], Tensor]:
    """Cotangents of the sequences and of the first state, from those of the outputs and of the
    final state."""
    c = Chunks(sequences, most, resets)
    errors, starts, inverse, op = kept
    bar = strided(d_y.unsqueeze(2))
    d_start, d_starts = c.empty(c.count, c.K, c.V), torch.empty_like(starts)
    c.run(pull, c.q, c.k, c.beta, c.gamma, inverse, bar, d_start)
    d_starts[:, -1] = d_end
    run_chain(op, d_start, d_starts, back=True, cuts=c.cuts)
    found = [x.new_empty(x.shape) for x in sequences]
    d_q, d_k, d_v, d_beta, *d_gamma = (strided(x) for x in found)
    given = c.q, c.k, c.beta, c.gamma
    c.run(pull_values, *given, inverse, bar, d_starts, d_v)
    sums = d_q, d_k, d_beta, *(d_gamma or [d_beta])
    c.run(gradients, *given, starts, strided(errors), bar, d_starts, d_v, *sums)
    return found, d_starts[:, 0].clone()
