"""Interval arithmetic on NumPy arrays, just as much as the bounds of a Spec need.

Ends are rounded outwards wherever an operation is not exact, so that an interval holds the exact
values whatever their size.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

SLACK = 2.0**-47
"""More than the relative error of NumPy's powers and elementary functions in float64."""


def total_above(a: ArrayLike, b: ArrayLike) -> np.ndarray:
    """``a + b``, rounded upwards where it is not exact."""
    a, b = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        total = np.asarray(a + b)
        return np.where(_sum_is_exact(a, b, total), total, np.nextafter(total, np.inf))


def product_above(a: ArrayLike, b: ArrayLike) -> np.ndarray:
    """``a·b``, rounded upwards where a factor is not 0, ±1 or infinite."""
    a, b = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        product = np.asarray(a * b)
    return np.where(_product_is_exact(a, b), product, np.nextafter(product, np.inf))


def above(x: ArrayLike) -> np.ndarray:
    """An upper bound of what ``x`` is when it is computed right to :data:`SLACK`."""
    x = np.asarray(x, dtype=np.float64)
    return np.nextafter(x + SLACK * np.abs(x), np.inf)


def below(x: ArrayLike) -> np.ndarray:
    """A lower bound, as :func:`above`."""
    return -above(-np.asarray(x, dtype=np.float64))


def _outwards(lo: np.ndarray, hi: np.ndarray, exact: Any) -> tuple[np.ndarray, np.ndarray]:
    """The next numbers outside, where ``exact`` (of both ends) does not say that there is no need."""
    lo_exact, hi_exact = exact
    return (
        np.where(lo_exact, lo, np.nextafter(lo, -np.inf)),
        np.where(hi_exact, hi, np.nextafter(hi, np.inf)),
    )


def _sum_is_exact(a: np.ndarray, b: np.ndarray, total: np.ndarray) -> np.ndarray:
    """Whether ``total`` is ``a + b`` on real numbers (Knuth's two-sum), or infinite as one of them."""
    part = total - a
    lost = (a - (total - part)) + (b - part)
    return (lost == 0) | np.isinf(a) | np.isinf(b)


def _power_of_two(x: np.ndarray) -> np.ndarray:
    """Whether ``x`` and its reciprocal are ± a power of two in the normal range."""
    mantissa, exponent = np.frexp(np.abs(x))
    return (mantissa == 0.5) & (np.abs(exponent) < 1000)


def _product_is_exact(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Whether ``a·b`` needs no rounding, in the cases that bounds consist of: a factor 0, ±1 or
    infinite."""
    plain = [(x == 0) | (np.abs(x) == 1) | np.isinf(x) for x in (a, b)]
    return plain[0] | plain[1]


class Interval:
    """The set ``[lo, hi]``, elementwise over arrays (infinite ends are allowed)."""

    __slots__ = ("hi", "lo")

    def __init__(self, lo: ArrayLike, hi: ArrayLike | None = None):
        self.lo = np.asarray(lo, dtype=np.float64)
        self.hi = self.lo if hi is None else np.asarray(hi, dtype=np.float64)

    @staticmethod
    def of(value: Interval | ArrayLike) -> Interval:
        return value if isinstance(value, Interval) else Interval(value)

    @property
    def magnitude(self) -> np.ndarray:
        """Elementwise ``max(|lo|, |hi|)``."""
        return np.maximum(np.abs(self.lo), np.abs(self.hi))

    def __add__(self, other: Interval | ArrayLike) -> Interval:
        other = Interval.of(other)
        with np.errstate(invalid="ignore", over="ignore"):
            lo, hi = self.lo + other.lo, self.hi + other.hi
            exact = (
                _sum_is_exact(self.lo, other.lo, lo),
                _sum_is_exact(self.hi, other.hi, hi),
            )
        return Interval(*_outwards(lo, hi, exact))

    __radd__ = __add__

    def __neg__(self) -> Interval:
        return Interval(-self.hi, -self.lo)

    def __mul__(self, other: Interval | ArrayLike) -> Interval:
        other = Interval.of(other)
        least, most = [], []
        for a in (self.lo, self.hi):
            for b in (other.lo, other.hi):
                with np.errstate(invalid="ignore", over="ignore", under="ignore"):
                    product = np.asarray(a * b)
                # 0 * inf is 0 here: a factor that is exactly zero makes the product zero.
                product = np.where((a == 0) | (b == 0), 0.0, product)
                exact = _product_is_exact(a, b)
                lo, hi = _outwards(product, product, (exact, exact))
                least.append(lo)
                most.append(hi)
        return Interval(np.minimum.reduce(least), np.maximum.reduce(most))

    __rmul__ = __mul__

    def reciprocal(self) -> Interval:
        straddles = (self.lo <= 0) & (self.hi >= 0)
        with np.errstate(divide="ignore", over="ignore"):
            lo, hi = np.asarray(1 / self.hi), np.asarray(1 / self.lo)
        exact = tuple(_power_of_two(x) | np.isinf(x) for x in (self.hi, self.lo))
        lo, hi = _outwards(lo, hi, exact)
        return Interval(np.where(straddles, -np.inf, lo), np.where(straddles, np.inf, hi))

    def power(self, exponent: Any) -> Interval:
        """``x ** exponent`` for an integer, or for any real exponent on a non-negative base."""
        if exponent < 0:
            return self.power(-exponent).reciprocal()
        if exponent == int(exponent):
            a, b = _raised(self.lo, int(exponent)), _raised(self.hi, int(exponent))
            least = np.minimum(a.lo, b.lo)
            if int(exponent) % 2 == 0:
                least = np.where((self.lo <= 0) & (self.hi >= 0), 0.0, np.maximum(least, 0.0))
            return Interval(least, np.maximum(a.hi, b.hi))
        ends = (np.maximum(end, 0.0) for end in (self.lo, self.hi))
        a, b = (_raised(end, float(exponent)) for end in ends)
        return Interval(np.maximum(a.lo, 0.0), b.hi)


def _multiplied(x: np.ndarray, exponent: int) -> np.ndarray:
    power = x
    for _ in range(exponent - 1):
        power = power * x
    return power


def _raised(x: np.ndarray, exponent: float) -> Interval:
    """A power of single numbers; 0, ±1, infinite ones and small powers of integers are exact."""
    with np.errstate(over="ignore", under="ignore"):
        power = _multiplied(x, int(exponent)) if exponent in (1, 2, 3) else x**exponent
    exact = (x == 0) | (np.abs(x) == 1) | np.isinf(x)
    if exponent in (1, 2, 3):
        exact |= (np.rint(x) == x) & (np.abs(power) < 2.0**53)
    # The exponent may itself be rounded, which moves the power by its logarithm.
    moved = 1.0 if exponent == int(exponent) else 1.0 + np.abs(np.log(np.where(exact, 1.0, x)))
    wide = SLACK * moved * np.where(np.isinf(power), 0.0, np.abs(power))
    lo, hi = np.nextafter(power - wide, -np.inf), np.nextafter(power + wide, np.inf)
    return Interval(np.where(exact, power, lo), np.where(exact, power, hi))
