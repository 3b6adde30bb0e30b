"""Clauses where they meet: packing × half precision, padding × NaN, autocast × order of derivative."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import pararnn
from pararnn.testing.cases import DEVICE, drawn
from pararnn.testing.strategies import cases, examples

pytestmark = pytest.mark.filterwarnings("ignore::pararnn.NewtonWarning")


def close(got, want, tolerance):
    """Within a part of the largest entry."""
    got, want = got.detach().double(), want.detach().double()
    top = want.abs().max() if want.numel() else want.new_zeros(())
    torch.testing.assert_close(got, want, rtol=0, atol=float(tolerance * top) + 1e-38)


@settings(max_examples=examples(30))
@given(cases(tame=True), st.lists(st.integers(1, 11), min_size=1, max_size=3), st.booleans())
def test_packed_sequences(case, lengths, spoil):
    """Every row is what it is alone, in any dtype: outputs and the state to go on from. Padding may
    hold anything."""
    problem = drawn(dataclasses.replace(case, batch=1, length=1, resets=(), h0=None))
    cell = problem.cell
    assume(cell.spec.gap is None)
    g = torch.Generator().manual_seed(case.seed)
    x = torch.randn(len(lengths), max(lengths), cell.d_in, generator=g).to(problem.drives)
    for row, length in enumerate(lengths):
        x[row, length:] = math.nan if spoil else 7.0
    layer = pararnn.ParaRNN(cell)
    packed = pack_padded_sequence(x, torch.tensor(lengths), batch_first=True, enforce_sorted=False)
    with torch.no_grad():
        output, final = layer(packed)
        whole, _ = pad_packed_sequence(output, batch_first=True)
        for row, length in enumerate(lengths):
            alone, state = layer(x[row : row + 1, :length])
            tolerance = 1e-10 if case.dtype == "float64" else 1e-5
            here = final.select(-1 - len(cell.state_shape), row)
            there = state.select(-1 - len(cell.state_shape), 0)
            assert here.dtype == there.dtype
            close(here, there, tolerance)
            ulp = 2.0**-8 if case.dtype == "bfloat16" else 0.0
            close(whole[row, :length], alone[0], tolerance + ulp)


def derivatives(run, leaves):
    """A value, its gradients, and those of a function of them."""
    value = run()
    first = torch.autograd.grad(
        (value * value.detach().cos()).sum(), leaves, create_graph=True,
        allow_unused=True, materialize_grads=True,
    )  # fmt: skip
    total = sum((x * x.detach().sin()).sum() for x in first)
    if not total.requires_grad:
        return [value, *first]
    second = torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)
    return [value, *first, *second]


def agree(run, leaves, tolerance=1e-5):
    """Inside an autocast region as outside, in every order."""
    outside = derivatives(run, leaves)
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        inside = derivatives(run, leaves)
    for got, want in zip(inside, outside, strict=True):
        assert got.dtype == want.dtype
        close(got, want, tolerance)


@settings(max_examples=examples(40))
@given(cases(dtypes=("float32",), tame=True))
def test_autocast_does_not_reach_a_recurrence(case):
    """With drives in float32: states, gradients and second derivatives."""
    assume(case.batch and case.length)
    problem = drawn(case)
    leaves = list(problem.leaves().values())
    for leaf in leaves:
        leaf.requires_grad_()
    agree(lambda: problem.solve().states, leaves)


@pytest.mark.parametrize("length", [5, 70])
@pytest.mark.parametrize("scan", ["linear", "planar", "blocks", "delta"])
def test_autocast_does_not_reach_a_scan(scan, length):
    g = torch.Generator().manual_seed(length)

    def leaf(*shape, scale=1.0):
        return (scale * torch.randn(shape, generator=g)).to(DEVICE).requires_grad_()

    if scan == "linear":
        a, b = leaf(2, length, 3, scale=0.7), leaf(2, length, 3)
        agree(lambda: pararnn.linear_scan(a, b), [a, b])
    elif scan == "planar":
        a, b = leaf(2, length, 3, 2, 2, scale=0.5), leaf(2, length, 3, 2)
        agree(lambda: pararnn.matrix_scan(a, b), [a, b])
    elif scan == "blocks":
        a, b = leaf(2, length, 2, 3, 3, scale=0.4), leaf(2, length, 2, 3, 2)
        agree(lambda: pararnn.matrix_affine_scan(a, b), [a, b])
    else:
        q, v = leaf(2, length, 2, 4), leaf(2, length, 2, 3)
        k, beta = leaf(2, length, 2, 4, scale=0.5), leaf(2, length, 2, scale=0.5)
        agree(lambda: pararnn.delta_scan(q, k, v, beta)[0], [q, k, v, beta])
