"""SignedMinGRU: both couplings, parity, and the start."""

from __future__ import annotations

import pytest
import torch

from pararnn import SignedMinGRU, kernels


@pytest.mark.parametrize("coupled", [False, True])
def test_the_equation(coupled):
    torch.manual_seed(0)
    cell = SignedMinGRU(3, 5, coupled=coupled, dtype=torch.float64)
    h, x = torch.randn(7, 5, dtype=torch.float64), torch.randn(7, 3, dtype=torch.float64)
    z, v, s = (x @ cell.in_proj.weight.T + cell.in_proj.bias).split(5, -1)
    z, a = 1 / (1 + torch.exp(-z)), torch.tanh(s)
    want = ((1 - z) * a if coupled else a) * h + z * v
    torch.testing.assert_close(cell.step(h, x), want, rtol=1e-13, atol=1e-14)
    assert kernels.channelwise(cell.spec) is None
    assert cell.spec.linear_class == "diag"


def test_coupled_has_the_same_parameters():
    torch.manual_seed(3)
    plain = SignedMinGRU(4, 6)
    torch.manual_seed(3)
    coupled = SignedMinGRU(4, 6, coupled=True)
    assert plain.state_dict().keys() == coupled.state_dict().keys()
    assert all(
        torch.equal(a, b) for a, b in zip(plain.parameters(), coupled.parameters(), strict=True)
    )
    coupled.load_state_dict(plain.state_dict())
    assert sum(p.numel() for p in SignedMinGRU(64, 64).parameters()) == 12480


def test_parity_at_any_length():
    layer = SignedMinGRU(1, 1)
    with torch.no_grad():
        layer.in_proj.weight.copy_(torch.tensor([[0.0], [0.0], [-40.0]]))
        layer.in_proj.bias.copy_(torch.tensor([0.0, 0.0, 20.0]))
    bits = torch.randint(0, 2, (2, 50_000, 1))
    y = layer(bits.float(), torch.ones(2, 1))
    assert torch.equal(y < 0, bits.cumsum(1) % 2 == 1)
    assert torch.equal(y.abs(), torch.ones_like(y)), "tanh(20) is 1 in float32"


def test_the_start():
    assert torch.equal(SignedMinGRU(3, 5).init_state(2), torch.zeros(2, 5))
    layer = SignedMinGRU(3, 5, learnable_h0=True, dtype=torch.float64)
    assert torch.equal(layer.h0, torch.zeros(5, dtype=torch.float64))
    assert not layer.starts_at_zero
    x = torch.randn(2, 1, 3, dtype=torch.float64)
    (slope,) = torch.autograd.grad(layer(x).sum(), layer.h0)
    a = torch.tanh(layer.drives(x)[..., 10:]).sum((0, 1))
    torch.testing.assert_close(slope, a)
    negative = -torch.ones(2, 1, 5, dtype=torch.float64)
    assert bool(layer(x, negative).isfinite().all()), "any real state may be given"
    fresh = layer.rebuilt()
    assert fresh.learnable_h0
    assert SignedMinGRU(3, 5).h0 is None


def test_an_exact_reset():
    """A transition of exactly 0 forgets: what came before has no part in it, nor a gradient."""
    layer = SignedMinGRU(3, 5, dtype=torch.float64)
    u = torch.randn(1, 20, 15, dtype=torch.float64, requires_grad=True)
    forgets = u.clone()
    forgets[:, 11, 10:] = 0
    from pararnn import solve

    y = solve(layer, drives=forgets).states
    other = forgets.detach().clone()
    other[:, :11] = torch.randn(1, 11, 15, dtype=torch.float64)
    assert torch.equal(solve(layer, drives=other).states[:, 11:], y[:, 11:])
    (slope,) = torch.autograd.grad(y[:, 11:].sum(), u)
    assert torch.equal(slope[:, :11], torch.zeros_like(slope[:, :11]))
