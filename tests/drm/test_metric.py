"""The metric against dense matrices: definiteness, rank, energy, coupling, condition."""

from __future__ import annotations

import pytest
import torch

from pararnn.drm import Metric, RelationalMetric


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def metric(*lead, d=7, r=3, scale=1.0, seed=0):
    return Metric(normal(*lead, d, seed=seed).exp(), scale * normal(*lead, d, r, seed=seed + 1))


@pytest.mark.parametrize("changes", [{}, {"basis": 4}])
def test_equation(changes):
    torch.manual_seed(0)
    module, z = RelationalMetric(7, 3, 9, eps=0.01, **changes).double(), normal(4, 7)
    found = module(z)
    g = module.trunk(z)
    raw = module.factor_head(g)
    for i in range(4):
        diagonal = torch.log1p(module.diagonal_head(g[i]).exp()) + 0.01
        torch.testing.assert_close(found.diagonal[i], diagonal)
        if module.basis is None:
            u = torch.stack([raw[i, k * 3 : (k + 1) * 3] for k in range(7)])
        else:
            u = torch.stack([raw[i, j * 4 : (j + 1) * 4] @ module.basis for j in range(3)], 1)
        torch.testing.assert_close(found.factor[i], u / 3**0.5)


@pytest.mark.parametrize("rank", [0, 1, 3, 11])
def test_positive_definite_of_full_rank(rank):
    torch.manual_seed(0)
    module = RelationalMetric(7, rank, 9).double()
    found = module(30 * normal(50, 7))
    assert found.factor.shape == (50, 7, rank)
    dense = found.dense()
    for i in range(50):
        want = torch.diag(found.diagonal[i]) + found.factor[i] @ found.factor[i].T
        torch.testing.assert_close(dense[i], want)
    lowest = torch.linalg.eigvalsh(dense)[:, 0]
    assert (lowest >= 1e-4 * (1 - 1e-9)).all()
    assert (torch.linalg.matrix_rank(dense, tol=1e-9) == 7).all()


def test_floor_holds_where_softplus_underflows():
    module = RelationalMetric(3, 2, 4).float()
    torch.nn.init.constant_(module.diagonal_head.bias, -1e4)
    assert (module(torch.randn(5, 3)).diagonal == torch.tensor(1e-4)).all()


def test_numerical_rank_is_not_the_rank():
    g = Metric(torch.full((7,), 1e-9, dtype=torch.float64), normal(7, 2))
    assert g.numerical_rank(1e-6) == 2
    assert torch.linalg.matrix_rank(g.dense(), tol=1e-12) == 7
    with pytest.raises(ValueError, match="tolerance: got 0"):
        g.numerical_rank(0)


def test_energy_and_coupling():
    g, v, risk = metric(2, 3), normal(2, 3, 5, 7, seed=4), normal(2, 3, seed=5).square()
    dense = g.dense()
    for i in range(2):
        for j in range(3):
            for m in range(5):
                x = v[i, j, m]
                torch.testing.assert_close(g.energy(v)[i, j, m], x @ dense[i, j] @ x)
                more = dense[i, j] + risk[i, j] * torch.eye(7, dtype=torch.float64)
                torch.testing.assert_close(g.energy(v, risk)[i, j, m], x @ more @ x)
            torch.testing.assert_close(g.coupling(v)[i, j], v[i, j] @ dense[i, j] @ v[i, j].T)
    assert (g.energy(v) >= 0).all()


def test_condition_bound():
    for scale in (0.0, 0.1, 1.0, 30.0):
        g = metric(200, scale=scale)
        assert (torch.linalg.cond(g.dense()) <= g.condition_bound() * (1 + 1e-9)).all()
    exact = metric(5, scale=0.0)  # a diagonal: the bound is met
    torch.testing.assert_close(exact.condition_bound(), torch.linalg.cond(exact.dense()))


def test_gradients():
    torch.manual_seed(0)
    module = RelationalMetric(5, 2, 4, basis=3).double()
    v = normal(2, 3, 5, seed=2)

    def values(z):
        g = module(z)
        return g.energy(v), g.coupling(v), g.condition_bound()

    assert torch.autograd.gradcheck(values, (normal(2, 5).requires_grad_(),))


def test_errors():
    with pytest.raises(ValueError, match="eps: got 0"):
        RelationalMetric(7, 3, 9, eps=0.0)
    with pytest.raises(ValueError, match=r"factor: got shape \(7, 3\), expected \(2, 7, r\)"):
        Metric(normal(2, 7), normal(7, 3))
    for least in (-1.0, 0.0):
        diagonal = torch.tensor([1.0, torch.nan, least])
        with pytest.raises(ValueError, match=f"diagonal: got {least:.3g}, expected numbers > 0"):
            Metric(diagonal, diagonal.new_zeros(3, 1))
    Metric(torch.tensor([1.0, torch.nan]), torch.zeros(2, 1))
    Metric(-torch.ones(2, device="meta"), torch.ones(2, 1, device="meta"))  # is not looked at
    with pytest.raises(ValueError, match=r"v: got shape \(2, 7\), expected \(2, m, 7\)"):
        metric(2).energy(normal(2, 7))
    with pytest.raises(ValueError, match="risk: got shape"):
        metric(2).energy(normal(2, 1, 7), normal(2, 1))
