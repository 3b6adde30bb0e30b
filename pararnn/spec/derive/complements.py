"""What is left beside a saturated stage: ``1 − σ(x)`` is printed as ``σ(−x)``.

A gate ``z = σ(x)`` near 1 is rounded to a few bits of ``1 − z``, or to none. Whatever a Spec or its
derivatives write as ``1 − z`` (and as ``a − z·a``) is therefore printed as a value of its own, the
*complement* of ``z``, which is accurate relative to itself::

    1 − σ(x) = σ(−x),      1 + expm1(x) = exp(x)

This is done as programs are printed, for all of them; equations and derivatives on the page are not
changed. The derivative ``1 − y²`` of ``y = tanh(x)`` stays as it is, right to a rounding of 1: PyTorch
has it as one operation of ``y``, and an accurate one would need ``x`` too, and several more.
"""

from __future__ import annotations

from collections.abc import Sequence

import sympy

from ..functions import expm1, sigmoid


class Complements:
    """Stages ``y`` with ``1 + c·y = r``: the numbers ``c``, ±1, and the symbols ``r``, by ``y``."""

    def __init__(self) -> None:
        self.of: dict[sympy.Symbol, tuple[int, sympy.Expr]] = {}
        self._calls: dict[sympy.Expr, sympy.Symbol] = {}

    def add(self, symbol: sympy.Symbol, expr: sympy.Expr) -> sympy.Expr | None:
        """Take note of a stage. A complement that is no stage yet is returned as an expression, to
        be assigned to :meth:`symbol_of` the stage."""
        sign, inner = expr.as_coeff_Mul()
        if inner in self.of and abs(sign) == 1:
            c, rest = self.of[inner]
            self.of[symbol] = (int(c * sign), rest)
            return None
        self._calls[expr] = symbol
        if isinstance(expr, sigmoid):
            c, complement = -1, sigmoid(-expr.args[0])
        elif isinstance(expr, expm1):
            c, complement = 1, sympy.exp(expr.args[0])
        else:
            return None
        known = self._calls.get(complement)
        rest = self.symbol_of(symbol) if known is None else known
        self.of[symbol], self.of[rest] = (c, rest), (-1, -c * symbol)
        return complement if known is None else None

    @staticmethod
    def symbol_of(symbol: sympy.Symbol) -> sympy.Symbol:
        """The name of a stage's complement in printed programs."""
        return sympy.Symbol(f"_{symbol.name}_co", real=True)

    def __call__(self, expr: sympy.Expr) -> sympy.Expr:
        """The expression with complements in the place of differences."""
        args = [self(a) for a in expr.args]
        if isinstance(expr, sympy.Add):
            args = self._paired(args)
        return expr if list(expr.args) == args else expr.func(*args)

    def _paired(self, terms: Sequence[sympy.Expr]) -> list[sympy.Expr]:
        """A sum's terms, ``a`` and ``c·a·y`` as one."""
        for term in terms:
            factors = sympy.Mul.make_args(term)
            for y in factors:
                if y in self.of:
                    c, rest = self.of[y]
                    a = c * sympy.Mul(*[f for f in factors if f != y])
                    if a in terms:
                        others = [t for t in terms if t not in (term, a)]
                        return self._paired([*others, a * rest])
        return list(terms)
