"""Device functions against float64 and mpmath, in units of a rounding (half an ulp of 1).

In Triton's interpreter `exp2` and `1/x` are NumPy's and `fma` rounds twice; on a GPU they are
the machine's (2^x to two ulps) and `fma` is one operation. What is smaller than the smallest normal
number may be flushed to zero.
"""

from __future__ import annotations

import importlib.util
import linecache
import sys

import mpmath
import numpy as np
import pytest
import torch

from pararnn.solvers.torch_backend import NAMESPACE

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

KERNEL = """
import triton
import triton.language as tl
from {module} import {name}

@triton.jit
def apply({arguments}, y, N: tl.constexpr):
    i = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(y + i, {name}({values}))
"""


def applied(kit, name, *arrays, values=None, module="pararnn.kernels.functions"):
    """A device function on arrays whose length is a power of two."""
    names = [f"x{i}" for i in range(len(arrays))]
    values = values or ", ".join(f"tl.load({n} + i)" for n in names)
    text = KERNEL.format(module=module, name=name, arguments=", ".join(names), values=values)
    file = f"<{module} {name} {values}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    scope = {"__name__": file}
    exec(compile(text, file, "exec"), scope)
    tensors = [torch.tensor(a, device=kit.DEVICE) for a in arrays]
    y = torch.empty_like(tensors[0]).fill_(7)
    scope["apply"][(1,)](*tensors, y, N=len(arrays[0]))
    return y.cpu().numpy()


def points(dtype, count, seed=0):
    """Ordinary, small, tiny, denormal and huge numbers of both signs."""
    r = np.random.default_rng(seed)
    info, n = np.finfo(dtype), count // 4
    edge = 110.0 if dtype == np.float32 else 740.0
    tiny, huge = np.log(float(info.smallest_subnormal)), np.log(float(info.max) / 2)
    spread = np.exp(r.uniform(tiny, huge, n)) * r.choice([-1, 1], n)
    switches = np.repeat([0.04, 0.25, 0.5, 0.55, 1.0, 2 / 3, 4 / 3], n)[:n]
    near = switches * (1 + r.uniform(-1e-3, 1e-3, n)) * r.choice([-1, 1], n)
    return np.concatenate([np.linspace(-edge, edge, n), spread, near, r.normal(size=n)]).astype(
        dtype
    )


def sigmoid(x):
    return np.where(x < 0, np.exp(np.minimum(x, 0)), 1.0) / (1 + np.exp(-np.abs(x)))


NUMPY = {
    "sigmoid": sigmoid,
    "cosigmoid": lambda x: sigmoid(-x),
    "tanh": np.tanh,
    "exp": np.exp,
    "expm1": np.expm1,
    "softplus": lambda x: np.logaddexp(0.0, x),
    "log": np.log,
    "log1p": np.log1p,
    "positive": lambda x: np.where(x >= 0, x + 0.5, sigmoid(np.minimum(x, 0))),
    "sqrt": np.sqrt,
    "sin": np.sin,
    "cos": np.cos,
}
EXACT = {
    "sigmoid": lambda x: 1 / (1 + mpmath.exp(-x)),
    "cosigmoid": lambda x: 1 / (1 + mpmath.exp(x)),
    "softplus": lambda x: mpmath.log1p(mpmath.exp(x)),
    "positive": lambda x: x + mpmath.mpf("0.5") if x >= 0 else EXACT["sigmoid"](x),
    **{
        n: getattr(mpmath, n)
        for n in ("tanh", "exp", "expm1", "log", "log1p", "sqrt", "sin", "cos")
    },
}


def domain(name, x):
    if name in ("log", "sqrt"):
        return np.abs(x)
    if name == "log1p":
        return np.where(x <= -1, -x, x)
    if name in ("sin", "cos"):  # near a zero: relative to 1e-3 at least
        return np.clip(x, -100, 100)
    return x


def allowed(kit, name, x):
    """Roundings that a function may be off in float32.

    8 roundings everywhere: 2^x (4) and 1/x (2) of the machine, and two more. In sigmoid, log2(e)
    and the product x·log2(e) are rounded, which costs |x|/4 and |x| of them where its value is like
    exp(x). In exp they are not, but in the interpreter, where fma rounds twice.
    """
    bound = np.full(x.shape, 8.0)
    twice = kit.DEVICE == "cpu" and name in ("exp", "expm1", "softplus")
    if name in ("sigmoid", "cosigmoid", "positive") or twice:
        like = np.ones_like(x) if twice else (x > 0 if name == "cosigmoid" else x < 0)
        bound += 1.25 * np.minimum(np.abs(x), 110.0) * like
    return bound


def check_float32(kit, name, count=1 << 16, module="pararnn.kernels.functions"):
    x = points(np.float32, count)
    x[:2] = np.inf, -np.inf
    x = domain(name, x)
    got = applied(kit, name, x, module=module)
    want = NUMPY[name](x.astype(np.float64))
    rounded = want.astype(np.float32)
    finite = np.isfinite(rounded)
    np.testing.assert_array_equal(got[~finite], rounded[~finite])
    floor = 1e-3 if name in ("sin", "cos") else float(np.finfo(np.float32).smallest_normal)
    scale = np.maximum(np.abs(want[finite]), floor)
    flushed = float(np.finfo(np.float32).smallest_normal)
    error = np.abs(got[finite].astype(np.float64) - want[finite])
    limit = allowed(kit, name, x[finite]) * 2.0**-24 * scale + flushed
    worst = int((error / limit).argmax())
    assert (error <= limit).all(), f"{name}({x[finite][worst]}) is {got[finite][worst]}"


@pytest.mark.parametrize("name", NUMPY)
def test_float32(kit, name):
    check_float32(kit, name)


@pytest.mark.parametrize("name", NUMPY)
def test_float64(kit, name):
    """4 roundings, and 48 for tanh, whose 1 - 2/(1 + e) is used from 0.04 on."""
    x = domain(name, points(np.float64, 1024))
    got = applied(kit, name, x)
    smallest = float(np.finfo(np.float64).smallest_normal)
    for a, b in zip(x, got, strict=True):
        want = EXACT[name](mpmath.mpf(float(a)))
        if abs(want) > mpmath.mpf(float(np.finfo(np.float64).max)):
            assert np.isinf(b), (name, a)
            continue
        floor = 1e-3 if name in ("sin", "cos") else smallest
        limit = (48 if name == "tanh" else 4) * 2.0**-53 * max(abs(want), floor) + smallest
        assert abs(mpmath.mpf(float(b)) - want) <= limit, (name, a, b, float(want))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_special_values(kit, dtype):
    inf, nan = np.inf, np.nan
    x = np.array([0.0, -0.0, inf, -inf, nan, 1e4, -1e4, 1.0], dtype)
    want = {
        "sigmoid": [0.5, 0.5, 1, 0, nan, 1, 0, None],
        "tanh": [0, 0, 1, -1, nan, 1, -1, None],
        "exp": [1, 1, inf, 0, nan, inf, 0, None],
        "expm1": [0, 0, inf, -1, nan, inf, -1, None],
        "softplus": [None, None, inf, 0, nan, 1e4, 0, None],
        "log": [-inf, -inf, inf, nan, nan, None, nan, 0],
        "log1p": [0, 0, inf, nan, nan, None, nan, None],
        "positive": [0.5, 0.5, inf, 0, nan, 1e4 + 0.5, 0, 1.5],
        "nearest": [0, 0, inf, -inf, nan, 1e4, -1e4, 1],
        "sqrt": [0, 0, inf, nan, nan, 100, nan, 1],
        "square": [0, 0, inf, inf, nan, 1e8, 1e8, 1],
        "heaviside": [0.5, 0.5, 1, 0, None, 1, 0, 1],
        "zero": [0, 0, 0, 0, 0, 0, 0, 0],
        "sin": [0, 0, nan, nan, nan, None, None, None],
        "cos": [1, 1, nan, nan, nan, None, None, None],
    }
    for name, values in want.items():
        got = applied(kit, name, x)
        for g, w, at in zip(got, values, x, strict=True):
            if w is not None:
                np.testing.assert_array_equal(g, dtype(w), err_msg=f"{name}({at})")


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_maximum_like_pytorch(kit, dtype):
    v = np.array([0.0, -0.0, 1, 1 + 1e-6, -2, np.inf, -np.inf, np.nan], dtype)
    a, b = (g.ravel() for g in np.meshgrid(v, v))
    got = applied(kit, "maximum", a, b)
    np.testing.assert_array_equal(got, torch.maximum(torch.tensor(a), torch.tensor(b)).numpy())


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_grid_of_angles(kit, dtype):
    """The same grid point as in PyTorch for every angle, ties among them, and 2 roundings."""
    big = 0.3 / np.finfo(dtype).eps
    x = np.concatenate([points(dtype, 1024)[:768], np.arange(-64, 64) / 2, [big, -big] * 64])
    x = x.astype(dtype)
    np.testing.assert_array_equal(applied(kit, "nearest", x), np.rint(x))
    x = np.where(np.abs(x) < 1e4, x, 1).astype(dtype)
    m = np.resize(np.array([2, 3, 4, 6, 250], dtype), x.shape)
    for function in ("snap", "snap_angle"):
        got = applied(kit, function, x, m)
        want = NAMESPACE[function](torch.tensor(x), torch.tensor(m)).numpy()
        np.testing.assert_allclose(got, want, 2 * np.finfo(dtype).eps, 0)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_slope_of_g(kit, dtype):
    x = np.resize(np.array([-3, -1e-9, -0.0, 0, 1e-9, 2, np.nan, -200], dtype), 64)
    y = applied(kit, "positive", x)
    want = np.where(x >= 0, 1, y * (1 - y))
    np.testing.assert_array_equal(applied(kit, "positive_slope", x, y), want)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_rest(kit, dtype):
    x = points(dtype, 1024)
    np.testing.assert_array_equal(applied(kit, "diagonal_t", x, x[::-1].copy()), x * x[::-1])
    np.testing.assert_array_equal(applied(kit, "square", x), x * x)
    with np.errstate(over="ignore"):
        ends = applied(kit, "heaviside", x)
    np.testing.assert_array_equal(ends, np.heaviside(x, dtype(0.5)))
    third = applied(kit, "ratio", x, values="1, 3) * (tl.load(x0 + i)")
    np.testing.assert_array_equal(third, x * dtype(1 / 3))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", ["sigmoid", "cosigmoid", "tanh", "exp", "softplus"])
def test_within_its_range_and_nearly_monotone(kit, name, dtype):
    """No value outside the range that bounds of a Spec promise, and no step back by more than the
    error, also where two formulas meet."""
    x = np.sort(points(dtype, 1 << 14, seed=1))
    y = applied(kit, name, x).astype(np.float64)
    y = y[::-1] if name == "cosigmoid" else y
    lo, hi = {"tanh": (-1, 1)}.get(name, (0, 1 if "sigmoid" in name else np.inf))
    assert y.min() >= lo
    assert y.max() <= hi
    y = y[np.isfinite(y)]
    eps = np.finfo(dtype).eps
    slack = np.maximum(np.abs(y[1:]), 1e-30) * eps * (128 if dtype == np.float32 else 32)
    assert (np.diff(y) >= -slack).all()


# -- wrong on purpose --------------------------------------------------------------------------

MUTANTS = {
    "tanh: polynomial used too far": ("tanh", "< 0.55, x", "< 0.75, x"),
    "tanh: cancelling formula everywhere": ("tanh", "tl.where(tl.abs(x) < 0.55,", "tl.where(x == 7,"),
    "tanh: a coefficient": ("tanh", "-0.33332947", "-0.3333"),
    "exp: no clip": ("exp", "x = tl.where(x > 89, 89.0, tl.where(x < -104, -104.0, x))", "x = x"),
    "expm1: exp(x) - 1 everywhere": ("expm1", "x < 0.5, 2 * t", "x < -9, 2 * t"),
    "expm1: quotient of tanh everywhere": ("expm1", "tl.where(x < 0.5, 2", "tl.where(x < 99.0, 2"),
    "softplus: no large part": ("softplus", "tl.where(x > 0, x, 0.0) + ", ""),
    "softplus: NaN forgotten": ("softplus", "tl.where(x == x, tail, x)", "tl.where(x > -9, tail, 0.0)"),
    "log: interval of the mantissa": ("log", "0x3F2AAAAB", "0x3F800000"),
    "log: denormal numbers": ("log", "(x >= 1.1754944e-38) & ", "(x >= 0) & "),
    "series: a term": ("log", "2 / 7 + y * p", "2 / 7"),
    "log1p: log(1 + x) everywhere": ("log1p", "(x > -0.5) & (x < 1)", "(x > 8) & (x < 9)"),
    "positive: sigmoid everywhere": ("positive", "x >= 0, x + 0.5", "x >= 99, x + 0.5"),
    "sigmoid: base": ("sigmoid", "-1.4426950408889634", "-1.4427"),
    "cosigmoid: a subtraction everywhere": ("cosigmoid", "tl.where(x > 0, e * s, 1 - s)", "1 - s"),
    "cosigmoid: a product everywhere": ("cosigmoid", "tl.where(x > 0, e * s, 1 - s)", "e * s"),
}  # fmt: skip


def check_mutant(kit, function):
    check_float32(kit, function, 1 << 14, module="mutated_functions")
    nan = np.full(2, np.nan, np.float32)
    np.testing.assert_array_equal(applied(kit, function, nan, module="mutated_functions"), nan)


@pytest.mark.parametrize("name", MUTANTS)
def test_checks_notice(kit, name, tmp_path, monkeypatch):
    function, old, new = MUTANTS[name]
    text = importlib.util.find_spec("pararnn.kernels.functions").loader.get_source(
        "pararnn.kernels.functions"
    )
    assert text.count(old) == 1, "the mutant no longer fits the text"
    (tmp_path / "mutated_functions.py").write_text(text.replace(old, new))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mutated_functions", raising=False)
    with pytest.raises(AssertionError):
        check_mutant(kit, function)
    sys.modules.pop("mutated_functions", None)


@pytest.mark.parametrize("name", ["sin", "cos"])
def test_angles_as_a_machine_computes_them(kit, name, tmp_path, monkeypatch):
    """The interpreter takes NumPy's sine; here it runs the polynomials that a GPU runs."""
    text = importlib.util.find_spec("pararnn.kernels.functions").loader.get_source(
        "pararnn.kernels.functions"
    )
    old = "INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)"
    assert text.count(old) == 1
    (tmp_path / "compiled_functions.py").write_text(
        text.replace(old, "INTERPRETED = tl.constexpr(False)")
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "compiled_functions", raising=False)
    check_float32(kit, name, 1 << 12, module="compiled_functions")
    sys.modules.pop("compiled_functions", None)
