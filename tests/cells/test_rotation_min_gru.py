"""RotationMinGRU: the equation, the grid of angles and its straight-through gradient."""

from __future__ import annotations

import math

import pytest
import torch

from pararnn import RotationMinGRU, kernels, solve


def matrices(cell, x):
    """2×2 transition of every plane, ``(B, n, 2, 2)``, from the card's formula."""
    n = cell.channels
    u = (x @ cell.in_proj.weight.T + cell.in_proj.bias).unflatten(-1, (6, n))
    theta, d = u[:, 4], torch.tanh(u[:, 5])
    if cell.snap is not None:
        order = torch.tensor([cell.snap[j % len(cell.snap)] for j in range(n)]).double()
        theta = torch.round(theta / (2 * math.pi / order)) * (2 * math.pi / order)
    c, s = torch.cos(theta), torch.sin(theta)
    rows = torch.stack([torch.stack([c, -s * d], -1), torch.stack([s, c * d], -1)], -2)
    return rows, torch.sigmoid(u[:, :2]) * u[:, 2:4]


@pytest.mark.parametrize("snap", [(2, 3, 4, 6), (5,), (1, 7), None])
def test_the_equation(snap):
    torch.manual_seed(0)
    cell = RotationMinGRU(3, 10, snap=snap, dtype=torch.float64)
    with torch.no_grad():
        cell.in_proj.weight.mul_(4)
    h = torch.randn(64, 2, 5, dtype=torch.float64)
    x = torch.randn(64, 3, dtype=torch.float64)
    m, added = matrices(cell, x)
    want = torch.einsum("bnij,bjn->bin", m, h) + added
    torch.testing.assert_close(cell.step(h, x), want, rtol=1e-12, atol=1e-12)
    assert (cell.spec.jac_structure, cell.spec.linear_class) == ("linear", "planar")
    assert kernels.channelwise(cell.spec) is None


def test_orders_go_round():
    assert RotationMinGRU(3, 14).m.tolist() == [2, 3, 4, 6, 2, 3, 4]
    assert RotationMinGRU(3, 4, snap=[8]).snap == (8,)
    assert sum(p.numel() for p in RotationMinGRU(64, 64).parameters()) == 12544
    assert "m" not in RotationMinGRU(3, 4, snap=None)._buffers


@pytest.mark.parametrize(
    ("snap", "error", "text"),
    [
        ((), ValueError, "got no orders"),
        ((2, 0), ValueError, "expected a positive integer"),
        ((2, -3), ValueError, "expected a positive integer"),
        ((2.5,), TypeError, "expected a positive integer"),
        (3, TypeError, "expected None or a sequence"),
        ("23", TypeError, "expected None or a sequence"),
    ],
)
def test_grids_that_are_none(snap, error, text):
    with pytest.raises(error, match=text):
        RotationMinGRU(3, 4, snap=snap)


def test_odd_width():
    with pytest.raises(ValueError, match="d_h: got 7, expected an even number"):
        RotationMinGRU(3, 7)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_m_turns_are_none(dtype):
    cell = RotationMinGRU(3, 8, dtype=dtype)
    eps = torch.finfo(dtype).eps
    for order, plane in ((2, 0), (3, 1), (4, 2), (6, 3)):
        for k in range(order):
            u = torch.zeros(1, 24, dtype=dtype)
            # Anywhere nearer than half a step to the multiple; and no scaling: tanh(40) is 1.
            u[0, 16:20] = 2 * math.pi / order * (k + 0.4)
            u[0, 20:] = 40.0
            h = torch.zeros(1, 2, 4, dtype=dtype)
            h[:, 0] = 1
            for _ in range(order):
                h = cell.step(h, drives=u)
            assert abs(float(h[0, 0, plane]) - 1) < 8 * eps
            assert abs(float(h[0, 1, plane])) < 40 * eps


def test_a_long_walk_on_the_grid_comes_back():
    """12 turns are none for every order: after 12,000 of them the state is where it was."""
    cell = RotationMinGRU(3, 8)
    u = torch.zeros(1, 12_000, 24)
    u[..., 16:20] = 2 * math.pi / torch.tensor([2.0, 3.0, 4.0, 6.0])
    u[..., 20:] = 40.0
    h = torch.randn(1, 2, 4)
    end = solve(cell, drives=u, h0=h).final_state
    assert float((end - h).norm() / h.norm()) < 2e-3  # 12,000 angles, each rounded to 1e-7


def test_the_gradient_passes_straight_through():
    torch.manual_seed(0)
    snapped = RotationMinGRU(3, 8, dtype=torch.float64)
    free = RotationMinGRU(3, 8, snap=None, dtype=torch.float64)
    h = torch.randn(5, 2, 4, dtype=torch.float64)
    u = torch.randn(5, 24, dtype=torch.float64)
    near = u.clone()
    step = 2 * math.pi / torch.tensor([2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
    near[:, 16:20] = torch.round(u[:, 16:20] / step) * step
    w = torch.randn(5, 2, 4, dtype=torch.float64)
    slopes = []
    for cell, at in ((snapped, u), (free, near)):
        at = at.requires_grad_()
        slopes.append(torch.autograd.grad((cell.step(h, drives=at) * w).sum(), at)[0])
        whole = solve(cell, drives=at[:, None], h0=h).states
        slopes.append(torch.autograd.grad((whole[:, 0] * w).sum(), at)[0])
    for slope in slopes[1:]:
        torch.testing.assert_close(slope, slopes[0], rtol=1e-12, atol=1e-13)
    assert bool((slopes[0][:, 16:20] != 0).all())


def test_the_start_is_learned():
    torch.manual_seed(0)
    layer = RotationMinGRU(3, 400)
    assert layer.h0.shape == (2, 200)
    assert 0.45 < float(layer.h0.std()) < 0.55
    layer(torch.randn(2, 4, 3)).sum().backward()
    assert bool((layer.h0.grad != 0).any())


def test_half_precision_does_not_move_the_grid():
    """2π/3 as a bfloat16 would be off by 1e-3."""
    layer = RotationMinGRU(3, 8).bfloat16()
    u = torch.zeros(1, 3, 24, dtype=torch.bfloat16)
    u[..., 17] = 2.1
    u[..., 20:] = 40.0
    h = torch.ones(1, 2, 4)
    end = solve(layer, drives=u, h0=h).final_state
    torch.testing.assert_close(end[:, :, 1], h[:, :, 1], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("snap", [(2, 3, 4, 6), (3,), None])
@pytest.mark.parametrize("varied", [True, False])
def test_roundings_add_up_as_the_card_says(snap, varied):
    """Where nothing is forgotten: |d| = 1, and nothing is added."""
    torch.manual_seed(1)
    cell = RotationMinGRU(3, 8, snap=snap)
    exact = cell.rebuilt().double()
    exact.load_state_dict(cell.state_dict())
    u = torch.zeros(1, 4000, 24)
    u[..., 16:20] = 3 * torch.randn(1, 4000, 4) if varied else 2.1
    u[..., 20:] = 12.0
    with torch.no_grad():
        states = solve(cell, drives=u).states.double()
        want = solve(exact, drives=u.double()).states
    error = (states - want).norm(dim=-2)
    norm = want.norm(dim=-2)
    bound = ((2 * (u[..., 16:20].abs() + 3.2) + 20) * 2.0**-24).cumsum(1)
    assert (error <= bound * norm[:, :1]).all()
    if not varied:  # the errors of equal turns do add up
        assert error[:, -1].max() > 1e3 * 2.0**-24 * norm.min()
