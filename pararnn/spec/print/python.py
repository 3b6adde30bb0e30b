"""Expressions as Python text: plain, or with PyTorch's fused operations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import sympy

from ..functions import primitive_of
from ..program import Operation, tanh_backward

IN_PLACE = frozenset(("sigmoid", "tanh", "exp", "expm1", "log", "log1p", "sin", "cos"))
"""Functions that can overwrite their argument."""


class PlainPrinter:
    """SymPy expression → Python expression text, with operator precedence handled explicitly.

    ``depth`` says of symbols how late they are known. Text has a binding strength: 1 sum, 2 product,
    3 atom.
    """

    def __init__(self, depth: Mapping[sympy.Symbol, int]):
        self.depth = depth

    def __call__(self, expr: sympy.Expr) -> str:
        return self._print(expr)[0]

    def change(self, expr: sympy.Expr) -> sympy.Expr:
        """What this dialect has an operation for, before subexpressions are looked for."""
        return expr

    def into(self, text: str) -> str:
        """A call that can write to memory that the caller gives, which is named ``_out``."""
        return text

    def _at_least(self, level: int, expr: sympy.Expr) -> str:
        text, own = self._print(expr)
        return text if own >= level else f"({text})"

    def _print(self, expr: sympy.Expr) -> tuple[str, int]:
        if isinstance(expr, sympy.Symbol):
            return expr.name, 3
        if isinstance(expr, sympy.Integer | sympy.Float):
            value = int(expr) if expr.is_Integer else float(expr)
            return repr(value), 3 if expr >= 0 else 1
        if expr.is_number and not isinstance(expr, Operation):
            number = self._number(expr)
            if number:
                return number
        if isinstance(expr, sympy.Add):
            return self._sum(sorted(expr.args, key=_sum_order))
        if isinstance(expr, sympy.Mul):
            return self._product(expr)
        if isinstance(expr, sympy.Pow):
            return self._power(expr)
        primitive = primitive_of(expr)
        if primitive is not None:
            return self._call(primitive.name, expr.args), 3
        if isinstance(expr, Operation):
            return self._call(type(expr).__name__, expr.args), 3
        raise NotImplementedError(
            f"got {type(expr).__name__} in {expr}, expected sums, products, powers and the "
            "functions of pararnn.spec.functions; add a row to that table to extend the language."
        )

    def _number(self, expr: sympy.Expr) -> tuple[str, int] | None:
        return (f"ratio({expr.p}, {expr.q})", 3) if expr.is_Rational else None

    def _call(self, name: str, args: Sequence[sympy.Expr]) -> str:
        return f"{name}({', '.join(map(self, args))})"

    def _sum(self, terms: Sequence[sympy.Expr]) -> tuple[str, int]:
        text = self(terms[0])
        for term in terms[1:]:
            coefficient, rest = term.as_coeff_Mul()
            if coefficient.is_negative:
                text += f" - {self._at_least(2, -coefficient * rest)}"
            else:
                text += f" + {self._at_least(2, term)}"
        return text, 1

    def _ordered(self, factors: list[sympy.Expr]) -> list[sympy.Expr]:
        return factors

    def _product(self, expr: sympy.Mul) -> tuple[str, int]:
        numerator, denominator = [], []
        for factor in expr.args:
            base, exponent = factor.as_base_exp()
            if exponent.is_number and exponent.is_negative and not isinstance(factor, sympy.exp):
                denominator.append(base**-exponent)
            else:
                numerator.append(factor)
        numerator = self._ordered(numerator)
        if numerator and numerator[0] == -1 and len(numerator) > 1:
            rest = sympy.Mul(*numerator[1:], *(1 / d for d in denominator))
            return f"-{self._at_least(2, rest)}", 1
        text = "*".join(self._at_least(2, f) for f in numerator) if numerator else "1"
        for d in denominator:
            text += f"/{self._at_least(3, d)}"
        return text, 2

    def _power(self, expr: sympy.Pow) -> tuple[str, int]:
        base, exponent = expr.args
        if exponent == 2:
            return f"square({self(base)})", 3
        if exponent == sympy.Rational(1, 2):
            return f"sqrt({self(base)})", 3
        if exponent.is_number and exponent.is_negative:
            return f"1/{self._at_least(3, base**-exponent)}", 2
        return self._raised(base, exponent)

    def _raised(self, base: sympy.Expr, exponent: sympy.Expr) -> tuple[str, int]:
        return f"{self._at_least(3, base)}**{self._at_least(3, exponent)}", 3


class TorchPrinter(PlainPrinter):
    """With ``addcmul``, ``lerp`` and ``tanh_backward``, and in place on temporaries just made."""

    def change(self, expr: sympy.Expr) -> sympy.Expr:
        if not expr.args:
            return expr
        args = [self.change(a) for a in expr.args]
        if isinstance(expr, sympy.Mul) and not any(a.is_number for a in args):
            for slope in args:
                square = 1 - slope
                if isinstance(square, sympy.Pow) and square.base.is_Symbol and square.exp == 2:
                    rest = sympy.Mul(*[f for f in args if f != slope])
                    return tanh_backward(rest, square.base)
        return expr if list(expr.args) == args else expr.func(*args)

    def into(self, text: str) -> str:
        call = text.startswith(("lerp(", "addcmul(")) and not text.endswith("_()")
        return f"{text[:-1]}, out=_out)" if call else text

    def _number(self, expr: sympy.Expr) -> tuple[str, int]:
        value = float(expr)
        return repr(value), 3 if value >= 0 else 1

    def _call(self, name: str, args: Sequence[sympy.Expr]) -> str:
        first = args[0]
        # Sums and products are fresh and not needed by autograd, so they may be overwritten.
        fresh = isinstance(first, sympy.Add | sympy.Mul) and not first.is_number
        if fresh and name in IN_PLACE:
            return f"{self._at_least(3, first)}.{name}_()"
        return super()._call(name, args)

    def _sum(self, terms: Sequence[sympy.Expr]) -> tuple[str, int]:
        text = self._fused(terms)
        return (text, 3) if text else super()._sum(terms)

    def _fused(self, terms: Sequence[sympy.Expr]) -> str | None:
        """``lerp``, or a first summand with all following products added by ``addcmul``."""
        blend = _convex_blend(terms) if len(terms) == 2 else None
        if blend and not any(part.is_number for part in blend):
            return f"lerp({', '.join(map(self, blend))})"
        products = [
            t for t in terms if isinstance(t, sympy.Mul) and not any(a.is_number for a in t.args)
        ]
        others = [t for t in terms if t not in products]
        if not others:
            others, products = products[:1], products[1:]
        base = sympy.Add(*others)
        if not products or base.is_number or base.as_coeff_Mul()[0].is_negative:
            return None
        text = self(base)
        for product in products:
            *head, last = product.args
            text = f"addcmul({text}, {self(_multiplied(head))}, {self(last)})"
        return text


def _multiplied(factors: Sequence[sympy.Expr]) -> sympy.Expr:
    """A product in the order given."""
    return sympy.Mul(*factors, evaluate=False) if len(factors) > 1 else factors[0]


def _sum_order(term: sympy.Expr) -> tuple[bool, bool, str]:
    """Constants first (``1 - z``), negative terms after positive ones."""
    negative = bool(term.as_coeff_Mul()[0].is_negative)
    return (negative, not term.is_number, sympy.default_sort_key(term).__repr__())


def _convex_blend(terms: Sequence[sympy.Expr]) -> tuple[sympy.Expr, sympy.Expr, sympy.Expr] | None:
    """Recognise ``(1-w)*a + w*b`` for a symbol ``w`` and return ``(a, b, w)``."""
    for first, second in (terms, terms[::-1]):
        if not (isinstance(first, sympy.Mul) and isinstance(second, sympy.Mul)):
            continue
        for weight in sorted(second.free_symbols & set(second.args), key=str):
            if 1 - weight in first.args:
                start = sympy.Mul(*[a for a in first.args if a != 1 - weight])
                end = sympy.Mul(*[a for a in second.args if a != weight])
                return start, end, weight
    return None
