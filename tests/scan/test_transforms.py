"""Scans under torch.compile, torch.export and torch.func; the choice of a backend."""

from __future__ import annotations

from inspect import signature

import pytest
import torch
from torch.nn.functional import normalize

from pararnn.scan import (
    backend,
    delta_scan,
    linear_scan,
    matrix_affine_scan,
    matrix_scan,
    parallel_scan_log,
    prefix_sum,
)
from pararnn.scan.inputs import Options

F64 = torch.float64


def inputs_of(name, length=40, batch=2):
    g = torch.Generator().manual_seed(0)
    randn = lambda *shape: torch.randn(batch, *shape, generator=g, dtype=F64)  # noqa: E731
    if name == "linear":
        return randn(length, 3).tanh(), randn(length, 3), randn(3)
    if name == "sums":
        return randn(length, 3), randn(3)
    if name == "planar":
        return randn(length, 3, 2, 2) / 2, randn(length, 3, 2), randn(3, 2)
    if name == "blocks":
        return randn(length, 2, 3, 3) / 3, randn(length, 2, 3, 2), randn(2, 3, 2)
    if name == "log":
        return -randn(length, 3).abs(), randn(length, 3), randn(3).abs()
    k = normalize(randn(length, 2, 3), dim=-1)
    q, v = randn(length, 2, 3), randn(length, 2, 4)
    return q, k, v, 2 * randn(length, 2).sigmoid(), randn(2, 3, 4), randn(length, 2).sigmoid()


def delta(q, k, v, beta, h0, gamma):
    return delta_scan(q, k, v, beta, h0, gamma=gamma, chunk_size=16)[0]


SCANS = {
    "linear": linear_scan,
    "sums": prefix_sum,
    "planar": matrix_scan,
    "blocks": matrix_affine_scan,
    "log": parallel_scan_log,
    "delta": delta,
}
START = {"delta": 4, "sums": 1}
"""Where the initial state stands among the inputs, if not third."""
scans = pytest.mark.parametrize("name", SCANS)


def close(got, want):
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-10)


def gradients(function, inputs):
    inputs = [x.clone().requires_grad_() for x in inputs]
    y = function(*inputs)
    return [y.detach(), *torch.autograd.grad(y.sin().sum(), inputs)]


@scans
def test_compiled_without_breaks(name):
    torch._dynamo.reset()
    compiled = torch.compile(SCANS[name], fullgraph=True, backend="aot_eager")
    for length in (40, 33):
        inputs = inputs_of(name, length)
        for got, want in zip(
            gradients(compiled, inputs), gradients(SCANS[name], inputs), strict=True
        ):
            close(got, want)


@scans
def test_exported_for_any_length(name):
    class Scan(torch.nn.Module):
        def forward(self, *inputs):
            return SCANS[name](*inputs)

    inputs = inputs_of(name)
    steps = torch.export.Dim("steps", min=3, max=1 << 20)
    given = START.get(name, 2)
    shapes = [{1: steps}] * given + [{}] + [{1: steps}] * (len(inputs) - given - 1)
    shapes = {"inputs": tuple(shapes)}
    exported = torch.export.export(Scan(), inputs, dynamic_shapes=shapes).module()
    for length in (40, 77, 3):
        inputs = inputs_of(name, length)
        close(exported(*inputs), SCANS[name](*inputs))


@scans
def test_mapped(name):
    """vmap over all inputs, over one of them, and of a gradient."""
    function = SCANS[name]
    several = [inputs_of(name, 20, batch=2) for _ in range(3)]
    for i, inputs in enumerate(several):
        several[i] = [x * (1 - 0.1 * i) for x in inputs]
    stacked = [torch.stack(xs, 1) for xs in zip(*several, strict=True)]
    got = torch.func.vmap(function, in_dims=1)(*stacked)
    for i, inputs in enumerate(several):
        close(got[i], function(*inputs))
    rest = several[0][1:]
    got = torch.func.vmap(lambda a: function(a, *rest), in_dims=1)(stacked[0])
    for i, inputs in enumerate(several):
        close(got[i], function(inputs[0], *rest))

    def loss(a):
        return function(a, *rest).sin().sum()

    got = torch.func.vmap(torch.func.grad(loss), in_dims=1)(stacked[0])
    for i, inputs in enumerate(several):
        close(got[i], torch.func.grad(loss)(inputs[0]))


@scans
def test_forward_over_reverse(name):
    """Hessians of ``torch.func`` are those of autograd."""
    inputs = inputs_of(name, 5, batch=1)
    start = START.get(name, 2)

    def loss(h0):
        given = [*inputs[:start], h0, *inputs[start + 1 :]]
        return SCANS[name](*given).sin().sum()

    want = torch.autograd.functional.hessian(loss, inputs[start])
    close(torch.func.hessian(loss)(inputs[start]), want)


def test_the_operator_is_well_formed():
    a, b, h0 = (x.requires_grad_() for x in inputs_of("linear"))
    mask = torch.zeros(a.shape[:2], dtype=torch.bool)
    mask[:, a.shape[1] // 2] = True
    for resets, reverse in ((None, False), (None, True), (mask, False), (mask, True)):
        given = (a, b, h0, resets, "diagonal", reverse)
        operator = torch.ops.pararnn.affine_scan.default
        torch.library.opcheck(operator, given, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("gated", [True, False])
def test_the_operator_of_the_delta_rule_is_well_formed(gated):
    q, k, v, beta, h0, gamma = inputs_of("delta", 9)
    sequences = [q.unsqueeze(2), k.unsqueeze(2), v.unsqueeze(2), beta[:, :, None, :, None]]
    sequences += [gamma[:, :, None, :, None]] if gated else []
    sequences = [s.detach().requires_grad_() for s in sequences]
    torch.library.opcheck(
        torch.ops.pararnn.delta_scan.default,
        (sequences, h0.requires_grad_(), None, 4),
        rtol=1e-9,
        atol=1e-9,
    )


@pytest.mark.parametrize("reverse", [True, False])
def test_a_compiled_delta_rule_with_resets_and_under_a_map(reverse):
    torch._dynamo.reset()
    resets = torch.rand(2, 21, generator=torch.Generator().manual_seed(1)) < 0.2

    def run(q, k, v, beta, h0):
        return delta_scan(q, k, v, beta, h0, resets=resets, reverse=reverse, chunk_size=4)[0]

    inputs = inputs_of("delta", 21)[:5]
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for got, want in zip(gradients(compiled, inputs), gradients(run, inputs), strict=True):
        close(got, want)
    stacked = [torch.stack([x, x.flip(1)]) for x in inputs[:4]]
    mapped = lambda *xs: torch.func.vmap(run, in_dims=(0, 0, 0, 0, None))(*xs, inputs[4])  # noqa: E731
    got = torch.compile(mapped, fullgraph=True, backend="aot_eager")(*stacked)
    for i in range(2):
        close(got[i], run(*(x[i] for x in stacked), inputs[4]))


def test_a_compiled_delta_rule_keeps_a_nan_before_a_reset():
    torch._dynamo.reset()
    resets = torch.zeros(2, 12, dtype=torch.bool)
    resets[0, 7] = True

    def run(q, k, v, beta, h0):
        y = delta_scan(q, k, v, beta, h0, resets=resets, chunk_size=4)[0]
        return y[:, 7:]

    q, k, *others = inputs_of("delta", 12)[:5]
    k[0, 3, 1, 0] = torch.nan
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    got, want = (gradients(f, (q, k, *others)) for f in (compiled, run))
    for a, b in zip(got, want, strict=True):
        assert a.isfinite().all()
        close(a, b)


@scans
def test_a_missing_kernel_is_an_error(name, monkeypatch):
    backend.plugged_in()  # what registers does so when it is first imported
    monkeypatch.setattr(backend, "_FUSED", {})
    inputs = inputs_of(name)
    public = {"delta": delta_scan}.get(name, SCANS[name])
    given = inputs[:5]
    with pytest.raises(RuntimeError, match=r"backend='fused', but .*use backend='auto'"):
        public(*given, backend="fused")
    with pytest.raises(
        ValueError, match="backend: got 'triton', expected one of auto, eager, fused"
    ):
        public(*given, backend="triton")
    first = lambda y: y[0] if isinstance(y, tuple) else y  # noqa: E731
    assert torch.equal(first(public(*given, backend="eager")), first(public(*given)))


@pytest.mark.parametrize("name", [n for n in SCANS if n not in ("delta", "sums")])  # no options
def test_a_registered_kernel_runs_where_it_can(name, monkeypatch):
    public = SCANS[name]
    calls = []

    def lacks(*values):
        return "it wants one sequence" if values[0].shape[0] > 1 else None

    def run(*given):
        *tensors, options = given
        calls.append(options)
        asked = {k: v for k, v in vars(options).items() if k in signature(public).parameters}
        return public(*tensors, **asked, backend="eager")

    monkeypatch.setitem(backend._FUSED, public.__name__, backend.Fused(lacks, run))
    many, one = inputs_of(name)[:5], inputs_of(name, batch=1)[:5]
    public(*many)
    assert not calls
    with pytest.raises(RuntimeError, match="it wants one sequence"):
        public(*many, backend="fused")
    public(*many, backend="eager")
    assert not calls
    public(*one)  # on a CPU a kernel runs only where it is asked for
    assert not calls
    got, end = public(*one, backend="fused", reverse=True, return_state=True)
    assert calls == [Options(None, reverse=True, return_state=True)]
    want, final = public(*one, reverse=True, return_state=True)
    assert torch.equal(got, want)
    assert torch.equal(end, final)
