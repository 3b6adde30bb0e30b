"""Scans whose products leave the range of the dtype, or meet what is not finite, against the loop in
the same dtype; and what a bad number is nothing to, bit for bit."""

from __future__ import annotations

import math

import pytest
import torch

from pararnn.scan import (
    Block,
    Dense,
    Diagonal,
    Flat,
    Left,
    Right,
    affine_scan,
    linear_scan,
    matrix_affine_scan,
    matrix_scan,
    parallel_scan_log,
    prefix_sum,
)

INF, NAN = math.inf, math.nan
directions = pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
ALGEBRAS = {
    "diagonal": (Diagonal(), (3, 2), (3, 2)),
    "block": (Block(), (2, 2, 3), (2, 3)),
    "block of axes": (Block(2), (2, 2, 3, 2), (2, 3, 2)),
    "heads": (Dense(2), (2, 3, 3), (6,)),
    "heads of two slots": (Dense(2, 2), (2, 4, 4), (2, 4)),
    "flat": (Flat((2, 2)), (4, 4), (2, 2)),
    "left": (Left(), (2, 3, 3), (2, 3, 2)),
    "right": (Right(), (3, 3), (2, 3)),
    "right by row": (Right(True), (2, 3, 3), (2, 3)),
}
algebras = pytest.mark.parametrize("kind", ALGEBRAS)
SCANS = {
    "linear": (linear_scan, (4,), (4,)),
    "planar": (matrix_scan, (3, 2, 2), (3, 2)),
    "blocks": (matrix_affine_scan, (2, 3, 3), (2, 3, 2)),
}


def drawn(op_shape, shape, length, seed=0, batch=3):
    g = torch.Generator().manual_seed(seed)
    op = 0.4 * torch.randn(batch, length, *op_shape, generator=g)
    return (
        op,
        torch.randn(batch, length, *shape, generator=g),
        torch.randn(batch, *shape, generator=g),
    )


def walked(algebra, op, b, x, reverse, resets=None):
    """The loop."""
    states = torch.empty_like(b)
    for t in reversed(range(b.shape[1])) if reverse else range(b.shape[1]):
        x = algebra.apply(op[:, t], x) + b[:, t]
        if resets is not None:
            x = torch.where(resets[:, t].reshape(-1, *(1,) * (x.ndim - 1)), b[:, t], x)
        states[:, t] = x
    return states


@directions
@pytest.mark.parametrize("length", [33, 100, 700])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_products_that_underflow(length, dtype, reverse):
    """States fall by forty orders of magnitude in eight steps and come back, so the product of these
    steps is subnormal while the states are not."""
    decades = 5.5 if dtype == torch.float32 else 39
    steps = torch.tensor([-decades] * 8 + [decades] * 8, dtype=torch.float64).repeat(
        length // 16 + 1
    )
    a = (10.0 ** steps[:length]).reshape(1, -1, 1).expand(2, length, 3).to(dtype)
    a = a.flip(1) if reverse else a
    b, h0 = torch.zeros_like(a), torch.full((2, 3), 10.0 ** (4 * decades), dtype=dtype)
    want = walked(Diagonal(), a, b, h0, reverse)
    assert bool((want != 0).all())
    got = linear_scan(a, b, h0, reverse=reverse)
    torch.testing.assert_close(got, want, rtol=8 * length * torch.finfo(dtype).eps, atol=0)


@directions
@pytest.mark.parametrize("scan", [matrix_scan, matrix_affine_scan])
def test_products_of_blocks_that_underflow(scan, reverse):
    steps = torch.tensor([-5.5] * 8 + [5.5] * 8, dtype=torch.float64).repeat(20)
    turn = torch.tensor([[0.6, -0.8], [0.8, 0.6]])
    op = (10.0 ** steps.float())[:, None, None] * turn
    op = op.reshape(1, -1, 1, 2, 2).expand(2, -1, 3, 2, 2)
    shape = (2, 320, 3, 2) + (2,) * (scan is matrix_affine_scan)
    b, h0 = torch.zeros(shape), torch.full((2, *shape[2:]), 1e22)
    op = op.flip(1) if reverse else op
    wide = op.double(), b.double(), h0.double()
    want = scan(*wide, reverse=reverse)
    got = scan(op, b, h0, reverse=reverse)
    size = want.abs().amax(3, keepdim=True)
    assert float(((got - want).abs() / size).max()) < 1e-4


@algebras
@directions
def test_random_walks_of_magnitude(kind, reverse):
    """Rows and steps of very different sizes: what is finite in the loop is right, and the rest is
    not finite."""
    algebra, op_shape, shape = ALGEBRAS[kind]
    for seed in range(2):
        op, b, x0 = drawn(op_shape, shape, 300, seed)
        g = torch.Generator().manual_seed(seed)
        scale = 10.0 ** (12 * torch.randn(3, 300, generator=g))
        scale[0] = 1
        op = op * scale.reshape(3, 300, *(1,) * len(op_shape))
        got = affine_scan(op, b, x0, algebra=algebra, reverse=reverse)
        want = walked(algebra, op, b, x0, reverse)
        assert torch.equal(got.isfinite(), want.isfinite())
        terms = walked(
            algebra, op.abs().double(), b.abs().double() + 1e-37, x0.abs().double(), reverse
        )
        close = (got - want).abs().double() <= 8 * 300 * 6 * 6e-8 * terms
        assert bool((close | ~want.isfinite()).all())


@algebras
@directions
@pytest.mark.parametrize("length", [20, 150])
@pytest.mark.parametrize("poison", [NAN, -INF, 1e30])
def test_a_reset_selects(kind, reverse, length, poison):
    """Nothing that stood before a reset changes a bit after it, nor another row, nor what was before
    it."""
    algebra, op_shape, shape = ALGEBRAS[kind]
    op, b, x0 = drawn(op_shape, shape, length)
    g = torch.Generator().manual_seed(1)
    resets = torch.rand(3, length, generator=g) < 0.02
    at, bad = length // 2, length // 2 + (5 if reverse else -5)
    resets[0], resets[1, min(at, bad) : max(at, bad)], resets[1, at] = False, False, True
    after = slice(None, at + 1) if reverse else slice(at, None)
    before = slice(bad + 1, None) if reverse else slice(None, bad)

    def run(op, b, x0):
        return affine_scan(op, b, x0, algebra=algebra, resets=resets, reverse=reverse)

    clean = run(op, b, x0)
    for where in ("op", "b", "x0"):
        given = {"op": op.clone(), "b": b.clone(), "x0": x0.clone()}
        given[where][(1,) if where == "x0" else (1, bad)] = poison
        got = run(**given)
        assert torch.equal(got[1, after], clean[1, after])
        assert torch.equal(got[[0, 2]], clean[[0, 2]])
        if where != "x0":
            assert torch.equal(got[1, before], clean[1, before])
        want = walked(algebra, given["op"], given["b"], given["x0"], reverse, resets)
        assert torch.equal(got.isfinite(), want.isfinite())


@directions
def test_an_overflow_before_a_reset(reverse):
    """Numbers that are finite, of a state that is not."""
    a, b = torch.full((1, 400, 2), 8.0), torch.zeros(1, 400, 2)
    b[:, [0, 200, -1]] = 1  # powers of two: nothing is rounded
    resets = torch.zeros(1, 400, dtype=torch.bool)
    resets[0, 200] = True
    got = linear_scan(a, b, resets=resets, reverse=reverse)
    fresh = slice(None, 201) if reverse else slice(200, None)
    want = linear_scan(a[:, fresh], b[:, fresh], reverse=reverse)
    assert bool(got.isinf().any())
    assert not bool(got.isnan().any())
    fits = want.isfinite()
    assert torch.equal(got[:, fresh][fits], want[fits])


@pytest.mark.parametrize("kind", SCANS)
@directions
@pytest.mark.parametrize("length", [20, 200])
@pytest.mark.parametrize("poison", [NAN, INF, 3e38])
def test_no_gradient_crosses_a_reset(kind, reverse, length, poison):
    scan, op_shape, shape = SCANS[kind]
    op, b, h0 = drawn(op_shape, shape, length, batch=2)
    at, bad = length // 2, length // 2 + (5 if reverse else -5)
    resets = torch.zeros(2, length, dtype=torch.bool)
    resets[1, at] = True
    after = slice(None, at + 1) if reverse else slice(at, None)
    before = slice(at + 1, None) if reverse else slice(None, at)

    def gradients(again, **given):
        given = [x.clone().requires_grad_() for x in given.values()]
        states = scan(*given, resets=resets, reverse=reverse)
        loss = states[0].sin().sum() + states[1, after].sin().sum()
        return torch.autograd.grad(loss, given, create_graph=again)

    for again in (False, True):
        clean = gradients(again, op=op, b=b, h0=h0)
        for where in ("op", "b", "h0"):
            given = {"op": op.clone(), "b": b.clone(), "h0": h0.clone()}
            given[where][(1,) if where == "h0" else (1, bad)] = poison
            got = gradients(again, **given)
            for g, c in zip(got[:2], clean[:2], strict=True):
                assert torch.equal(g[0], c[0])
                assert torch.equal(g[1, after], c[1, after])
                assert float(g[1, before].abs().sum()) == 0
            assert torch.equal(got[2][0], clean[2][0])
            assert float(got[2][1].abs().sum()) == 0


def test_a_cotangent_from_behind_a_reset():
    """A NaN among the cotangents after a reset is nothing to what comes before it."""
    a, b, h0 = (x.requires_grad_() for x in drawn((4,), (4,), 100, batch=1))
    resets = torch.zeros(1, 100, dtype=torch.bool)
    resets[0, 50] = True
    bar = torch.ones(1, 100, 4)
    want = torch.autograd.grad(linear_scan(a, b, h0, resets=resets), (a, b, h0), bar)
    bar[:, 60] = NAN
    got = torch.autograd.grad(linear_scan(a, b, h0, resets=resets), (a, b, h0), bar)
    for g, w in zip(got[:2], want[:2], strict=True):
        assert torch.equal(g[:, :50], w[:, :50])
    assert torch.equal(got[2], want[2])
    assert not bool(got[0][:, 50].any())


def test_a_later_nan_leaves_earlier_gradients():
    """A coefficient and a state that a loss of earlier steps does not depend on."""
    a, b, h0 = drawn((4,), (4,), 100, batch=2)
    clean = [x.clone().requires_grad_() for x in (a, b, h0)]
    want = torch.autograd.grad(linear_scan(*clean)[:, :40].sum(), clean)
    a[1, 70] = NAN
    bad = [x.clone().requires_grad_() for x in (a, b, h0)]
    got = torch.autograd.grad(linear_scan(*bad)[:, :40].sum(), bad)
    for g, w in zip(got, want, strict=True):
        assert torch.equal(g, w)


@pytest.mark.parametrize("value", [650.0, -650.0, -INF, NAN])
def test_logarithms_elsewhere_change_no_bit(value):
    """Which states are recentred is no affair of other rows, nor of earlier steps."""
    g = torch.Generator().manual_seed(0)
    c = -torch.rand(3, 100, 4, generator=g, dtype=torch.float64)
    v = torch.randn(3, 101, 4, generator=g, dtype=torch.float64)
    clean = parallel_scan_log(c, v)
    v[1, 60] = value
    got = parallel_scan_log(c, v)
    assert torch.equal(got[[0, 2]], clean[[0, 2]])
    assert torch.equal(got[1, :59], clean[1, :59])
    c[2, 70] = 3.0
    assert torch.equal(parallel_scan_log(c, v)[2, :70], clean[2, :70])


def test_a_logarithm_before_a_reset():
    g = torch.Generator().manual_seed(0)
    c = -torch.rand(1, 100, 4, generator=g)
    v = torch.randn(1, 101, 4, generator=g)
    resets = torch.zeros(1, 100, dtype=torch.bool)
    resets[0, 50] = True
    clean = parallel_scan_log(c, v, resets=resets)
    for bad in (NAN, INF):
        for which, at in ((v, (0, 46)), (c, (0, 45))):
            kept = which[at].clone()
            which[at] = bad
            assert torch.equal(parallel_scan_log(c, v, resets=resets)[:, 50:], clean[:, 50:])
            which[at] = kept


@directions
@pytest.mark.parametrize("largest", [0.0, 650.0], ids=["as they are", "recentred"])
@pytest.mark.parametrize("value", [NAN, INF, 1e5])
@pytest.mark.parametrize("again", [False, True], ids=["first", "second derivative"])
def test_no_gradient_of_a_logarithm_crosses_a_reset(value, largest, again, reverse):
    """A NaN, an infinity or an exponential that overflows: gradients of what follows the reset are
    those of a loop that never saw it."""
    g = torch.Generator().manual_seed(0)
    c = -torch.rand(1, 100, 4, generator=g, dtype=torch.float64)
    v = torch.randn(1, 100, 4, generator=g, dtype=torch.float64)
    h0 = torch.rand(1, 4, generator=g, dtype=torch.float64)
    at = 49 if reverse else 50
    resets = torch.zeros(1, 100, dtype=torch.bool)
    resets[0, at] = True
    after = slice(None, at + 1) if reverse else slice(at, None)
    before = slice(at + 1, None) if reverse else slice(None, at)
    v[:, 60 if reverse else 20] = largest
    order = range(at, -1, -1) if reverse else range(at, 100)
    bad = at + 5 if reverse else at - 5

    def pulled(states, leaves):
        first = torch.autograd.grad(states.sin().sum(), leaves, create_graph=again)
        if not again:
            return first
        return torch.autograd.grad(sum(x.sin().sum() for x in first[:2]), leaves[:2])

    x, y = c.clone().requires_grad_(), v.clone().requires_grad_()
    h, wanted = torch.zeros(1, 4, dtype=torch.float64), []
    for t in order:
        h = (x[:, t].exp() * h if t != at else 0.0) + y[:, t].exp()
        wanted.append(h)
    right = pulled(torch.stack(wanted, 1), (x, y))
    for i in range(3):
        for initial in (h0, None):
            c2, v2, start = c.clone(), v.clone(), h0.clone()
            (c2, v2, start)[i][(0, bad) if i < 2 else (0,)] = value
            if initial is None:
                v2 = torch.cat([start.log().unsqueeze(1), v2], 1)
            leaves = [c2.requires_grad_(), v2.requires_grad_(), start.requires_grad_()]
            given = (c2, v2) if initial is None else (c2, v2, start)
            states = parallel_scan_log(*given, resets=resets, reverse=reverse)[:, after]
            found = list(pulled(states, leaves[: len(given)]))
            if initial is None:
                assert float(found[1][:, 0].abs().sum()) == 0
                found[1] = found[1][:, 1:]
            for got, want in zip(found, right, strict=False):
                torch.testing.assert_close(got[:, after], want[:, after], rtol=1e-11, atol=1e-13)
                assert float(got[:, before].abs().sum()) == 0
            if len(found) > 2:
                assert float(found[2].abs().sum()) == 0


def test_sums_begin_with_their_start():
    assert prefix_sum(
        torch.full((1, 2, 1), 3e38), torch.full((1, 1), -3e38)
    ).flatten().tolist() == [
        0.0,
        float(torch.tensor(3e38)),
    ]


def test_a_check_that_is_not_needed_costs_no_walk(monkeypatch):
    """Ordinary numbers, and closed gates whose products underflow, walk no chunk twice."""
    from pararnn.scan import chunks

    counted = []
    original = chunks.Chunks._walked
    monkeypatch.setattr(
        chunks.Chunks,
        "_walked",
        lambda self, *given, absolute=False: (
            counted.append(absolute) or original(self, *given, absolute=absolute)
        ),
    )
    g = torch.Generator().manual_seed(0)
    b = torch.randn(4, 1000, 64, generator=g)
    for a in (
        torch.rand(b.shape, generator=g),
        1e-4 * torch.rand(b.shape, generator=g),
        -b.sigmoid(),
    ):
        linear_scan(a, b)
    assert False not in counted
