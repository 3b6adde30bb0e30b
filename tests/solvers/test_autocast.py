"""Gradients of first and second order, asked for inside a region of autocast, are those outside."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import pararnn
from pararnn import _precision
from pararnn.scan import delta_scan, linear_scan, matrix_affine_scan, matrix_scan

CELLS = {
    "head": lambda: pararnn.ParaGRU(6, 8, mix="head", n_heads=2),
    "matrix state": lambda: pararnn.ParaM2RNN(6, k_dim=3, v_dim=4),
    "delta": lambda: pararnn.DeltaMinGRU(6, 8, n_heads=2),
    "rotation": lambda: pararnn.RotationMinGRU(6, 8),
}


def derivatives(run, inputs):
    """Values, their first derivatives, and second ones through these."""
    given = [x.detach().clone().requires_grad_() for x in inputs]
    states = run(*given)
    plain = torch.autograd.grad(states.sin().sum(), given, retain_graph=True)
    first = torch.autograd.grad(states.sin().sum(), given, create_graph=True)
    second = torch.autograd.grad(sum(f.square().sum() for f in first), given)
    return [states, *plain, *first, *second]


def compare(run, inputs):
    want = derivatives(run, inputs)
    with torch.autocast("cpu", torch.bfloat16):
        got = derivatives(run, inputs)
    for g, w in zip(got, want, strict=True):
        assert g.dtype == w.dtype
        # The same operations; a second derivative may record some of them again.
        torch.testing.assert_close(g, w, rtol=1e-5, atol=2e-6 * float(w.detach().abs().max()))


def scans():
    g = torch.Generator().manual_seed(0)

    def draw(*shape):
        return 0.4 * torch.randn(*shape, generator=g)

    unit = nn.functional.normalize(draw(2, 50, 2, 4), dim=-1)
    gates = draw(2, 50, 2).sigmoid()
    return {
        "linear": (linear_scan, (draw(2, 50, 4), draw(2, 50, 4), draw(2, 4))),
        "planar": (matrix_scan, (draw(2, 50, 3, 2, 2), draw(2, 50, 3, 2), draw(2, 3, 2))),
        "blocks": (
            matrix_affine_scan,
            (draw(2, 50, 2, 3, 3), draw(2, 50, 2, 3, 2), draw(2, 2, 3, 2)),
        ),
        "delta": (
            lambda q, k, v, beta, h0, gamma: delta_scan(q, k, v, beta, h0, gamma=gamma)[0],
            (draw(2, 50, 2, 4), unit, draw(2, 50, 2, 3), gates, draw(2, 2, 4, 3), gates),
        ),
    }


@pytest.mark.parametrize("name", scans())
def test_scans(name):
    compare(*scans()[name])


def solved(cell, method):
    """States as a function of drives and recurrent parameters, and their values."""
    named = {n: p.detach() for n, p in cell.named_parameters() if "proj" not in n}

    class Solved(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = cell

        def forward(self, drives):
            return pararnn.solve(self.cell, drives=drives, method=method).states

    def run(drives, *params):
        given = {f"cell.{n}": p for n, p in zip(named, params, strict=True)}
        return torch.func.functional_call(Solved(), given, (drives,))

    return run, (0.5 * torch.randn(2, 20, cell.in_proj.out_features), *named.values())


@pytest.mark.parametrize("method", ["auto", "shooting", "newton", "sequential"])
@pytest.mark.parametrize("name", CELLS)
def test_cells(name, method):
    torch.manual_seed(0)
    compare(*solved(CELLS[name](), method))


def test_one_step_and_a_read_out():
    torch.manual_seed(0)
    cell = CELLS["delta"]()
    drives = torch.randn(3, cell.in_proj.out_features)
    h = torch.randn(3, *cell.state_shape)
    compare(lambda h, u: cell.step(h, drives=u), (h, drives))


def test_a_delta_layer_has_gradients():
    torch.manual_seed(0)
    layer = CELLS["delta"]()
    with torch.autocast("cpu", torch.bfloat16):
        x = torch.randn(2, 70, 6).requires_grad_()
        (got,) = torch.autograd.grad(layer(x).float().sum(), x)
    (want,) = torch.autograd.grad(layer(x).sum(), x)
    assert float((got - want).abs().max() / want.abs().max()) < 2e-2  # the output is rounded


def test_it_is_the_shield(monkeypatch):
    """Without it the same comparison fails."""

    def plain(run, device, *tensors):
        with _precision.full_precision(device):
            return run(*tensors)

    monkeypatch.setattr("pararnn.solvers.adjoint.exactly", plain)
    torch.manual_seed(0)
    with pytest.raises(AssertionError):
        compare(*solved(CELLS["head"](), "shooting"))
