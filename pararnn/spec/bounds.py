"""Bounds of the first and second derivative of a step, on the invariant box of its state.

Interval arithmetic bounds the value of every stage; a majorant recursion then bounds the first
and second directional derivative for perturbations of maximum norm 1:

    |ds| ≤ Σ |∂s/∂e| |de|,      |d²s| ≤ Σ |∂²s/∂e∂e'| |de||de'| + Σ |∂s/∂e| |d²e|,

and a linear map acts by its absolute weights. Drives may take any value (a time gap any up to a given
one), parameters are given.
The result is an upper bound for every input, so it can carry a proof; it is not the supremum.
Everything is rounded outwards, sums and products of majorants upwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import sympy

from .backends import BACKENDS
from .declarations import Elementwise, Linear
from .functions import primitive_of
from .interval import Interval, product_above, total_above
from .oracle import align

if TYPE_CHECKING:
    from .spec import Spec

_EPS, _TINY = 2.0**-52, 2.0**-1020


def evaluate(expr: sympy.Expr, values: Mapping[sympy.Symbol, Interval]) -> Interval:
    """Interval that holds ``expr`` for all values in the given intervals."""
    if isinstance(expr, sympy.Symbol):
        return values[expr]
    if expr.is_number:
        return _number(expr)
    if isinstance(expr, sympy.Add):
        total = Interval(0.0)
        for arg in expr.args:
            total = total + evaluate(arg, values)
        return total
    if isinstance(expr, sympy.Mul):
        product = Interval(1.0)
        for arg in expr.args:
            product = product * evaluate(arg, values)
        return product
    if isinstance(expr, sympy.Pow):
        return evaluate(expr.base, values).power(expr.exp)
    primitive = primitive_of(expr)
    if primitive is None:
        raise NotImplementedError(f"no interval rule for {type(expr).__name__} in {expr}.")
    return primitive.image(*(evaluate(arg, values) for arg in expr.args))


def _number(expr: sympy.Expr) -> Interval:
    """A constant: itself, or between the numbers next to it."""
    value = float(expr)
    if expr.is_Float or (expr.is_Rational and sympy.Rational(value) == expr):
        return Interval(value)
    return Interval(np.nextafter(value, -np.inf), np.nextafter(value, np.inf))


def _product(structure: str, weight: np.ndarray, x: np.ndarray) -> np.ndarray:
    """A linear map on entries that may be infinite: a zero weight takes no part."""
    act = BACKENDS["float64"][structure]
    infinite = np.isinf(x)
    finite = act(weight, np.where(infinite, 0.0, x))
    sign = act(np.sign(weight), np.where(infinite, np.sign(x), 0.0))
    touched = act(np.abs(np.sign(weight)), infinite.astype(float)) > 0
    # All infinite terms of one bound have one sign, so their sum has it too.
    return np.where(touched, np.where(sign < 0, -np.inf, np.inf), finite)


def _lost(structure: str, weight: np.ndarray, x: np.ndarray) -> np.ndarray:
    """What :func:`_product` may lose to rounding and underflow in its sums."""
    n = 1 if structure == "diagonal" else weight.shape[-1]
    size = _product(structure, np.abs(weight), np.abs(np.where(np.isinf(x), 0.0, x)))
    touched = _product(structure, (weight != 0).astype(float), (x != 0).astype(float)) > 0
    return np.where(touched, (n + 4) * _EPS * size + n * _TINY, 0.0)


def _majorized(structure: str, weight: np.ndarray, x: np.ndarray) -> np.ndarray:
    """An upper bound of ``|weight| x`` for ``x ≥ 0``."""
    weight = np.abs(weight)
    return total_above(_product(structure, weight, x), _lost(structure, weight, x))


def _apply(structure: str, weight: np.ndarray, x: Interval) -> Interval:
    """A linear map on a box: positive and negative parts of the weights act separately."""
    plus, minus = np.maximum(weight, 0), np.minimum(weight, 0)
    lost = _lost(structure, plus, x.magnitude) + _lost(structure, minus, x.magnitude)
    lo = _product(structure, plus, x.lo) + _product(structure, minus, x.hi)
    hi = _product(structure, plus, x.hi) + _product(structure, minus, x.lo)
    return _widened(lo, hi, 2 * lost)


def _widened(lo: np.ndarray, hi: np.ndarray, lost: np.ndarray) -> Interval:
    return Interval(
        np.where(lost > 0, np.nextafter(lo - lost, -np.inf), lo),
        np.where(lost > 0, np.nextafter(hi + lost, np.inf), hi),
    )


def _contracted(dim: int, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A sum over one axis, and what it may lose to rounding."""
    total = partial(BACKENDS["float64"]["contract"], dim)
    size = total(np.abs(np.where(np.isinf(x), 0.0, x)))
    return total(x), (x.shape[dim] + 4) * _EPS * size


def derivative_bounds(
    spec: Spec,
    params: Sequence[np.ndarray],
    sizes: Mapping[str, int],
    reach: float = 0.0,
    gap: float = np.inf,
    drives: Sequence[Interval] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Upper bounds of ``‖J‖`` and ``‖D²f‖`` (maximum norm), one for every coordinate of ``h'``.

    Parameters
    ----------
    params
        Recurrent parameters, in the order maps, then elementwise parameters.
    sizes
        Size of every axis (and ``heads``).
    reach
        The box is widened, where needed, to hold every state of magnitude up to this.
    gap
        The longest time gap. Derivatives may grow with it without bound.
    drives
        What every drive may be (a time gap too, which ``gap`` then does not matter for), in boxes of
        the shape of its axes. Any value, if not given.

    Raises
    ------
    ValueError
        If a slot declares no bounds: there is no box to bound on.
    """
    shape = tuple(sizes[a] for a in spec.axes)
    values: dict[sympy.Symbol, Interval] = {}
    first: dict[sympy.Symbol, np.ndarray] = {}
    second: dict[sympy.Symbol, np.ndarray] = {}
    nothing = np.zeros(shape)
    for slot in spec.slots:
        if slot.bounds is None:
            raise ValueError(
                f"{spec.name}: slot {slot.name!r} declares no bounds, so derivatives have no box "
                "to be bounded on; give state(..., bounds=(low, high))."
            )
        lo, hi = min(slot.bounds[0], -reach), max(slot.bounds[1], reach)
        values[slot.symbol] = Interval(np.full(shape, lo), np.full(shape, hi))
        first[slot.symbol], second[slot.symbol] = np.ones(shape), nothing
    for i, drive in enumerate(spec.drive_list):
        lo, hi = (0.0, gap) if drive.given else (-np.inf, np.inf)
        values[drive.symbol] = (
            Interval(np.full(shape, lo), np.full(shape, hi))
            if drives is None
            else Interval(*(align(spec, x, drive.axes) for x in (drives[i].lo, drives[i].hi)))
        )
        first[drive.symbol] = second[drive.symbol] = nothing
    weights = dict(zip((m.name for m in spec.map_list), params, strict=False))
    for param, value in zip(spec.param_list, params[len(spec.map_list) :], strict=True):
        values[param.symbol] = Interval(align(spec, np.asarray(value, float), param.axes))
        first[param.symbol] = second[param.symbol] = nothing

    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        for stage in spec.stages:
            if isinstance(stage, Linear):
                inner, d1, d2 = _elementwise(stage.operand, values, first, second)
                box = Interval(np.broadcast_to(inner.lo, shape), np.broadcast_to(inner.hi, shape))
                if stage.map.structure == "contract":
                    (least, lost), (most, more), *majorants = (
                        _contracted(stage.map.dim, np.broadcast_to(x, shape))
                        for x in (box.lo, box.hi, d1, d2)
                    )
                    values[stage.symbol] = _widened(least, most, lost + more)
                    first[stage.symbol], second[stage.symbol] = (
                        total_above(total, rounding) for total, rounding in majorants
                    )
                    continue
                weight = np.asarray(weights[stage.map.name], float)
                structure = stage.map.structure
                values[stage.symbol] = _apply(structure, weight, box)
                first[stage.symbol] = _majorized(structure, weight, np.broadcast_to(d1, shape))
                second[stage.symbol] = _majorized(structure, weight, np.broadcast_to(d2, shape))
            else:
                value, d1, d2 = _stage(stage, values, first, second)
                values[stage.symbol], first[stage.symbol], second[stage.symbol] = value, d1, d2
    out = [s.next_symbol for s in spec.slots]
    stack = np.stack if len(out) > 1 else (lambda a: a[0])
    return (
        stack([np.broadcast_to(first[o], shape) for o in out]),
        stack([np.broadcast_to(second[o], shape) for o in out]),
    )


def _stage(stage: Elementwise, values: dict, first: dict, second: dict) -> tuple:
    primitive = primitive_of(stage.expr)
    if primitive is None:
        return _elementwise(stage.expr, values, first, second)
    inner, d1, d2 = zip(
        *(_elementwise(arg, values, first, second) for arg in stage.expr.args), strict=True
    )
    slopes = primitive.slopes(inner)
    size = _total(d1)
    return (
        primitive.image(*inner),
        _total(map(_times, slopes, d1)),
        _total([_times(primitive.curvature(*inner), _times(size, size)), *map(_times, slopes, d2)]),
    )


def _elementwise(expr: sympy.Expr, values: dict, first: dict, second: dict) -> tuple:
    """Value, first and second majorant of an algebraic expression."""
    symbols = sorted(expr.free_symbols, key=str)
    d1, d2 = np.zeros(()), np.zeros(())
    for s in symbols:
        slope = evaluate(sympy.diff(expr, s), values).magnitude
        d1 = total_above(d1, _times(slope, first[s]))
        d2 = total_above(d2, _times(slope, second[s]))
        for r in symbols:
            mixed = sympy.diff(expr, s, r)
            if mixed != 0:
                bent = evaluate(mixed, values).magnitude
                d2 = total_above(d2, _times(bent, _times(first[s], first[r])))
    return evaluate(expr, values), d1, d2


def _times(bound: np.ndarray, factor: np.ndarray) -> np.ndarray:
    """Product of bounds, in which an exact zero wins over an infinity and NaN is no bound."""
    product = product_above(bound, factor)
    nothing = (np.asarray(bound) == 0) | (np.asarray(factor) == 0)
    return np.where(nothing, 0.0, np.where(np.isnan(product), np.inf, product))


def _total(terms: Iterable[np.ndarray]) -> np.ndarray:
    """A sum of majorants, rounded upwards."""
    total = np.zeros(())
    for term in terms:
        total = total_above(total, term)
    return total
