"""Mixer and token residual against loops."""

from __future__ import annotations

import pytest
import torch

from pararnn.drm import CausalLocalMixer, TokenStateResidual


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def silu(x):
    return x / (1 + torch.exp(-x))


def mixer(**changes):
    torch.manual_seed(5)
    return CausalLocalMixer(4, 3, 6, scale=0.3, **{"kernel": 3, "layers": 2, **changes}).double()


def inputs(length=9):
    states, e = normal(2, length, 4), normal(2, length, 3, seed=1)
    return states, normal(2, 4, seed=2), normal(2, length, 4, seed=3), e


@pytest.mark.parametrize("changes", [{}, {"growth": 2, "layers": 3}, {"kernel": 1}, {"kernel": 12}])
def test_equation(changes):
    module = mixer(**changes)
    states, start, increments, e = inputs()
    mass, risk = normal(2, 9, seed=4), normal(2, 9, seed=5)
    found = module(states, start, increments, e, mass, risk)
    kernel = module.kernel
    for i in range(2):
        y = []
        for t in range(9):
            before = start[i] if t == 0 else states[i, t - 1]
            scalars = torch.stack([mass[i, t], risk[i, t]])
            parts = [states[i, t], states[i, t] - before, increments[i, t], e[i, t], scalars]
            y.append(silu(module.in_proj.weight @ torch.cat(parts) + module.in_proj.bias))
        for depth, (conv, point) in enumerate(zip(module.convs, module.points, strict=True)):
            gap = changes.get("growth", 1) ** depth
            new = []
            for t in range(9):
                s = conv.bias
                for tap in range(kernel):
                    source = t - gap * (kernel - 1 - tap)
                    if source >= 0:
                        s = s + conv.weight[:, 0, tap] * y[source]
                new.append(y[t] + point.weight @ silu(s) + point.bias)
            y = new
        for t in range(9):
            out = states[i, t] + 0.3 * (module.out_proj.weight @ y[t] + module.out_proj.bias)
            torch.testing.assert_close(found[i, t], out)


def test_absent_scalars_are_zero():
    module, (states, start, increments, e) = mixer(), inputs()
    zero = torch.zeros(2, 9, dtype=torch.float64)
    want = module(states, start, increments, e, zero, zero)
    assert torch.equal(module(states, start, increments, e), want)


@pytest.mark.parametrize("changes", [{}, {"growth": 2}, {"kernel": 1}])
def test_reach(changes):
    module, (states, start, increments, e) = mixer(**changes), inputs(14)
    e = e.requires_grad_()
    out = module(states, start, increments, e)
    for t in range(14):
        (slope,) = torch.autograd.grad(out[:, t].sum(), e, retain_graph=True)
        seen = slope.abs().amax((0, 2)) > 0
        first = max(0, t + 1 - module.reach)
        assert seen.tolist() == [first <= s <= t for s in range(14)]


@pytest.mark.parametrize("changes", [{}, {"growth": 2, "layers": 3}, {"kernel": 1}, {"kernel": 12}])
def test_in_pieces(changes):
    """What is kept of earlier tokens suffices, and does not grow."""
    module, (states, start, increments, e) = mixer(**changes), inputs(13)
    mass, risk = normal(2, 13, seed=4), normal(2, 13, seed=5)
    want, history, found = module(states, start, increments, e, mass, risk), (), []
    for piece in torch.arange(13).split([1, 1, 4, 1, 6]):
        given = (x[:, piece] for x in (increments, e, mass, risk))
        mixed, history = module.run(states[:, piece], start, *given, history=history)
        start = states[:, piece[-1]]
        found.append(mixed)
        sizes = [(module.kernel - 1) * gap for gap in module.dilations]
        assert [h.shape for h in history] == [(2, 6, size) for size in sizes]
    torch.testing.assert_close(torch.cat(found, 1), want, rtol=1e-12, atol=1e-13)


def test_residual():
    torch.manual_seed(0)
    module = TokenStateResidual(4, 3, scale=0.2).double()
    states, _, _, e = inputs()
    found = module(states, e)
    for i in range(2):
        for t in range(9):
            torch.testing.assert_close(
                found[i, t], states[i, t] + 0.2 * module.proj.weight @ e[i, t]
            )
    assert [n for n, _ in module.named_parameters()] == ["proj.weight"]


def test_gradients():
    module, args = mixer(), inputs(4)
    assert torch.autograd.gradcheck(module, tuple(a.requires_grad_() for a in args))


def test_errors():
    states, start, increments, e = inputs()
    with pytest.raises(ValueError, match=r"start: got shape \(1, 4\), expected \(2, 4\)"):
        mixer()(states, start[:1], increments, e)
    with pytest.raises(ValueError, match="mass: got shape"):
        mixer()(states, start, increments, e, states)
    with pytest.raises(ValueError, match="e: got shape"):
        TokenStateResidual(4, 3).double()(states, e[:, :1])
    with pytest.raises(ValueError, match="kernel: got 0"):
        mixer(kernel=0)
