"""The gated delta rule has the range of its states, and a reset selects; against loops of more digits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pararnn.scan import delta_scan, reference, stepwise

LONG = np.longdouble
directions = pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
micros = pytest.mark.parametrize("micro", [1, 2])
LENGTH = 70


def draw(micro=1, dtype=torch.float32, length=LENGTH, seed=0):
    g = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=g, dtype=torch.float64)

    k = normal(2, length, micro, 2, 4)
    values = {
        "q": normal(2, length, 2, 4),
        "k": k / k.norm(dim=-1, keepdim=True),
        "v": normal(2, length, micro, 2, 3),
        "beta": 2 * torch.rand(2, length, micro, 2, generator=g, dtype=torch.float64),
        "h0": normal(2, 2, 4, 3),
        "gamma": torch.rand(2, length, 2, generator=g, dtype=torch.float64),
    }
    return {name: x.to(dtype) for name, x in values.items()}


def loop(values, reverse=False, number=LONG):
    """Outputs and the last state of plain numbers, micro-step by micro-step."""
    q, k, v, beta, h, gamma = (values[n].detach().numpy().astype(number) for n in values)
    h, y = h.copy(), np.zeros((*q.shape[:3], v.shape[-1]), number)
    with np.errstate(all="ignore"):
        for t in range(q.shape[1])[:: -1 if reverse else 1]:
            h = gamma[:, t, :, None, None] * h
            for j in range(k.shape[2]):
                key = k[:, t, j][..., None]
                error = v[:, t, j] - (key * h).sum(-2)
                h = h + beta[:, t, j][..., None, None] * key * error[..., None, :]
            y[:, t] = (q[:, t][..., None] * h).sum(-2)
    return y, h


def near(got, want, tolerance):
    """Every token relative to its own largest number."""
    got = got.detach().numpy().astype(LONG)
    axes = tuple(range(2, got.ndim))
    size = np.abs(want).max(axes, keepdims=True)
    assert bool((np.abs(got - want) <= tolerance * size).all())


# What is put where, five steps before the reset or at the start.
BAD = {
    "a value": {"v": 3.2e38},
    "a key": {"k": 1e25},
    "a step size": {"beta": 3e38},
    "decays": {"gamma": 1e20},
    "a decay and a value": {"gamma": 3e38, "v": 1e30},
    "a start": {"h0": 3e38},
    "a start that grows": {"h0": 3e38, "gamma": 1e3},
}


@pytest.mark.parametrize("which", BAD)
@micros
@directions
def test_a_reset_selects(which, micro, reverse):
    """Numbers that are finite, of a state that is not: no bit after the reset, of an output, a state or
    a gradient, differs from those of a sequence without them; nor of another row or an earlier step."""
    at, bad = (30, 35) if reverse else (40, 35)
    resets = torch.zeros(2, LENGTH, dtype=torch.bool)
    resets[1, at] = True
    after = slice(None, at + 1) if reverse else slice(at, None)
    before = slice(at + 1, None) if reverse else slice(None, at)
    early = slice(bad + 1, None) if reverse else slice(None, bad)
    clean, spoiled = draw(micro), draw(micro)
    for name, value in BAD[which].items():
        spoiled[name][(1,) if name == "h0" else (1, bad)] = value

    def results(values):
        leaves = [x.requires_grad_() for x in values.values()]
        y, end = delta_scan(*leaves[:5], gamma=leaves[5], resets=resets, reverse=reverse)
        loss = y[0].sin().sum() + y[1, after].sin().sum() + end.sum()
        return y, end, torch.autograd.grad(loss, leaves)

    (y, end, grads), (want, last, right) = results(spoiled), results(clean)
    assert torch.equal(y[1, after], want[1, after])
    assert torch.equal(y[0], want[0])
    assert torch.equal(end, last)
    if "h0" not in BAD[which]:
        assert torch.equal(y[1, early], want[1, early])
    for name, got, true in zip(spoiled, grads, right, strict=True):
        assert torch.equal(got[0], true[0])
        if name == "h0":
            assert float(got[1].abs().sum()) == 0
        else:
            assert torch.equal(got[1, after], true[1, after])
            assert float(got[1, before].abs().sum()) == 0
    fresh = {n: torch.zeros_like(x) if n == "h0" else x[:, after] for n, x in clean.items()}
    true, _ = loop(fresh, reverse)
    near(y[1:, after], true[1:], 1e-5)
    size = np.abs(loop(spoiled, reverse)[0][1, before])
    beyond = size > 4 * np.finfo(np.float32).max
    assert not np.isfinite(y[1, before].detach().numpy()[beyond]).any()


PRODUCTS = {
    "decays": lambda g, b: {"gamma": torch.full_like(g, 8.0)},
    "reflections": lambda g, b: {"gamma": torch.ones_like(g), "beta": torch.full_like(b, 11.0)},
}


@pytest.mark.parametrize("which", PRODUCTS)
@micros
@directions
@pytest.mark.parametrize("cut", [False, True], ids=["no reset", "reset"])
def test_products_that_overflow(which, micro, reverse, cut):
    """States that are zero for as long as products grow, and then in range."""
    values = draw(micro, length=200)
    values |= PRODUCTS[which](values["gamma"], values["beta"])
    if which == "reflections":
        values["k"] = values["k"][:, :1].expand_as(values["k"]).clone()
    values["h0"] = torch.zeros_like(values["h0"])
    written = slice(None, 6) if reverse else slice(-6, None)
    for name in ("v",):
        kept = values[name][:, written].clone()
        values[name] = torch.zeros_like(values[name])
        values[name][:, written] = kept
    resets = None
    if cut:
        resets = torch.zeros(2, 200, dtype=torch.bool)
        resets[:, 100] = True
    leaves = [x.requires_grad_() for x in values.values()]
    y, end = delta_scan(*leaves[:5], gamma=leaves[5], resets=resets, reverse=reverse)
    want, last = loop(values, reverse)  # what the reset forgets is zero
    near(y[:, written], want[:, written], 2e-5)
    assert bool((np.abs(end.detach().numpy() - last) <= 2e-5 * np.abs(last).max()).all())
    rest = slice(6, None) if reverse else slice(None, -6)
    assert float(y[:, rest].abs().sum()) == 0
    wide = {n: x.detach().double().requires_grad_() for n, x in values.items()}
    true, _ = reference.delta(
        *list(wide.values())[:5], gamma=wide["gamma"], resets=resets, reverse=reverse
    )
    found = torch.autograd.grad(y.sum(), [values["v"]])[0][:, written]
    right = torch.autograd.grad(true.sum(), [wide["v"]])[0][:, written]
    torch.testing.assert_close(found.double(), right, rtol=0, atol=2e-5 * float(right.abs().max()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@micros
@directions
@pytest.mark.parametrize("back", [False, True], ids=["decay", "and grow"])
def test_products_of_decays_that_underflow(dtype, micro, reverse, back):
    """A large state that decays past the range of a product, and comes back."""
    values = draw(micro, dtype)
    decades = 4.0 if dtype == torch.float32 else 34.0
    way = [-decades] * 12 + [decades if back else 0.0] * 12
    steps = torch.tensor(way * 3, dtype=torch.float64)[:LENGTH]
    if not back:
        steps[24:] = 0
    gamma = (10.0**steps).to(dtype).reshape(1, -1, 1).expand(2, -1, 2)
    values["gamma"] = (gamma.flip(1) if reverse else gamma).contiguous()
    values["beta"] = torch.zeros_like(values["beta"])  # nothing else is written
    values["h0"] = values["h0"] * 10.0 ** (7 * decades)
    leaves = [x.requires_grad_() for x in values.values()]
    y, end = delta_scan(*leaves[:5], gamma=leaves[5], reverse=reverse)
    want, last = loop(values, reverse)
    assert bool((np.abs(want) > 0).all())
    near(y, want, 300 * torch.finfo(dtype).eps)
    assert bool(
        (
            np.abs(end.detach().numpy() - last) <= 300 * torch.finfo(dtype).eps * np.abs(last).max()
        ).all()
    )
    # The derivative by the start is the product of the decays.
    (found,) = torch.autograd.grad(y[:, -20 if reverse else 20].sum(), leaves[4])
    kept = values["gamma"].detach().numpy().astype(LONG)
    kept = kept[:, -20:].prod(1) if reverse else kept[:, :21].prod(1)
    right = kept[..., None] * values["q"][:, -20 if reverse else 20].detach().numpy()
    tiny = torch.finfo(dtype).tiny
    assert bool(
        (
            np.abs(found.numpy() - right[..., None])
            <= 300 * torch.finfo(dtype).eps * np.abs(right[..., None]) + tiny
        ).all()
    )


def test_small_keys_of_a_large_state():
    """The product of a decay and a key underflows though what the key reads does not."""
    values = draw()
    values["k"] *= 1e-14
    values["gamma"] = torch.full_like(values["gamma"], 0.01)
    values["v"] *= 1e-14
    values["h0"] *= 1e37
    values["beta"] = torch.zeros_like(values["beta"])
    values["q"] *= 1e-14
    y, _ = delta_scan(*list(values.values())[:5], gamma=values["gamma"])
    want, _ = loop(values)
    near(y[:, :20], want[:, :20], 1e-4)


def test_later_overflow_changes_no_earlier_bit():
    values = draw(2)
    want, _ = delta_scan(*list(values.values())[:5], gamma=values["gamma"])
    values["v"][1, 50] = 3.3e38
    values["beta"][1, 50] = 1.9
    y, _ = delta_scan(*list(values.values())[:5], gamma=values["gamma"])
    assert torch.equal(y[:, :50], want[:, :50])
    assert torch.equal(y[0], want[0])
    assert not bool(y[1, 50:].isfinite().all())


def test_ordinary_numbers_are_not_walked(monkeypatch):
    def walk(*given):
        raise RuntimeError("walked")

    monkeypatch.setattr(stepwise, "walk", walk)
    values = draw(length=300)
    ordinary = values["gamma"].clone()
    for gamma in (ordinary, 1e-6 * ordinary, torch.zeros_like(ordinary), -ordinary, ordinary**40):
        values["gamma"] = gamma
        delta_scan(*list(values.values())[:5], gamma=gamma)
    values["v"][1, 200] = torch.nan
    delta_scan(*list(values.values())[:5], gamma=ordinary)
