"""GivensMinGRU: the brick wall of rotations, block by block, and that it is orthogonal."""

from __future__ import annotations

import pytest
import torch

from pararnn import GivensMinGRU, kernels, solve
from pararnn.cells.givens_min_gru import brick_wall


def product(cell, x):
    """The transition of every block, ``(n, k, k)``, as a product of dense rotations."""
    k, n = cell.block_size, cell.channels
    u = x @ cell.in_proj.weight.T + cell.in_proj.bias
    angles = u[: cell.rounds * k // 2 * n].unflatten(0, (cell.rounds, k // 2, n))
    out = []
    for b in range(n):
        total = torch.eye(k, dtype=x.dtype)
        for r in range(cell.rounds):
            first = r % 2
            for p in range(k // 2):
                i = first + 2 * p
                j = (i + 1) % k
                c, s = torch.cos(angles[r, p, b]), torch.sin(angles[r, p, b])
                turn = torch.eye(k, dtype=x.dtype)
                turn[i, i], turn[i, j], turn[j, i], turn[j, j] = c, -s, s, c
                total = turn @ total
        out.append(total)
    gates, values = u[-2 * k * n :].unflatten(0, (2, k, n))
    return torch.stack(out), torch.sigmoid(gates) * values


SHAPES = [(2, 1), (2, 2), (4, 1), (4, 3), (6, 2), (8, 3), (8, 5)]


@pytest.mark.parametrize(("block_size", "rounds"), SHAPES)
def test_the_equation(block_size, rounds):
    torch.manual_seed(0)
    cell = GivensMinGRU(
        3, 3 * block_size, block_size=block_size, rounds=rounds, dtype=torch.float64
    )
    with torch.no_grad():
        cell.in_proj.weight.mul_(4)
        for x in torch.randn(3, 3, dtype=torch.float64):
            h = torch.randn(1, block_size, 3, dtype=torch.float64)
            a, added = product(cell, x)
            want = torch.einsum("nij,bjn->bin", a, h) + added
            torch.testing.assert_close(cell.step(h, x[None]), want, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(cell(x[None, None], h.flatten(1))[0, 0], want.flatten())
            eye = torch.eye(block_size, dtype=torch.float64).expand_as(a)
            torch.testing.assert_close(a.mT @ a, eye, rtol=0, atol=1e-14)
    assert (cell.spec.jac_structure, cell.state_slots) == ("linear", block_size)
    assert cell.spec.linear_class == ("planar" if block_size == 2 else f"block{block_size}")
    assert kernels.channelwise(cell.spec) is None


def test_the_wall():
    assert brick_wall(6, 3) == (
        ((0, 1), (2, 3), (4, 5)),
        ((1, 2), (3, 4), (5, 0)),
        ((0, 1), (2, 3), (4, 5)),
    )
    assert brick_wall(2, 2) == (((0, 1),), ((1, 0),))
    assert sum(p.numel() for p in GivensMinGRU(64, 64).parameters()) == 14624


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"block_size": 3}, "block_size: got 3, expected an even number"),
        ({"block_size": 0}, "expected a positive integer"),
        ({"block_size": -2}, "expected a positive integer"),
        ({"block_size": 6}, "d_h: got 16, expected a multiple of block_size=6"),
        ({"rounds": 0}, "expected a positive integer"),
    ],
)
def test_wrong_sizes(arguments, text):
    with pytest.raises(ValueError, match=text):
        GivensMinGRU(3, 16, **arguments)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_norms_are_kept(dtype):
    torch.manual_seed(0)
    layer = GivensMinGRU(3, 16, dtype=dtype)
    u = torch.randn(2, 5000, layer.in_proj.out_features, dtype=dtype) * 3
    u[..., -16:] = 0  # nothing is added
    h = torch.randn(2, 8, 2, dtype=dtype)
    states = solve(layer, drives=u, h0=h).states
    drift = states.norm(dim=2) / h.norm(dim=1)[:, None] - 1
    assert float(drift.abs().max()) < 5000 * torch.finfo(dtype).eps


def test_gradients_neither_vanish_nor_grow():
    torch.manual_seed(0)
    layer = GivensMinGRU(3, 16, dtype=torch.float64)
    h = torch.randn(1, 1, 16, dtype=torch.float64, requires_grad=True)
    w = torch.randn(16, dtype=torch.float64)
    y = layer(torch.randn(1, 3000, 3, dtype=torch.float64), h)
    (slope,) = torch.autograd.grad((y[0, -1] * w).sum(), h)
    torch.testing.assert_close(slope.norm(), w.norm(), rtol=1e-10, atol=0)


def test_programs_grow_with_the_rounds_only_linearly():
    sizes = [
        len(GivensMinGRU(3, 8, rounds=r).spec.source("gradients").splitlines()[1:-1])
        for r in (4, 8, 12)
    ]
    assert sizes[2] - sizes[1] == sizes[1] - sizes[0]


def test_says_that_it_is_orthogonal():
    assert GivensMinGRU(3, 8).orthogonal
    assert not GivensMinGRU(3, 8, decay="fixed").orthogonal


@pytest.mark.parametrize(("block_size", "rounds"), [(4, 1), (8, 3)])
@pytest.mark.parametrize("method", ["auto", "sequential"])
def test_roundings_add_up_as_the_card_says(block_size, rounds, method):
    torch.manual_seed(1)
    cell = GivensMinGRU(3, 2 * block_size, block_size=block_size, rounds=rounds)
    exact = cell.rebuilt().double()
    exact.load_state_dict(cell.state_dict())
    u = cell.drives(torch.randn(1, 4000, 3)).detach()
    with torch.no_grad():
        states = solve(cell, drives=u, method=method).states.double()
        want = solve(exact, drives=u.double()).states
    error = (states - want).norm(dim=-2)
    largest = want.norm(dim=-2).cummax(1).values
    steps = torch.arange(1, 4001).reshape(1, -1, 1)
    unit = 2.0**-24
    assert (error <= (6 * rounds + 9) * unit * steps * largest).all()
    walk = unit * (rounds * steps).sqrt() * largest
    assert (error[:, 100:] <= 4 * walk[:, 100:]).all()
    assert error[:, -1].max() >= walk[:, -1].min() / 30
