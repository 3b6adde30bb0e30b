"""What is left beside a saturated gate keeps its digits, in every printed program.

The reference evaluates the equations and SymPy's derivatives as they are written, ``1 − z`` by a
subtraction, with as many digits as the smallest complement takes.
"""

from __future__ import annotations

import linecache
from functools import cache

import mpmath
import numpy as np
import pytest
import sympy
import torch

from pararnn import ParaCfC, Spec, solve
from pararnn.cells.gates import shares
from pararnn.cells.para_cfc import cfc_spec
from pararnn.cells.para_gru import ParaGRU
from pararnn.cells.para_lstm import lstm_spec
from pararnn.cells.para_m2rnn import m2rnn_spec
from pararnn.solvers.enclosure import BALLS, Ball
from pararnn.solvers.torch_backend import NAMESPACE
from pararnn.spec import expm1, oracle, sigmoid
from pararnn.spec.backends import BACKENDS
from pararnn.spec.declarations import Linear
from pararnn.spec.derive.complements import Complements
from pararnn.spec.print import print_program
from pararnn.spec.program import arguments, load

DIGITS = 4400  # exp(-1e4) has 4343 zeros behind the point
LOGITS = [s * x for x in (1.0, 10.0, 25.0, 60.0, 100.0, 700.0, 1e3, 1e4) for s in (1, -1)]


def aliased():
    """Complements of complements, of an expm1, of negatives, multiplied out, and inline."""
    with Spec("Aliased") as s:
        h = s.state("h")
        u, v = s.drives("u v")
        A = s.map("A", structure="diagonal")
        z = s.let("z", sigmoid(A(h) + u))
        w = s.let("w", -expm1(-(v**2) - h**2))
        k = s.let("k", 1 - z)
        m = s.let("m", -k)
        s.next(h, (1 + m) * h + (1 - k) * v + (v - w * v) * k + 3 * (w - 1) + (1 - sigmoid(v)) * w)
    return s


SPECS = {
    "gru": lambda: ParaGRU(2, 2).spec,
    "lstm": lstm_spec,
    "cfc": lambda: cfc_spec("published"),
    "m2rnn": m2rnn_spec,
    "aliased": aliased,
}
GATES = {"gru": ("u_z", "u_r"), "lstm": ("u_f", "u_o"), "cfc": ("u_f",), "m2rnn": ("u_f",),
         "aliased": ("u", "v")}  # fmt: skip


FUNCTIONS = {
    "sigmoid": lambda x: 1 / (1 + mpmath.exp(-x)),
    "tanh": mpmath.tanh,
    "expm1": mpmath.expm1,
    "exp": mpmath.exp,
}


def value(expr, known):
    """An expression in mpmath, operation by operation."""
    if expr in known:
        return known[expr]
    if expr.is_number:
        return mpmath.mpf(expr.p) / expr.q if expr.is_Rational else mpmath.mpf(float(expr))
    args = [value(a, known) for a in expr.args]
    if isinstance(expr, sympy.Add):
        return sum(args)
    if isinstance(expr, sympy.Mul):
        return mpmath.fprod(args)
    if isinstance(expr, sympy.Pow):
        return args[0] ** args[1]
    return FUNCTIONS[type(expr).__name__](*args)


def reference(spec, numbers):
    """Next slots and all coefficients, for one channel (maps of one number)."""
    known = {sympy.Symbol(n, real=True): mpmath.mpf(x) for n, x in numbers.items()}
    for stage in spec.stages:
        if isinstance(stage, Linear):
            weight = known[sympy.Symbol(stage.map.name, real=True)]
            known[stage.symbol] = weight * value(stage.operand, known)
        else:
            known[stage.symbol] = value(stage.expr, known)
    outputs = [known[s.next_symbol] for s in spec.slots]
    return outputs, [value(c, known) for c in spec.factorization.coefficients]


def numbers(name, logit, dtype):
    """One number an argument, exact in the dtype; ``logit`` for gates, and no state."""
    spec, r = SPECS[name](), np.random.default_rng(0)
    found = {n: float(dtype(r.uniform(0.2, 0.9))) for n in arguments(spec)}
    for n in found:
        if n in [s.name for s in spec.slots]:
            found[n] = 0.0
        elif n in GATES[name]:
            found[n] = logit
        elif n == "dt":
            found[n] = 1.0
    if name == "aliased":
        found |= {"h": 0.5, "u": logit, "v": min(abs(logit), 1e4) ** 0.5 // 1}
    return spec, found


def run_torch(spec, found, program, dtype):
    shape = (1,) * len(spec.axes)
    tensors = [torch.full(shape, x, dtype=dtype) for x in found.values()]
    return [float(x) for x in load(print_program(spec, program, "torch"), NAMESPACE)(*tensors)]


def run_numpy(spec, found, program, dtype):
    arrays = [np.full((1,) * len(spec.axes), x) for x in found.values()]
    with np.errstate(all="ignore"):
        results = load(print_program(spec, program, "plain"), BACKENDS["float64"])(*arrays)
    return [np.asarray(x).item() for x in results]


def run_triton(spec, found, program, dtype):
    """A program in Triton's interpreter, one number an argument."""
    pytest.importorskip("triton")
    text = print_program(spec, program, "triton")
    names = ", ".join(found)
    fz = spec.factorization
    count = {
        "step": len(spec.slots),
        "linearization": len(fz.coefficients + fz.operands),
        "adjoint": len(found) - len(spec.slots),
    }[program]
    loads = "\n".join(f"    {n} = tl.load(x + {i} + tl.arange(0, 1))" for i, n in enumerate(found))
    stores = "\n".join(f"    tl.store(y + {i} + tl.arange(0, 1), found[{i}])" for i in range(count))
    text = (
        "import triton\nimport triton.language as tl\nfrom pararnn.kernels.functions import *\n\n"
        f"{text}\n@triton.jit\ndef apply(x, y):\n{loads}\n"
        f"    found = {program}({names})\n{stores}\n"
    )
    file = f"<complements {spec.name} {program}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    scope = {"__name__": file}
    exec(compile(text, file, "exec"), scope)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.tensor(list(found.values()), dtype=dtype, device=device)
    y = torch.zeros(count, dtype=dtype, device=device)
    scope["apply"][(1,)](x, y)
    return y.tolist()


RUNS = {
    "torch": (run_torch, torch.float64),
    "torch, float32": (run_torch, torch.float32),
    "plain": (run_numpy, torch.float64),
    "triton": (run_triton, torch.float64),
    "triton, float32": (run_triton, torch.float32),
}


@cache
def exact(name, logit, dtype):
    """A Spec, its arguments, and what it gives exactly, rounded: next slots, and coefficients."""
    spec, found = numbers(name, logit, dtype)
    with mpmath.workdps(DIGITS):
        return spec, found, [[float(w) for w in part] for part in reference(spec, found)]


def compare(name, logit, how):
    run, dtype = RUNS[how]
    numeric = np.float32 if dtype == torch.float32 else np.float64
    spec, found, wanted = exact(name, logit, numeric)
    unit, least = torch.finfo(dtype).eps / 2, 4 * torch.finfo(dtype).smallest_normal
    for program, want in zip(("step", "linearization"), wanted, strict=True):
        got = run(spec, found, program, dtype)
        for i, (g, w) in enumerate(zip(got, want, strict=False)):
            # A sigmoid or exp of x is right to 1.25 |x| roundings, and |x| ≤ log(1 / least) where
            # it is above the least number; the rest are products and sums of numbers of one size.
            bound = (64 + 4 * min(abs(logit), -np.log(least))) * unit * abs(w) + least
            assert abs(g - w) <= bound, f"{program}[{i}]: got {g}, expected {w}"


CASES = [(n, how) for n in SPECS for how in RUNS if n != "m2rnn" or not how.startswith("triton")]


@pytest.mark.parametrize("logit", LOGITS)
@pytest.mark.parametrize(("name", "how"), CASES)
def test_values_and_derivatives(name, logit, how):
    compare(name, logit, how)


@pytest.mark.parametrize("how", RUNS)
@pytest.mark.parametrize("name", ["gru", "cfc", "aliased"])
def test_a_subtraction_is_noticed(name, how, monkeypatch):
    """The comparison fails without complements."""
    monkeypatch.setattr(Complements, "__call__", lambda self, expr: expr)
    logit = 25.0 if name != "cfc" else -25.0
    with pytest.raises(AssertionError):
        compare(name, logit, how)


@pytest.mark.parametrize("logit", LOGITS)
@pytest.mark.parametrize("name", SPECS)
def test_enclosures_hold(name, logit):
    """On balls, the same programs hold the exact numbers, and are as narrow as these are small."""
    spec, found = numbers(name, logit, np.float64)
    with mpmath.workdps(DIGITS):
        outputs, _ = reference(spec, found)
    shape = (1,) * len(spec.axes)
    balls = [Ball(torch.full(shape, x, dtype=torch.float64)) for x in found.values()]
    got = load(print_program(spec, "step", "plain"), BALLS)(*balls)
    for ball, want in zip(got, outputs, strict=True):
        with mpmath.workdps(DIGITS):
            miss = abs(mpmath.mpf(ball.value.item()) - want)
        assert miss <= mpmath.mpf(ball.radius.item())
        assert ball.radius.item() <= 1e-12 * abs(float(want)) * (1 + abs(logit)) + 1e-300


@pytest.mark.parametrize("name", SPECS)
def test_the_jacobian_is_proved(name):
    spec = SPECS[name]()
    assert oracle.prove_jacobian(spec, {a: 1 + (len(spec.axes) > 1) for a in spec.axes})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_shares_of_a_gate(dtype):
    """Values and derivatives of both, at 0 too."""
    x = torch.tensor([*LOGITS, 0.0, float("inf"), -float("inf")], dtype=dtype, requires_grad=True)
    got = shares(x)
    slopes = [torch.autograd.grad(g.sum(), x, retain_graph=True)[0] for g in got]
    finfo = torch.finfo(dtype)
    with mpmath.workdps(DIGITS):
        for i, number in enumerate(x[:-2].tolist()):
            s = 1 / (1 + mpmath.exp(-mpmath.mpf(number)))
            want = [s, 1 - s, s * (1 - s), -s * (1 - s)]
            for g, w in zip((*got, *slopes), want, strict=True):
                bound = (4 + abs(number)) * finfo.eps * abs(float(w)) + 2 * finfo.smallest_normal
                assert abs(g[i].item() - float(w)) <= bound
    assert got[0][-2:].tolist() == [1, 0]
    assert got[1][-2:].tolist() == [0, 1]
    assert all(g.isnan().all() for g in shares(torch.full((1,), torch.nan, dtype=dtype)))


@pytest.mark.parametrize("way", ["solve", "loop", "kernels"])
@pytest.mark.parametrize("logit", [-60.0, -30.0, 30.0, 60.0])
def test_gradients_of_a_shut_gate(way, logit):
    """ParaCfC: ``∂h'/∂R_f = −a (1 − a) (g − k) h`` and ``∂h'/∂R_k = (1 − a) (1 − k²) h``, ``Δt = 1``."""
    cell = ParaCfC(1, 1).double()
    with torch.no_grad():
        cell.in_proj.weight.zero_()
        cell.in_proj.bias.copy_(torch.tensor([logit, 0.3, -0.4], dtype=torch.float64))
        for weight in (cell.R_f, cell.R_g, cell.R_k):
            weight.zero_()
    h0, one = torch.full((1, 1), 0.5, dtype=torch.float64), torch.ones(1, 1, dtype=torch.float64)
    if way == "kernels":
        given = dict.fromkeys(arguments(cell.spec), 0.0) | {"h": 0.5, "dt": 1.0}
        given |= {"u_f": logit, "u_g": 0.3, "u_k": -0.4, "_h_next_bar": 1.0}
        bars = dict(
            zip(given, run_triton(cell.spec, given, "adjoint", torch.float64), strict=False)
        )
        got = [torch.tensor(bars[name], dtype=torch.float64) for name in ("R_f", "R_k")]
    else:
        out = cell.step(h0, one, dt=one[0])
        if way == "solve":
            out = solve(cell, one[None], dt=one, h0=h0).states
        got = torch.autograd.grad(out.sum(), (cell.R_f, cell.R_k))
    with mpmath.workdps(100):
        a, g, k = 1 / (1 + mpmath.exp(logit)), mpmath.tanh(0.3), mpmath.tanh(-0.4)
        want = (-a * (1 - a) * (g - k) / 2, (1 - a) * (1 - k**2) / 2)
    for x, w in zip(got, want, strict=True):
        assert x.item() == pytest.approx(float(w), rel=1e-13, abs=0)
