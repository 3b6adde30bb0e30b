"""The kernels of the delta rule, against loops in float64."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest
import torch
from torch.nn.functional import normalize

from pararnn.scan import delta_scan, reference


def drawn(kit, *shape, dtype=torch.float32):
    return torch.randn(shape, dtype=torch.float64).to(dtype).to(kit.DEVICE)


def close(found, wanted, tolerance=2e-6):
    for got, want in zip(found, wanted, strict=True):
        assert got.shape == want.shape
        scale = max(1.0, float(want.detach().abs().max())) if want.numel() else 1.0
        torch.testing.assert_close(got.double(), want.double(), rtol=0, atol=tolerance * scale)


def delta(kit, length, micro=2, dtype=torch.float32, k=5, v=4, decay=True):
    """Two rows and three heads. Decays of any sign, and 0; none is a map that keeps everything."""
    shape = (2, length, micro, 3)
    values = {
        "q": drawn(kit, 2, length, 3, k),
        "k": normalize(drawn(kit, *shape, k), dim=-1),
        "v": drawn(kit, *shape, v),
        "beta": 2 * torch.rand(shape, device=kit.DEVICE),
        "h0": drawn(kit, 2, 3, k, v),
    }
    if decay:
        values["gamma"] = 1.4 * torch.rand(2, length, 3, device=kit.DEVICE) - 0.4
        values["gamma"][:, ::4] = 0
    resets = torch.rand(2, length, device=kit.DEVICE) < 0.2
    return {name: x.to(dtype) for name, x in values.items()}, resets


def run(function, values, **options):
    given = dict(values)
    gamma = given.pop("gamma", None)
    return function(*given.values(), gamma=gamma, **options)


def both(kit, values, *, chunk_size=64, **options):
    """Outputs and gradients, from the kernels and from the loop in float64."""
    results = []
    bars = None
    for function, dtype, more in (
        (reference.delta, torch.float64, {}),
        (delta_scan, None, {"chunk_size": chunk_size, "backend": "fused"}),
    ):
        leaves = {name: x.to(dtype or x.dtype).requires_grad_() for name, x in values.items()}
        with kit.poisoned():
            outputs = run(function, leaves, **options, **more)
            bars = bars or [drawn(kit, *x.shape, dtype=torch.float64) for x in outputs]
            weights = [b.to(x.dtype) for b, x in zip(bars, outputs, strict=True)]
            grads = torch.autograd.grad(outputs, list(leaves.values()), weights)
        results.append(([*outputs], [*grads]))
    return results[::-1]


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(("length", "size"), [(1, 4), (13, 3), (29, 64)])
def test_delta_rule(kit, length, size, reverse):
    values, resets = delta(kit, length)
    found, wanted = both(kit, values, resets=resets, reverse=reverse, chunk_size=size)
    close(found[0], wanted[0])
    close(found[1], wanted[1], tolerance=2e-5)


@pytest.mark.parametrize(
    ("length", "sizes"),
    [
        (40, {"micro": 1, "k": 17, "v": 37, "decay": False}),
        (23, {"micro": 3, "k": 3, "v": 1}),  # chunks begin within tokens
        (5, {"micro": 1, "k": 50, "v": 3}),
    ],
)
def test_sizes_in_float64(kit, length, sizes):
    values, _ = delta(kit, length, dtype=torch.float64, **sizes)
    found, wanted = both(kit, values)
    for got, want in zip(found, wanted, strict=True):
        close(got, want, tolerance=1e-12)


def test_many_rows(kit):
    values, _ = delta(kit, 5, micro=1, k=70, v=3)
    found, wanted = both(kit, values)
    close(found[0], wanted[0])
    close(found[1], wanted[1], tolerance=2e-5)


def test_any_strides(kit):
    values, resets = delta(kit, 9, micro=3)
    views = {
        "q": values["q"].transpose(1, 2).contiguous().transpose(1, 2),
        "k": torch.stack([values["k"], -values["k"]], -1)[..., 0],
        "v": values["v"].flip(3).flip(3).transpose(2, 4).contiguous().transpose(2, 4),
        "beta": values["beta"][..., :1].expand(-1, -1, -1, 3),
        "gamma": values["gamma"][:, :1].expand(-1, 9, -1),
    }
    given = {name: views.get(name, x) for name, x in values.items()}
    plain = {name: x.contiguous() for name, x in given.items()}
    found, wanted = (run(delta_scan, x, resets=resets, backend="fused") for x in (given, plain))
    for got, want in zip(found, wanted, strict=True):
        assert torch.equal(got, want)


def test_second_derivatives(kit):
    values, _ = delta(kit, 5, micro=1)
    results = []
    for function, dtype, options in (
        (delta_scan, torch.float32, {"backend": "fused"}),
        (reference.delta, torch.float64, {}),
    ):
        leaves = {name: x.to(dtype).requires_grad_() for name, x in values.items()}
        inputs = list(leaves.values())
        y, end = run(function, leaves, **options)
        grads = torch.autograd.grad(y.sin().sum() + end.sum(), inputs, create_graph=True)
        results.append(torch.autograd.grad(sum(g.square().sum() for g in grads), inputs))
    close(*results, tolerance=1e-4)


def test_no_rows(kit):
    values, _ = delta(kit, 4)
    y, end = run(delta_scan, {name: x[:0] for name, x in values.items()}, backend="fused")
    assert (y.shape, end.shape) == ((0, 4, 3, 4), (0, 3, 5, 4))


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
    wide, _ = delta(kit, 5, k=130)
    with pytest.raises(RuntimeError, match=r"torch.float32 states of at most 128 rows, not dk=130"):
        run(delta_scan, wide, backend="fused")
    exact, _ = delta(kit, 5, k=65, dtype=torch.float64)
    with pytest.raises(RuntimeError, match=r"torch.float64 states of at most 64 rows, not dk=65"):
        run(delta_scan, exact, backend="fused")
    values, _ = delta(kit, 5)
    with pytest.raises(RuntimeError, match=r"torch\.func transforms the eager scan only"):
        torch.func.grad(lambda v: run(delta_scan, values | {"v": v}, backend="fused")[0].sum())(
            values["v"]
        )


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


MUTANTS = {
    # name: (old, new); each is one place of the module's text
    "the system has a diagonal": (
        "i[:, None] > i[None, :], system",
        "i[:, None] >= i[None, :], system",
    ),
    "an error sees no step before": (r"for row in range(1, M):", "for row in range(2, M):"),
    "the token's own write is not seen": (
        "tl.where(i[:, None] >= i[None, :], scores",
        "tl.where(i[:, None] > i[None, :], scores",
    ),
    "the chunk's end does not fade": ("transition + last(through, i, M)", "transition + 1.0"),
    "writes do not fade": (
        "w = of_end(w * last(between, i, M)[:, None], piece)",
        "w = of_end(w, piece)",
    ),
    "keys do not fade": ("-through[:, None] * keys", "-keys"),
    "decay at every micro-step": ("& (at % NH == 0)", ""),
    "queries of another micro-step": (
        "exists & (m % NH == NH - 1), K",
        "exists & (m % NH == 0), K",
    ),
    "the start of another chunk": (
        "start = starts + (n * (chunks + 1) + chunk)",
        "start = starts + (n * (chunks + 1) + 0 * chunk)",
    ),
    "the end of another chunk": ("chunk + 1) * K * V", "chunk) * K * V"),
    "outputs say nothing about errors": (
        "queries -= weigh(moved, faded, seen(i, piece, False), PRECISION)",
        "",
    ),
    "a system's cotangent has a diagonal": (
        "i[:, None] > i[None, :], d_system",
        "i[:, None] >= i[None, :], d_system",
    ),
    "what is left has no cotangent": ("d_through + left", "d_through"),
    "a product with its own factor": ("exists, NH, 1)", "exists, NH, 0)"),
    "keys' cotangent by what is written": (" + sizes[:, None] * d_w", ""),
    "queries' cotangent by the start": (
        "d_queries += scaled(d_read, through[:, None] * d_read, piece)",
        "",
    ),
    "keys' cotangent by the start": (" - scaled(d_faded, through[:, None] * d_faded, piece)", ""),
}


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="mutants may read anywhere")
@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_noticed(kit, monkeypatch, tmp_path, name):
    from pararnn.kernels import delta as module

    text = Path(module.__file__).read_text()
    squeezed = re.escape(MUTANTS[name][0])
    mutated, count = re.subn(squeezed, lambda _: MUTANTS[name][1], text, count=1)
    assert count, "the mutant no longer fits the text"
    file = tmp_path / "mutant.py"
    file.write_text(mutated)
    spec = importlib.util.spec_from_file_location("pararnn.kernels.mutant", file)
    mutant = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "pararnn.kernels.mutant", mutant)
    spec.loader.exec_module(mutant)
    for function in ("run_delta", "run_delta_back"):
        monkeypatch.setattr(module, function, getattr(mutant, function))
    values, _ = delta(kit, 13, micro=3, k=3, v=2, dtype=torch.float64)
    values["gamma"] = values["gamma"].abs() + 0.2
    found, wanted = both(kit, values)
    with pytest.raises(AssertionError):
        close([*found[0], *found[1]], [*wanted[0], *wanted[1]], tolerance=1e-9)


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 128), (torch.float64, 64)])
def test_the_largest_state(dtype, most):
    """One row more does not fit a program; the reason says how many do."""
    from pararnn.scan.fused_delta import _lacks

    for rows in (most, most + 1):
        q = torch.empty(1, 1, 1, rows, dtype=dtype)
        said = _lacks(q, q)
        assert (said is not None and f"at most {most} rows" in said) == (rows > most)


@pytest.mark.parametrize("back", [False, True])
def test_a_chain_reads_no_other_matrix(kit, back):
    """Rows and columns beyond a small matrix are zero, whatever comes after it in memory."""
    from pararnn.kernels.chain import run_chain

    g = torch.Generator().manual_seed(0)
    op = torch.randn(3, 2, 3, 3, generator=g, dtype=torch.float64)
    b = torch.randn(3, 2, 3, 3, generator=g, dtype=torch.float64)
    op[1] = b[1] = torch.nan
    states = torch.zeros(3, 3, 3, 3, dtype=torch.float64)
    want = states.clone()
    for step in reversed(range(2)) if back else range(2):
        a = op[:, step].mT if back else op[:, step]
        here, there = (step + 1, step) if back else (step, step + 1)
        want[:, there] = a @ want[:, here] + b[:, step]
    op, b, states = (t.to(kit.DEVICE) for t in (op, b, states))
    run_chain(op, b, states, back)
    torch.testing.assert_close(states[::2].cpu(), want[::2], rtol=1e-12, atol=1e-12)


def test_gradients_of_the_final_state_alone(kit):
    """The outputs have no cotangent then."""
    given, resets = delta(kit, 5, dtype=torch.float64)
    bars = []
    for backend in ("fused", "eager"):
        leaves = {n: t.detach().clone().requires_grad_() for n, t in given.items()}
        _, end = delta_scan(**leaves, resets=resets, backend=backend)
        bars.append(torch.autograd.grad(end.sin().sum(), list(leaves.values()), allow_unused=True))
    for name, a, b in zip(given, *bars, strict=True):
        a, b = (torch.zeros_like(given[name]) if t is None else t for t in (a, b))
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10, msg=name)
