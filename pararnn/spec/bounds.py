"""Bounds of the first and second derivative of a step, on the invariant box of its state.

Interval arithmetic bounds the value of every stage; a majorant recursion then bounds the first
and second directional derivative for perturbations of maximum norm 1:

    |ds| ≤ Σ |∂s/∂e| |de|,      |d²s| ≤ Σ |∂²s/∂e∂e'| |de||de'| + Σ |∂s/∂e| |d²e|,

and a linear map acts by its absolute weights. Drives may take any value (a time gap any up to a given
one), parameters are given.
The result is an upper bound for every input, so it can carry a proof; it is not the supremum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import sympy

from .backends import BACKENDS
from .declarations import Elementwise, Linear
from .interval import Interval
from .oracle import align
from .primitives import primitive_of

if TYPE_CHECKING:
    from .spec import Spec


def evaluate(expr: sympy.Expr, values: Mapping[sympy.Symbol, Interval]) -> Interval:
    """Interval that holds ``expr`` for all values in the given intervals."""
    if isinstance(expr, sympy.Symbol):
        return values[expr]
    if expr.is_number:
        return Interval(float(expr))
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


def _product(structure: str, weight: np.ndarray, x: np.ndarray) -> np.ndarray:
    """A linear map on entries that may be infinite: a zero weight takes no part."""
    act = BACKENDS["float64"][structure]
    infinite = np.isinf(x)
    finite = act(weight, np.where(infinite, 0.0, x))
    sign = act(np.sign(weight), np.where(infinite, np.sign(x), 0.0))
    touched = act(np.abs(np.sign(weight)), infinite.astype(float)) > 0
    # All infinite terms of one bound have one sign, so their sum has it too.
    return np.where(touched, np.where(sign < 0, -np.inf, np.inf), finite)


def _apply(structure: str, weight: np.ndarray, x: Interval) -> Interval:
    """A linear map on a box: positive and negative parts of the weights act separately."""
    up, down = np.maximum(weight, 0), np.minimum(weight, 0)
    return Interval(
        _product(structure, up, x.lo) + _product(structure, down, x.hi),
        _product(structure, up, x.hi) + _product(structure, down, x.lo),
    )


def derivative_bounds(
    spec: Spec,
    params: Sequence[np.ndarray],
    sizes: Mapping[str, int],
    reach: float = 0.0,
    gap: float = np.inf,
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
    for drive in spec.drive_list:
        lo, hi = (0.0, gap) if drive.given else (-np.inf, np.inf)
        values[drive.symbol] = Interval(np.full(shape, lo), np.full(shape, hi))
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
                    total = partial(BACKENDS["float64"]["contract"], stage.map.dim)
                    values[stage.symbol] = Interval(total(box.lo), total(box.hi))
                    first[stage.symbol] = total(np.broadcast_to(d1, shape))
                    second[stage.symbol] = total(np.broadcast_to(d2, shape))
                    continue
                weight = np.asarray(weights[stage.map.name], float)
                structure, absolute = stage.map.structure, np.abs(weight)
                values[stage.symbol] = _apply(structure, weight, box)
                first[stage.symbol] = _product(structure, absolute, np.broadcast_to(d1, shape))
                second[stage.symbol] = _product(structure, absolute, np.broadcast_to(d2, shape))
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
    return (
        primitive.image(*inner),
        sum(map(_times, slopes, d1)),
        _times(primitive.curvature(*inner), sum(d1) ** 2) + sum(map(_times, slopes, d2)),
    )


def _elementwise(expr: sympy.Expr, values: dict, first: dict, second: dict) -> tuple:
    """Value, first and second majorant of an algebraic expression."""
    symbols = sorted(expr.free_symbols, key=str)
    d1, d2 = np.zeros(()), np.zeros(())
    for s in symbols:
        slope = evaluate(sympy.diff(expr, s), values).magnitude
        d1 = d1 + _times(slope, first[s])
        d2 = d2 + _times(slope, second[s])
        for r in symbols:
            mixed = sympy.diff(expr, s, r)
            if mixed != 0:
                d2 = d2 + _times(evaluate(mixed, values).magnitude, first[s] * first[r])
    return evaluate(expr, values), d1, d2


def _times(bound: np.ndarray, factor: np.ndarray) -> np.ndarray:
    """Product of bounds, in which an exact zero wins over an infinity and NaN is no bound."""
    product = np.asarray(bound * factor)
    nothing = (np.asarray(bound) == 0) | (np.asarray(factor) == 0)
    return np.where(nothing, 0.0, np.where(np.isnan(product), np.inf, product))
