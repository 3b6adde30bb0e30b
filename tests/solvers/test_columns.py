"""The scan over operators that are known by what they do, against dense matrices and a loop."""

from __future__ import annotations

import pytest
import torch

from pararnn.solvers.columns import column_scan


def act(coefficients, x):
    """A 3×3 matrix a channel, given as nine numbers."""
    rows = [sum(coefficients[3 * i + j] * x[..., j, :] for j in range(3)) for i in range(3)]
    return torch.stack(rows, -2)


def problem(length, scale=0.5, seed=0):
    g = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    coefficients = tuple(scale * draw(2, length, 5) for _ in range(9))
    return (
        coefficients,
        draw(2, length, 3, 5),
        draw(2, 3, 5),
        torch.rand(2, length, generator=g) < 0.1,
    )


def loop(coefficients, b, x, resets, reverse):
    out = torch.empty_like(b)
    for t in range(b.shape[1])[:: -1 if reverse else 1]:
        if resets is not None:
            x = torch.where(resets[:, t, None, None], torch.zeros_like(x), x)
        x = act(tuple(c[:, t] for c in coefficients), x) + b[:, t]
        out[:, t] = x
    return out


@pytest.mark.parametrize("length", [1, 2, 32, 33, 64, 101, 400])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("cut", [False, True])
def test_against_the_loop(length, reverse, cut):
    coefficients, b, x0, resets = problem(length)
    resets = resets if cut else None
    out = torch.full_like(b, float("nan"))
    got = column_scan(act, coefficients, b, x0, resets, axes=1, reverse=reverse, out=out)
    assert got is out
    want = loop(coefficients, b, x0, resets, reverse)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-11)


def test_products_that_overflow_where_states_do_not():
    """An operator that grows a direction in which nothing is: its product is infinite."""
    length = 1600
    coefficients = tuple(torch.zeros(1, length, 1) for _ in range(9))
    coefficients[0].fill_(0.5)
    coefficients[4].fill_(1e3)  # 1e3 ** 40 is beyond float32
    b = torch.zeros(1, length, 3, 1)
    b[:, :, 0] = 1
    x0 = torch.zeros(1, 3, 1)
    got = column_scan(
        act, coefficients, b, x0, None, axes=1, reverse=False, out=torch.empty_like(b)
    )
    assert bool(got.isfinite().all())
    assert torch.equal(got, loop(coefficients, b, x0, None, False))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_in_its_channel_and_after_it(bad):
    coefficients, b, x0, _ = problem(200)
    clean = loop(coefficients, b, x0, None, False)
    b[1, 77, 2, 3] = bad
    got = column_scan(
        act, coefficients, b, x0, None, axes=1, reverse=False, out=torch.empty_like(b)
    )
    want = loop(coefficients, b, x0, None, False)
    assert torch.equal(got.isfinite(), want.isfinite())
    torch.testing.assert_close(got[:, :77], clean[:, :77], rtol=1e-10, atol=1e-11)
    assert bool(got[0].isfinite().all())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e200])
def test_rows_keep_their_bits(bad):
    """A NaN in one row, or a product of it that overflows, is nothing to the others, and nothing to
    the steps before it."""
    coefficients, b, x0, _ = problem(200)

    def run():
        out = torch.empty_like(b)
        return column_scan(act, coefficients, b, x0, None, axes=1, reverse=False, out=out).clone()

    clean = run()
    coefficients[4][1, 77:80, 3] = bad
    got = run()
    assert torch.equal(got[0], clean[0])
    assert torch.equal(got[1, :77], clean[1, :77])
