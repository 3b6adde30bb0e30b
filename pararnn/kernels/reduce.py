"""The kernels that a linear recurrence of several slots has besides: ``reduce`` and ``chain``, and
``reduce_back`` and ``chain_back``.

Where the product of a chunk's Jacobians does not die out, as with rotations, no guess of a chunk's
start is good and every chunk must be walked again. So the first walk writes nothing: it reads what
the transition needs and keeps the chunk's end, from a start of zero, and its Jacobian product, whose
columns go through time beside the state (backwards: its rows, beside the cotangent). ``chain`` then
finds every start, in the order of time, and one walk writes.
"""

import triton
import triton.language as tl

from .functions import largest, place, sized
from .tuples import (
    add_applied,
    channel_strides,
    clear,
    drives_of,
    fetch_drives,
    field,
    identity,
    load_params,
    load_rows,
    load_slots,
    masked,
    moved,
    note,
    placed,
    position,
    store_rows,
    time_strides,
)
from .walk import fetch_block
from .walk_back import fetch_grads, grad_channel, grad_steps, placed_grads, with_grads


@triton.jit
def column_of(jac, k: tl.constexpr, body: tl.constexpr, BACK: tl.constexpr):
    """A column of the product (backwards, a row), with zeros where it has none."""
    out = ()
    for i in tl.static_range(body.slots):
        if position(body, i, k, BACK) >= 0:
            out = out + (jac[position(body, i, k, BACK)],)
        else:
            out = out + (tl.zeros_like(jac[0]),)
    return out


@triton.jit
def product_of(columns, body: tl.constexpr, BACK: tl.constexpr):
    """The product from its columns (backwards, rows)."""
    out = ()
    for e in tl.static_range(body.entries):
        if BACK:
            out = out + (columns[field(body, "product", e, 0)][field(body, "product", e, 1)],)
        else:
            out = out + (columns[field(body, "product", e, 1)][field(body, "product", e, 0)],)
    return out


@triton.jit
def reduce_step(
    state, jac, row, grads, weights, body: tl.constexpr, shape: tl.constexpr, BACK: tl.constexpr
):
    """One step of the state (backwards: of the cotangent) and of every column (row)."""
    if BACK:
        state = with_grads(state, grads, body, shape)
    else:
        state = clear(row, state, body)
        jac = clear(row, jac, body)
    result = body.affine(*drives_of(row, body, shape), *weights)
    transition = result[: body.coefficients]
    columns = ()
    for k in tl.static_range(body.slots):
        column = column_of(jac, k, body, BACK)
        if BACK:
            column = body.transpose(*column, *transition, *weights)
        else:
            column = body.tangent(*column, *transition, *weights)
        columns = columns + (column,)
    jac = product_of(columns, body, BACK)
    if BACK:
        state = clear(row, body.transpose(*state, *transition, *weights), body)
        jac = clear(row, jac, body)
    else:
        carried = body.tangent(*state, *transition, *weights)
        state = ()
        for i in tl.static_range(body.slots):
            state = state + (carried[i] + result[body.coefficients + i],)
    return state, jac


@triton.jit
def reduce_block(
    state, jac, rows, grads, weights, body: tl.constexpr, shape: tl.constexpr, BACK: tl.constexpr
):
    for j in tl.static_range(body.unroll):
        state, jac = reduce_step(state, jac, rows[j], grads[j], weights, body, shape, BACK)
    return state, jac


@triton.jit
def fetch_grad_block(
    grads, grad_step, channel, lane, n, body: tl.constexpr, shape: tl.constexpr,
    BACK: tl.constexpr, SOME: tl.constexpr,
):  # fmt: skip
    """Cotangents of a block of steps; none forwards."""
    out = ()
    for j in tl.static_range(body.unroll):
        if BACK:
            mask = masked(lane, j < n, shape) if SOME else None if shape.aligned else lane
            out = out + (fetch_grads(grads, j, grad_step, channel, mask, body, shape),)
        else:
            out = out + ((),)
    return out


@triton.jit
def reduce_walk(
    state, weights, inputs, grads, steps, channels, grad_step, channel, lane, n, once,
    body: tl.constexpr, shape: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """n steps that write nothing: what they make of a state (backwards: of a cotangent), and their
    Jacobian product."""
    U: tl.constexpr = body.unroll
    SIGN: tl.constexpr = -1 if BACK else 1
    jac = identity(state[0], body)
    whole = tl.where(n >= U, U, 0)
    rows = fetch_block(inputs, steps, channels, lane, n, body, shape, SIGN, True)
    incoming = fetch_grad_block(grads, grad_step, channel, lane, n, body, shape, BACK, True)
    while n >= U:
        ahead = SIGN * tl.where(n >= 2 * U, U, 0)
        inputs = moved(inputs, steps, ahead)
        if BACK:
            grads = moved(grads, grad_step, ahead)
        next_rows = fetch_block(inputs, steps, channels, lane, n, body, shape, SIGN, False)
        next_incoming = fetch_grad_block(
            grads, grad_step, channel, lane, n, body, shape, BACK, False
        )
        for _ in range(once):
            state, jac = reduce_block(state, jac, rows, incoming, weights, body, shape, BACK)
        rows, incoming = next_rows, next_incoming
        n -= U
    if U > 1:
        inputs = moved(inputs, steps, SIGN * whole)
        if BACK:
            grads = moved(grads, grad_step, SIGN * whole)
        for _ in range(n):
            row = fetch_drives(
                inputs, steps, channels, 0, None if shape.aligned else lane, body, shape
            )
            if BACK:
                grad = fetch_grads(
                    grads, 0, grad_step, channel, None if shape.aligned else lane, body, shape
                )
            else:
                grad = ()
            state, jac = reduce_step(state, jac, row, grad, weights, body, shape, BACK)
            inputs = moved(inputs, steps, SIGN)
            if BACK:
                grads = moved(grads, grad_step, SIGN)
    return state, jac


@triton.jit(do_not_specialize=["B", "T", "L", "chunks", "blocks", "once"])
def reduce(
    inputs, h0, weights, batch, strides, channels, edges,
    B, T, L, chunks, blocks, once,
    body: tl.constexpr, shape: tl.constexpr,
):  # fmt: skip
    """End and product of every chunk but the last."""
    index = tl.program_id(0) % blocks
    chunk = tl.program_id(0) // blocks
    b, d, lanes, lane = place(index, B, shape.width, shape.block, shape.aligned)
    N = tl.cast(B, tl.int64) * shape.width
    steps = time_strides(strides, body, shape)
    columns = channel_strides(channels, shape)
    w = load_params(weights, d, lane, body, shape)
    begin = tl.cast(chunk, tl.int64) * L
    state = load_slots(h0, b, d, lane & (chunk == 0), body, shape)
    at = placed(inputs, batch, steps, columns, b, d, begin, body)
    n = L + tl.zeros([], tl.int32)
    state, jac = reduce_walk(
        state, w, at, (), steps, columns, (), 1, lane, n, once, body, shape, False
    )
    here = edges + chunk * (body.rows * N) + lanes
    store_rows(here, body.slots, state, N, lane, shape)
    store_rows(here, 2 * body.slots, jac, N, lane, shape)


@triton.jit(do_not_specialize=["B", "T", "L", "chunks", "blocks", "once"])
def reduce_back(
    inputs, weights, batch, strides, channels, grads, grad_strides, final, edges,
    B, T, L, chunks, blocks, once,
    body: tl.constexpr, shape: tl.constexpr,
):  # fmt: skip
    """The cotangent before every chunk but the first, and the product."""
    index = tl.program_id(0) % blocks
    chunk = tl.program_id(0) // blocks + 1
    b, d, lanes, lane = place(index, B, shape.width, shape.block, shape.aligned)
    N = tl.cast(B, tl.int64) * shape.width
    steps = time_strides(strides, body, shape)
    columns = channel_strides(channels, shape)
    w = load_params(weights, d, lane, body, shape)
    grad_step = grad_steps(grad_strides, body, shape)
    channel = grad_channel(grad_strides, body, shape)
    begin = tl.cast(chunk, tl.int64) * L
    end = tl.minimum(begin + L, T)
    cotangent = load_slots(final, b, d, lane & (end == T), body, shape)
    t = end - 1
    cotangent, jac = reduce_walk(
        cotangent, w,
        placed(inputs, batch, steps, columns, b, d, t, body),
        placed_grads(grads, grad_strides, grad_step, channel, b, d, t, T, body, shape),
        steps, columns, grad_step, channel, lane, (end - begin).to(tl.int32), once,
        body, shape, True,
    )  # fmt: skip
    here = edges + chunk * (body.rows * N) + lanes
    store_rows(here, body.slots, cotangent, N, lane, shape)
    store_rows(here, 2 * body.slots, jac, N, lane, shape)


@triton.jit
def finite_size(state, lane):
    """1, or 0 if all are 0; infinite if a state is not finite."""
    most = 0.0
    for i in tl.static_range(len(state)):
        most = tl.maximum(most, largest(state[i], sized(state[i], 0.0), lane))
    return most


@triton.jit
def graded(values, all):
    """Absolute values; where one is not much smaller than the largest, that one, which an operator
    that turns the state rounds it like."""
    most = tl.abs(all[0])
    for i in tl.static_range(1, len(all)):
        most = tl.maximum(most, tl.abs(all[i]))
    least: tl.constexpr = 8e-25 if most.dtype == tl.float64 else 1e-12
    out = ()
    for i in tl.static_range(len(values)):
        size = tl.abs(values[i])
        out = out + (tl.where(size < least * most, size, most),)
    return out


@triton.jit
def terms_of(end, jac, state, body: tl.constexpr, BACK: tl.constexpr):
    """The sum of absolute values that a start is rounded by: of ``end + jac · state``."""
    out = graded(end, end)
    for k in tl.static_range(body.slots):
        column = column_of(jac, k, body, BACK)
        column = graded(column, column)
        total = ()
        for i in tl.static_range(body.slots):
            value = tl.where(state[k] == 0, 0.0, column[i] * tl.abs(state[k]))
            total = total + (out[i] + value,)
        out = total
    return out


@triton.jit(do_not_specialize=["B", "chunks", "blocks", "once"])
def chain(
    edges, miss, B, chunks, blocks, once,
    body: tl.constexpr, shape: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """What enters every chunk on the left (backwards: on the right), one after the other."""
    index = tl.program_id(0)
    _b, _d, lanes, lane = place(index, B, shape.width, shape.block, shape.aligned)
    N = tl.cast(B, tl.int64) * shape.width
    SIGN: tl.constexpr = -1 if BACK else 1
    record = SIGN * body.rows * N
    here = edges + lanes
    if BACK:
        here += (chunks - 1) * (body.rows * N)
    else:
        note(miss + index, 0.0)
    left = chunks - 1
    state = load_rows(here, body.slots, body.slots, N, lane)
    terms = graded(state, state)
    following = here + tl.where(left > 1, record, 0)
    end = load_rows(following, body.slots, body.slots, N, lane & (left > 1))
    jac = load_rows(following, 2 * body.slots, body.entries, N, lane & (left > 1))
    while left > 0:
        here += record
        chunk = chunks - left
        following = here + tl.where(left > 2, record, 0)
        left -= 1
        next_end = load_rows(following, body.slots, body.slots, N, lane & (left > 1))
        next_jac = load_rows(following, 2 * body.slots, body.entries, N, lane & (left > 1))
        for _ in range(once):
            store_rows(here, 0, state, N, lane, shape)
            store_rows(here, body.terms_at, terms, N, lane, shape)
            if not BACK:
                note(miss + chunk * blocks + index, finite_size(state, lane))
            terms = terms_of(end, jac, state, body, BACK)
            state = add_applied(end, jac, state, body, BACK)
        end, jac = next_end, next_jac
