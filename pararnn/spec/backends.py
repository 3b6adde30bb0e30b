"""The operations that printed programs call, for NumPy arrays of any kind of number.

``float64`` computes in doubles, ``mpmath`` in the working precision of mpmath (object arrays of
``mpf``), ``sympy`` symbolically (object arrays of expressions). The torch operations live with
the solver, since this package knows no tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import mpmath
import numpy as np
import sympy

from .functions import (
    PRIMITIVES,
    expm1,
    heaviside,
    log1p,
    maximum,
    positive,
    positive_slope,
    sigmoid,
    snap,
    snap_angle,
    softplus,
)

Array = np.ndarray


def _heads(weight: Array, x: Array) -> Array:
    heads, _, width = weight.shape
    blocks = x.reshape(*x.shape[:-1], heads, width)
    return (weight * blocks[..., None, :]).sum(-1).reshape(x.shape)


def _maps(absolute: Callable[[Array], Array]) -> dict[str, Callable[[Any, Array], Array]]:
    """Each structure's action, transposed action, and action with absolute weights."""
    forward = {
        "diagonal": lambda w, x: w * x,
        "head": _heads,
        "dense": lambda w, x: (w * x[..., None, :]).sum(-1),
        "right": lambda w, x: (x[..., :, :, None] * w).sum(-2),
    }
    out: dict[str, Callable[[Any, Array], Array]] = dict(forward)
    for name, act in forward.items():
        out[f"{name}_t"] = act if name == "diagonal" else _with(act, _transposed)
        out[f"{name}_abs"] = _with(act, absolute)
    return out | dict.fromkeys(("contract", "contract_t", "contract_abs"), _contract)


def _contract(dim: int, x: Array) -> Array:
    """Sum over one axis, which stays: the map is its own transpose."""
    return np.broadcast_to(x.sum(axis=dim, keepdims=True), x.shape)


def _transposed(weight: Array) -> Array:
    return np.swapaxes(weight, -1, -2)


def _with(
    act: Callable[[Array, Array], Array], change: Callable[[Array], Array]
) -> Callable[[Array, Array], Array]:
    return lambda w, x: act(change(w), x)


def _namespace(functions: Mapping[str, Callable], ratio: Callable, absolute: Callable) -> dict:
    return {
        **functions,
        **_maps(absolute),
        "ratio": ratio,
        "square": lambda x: x * x,
        "zero": lambda x: x * 0,
    }


def _stable_sigmoid(x: Array) -> Array:
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1 / (1 + e), e / (1 + e))


def _elementwise(f: Callable[..., Any], arity: int = 1) -> Callable[..., Any]:
    return np.frompyfunc(f, arity, 1)


def _mp_sigmoid(x: Any) -> Any:
    return 1 / (1 + mpmath.exp(-x))


def _mp_softplus(x: Any) -> Any:
    return mpmath.log1p(mpmath.exp(x))


def _mp_heaviside(x: Any) -> Any:
    return (1 + mpmath.sign(x)) / 2


def _np_heaviside(x: Array) -> Array:
    return np.heaviside(x, 0.5)


def _np_positive(x: Array) -> Array:
    return np.where(x >= 0, x + 0.5, _stable_sigmoid(x))


def _np_positive_slope(x: Array, y: Array) -> Array:
    return np.where(x >= 0, 1.0, y * (1 - y))


def _np_snap(x: Array, m: Array) -> Array:
    return np.rint(x * (m * (0.5 / np.pi))) * (2 * np.pi / m)


def _np_snap_angle(x: Array, m: Array) -> Array:
    count = np.rint(x * (m * (0.5 / np.pi)))
    return (count - m * np.rint(count / m)) * (2 * np.pi / m)


def _mp_positive(x: Any) -> Any:
    return x + mpmath.mpf("0.5") if x >= 0 else _mp_sigmoid(x)


def _mp_positive_slope(x: Any, y: Any) -> Any:
    return mpmath.mpf(1) if x >= 0 else y * (1 - y)


def _mp_snap(x: Any, m: Any) -> Any:
    return mpmath.nint(x * m / (2 * mpmath.pi)) * (2 * mpmath.pi / m)


def _mp_snap_angle(x: Any, m: Any) -> Any:
    count = mpmath.nint(x * m / (2 * mpmath.pi))
    return (count - m * mpmath.nint(count / m)) * (2 * mpmath.pi / m)


_FLOAT: dict[str, Callable[..., Any]] = {
    "sigmoid": _stable_sigmoid,
    "positive": _np_positive,
    "positive_slope": _np_positive_slope,
    "snap": _np_snap,
    "snap_angle": _np_snap_angle,
    "softplus": lambda x: np.logaddexp(0.0, x),
    "heaviside": _np_heaviside,
}
_MP: dict[str, Callable[..., Any]] = {
    "sigmoid": _mp_sigmoid,
    "softplus": _mp_softplus,
    "heaviside": _mp_heaviside,
    "maximum": max,
    "positive": _mp_positive,
    "positive_slope": _mp_positive_slope,
    "snap": _mp_snap,
    "snap_angle": _mp_snap_angle,
}
_SYMBOLIC = {
    "sigmoid": sigmoid,
    "softplus": softplus,
    "expm1": expm1,
    "heaviside": heaviside,
    "maximum": maximum,
    "log1p": log1p,
    "positive": positive,
    "positive_slope": positive_slope,
    "snap": snap,
    "snap_angle": snap_angle,
}
_ARITY = {p.name: p.arity for p in PRIMITIVES.values()} | {"sqrt": 1}

BACKENDS: dict[str, dict[str, Any]] = {
    "float64": _namespace(
        {name: _FLOAT.get(name) or getattr(np, name) for name in _ARITY},
        lambda p, q: p / q,
        np.abs,
    ),
    "mpmath": _namespace(
        {
            name: _elementwise(_MP.get(name) or getattr(mpmath, name), arity)
            for name, arity in _ARITY.items()
        },
        lambda p, q: mpmath.mpf(p) / q,
        _elementwise(abs),
    ),
    "sympy": _namespace(
        {
            name: _elementwise(_SYMBOLIC.get(name) or getattr(sympy, name), arity)
            for name, arity in _ARITY.items()
        },
        sympy.Rational,
        _elementwise(abs),
    ),
}


def convert(values: Any, backend: str) -> Array:
    """An array of ``values`` as the backend's numbers. Conversion from float is exact."""
    array = np.asarray(values)
    if backend == "float64":
        return array.astype(np.float64)
    if array.dtype == object:
        return array
    number = mpmath.mpf if backend == "mpmath" else sympy.nsimplify
    return np.vectorize(lambda v: number(float(v)), otypes=[object])(array)
