"""Kernels of the delta rule select at a reset: nothing before it, finite or not, is multiplied by its 0."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest
import torch

from pararnn.scan import delta, delta_scan, reference

LENGTH, BAD, RESET = 40, 14, 21
sizes = pytest.mark.parametrize(("micro", "size"), [(1, 8), (1, 64), (3, 64)])


def draw(kit, micro, dtype=torch.float32):
    """Two rows, two heads; chunks of 16 or 32 micro-steps, of which 3 do not divide either."""
    g = torch.Generator().manual_seed(micro)

    def normal(*shape):
        return torch.randn(shape, generator=g, dtype=torch.float64)

    k = normal(2, LENGTH, micro, 2, 4)
    values = {
        "q": normal(2, LENGTH, 2, 4),
        "k": k / k.norm(dim=-1, keepdim=True),
        "v": normal(2, LENGTH, micro, 2, 3),
        "beta": 2 * torch.rand(2, LENGTH, micro, 2, generator=g, dtype=torch.float64),
        "h0": normal(2, 2, 4, 3),
        "gamma": torch.rand(2, LENGTH, 2, generator=g, dtype=torch.float64),
    }
    return {name: x.to(dtype).to(kit.DEVICE) for name, x in values.items()}


def marked(kit, *steps):
    """Resets of the second row."""
    resets = torch.zeros(2, LENGTH, dtype=torch.bool, device=kit.DEVICE)
    resets[1, list(steps)] = True
    return resets


def scan(values, resets, size, function=delta_scan, **options):
    given = dict(values)
    gamma = given.pop("gamma")
    if function is delta_scan:
        options |= {"chunk_size": size, "backend": "fused"}
    return function(*given.values(), gamma=gamma, resets=resets, **options)


def kernels(values, resets, size):
    """The kernels alone, which are given numbers that are not finite as they are."""
    from pararnn.scan.fused_delta import fused_chunks

    q, k, v, beta, h0, gamma = values.values()
    gamma = gamma.masked_fill(resets.unsqueeze(-1), 0)[:, :, None, :, None]
    return fused_chunks([q.unsqueeze(2), k, v, beta.unsqueeze(-1), gamma], h0, size, resets)


def spoil(values, what, steps):
    values = {name: x.clone() for name, x in values.items()}
    for name, number in what.items():
        values[name][(1,) if name == "h0" else (1, steps)] = number
    return values


@pytest.fixture
def blind(monkeypatch):
    """As on a GPU, where nothing looks at numbers."""
    monkeypatch.setattr(delta, "readable", lambda value: False)


def results(values, resets, size, run, after=RESET):
    """Outputs, the end, and gradients of what is in the first row or after the reset."""
    leaves = {name: x.clone().requires_grad_() for name, x in values.items()}
    y, end = run(leaves, resets, size)
    loss = y[0].sin().sum() + y[1, after:].sin().sum() + end.cos().sum()
    grads = torch.autograd.grad(loss, list(leaves.values()))
    return y.detach(), end.detach(), dict(zip(leaves, grads, strict=True))


def same_after(found, wanted, after=RESET, before=None):
    """No bit differs after the reset, nor in the other row, nor before the first bad step."""
    (y, end, grads), (want, last, right) = found, wanted
    assert torch.equal(y[1, after:], want[1, after:])
    assert torch.equal(y[0], want[0])
    assert torch.equal(end, last)
    if before is not None:
        assert torch.equal(y[1, :before], want[1, :before])
    for name, got in grads.items():
        assert torch.equal(got[0], right[name][0]), name
        if name != "h0":
            assert torch.equal(got[1, after:], right[name][1, after:]), name


def of_the_fresh_sequence(found, values, resets, after=RESET):
    """After the reset: what the loop in float64 has of the sequence that begins there."""
    y, end, grads = found
    leaves = {
        name: (torch.zeros_like(x[1:]) if name == "h0" else x[1:, after:]).double().requires_grad_()
        for name, x in values.items()
    }
    want, last = scan(leaves, resets[1:, after:], None, reference.delta)
    loss = want.sin().sum() + last.cos().sum()
    right = torch.autograd.grad(loss, list(leaves.values()))
    pairs = [(y[1:, after:], want), (end[1:], last)]
    pairs += [
        (grads[name][1:, after:], x)
        for name, x in zip(leaves, right, strict=True)
        if name != "h0"
    ]
    for got, true in pairs:
        true = true.detach()
        if true.ndim == 3 and true.shape[1] == got.shape[1]:
            got, true = got.clone(), true.clone()
            got[:, 0] = true[:, 0] = 0 if true is right[-1] else true[:, 0]
        scale = max(1.0, float(true.abs().max()))
        torch.testing.assert_close(got.double(), true, rtol=0, atol=2e-5 * scale)


# Finite numbers, of a state or a product that is not.
LARGE = {
    "a value": {"v": 3.2e38},
    "a key": {"k": 1e25},
    "a key and a value": {"k": 1e30, "v": 1e30},
    "a step size": {"beta": 3e38},
    "a query": {"q": 3e38},
    "a decay": {"gamma": 1e20},
    "a decay and a value": {"gamma": 3e38, "v": 1e30},
    "a start": {"h0": 3e38},
}


@pytest.mark.parametrize("which", LARGE)
@sizes
def test_finite_numbers_that_overflow(kit, blind, which, micro, size):
    """No bit after the reset differs; what is cut off has gradients of exactly 0."""
    values, resets = draw(kit, micro), marked(kit, RESET, RESET + 9)
    steps = [BAD, BAD + 1, BAD + 2]
    spoiled = spoil(values, LARGE[which], steps)
    wanted = results(values, resets, size, scan)
    found = results(spoiled, resets, size, scan)
    first = None if "h0" in LARGE[which] else BAD
    same_after(found, wanted, before=first)
    for name, got in found[2].items():
        assert float(got[1, : None if name == "h0" else RESET].abs().sum()) == 0, name
    of_the_fresh_sequence(wanted, values, resets)
    # Where the loop of many more digits is past the largest number, so is the result.
    wide = {name: x.double() for name, x in spoiled.items()}
    true, _ = scan(wide, resets, None, reference.delta)
    beyond = true[1, :RESET].abs() > 4 * torch.finfo(torch.float32).max
    beyond |= ~true[1, :RESET].isfinite()
    assert not bool(found[0][1, :RESET][beyond].isfinite().any())


@pytest.mark.parametrize("micro", [1, 2])
def test_decays_of_8(kit, blind, micro):
    """States that leave the range within some chunks; resets bring them back, again and again."""
    values = draw(kit, micro)
    values["h0"] = values["h0"] * 1e20
    values["gamma"][1, :RESET] = 8
    values["v"][1, :RESET] *= 1e30
    resets = marked(kit, RESET, RESET + 1, RESET + 9)
    found = results(values, resets, 64, scan)
    assert not bool(found[0][1, RESET - 1].isfinite().any())
    clean = spoil(values, {"gamma": 0.5, "v": 1.0, "h0": 1.0}, slice(0, RESET))
    same_after(found, results(clean, resets, 64, scan))
    of_the_fresh_sequence(found, values, resets)


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", ["q", "k", "v", "beta", "gamma", "h0"])
@sizes
def test_numbers_that_are_not_finite(kit, blind, name, number, micro, size):
    """By the scan, which takes them out, and by the kernels, which are given them."""
    values, resets = draw(kit, micro), marked(kit, RESET)
    spoiled = spoil(values, {name: number}, BAD)
    for run in (scan, kernels):
        found = results(spoiled, resets, size, run)
        wanted = results(values, resets, size, run)
        same_after(found, wanted, before=None if name == "h0" else BAD)
        reached = found[0][1, 0 if name == "h0" else BAD]
        assert not bool(reached.isfinite().any())


@pytest.mark.parametrize("number", [torch.nan, torch.inf, 3e38])
@sizes
def test_cotangents(kit, blind, number, micro, size):
    """Those of an output reach the steps from the last reset up to it."""
    values, resets = draw(kit, micro), marked(kit, 5, RESET)
    found = []
    for bad in (0.0, number):
        leaves = {name: x.clone().requires_grad_() for name, x in values.items()}
        y, end = scan(leaves, resets, size)
        bar = torch.linspace(-1, 1, y.numel(), device=y.device).view(y.shape)
        bar[1, BAD] = bad
        found.append(torch.autograd.grad((y, end), list(leaves.values()), (bar, end.detach())))
    for name, want, got in zip(values, *found, strict=True):
        assert torch.equal(got[0], want[0]), name
        if name == "h0":
            assert torch.equal(got[1], want[1])
        else:
            assert torch.equal(got[1, BAD + 1 :], want[1, BAD + 1 :]), name
            assert torch.equal(got[1, :5], want[1, :5]), name
            touched = got[1, 5 if name != "gamma" else 6 : BAD] if name != "q" else got[1, BAD]
            assert number == 3e38 or not bool(touched.isfinite().all()), name


def test_no_resets_are_like_none(kit, blind):
    """Selection changes no bit of what it selects."""
    values = draw(kit, 2)
    nothing = torch.zeros(2, LENGTH, dtype=torch.bool, device=kit.DEVICE)
    for a, b in zip(*(results(values, r, 64, scan)[:2] for r in (None, nothing)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
