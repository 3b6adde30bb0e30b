"""ParaCfC: equations, the limits of no time and much time, gaps of every size."""

from __future__ import annotations

import math

import mpmath
import numpy as np
import pytest
import torch

from pararnn import (
    NewtonConfig,
    ParaCfC,
    ParaRNN,
    newton_apply,
    sequential_apply,
    solve,
    verify_agreement,
)
from pararnn.spec import oracle

FORM = pytest.mark.parametrize("form", ["published", "consistent"])
DOUBLE = {"dtype": torch.float64}


def random_cell(form, d_in=3, d_h=4, size=0.8, seed=0):
    """Every parameter drawn, in float64."""
    torch.manual_seed(seed)
    cell = ParaCfC(d_in, d_h, form=form, dtype=torch.float64)
    with torch.no_grad():
        cell.in_proj.bias.normal_()
        for m in cell.spec.map_list:
            getattr(cell, m.name).uniform_(-size, size)
    return cell


def irregular(*shape, **options):
    """Gaps of 0, 1e-6, 1 and 1e4, and some in between."""
    values = torch.tensor([0.0, 1e-6, 0.01, 1.0, 3.0, 1e4], **options)
    return values[torch.randint(len(values), shape)]


def test_published_equation():
    cell = random_cell("published")
    h, x = torch.randn(5, 4, **DOUBLE), torch.randn(5, 3, **DOUBLE)
    dt = torch.rand(5, **DOUBLE) * 3
    u = (x @ cell.in_proj.weight.T + cell.in_proj.bias).detach()
    got = cell.step(h, x, dt=dt)
    for b in range(5):
        for j in range(4):
            r_f, r_g, r_k = (getattr(cell, f"R_{n}")[j].item() for n in "fgk")
            f, g, k = (float(u[b, j + 4 * n]) for n in range(3))
            s = float(h[b, j])
            gate = 1 / (1 + math.exp((f + r_f * s) * float(dt[b])))
            want = gate * math.tanh(g + r_g * s) + (1 - gate) * math.tanh(k + r_k * s)
            assert got[b, j].item() == pytest.approx(want, rel=1e-13)


def test_consistent_equation():
    cell = random_cell("consistent")
    h, x = torch.randn(5, 4, **DOUBLE), torch.randn(5, 3, **DOUBLE)
    dt = torch.rand(5, **DOUBLE) * 3
    u = (x @ cell.in_proj.weight.T + cell.in_proj.bias).detach()
    got = cell.step(h, x, dt=dt)
    for b in range(5):
        for j in range(4):
            r_f, r_k = (getattr(cell, f"R_{n}")[j].item() for n in "fk")
            f, k = (float(u[b, j + 4 * n]) for n in range(2))
            s = float(h[b, j])
            a = math.exp(-math.log1p(math.exp(f + r_f * s)) * float(dt[b]))
            want = a * s + (1 - a) * math.tanh(k + r_k * s)
            assert got[b, j].item() == pytest.approx(want, rel=1e-13)


@FORM
@pytest.mark.parametrize("dt", [0.0, 1e-12, 1e-6, 1.0, 1e4])
def test_oracle(form, dt):
    cell = random_cell(form)
    h, x = torch.randn(5, 4, **DOUBLE).clamp(-1, 1), torch.randn(5, 3, **DOUBLE)
    gap = torch.full((5,), dt, **DOUBLE)
    drives = [u.detach().numpy() for u in cell.split(cell.drives(x))] + [gap.numpy()]
    params = [p.detach().numpy() for p in cell.recurrent_params()]
    with mpmath.workdps(50):
        exact = oracle.step(cell.spec, h.numpy(), drives, params, "mpmath").astype(float)
    got = cell.step(h, x, dt=gap).detach().numpy()
    np.testing.assert_allclose(got, exact, rtol=2e-14, atol=1e-15 if dt < 1 else 1e-13)


def test_cell():
    cell = ParaCfC(3, 5)
    assert cell.form == "published"
    assert cell.in_proj.out_features == 15
    assert ParaCfC(3, 5, form="consistent").in_proj.out_features == 10
    assert cell.jac_structure == "diag"
    assert cell.spec.gap.name == "dt"
    assert ParaCfC(**ParaCfC(3, 5, form="consistent").hyperparameters()).form == "consistent"
    with pytest.raises(ValueError, match="form: got 'gated', expected one of"):
        ParaCfC(3, 5, form="gated")
    with pytest.raises(TypeError, match="takes time gaps, got none"):
        newton_apply(cell, torch.randn(2, 5, 3))
    assert ParaRNN(cell, num_layers=2)(torch.randn(2, 6, 3), dt=torch.rand(2, 6))[0].shape == (
        2,
        6,
        5,
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("method", ["sequential", "newton", "shooting"])
def test_no_time_changes_nothing(dtype, method):
    """Exactly, in the consistent form."""
    cell = random_cell("consistent").to(dtype)
    h0 = torch.rand(2, 4, dtype=cell.state_dtype) * 2 - 1
    x, dt = torch.randn(2, 40, 3, dtype=dtype), torch.zeros(2, 40, dtype=dtype)
    solution = solve(cell, x, method=method, h0=h0, dt=dt)
    assert torch.equal(solution.final_state, h0)
    assert torch.equal(solution.states, h0.to(dtype)[:, None].expand(2, 40, 4))


def test_no_time_halves_the_targets_in_the_published_form():
    cell = random_cell("published")
    with torch.no_grad():
        cell.R_g.zero_()
        cell.R_k.zero_()
    x, dt = torch.randn(2, 3, **DOUBLE), torch.zeros(2, **DOUBLE)
    first, second = (cell.step(h, x, dt=dt) for h in torch.randn(2, 2, 4, **DOUBLE))
    assert torch.equal(first, second)  # of the old state nothing is left
    _, g, k = cell.split(cell.drives(x))
    torch.testing.assert_close(first, (g.tanh() + k.tanh()) / 2)


def test_gaps_add_up_in_the_consistent_form():
    cell = random_cell("consistent")
    with torch.no_grad():
        cell.R_f.zero_()
        cell.R_k.zero_()
    h, x = torch.rand(2, 4, **DOUBLE), torch.randn(2, 3, **DOUBLE)
    gaps = torch.rand(100, 2, **DOUBLE)
    many = h
    for dt in gaps:
        many = cell.step(many, x, dt=dt / 100)
    torch.testing.assert_close(many, cell.step(h, x, dt=gaps.sum(0) / 100))


@FORM
def test_much_time(form):
    cell = random_cell(form)
    h, x = torch.rand(6, 4, **DOUBLE), torch.randn(6, 3, **DOUBLE)
    state = cell.step(h, x, dt=torch.full((6,), 1e4, **DOUBLE))
    drives = cell.split(cell.drives(x))
    f, k = drives[0] + cell.R_f * h, torch.tanh(drives[-1] + cell.R_k * h)
    if form == "published":
        k = torch.where(f > 0, k, torch.tanh(drives[1] + cell.R_g * h))
    torch.testing.assert_close(state, k, rtol=1e-10, atol=1e-10)


def test_a_short_gap_keeps_its_digits():
    cell = random_cell("consistent")
    x = torch.randn(1, 3, **DOUBLE)
    for dt in (1e-6, 1e-12, 1e-30):
        gap = torch.tensor([dt])
        narrow = cell.float().step(torch.zeros(1, 4), x.float(), dt=gap).double()
        wide = cell.double().step(torch.zeros(1, 4, **DOUBLE), x.float().double(), dt=gap.double())
        torch.testing.assert_close(narrow / wide, torch.ones_like(wide), rtol=1e-6, atol=0)


@FORM
def test_long_irregular_sequences(form):
    torch.manual_seed(1)
    cell = ParaCfC(8, 16, form=form)
    x, dt = torch.randn(2, 4096, 8), irregular(2, 4096)
    reference = sequential_apply(cell, x, dt=dt)
    for method, config in (
        ("auto", None),
        ("newton", None),
        ("shooting", NewtonConfig(chunk_length=64)),
    ):
        states = solve(cell, x, config, method=method, dt=dt).states
        torch.testing.assert_close(states, reference, rtol=1e-5, atol=1e-5)
    report = verify_agreement(cell, x[:, :600], dt=dt[:, :600])
    assert report.passed, str(report)


@FORM
def test_certificate_uses_the_longest_gap(form):
    cell = random_cell(form, size=0.3)
    x = torch.randn(2, 60, 3, **DOUBLE)
    short, long = torch.rand(2, 60, **DOUBLE), torch.rand(2, 60, **DOUBLE)
    long[0, 5] = 1e8
    config = NewtonConfig(certify=True, chunk_length=10)
    bounds = [solve(cell, x, config, method="shooting", dt=dt).error_bound for dt in (short, long)]
    assert bounds[0] < 1e-9
    assert bounds[0] < bounds[1]


@FORM
@pytest.mark.parametrize("method", ["sequential", "newton", "shooting"])
def test_derivatives(form, method):
    cell = random_cell(form)
    x, dt = torch.randn(1, 5, 3, **DOUBLE), torch.tensor([[0.5, 1e-3, 2.0, 20.0, 0.1]], **DOUBLE)
    h0 = torch.rand(1, 4, **DOUBLE)
    config = NewtonConfig(chunk_length=2) if method == "shooting" else None
    inputs = [t.requires_grad_() for t in (x, dt, h0)]

    def states(x, dt, h0):
        return solve(cell, x, config, method=method, dt=dt, h0=h0).states

    assert torch.autograd.gradcheck(states, inputs)
    assert torch.autograd.gradgradcheck(states, inputs)


@FORM
def test_gradients_at_extreme_gaps(form):
    """At 0, 1e-6 and 1e4: finite, and those of autograd through the loop."""
    cell = random_cell(form)
    x, dt = torch.randn(2, 120, 3, **DOUBLE), irregular(2, 120, **DOUBLE)
    found = []
    for method in ("sequential", "newton", "shooting"):
        given = [x.clone().requires_grad_(), dt.clone().requires_grad_()]
        states = solve(cell, given[0], method=method, dt=given[1]).states
        found.append(torch.autograd.grad(states.square().sum(), [*given, *cell.parameters()]))
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            assert b.isfinite().all()
            torch.testing.assert_close(b, a, rtol=1e-8, atol=1e-9)


@FORM
def test_gradient_of_a_gap_has_its_dtype(form):
    cell = random_cell(form).to(torch.bfloat16)
    for dtype in (torch.bfloat16, torch.float32):
        dt = torch.rand(2, 9, dtype=dtype).requires_grad_()
        states = solve(cell, torch.randn(2, 9, 3, dtype=torch.bfloat16), dt=dt).states
        (gradient,) = torch.autograd.grad(states.float().sum(), dt)
        assert gradient.dtype == dtype
        assert gradient.shape == dt.shape
