"""Affine scans against a loop over dense matrices in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pararnn.scan import (
    Block,
    Dense,
    Diagonal,
    Flat,
    Left,
    MaxPlus,
    Right,
    affine,
    affine_scan,
)

LENGTHS = (0, 1, 2, 31, 32, 33, 47, 64, 101, 147, 1031)
B = 2


class Case:
    """An algebra, random operators of it, and the dense matrix that each operator stands for."""

    def __init__(self, name, algebra, state_shape, op_shape, matrix):
        self.name, self.algebra = name, algebra
        self.state_shape, self.op_shape, self.matrix = state_shape, op_shape, matrix

    def draw(self, length, seed=0):
        g = torch.Generator().manual_seed(seed)
        scale = 1.2 / max(self.state_shape) ** 0.5
        op = scale * torch.randn((B, length, *self.op_shape), generator=g, dtype=torch.float64)
        b = torch.randn((B, length, *self.state_shape), generator=g, dtype=torch.float64)
        x0 = torch.randn((B, *self.state_shape), generator=g, dtype=torch.float64)
        return op, b, x0


def block_matrix(op):  # (S, S, d) -> (S d, S d)
    s, _, d = op.shape
    out = np.zeros((s * d, s * d))
    for i in range(s):
        for j in range(s):
            out[i * d : (i + 1) * d, j * d : (j + 1) * d] = np.diag(op[i, j])
    return out


def wide_block_matrix(op):  # (S, S, K, V): one S×S block for each of K·V channels
    return block_matrix(op.reshape(*op.shape[:2], -1))


def heads_matrix(op):  # (n, w, w) -> block diagonal
    n, w, _ = op.shape
    out = np.zeros((n * w, n * w))
    for i in range(n):
        out[i * w : (i + 1) * w, i * w : (i + 1) * w] = op[i]
    return out


def slots_matrix(op):  # (n, S w, S w) acting on (S, n w), S = 2
    n, sw, _ = op.shape
    w = sw // 2
    out = np.zeros((2, n, w, 2, n, w))
    for i in range(n):
        out[:, i, :, :, i, :] = op[i].reshape(2, w, 2, w)
    return out.reshape(2 * n * w, 2 * n * w)


CASES = [
    Case("diagonal", Diagonal(), (3,), (3,), np.diag),
    Case(
        "diagonal of a matrix state", Diagonal(), (2, 3), (2, 3), lambda a: np.diag(a.reshape(-1))
    ),
    Case("block", Block(), (2, 3), (2, 2, 3), block_matrix),
    Case("block of a matrix state", Block(axes=2), (2, 2, 3), (2, 2, 2, 3), wide_block_matrix),
    Case("dense", Dense(), (3,), (1, 3, 3), lambda a: a[0]),
    Case("heads", Dense(heads=2), (4,), (2, 2, 2), heads_matrix),
    Case("heads, slots", Dense(heads=2, slots=2), (2, 4), (2, 4, 4), slots_matrix),
    Case("flat", Flat((2, 2)), (2, 2), (4, 4), lambda a: a),
    Case("left", Left(), (2, 3), (2, 2), lambda a: np.kron(a, np.eye(3))),
    Case("left of one row", Left(), (1, 3), (1, 1), lambda a: np.kron(a, np.eye(3))),
    Case("right", Right(), (2, 3), (3, 3), lambda a: np.kron(np.eye(2), a.T)),
    Case(
        "right by row",
        Right(by_row=True),
        (2, 3),
        (2, 3, 3),
        lambda a: heads_matrix(np.swapaxes(a, -1, -2)),
    ),
]
case = pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)


def loop(case, op, b, x0, reverse=False):
    op, b, x0 = op.numpy(), b.numpy(), x0.numpy()
    out = np.zeros(b.shape)
    for i in range(b.shape[0]):
        x = x0[i].reshape(-1)
        steps = range(b.shape[1])
        for t in reversed(steps) if reverse else steps:
            x = case.matrix(op[i, t]) @ x + b[i, t].reshape(-1)
            out[i, t] = x.reshape(case.state_shape)
    return out


@case
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
def test_against_the_loop(case, length, reverse):
    op, b, x0 = case.draw(length)
    got = affine_scan(op, b, x0, algebra=case.algebra, reverse=reverse)
    np.testing.assert_allclose(got.numpy(), loop(case, op, b, x0, reverse), 1e-9, 1e-9)
    got = affine_scan(op, b, algebra=case.algebra, reverse=reverse)
    want = loop(case, op, b, torch.zeros_like(x0), reverse)
    np.testing.assert_allclose(got.numpy(), want, 1e-9, 1e-9)


@case
def test_apply_affine_compose_transpose(case):
    op, b, x0 = case.draw(2)
    first, second = op[:, 0], op[:, 1]
    a = case.algebra
    for i in range(B):
        A1, A2, x = (
            case.matrix(first[i].numpy()),
            case.matrix(second[i].numpy()),
            x0[i].reshape(-1).numpy(),
        )
        flat = lambda t: t[i].reshape(-1).numpy()  # noqa: B023, E731
        np.testing.assert_allclose(flat(a.apply(first, x0)), A1 @ x, 1e-12, 1e-12)
        want = A1 @ x + flat(b[:, 0])
        np.testing.assert_allclose(flat(a.affine(first, x0, b[:, 0])), want, 1e-12, 1e-12)
        composed = a.apply(a.compose(second, first), x0)
        np.testing.assert_allclose(flat(composed), A2 @ A1 @ x, 1e-12, 1e-12)
        np.testing.assert_allclose(flat(a.apply(a.transpose(first), x0)), A1.T @ x, 1e-12, 1e-12)


@case
@pytest.mark.parametrize("length", [5, 40, 83])
@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
def test_strides_and_out(case, length, reverse):
    op, b, x0 = case.draw(length)
    want = affine_scan(op, b, x0, algebra=case.algebra, reverse=reverse)
    wide = torch.full((B, 2 * length + 1, *op.shape[2:]), torch.nan, dtype=torch.float64)
    wide[:, 1::2] = op
    swapped = b.transpose(0, 1).contiguous().transpose(0, 1)
    buffer = torch.full((B, length + 2, *b.shape[2:]), torch.nan, dtype=torch.float64)
    out = buffer[:, 1:-1]
    got = affine_scan(wide[:, 1::2], swapped, x0, algebra=case.algebra, reverse=reverse, out=out)
    assert got.data_ptr() == out.data_ptr()
    assert torch.equal(out, want)
    assert bool(buffer[:, [0, -1]].isnan().all()), "wrote beside the output"
    kept = b.clone()
    affine_scan(op, b, x0, algebra=case.algebra, reverse=reverse)
    assert torch.equal(b, kept)


@pytest.mark.parametrize("length", [5, 70])
def test_expanded_inputs(length):
    """Zero strides in the inputs must not make the output share memory."""
    op = torch.full((1, 1, 3), 0.5, dtype=torch.float64).expand(B, length, 3)
    b = torch.ones(1, 1, 1, dtype=torch.float64).expand(B, length, 3)
    got = affine_scan(op, b)
    want = 2 - 2.0 ** -torch.arange(0, length, dtype=torch.float64)
    torch.testing.assert_close(got, want.reshape(1, -1, 1).expand(B, length, 3))


def test_no_batch_and_no_autograd():
    assert affine_scan(torch.zeros(0, 50, 3), torch.zeros(0, 50, 3)).shape == (0, 50, 3)
    op = torch.rand(1, 40, 2, requires_grad=True)
    assert not affine_scan(op, torch.rand(1, 40, 2)).requires_grad


@pytest.mark.parametrize("shape", [(2, 41, 3), (1, 40, 3), (3, 40, 3)])
def test_shapes_must_agree(shape):
    with pytest.raises(ValueError, match="leading shapes"):
        affine_scan(torch.zeros(shape), torch.zeros(2, 40, 3))


def test_float32_stays_float32_and_accurate():
    g = torch.Generator().manual_seed(0)
    op = 0.98 + 0.02 * torch.rand(2, 2000, 8, generator=g)
    b = torch.randn(2, 2000, 8, generator=g)
    got = affine_scan(op, b)
    want = affine_scan(op.double(), b.double())
    assert got.dtype == torch.float32
    assert float((got - want).abs().max() / want.abs().max()) < 1e-6


def test_a_nan_stays_in_its_row_and_after_its_step():
    op, b, x0 = CASES[0].draw(90)
    b[0, 40, 1] = torch.nan
    got = affine_scan(op, b, x0)
    assert not got[1].isnan().any()
    assert not got[0, :40].isnan().any()
    assert bool(got[0, 40:, 1].isnan().all())
    assert not got[0, :, [0, 2]].isnan().any()


@case
@pytest.mark.parametrize("length", [33, 101])
@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
def test_large_steps_are_walked(case, length, reverse, monkeypatch):
    monkeypatch.setitem(affine.WIDE, "cpu", 1)
    op, b, x0 = case.draw(length)
    got = affine_scan(op, b, x0, algebra=case.algebra, reverse=reverse)
    np.testing.assert_allclose(got.numpy(), loop(case, op, b, x0, reverse), 1e-9, 1e-9)


def test_large_batches_take_longer_chunks(monkeypatch):
    monkeypatch.setattr(affine, "PIECE", 16)
    op, b, x0 = CASES[0].draw(301)
    np.testing.assert_allclose(affine_scan(op, b, x0).numpy(), loop(CASES[0], op, b, x0), 1e-9)


class Written(TorchDispatchMode):
    """Counts operations, and the numbers that they write."""

    def __init__(self):
        super().__init__()
        self.calls = self.numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not function.is_view:
            self.calls += 1
            self.numbers += result.numel()
        return result


@pytest.mark.parametrize("length", [1000, 10000])
def test_work_is_linear_in_few_operations(length):
    op, b, x0 = CASES[0].draw(length)
    with Written() as written:
        affine_scan(op, b, x0)
    assert written.numbers < 6 * b.numel()
    assert written.calls < 12 * length**0.4 + 100


def max_plus(op, b, x0, reverse):
    x, out = x0, torch.empty_like(b)
    steps = range(b.shape[1])
    for t in reversed(steps) if reverse else steps:
        x = torch.maximum(op[:, t] + x, b[:, t])
        out[:, t] = x
    return out


@pytest.mark.parametrize("length", [0, 1, 40, 300])
@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
def test_maxima_and_sums(length, reverse):
    op, b, x0 = CASES[0].draw(length)
    op, b = torch.round(8 * op), torch.round(64 * b)  # whole numbers: sums are exact
    b[torch.rand(b.shape) < 0.3] = -torch.inf
    op[torch.rand(op.shape) < 0.1] = -torch.inf
    x0 = x0.round()
    x0[0] = -torch.inf
    got = affine_scan(op, b, x0, algebra=MaxPlus(), reverse=reverse)
    assert torch.equal(got, max_plus(op, b, x0, reverse))


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
def test_pieces_that_fill_the_cache(reverse):
    """Many numbers a step, but not so many that all is walked directly: chunks become longer."""
    g = torch.Generator().manual_seed(0)
    b = torch.randn(1, 400, 4096, generator=g)
    assert b.numel() // affine.PIECE > round(400**0.4)
    op = torch.rand(b.shape, generator=g)
    want, x = torch.empty_like(b, dtype=torch.float64), torch.zeros(1, 4096, dtype=torch.float64)
    for t in reversed(range(400)) if reverse else range(400):
        x = op[:, t].double() * x + b[:, t].double()
        want[:, t] = x
    got = affine_scan(op, b, algebra=Diagonal(), reverse=reverse)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(1, 3), (3, 1), (2, 3), (1, 1)], ids=str)
def test_cotangents_of_left_operators(shape):
    g = torch.Generator().manual_seed(0)
    bar, x = torch.randn(2, 2, 5, *shape, generator=g, dtype=torch.float64)
    want = torch.einsum("btkv,btlv->btkl", bar, x)
    torch.testing.assert_close(Left().outer(bar, x), want)
    torch.testing.assert_close(Left().outer(bar, x, out=torch.empty_like(want)), want)


@pytest.mark.parametrize("heads", [1, 2])
def test_norms_of_dense_operators(heads):
    op = torch.randn(2, 5, heads, 3, 3, generator=torch.Generator().manual_seed(0))
    want = np.linalg.svd(op.double().numpy(), compute_uv=False)[..., 0]
    np.testing.assert_allclose(Dense(heads).norm(op).numpy(), want, rtol=1e-5)
