"""The gated delta rule in chunks, against one micro-step after the other in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize

from pararnn.scan import delta_scan, reference
from pararnn.scan.delta import decays

F64 = torch.float64
NAMES = ("q", "k", "v", "beta", "h0", "gamma")


def draw(length, micro=2, batch=2, heads=3, dk=5, dv=4, dtype=F64, seed=0):
    g = torch.Generator().manual_seed(seed)
    randn = lambda *shape: torch.randn(*shape, generator=g, dtype=F64)  # noqa: E731
    rand = lambda *shape: torch.rand(*shape, generator=g, dtype=F64)  # noqa: E731
    values = {
        "q": randn(batch, length, heads, dk),
        "k": normalize(randn(batch, length, micro, heads, dk), dim=-1),
        "v": randn(batch, length, micro, heads, dv),
        "beta": 2 * rand(batch, length, micro, heads),
        "h0": randn(batch, heads, dk, dv),
        "gamma": 1.4 * rand(batch, length, heads) - 0.4,
    }
    values["gamma"][rand(batch, length, heads) < 0.1] = 0
    resets = rand(batch, length) < 0.1
    return {name: x.to(dtype) for name, x in values.items()}, resets


def call(function, values, **options):
    given = dict(values)
    gamma = given.pop("gamma", None)
    return function(
        given["q"], given["k"], given["v"], given["beta"], given.get("h0"), gamma=gamma, **options
    )


def close(got, want, tol=1e-10):
    for g, w in zip(got, want, strict=True):
        scale = max(1.0, float(w.detach().abs().max())) if w.numel() else 1.0
        torch.testing.assert_close(g.double(), w, rtol=tol, atol=tol * scale)


def test_the_reference_is_a_product_of_householder_maps():
    values, _ = draw(4, micro=3, batch=1, heads=1)
    q, k, v, beta, h, gamma = (values[name].numpy() for name in NAMES)
    h = h[0, 0]
    outputs = []
    for t in range(4):
        h = gamma[0, t, 0] * h
        for j in range(3):
            key = k[0, t, j, 0][:, None]
            reflection = np.eye(5) - beta[0, t, j, 0] * key @ key.T
            h = reflection @ h + beta[0, t, j, 0] * key @ v[0, t, j, 0][None]
        outputs.append(h.T @ q[0, t, 0])
    y, end = call(reference.delta, values)
    np.testing.assert_allclose(y[0, :, 0].numpy(), np.stack(outputs), rtol=1e-12)
    np.testing.assert_allclose(end[0, 0].numpy(), h, rtol=1e-12)


@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize("length", [0, 1, 2, 13, 64, 65, 150])
@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
def test_against_the_loop(length, micro, reverse):
    values, resets = draw(length, micro)
    plain = {name: x for name, x in values.items() if name != "gamma"}
    for given in (values, plain):
        for mask in (None, resets):
            options = {"reverse": reverse, "resets": mask}
            want = call(reference.delta, given, **options)
            for size in (1, 7, 64):
                close(call(delta_scan, given, chunk_size=size, **options), want)


def test_one_micro_step_needs_no_dimension():
    values, _ = draw(20, micro=1)
    want = call(delta_scan, values)
    flat = {n: x.squeeze(2) if n in ("k", "v", "beta") else x for n, x in values.items()}
    for g, w in zip(call(delta_scan, flat), want, strict=True):
        assert torch.equal(g, w)


def test_chunks_of_a_sequence():
    values, _ = draw(50)
    whole, end = call(delta_scan, values)
    state, parts = values["h0"], []
    for part in (slice(0, 1), slice(1, 20), slice(20, 20), slice(20, 50)):
        piece = {n: x if n == "h0" else x[:, part] for n, x in values.items()}
        y, state = call(delta_scan, {**piece, "h0": state})
        parts.append(y)
    close((torch.cat(parts, 1), state), (whole, end))


@pytest.mark.parametrize("size", [1, 2, 3, 8, 13])
def test_products_of_decays(size):
    g = torch.Generator().manual_seed(0)
    gamma = torch.randn(2, size, generator=g, dtype=F64)
    gamma[0, size // 2] = 0
    through, between = decays(gamma)
    for i in range(2):
        for a in range(size):
            assert through[i, a] == pytest.approx(float(gamma[i, : a + 1].prod()), abs=1e-14)
            for b in range(size):
                want = float(gamma[i, b + 1 : a + 1].prod()) if a >= b else 0.0
                assert float(between[i, a, b]) == pytest.approx(want, abs=1e-14)


@pytest.mark.parametrize("gated", [False, True])
def test_derivatives(gated):
    values, _ = draw(3, batch=1, heads=1, dk=2, dv=2)
    values["gamma"][:, 1] = 0
    names = NAMES if gated else NAMES[:-1]
    inputs = [values[name].requires_grad_() for name in names]

    def function(*inputs):
        return call(delta_scan, dict(zip(names, inputs, strict=True)), chunk_size=2)

    assert torch.autograd.gradcheck(function, inputs, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(function, inputs)


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
def test_gradients_of_long_sequences(reverse):
    values, resets = draw(90)
    inputs = [values[name].requires_grad_() for name in NAMES]

    def gradients(function):
        y, end = call(function, values, resets=resets, reverse=reverse)
        return torch.autograd.grad(y.sin().sum() + end.square().sum(), inputs)

    close(gradients(delta_scan), gradients(reference.delta))


@pytest.mark.parametrize("rate", [0.0, 1e-6, 0.1, 50.0, 1e4, 1e30, float("inf")])
@pytest.mark.parametrize("dtype", [F64, torch.float32])
def test_gaps_of_every_size(rate, dtype):
    """Also mixed in one chunk with small ones; the gradient of the decay included."""
    values, _ = draw(100, dtype=dtype)
    g = torch.Generator().manual_seed(5)
    gap = torch.rand(2, 100, 3, generator=g, dtype=F64)
    rates = torch.where(gap < 0.8, 1e-3, rate)
    values["gamma"] = torch.exp(-rates * gap.clamp_min(1e-3)).to(dtype)
    inputs = [x.requires_grad_() for x in values.values()]

    def results(function):
        y, end = call(function, values)
        return y, end, *torch.autograd.grad(y.square().sum(), inputs)

    want = [w.double() for w in results(reference.delta)]
    close(results(delta_scan), want, 1e-10 if dtype == F64 else 2e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_accumulated_in_float32(dtype):
    values, _ = draw(200, dtype=dtype)
    values["gamma"] = values["gamma"].float()
    y, end = call(delta_scan, values)
    want, last = call(reference.delta, values)
    assert (y.dtype, end.dtype) == (dtype, torch.float32)
    close((end,), (last,), 1e-5)
    ulp = torch.finfo(dtype).eps * want.abs() + 1e-5 * want.abs().max()
    assert bool(((y.double() - want).abs() <= ulp).all())
    assert call(delta_scan, values)[0].equal(y)


@pytest.mark.parametrize("beta", [1.0, 2.0])
def test_float32_over_many_chunks(beta):
    values, _ = draw(4000, micro=1, batch=1, heads=1, dk=8, dv=8, dtype=torch.float32)
    values["beta"] = torch.full_like(values["beta"], beta)
    values["v"] = values["v"] / 50
    del values["gamma"]
    close(call(delta_scan, values), call(reference.delta, values), 2e-5)


def test_strides_and_no_batch():
    values, resets = draw(40)
    want = call(delta_scan, values, resets=resets)
    swapped = {n: x.transpose(0, -1).contiguous().transpose(0, -1) for n, x in values.items()}
    close(call(delta_scan, swapped, resets=resets), want, 1e-14)
    none = {n: x[:0] for n, x in values.items()}
    y, end = call(delta_scan, none, resets=resets[:0])
    assert (y.shape, end.shape) == ((0, 40, 3, 4), (0, 3, 5, 4))


def test_later_tokens_change_nothing_before():
    values, _ = draw(70)
    y, _ = call(delta_scan, values)
    for name in ("q", "k", "v", "beta", "gamma"):
        values[name] = torch.cat([values[name][:, :45], 3 * values[name][:, 45:]], 1)
    assert torch.equal(call(delta_scan, values)[0][:, :45], y[:, :45])


def test_autocast_changes_nothing():
    values, _ = draw(40, dtype=torch.float32)
    inputs = [x.requires_grad_() for x in values.values()]
    want, _ = call(delta_scan, values)
    expected = torch.autograd.grad(want.sum(), inputs, allow_unused=True)
    with torch.autocast("cpu", torch.bfloat16):
        got, _ = call(delta_scan, values)
    for g, e in zip(torch.autograd.grad(got.sum(), inputs), expected, strict=True):
        assert torch.equal(g, e)
    assert torch.equal(got, want)


def test_errors():
    values, resets = draw(6)
    for name in NAMES:
        bad = {**values, name: values[name][:1]}
        with pytest.raises(ValueError, match=r"delta_scan: \w+: got shape"):
            call(delta_scan, bad)
    with pytest.raises(ValueError, match="v: got shape"):
        call(delta_scan, {**values, "v": values["v"][:, :, 0]})
    with pytest.raises(ValueError, match="nh: got 0, expected a positive integer"):
        call(
            delta_scan,
            {n: x[:, :, :0] if n in ("k", "v", "beta") else x for n, x in values.items()},
        )
    with pytest.raises(ValueError, match="chunk_size: got 0"):
        call(delta_scan, values, chunk_size=0)
    with pytest.raises(TypeError, match="resets: got torch"):
        call(delta_scan, values, resets=resets.float())
    with pytest.raises(TypeError, match="expected a floating-point dtype"):
        call(delta_scan, {**values, "beta": values["beta"].long()})


def test_the_reference_needs_no_dimension_for_one_micro_step():
    values, _ = draw(20, micro=1)
    flat = {n: x.squeeze(2) if n in ("k", "v", "beta") else x for n, x in values.items()}
    loop = reference.delta
    for g, w in zip(call(loop, flat), call(loop, values), strict=True):
        assert torch.equal(g, w)
