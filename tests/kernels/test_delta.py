"""The kernels of the delta rule, against loops in float64."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import normalize

from pararnn.scan import delta_scan, reference

NAMES = ("q", "k", "v", "beta", "h0", "gamma")


def drawn(kit, *shape, dtype=torch.float32):
    return torch.randn(shape, dtype=torch.float64).to(dtype).to(kit.DEVICE)


def close(found, wanted, tolerance=2e-6):
    for got, want in zip(found, wanted, strict=True):
        assert got.shape == want.shape
        scale = max(1.0, float(want.detach().abs().max())) if want.numel() else 1.0
        torch.testing.assert_close(got.double(), want.double(), rtol=0, atol=tolerance * scale)


def delta(kit, length, micro=2, dtype=torch.float32):
    shape = (2, length, micro, 3)
    values = {
        "q": drawn(kit, 2, length, 3, 5),
        "k": normalize(drawn(kit, *shape, 5), dim=-1),
        "v": drawn(kit, *shape, 4),
        "beta": 2 * torch.rand(shape, device=kit.DEVICE),
        "h0": drawn(kit, 2, 3, 5, 4),
        "gamma": 1.4 * torch.rand(2, length, 3, device=kit.DEVICE) - 0.4,
    }
    values["gamma"][:, ::4] = 0
    resets = torch.rand(2, length, device=kit.DEVICE) < 0.2
    return {name: x.to(dtype) for name, x in values.items()}, resets


def run(function, values, **options):
    given = dict(values)
    gamma = given.pop("gamma", None)
    return function(*given.values(), gamma=gamma, **options)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(("length", "size"), [(1, 4), (13, 3), (9, 64)])
def test_delta_rule(kit, length, size, reverse):
    values, resets = delta(kit, length)
    leaves = {name: x.clone().requires_grad_() for name, x in values.items()}
    exact = {name: x.double().requires_grad_() for name, x in values.items()}
    options = {"resets": resets, "reverse": reverse}
    found = run(delta_scan, leaves, **options, chunk_size=size, backend="fused")
    wanted = run(reference.delta, exact, **options)
    close(found, wanted)
    bars = [drawn(kit, *x.shape) for x in wanted]
    close(
        torch.autograd.grad(found, list(leaves.values()), bars),
        torch.autograd.grad(wanted, list(exact.values()), [x.double() for x in bars]),
        tolerance=2e-5,
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_dtypes(kit, dtype):
    values, _ = delta(kit, 11, dtype=dtype)
    y, end = run(delta_scan, values, chunk_size=4, backend="fused")
    wanted = run(reference.delta, {name: x.double() for name, x in values.items()})
    assert (y.dtype, end.dtype) == (dtype, torch.float32)
    close([end], wanted[1:])
    close([y], wanted[:1], tolerance=torch.finfo(dtype).eps)


def test_bad_numbers_stay_where_they_are(kit):
    values, _ = delta(kit, 9)
    values["v"][0, 6] = torch.nan
    y, _ = run(delta_scan, values, chunk_size=4, backend="fused")
    assert bool(y[0, :6].isfinite().all())
    assert bool(y[1].isfinite().all())
    assert bool(y[0, 6].isnan().all())


def test_refusals_say_why(kit):
    values, _ = delta(kit, 5, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="computes in float32"):
        run(delta_scan, values, backend="fused")
    wide = {name: x.float() for name, x in values.items()}
    wide |= {"q": drawn(kit, 2, 5, 3, 130), "k": drawn(kit, 2, 5, 2, 3, 130), "h0": None}
    with pytest.raises(RuntimeError, match="at most 128 rows, not dk=130"):
        run(delta_scan, wide, backend="fused")


def test_compiled(kit):
    values, resets = delta(kit, 9)
    call = torch.compile(
        lambda values: run(delta_scan, values, resets=resets, chunk_size=4, backend="fused"),
        backend="aot_eager",
        fullgraph=True,
    )
    results = []
    for function in (call, lambda v: run(delta_scan, v, resets=resets, chunk_size=4)):
        leaves = {name: x.clone().requires_grad_() for name, x in values.items()}
        y, end = function(leaves)
        grads = torch.autograd.grad(y.sin().sum() + end.cos().sum(), list(leaves.values()))
        results.append([y, end, *grads])
    close(*results, tolerance=2e-5)
