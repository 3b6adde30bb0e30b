"""Rows that are computed group by group, so that a CPU's cache holds them."""

from __future__ import annotations

import pytest
import torch

import pararnn
from pararnn.solvers import adjoint
from pararnn.solvers.methods import scan


def layers():
    torch.manual_seed(0)
    options = {"dtype": torch.float64}
    return {
        "MinGRU": pararnn.MinGRU(3, 4, **options),
        "RotationMinGRU": pararnn.RotationMinGRU(3, 4, **options),
        "decay": pararnn.SignedMinGRU(3, 4, decay="learnable", **options),
        "ParaGRU": pararnn.ParaGRU(3, 4, **options),
    }


@pytest.mark.parametrize("name", layers())
@pytest.mark.parametrize("restart", [False, True])
def test_groups_of_rows(name, restart, monkeypatch):
    """Every row has its own start, drives, gaps, resets and cotangents: five rows in groups of two
    give what the loop gives."""
    numbers = 40 * (8 if name == "RotationMinGRU" else 4)
    monkeypatch.setattr(scan, "GROUP", 2 * numbers)
    monkeypatch.setattr(adjoint, "GROUP", 2 * numbers)
    cell = layers()[name]
    g = torch.Generator().manual_seed(1)
    x = torch.randn(5, 40, 3, generator=g, dtype=torch.float64)
    h0 = torch.rand(5, *cell.state_shape, generator=g, dtype=torch.float64)
    bar = torch.randn(5, 40, *cell.state_shape, generator=g, dtype=torch.float64)
    gaps = torch.rand(5, 40, generator=g, dtype=torch.float64) if name == "decay" else None
    resets = torch.rand(5, 40, generator=g) < 0.05 if restart else None

    def run(method):
        given = [x.clone().requires_grad_(), h0.clone().requires_grad_(), *cell.parameters()]
        states = pararnn.solve(
            cell, given[0], h0=given[1], dt=gaps, resets=resets, method=method
        ).states
        return states, torch.autograd.grad(
            states, given, bar, allow_unused=True, materialize_grads=True
        )

    (got, found), (want, expected) = run("auto"), run("sequential")
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-12)
    for f, e in zip(found, expected, strict=True):
        torch.testing.assert_close(f, e, rtol=1e-10, atol=1e-11)


def test_groups_of_real_size():
    """Sixteen rows of 1024 steps and 64 channels are two groups, forwards and backwards."""
    torch.manual_seed(0)
    cell = pararnn.MinGRU(3, 64)
    assert len(scan.groups(torch.empty(16, 1024, 3), 64)) == 2
    drives, h0 = torch.randn(16, 1024, 128), torch.rand(16, 64)
    got = pararnn.solve(cell, drives=drives, h0=h0).states
    want = pararnn.solve(cell, drives=drives[8:], h0=h0[8:]).states
    assert torch.equal(got[8:], want)
