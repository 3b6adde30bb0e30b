"""The fused kernels measure a small trajectory by itself; and ``auto`` takes them where it can."""

from __future__ import annotations

import copy

import pytest
import torch

from pararnn import NewtonConfig, ParaGRU, SignedMinGRU, solve


def slow(kit):
    torch.manual_seed(0)
    cell = ParaGRU(2, 3).to(kit.DEVICE)
    torch.nn.init.zeros_(cell.in_proj.bias)
    with torch.no_grad():
        cell.in_proj.bias[:3] = -4
    return cell


@pytest.mark.parametrize("scale", [1e-3, 1e-6, pytest.param(1e-30, marks=pytest.mark.slow)])
def test_small_states_and_their_gradients(kit, scale):
    cell = slow(kit)
    x = scale * torch.randn(1, 20, 2, device=kit.DEVICE)
    u = cell.drives(x).detach().requires_grad_()
    config = NewtonConfig(backend="fused", chunk_length=5, warmup=3)
    found = solve(cell, drives=u, config=config)
    assert found.path == "fused"
    assert found.converged
    assert found.iterations > 0
    wide, uw = copy.deepcopy(cell).double(), u.detach().double().requires_grad_()
    want = solve(wide, drives=uw, method="sequential").states
    size = want.detach().abs().cummax(1).values
    assert float(((found.states.double() - want).abs() / size).max()) < 1e-4
    g = torch.randn(want.shape, dtype=torch.float64, device=kit.DEVICE)
    (got,) = torch.autograd.grad(found.states, u, g.float())
    (right,) = torch.autograd.grad(want, uw, g)
    for a, b in zip(got.double().split(3, 2), right.split(3, 2), strict=True):  # drive by drive
        assert float((a - b).abs().max() / b.abs().max()) < 1e-4


def test_what_is_not_finite_is_not_converged(kit):
    cell = slow(kit)
    x = torch.randn(1, 6, 2, device=kit.DEVICE)
    x[0, 3] = torch.nan
    found = solve(cell, x, NewtonConfig(backend="fused", chunk_length=3, warmup=1))
    assert found.path == "fused"
    assert (found.converged, found.residual) == (False, torch.inf)


def test_auto_takes_the_kernels_where_they_are_to_be_had(kit, monkeypatch):
    """On a GPU by itself; in the interpreter, where nothing speaks against them."""
    from pararnn.kernels import launch
    from pararnn.solvers.methods import fused

    if kit.DEVICE == "cpu":
        monkeypatch.setattr(fused, "lacking", lambda *_: None)
    runs = []
    original = launch.run_forward
    monkeypatch.setattr(launch, "run_forward", lambda *a: runs.append(1) or original(*a))
    found = solve(slow(kit), torch.randn(1, 4, 2, device=kit.DEVICE))
    assert found.path == "fused"
    assert runs == [1]


def test_a_nan_passes_chunks_whose_products_underflow(kit):
    """A product of 0 hides from later chunks that one far before is not finite."""
    cell = SignedMinGRU(2, 2).to(kit.DEVICE)
    u = torch.randn(2, 40, 6, device=kit.DEVICE)
    u[..., 4:] = 1e-8  # the transition
    u[1, 9, 0] = torch.nan
    config = NewtonConfig(backend="fused", chunk_length=8, warmup=2)
    found = solve(cell, drives=u, config=config)
    want = solve(cell, drives=u, method="sequential").states
    assert (found.path, found.chunks, found.converged) == ("fused", 5, False)
    assert torch.equal(found.states.isnan(), want.isnan())
    assert bool(found.final_state[1, 0].isnan().any())
