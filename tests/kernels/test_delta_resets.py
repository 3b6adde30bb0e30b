"""Kernels of the delta rule select at a reset: nothing before it, finite or not, is multiplied by its 0."""

from __future__ import annotations

import linecache
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from pararnn.scan import delta, delta_scan, reference

LENGTH, BAD, RESET = 26, 8, 13
sizes = pytest.mark.parametrize(("micro", "size"), [(2, 64), (3, 5)])


def draw(kit, micro, dtype=torch.float32):
    """Two rows and a head; chunks of 16 or 32 micro-steps, which tokens of 3 do not divide."""
    g = torch.Generator().manual_seed(micro)

    def normal(*shape):
        return torch.randn(shape, generator=g, dtype=torch.float64)

    k = normal(2, LENGTH, micro, 1, 4)
    values = {
        "q": normal(2, LENGTH, 1, 4),
        "k": k / k.norm(dim=-1, keepdim=True),
        "v": normal(2, LENGTH, micro, 1, 3),
        "beta": 2 * torch.rand(2, LENGTH, micro, 1, generator=g, dtype=torch.float64),
        "h0": normal(2, 1, 4, 3),
        "gamma": torch.rand(2, LENGTH, 1, generator=g, dtype=torch.float64),
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


NOTICED = r"differ|crosses|finite where"


def same_after(found, wanted, after=RESET, before=None):
    """No bit differs after the reset, nor in the other row, nor before the first bad step."""
    (y, end, grads), (want, last, right) = found, wanted
    assert torch.equal(y[1, after:], want[1, after:]), "outputs differ"
    assert torch.equal(y[0], want[0]), "the other row's outputs differ"
    assert torch.equal(end, last), "final states differ"
    if before is not None:
        assert torch.equal(y[1, :before], want[1, :before]), "earlier outputs differ"
    for name, got in grads.items():
        assert torch.equal(got[0], right[name][0]), f"the other row's cotangents differ: {name}"
        if name != "h0":
            assert torch.equal(got[1, after:], right[name][1, after:]), f"cotangents differ: {name}"


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
    pairs += [(grads[n][1:, after:], x) for n, x in zip(leaves, right, strict=True) if n != "h0"]
    for got, true in pairs:
        scale = max(1.0, float(true.detach().abs().max()))
        torch.testing.assert_close(got.double(), true.detach(), rtol=0, atol=2e-5 * scale)


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


def overflow(kit, what, micro, size, run=scan):
    """No bit after the reset differs; what is cut off has gradients of exactly 0; and what the loop of many
    more digits has past the largest number is not finite."""
    values, resets = draw(kit, micro), marked(kit, RESET, RESET + 5)
    spoiled = spoil(values, what, slice(BAD, RESET))
    wanted = results(values, resets, size, run)
    found = results(spoiled, resets, size, run)
    same_after(found, wanted, before=None if "h0" in what else BAD)
    for name, got in found[2].items():
        crossed = got[1, : None if name == "h0" else RESET]
        assert float(crossed.abs().sum()) == 0, f"{name} crosses"
    wide = {name: x.double() for name, x in spoiled.items()}
    true = scan(wide, resets, None, reference.delta)[0][1, :RESET]
    beyond = ~(true.abs() < 4 * torch.finfo(torch.float32).max)
    assert not bool(found[0][1, :RESET][beyond].isfinite().any()), "finite where the loop is not"
    return values, resets, wanted


@pytest.mark.parametrize("which", LARGE)
@sizes
def test_finite_numbers_that_overflow(kit, blind, which, micro, size):
    values, resets, wanted = overflow(kit, LARGE[which], micro, size)
    of_the_fresh_sequence(wanted, values, resets)


@pytest.mark.parametrize("micro", [1, 2])
def test_decays_of_8(kit, blind, micro):
    """States that leave the range within some chunks; resets bring them back, again and again."""
    values = draw(kit, micro)
    values["h0"] = values["h0"] * 1e20
    values["gamma"][1, :RESET] = 8
    values["v"][1, :RESET] *= 1e30
    resets = marked(kit, RESET, RESET + 1, RESET + 5)
    found = results(values, resets, 64, scan)
    assert not bool(found[0][1, RESET - 1].isfinite().any())
    clean = spoil(values, {"gamma": 0.5, "v": 1.0, "h0": 1.0}, slice(0, RESET))
    same_after(found, results(clean, resets, 64, scan))
    of_the_fresh_sequence(found, values, resets)


@pytest.mark.parametrize("name", ["q", "k", "v", "beta", "gamma", "h0"])
@sizes
def test_numbers_that_are_not_finite(kit, blind, name, micro, size):
    """By the scan, which takes them out, and by the kernels, which are given them."""
    number = torch.inf if micro == 3 else torch.nan
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


KEY, START, VALUE = {"k": 1e25, "v": 1e25}, {"h0": 3e38, "gamma": 1e3}, {"v": torch.nan}
DECAY = {"gamma": 3e38, "v": 1e30}
MUTANTS = {
    # name: (module, old, new, what is put before the reset); each is one place of the text
    "pairs are multiplied": ("cuts", "tl.where(piece[:, None] == piece[None, :], x, 0.0)", "x", KEY),
    "the start passes": ("cuts", "tl.where(piece[:, None] == 0, x, 0.0)", "x", START),
    "all reaches the end": ("cuts", "tl.where(piece[:, None] == tl.max(piece, 0), x, 0.0)", "x", KEY),
    "zero times what is not finite": ("cuts", "tl.where(fine, x, 0.0), P", "x, P", KEY),
    "what is not finite is not seen": ("cuts", "marks > 0", "marks < 0", VALUE),
    "the order is not seen": ("cuts", "return order & ", "return ", KEY),
    "a row of zeros speaks": ("cuts", "(speaks[None, :], a, 0.0)", "(speaks[None, :], a, a)", KEY),
    "a cotangent of zero is scaled": ("cuts", "tl.where(bar == 0, 0.0, product)", "product", KEY),
    "cotangents of zero are told": ("cuts", "> 0)[:, None], product, 0.0", ">= 0)[:, None], product, 0.0", KEY),
    "a chunk passes its start": ("chain", "tl.load(cuts + at) == 0", "tl.load(cuts + at) >= 0", START),
    "errors of other pieces": ("delta", "there[:, None] & there[None, :]", "(i < M)[:, None]", KEY),
    "systems of other pieces": ("delta", "pairs(tl.where(i[:, None] > i[None, :], d_system, 0.0), piece)",
                                "tl.where(i[:, None] > i[None, :], d_system, 0.0)", KEY),
}  # fmt: skip


@pytest.fixture
def mutated(monkeypatch):
    """The kernels with one place of their text replaced."""
    from pararnn import kernels

    def load(place, old, new):
        for name in ("cuts", "chain", "delta"):
            text = (Path(kernels.__file__).parent / f"{name}.py").read_text()
            if name == place:
                text, count = re.subn(re.escape(old), lambda _: new, text, count=1)
                assert count, "the mutant no longer fits the text"
            file = f"<{name} with {old}>"
            linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
            module = ModuleType(f"pararnn.kernels.{name}")
            module.__package__ = "pararnn.kernels"
            monkeypatch.setitem(sys.modules, module.__name__, module)
            exec(compile(text, file, "exec"), module.__dict__)

    return load


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="mutants may read anywhere")
@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_noticed(kit, blind, mutated, name):
    place, old, new, what = MUTANTS[name]
    mutated(place, old, new)
    with pytest.raises(AssertionError, match=NOTICED):
        overflow(kit, what, 3, 5, kernels if what == VALUE else scan)


@pytest.mark.slow
@pytest.mark.parametrize("what", [KEY, START, VALUE, DECAY])
def test_the_cases_pass_without_mutants(kit, blind, what):
    """What notices is the mutant, not the case."""
    overflow(kit, what, 3, 5, kernels if what == VALUE else scan)
