"""The operations that printed programs call, for NumPy arrays of any kind of number.

``float64`` computes in doubles, ``mpmath`` in the working precision of mpmath (object arrays of
``mpf``), ``sympy`` symbolically (object arrays of expressions). The torch operations live with
the solver, since this package knows no tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mpmath
import numpy as np
import sympy

from .functions import PRIMITIVES

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


def _elementwise(f: Callable[..., Any]) -> Callable[..., Any]:
    return np.frompyfunc(f, 1, 1)


def _namespace(backend: str, sqrt: Callable, absolute: Callable, ratio: Callable) -> dict[str, Any]:
    return {
        **{p.name: p.values(backend) for p in PRIMITIVES.values()},
        **_maps(absolute),
        "sqrt": sqrt,
        "ratio": ratio,
        "square": lambda x: x * x,
        "zero": lambda x: x * 0,
    }


BACKENDS: dict[str, dict[str, Any]] = {
    "float64": _namespace("float64", np.sqrt, np.abs, lambda p, q: p / q),
    "mpmath": _namespace(
        "mpmath", _elementwise(mpmath.sqrt), _elementwise(abs), lambda p, q: mpmath.mpf(p) / q
    ),
    "sympy": _namespace("sympy", _elementwise(sympy.sqrt), _elementwise(abs), sympy.Rational),
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
