"""ParaGRU: equations, initialisation and the bound of App. C.1."""

from __future__ import annotations

import math

import pytest
import torch

from pararnn import ParaGRU, sequential_apply, solve


def weights(cell):
    return cell.A_z, cell.A_r, cell.A_n


def by_hand(cell, h, x):
    """Eq. 3.1a, unit by unit."""
    a_z, a_r, a_n = cell.recurrent_params()
    d = h.shape[-1]
    if cell.mix == "diag":
        a_z, a_r, a_n = (torch.diag(a) for a in (a_z, a_r, a_n))
    else:
        a_z, a_r, a_n = (torch.block_diag(*a) for a in (a_z, a_r, a_n))
    W_z, W_r, W_n = cell.in_proj.weight.split(d)
    b_z, b_r, b_n = cell.in_proj.bias.split(d)
    z = 1 / (1 + torch.exp(-(a_z @ h + W_z @ x + b_z)))
    r = 1 / (1 + torch.exp(-(a_r @ h + W_r @ x + b_r)))
    n = torch.tanh(a_n @ (r * h) + W_n @ x + b_n)
    return (1 - z) * h + z * n


@pytest.mark.parametrize("mix", ["diag", "head"])
def test_equation(mix):
    torch.manual_seed(0)
    cell = ParaGRU(3, 6, mix=mix, n_heads=2).double()
    torch.nn.init.normal_(cell.in_proj.bias)
    h, x = torch.randn(4, 6, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)
    got = cell.step(h, x)
    for i in range(4):
        torch.testing.assert_close(got[i], by_hand(cell, h[i], x[i]))


def test_one_head_is_dense_and_many_heads_are_diagonal():
    torch.manual_seed(0)
    full = ParaGRU(3, 4, mix="head", n_heads=1)
    assert full.A_z.shape == (1, 4, 4)
    single = ParaGRU(3, 4, mix="head", n_heads=4)
    diag = ParaGRU(3, 4, max_recurrent_norm=None)
    with torch.no_grad():
        diag.in_proj.load_state_dict(single.in_proj.state_dict())
        for a, b in zip(weights(single), weights(diag), strict=True):
            b.copy_(a.flatten())
    x = torch.randn(2, 20, 3)
    torch.testing.assert_close(sequential_apply(single, x), sequential_apply(diag, x))


def test_initial_statistics():
    torch.manual_seed(0)
    for mix, fan in (("diag", 4096), ("head", 64)):
        cell = ParaGRU(256, 4096 if mix == "diag" else 256, mix=mix, n_heads=4)
        w = cell.in_proj.weight
        assert abs(float(w.mean())) < 1e-3
        assert math.isclose(float(w.std()), 256**-0.5, rel_tol=0.02)
        assert float(w.abs().max()) <= 3**0.5 * 256**-0.5 * (1 + 1e-6)  # uniform
        assert not cell.in_proj.bias.any()
        for a in weights(cell):
            assert math.isclose(float(a.std()), fan**-0.5, rel_tol=0.06)
            assert abs(float(a.mean())) < 4 * fan**-0.5 / a.numel() ** 0.5


def test_reset_parameters_starts_anew():
    cell = ParaGRU(3, 4)
    before = [p.clone() for p in cell.parameters()]
    torch.nn.init.ones_(cell.in_proj.bias)
    cell.reset_parameters()
    assert not any(
        torch.equal(a, b) for a, b in zip(before, cell.parameters(), strict=True) if a.any()
    )
    assert not cell.in_proj.bias.any()


def test_default_bounds():
    assert ParaGRU(3, 4).max_recurrent_norm == 0.5
    assert ParaGRU(3, 4, mix="head").max_recurrent_norm is None
    assert ParaGRU(3, 4, max_recurrent_norm=None).max_recurrent_norm is None


def test_effective_weights_are_inside_whatever_the_parameters():
    cell = ParaGRU(3, 4)
    with torch.no_grad():
        cell.A_z.copy_(torch.tensor([0.2, -0.4, 3.0, -7.0]))
    torch.testing.assert_close(
        cell.recurrent_params()[0].detach(), torch.tensor([0.2, -0.4, 0.5, -0.5]), rtol=0, atol=0
    )
    torch.testing.assert_close(cell.A_z.detach(), torch.tensor([0.2, -0.4, 3.0, -7.0]))


def test_solver_and_step_see_the_same_bound():
    torch.manual_seed(0)
    for mix in ("diag", "head"):
        cell = ParaGRU(3, 4, mix=mix, n_heads=2, max_recurrent_norm=0.3).double()
        with torch.no_grad():
            for a in weights(cell):
                a.mul_(10)
        x = torch.randn(2, 30, 3, dtype=torch.float64)
        got = solve(cell, x, method="newton").states
        torch.testing.assert_close(got, sequential_apply(cell, x), rtol=0, atol=1e-12)
        inputs = list(cell.parameters())
        a = torch.autograd.grad(got.pow(2).sum(), inputs)
        b = torch.autograd.grad(sequential_apply(cell, x).pow(2).sum(), inputs)
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def test_entries_outside_the_box_can_come_back():
    """Training must be able to move an entry inwards from outside the box."""
    cell = ParaGRU(1, 2).double()
    with torch.no_grad():
        cell.A_n.copy_(torch.tensor([2.0, -2.0]))
    optimizer = torch.optim.SGD([cell.A_n], lr=0.1)
    for _ in range(100):
        optimizer.zero_grad()
        (cell.recurrent_params()[2] ** 2).sum().backward()
        optimizer.step()
    assert float(cell.A_n.detach().abs().max()) < 0.5


def test_gradient_inside_the_box_is_the_ordinary_one():
    cell = ParaGRU(1, 3).double()
    with torch.no_grad():
        cell.A_z.copy_(torch.tensor([0.1, -0.3, 0.49]))
    g = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)
    got = torch.autograd.grad(cell.recurrent_params()[0], cell.A_z, g)[0]
    assert torch.equal(got, g)


def test_spectral_bound():
    torch.manual_seed(0)
    cell = ParaGRU(3, 8, mix="head", n_heads=2, max_recurrent_norm=0.9).double()
    with torch.no_grad():
        cell.A_z[0].mul_(20)
        cell.A_z[1].mul_(1e-3)
    got = cell.recurrent_params()[0]
    norms = torch.linalg.svdvals(got)[:, 0]
    torch.testing.assert_close(norms[0], torch.tensor(0.9, dtype=torch.float64))
    assert torch.equal(got[1], cell.A_z[1]), "inside the bound nothing changes"
    ratio = got[0] / cell.A_z[0]
    torch.testing.assert_close(ratio, ratio[:1, :1].expand_as(ratio))
    w = (3 * torch.randn(2, 4, 4, dtype=torch.float64)).requires_grad_()
    from pararnn.cells.constraints import limit_spectral_norm

    assert torch.autograd.gradcheck(lambda w: limit_spectral_norm(w, 0.9), (w,))


def test_spectral_bound_of_a_zero_matrix():
    cell = ParaGRU(3, 4, mix="head", n_heads=2, max_recurrent_norm=0.5)
    with torch.no_grad():
        cell.A_z.zero_()
    got = cell.recurrent_params()[0]
    assert torch.equal(got, torch.zeros_like(got))
    got.sum().backward()
    assert bool(cell.A_z.grad.isfinite().all())


@pytest.mark.parametrize("bad", [0, -0.5, "loose", float("nan"), [0.5]])
def test_bad_bounds(bad):
    with pytest.raises((TypeError, ValueError), match="max_recurrent_norm"):
        ParaGRU(3, 4, max_recurrent_norm=bad)


@pytest.mark.parametrize("mix", ["diag", "head"])
def test_an_infinite_bound_is_no_bound_or_refused(mix):
    try:
        cell = ParaGRU(3, 4, mix=mix, n_heads=2, max_recurrent_norm=float("inf"))
    except (TypeError, ValueError):
        return
    for a, b in zip(cell.recurrent_params(), weights(cell), strict=True):
        assert torch.equal(a, b)


def test_bad_arguments():
    with pytest.raises(ValueError, match=r"'dense'.*'head'"):
        ParaGRU(3, 4, mix="dense")
    with pytest.raises(ValueError, match="3 heads for d_h=4"):
        ParaGRU(3, 4, mix="head", n_heads=3)


def test_states_stay_in_the_box():
    torch.manual_seed(0)
    cell = ParaGRU(3, 4, mix="head", n_heads=2)
    with torch.no_grad():
        for a in weights(cell):
            a.mul_(20)
    assert float(sequential_apply(cell, 10 * torch.randn(2, 50, 3)).abs().max()) <= 1


def test_the_seed_snippet():
    cell = ParaGRU(32, 32, mix="diag")
    h = torch.zeros(2, 32)
    x = torch.randn(2, 32)
    h = cell.step(h, x)
    assert h.shape == (2, 32)

    from pararnn import ParaRNN, verify_agreement

    m = ParaRNN(ParaGRU(32, 32, mix="diag"))
    x = torch.randn(2, 64, 32)
    assert verify_agreement(m, x).to_dict()["passed"] is True
