"""Numbers at the ends of the range: what products cannot tell, a walk does. The checks are those of
``benchmarks/gpu_ranges.py``, which runs them at size on a GPU."""

from __future__ import annotations

import functools
import importlib
from pathlib import Path

import pytest
import torch

from pararnn import NewtonConfig, SignedMinGRU, solve
from pararnn.kernels.support import launcher
from pararnn.scan import linear_scan, reference

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
CHUNK = 4
ALWAYS = ("a product of zero", "products of two chunks")


@pytest.fixture
def script(monkeypatch):
    if not FOLDER.is_dir():
        pytest.skip("the benchmarks are not part of an installed package")
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("gpu_ranges")


def passes(results):
    results = list(results)
    assert results
    assert all(r["good"] for r in results), [r for r in results if not r["good"]]


WALKS = (
    "a subnormal product", "a product of zero", "products of two chunks", "an infinite product",
    "there and back in a chunk", "there and back", "a large start", "a small start",
)  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in ALWAYS else pytest.mark.slow) for n in WALKS]
)
def test_states_and_cotangents_over_many_orders(kit, script, name):
    assert set(script.WALKS) == set(WALKS)
    passes(script.ranges(CHUNK, 2, kit.DEVICE, [name]))


@pytest.mark.parametrize(
    "check",
    [
        "alternating",
        pytest.param("not_finite", marks=pytest.mark.slow),
        pytest.param("verdict", marks=pytest.mark.slow),
        pytest.param("ordinary", marks=pytest.mark.slow),
        pytest.param("delta_resets", marks=pytest.mark.slow),
    ],
)
def test_the_checks_of_the_script(kit, script, check):
    passes(getattr(script, check)(CHUNK, 2, kit.DEVICE))


@pytest.mark.slow
def test_what_is_not_finite_ends_no_walk(kit, script):
    """A correction that walks by itself stops where it is small, block after block."""
    passes(script.not_finite(20, 1, kit.DEVICE))


def test_the_script_notices_what_is_wrong(kit, script, monkeypatch):
    """With the starts as the products say, and cotangents not walked again."""

    class Nothing:
        def __getitem__(self, grid):
            return lambda *_, **__: None

    for name in ("repair", "repair_back"):
        monkeypatch.setattr(launcher(), name, Nothing())
    found = script.ranges(CHUNK, 2, kit.DEVICE, ["a product of zero"])
    assert not any(r["good"] for r in found)
    assert not all(r["good"] for r in script.not_finite(CHUNK, 2, kit.DEVICE))


@pytest.mark.parametrize("start", [1e-30, pytest.param(1e30, marks=pytest.mark.slow)])
def test_resets_keep_what_is_lost_to_their_chunk(kit, script, start):
    """A reset is a product of zero, too, behind which nothing is hidden."""
    g = torch.Generator().manual_seed(0)
    a, b = torch.rand(2, 20, 3, generator=g), start * torch.randn(2, 20, 3, generator=g)
    b[0, 5], bar = torch.nan, torch.randn(2, 20, 3, generator=g)
    bar[1, 14, 1] = torch.nan
    resets = torch.zeros(2, 20, dtype=torch.bool)
    resets[:, 10] = True
    given = [x.to(kit.DEVICE).requires_grad_() for x in (a, b)]
    marks, bar = resets.to(kit.DEVICE), bar.to(kit.DEVICE)
    with script.cut(CHUNK):
        states = linear_scan(*given, backend="fused", resets=marks)
        bars = torch.autograd.grad(states, given, bar)
    wanted = reference.linear(*given, resets=marks)
    right = torch.autograd.grad(wanted, given, bar.double())
    for x, y in zip((states, *bars), (wanted, *right), strict=True):
        assert torch.equal(x.isnan(), y.isnan())
        gap = (x.double() - y).abs() / y[y.isfinite()].abs().max()
        assert float(gap[y.isfinite()].max()) < 1e-5
    assert 0 < int(bars[1].isnan().sum()) < 10


@pytest.mark.parametrize("start", [1e-30, 1e-12, 1e12, 1e30])
def test_cells_from_any_start(kit, start):
    """A start leaves at the rate of the gates, through chunks whose products are zero."""
    cell = SignedMinGRU(2, 2).to(kit.DEVICE)
    u = torch.randn(2, 16, 6, generator=torch.Generator().manual_seed(1))
    u[..., :4] *= 1e-30 * start
    u[..., 4:] = 0.3
    u[:, 4:8, 4:] = 1e-12
    u, h0 = u.to(kit.DEVICE), torch.full((2, 2), start, device=kit.DEVICE)
    config = NewtonConfig(backend="fused", chunk_length=CHUNK, warmup=1)
    found = solve(cell, drives=u, h0=h0, config=config)
    wide = functools.partial(torch.Tensor.double)
    want = solve(cell.double(), drives=wide(u), h0=wide(h0), method="sequential").states
    assert found.path == "fused"
    least = torch.finfo(torch.float32).tiny
    assert float(((found.states.double() - want).abs() / (want.abs() + least)).max()) < 1e-5


def test_a_bad_cotangent_leaves_the_bits_of_other_rows(kit, script):
    """Lanes of several rows share a program, which walks those again that need it."""
    g = torch.Generator().manual_seed(0)
    given = [torch.rand(2, 20, 3, generator=g), torch.randn(2, 20, 3, generator=g)]
    given = [x.to(kit.DEVICE).requires_grad_() for x in given]
    bar = torch.randn(2, 20, 3, generator=g).to(kit.DEVICE)
    with script.cut(CHUNK):
        clean = torch.autograd.grad(linear_scan(*given, backend="fused"), given, bar)
        bar[1, 18, 0] = torch.nan
        found = torch.autograd.grad(linear_scan(*given, backend="fused"), given, bar)
    for x, y in zip(found, clean, strict=True):
        assert torch.equal(x[0], y[0])
        assert torch.equal(x[1, :, 1:], y[1, :, 1:])
        assert bool(x[1, 1:18, 0].isnan().all())
