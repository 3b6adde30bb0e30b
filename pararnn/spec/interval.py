"""Interval arithmetic on NumPy arrays, just as much as the bounds of a Spec need."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike


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
        return Interval(self.lo + other.lo, self.hi + other.hi)

    __radd__ = __add__

    def __neg__(self) -> Interval:
        return Interval(-self.hi, -self.lo)

    def __mul__(self, other: Interval | ArrayLike) -> Interval:
        other = Interval.of(other)
        with np.errstate(invalid="ignore"):
            products = [a * b for a in (self.lo, self.hi) for b in (other.lo, other.hi)]
        # 0 * inf is 0 here: a factor that is exactly zero makes the product zero.
        products = [np.where(np.isnan(p), 0.0, p) for p in products]
        return Interval(np.minimum.reduce(products), np.maximum.reduce(products))

    __rmul__ = __mul__

    def reciprocal(self) -> Interval:
        straddles = (self.lo <= 0) & (self.hi >= 0)
        with np.errstate(divide="ignore"):
            return Interval(
                np.where(straddles, -np.inf, 1 / self.hi), np.where(straddles, np.inf, 1 / self.lo)
            )

    def power(self, exponent: Any) -> Interval:
        """``x ** exponent`` for an integer, or for any real exponent on a non-negative base."""
        if exponent < 0:
            return self.power(-exponent).reciprocal()
        if exponent == int(exponent):
            a, b = self.lo ** int(exponent), self.hi ** int(exponent)
            lo = np.minimum(a, b)
            if int(exponent) % 2 == 0:
                lo = np.where((self.lo <= 0) & (self.hi >= 0), 0.0, lo)
            return Interval(lo, np.maximum(a, b))
        e = float(exponent)
        return Interval(np.maximum(self.lo, 0.0) ** e, np.maximum(self.hi, 0.0) ** e)
