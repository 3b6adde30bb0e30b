"""ParaM2RNN: equation, gates, initialisation."""

from __future__ import annotations

import math

import pytest
import torch

from pararnn import ParaM2RNN, m2rnn_gates, newton_m2rnn_factorized, sequential_apply


def test_equation():
    torch.manual_seed(0)
    cell = ParaM2RNN(3, 2, 4).double()
    torch.nn.init.normal_(cell.W)
    torch.nn.init.normal_(cell.in_proj.bias)
    H, x = torch.randn(5, 2, 4, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64)
    got = cell.step(H, x)
    packed = x @ cell.in_proj.weight.T + cell.in_proj.bias
    for i in range(5):
        k, v, logit = packed[i, :2], packed[i, 2:6], packed[i, 6]
        f = 1 / (1 + torch.exp(-logit))
        want = f * H[i] + (1 - f) * torch.tanh(H[i] @ cell.W + torch.outer(k, v))
        torch.testing.assert_close(got[i], want)


def test_gates():
    cell = ParaM2RNN(3, 2, 4)
    for lead in ((), (5,), (5, 7)):
        x = torch.randn(*lead, 3)
        k, v, f = m2rnn_gates(cell, x)
        assert (k.shape, v.shape, f.shape) == ((*lead, 2), (*lead, 4), lead)
        packed = x @ cell.in_proj.weight.T + cell.in_proj.bias
        torch.testing.assert_close(k, packed[..., :2])
        torch.testing.assert_close(v, packed[..., 2:6])
        torch.testing.assert_close(f, torch.sigmoid(packed[..., 6]))


def test_shapes_and_initialisation():
    torch.manual_seed(0)
    cell = ParaM2RNN(256, 64, 32)
    assert cell.state_shape == (64, 32)
    assert cell.d_h == cell.hidden_size == 64 * 32
    assert cell.jac_structure == "m2rnn"
    assert torch.equal(cell.W, torch.eye(32))
    assert math.isclose(float(cell.in_proj.weight.std()), 256**-0.5, rel_tol=0.05)
    assert not cell.in_proj.bias.any()
    assert ParaM2RNN(**cell.hyperparameters()).state_shape == (64, 32)


def test_a_closed_gate_keeps_the_state_exactly():
    cell = ParaM2RNN(3, 2, 4)
    with torch.no_grad():
        cell.in_proj.bias[-1] = 200.0
    H = torch.randn(2, 2, 4)
    assert torch.equal(cell.step(H, torch.zeros(2, 3)), H)


def test_missing_sizes():
    with pytest.raises(TypeError, match="k_dim"):
        ParaM2RNN(3)
    with pytest.raises(TypeError, match="v_dim"):
        ParaM2RNN(3, 2)


def test_the_seed_snippet():
    cell = ParaM2RNN(d_in=32, k_dim=8, v_dim=8)
    H = torch.zeros(2, 8, 8)
    x = torch.randn(2, 32)
    H = cell.step(H, x)
    assert H.shape == (2, 8, 8)
    x = torch.randn(2, 20, 32)
    torch.testing.assert_close(
        newton_m2rnn_factorized(cell, x), sequential_apply(cell, x), rtol=0, atol=5e-6
    )
