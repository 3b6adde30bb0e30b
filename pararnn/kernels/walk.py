"""The kernels of the forward pass: ``forward``, ``correct``, and one ``decode`` step.

A lane is one channel of one sample: it carries ``S`` numbers through time and never looks at its
neighbours. A program walks a block of lanes through one chunk of the sequence. ``forward`` walks
every chunk from a guess (the state after a warm-up from zero), writes its states, and keeps its
start, its end and its Jacobian product. ``correct`` makes a Newton correction of the chunk starts, by
looking back over the chunks before; a chunk whose start moves walks again, until it meets its old
states. What still does not fit is walked in the order of time (:mod:`pararnn.kernels.repair`). With
one chunk, only ``forward`` runs.

Arguments of all of them: ``inputs`` are the drives, time gaps and resets that there are, with their
strides over samples (``batch``), time (``steps``) and channels; ``stored`` are the states to keep
(:mod:`pararnn.kernels.body` says what is in which); ``edges`` the chunks' records, ``miss`` the
mismatches.
"""

import triton
import triton.language as tl

from .functions import largest, place, sized, worst
from .tuples import (
    absolute,
    add_absolute,
    add_applied,
    add_terms,
    any_far,
    channel_strides,
    choose,
    clear,
    drives_of,
    entries_of,
    fetch_drives,
    fetch_states,
    grown,
    identity,
    jumps,
    load_params,
    load_rows,
    load_slots,
    masked,
    moved,
    multiply,
    note,
    peak,
    placed,
    placed_states,
    store_rows,
    store_slots,
    store_states,
    stored_steps,
    time_strides,
    zeros,
)


@triton.jit
def forward_step(
    state, jac, past, row, weights, stored, j, mask,
    body: tl.constexpr, shape: tl.constexpr, JAC: tl.constexpr, MEET: tl.constexpr,
):  # fmt: skip
    """One step, whose state is written; with ``JAC``, its Jacobian times the product so far; and
    the largest states, where they are asked for."""
    state = clear(row, state, body)
    drives = drives_of(row, body, shape)
    if JAC and not body.reduced:
        result = body.step_jacobian(*state, *drives, *weights)
        state = result[: body.slots]
        entries = clear(row, entries_of(result[body.slots :], body), body)
        jac = multiply(entries, jac, body, "step_product")
    else:
        state = body.step(*state, *drives, *weights)
    if JAC or MEET:
        past = grown(past, state, row, body)
    store_states(stored, state, j, mask, body, shape)
    return state, jac, past


@triton.jit
def forward_block(
    state, jac, past, rows, weights, stored, mask,
    body: tl.constexpr, shape: tl.constexpr, JAC: tl.constexpr, MEET: tl.constexpr,
):  # fmt: skip
    for j in tl.static_range(body.unroll):
        state, jac, past = forward_step(
            state, jac, past, rows[j], weights, stored, j, mask, body, shape, JAC, MEET
        )
    return state, jac, past


@triton.jit
def fetch_block(
    inputs, steps, channels, lane, n, body: tl.constexpr, shape: tl.constexpr, SIGN: tl.constexpr,
    SOME: tl.constexpr,
):  # fmt: skip
    """The drives of the next steps; of ``SOME`` only the first ``n``."""
    rows = ()
    for j in tl.static_range(body.unroll):
        if SOME:
            mask = masked(lane, j < n, shape)
            row = fetch_drives(inputs, steps, channels, SIGN * j, mask, body, shape)
        else:
            mask = None if shape.aligned else lane
            row = fetch_drives(inputs, steps, channels, SIGN * j, mask, body, shape)
        rows = rows + (row,)
    return rows


@triton.jit
def walk(
    state, weights, inputs, stored, steps, channels, lane, n, write, once, tol,
    body: tl.constexpr, shape: tl.constexpr, JAC: tl.constexpr, MEET: tl.constexpr,
):  # fmt: skip
    """n steps from a state: the state after them, their Jacobian product, the largest states, and
    whether the walk met the stored states on its way, so that those after hold."""
    U: tl.constexpr = body.unroll
    jac = identity(state[0], body)
    past = absolute(state, body.pasts)
    met = n < 0
    mask = masked(lane, write, shape)
    states = stored_steps(body, shape)
    whole = tl.where(n >= U, U, 0)
    rows = fetch_block(inputs, steps, channels, lane, n, body, shape, 1, True)
    while (n >= U) & (met == 0):
        if MEET:
            old = fetch_states(stored, U - 1, None if shape.aligned else lane, body, shape)
        # Load the block of steps after this one, or this one again if that is not whole. The
        # loop of one pass keeps the compiler from moving the loads to where they are waited for.
        inputs = moved(inputs, steps, tl.where(n >= 2 * U, U, 0))
        following = fetch_block(inputs, steps, channels, lane, n, body, shape, 1, False)
        for _ in range(once):
            state, jac, past = forward_block(
                state, jac, past, rows, weights, stored, mask, body, shape, JAC, MEET
            )
        rows = following
        stored = moved(stored, states, U)
        n -= U
        if MEET:
            differs = any_far(jumps(state, old), old, past, tol / 4, body)
            met = tl.max(tl.where(lane, differs.to(tl.int32), 0)) == 0
    inputs = moved(inputs, steps, whole)
    if met == 0:
        for _ in range(n):
            row = fetch_drives(
                inputs, steps, channels, 0, None if shape.aligned else lane, body, shape
            )
            state, jac, past = forward_step(
                state, jac, past, row, weights, stored, 0, mask, body, shape, JAC, MEET
            )
            inputs = moved(inputs, steps, 1)
            stored = moved(stored, states, 1)
    return state, jac, past, met


@triton.jit(do_not_specialize=["B", "T", "L", "W", "chunks", "blocks", "once"])
def forward(
    inputs, h0, weights, batch, strides, channels, stored, final, edges,
    B, T, L, chunks, blocks, once, W, tol,
    body: tl.constexpr, shape: tl.constexpr, SEVERAL: tl.constexpr,
):  # fmt: skip
    """Walk every chunk: from a guess, or from the start that is known if the recurrence is reduced."""
    index = tl.program_id(0) % blocks
    chunk = tl.program_id(0) // blocks
    b, d, lanes, lane = place(index, B, shape.width, shape.block, shape.aligned)
    N = tl.cast(B, tl.int64) * shape.width
    steps = time_strides(strides, body, shape)
    columns = channel_strides(channels, shape)
    w = load_params(weights, d, lane, body, shape)
    begin = tl.cast(chunk, tl.int64) * L
    early = tl.maximum(begin - W, 0)
    state = load_slots(h0, b, d, lane & (early == 0), body, shape)
    count = tl.minimum(L, T - begin).to(tl.int32)
    if SEVERAL:
        here = edges + tl.cast(chunk, tl.int64) * (body.rows * N) + lanes
        if body.reduced:
            if chunk > 0:
                state = load_rows(here, 0, body.slots, N, lane)
            at = placed(inputs, batch, steps, columns, b, d, begin, body)
            out = placed_states(stored, b, d, begin, T, body, shape)
            state, jac, past, met = walk(
                state, w, at, out, steps, columns, lane, count, True, once, tol,
                body, shape, False, False,
            )  # fmt: skip
            store_rows(here, body.slots, state, N, lane, shape)
        else:
            jac = zeros(body.entries, shape)
            past = zeros(body.pasts, shape)
            for phase in range(2):
                t = tl.where(phase == 0, early, begin)
                n = tl.where(phase == 0, (begin - early).to(tl.int32), count)
                at = placed(inputs, batch, steps, columns, b, d, t, body)
                out = placed_states(stored, b, d, t, T, body, shape)
                state, jac, past, met = walk(
                    state, w, at, out, steps, columns, lane, n, phase == 1, once, tol,
                    body, shape, True, False,
                )  # fmt: skip
                if phase == 0:
                    store_rows(here, 0, state, N, lane, shape)
            store_rows(here, body.slots, state, N, lane, shape)
            store_rows(here, 2 * body.slots, jac, N, lane, shape)
            store_rows(here, 2 * body.slots + body.entries, past, N, lane, shape)
    else:
        at = placed(inputs, batch, steps, columns, b, d, begin, body)
        out = placed_states(stored, b, d, begin, T, body, shape)
        state, jac, past, met = walk(
            state, w, at, out, steps, columns, lane, count, True, once, tol,
            body, shape, False, False,
        )  # fmt: skip
    if begin + L >= T:
        store_slots(final, state, b, d, lane, body, shape)


@triton.jit
def shift_of(here, chunk, state, past, N, lane, tol, body: tl.constexpr):
    """What a chunk's start must move by: the difference to the end of the chunk before, and those of
    the chunks before that, each times the product of Jacobians since; that end, and its past. Of a
    linear recurrence also the sum of the absolute values of what the start is then a sum of."""
    record = body.rows * N
    ends = state
    shift = jumps(state, state)
    terms = absolute(state, body.slots if body.linear else 0)
    if chunk > 0:
        there = here - record
        ends = load_rows(there, body.slots, body.slots, N, lane)
        past = load_rows(there, 2 * body.slots + body.entries, body.pasts, N, lane)
        shift = jumps(ends, state)
        if body.linear:
            terms = add_absolute(ends, state)
        product = load_rows(there, 2 * body.slots, body.entries, N, lane)
        negligible = 0.0 if body.linear else tol / 16
        left = chunk - 1
        while (left > 0) & (peak(product, lane) > negligible):
            old = load_rows(there, 0, body.slots, N, lane)
            there -= record
            more = jumps(load_rows(there, body.slots, body.slots, N, lane), old)
            shift = add_applied(shift, product, more, body, False)
            if body.linear:
                terms = add_terms(terms, product, more, body, False)
            before = load_rows(there, 2 * body.slots, body.entries, N, lane)
            product = multiply(product, before, body, "product_product")
            left -= 1
    return shift, ends, past, terms


@triton.jit
def corrected(state, shift, ends, body: tl.constexpr):
    """The corrected starts. A diverging product must not spoil a finite end."""
    out = ()
    for i in tl.static_range(body.slots):
        start = state[i] + shift[i]
        if not body.linear:
            start = tl.where(tl.abs(shift[i]) < float("inf"), start, ends[i])
        out = out + (start,)
    return out


@triton.jit
def mismatch(shift, ends, past, start, lane, body: tl.constexpr):
    """Largest shift, relative to the states; where one of a linear recurrence is 0, to its guess."""
    most = 0.0
    for i in tl.static_range(body.slots):
        if body.linear:
            scale = sized(ends[i], tl.abs(start[i]))
        else:
            scale = sized(ends[i], past[i])
        most = tl.maximum(most, largest(shift[i], scale, lane))
    return most


@triton.jit
def unbounded(values, lane):
    """Infinite if a number is not finite, else 0."""
    most = 0.0
    for i in tl.static_range(len(values)):
        most = tl.maximum(most, largest(values[i] - values[i], 1.0, lane))
    return most


@triton.jit(do_not_specialize=["B", "T", "L", "chunks", "blocks", "once", "k"])
def correct(
    inputs, h0, weights, batch, strides, channels, stored, final, edges, miss,
    B, T, L, chunks, blocks, once, k, tol,
    body: tl.constexpr, shape: tl.constexpr, MEET: tl.constexpr,
):  # fmt: skip
    """Newton correction number k of every chunk's start, and a walk where it moved."""
    index = tl.program_id(0) % blocks
    chunk = tl.program_id(0) // blocks
    b, d, lanes, lane = place(index, B, shape.width, shape.block, shape.aligned)
    N = tl.cast(B, tl.int64) * shape.width
    noted = miss + (k * chunks + chunk) * blocks + index
    active = (k == 0) | body.linear  # the repair of a linear recurrence looks at all
    if (k > 0) & (not body.linear):
        active = worst(miss + (k - 1) * chunks * blocks + index, chunks, blocks) > tol
    if active:
        begin = tl.cast(chunk, tl.int64) * L
        record = body.rows * N
        here = edges + ((k % 2) * chunks + chunk) * record + lanes
        start = load_rows(here, 0, body.slots, N, lane)
        end = load_rows(here, body.slots, body.slots, N, lane)
        jac = load_rows(here, 2 * body.slots, body.entries, N, lane)
        past = load_rows(here, 2 * body.slots + body.entries, body.pasts, N, lane)
        shift, before, before_past, terms = shift_of(here, chunk, start, past, N, lane, tol, body)
        missed = mismatch(shift, before, before_past, start, lane, body)
        loose = lane & any_far(shift, before, before_past, tol, body)
        if tl.max(loose.to(tl.int32)) > 0:
            steps = time_strides(strides, body, shape)
            columns = channel_strides(channels, shape)
            w = load_params(weights, d, lane, body, shape)
            start = choose(loose, corrected(start, shift, before, body), start)
            at = placed(inputs, batch, steps, columns, b, d, begin, body)
            out = placed_states(stored, b, d, begin, T, body, shape)
            n = tl.minimum(L, T - begin).to(tl.int32)
            state, product, past, met = walk(
                start, w, at, out, steps, columns, lane, n, True, once, tol,
                body, shape, not body.linear, MEET,
            )  # fmt: skip
            end = choose(met, end, state)
            if body.linear:  # the product stays what it was, and may be finite where the end is not
                missed = tl.maximum(missed, unbounded(end, lane))
            else:
                jac = choose(met, jac, product)
            if begin + L >= T:
                store_slots(final, end, b, d, lane, body, shape)
        note(noted, missed)
        here = edges + (((k + 1) % 2) * chunks + chunk) * record + lanes
        store_rows(here, 0, start, N, lane, shape)
        store_rows(here, body.slots, end, N, lane, shape)
        store_rows(here, 2 * body.slots, jac, N, lane, shape)
        store_rows(here, body.terms_at, terms if body.linear else past, N, lane, shape)
    else:
        note(noted, 0.0)


@triton.jit(do_not_specialize=["B"])
def decode(inputs, h, weights, batch, channels, out, B, body: tl.constexpr, shape: tl.constexpr):
    """One step; every program reads its lanes before it writes them, so ``out`` may be ``h``."""
    b, d, _lanes, lane = place(tl.program_id(0), B, shape.width, shape.block, shape.aligned)
    w = load_params(weights, d, lane, body, shape)
    columns = channel_strides(channels, shape)
    at = placed(inputs, batch, batch, columns, b, d, 0, body)
    state = ()
    for i in tl.static_range(body.slots):
        value = tl.load(h + (b * body.slots + i) * shape.width + d, mask=lane, other=0.0)
        state = state + (value.to(shape.dtype),)
    row = fetch_drives(at, batch, columns, 0, None if shape.aligned else lane, body, shape)
    state = body.step(*state, *drives_of(row, body, shape), *w)
    store_slots(out, state, b, d, lane, body, shape)
