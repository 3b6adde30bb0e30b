"""Chunks put together in two ways, and the inverses that they need."""

from __future__ import annotations

import pytest
import torch

from pararnn.scan.triangular import unit_lower_inverse
from pararnn.scan.wy import Walk, assemble, side_by_side


@pytest.mark.parametrize("size", [1, 2, 5, 16, 17, 37, 64, 100])
def test_inverses(size):
    generator = torch.Generator().manual_seed(size)
    full = torch.randn(3, 2, size, size, generator=generator, dtype=torch.float64)
    full *= 0.5 / size**0.5
    # The diagonal and what is above it are not read.
    found = unit_lower_inverse(full + torch.full_like(full, torch.nan).triu())
    eye = torch.eye(size, dtype=torch.float64)
    assert found.is_contiguous()
    torch.testing.assert_close(found, torch.linalg.inv(eye + full.tril(-1)))
    assert torch.equal(found.triu(1), torch.zeros_like(found))


def test_inverse_where_powers_are_huge():
    """Equal keys and step size 2: powers of the matrix reach 1e18, its inverse only 2."""
    below = torch.full((64, 64), 2.0)
    found = unit_lower_inverse(below)
    rows = torch.arange(64)
    sign = 1.0 - 2.0 * ((rows[:, None] - rows) % 2)
    want = torch.eye(64) + (2 * sign).tril(-1)
    torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-5)


def pieces(keep, chunks=5, copies=2, micro=6, tokens=3, rows=4, columns=2):
    generator = torch.Generator().manual_seed(3)

    def normal(*shape):
        return torch.randn(chunks, copies, *shape, generator=generator, dtype=torch.float64) / 2

    start = normal(rows, columns)[0]
    found = [
        normal(micro, micro).tril(-1),
        normal(tokens, micro),
        normal(micro, columns),
        normal(micro, rows),
        normal(micro, rows),
        normal(tokens, rows),
        normal(1, 1) if keep else None,
        start,
    ]
    return [None if t is None else t.requires_grad_() for t in found]


@pytest.mark.parametrize("keep", [False, True])
def test_both_ways_agree_with_their_derivatives(keep):
    inputs = pieces(keep)
    real = [t for t in inputs if t is not None]
    *parts, start = inputs
    walked, together = Walk.apply(*inputs), side_by_side(tuple(parts), start)
    weights = [torch.randn_like(t) for t in together]
    for a, b in zip(walked, together, strict=True):
        torch.testing.assert_close(a, b)

    def first(found):
        return torch.autograd.grad(found, real, weights, create_graph=True)

    one, other = first(walked), first(together)
    plain = torch.autograd.grad(Walk.apply(*inputs), real, weights)
    # The system's entries above the diagonal take no part.
    for a, b, c in zip(plain, one, other, strict=True):
        lower = (lambda t: t.tril(-1)) if a is plain[0] else (lambda t: t)
        torch.testing.assert_close(lower(a), lower(c))
        torch.testing.assert_close(lower(b), lower(c))
    second = [
        torch.autograd.grad(sum((g.square()).sum() for g in found[1:]), real, allow_unused=True)
        for found in (one, other)
    ]
    for a, b in zip(*second, strict=True):
        torch.testing.assert_close(a, b)


def test_second_derivatives_where_one_piece_is_made_from_another():
    generator = torch.Generator().manual_seed(5)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()

    k, v, beta = normal(4, 2, 6, 3), normal(4, 2, 6, 2), normal(4, 2, 6, 1)

    def loss(way):
        written = beta * k
        system, scores = (k @ written.mT).tril(-1), k @ written.mT
        parts = (system / 4, scores / 4, v, k, written, k, None)
        y, end = way(parts, torch.zeros(2, 3, 2, dtype=torch.float64))
        return y.square().sum() + end.sum()

    def product(way):
        first = torch.autograd.grad(loss(way), (k, v, beta), create_graph=True)
        return torch.autograd.grad(sum(g.sin().sum() for g in first), (k, v, beta))

    for a, b in zip(product(assemble), product(side_by_side), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-7)


def test_the_walk_is_taken_where_it_can_be(monkeypatch):
    taken = []
    monkeypatch.setattr(Walk, "apply", lambda *given: taken.append(given) or (0, 0))
    *parts, start = pieces(False)
    assemble(tuple(parts), start)
    assert len(taken) == 1
    torch.func.vmap(lambda v: assemble((*parts[:2], v, *parts[3:]), start)[0])(parts[2][None])
    assert len(taken) == 1
