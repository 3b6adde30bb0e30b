"""Directions, gates and the raw velocity, against loops."""

from __future__ import annotations

import math

import pytest
import torch

from pararnn.drm import DirectionField, DirectStateTransition, DRMFlow


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gelu(x):
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


def field(**changes):
    torch.manual_seed(3)
    return DirectionField(7, 5, 9, **changes).double()


def by_hand(module, z):
    """Directions and gates of one state, from the parameters."""
    first, _, _, second, _ = module.trunk
    g = gelu(second.weight @ gelu(first.weight @ z + first.bias) + second.bias)
    width = module.heads.out_features // 5
    flat = module.heads.weight @ g + module.heads.bias
    vectors = []
    for i in range(5):
        v = flat[i * width : (i + 1) * width]
        if module.basis is not None:
            v = sum(v[j] * module.basis[j] for j in range(width))
        vectors.append(v / v.square().sum().sqrt() if module.normalize else v)
    logits = module.gate_head.weight @ g + module.gate_head.bias
    gates = 1 / (1 + torch.exp(-(logits + module.logit_bias) / module.temperature))
    return torch.stack(vectors), gates


@pytest.mark.parametrize("changes", [{}, {"basis": 3}, {"normalize": False, "temperature": 0.7}])
def test_equation(changes):
    module, z = field(**changes), normal(2, 3, 7)
    found = module(z)
    assert found.vectors.shape == (2, 3, 5, 7)
    assert found.gates.shape == (2, 3, 5)
    for i in range(2):
        for j in range(3):
            vectors, gates = by_hand(module, z[i, j])
            torch.testing.assert_close(found.vectors[i, j], vectors)
            torch.testing.assert_close(found.gates[i, j], gates)
    torch.testing.assert_close(found.mass, found.gates.sum(-1))
    assert ((found.mass > 0) & (found.mass < 5)).all()


def test_largest_gates():
    z = normal(6, 7)
    every, kept, scaled = (
        field(**k)(z).gates for k in ({}, {"top_k": 2}, {"top_k": 2, "top_k_renormalize": True})
    )
    for row, few, same in zip(every, kept, scaled, strict=True):
        best = row.sort(descending=True).indices[:2]
        want = torch.zeros_like(row)
        want[best] = row[best]
        assert torch.equal(few, want)
        torch.testing.assert_close(same, want * row.sum() / want.sum())


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_gates_that_underflow_are_zero(dtype):
    """Nothing is left to share out, and no slope is NaN."""
    module, z = field(top_k=2, top_k_renormalize=True).to(dtype), normal(6, 7).to(dtype)
    with torch.no_grad():
        module.gate_head.bias.fill_(-200.0)
    found = module(z.requires_grad_())
    assert not found.gates.any()
    (slope,) = torch.autograd.grad((found.gates.sum() + found.vectors.sum()), z)
    assert slope.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_directions_of_length_zero_stay_zero(dtype):
    module, z = field().to(dtype), normal(6, 7).to(dtype).requires_grad_()
    with torch.no_grad():
        module.heads.weight.zero_()
        module.heads.bias.zero_()
    vectors = module(z).vectors
    assert not vectors.any()
    (slope,) = torch.autograd.grad(vectors.sum(), z)
    assert slope.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [0.0, 1e-30, 1e-13, 1e-9, 1e-5, 1.0, 1e4, 1e19, 1e30])
@pytest.mark.parametrize("floor", [1e-12, 1e-3])
def test_directions_of_every_length(size, dtype, floor):
    """``r / max(‖r‖, floor)`` and its gradient: no square overflows or underflows."""
    module = field(floor=floor).to(dtype)
    rows = size * normal(5, 7, seed=4)
    rows[0, 1:] = 0.0  # one coordinate alone
    with torch.no_grad():
        module.heads.weight.zero_()
        module.heads.bias.copy_(rows.flatten())
    if not module.heads.bias.isfinite().all():
        pytest.skip("not a number of this dtype")
    found = module(normal(7).to(dtype)).vectors
    weights = normal(5, 7, seed=5)
    weights[:, 0] = 0.5
    (slope,) = torch.autograd.grad((found * weights.to(dtype)).sum(), module.heads.bias)
    rows = module.heads.bias.detach().double().reshape(5, 7)
    weights = weights.to(dtype).double()
    smallest, eps = torch.finfo(dtype).tiny, torch.finfo(dtype).eps
    least = max(floor, smallest)
    for row, w, unit, g in zip(rows, weights, found, slope.reshape(5, 7), strict=True):
        norm = max(math.sqrt(float(row.square().sum())), least)
        want = row / norm
        tangent = w if norm == least else w - want * (want @ w)
        torch.testing.assert_close(unit.double(), want, rtol=4 * eps, atol=4 * eps)
        torch.testing.assert_close(
            g.double(), tangent / norm, rtol=8 * eps, atol=8 * eps / norm + eps * smallest
        )
        assert float(g.double().norm()) <= (1 + 8 * eps) * float(w.norm()) / least


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_of_equal_gates_the_first_are_kept(renormalize, dtype):
    """Whatever the shape; and gradients are those of the gates that are kept."""
    module = field(top_k=2, top_k_renormalize=renormalize).to(dtype)
    with torch.no_grad():
        module.gate_head.weight.zero_()
        module.gate_head.bias.copy_(torch.tensor([-1.0, 0.5, 0.5, -2.0, 0.5]))
    z = normal(3, 4, 7).to(dtype)
    every = torch.sigmoid((module.gate_head.bias - 1.0) / 1.5).detach()
    scale = every.sum() / every[1:3].sum() if renormalize else 1.0
    for x in (z, z[0], z[0, 0]):
        gates = module(x).gates
        want = (scale * every * torch.tensor([0, 1, 1, 0, 0])).to(dtype)
        torch.testing.assert_close(gates, want.expand_as(gates))
    (slope,) = torch.autograd.grad(module(z[0, 0]).gates[1], module.gate_head.bias)
    bias = module.gate_head.bias.detach().double().requires_grad_()
    gates = torch.sigmoid((bias - 1.0) / 1.5)
    share = gates[1] * (gates.sum() / gates[1:3].sum() if renormalize else 1.0)
    (want,) = torch.autograd.grad(share, bias)
    rounding = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(slope.double(), want, rtol=rounding, atol=rounding / 10)


def test_gradients_of_kept_and_rescaled_gates():
    module = field(top_k=3, top_k_renormalize=True)
    z = normal(2, 7).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: module(x).gates, (z,))


def test_a_basis_confines_all_directions():
    vectors = field(basis=3)(normal(40, 7)).vectors.reshape(-1, 7)
    assert torch.linalg.matrix_rank(vectors) == 3
    assert torch.linalg.matrix_rank(field()(normal(40, 7)).vectors.reshape(-1, 7)) == 7


def test_raw_velocity_is_in_the_span():
    """Of three directions of seven coordinates: the residual of a least-squares fit is zero."""
    torch.manual_seed(1)
    module, flow = DirectionField(7, 3, 9).double(), DRMFlow(7, 4, 9, 3).double()
    z, e = normal(2, 7), normal(2, 6, 4, seed=1)
    directions, c = module(z), flow(z, e)
    v = directions.velocity(c)
    want = sum(
        directions.gates[:, None, i, None] * c[..., i, None] * directions.vectors[:, None, i]
        for i in range(3)
    )
    torch.testing.assert_close(v, want)
    fit = torch.linalg.lstsq(directions.vectors.mT, v.mT).solution
    torch.testing.assert_close(directions.vectors.mT @ fit, v.mT)


@pytest.mark.parametrize("kind", ["flow", "direct"])
def test_network_of_state_and_token(kind):
    torch.manual_seed(2)
    module = (DRMFlow(7, 4, 9, 3) if kind == "flow" else DirectStateTransition(7, 4, 9)).double()
    z, e = normal(2, 7), normal(2, 6, 4, seed=1)
    found = module(z, e)
    for i in range(2):
        for t in range(6):
            y = gelu(module.first(torch.cat([z[i], e[i, t]])))
            torch.testing.assert_close(found[i, t], torch.tanh(module.second(y)))


def test_gradients():
    module = field(basis=3, top_k=4)
    z = normal(2, 7).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: (module(x).vectors, module(x).gates), (z,))


def test_errors():
    with pytest.raises(ValueError, match=r"z: got shape \(2, 6\).*7"):
        field()(normal(2, 6))
    with pytest.raises(TypeError, match="floating"):
        field()(torch.zeros(2, 7, dtype=torch.int64))
    with pytest.raises(ValueError, match="top_k: got 6"):
        field(top_k=6)
    with pytest.raises(ValueError, match="floor: got 0"):
        field(floor=0)
    with pytest.raises(ValueError, match="temperature"):
        field(temperature=0.0)
    with pytest.raises(ValueError, match=r"expected \(2, m, 4\)"):
        DRMFlow(7, 4, 9, 3).double()(normal(2, 7), normal(2, 4))
