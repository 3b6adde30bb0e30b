"""Numbers that are not finite: they reach what the loop says they reach, whatever the chunks."""

from __future__ import annotations

import pytest
import torch

from pararnn.scan import delta as module
from pararnn.scan import delta_scan, reference

SHAPE = (2, 11, 2, 2, 3, 4)  # batch, tokens, micro-steps, heads, rows, columns


def draw(seed=0):
    batch, length, micro, heads, rows, columns = SHAPE
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    q, k = normal(batch, length, heads, rows), normal(batch, length, micro, heads, rows) / 2
    v, beta = normal(batch, length, micro, heads, columns), normal(batch, length, micro, heads)
    gamma = normal(batch, length, heads).sigmoid()
    return [q, k, v, beta, gamma, normal(batch, heads, rows, columns)]


# Each bad number: which input, and where.
BAD = {
    "query": (0, (1, 2, 0, 0), torch.nan),
    "key": (1, (1, 6, 0, 1, 0), torch.nan),
    "value": (2, (0, 4, 1, 0, 2), torch.inf),
    "step size": (3, (0, 5, 1, 1), torch.nan),
    "decay": (4, (1, 9, 0), -torch.inf),
    "start": (5, (1, 0, 1, 1), torch.nan),
}


@pytest.mark.parametrize("which", [*BAD, "all"])
@pytest.mark.parametrize("looked_at", [True, False])
@pytest.mark.parametrize("some", [True, False], ids=["resets", "no resets"])
def test_what_is_not_finite_is_what_the_loop_has(which, looked_at, some, monkeypatch):
    if not looked_at:  # as on a GPU, where nothing may be read
        monkeypatch.setattr(module, "readable", lambda t: False)
    inputs = draw()
    for name, (i, place, value) in BAD.items():
        if which in (name, "all"):
            inputs[i][place] = value
    resets = torch.zeros(2, 11, dtype=torch.bool)
    resets[0, 8] = resets[1, 3] = some
    q, k, v, beta, gamma, h0 = inputs
    given = resets if some else None
    y, end = delta_scan(q, k, v, beta, h0, gamma=gamma, resets=given, chunk_size=4)
    want_y, want_end = reference.delta(q, k, v, beta, h0, gamma=gamma, resets=resets)
    for got, want in ((y, want_y), (end, want_end)):
        assert torch.equal(got.isfinite(), want.isfinite())
        torch.testing.assert_close(*(torch.nan_to_num(t, 0, 0, 0) for t in (got, want)))


def test_backwards_in_time():
    q, k, v, beta, gamma, h0 = draw()
    clean, _ = delta_scan(q, k, v, beta, h0, gamma=gamma, chunk_size=4, reverse=True)
    v = v.clone()
    v[0, 5] = torch.nan
    y, _ = delta_scan(q, k, v, beta, h0, gamma=gamma, chunk_size=4, reverse=True)
    assert torch.equal(y[0, 6:], clean[0, 6:])
    assert torch.equal(y[1], clean[1])
    assert y[0, :6].isnan().all()


def test_gradients_of_what_is_not_reached_are_finite_and_right():
    inputs = [t.requires_grad_() for t in draw()]
    q, k, v, beta, gamma, h0 = inputs

    def loss(v):
        y, _ = delta_scan(q, k, v, beta, h0, gamma=gamma, chunk_size=4)
        return y[0, :5].square().sum() + y[1].sum()

    want = torch.autograd.grad(loss(v), inputs)
    bad = v.detach().clone()
    bad[0, 5] = torch.nan
    bad.requires_grad_()
    got = torch.autograd.grad(loss(bad), [q, k, bad, beta, gamma, h0])
    for a, b in zip(got, want, strict=True):
        assert a.isfinite().all()
        torch.testing.assert_close(a, b)
