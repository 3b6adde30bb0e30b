"""Scans with given operators against loops in float64.

A scan may compose operators in any order, so its error is measured against the same loop of
absolute values: the sum of all terms' sizes. Every composition rounds once a level and once an
entry of a product.
"""

from __future__ import annotations

import math

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pararnn import delta_scan, linear_scan, matrix_affine_scan, matrix_scan, parallel_scan_log
from pararnn.scan import reference
from pararnn.testing.cases import DEVICE, judged
from pararnn.testing.strategies import examples

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
ACCUMULATED = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.float32}
SHAPES = {"linear": (), "planar": (2, 2), "blocks": (3, 3)}
ROUNDINGS = 4

powers = st.sampled_from((0, 0, 0, -3, -20, -30, 3, 20, 30))
lengths = st.sampled_from((17, 0, 1, 2, 9, 33, 130))
resets = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 200)), max_size=3).map(tuple)
spoiled = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 200), st.sampled_from((math.nan, math.inf))),
    max_size=2,
).map(tuple)


def drawn(kind, length, dtype, seed, power, forcing, resets, spoiled):
    """Operators, inputs, a start and a mask; coefficients of both signs around ``10^power`` whose
    running products come back, so that states stay in range while products do not."""
    g = torch.Generator().manual_seed(seed)
    batch, n = 2, 3
    shape = SHAPES[kind] or (1, 1)
    k, v = shape[0], 1 if kind != "blocks" else 2

    def normal(*shape):
        return torch.randn(shape, generator=g, dtype=torch.float64)

    op = normal(batch, length, n, *shape) * shape[0] ** -0.5
    up = torch.randint(0, 2, (batch, length, n, 1, 1), generator=g) * 2.0 - 1
    op = op * 10.0 ** (power / 10 * up) if abs(power) < 20 else op * 10.0 ** (power / 10)
    b = normal(batch, length, n, k, v) * 10.0**forcing
    h0 = normal(batch, n, k, v) * 10.0**forcing
    mask = torch.zeros(batch, length, dtype=torch.bool)
    for row, step in resets:
        if length:
            mask[row % batch, step % length] = True
    for row, step, value in spoiled:
        if length:
            b[row % batch, step % length] = value
    return (*(x.to(dtype) for x in (op, b, h0)), mask)


def scanned(kind, op, b, h0, **options):
    options = {"return_state": True} | options
    if kind == "linear":
        squeezed = (op[..., 0, 0], b[..., 0, 0], h0[..., 0, 0])
        states, final = linear_scan(*squeezed, **options)
        return states[..., None, None], final[..., None, None]
    if kind == "planar":
        states, final = matrix_scan(op, b[..., 0], h0[..., 0], **options)
        return states[..., None], final[..., None]
    return matrix_affine_scan(op, b, h0, **options)


def bound(op, b, h0, mask, reverse, dtype):
    """By how much states may be off: roundings of the sum of all terms' sizes, and what underflows
    in the loop."""
    info = torch.finfo(dtype)
    size = reference.matrix(op.abs(), b.abs(), h0.abs(), resets=mask, reverse=reverse)
    one = torch.ones_like
    least = reference.matrix(op.abs(), one(b), one(h0), resets=mask, reverse=reverse)
    count = (b.shape[1] + 8) * op.shape[-1] * ROUNDINGS
    allowed = count * (info.eps / 2 * size + info.tiny * info.eps * least) + info.tiny
    return torch.where(size < info.max / 4, allowed, torch.full_like(allowed, math.inf))


@settings(max_examples=examples(120))
@given(
    st.sampled_from(tuple(SHAPES)), lengths, st.sampled_from(tuple(DTYPES)), st.integers(0, 999),
    powers, powers, resets, spoiled, st.booleans(),
)  # fmt: skip
@example("linear", 9, "float32", 0, 0, 0, ((0, 7),), ((0, 2, math.inf),), False)  # row 3
@example("planar", 9, "float32", 0, 0, 0, ((0, 2),), ((0, 7, math.nan),), True)  # row 3
def test_states(kind, length, dtype, seed, power, forcing, resets, spoiled, reverse):
    op, b, h0, mask = drawn(kind, length, DTYPES[dtype], seed, power, forcing, resets, spoiled)
    wide = [x.double() for x in (op, b, h0)]
    want = reference.matrix(*wide, resets=mask, reverse=reverse)
    allowed = bound(*wide, mask, reverse, ACCUMULATED[dtype])
    narrow = torch.finfo(DTYPES[dtype]).eps / 2 * want.abs() if dtype == "bfloat16" else 0.0
    given_ = [x.to(DEVICE) for x in (op, b, h0)]
    states, final = scanned(kind, *given_, resets=mask.to(DEVICE), reverse=reverse)
    judged("states", states, want, allowed + narrow)
    if length:
        last = 0 if reverse else -1
        judged("final state", final, want[:, last], allowed[:, last])


def same_bits(a, b):
    """Bit by bit; a NaN is one, whatever its bits are."""
    number = ~a.isnan()
    return torch.equal(number, ~b.isnan()) and torch.equal(
        a[number].view(torch.int32), b[number].view(torch.int32)
    )


@settings(max_examples=examples(40))
@given(
    st.sampled_from(tuple(SHAPES)), lengths, st.integers(0, 999), powers, st.booleans(),
    st.integers(0, 200), st.sampled_from((1.0, 1e6, 1e30, math.nan, math.inf)),
)  # fmt: skip
def test_causality_and_rows(kind, length, seed, power, reverse, cut, value):
    """Bits before a step do not depend on what comes from it on; nor a row's on other rows."""
    op, b, h0, _ = drawn(kind, length, torch.float32, seed, power, 0, (), ())
    cut = cut % max(length, 1)
    late = slice(0, cut) if reverse else slice(cut, None)
    early = slice(cut, None) if reverse else slice(0, cut)

    def states(op, b):
        return scanned(kind, *(x.to(DEVICE) for x in (op, b, h0)), reverse=reverse)[0]

    before, other, input_ = states(op, b), op.clone(), b.clone()
    other[:, late], input_[:, late] = other[:, late] * value, input_[:, late] - value
    assert same_bits(states(other, input_)[:, early], before[:, early])
    other, input_ = op.clone(), b.clone()
    other[1:], input_[1:] = other[1:] * value, input_[1:] - value
    assert same_bits(states(other, input_)[:1], before[:1])


@settings(max_examples=examples(40))
@given(
    st.sampled_from(tuple(SHAPES)), st.sampled_from((9, 1, 17, 33)), st.integers(0, 999),
    st.sampled_from((0, 3, -3)), st.sampled_from((0, -20, 12)), resets, st.booleans(),
)  # fmt: skip
def test_gradients(kind, length, seed, power, size, resets, reverse):
    """Gradients are those of the loop, for cotangents of any size."""
    op, b, h0, mask = drawn(kind, length, torch.float64, seed, power, 0, resets, ())
    g = torch.Generator().manual_seed(seed)
    bar = torch.randn(b.shape, generator=g, dtype=torch.float64) * 10.0**size

    def gradients(run, device="cpu"):
        leaves = [x.to(device).requires_grad_() for x in (op, b, h0)]
        return torch.autograd.grad((run(*leaves) * bar.to(device)).sum(), leaves)

    want = gradients(lambda *x: reference.matrix(*x, resets=mask, reverse=reverse))
    found = gradients(
        lambda *x: scanned(kind, *x, resets=mask.to(DEVICE), reverse=reverse)[0], DEVICE
    )
    for name, got, true in zip("abh", found, want, strict=True):
        judged(f"gradient of {name}", got, true, (1e-10 * true.abs().max()).expand(true.shape))


@settings(max_examples=examples(60))
@given(
    lengths, st.sampled_from(("float64", "float32")), st.integers(0, 999),
    st.sampled_from((0, 3, 30, -30, -1000)), st.sampled_from((0, 30, -30, -60)), resets,
    st.booleans(),
)  # fmt: skip
def test_log(length, dtype, seed, coefficient, value, resets, reverse):
    """:func:`parallel_scan_log` in its own words: the error is the rounding of the result."""
    g = torch.Generator().manual_seed(seed)
    a = torch.randn(2, length, 3, generator=g, dtype=torch.float64)
    a = (-a.abs() + coefficient / max(length, 1)).to(DTYPES[dtype])
    b = (torch.randn(2, length, 3, generator=g, dtype=torch.float64) + value).to(DTYPES[dtype])
    h0 = torch.rand(2, 3, generator=g, dtype=torch.float64).to(DTYPES[dtype])
    mask = torch.zeros(2, length, dtype=torch.bool)
    for row, step in resets:
        if length:
            mask[row % 2, step % length] = True
    states, final = parallel_scan_log(
        a.to(DEVICE), b.to(DEVICE), h0.to(DEVICE), resets=mask.to(DEVICE), reverse=reverse,
        return_state=True,
    )  # fmt: skip
    shaped = (a.double().exp()[..., None, None], b.double().exp()[..., None, None])
    want = reference.matrix(*shaped, h0.double()[..., None, None], resets=mask, reverse=reverse)[
        ..., 0, 0
    ]
    info = torch.finfo(DTYPES[dtype])
    # A logarithm of size s is off by a rounding of s, and so its exponential by as much of itself.
    top = 16 + a.abs().max().item() * length + b.abs().max().item() if length else 16
    allowed = 2.0**-52 * top * (length + 8) * want.abs() + info.eps * want.abs() + info.tiny
    allowed = torch.where(want < info.max / 4, allowed, torch.full_like(allowed, math.inf))
    judged("states", states, want, allowed)
    if length:
        last = 0 if reverse else -1
        judged("final state", final, want[:, last], allowed[:, last])


def delta_loop(k, v, beta, gamma, h0, mask, reverse):
    """States of the delta rule, token by token; k ``(B, T, nh, H, dk)``."""
    h, states = h0, [None] * k.shape[1]
    for t in reversed(range(k.shape[1])) if reverse else range(k.shape[1]):
        h = torch.where(mask[:, t].reshape(-1, 1, 1, 1), torch.zeros_like(h), h)
        h = gamma[:, t, :, None, None] * h
        for j in range(k.shape[2]):
            key, new = k[:, t, j], v[:, t, j]
            old = (key.unsqueeze(-1) * h).sum(-2)
            step = beta[:, t, j, :, None, None] * key.unsqueeze(-1)
            h = h + step * (new - old).unsqueeze(-2)
        states[t] = h
    return torch.stack(states, 1)


@settings(max_examples=examples(60))
@given(
    st.sampled_from((9, 1, 17, 70, 130)), st.sampled_from((1, 2)), st.sampled_from(tuple(DTYPES)),
    st.integers(0, 999), powers, resets, spoiled, st.booleans(), st.sampled_from((64, 16, 7)),
)  # fmt: skip
def test_delta(length, nh, dtype, seed, power, resets, spoiled, reverse, chunk):
    g = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=g, dtype=torch.float64)

    B, H, dk, dv = 2, 2, 4, 3
    q, k, v = normal(B, length, H, dk), normal(B, length, nh, H, dk), normal(B, length, nh, H, dv)
    k = k / k.norm(dim=-1, keepdim=True)
    v, h0 = v * 10.0**power, normal(B, H, dk, dv) * 10.0**power
    beta, gamma = (
        2 * torch.rand(B, length, nh, H, generator=g).double(),
        normal(B, length, H).tanh(),
    )
    for row, step, value in spoiled:
        v[row % B, step % length] = value
    mask = torch.zeros(B, length, dtype=torch.bool)
    for row, step in resets:
        mask[row % B, step % length] = True
    tensors = [x.to(DTYPES[dtype]) for x in (q, k, v, beta, h0, gamma)]
    q, k, v, beta, h0, gamma = (x.to(DEVICE) for x in tensors)
    y, final = delta_scan(
        q, k, v, beta, h0, gamma=gamma, resets=mask.to(DEVICE), reverse=reverse, chunk_size=chunk
    )
    wide = [x.double().cpu() for x in (k, v, beta, gamma, h0)]
    states = delta_loop(*wide, mask, reverse)
    wanted = (q.double().cpu().unsqueeze(-1) * states).sum(-2)
    info = torch.finfo(ACCUMULATED[dtype])
    # A micro-step moves a state by at most 2, its own size and the value's; keys are rounded, too.
    sizes = torch.nan_to_num(states.abs(), 0.0, 0.0, 0.0).amax((2, 3, 4), keepdim=True)
    sizes = sizes.flip(1).cummax(1).values.flip(1) if reverse else sizes.cummax(1).values
    steps = (length + 8) * nh * dk
    first = h0.double().cpu().abs().amax((1, 2, 3)).reshape(-1, 1, 1, 1, 1)
    inputs = torch.nan_to_num(wide[1].abs(), 0.0, 0.0, 0.0).amax((1, 2, 3, 4)).reshape(first.shape)
    scale = sizes + first + inputs
    allowed = ROUNDINGS * steps * info.eps * scale + info.tiny * 1e3
    length_q = q.double().cpu().abs().sum(-1, keepdim=True)
    narrow = torch.finfo(DTYPES[dtype]).eps / 2 * wanted.abs() if dtype == "bfloat16" else 0.0
    fits = scale < info.max / 1e3
    allowed = torch.where(fits, allowed, torch.full_like(allowed, math.inf))
    judged("output", y, wanted, (allowed[..., 0] * length_q + narrow).expand(wanted.shape))
    last = 0 if reverse else -1
    judged("final state", final, states[:, last], allowed[:, last].expand(final.shape))
