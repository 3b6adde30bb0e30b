"""Reference evaluation of a Spec on NumPy arrays: slow, plain, and in any precision.

All functions take one step of one or more samples. ``state`` has shape ``(..., *state_shape)``
(a slot axis first if there are several slots), ``drives`` is a tuple of arrays of shape
``(..., *axes)``, ``params`` a tuple in the order maps, then elementwise parameters. ``backend``
is ``"float64"``, ``"mpmath"`` (set ``mpmath.mp.dps``; 50 digits in the contract) or ``"sympy"``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import sympy

from .backends import BACKENDS, convert
from .functions import expm1, sigmoid
from .print import print_program
from .program import load

if TYPE_CHECKING:
    from .spec import Spec

Array = np.ndarray
Sizes = Mapping[str, int]


@lru_cache(maxsize=256)
def _program(spec: Spec, program: str, backend: str) -> Any:
    return load(print_program(spec, program, "plain"), BACKENDS[backend])


def align(spec: Spec, value: Array, axes: Sequence[str]) -> Array:
    """Insert singleton axes, so that ``(..., *axes)`` broadcasts against ``(..., *spec.axes)``."""
    lead = value.shape[: value.ndim - len(axes)]
    sizes = dict(zip(axes, value.shape[value.ndim - len(axes) :], strict=True))
    return value.reshape(*lead, *(sizes.get(a, 1) for a in spec.axes))


def _slots(spec: Spec, state: Array) -> list[Array]:
    if len(spec.slots) == 1:
        return [state]
    axis = state.ndim - len(spec.axes) - 1
    return [np.take(state, i, axis=axis) for i in range(len(spec.slots))]


def _join(spec: Spec, slots: Sequence[Array]) -> Array:
    if len(slots) == 1:
        return slots[0]
    return np.stack(np.broadcast_arrays(*slots), axis=-len(spec.axes) - 1)


def _inputs(spec: Spec, state: Array, drives: Sequence, params: Sequence, backend: str) -> list:
    slots = _slots(spec, convert(state, backend))
    aligned = [
        align(spec, convert(u, backend), d.axes)
        for u, d in zip(drives, spec.drive_list, strict=True)
    ]
    return [*slots, *aligned, *_recurrent(spec, params, backend)]


def _recurrent(spec: Spec, params: Sequence, backend: str) -> list[Array]:
    weights = [convert(p, backend) for p in params[: len(spec.map_list)]]
    rest = zip(params[len(spec.map_list) :], spec.param_list, strict=True)
    return weights + [align(spec, convert(p, backend), d.axes) for p, d in rest]


def step(
    spec: Spec, state: Array, drives: Sequence, params: Sequence, backend: str = "float64"
) -> Array:
    """One step of the recurrence: the next state."""
    return _join(
        spec, _program(spec, "step", backend)(*_inputs(spec, state, drives, params, backend))
    )


def read(
    spec: Spec, state: Array, drives: Sequence, params: Sequence, backend: str = "float64"
) -> Array:
    """What a layer passes on, from the new state of a Spec with a read-out."""
    (out,) = _program(spec, "read", backend)(*_inputs(spec, state, drives, params, backend))
    read_axes = spec.axes_of(spec.readout.symbol)  # type: ignore[union-attr]
    # The axis that was summed over, and others that it does not have, have one place of many.
    first = out.ndim - len(spec.axes)
    place = tuple(slice(None) if a in read_axes else 0 for a in spec.axes)
    return out[(slice(None),) * first + place]


def sequence(
    spec: Spec, state: Array, drives: Sequence, params: Sequence, backend: str = "float64"
) -> Array:
    """Every state of a sequence. ``drives`` carry a time axis right before their own axes."""
    length = drives[0].shape[drives[0].ndim - len(spec.drive_list[0].axes) - 1]
    states = []
    for t in range(length):
        now = [
            np.take(u, t, axis=u.ndim - len(d.axes) - 1)
            for u, d in zip(drives, spec.drive_list, strict=True)
        ]
        state = step(spec, state, now, params, backend)
        states.append(state)
    axis = state.ndim - len(spec.axes) - (len(spec.slots) > 1)
    return np.stack(states, axis=axis) if states else np.zeros((0,))


def _linear(
    spec: Spec,
    program: str,
    state: Array,
    drives: Sequence,
    params: Sequence,
    v: Array,
    backend: str,
) -> Array:
    inputs = _inputs(spec, state, drives, params, backend)
    coefficients = _program(spec, "coefficients", backend)(*inputs)
    perturbation = _slots(spec, convert(v, backend))
    out = _program(spec, program, backend)(
        *perturbation, *coefficients, *_recurrent(spec, params, backend)
    )
    return _join(spec, out)


def jvp(
    spec: Spec, state: Array, drives: Sequence, params: Sequence, v: Array, backend: str = "float64"
) -> Array:
    """Factorized ``J v``."""
    return _linear(spec, "tangent", state, drives, params, v, backend)


def vjp(
    spec: Spec, state: Array, drives: Sequence, params: Sequence, v: Array, backend: str = "float64"
) -> Array:
    """Factorized ``Jᵀ v``."""
    return _linear(spec, "transpose", state, drives, params, v, backend)


def factorized_jacobian(
    spec: Spec, state: Array, drives: Sequence, params: Sequence, backend: str = "float64"
) -> Array:
    """Dense ``∂vec(h')/∂vec(h)`` of one sample, column by column from the factorized JVP."""
    state = convert(state, backend)
    columns = []
    for i in range(state.size):
        unit = np.zeros(state.size, dtype=int)
        unit[i] = 1
        basis = (
            convert(unit.reshape(state.shape), backend)
            if backend != "sympy"
            else unit.reshape(state.shape).astype(object)
        )
        out = jvp(spec, state, drives, params, basis, backend)
        columns.append(np.broadcast_to(out, state.shape).reshape(-1))
    return np.stack(columns, axis=-1)


def symbolic_inputs(spec: Spec, sizes: Sizes) -> tuple[Array, tuple[Array, ...], tuple[Array, ...]]:
    """Arrays of fresh SymPy symbols for the state, drives and parameters of one sample."""

    def fresh(name: str, shape: tuple[int, ...]) -> Array:
        out = np.empty(shape, dtype=object)
        for index in np.ndindex(*shape):
            out[index] = sympy.Symbol("_".join([name, *map(str, index)]), real=True)
        return out

    shape = tuple(sizes[a] for a in spec.axes)
    slots = [fresh(s.name, shape) for s in spec.slots]
    state = slots[0] if len(slots) == 1 else np.stack(slots)
    drives = tuple(fresh(d.name, tuple(sizes[a] for a in d.axes)) for d in spec.drive_list)
    params = tuple(fresh(name, shape) for name, shape in spec.parameter_shapes(sizes).items())
    return state, drives, params


def symbolic_jacobian(spec: Spec, sizes: Sizes) -> Array:
    """Dense ``∂vec(h')/∂vec(h)`` by SymPy's own differentiation of the whole step."""
    state, drives, params = symbolic_inputs(spec, sizes)
    following = step(spec, state, drives, params, "sympy").reshape(-1)
    flat = state.reshape(-1)
    out = np.empty((flat.size, flat.size), dtype=object)
    for i, j in np.ndindex(*out.shape):
        out[i, j] = sympy.diff(following[i], flat[j])
    return out


def dense_jacobian(
    spec: Spec, state: Array, drives: Sequence, params: Sequence, backend: str = "float64"
) -> Array:
    """Dense Jacobian of one sample, independent of the factorization.

    ``mpmath`` differentiates the step by central differences in twice the working precision, so
    that all digits of the result are right; ``float64`` rounds that result.
    """
    import mpmath

    digits = max(mpmath.mp.dps, 30)
    with mpmath.workdps(3 * digits):
        base = convert(state, "mpmath")
        small = mpmath.mpf(10) ** (-digits)
        columns = []
        for i in range(base.size):
            shift = np.array([mpmath.mpf(0)] * base.size, dtype=object)
            shift[i] = small
            shift = shift.reshape(base.shape)
            up = step(spec, base + shift, drives, params, "mpmath")
            down = step(spec, base - shift, drives, params, "mpmath")
            columns.append(((up - down) / (2 * small)).reshape(-1))
        dense = np.stack(columns, axis=-1)
    return dense.astype(np.float64) if backend == "float64" else dense


def prove_jacobian(spec: Spec, sizes: Sizes) -> bool:
    """Prove, symbolically and for the given small sizes, that the factorized Jacobian is the
    derivative of the step: every entry of their difference simplifies to zero.

    Raises
    ------
    AssertionError
        Naming the first entry that differs, with both expressions.
    """
    state, drives, params = symbolic_inputs(spec, sizes)
    factorized = factorized_jacobian(spec, state, drives, params, "sympy")
    derived = symbolic_jacobian(spec, sizes)
    for i, j in np.ndindex(*derived.shape):
        left, right = sympy.sympify(factorized[i, j]), sympy.sympify(derived[i, j])
        if left != right and not _is_zero(left - right):
            raise AssertionError(
                f"{spec.name}: entry ({i}, {j}) of the factorized Jacobian is {left}, expected "
                f"{right}; the Spec's derivation is wrong."
            )
    return True


def _odd(function: type[sympy.Function], x: sympy.Expr) -> sympy.Expr:
    return 1 - function(-x) if x.could_extract_minus_sign() else function(x)


def _is_zero(expr: sympy.Expr) -> bool:
    """Exact zero test: calls of transcendental functions become free variables, in which the
    derivative rules are polynomial, so expanding decides. Of a function and its complement (see
    :mod:`.derive.complements`), one is written with the other."""
    expr = expr.replace(expm1, lambda x: sympy.exp(x) - 1)
    expr = expr.replace(sigmoid, lambda x: _odd(sigmoid, x))
    calls = sorted(expr.atoms(sympy.Function), key=sympy.default_sort_key)
    names = {call: sympy.Symbol(f"_call{i}", real=True) for i, call in enumerate(calls)}
    # Replace outer calls first: an inner call then survives only where it stands by itself.
    for call in sorted(calls, key=lambda c: -c.count_ops()):
        expr = expr.xreplace({call: names[call]})
    return sympy.expand(sympy.together(expr)) == 0


def _finite(bounds: tuple[float, float] | None) -> tuple[float, float]:
    """An interval to sample from: the bounds, or four units of them where they are infinite."""
    lo, hi = bounds or (-math.inf, math.inf)
    lo = lo if math.isfinite(lo) else min(hi, 2.0) - 4.0
    return lo, hi if math.isfinite(hi) else lo + 4.0


def leaves_bounds(spec: Spec, samples: int = 256) -> tuple[str, float, tuple[float, float]] | None:
    """A slot, a value and the declared bounds that one step from inside them leaves, or None.

    Samples states of the box (its corners among them), drives and parameters of all sizes; finding
    nothing is no proof.
    """
    rng = np.random.default_rng(0)
    sizes = {**dict.fromkeys(spec.axes, 2), "heads": 1}
    shape = (samples, *(2 for _ in spec.axes))
    slots = []
    for slot in spec.slots:
        lo, hi = _finite(slot.bounds)
        place = rng.uniform(size=shape)
        place[: samples // 4] = place[: samples // 4].round()
        slots.append(lo + (hi - lo) * place)
    spread = 10.0 ** rng.uniform(-1, 1, size=samples)
    drives = []
    for axes in spec.drive_shapes(sizes):
        values = rng.standard_normal((samples, *axes))
        drives.append(values * spread.reshape(-1, *(1,) * len(axes)))
    if spec.gap is not None:
        drives[-1] = abs(drives[-1])
    params = [rng.standard_normal(s) for s in spec.parameter_shapes(sizes).values()]
    with np.errstate(all="ignore"):
        following = _slots(spec, step(spec, _join(spec, slots), drives, params))
    for slot, value in zip(spec.slots, following, strict=True):
        if slot.bounds is not None:
            lo, hi = slot.bounds
            worst = value.reshape(-1)[np.argmax(np.maximum(value - hi, lo - value))]
            if not lo - 1e-9 <= worst <= hi + 1e-9 and not np.isnan(worst):
                return slot.name, float(worst), slot.bounds
    return None
