"""The kernels that walk again what does not fit: ``repair`` and ``repair_back``.

After the corrections every chunk should start where the one before it ends. In a recurrence that is
not linear a chunk may not, because the corrections were too few; in a linear one, and backwards,
because a product of Jacobians overflowed, or underflowed and lost its digits, or hid that a number
far away is not finite. Chunks that do not are walked in the order of time.

In a linear recurrence an end and a start that products have found are sums of the same terms: they
differ by roundoffs of the sum of the terms' absolute values, which is kept beside the start. Which
lanes are walked, and so their bits, does not depend on other lanes.
"""

import triton
import triton.language as tl

from .functions import far, jump, least_of, place, worst
from .memory import write_if
from .tuples import (
    any_far,
    channel_strides,
    choose,
    jumps,
    load_params,
    load_rows,
    load_slots,
    note,
    placed,
    placed_states,
    store_slots,
    time_strides,
)
from .walk import walk
from .walk_back import bar_steps, grad_channel, grad_steps, placed_bars, placed_grads, walk_back


@triton.jit
def slack_of(L, tol, terms: tl.constexpr, dtype: tl.constexpr):
    """Roundoffs of its terms by which a walk of ``L`` steps and a product of as many may differ, a
    step of ``terms``; the solver's tolerance at least."""
    unit: tl.constexpr = 1.2e-16 if dtype == tl.float64 else 6e-8
    return tl.maximum(tol, L * (4 * terms * unit))


@triton.jit
def any_apart(ends, starts, terms, slack, body: tl.constexpr):
    """Lanes in which a chunk of a linear recurrence does not start where the one before it ends, but
    for rounding of the ``terms`` that the start is a sum of; or, where there are no terms, one of the
    two is not finite and the other is not the same."""
    out = tl.zeros_like(ends[0]) > 0
    for i in tl.static_range(body.slots):
        difference = jump(ends[i], starts[i])
        if len(terms) == 0:
            out = out | far(difference, float("inf"), 1.0)
        else:
            scale = tl.where(terms[i] < float("inf"), terms[i], 0.0)  # too large to say anything
            out = out | far(difference, scale + least_of(scale), slack)
    return out


@triton.jit
def fits(
    edges, lanes, lane, chunks, N, slack,
    body: tl.constexpr, ROWS: tl.constexpr, START: tl.constexpr, TERMS: tl.constexpr,
    BACK: tl.constexpr,
):  # fmt: skip
    """Whether every chunk of every lane starts where the one before it ends (:func:`any_apart`)."""
    apart = 0
    for first in range(1, chunks, 16):
        chunk = first + tl.arange(0, 16)[:, None]
        there = lane[None, :] & (chunk < chunks)
        right = edges + lanes[None, :] + chunk.to(tl.int64) * (ROWS * N)
        left = right - ROWS * N
        start_at = left if BACK else right
        end_at = right if BACK else left
        ends, starts, terms = (), (), ()
        for i in tl.static_range(body.slots):
            ends += (tl.load(end_at + (START + body.slots + i) * N, mask=there, other=0.0),)
            starts += (tl.load(start_at + (START + i) * N, mask=there, other=0.0),)
            if body.linear:
                terms += (tl.load(start_at + (TERMS + i) * N, mask=there, other=0.0),)
        differs = any_apart(ends, starts, terms, slack, body)
        apart += tl.max(tl.max(tl.where(there & differs, 1, 0), 1), 0)
    return apart == 0


@triton.jit(do_not_specialize=["B", "T", "L", "chunks", "blocks", "once", "k"])
def repair(
    inputs, h0, weights, batch, strides, channels, stored, final, edges, miss,
    B, T, L, chunks, blocks, once, k, tol,
    body: tl.constexpr, shape: tl.constexpr, MEET: tl.constexpr,
):  # fmt: skip
    """Walk again, in the order of time, every chunk that does not start where the one before
    ends; row k of miss gets their number. In a linear recurrence these are chunks whose start came
    from a product that overflowed, or underflowed and lost its digits or hid that a chunk far before
    is not finite; which lanes are walked does not depend on others."""
    index = tl.program_id(0)
    b, d, lanes, lane = place(index, B, shape.width, shape.block, shape.aligned)
    N = tl.cast(B, tl.int64) * shape.width
    steps = time_strides(strides, body, shape)
    columns = channel_strides(channels, shape)
    w = load_params(weights, d, lane, body, shape)
    total = 0
    record = body.rows * N
    if not body.reduced:
        edges += (k % 2) * chunks * record
    if body.linear:
        slack = slack_of(L, tol, body.slots, shape.dtype)
        good = fits(
            edges, lanes, lane, chunks, N, slack, body, body.rows, 0, body.terms_at, False
        )  # fmt: skip
    else:
        good = worst(miss + (k - 1) * chunks * blocks + index, chunks, blocks) <= tol
    if not good:
        here = edges + lanes
        ends = load_rows(here, body.slots, body.slots, N, lane)
        before_past = load_rows(here, 2 * body.slots + body.entries, body.pasts, N, lane)
        for chunk in range(1, chunks):
            here += record
            start = load_rows(here, 0, body.slots, N, lane)
            end = load_rows(here, body.slots, body.slots, N, lane)
            past = load_rows(here, 2 * body.slots + body.entries, body.pasts, N, lane)
            if body.linear:
                terms = load_rows(here, body.terms_at, body.slots, N, lane)
                loose = lane & any_apart(ends, start, terms, slack, body)
            else:
                loose = lane & any_far(jumps(ends, start), ends, before_past, tol, body)
            if tl.max(loose.to(tl.int32)) > 0:
                total += 1
                begin = tl.cast(chunk, tl.int64) * L
                state = choose(loose, ends, start)
                at = placed(inputs, batch, steps, columns, b, d, begin, body)
                out = placed_states(stored, b, d, begin, T, body, shape)
                n = tl.minimum(L, T - begin).to(tl.int32)
                state, jac, past, met = walk(
                    state, w, at, out, steps, columns, lane, n, loose, once, tol,
                    body, shape, False, MEET and not body.linear,
                )  # fmt: skip
                end = choose(met, end, state)
            ends, before_past = end, past
        store_slots(final, ends, b, d, lane, body, shape)
    note(miss + k * chunks * blocks + index, total)


@triton.jit(do_not_specialize=["B", "T", "L", "chunks", "blocks", "once"])
def repair_back(
    inputs, h0, weights, batch, strides, channels, stored, grads, grad_strides,
    bars, gap_bar, final, h0_bar, w_bar, edges,
    B, T, L, chunks, blocks, once, tol,
    body: tl.constexpr, shape: tl.constexpr,
):  # fmt: skip
    """Walk again, from right to left, every chunk that what enters is not what left the one on the
    right: where a cotangent is not finite, and in a linear recurrence where a product overflowed, or
    underflowed and lost its digits. Lanes that fit are not written."""
    index = tl.program_id(0)
    b, d, lanes, lane = place(index, B, shape.width, shape.block, shape.aligned)
    N = tl.cast(B, tl.int64) * shape.width
    record = body.rows_back * N
    slack = slack_of(L, tol, body.slots, shape.dtype)
    good = fits(
        edges, lanes, lane, chunks, N, slack,
        body, body.rows_back, body.used_at, body.terms_back_at, True,
    )  # fmt: skip
    if not good:
        steps = time_strides(strides, body, shape)
        columns = channel_strides(channels, shape)
        w = load_params(weights, d, lane, body, shape)
        grad_step = grad_steps(grad_strides, body, shape)
        channel = grad_channel(grad_strides, body, shape)
        bar_step = bar_steps(gap_bar, body, shape)
        first = load_slots(h0, b, d, lane, body, shape)
        here = edges + (chunks - 1) * record + lanes
        cotangent = load_rows(here, body.used_at + body.slots, body.slots, N, lane)
        chunk = chunks - 1
        while chunk > 0:
            chunk -= 1
            here -= record
            used = load_rows(here, body.used_at, body.slots, N, lane)
            end = load_rows(here, body.used_at + body.slots, body.slots, N, lane)
            terms = ()
            if body.linear:
                terms = load_rows(here, body.terms_back_at, body.slots, N, lane)
            loose = lane & any_apart(cotangent, used, terms, slack, body)
            if tl.max(loose.to(tl.int32)) > 0:
                t = tl.cast(chunk, tl.int64) * L + L - 1
                found, jac, size, sums = walk_back(
                    choose(loose, cotangent, used), first, w,
                    placed(inputs, batch, steps, columns, b, d, t, body),
                    placed_states(stored, b, d, t - 1, T, body, shape),
                    placed_grads(grads, grad_strides, grad_step, channel, b, d, t, T, body, shape),
                    placed_bars(bars, gap_bar, b, d, t, T, body, shape),
                    steps, columns, grad_step, channel, bar_step, lane, L + tl.zeros([], tl.int32),
                    t.to(tl.int32), loose, once, 0.0, body, shape, False, False,
                )  # fmt: skip
                end = choose(loose, found, end)
                for i in tl.static_range(body.params):
                    at = w_bar + (tl.cast(chunk, tl.int64) * body.params + i) * N + lanes
                    write_if(at, sums[i], loose)
                if chunk == 0:
                    store_slots(h0_bar, end, b, d, lane, body, shape)
            cotangent = end
