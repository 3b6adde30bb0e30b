"""The network of a state and several tokens is its two layers, whatever these are made of."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune

from pararnn.drm.networks import StateTokenNetwork, plain_linear


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def network():
    torch.manual_seed(0)
    return StateTokenNetwork(5, 3, 7, 4).double()


def wanted(weight, bias, net, z, e, after=lambda x: x):
    """By the formula, one state and token at a time, with the first map given."""
    rows = []
    for state, tokens in zip(z, e, strict=True):
        found = [after(weight @ torch.cat([state, token]) + bias) for token in tokens]
        rows.append(torch.stack([net.second(F.gelu(x)) for x in found]))
    return torch.stack(rows).tanh()


class LoRA(nn.Module):
    """A frozen layer and a map of rank 2 beside it."""

    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Parameter(normal(2, 8, seed=5)), nn.Parameter(normal(7, 2, seed=6))

    def forward(self, x):
        return self.base(x) + x @ self.down.T @ self.up.T


class Doubling(nn.Module):
    def forward(self, weight):
        return 2 * weight


def lora(net):
    net.first = LoRA(net.first)
    return net.first.base.weight + net.first.up @ net.first.down, net.first.base.bias


def pruned(net):
    prune.l1_unstructured(net.first, "weight", amount=0.5)
    assert (net.first.weight == 0).sum() == 28
    return net.first.weight_orig * net.first.weight_mask, net.first.bias


def doubled(net):
    weight = net.first.weight
    parametrize.register_parametrization(net.first, "weight", Doubling())
    return 2 * weight, net.first.bias


def normed(net):
    parametrizations.weight_norm(net.first)
    g, v = (p for p in net.first.parametrizations.weight.parameters())
    return g * v / torch.linalg.vector_norm(v, dim=1, keepdim=True), net.first.bias


def plain(net):
    return net.first.weight, net.first.bias


@pytest.mark.parametrize("kind", [plain, lora, pruned, doubled, normed])
@pytest.mark.parametrize("count", [1, 6])
def test_the_first_layer_is_what_it_is_replaced_by(kind, count):
    net, z, e = network(), normal(2, 5, seed=1), normal(2, count, 3, seed=2)
    weight, bias = kind(net)
    assert plain_linear(net.first) == (kind is plain)
    found, want = net(z, e), wanted(weight, bias, net, z, e)
    torch.testing.assert_close(found, want, rtol=1e-14, atol=1e-15)
    trained = [p for p in net.parameters() if p.requires_grad]
    assert len(trained) == {lora: 4, normed: 5}.get(kind, 4)
    slopes = torch.autograd.grad(found.square().sum(), trained)
    for a, b in zip(slopes, torch.autograd.grad(want.square().sum(), trained), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("count", [1, 6])
def test_hooks_see_the_first_layer(count):
    net, z, e = network(), normal(2, 5, seed=1), normal(2, count, 3, seed=2)
    calls = []
    net.first.register_forward_hook(lambda module, args, out: calls.append(1) or 3 * out)
    want = wanted(*plain(net), net, z, e, lambda x: 3 * x)
    torch.testing.assert_close(net(z, e), want, rtol=1e-14, atol=1e-15)
    assert calls == [1]


def test_a_forward_of_all_layers_is_called(monkeypatch):
    net, z, e = network(), normal(2, 5, seed=1), normal(2, 6, 3, seed=2)
    want = wanted(*plain(net), net, z, e, lambda x: 3 * x)
    first = net.first

    def forward(self, x):
        return F.linear(x, self.weight, self.bias) * (3 if self is first else 1)

    monkeypatch.setattr(nn.Linear, "forward", forward)
    torch.testing.assert_close(net(z, e), want, rtol=1e-14, atol=1e-15)


def test_a_bias_of_another_kind_is_called():
    net, z, e = network(), normal(2, 5, seed=1), normal(2, 6, 3, seed=2)

    class Other(nn.Parameter):
        pass

    net.first.bias = Other(net.first.bias.detach())
    assert not plain_linear(net.first)
    want = wanted(*plain(net), net, z, e)
    torch.testing.assert_close(net(z, e), want, rtol=1e-14, atol=1e-15)
