"""The scalar functions that a stage may apply, each with everything derived from it.

One table, one row a function: its derivatives written in terms of its own output (so that no code
evaluates a transcendental twice), its range and bounds of its derivatives on intervals, its LaTeX,
and its values in float64 and in mpmath. Adding a function to the language of specs is adding a row
here, and its implementation on tensors to the solvers and to the kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mpmath
import numpy as np
import sympy

from .interval import Interval, above, below


def expression(value: object) -> sympy.Expr:
    """A symbol, an expression or a number as SymPy's. A string is none: SymPy would run it.

    Raises
    ------
    TypeError
        If it is something else.
    """
    if isinstance(value, str) or not isinstance(value, sympy.Expr | int | float | np.number):
        raise TypeError(
            f"got {value!r} ({type(value).__name__}), expected an expression of symbols and numbers; "
            "text is not read as one."
        )
    return sympy.sympify(value, strict=True)


class Strict(sympy.Function):
    """A function of expressions only."""

    def __new__(cls, *args: Any, **options: Any) -> sympy.Expr:
        return super().__new__(cls, *map(expression, args), **options)


class sigmoid(Strict):
    r"""Logistic function ``1 / (1 + exp(-x))``."""

    nargs = 1

    def fdiff(self, argindex: int = 1) -> sympy.Expr:
        return self * (1 - self)

    def _eval_evalf(self, prec: int) -> sympy.Expr:
        return (1 / (1 + sympy.exp(-self.args[0])))._eval_evalf(prec)


class softplus(Strict):
    r"""``log(1 + exp(x))``."""

    nargs = 1

    def fdiff(self, argindex: int = 1) -> sympy.Expr:
        return sigmoid(self.args[0])

    def _eval_evalf(self, prec: int) -> sympy.Expr:
        return sympy.log(1 + sympy.exp(self.args[0]))._eval_evalf(prec)


class expm1(Strict):
    r"""``exp(x) - 1``, with all its digits near zero."""

    nargs = 1

    def fdiff(self, argindex: int = 1) -> sympy.Expr:
        return self + 1


class log1p(Strict):
    r"""``log(1 + x)``, with all its digits near zero."""

    nargs = 1

    def fdiff(self, argindex: int = 1) -> sympy.Expr:
        return 1 / (1 + self.args[0])


class positive(Strict):
    r"""``x + 1/2`` for ``x ≥ 0``, ``sigmoid(x)`` below: the function ``g`` of Feng et al.
    (arXiv:2410.01201). It is continuous and above 0; at 0 its derivative is that from the right, 1.
    """

    nargs = 1

    def fdiff(self, argindex: int = 1) -> sympy.Expr:
        return positive_slope(self.args[0], self)


class positive_slope(Strict):
    r"""The derivative of ``y = positive(x)``: 1 for ``x ≥ 0``, ``y(1 − y)`` below."""

    nargs = 2


class snap(Strict):
    r"""The multiple of ``2π/m`` that is nearest to ``x``, halves to the even one.

    Its derivative with respect to ``x`` is 1 by definition, where that of a function constant in
    pieces would be 0: a straight-through estimator (Bengio et al., arXiv:1308.3432).
    """

    nargs = 2

    def fdiff(self, argindex: int = 1) -> sympy.Expr:
        return sympy.Integer(int(argindex == 1))


class snap_angle(snap):
    r"""``snap(x, m)`` less whole turns: an angle from ``-π`` to ``π``, so that sine and cosine of it
    keep their digits, for a float32 angle of any size."""


class heaviside(Strict):
    r"""The unit step: 0 below zero, 1 above, 1/2 at zero. The derivative of ``maximum``."""

    nargs = 1

    @classmethod
    def eval(cls, x: sympy.Expr) -> sympy.Expr | None:
        if x.is_number and x.is_comparable:
            return (1 + sympy.sign(x)) / 2
        return None

    def fdiff(self, argindex: int = 1) -> sympy.Expr:
        return sympy.Integer(0)


class maximum(Strict):
    r"""The larger of two numbers. At a tie each takes half of the derivative, as in PyTorch."""

    nargs = 2

    @classmethod
    def eval(cls, a: sympy.Expr, b: sympy.Expr) -> sympy.Expr | None:
        if a.is_number and b.is_number and a.is_comparable and b.is_comparable:
            return a if bool(a >= b) else b
        return None

    def fdiff(self, argindex: int = 1) -> sympy.Expr:
        first = heaviside(self.args[0] - self.args[1])
        return first if argindex == 1 else 1 - first


def _strict(function: type[sympy.Function]) -> Callable[[Any], sympy.Expr]:
    def applied(x: Any) -> sympy.Expr:
        return function(expression(x))

    applied.__name__, applied.__doc__ = function.__name__, f"SymPy's ``{function.__name__}``."
    return applied


tanh, exp, log, sin, cos = map(_strict, (sympy.tanh, sympy.exp, sympy.log, sympy.sin, sympy.cos))


@dataclass(frozen=True)
class Primitive:
    """What the library knows about one scalar function ``y = f(x)``.

    ``derivative(x, y)`` may use the output ``y``. ``image``, ``slope`` and ``curvature`` map an
    interval of ``x`` to an interval holding ``f``, and to upper bounds of ``|f'|`` and ``|f''|``.
    A function of ``arity`` 2 has one derivative and one slope for each argument, in a tuple; its
    curvature ``M`` bounds the second derivative by ``M (Σ |dx_i|)²``. ``internal`` functions
    occur in derivatives only, not in specs. Values in ``float64`` (of arrays) and ``mpmath`` (of
    numbers) are those of NumPy's and mpmath's function of the same name, if not given.
    """

    function: type[sympy.Function]
    derivative: Callable[..., Any]
    image: Callable[..., Interval]
    slope: Callable[..., Any]
    curvature: Callable[..., np.ndarray]
    shown: str = ""
    float64: Callable[..., Any] | None = None
    mpmath: Callable[..., Any] | None = None
    arity: int = 1
    internal: bool = False

    @property
    def name(self) -> str:
        return self.function.__name__

    @property
    def latex(self) -> str:
        own = (
            rf"\operatorname{{{self.name}}}"
            if issubclass(self.function, Strict)
            else rf"\{self.name}"
        )
        return self.shown or own

    def values(self, backend: str) -> Callable[..., Any]:
        """The function on arrays of one backend's numbers."""
        if backend == "float64":
            return self.float64 or getattr(np, self.name)
        function: Any = self.function
        if backend == "mpmath":
            function = self.mpmath or getattr(mpmath, self.name)
        return np.frompyfunc(function, self.arity, 1)

    def derivatives(self, args: Sequence[sympy.Expr], y: sympy.Expr) -> tuple[sympy.Expr, ...]:
        """The partial derivative with respect to every argument."""
        slopes = self.derivative(*args, y)
        return slopes if isinstance(slopes, tuple) else (slopes,)

    def slopes(self, args: Sequence[Interval]) -> tuple[np.ndarray, ...]:
        """An upper bound of every partial derivative's magnitude."""
        bounds = self.slope(*args)
        return bounds if isinstance(bounds, tuple) else (bounds,)


def _np_sigmoid(x: np.ndarray) -> np.ndarray:
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1 / (1 + e), e / (1 + e))


def _increasing(
    f: Callable, low: float = -np.inf, high: float = np.inf
) -> Callable[[Interval], Interval]:
    """Image under a function with values from ``low`` to ``high``, which is exact at 0."""

    def image(x: Interval) -> Interval:
        lo, hi = f(x.lo), f(x.hi)
        lo, hi = np.where(x.lo == 0, lo, below(lo)), np.where(x.hi == 0, hi, above(hi))
        return Interval(np.maximum(lo, low), np.minimum(hi, high))

    return image


def _constant(value: float) -> Callable[[Interval], np.ndarray]:
    return lambda x: np.full(np.broadcast(x.lo, x.hi).shape, value)


def _bell(f: Callable, top: float) -> Callable[[Interval], np.ndarray]:
    """Sup of an even, unimodal ``f`` (largest at 0, where it is ``top``) over an interval."""

    def sup(x: Interval) -> np.ndarray:
        nearest = np.where((x.lo <= 0) & (x.hi >= 0), 0.0, np.minimum(abs(x.lo), abs(x.hi)))
        return np.minimum(above(f(nearest)), top)

    return sup


def _squared_sech(x: np.ndarray) -> np.ndarray:
    return 4 * _np_sigmoid(2 * x) * _np_sigmoid(-2 * x)


def _exp_up(x: Interval) -> np.ndarray:
    return np.where(x.hi == 0, 1.0, above(np.exp(x.hi)))


def _reciprocal_up(x: np.ndarray) -> np.ndarray:
    return above(1 / np.maximum(x, 0))


def _softplus_image(x: Interval) -> Interval:
    lo, hi = below(np.logaddexp(0.0, x.lo)), above(np.logaddexp(0.0, x.hi))
    return Interval(np.maximum(lo, 0.0), hi)


def _np_positive(x: np.ndarray) -> np.ndarray:
    return np.where(x >= 0, x + 0.5, _np_sigmoid(np.minimum(x, 0)))


def _positive_slope(x: Interval, y: Interval | None = None) -> np.ndarray:
    """Upper bound of the slope of ``positive``: it grows up to 0 and is 1 from there."""
    high = _np_sigmoid(np.minimum(x.hi, 0))
    return np.where(x.hi >= 0, 1.0, above(high * (1 - high)))


def _unit(x: Interval) -> Interval:
    return Interval(-1.0, 1.0)


def _around(x: Interval, m: Interval) -> Interval:
    """Within half a step of ``2π/|m|`` of ``x``."""
    smallest = np.where((m.lo <= 0) & (m.hi >= 0), 0.0, np.minimum(abs(m.lo), abs(m.hi)))
    with np.errstate(divide="ignore"):
        half = above(np.pi / smallest)
    return Interval(below(x.lo - half), above(x.hi + half))


def _half_turn(x: Interval, m: Interval) -> Interval:
    """Whatever the angle is, at most half a turn, and a rounding."""
    half = np.full(np.broadcast(x.lo, m.lo).shape, np.nextafter(np.pi, 4))
    return Interval(-half, half)


def _np_step(x: np.ndarray) -> np.ndarray:
    return np.heaviside(x, 0.5)


def _where_equal(value: float) -> Callable[..., np.ndarray]:
    """``value`` where two intervals (or one and zero) meet, else 0."""

    def found(a: Interval, b: Interval | None = None) -> np.ndarray:
        b = Interval(0.0) if b is None else b
        return np.where((a.lo <= b.hi) & (b.lo <= a.hi), value, 0.0)

    return found


def _may_be_larger(a: Interval, b: Interval) -> tuple[np.ndarray, np.ndarray]:
    return 1.0 * (a.hi >= b.lo), 1.0 * (b.hi >= a.lo)


def _snapped(whole: Callable, pi: Any, turns: bool) -> Callable[..., Any]:
    """The nearest multiple of ``2π/m``, in the numbers of ``whole``; with ``turns``, whole ones."""

    def nearest(x: Any, m: Any) -> Any:
        count = whole(x * (m / (2 * pi)))
        return (count if turns else count - m * whole(count / m)) * (2 * pi / m)

    return nearest


def _mp_sigmoid(x: Any) -> Any:
    return 1 / (1 + mpmath.exp(-x))


# max |sigma''| = 1/(6 sqrt 3), max |tanh''| = 4/(3 sqrt 3), max |softplus''| = max sigma' = 1/4.
_SIGMOID_CURVATURE = float(above(1 / (6 * np.sqrt(3))))
_TANH_CURVATURE = float(above(4 / (3 * np.sqrt(3))))

PRIMITIVES: dict[type[sympy.Function], Primitive] = {
    p.function: p
    for p in (
        Primitive(
            sigmoid,
            lambda x, y: y * (1 - y),
            _increasing(_np_sigmoid, 0.0, 1.0),
            _bell(lambda x: _np_sigmoid(x) * _np_sigmoid(-x), 0.25),
            _constant(_SIGMOID_CURVATURE),
            r"\sigma",
            _np_sigmoid,
            _mp_sigmoid,
        ),
        Primitive(
            sympy.tanh,
            lambda x, y: 1 - y**2,
            _increasing(np.tanh, -1.0, 1.0),
            _bell(_squared_sech, 1.0),
            _constant(_TANH_CURVATURE),
        ),
        Primitive(
            softplus,
            lambda x, y: sigmoid(x),
            _softplus_image,
            lambda x: np.minimum(above(_np_sigmoid(x.hi)), 1.0),
            _constant(0.25),
            float64=lambda x: np.logaddexp(0.0, x),
            mpmath=lambda x: mpmath.log1p(mpmath.exp(x)),
        ),
        Primitive(sympy.exp, lambda x, y: y, _increasing(np.exp, 0.0), _exp_up, _exp_up, r"\exp"),
        Primitive(expm1, lambda x, y: y + 1, _increasing(np.expm1, -1.0), _exp_up, _exp_up),
        Primitive(
            sympy.log,
            lambda x, y: 1 / x,
            _increasing(lambda x: np.log(np.maximum(x, 0))),
            lambda x: _reciprocal_up(x.lo),
            lambda x: above(_reciprocal_up(x.lo) ** 2),
        ),
        Primitive(
            log1p,
            lambda x, y: 1 / (1 + x),
            _increasing(lambda x: np.log1p(np.maximum(x, -1))),
            lambda x: _reciprocal_up(np.nextafter(1 + x.lo, -np.inf)),
            lambda x: above(_reciprocal_up(np.nextafter(1 + x.lo, -np.inf)) ** 2),
        ),
        Primitive(
            positive,
            lambda x, y: positive_slope(x, y),
            _increasing(_np_positive, 0.0),
            _positive_slope,
            # A kink at 0: no second derivative there.
            lambda x: np.where(x.hi < 0, _SIGMOID_CURVATURE, np.where(x.lo > 0, 0.0, np.inf)),
            "g",
            _np_positive,
            lambda x: x + mpmath.mpf("0.5") if x >= 0 else _mp_sigmoid(x),
        ),
        Primitive(
            positive_slope,
            lambda x, s, y: (sympy.Integer(0), sympy.Integer(0)),  # no program needs them
            lambda x, y: Interval(0.0 * x.lo, _positive_slope(x)),
            lambda x, y: (np.full(np.shape(x.lo), np.inf), np.full(np.shape(y.lo), np.inf)),
            lambda x, y: np.full(np.shape(x.lo), np.inf),
            "g'",
            lambda x, y: np.where(x >= 0, 1.0, y * (1 - y)),
            lambda x, y: mpmath.mpf(1) if x >= 0 else y * (1 - y),
            arity=2,
            internal=True,
        ),
        *(
            Primitive(
                function,
                lambda x, m, y: (sympy.Integer(1), sympy.Integer(0)),
                image,
                lambda x, m: (np.ones(np.shape(x.lo)), np.zeros(np.shape(m.lo))),
                lambda x, m: np.zeros(np.shape(x.lo)),
                r"\operatorname{snap}",
                _snapped(np.rint, np.pi, turns),
                _snapped(mpmath.nint, mpmath.pi, turns),
                arity=2,
            )
            for function, image, turns in ((snap, _around, True), (snap_angle, _half_turn, False))
        ),
        Primitive(sympy.sin, lambda x, y: cos(x), _unit, _constant(1.0), _constant(1.0)),
        Primitive(sympy.cos, lambda x, y: -sin(x), _unit, _constant(1.0), _constant(1.0)),
        Primitive(
            maximum,
            lambda a, b, y: (heaviside(a - b), 1 - heaviside(a - b)),
            lambda a, b: Interval(np.maximum(a.lo, b.lo), np.maximum(a.hi, b.hi)),
            _may_be_larger,
            _where_equal(np.inf),  # a kink: no second derivative there
            r"\max",
            mpmath=max,
            arity=2,
        ),
        Primitive(
            heaviside,
            lambda x, y: sympy.Integer(0),
            lambda x: Interval(_np_step(x.lo), _np_step(x.hi)),
            _where_equal(np.inf),
            _where_equal(np.inf),
            r"\mathrm{H}",
            _np_step,
            lambda x: (1 + mpmath.sign(x)) / 2,
            internal=True,
        ),
    )
}
"""The functions of the language, by the class of their calls."""


RESERVED = frozenset(
    [p.name for p in PRIMITIVES.values()]
    + [
        "addcmul",
        "cosigmoid",
        "fma",
        "lerp",
        "ratio",
        "sqrt",
        "square",
        "tanh_backward",
        "zero",
    ]
    + [
        s + v
        for s in ("diagonal", "head", "dense", "right", "contract")
        for v in ("", "_t", "_abs")
    ]
)
"""Names that printed programs call, so that no symbol of a Spec may have them."""


def primitive_of(expr: sympy.Basic) -> Primitive | None:
    """The table row of ``expr``'s head function, or None if it is not a primitive call."""
    return PRIMITIVES.get(type(expr))
