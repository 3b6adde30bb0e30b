"""The kernels of the backward pass: ``adjoint_chunks`` and ``readjoint``.

Every chunk walks backwards from a guess of the cotangent that enters it on the right (zero, carried
through a warm-up of later steps). The backward pass is linear, so one correction is exact: ``readjoint``
finds it by looking ahead over the chunks on the right, and walks where it matters.

Arguments as in :mod:`pararnn.kernels.walk`; ``grads`` are the cotangents of the output and of the
other slots that there are, ``bars`` those of the drives, to be written, and ``sums`` those of ``h0``
and of the parameters, by chunk.
"""

import triton
import triton.language as tl

from .functions import far, place
from .memory import put, read, write_if
from .tuples import (
    add,
    add_absolute,
    add_applied,
    add_terms,
    channel_strides,
    choose,
    clear,
    drives_of,
    entries_of,
    fetch_drives,
    fetch_states,
    field,
    identity,
    jumps,
    load_params,
    load_rows,
    load_slots,
    masked,
    moved,
    multiply,
    peak,
    placed,
    placed_states,
    store_rows,
    store_slots,
    stored_steps,
    time_strides,
    zeros,
)


@triton.constexpr_function
def rest_at(body):
    """Which of the cotangents is that of the other slots."""
    return int(bool(body.graded))


@triton.jit
def grad_steps(grad_strides, body: tl.constexpr, shape: tl.constexpr):
    """Strides of the cotangents over time, and of the output's over channels."""
    if body.graded:
        if shape.dense:
            out = (body.shown * shape.width,)
        else:
            out = (tl.cast(grad_strides[1], tl.int64),)
    else:
        out = ()
    if body.rest:
        out = out + (body.others * shape.width,)
    return out


@triton.jit
def grad_channel(grad_strides, body: tl.constexpr, shape: tl.constexpr):
    """Stride of the output's cotangent over channels."""
    if body.graded and not shape.dense:
        return tl.cast(grad_strides[2], tl.int64)
    else:
        return 1


@triton.jit
def placed_grads(
    grads, grad_strides, steps, channel, b, d, t, T, body: tl.constexpr, shape: tl.constexpr
):
    """Pointers to the cotangents of step ``t``."""
    out = ()
    if body.graded:
        out = out + (grads[0] + b * grad_strides[0] + t * steps[0] + d * channel,)
    if body.rest:
        out = out + (grads[rest_at(body)] + (b * T + t) * (body.others * shape.width) + d,)
    return out


@triton.jit
def fetch_grads(at, j, steps, channel, mask, body: tl.constexpr, shape: tl.constexpr):
    """The cotangents of the slots after the step ``j`` before the pointers; None where there are
    none."""
    row = ()
    for i in tl.static_range(body.slots):
        if i < body.others:
            if body.rest:
                row = row + (read(at[rest_at(body)] + (-j * body.others + i) * shape.width, mask),)
        else:
            if body.graded:
                if i == body.others:
                    row = row + (read(at[0] - j * steps[0], mask),)
                else:
                    place_of = (i - body.others) * shape.width * channel
                    row = row + (read(at[0] + (-j * steps[0] + place_of), mask),)
    return row


@triton.jit
def with_grads(cotangent, row, body: tl.constexpr, shape: tl.constexpr):
    """The cotangents of the state after a step: what comes from the right, and the output's."""
    out = ()
    for i in tl.static_range(body.slots):
        if i < body.others:
            if body.rest:
                out = out + (cotangent[i] + row[i].to(shape.dtype),)
            else:
                out = out + (cotangent[i],)
        else:
            if body.graded:
                out = out + (cotangent[i] + row[len(row) - body.slots + i].to(shape.dtype),)
            else:
                out = out + (cotangent[i],)
    return out


@triton.jit
def placed_bars(bars, gap_bar, b, d, t, T, body: tl.constexpr, shape: tl.constexpr):
    """Pointers to the cotangents of the drives of step ``t``, and of its gap."""
    out = ()
    for i in tl.static_range(body.tensors):
        out = out + (bars[i] + (b * T + t) * shape.columns + d,)
    if gap_bar is not None:
        out = out + (gap_bar + (b * T + t) * shape.width + d,)
    return out


@triton.jit
def bar_steps(gap_bar, body: tl.constexpr, shape: tl.constexpr):
    out = ()
    for _ in tl.static_range(body.tensors):
        out = out + (shape.columns,)
    if gap_bar is not None:
        out = out + (shape.width,)
    return out


@triton.jit
def store_bar(at, value, mask, PART: tl.constexpr, shape: tl.constexpr):
    """Store a cotangent, or add a part to what is there."""
    if PART:
        value += read(at, mask).to(shape.dtype)
    write_if(at, value, mask)


@triton.jit
def store_bars(at, values, j, mask, body: tl.constexpr, shape: tl.constexpr, PART: tl.constexpr):
    """Store the cotangents of the drives of the step ``j`` before the pointers."""
    for k in tl.static_range(body.drives):
        if not field(body, "given", k):
            place_of = field(body, "column", k) * shape.width - j * shape.columns
            store_bar(at[field(body, "pointer", k)] + place_of, values[k], mask, PART, shape)
    for k in tl.static_range(body.drives):
        if field(body, "given", k) and len(at) > body.tensors:
            store_bar(at[body.tensors] - j * shape.width, values[k], mask, PART, shape)


@triton.jit
def backward_step(
    cotangent, jac, size, sums, row, before, grads, weights, bars, j, mask,
    body: tl.constexpr, shape: tl.constexpr, JAC: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """One step backwards, from the state ``before`` it: its cotangent, times the Jacobian on the
    right of the product so far; the drives' are written, the parameters' summed."""
    before = clear(row, before, body)
    if not PART:
        cotangent = with_grads(cotangent, grads, body, shape)
    drives = drives_of(row, body, shape)
    if JAC and not body.reduced:
        for i in tl.static_range(body.slots):
            size = tl.maximum(size, tl.abs(cotangent[i]))
        result = body.step_jacobian(*before, *drives, *weights)
        entries = clear(row, entries_of(result[body.slots :], body), body)
        jac = multiply(jac, entries, body, "product_step")
    result = body.adjoint(*before, *drives, *weights, *cotangent)
    cotangent = clear(row, result[: body.slots], body)
    store_bars(bars, result[body.slots : body.slots + body.drives], j, mask, body, shape, PART)
    total = ()
    for i in tl.static_range(body.params):
        total = total + (sums[i] + result[body.slots + body.drives + i],)
    return cotangent, jac, size, total


@triton.jit
def states_before(rows, first, at_first, body: tl.constexpr, shape: tl.constexpr):
    """Stored states in their dtype, and the first state at the first step."""
    out = ()
    for i in tl.static_range(body.slots):
        out = out + (tl.where(at_first, first[i], rows[i].to(shape.dtype)),)
    return out


@triton.jit
def widened(rows, shape: tl.constexpr):
    out = ()
    for i in tl.static_range(len(rows)):
        out = out + (rows[i].to(shape.dtype),)
    return out


@triton.jit
def backward_block(
    cotangent, jac, size, sums, rows, befores, grads, first, top, weights, bars, mask,
    body: tl.constexpr, shape: tl.constexpr, JAC: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    for j in tl.static_range(body.unroll):
        # Only the last step of a block can be the first of the sequence.
        if j == body.unroll - 1:
            before = states_before(befores[j], first, top == j, body, shape)
        else:
            before = widened(befores[j], shape)
        cotangent, jac, size, sums = backward_step(
            cotangent, jac, size, sums, rows[j], before, grads[j], weights, bars, j, mask,
            body, shape, JAC, PART,
        )  # fmt: skip
    return cotangent, jac, size, sums


@triton.jit
def fetch_back(
    inputs, steps, channels, stored, grads, grad_step, channel, j: tl.constexpr, top, lane,
    condition, body: tl.constexpr, shape: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """What the backward step ``j`` before the pointers needs: drives, the state before it, and
    cotangents of the state after it. The ``LAST`` step of a block can be the first of the sequence,
    with no state before it."""
    if condition is None:
        mask = None if shape.aligned else lane
        exists = masked(lane, j < top, shape) if LAST else mask
    else:
        mask = masked(lane, condition, shape)
        exists = masked(lane, condition & (j < top), shape) if LAST else mask
    row = fetch_drives(inputs, steps, channels, -j, mask, body, shape)
    before = fetch_states(stored, -j, exists, body, shape)
    return row, before, fetch_grads(grads, j, grad_step, channel, mask, body, shape)


@triton.jit
def fetch_back_block(
    inputs, steps, channels, stored, grads, grad_step, channel, top, lane, n,
    body: tl.constexpr, shape: tl.constexpr, SOME: tl.constexpr,
):  # fmt: skip
    """The same for a block of steps; of ``SOME`` only the first ``n``."""
    rows, befores, incoming = (), (), ()
    for j in tl.static_range(body.unroll):
        if SOME:
            row, before, grad = fetch_back(
                inputs, steps, channels, stored, grads, grad_step, channel, j, top, lane, j < n,
                body, shape, True,
            )  # fmt: skip
        else:
            row, before, grad = fetch_back(
                inputs, steps, channels, stored, grads, grad_step, channel, j, top, lane, None,
                body, shape, j == body.unroll - 1,
            )  # fmt: skip
        rows, befores, incoming = rows + (row,), befores + (before,), incoming + (grad,)
    return rows, befores, incoming


@triton.jit
def any_above(values, floor):
    """Lanes in which a value is above the floor, or not finite."""
    out = far(values[0], floor, 1.0)
    for i in tl.static_range(1, len(values)):
        out = out | far(values[i], floor, 1.0)
    return out


@triton.jit
def walk_back(
    cotangent, first, weights, inputs, stored, grads, bars,
    steps, channels, grad_step, channel, bar_step, lane, n, top, write, once, floor,
    body: tl.constexpr, shape: tl.constexpr, JAC: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """n steps backwards from step ``top``: the cotangent before them, the product of their
    Jacobians, the largest cotangent on the way, and the parameters' cotangents. A PART of a
    cotangent is added to what is there, until it is below ``floor``; the rest of it is zero."""
    U: tl.constexpr = body.unroll
    live = n >= 0
    jac = identity(cotangent[0], body)
    size = tl.zeros_like(cotangent[0])
    sums = zeros(body.params, shape)
    mask = masked(lane, write, shape)
    states = stored_steps(body, shape)
    whole = tl.where(n >= U, U, 0)
    rows, befores, incoming = fetch_back_block(
        inputs, steps, channels, stored, grads, grad_step, channel, top, lane, n,
        body, shape, True,
    )  # fmt: skip
    while (n >= U) & live:
        # As forwards: load the block of steps before this one, then make this one's.
        ahead = tl.where(n >= 2 * U, U, 0)
        inputs = moved(inputs, steps, -ahead)
        stored = moved(stored, states, -ahead)
        grads = moved(grads, grad_step, -ahead)
        next_rows, next_befores, next_incoming = fetch_back_block(
            inputs, steps, channels, stored, grads, grad_step, channel, top - ahead, lane, n,
            body, shape, False,
        )  # fmt: skip
        for _ in range(once):
            cotangent, jac, size, sums = backward_block(
                cotangent, jac, size, sums, rows, befores, incoming, first, top, weights, bars,
                mask, body, shape, JAC, PART,
            )  # fmt: skip
        rows, befores, incoming = next_rows, next_befores, next_incoming
        bars = moved(bars, bar_step, -U)
        n -= U
        top -= U
        if PART:
            live = tl.max(tl.where(lane & any_above(cotangent, floor), 1, 0)) > 0
    inputs = moved(inputs, steps, -whole)
    stored = moved(stored, states, -whole)
    grads = moved(grads, grad_step, -whole)
    if PART:
        n = tl.where(live, n, 0)
        cotangent = choose(live, cotangent, zeros(body.slots, shape))
    for _ in range(n):
        row, before, grad = fetch_back(
            inputs, steps, channels, stored, grads, grad_step, channel, 0, top, lane, None,
            body, shape, True,
        )  # fmt: skip
        before = states_before(before, first, top == 0, body, shape)
        cotangent, jac, size, sums = backward_step(
            cotangent, jac, size, sums, row, before, grad, weights, bars, 0, mask,
            body, shape, JAC, PART,
        )  # fmt: skip
        inputs = moved(inputs, steps, -1)
        stored = moved(stored, states, -1)
        grads = moved(grads, grad_step, -1)
        bars = moved(bars, bar_step, -1)
        top -= 1
    return cotangent, jac, size, sums


@triton.jit
def store_sums(
    h0_bar, w_bar, cotangent, sums, b, d, lanes, lane, chunk, N,
    body: tl.constexpr, shape: tl.constexpr,
):  # fmt: skip
    """Write the parameters' cotangents of a chunk, and the one of ``h0``."""
    for i in tl.static_range(body.params):
        at = w_bar + (tl.cast(chunk, tl.int64) * body.params + i) * N + lanes
        put(at, sums[i], lane, shape.aligned)
    if chunk == 0:
        store_slots(h0_bar, cotangent, b, d, lane, body, shape)


@triton.jit(do_not_specialize=["B", "T", "L", "W", "chunks", "blocks", "once"])
def adjoint_chunks(
    inputs, h0, weights, batch, strides, channels, stored, grads, grad_strides,
    bars, gap_bar, final, h0_bar, w_bar, edges,
    B, T, L, chunks, blocks, once, W, tol,
    body: tl.constexpr, shape: tl.constexpr, SEVERAL: tl.constexpr,
):  # fmt: skip
    """Cotangents of every chunk, from a guess of what enters it on the right, or from what is known
    to enter it if the recurrence is reduced."""
    index = tl.program_id(0) % blocks
    chunk = tl.program_id(0) // blocks
    b, d, lanes, lane = place(index, B, shape.width, shape.block, shape.aligned)
    N = tl.cast(B, tl.int64) * shape.width
    steps = time_strides(strides, body, shape)
    columns = channel_strides(channels, shape)
    w = load_params(weights, d, lane, body, shape)
    grad_step = grad_steps(grad_strides, body, shape)
    channel = grad_channel(grad_strides, body, shape)
    bar_step = bar_steps(gap_bar, body, shape)
    first = load_slots(h0, b, d, lane, body, shape)
    begin = tl.cast(chunk, tl.int64) * L
    end = tl.minimum(begin + L, T)
    late = tl.minimum(end + W, T)
    cotangent = load_slots(final, b, d, lane & (late == T), body, shape)
    count = (end - begin).to(tl.int32)
    if SEVERAL and not body.reduced:
        here = edges + tl.cast(chunk, tl.int64) * body.rows_back * N + lanes
        size = tl.zeros([shape.block], shape.dtype)
        jac = zeros(body.entries, shape)
        sums = zeros(body.params, shape)
        for phase in range(2):
            t = tl.where(phase == 0, late, end) - 1
            n = tl.where(phase == 0, (late - end).to(tl.int32), count)
            cotangent, jac, size, sums = walk_back(
                cotangent, first, w,
                placed(inputs, batch, steps, columns, b, d, t, body),
                placed_states(stored, b, d, t - 1, T, body, shape),
                placed_grads(grads, grad_strides, grad_step, channel, b, d, t, T, body, shape),
                placed_bars(bars, gap_bar, b, d, t, T, body, shape),
                steps, columns, grad_step, channel, bar_step, lane, n, t.to(tl.int32),
                phase == 1, once, 0.0, body, shape, True, False,
            )  # fmt: skip
            if phase == 0:
                store_rows(here, 0, cotangent, N, lane, shape)
        put(here + (body.rows_back - 1) * N, size, lane, shape.aligned)
        store_rows(here, body.slots, cotangent, N, lane, shape)
        store_rows(here, 2 * body.slots, jac, N, lane, shape)
    else:
        if SEVERAL:
            if chunk < chunks - 1:
                here = edges + chunk * (body.rows_back * N) + lanes
                cotangent = load_rows(here, 0, body.slots, N, lane)
        t = end - 1
        cotangent, jac, size, sums = walk_back(
            cotangent, first, w,
            placed(inputs, batch, steps, columns, b, d, t, body),
            placed_states(stored, b, d, t - 1, T, body, shape),
            placed_grads(grads, grad_strides, grad_step, channel, b, d, t, T, body, shape),
            placed_bars(bars, gap_bar, b, d, t, T, body, shape),
            steps, columns, grad_step, channel, bar_step, lane, count, t.to(tl.int32),
            True, once, 0.0, body, shape, False, False,
        )  # fmt: skip
        if SEVERAL:
            here = edges + chunk * (body.rows_back * N) + lanes
            store_rows(here, body.slots, cotangent, N, lane, shape)
    store_sums(h0_bar, w_bar, cotangent, sums, b, d, lanes, lane, chunk, N, body, shape)


@triton.jit
def shift_back_of(here, chunk, chunks, cotangent, N, lane, body: tl.constexpr):
    """What enters a chunk on the right must change by: the differences of the chunks on the right,
    each times the product of Jacobians between. Of a linear recurrence also the sum of the absolute
    values of what it is then a sum of."""
    record = body.rows_back * N
    there = here + record
    ends = load_rows(there, body.slots, body.slots, N, lane)
    shift = jumps(ends, cotangent)
    terms = ()
    if body.linear:
        terms = add_absolute(ends, cotangent)
    product = load_rows(there, 2 * body.slots, body.entries, N, lane)
    right = chunk + 1
    while (right < chunks - 1) & (peak(product, lane) > 0):
        old = load_rows(there, 0, body.slots, N, lane)
        there += record
        more = jumps(load_rows(there, body.slots, body.slots, N, lane), old)
        shift = add_applied(shift, product, more, body, True)
        if body.linear:
            terms = add_terms(terms, product, more, body, True)
        after = load_rows(there, 2 * body.slots, body.entries, N, lane)
        product = multiply(after, product, body, "product_product")
        right += 1
    return shift, terms


@triton.jit
def loose_back(shift, cotangent, size, tol, body: tl.constexpr):
    """Lanes in which a shift matters, beside the largest cotangent of the chunk; what is small in a
    linear recurrence may grow."""
    out = tl.zeros_like(shift[0]) > 0
    for i in tl.static_range(body.slots):
        scale = tl.abs(cotangent[i])
        if not body.linear:
            scale = tl.maximum(scale, size)
        out = out | far(shift[i], scale, tol)
    return out


@triton.jit(do_not_specialize=["B", "T", "L", "chunks", "blocks", "once"])
def readjoint(
    inputs, h0, weights, batch, strides, channels, stored, grads, grad_strides,
    bars, gap_bar, final, h0_bar, w_bar, edges,
    B, T, L, chunks, blocks, once, tol,
    body: tl.constexpr, shape: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """The exact correction of what enters a chunk on the right, and a walk where it moved."""
    index = tl.program_id(0) % blocks
    chunk = tl.program_id(0) // blocks
    b, d, lanes, lane = place(index, B, shape.width, shape.block, shape.aligned)
    N = tl.cast(B, tl.int64) * shape.width
    here = edges + tl.cast(chunk, tl.int64) * (body.rows_back * N) + lanes
    end = load_rows(here, body.slots, body.slots, N, lane)
    if chunk < chunks - 1:
        cotangent = load_rows(here, 0, body.slots, N, lane)
        size = tl.load(here + (body.rows_back - 1) * N, mask=lane, other=1.0)
        shift, terms = shift_back_of(here, chunk, chunks, cotangent, N, lane, body)
        loose = lane & loose_back(shift, cotangent, size, tol, body)
        used = choose(loose, add(cotangent, shift), cotangent)
        store_rows(here, body.used_at, used, N, lane, shape)
        store_rows(here, body.terms_back_at, terms, N, lane, shape)
        if tl.max(loose.to(tl.int32)) > 0:
            steps = time_strides(strides, body, shape)
            columns = channel_strides(channels, shape)
            w = load_params(weights, d, lane, body, shape)
            grad_step = grad_steps(grad_strides, body, shape)
            channel = grad_channel(grad_strides, body, shape)
            bar_step = bar_steps(gap_bar, body, shape)
            first = load_slots(h0, b, d, lane, body, shape)
            # The backward pass is linear: the correction walks by itself, and is added. To add
            # to rounded numbers would round them twice: then all is walked again.
            entering = choose(loose, shift, zeros(body.slots, shape)) if PART else used
            floor = 0 * size if body.linear else tol * tol * size
            t = tl.cast(chunk, tl.int64) * L + L - 1
            cotangent, jac, peak_size, sums = walk_back(
                entering, first, w,
                placed(inputs, batch, steps, columns, b, d, t, body),
                placed_states(stored, b, d, t - 1, T, body, shape),
                placed_grads(grads, grad_strides, grad_step, channel, b, d, t, T, body, shape),
                placed_bars(bars, gap_bar, b, d, t, T, body, shape),
                steps, columns, grad_step, channel, bar_step, lane, L + tl.zeros([], tl.int32),
                t.to(tl.int32), True, once, floor, body, shape, False, PART,
            )  # fmt: skip
            end = add(end, cotangent) if PART else cotangent
            if PART:
                whole = ()
                for i in tl.static_range(body.params):
                    at = w_bar + (tl.cast(chunk, tl.int64) * body.params + i) * N + lanes
                    whole = whole + (sums[i] + read(at, lane),)
                sums = whole
                if chunk == 0:
                    total = ()
                    for i in tl.static_range(body.slots):
                        at = h0_bar + (b * body.slots + i) * shape.width + d
                        total = total + (cotangent[i] + read(at, lane),)
                    cotangent = total
            store_sums(h0_bar, w_bar, cotangent, sums, b, d, lanes, lane, chunk, N, body, shape)
    store_rows(here, body.used_at + body.slots, end, N, lane, shape)
