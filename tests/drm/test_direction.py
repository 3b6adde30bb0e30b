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
    with pytest.raises(ValueError, match="temperature"):
        field(temperature=0.0)
    with pytest.raises(ValueError, match=r"expected \(2, m, 4\)"):
        DRMFlow(7, 4, 9, 3).double()(normal(2, 7), normal(2, 4))
