"""Expressions for ``@triton.jit``: the value that is known last in the last operation."""

from __future__ import annotations

from collections.abc import Sequence

import sympy

from .python import PlainPrinter, _multiplied


class TritonPrinter(PlainPrinter):
    """Plain text with ``fma``, and with products in the place of ``**``."""

    def _known(self, expr: sympy.Expr) -> int:
        """When the last of an expression's symbols is known."""
        return max((self.depth.get(v, 0) for v in expr.free_symbols), default=-1)

    def _call(self, name: str, args: Sequence[sympy.Expr]) -> str:
        opposite = -args[0]
        if name == "sigmoid" and opposite.is_Symbol:
            # From the exponential that σ(x) is made of, if that is there.
            return super()._call("cosigmoid", [opposite])
        return super()._call(name, args)

    def _sum(self, terms: Sequence[sympy.Expr]) -> tuple[str, int]:
        """``fma(a, b, rest)`` for the product ``a*b`` that is known last, so that one operation
        is left on the longest chain."""
        late = max(terms, key=self._known)
        rest = sympy.Add(*[t for t in terms if t != late])
        if isinstance(late, sympy.Mul) and rest.free_symbols:
            factors = [f for part in late.args for f in sympy.Mul.make_args(part)]
            if not any(f.is_number or (f.is_Pow and f.exp.is_negative) for f in factors):
                *head, last = self._ordered(factors)
                return f"fma({self(_multiplied(head))}, {self(last)}, {self(rest)})", 3
        return super()._sum(terms)

    def _ordered(self, factors: list[sympy.Expr]) -> list[sympy.Expr]:
        return sorted(factors, key=self._known)

    def _raised(self, base: sympy.Expr, exponent: sympy.Expr) -> tuple[str, int]:
        """A positive power by products and a square root."""
        if not exponent.is_number or float(2 * exponent) != int(2 * exponent):
            raise NotImplementedError(
                f"got the power {base**exponent}, expected an integer or half of one as exponent."
            )
        whole, half = divmod(int(2 * exponent), 2)
        if half:
            return f"{self._at_least(2, base**whole)}*sqrt({self(base)})", 2
        if whole % 2:
            return f"{self._at_least(3, base)}*{self._at_least(2, base ** (whole - 1))}", 2
        return f"square({self(base ** (whole // 2))})", 3
