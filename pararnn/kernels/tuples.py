"""Device functions over tuples: slots, drives, parameters, entries of matrices."""

import triton
import triton.language as tl

from .functions import both, far, jump, largest, sized
from .memory import put, read, write_if


@triton.constexpr_function
def field(record, name, *index):
    """A field of a compile-time record, or what is in it at an index."""
    value = getattr(record, name)
    for i in index:
        value = value[i]
    return value


@triton.constexpr_function
def count(record, name, *index):
    """How many there are of them."""
    value = getattr(record, name)
    for i in index:
        value = value[i]
    return len(value)


@triton.constexpr_function
def position(body, i, k, transposed=False):
    """Where entry ``(i, k)`` of a product of Jacobians is kept; -1 if it is always 0."""
    entry = (k, i) if transposed else (i, k)
    return body.product.index(entry) if entry in body.product else -1


# -- vectors and matrices ------------------------------------------------------------------------


@triton.jit
def zeros(COUNT: tl.constexpr, shape: tl.constexpr):
    out = ()
    for _ in tl.static_range(COUNT):
        out = out + (tl.zeros([shape.block], shape.dtype),)
    return out


@triton.jit
def identity(like, body: tl.constexpr):
    """The product of no Jacobians."""
    out = ()
    for e in tl.static_range(body.entries):
        if field(body, "product", e, 0) == field(body, "product", e, 1):
            out = out + (tl.zeros_like(like) + 1,)
        else:
            out = out + (tl.zeros_like(like),)
    return out


@triton.jit
def choose(condition, yes, no):
    """``yes`` where the condition holds, number by number."""
    out = ()
    for i in tl.static_range(len(yes)):
        out = out + (tl.where(condition, yes[i], no[i]),)
    return out


@triton.jit
def clear(row, values, body: tl.constexpr):
    """Zero where a step's row has a reset, of what comes from before it."""
    out = values
    if body.resets:
        out = ()
        for i in tl.static_range(len(values)):
            out = out + (tl.where(row[body.drives] != 0, 0.0, values[i]),)
    return out


@triton.jit
def multiply(left, right, body: tl.constexpr, TERMS: tl.constexpr):
    """Product of two matrices with structural zeros; ``TERMS`` names the kinds of the two."""
    out = ()
    for e in tl.static_range(body.entries):
        if count(body, TERMS, e) == 0:
            out = out + (tl.zeros_like(right[0]),)
        else:
            total = left[field(body, TERMS, e, 0, 0)] * right[field(body, TERMS, e, 0, 1)]
            for t in tl.static_range(1, count(body, TERMS, e)):
                total += left[field(body, TERMS, e, t, 0)] * right[field(body, TERMS, e, t, 1)]
            out = out + (total,)
    return out


@triton.jit
def add_applied(target, matrix, vector, body: tl.constexpr, TRANSPOSED: tl.constexpr):
    """``target + matrix · vector``; where the vector is 0, so is the product."""
    out = ()
    for i in tl.static_range(body.slots):
        total = target[i]
        for j in tl.static_range(body.slots):
            if position(body, i, j, TRANSPOSED) >= 0:
                value = matrix[position(body, i, j, TRANSPOSED)] * vector[j]
                total += tl.where(vector[j] == 0, 0.0, value)
        out = out + (total,)
    return out


@triton.jit
def add_terms(target, matrix, vector, body: tl.constexpr, TRANSPOSED: tl.constexpr):
    """``target + |matrix| · |vector|``."""
    out = ()
    for i in tl.static_range(body.slots):
        total = target[i]
        for j in tl.static_range(body.slots):
            if position(body, i, j, TRANSPOSED) >= 0:
                value = tl.abs(matrix[position(body, i, j, TRANSPOSED)] * vector[j])
                total += tl.where(vector[j] == 0, 0.0, value)
        out = out + (total,)
    return out


@triton.jit
def add(left, right):
    out = ()
    for i in tl.static_range(len(left)):
        out = out + (left[i] + right[i],)
    return out


@triton.jit
def add_absolute(left, right):
    out = ()
    for i in tl.static_range(len(left)):
        out = out + (tl.abs(left[i]) + tl.abs(right[i]),)
    return out


@triton.jit
def entries_of(dense, body: tl.constexpr):
    """The entries of a step's Jacobian that can differ from 0."""
    out = ()
    for e in tl.static_range(count(body, "step_entries")):
        out = out + (dense[field(body, "step_entries", e)],)
    return out


@triton.jit
def jumps(new, old):
    out = ()
    for i in tl.static_range(len(new)):
        out = out + (jump(new[i], old[i]),)
    return out


@triton.jit
def peak(values, lane):
    """Largest absolute value of all; infinite if one is NaN."""
    most = 0.0
    for i in tl.static_range(len(values)):
        most = tl.maximum(most, largest(values[i], 1.0, lane))
    return most


# -- pointers and loads ---------------------------------------------------------------------------


@triton.jit
def time_strides(strides, body: tl.constexpr, shape: tl.constexpr):
    """Strides of the inputs over time, as constants where they are known."""
    out = ()
    for i in tl.static_range(len(strides)):
        if shape.packed and i < body.tensors:
            out = out + (shape.columns,)
        else:
            out = out + (tl.cast(strides[i], tl.int64),)
    return out


@triton.jit
def channel_strides(strides, shape: tl.constexpr):
    """Strides of the drives over channels."""
    out = ()
    for i in tl.static_range(len(strides)):
        if shape.packed:
            out = out + (1,)
        else:
            out = out + (tl.cast(strides[i], tl.int64),)
    return out


@triton.jit
def placed(inputs, batch, steps, channels, b, d, t, body: tl.constexpr):
    """Pointers to what step ``t`` (a 64-bit number) reads."""
    out = ()
    for i in tl.static_range(len(inputs)):
        at = inputs[i] + b * batch[i] + t * steps[i]
        if i < body.tensors:
            at += d * channels[i]
        out = out + (at,)
    return out


@triton.jit
def moved(pointers, steps, n):
    """Pointers ``n`` steps on."""
    out = ()
    for i in tl.static_range(len(pointers)):
        out = out + (pointers[i] + n * steps[i],)
    return out


@triton.jit
def drive_column(channels, k: tl.constexpr, body: tl.constexpr, shape: tl.constexpr):
    """How far a drive is from the first of its tensor."""
    if field(body, "column", k) == 0:
        return 0
    else:
        return field(body, "column", k) * shape.width * channels[0]


@triton.jit
def fetch_drives(inputs, steps, channels, j, mask, body: tl.constexpr, shape: tl.constexpr):
    """The drives of the step ``j`` after where the pointers stand, and its reset if there are any.
    Masked ones are never used."""
    row = ()
    for k in tl.static_range(body.drives):
        column = drive_column(channels, k, body, shape)
        at = j * steps[field(body, "pointer", k)] + column
        row = row + (read(inputs[field(body, "pointer", k)] + at, mask),)
    if body.resets:
        row = row + (read(inputs[body.mask_at] + j * steps[body.mask_at], mask),)
    return row


@triton.jit
def drives_of(row, body: tl.constexpr, shape: tl.constexpr):
    """The drives of a fetched row in the dtype of states."""
    out = ()
    for k in tl.static_range(body.drives):
        out = out + (row[k].to(shape.dtype),)
    return out


@triton.jit
def load_params(weights, d, lane, body: tl.constexpr, shape: tl.constexpr):
    """The recurrent parameters, which stay in registers."""
    out = ()
    for i in tl.static_range(body.params):
        if field(body, "by_channel", i):
            out = out + (tl.load(weights[i] + d, mask=lane, other=0.0).to(shape.dtype),)
        else:
            out = out + (tl.load(weights[i]).to(shape.dtype),)
    return out


# -- states ----------------------------------------------------------------------------------------


@triton.jit
def stored_steps(body: tl.constexpr, shape: tl.constexpr):
    """How far apart the stored states of two steps are: of the output, and of the other slots."""
    return (body.shown * shape.width, body.others * shape.width)


@triton.jit
def placed_states(stored, b, d, t, T, body: tl.constexpr, shape: tl.constexpr):
    """Pointers to the stored states of step ``t``."""
    out = (stored[0] + (b * T + t) * (body.shown * shape.width) + d,)
    if body.others > 0:
        out = out + (stored[1] + (b * T + t) * (body.others * shape.width) + d,)
    return out


@triton.jit
def slot_at(stored, i: tl.constexpr, j, body: tl.constexpr, shape: tl.constexpr):
    """Address of a stored slot, ``j`` steps from where the pointers stand."""
    if i >= body.others:
        return stored[0] + (j * (body.shown * shape.width) + (i - body.others) * shape.width)
    else:
        return stored[1] + (j * body.others + i) * shape.width


@triton.jit
def fetch_states(stored, j, mask, body: tl.constexpr, shape: tl.constexpr):
    row = ()
    for i in tl.static_range(body.slots):
        row = row + (read(slot_at(stored, i, j, body, shape), mask),)
    return row


@triton.jit
def store_states(stored, state, j, mask, body: tl.constexpr, shape: tl.constexpr):
    for i in tl.static_range(body.slots):
        write_if(slot_at(stored, i, j, body, shape), state[i], mask)


@triton.jit
def load_slots(source, b, d, mask, body: tl.constexpr, shape: tl.constexpr):
    """The slots of a tensor ``(B, S, D)``; zero if there is none."""
    if source is None:
        return zeros(body.slots, shape)
    else:
        out = ()
        for i in tl.static_range(body.slots):
            at = source + (b * body.slots + i) * shape.width + d
            out = out + (tl.load(at, mask=mask, other=0.0),)
        return out


@triton.jit
def store_slots(target, values, b, d, lane, body: tl.constexpr, shape: tl.constexpr):
    """Write the slots of a tensor ``(B, S, D)``."""
    for i in tl.static_range(body.slots):
        put(target + (b * body.slots + i) * shape.width + d, values[i], lane, shape.aligned)


@triton.jit
def load_rows(record, FIRST: tl.constexpr, COUNT: tl.constexpr, N, mask):
    """Numbers of a chunk's record."""
    out = ()
    for i in tl.static_range(COUNT):
        out = out + (read(record + (FIRST + i) * N, mask),)
    return out


@triton.jit
def store_rows(record, FIRST: tl.constexpr, values, N, lane, shape: tl.constexpr):
    for i in tl.static_range(len(values)):
        put(record + (FIRST + i) * N, values[i], lane, shape.aligned)


@triton.jit
def note(at, value):
    """Write one number of the record of mismatches."""
    put(at + tl.zeros([1], tl.int32), tl.zeros([1], tl.float32) + value, True, True)


@triton.jit
def any_far(differences, values, past, tol, body: tl.constexpr):
    """Lanes in which a difference of states is above the tolerance."""
    out = far(differences[0], scale_of(values, past, 0, body), tol)
    for i in tl.static_range(1, body.slots):
        out = out | far(differences[i], scale_of(values, past, i, body), tol)
    return out


@triton.jit
def scale_of(values, past, i: tl.constexpr, body: tl.constexpr):
    """What a difference of states is compared to. In a linear recurrence a small state is as exact as
    a large one, and may grow."""
    if body.linear:
        return tl.abs(values[i])
    else:
        return sized(values[i], past[i])


@triton.jit
def absolute(values, COUNT: tl.constexpr):
    out = ()
    for i in tl.static_range(COUNT):
        out = out + (tl.abs(values[i]),)
    return out


@triton.jit
def grown(past, state, row, body: tl.constexpr):
    """The largest states since a reset, with one more."""
    out = ()
    past = clear(row, past, body)
    for i in tl.static_range(len(past)):
        out = out + (tl.maximum(past[i], tl.abs(state[i])),)
    return out


@triton.jit
def masked(lane, condition, shape: tl.constexpr):
    return both(lane, condition, shape.aligned)
