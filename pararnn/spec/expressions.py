"""SymPy expressions as Python text, plain or with PyTorch's fused operations."""

from __future__ import annotations

from collections.abc import Sequence

import sympy

from .primitives import primitive_of


class tanh_backward(sympy.Function):
    """``g·(1−y²)``, what differentiating ``y = tanh(x)`` gives, as one operation."""


def with_slopes(expr: sympy.Expr) -> sympy.Expr:
    """Recognise this derivative in products, before common subexpressions break them up."""
    if not expr.args:
        return expr
    args = [with_slopes(a) for a in expr.args]
    if not isinstance(expr, sympy.Mul) or any(a.is_number for a in args):
        return expr.func(*args)
    for slope in args:
        square = 1 - slope
        if isinstance(square, sympy.Pow) and square.base.is_Symbol and square.exp == 2:
            return tanh_backward(sympy.Mul(*[f for f in args if f != slope]), square.base)
    return expr.func(*args)


class ExpressionPrinter:
    """SymPy expression → Python expression text, with operator precedence handled explicitly."""

    def __init__(self, fused: bool = False, rank: dict[sympy.Symbol, int] | None = None):
        self.fused = fused
        self.rank = rank  # when symbols become known, to use the latest in the last operation

    def __call__(self, expr: sympy.Expr) -> str:
        return self._print(expr)[0]

    def _atom(self, expr: sympy.Expr) -> str:
        text, level = self._print(expr)
        return text if level == 3 else f"({text})"

    def _factor(self, expr: sympy.Expr) -> str:
        text, level = self._print(expr)
        return text if level >= 2 else f"({text})"

    def _print(self, expr: sympy.Expr) -> tuple[str, int]:
        """Text and binding strength: 1 sum, 2 product, 3 atom."""
        if isinstance(expr, sympy.Symbol):
            return expr.name, 3
        if self.fused and expr.is_number and not isinstance(expr, sympy.Integer | sympy.Float):
            value = float(expr)
            return repr(value), 3 if value >= 0 else 1
        if isinstance(expr, sympy.Integer):
            return str(int(expr)), 3 if expr >= 0 else 1
        if isinstance(expr, sympy.Rational):
            return f"ratio({expr.p}, {expr.q})", 3
        if isinstance(expr, sympy.Float):
            return repr(float(expr)), 3 if expr >= 0 else 1
        if isinstance(expr, sympy.Add):
            return self._sum(expr)
        if isinstance(expr, sympy.Mul):
            return self._product(expr)
        if isinstance(expr, sympy.Pow):
            return self._power(expr)
        primitive = primitive_of(expr)
        if primitive is not None:
            opposite = -expr.args[0]
            if self.rank is not None and primitive.name == "sigmoid" and opposite.is_Symbol:
                # From the exponential that σ(x) is made of, if that is there.
                return f"cosigmoid({opposite.name})", 3
            return self._call(primitive.name, *expr.args), 3
        if isinstance(expr, tanh_backward):
            return f"tanh_backward({', '.join(map(self, expr.args))})", 3
        raise NotImplementedError(
            f"got {type(expr).__name__} in {expr}, expected sums, products, powers and the "
            "functions of pararnn.spec.primitives; add a row to that table to extend the language."
        )

    def _call(self, name: str, argument: sympy.Expr, *others: sympy.Expr) -> str:
        if others:
            return f"{name}({', '.join(map(self, (argument, *others)))})"
        text, level = self._print(argument)
        # Sums and products are fresh and not needed by autograd, so they may be overwritten.
        fresh = self.fused and isinstance(argument, sympy.Add | sympy.Mul)
        fresh = fresh and not argument.is_number
        if fresh and name in ("sigmoid", "tanh", "exp", "expm1", "log", "log1p", "sin", "cos"):
            return f"{text if level == 3 else f'({text})'}.{name}_()"
        return f"{name}({text})"

    def _sum(self, expr: sympy.Add) -> tuple[str, int]:
        terms = sorted(expr.args, key=_sum_order)
        if self.rank is not None:
            contracted = self._contracted(terms)
            if contracted:
                return contracted, 3
        if self.fused:
            fused = self._fused_sum(terms)
            if fused:
                return fused, 3
        text = self._print(terms[0])[0]
        for term in terms[1:]:
            coefficient, rest = term.as_coeff_Mul()
            if coefficient.is_negative:
                text += f" - {self._factor(-coefficient * rest)}"
            else:
                text += f" + {self._factor(term)}"
        return text, 1

    def _known(self, expr: sympy.Expr) -> int:
        """When the last of an expression's symbols is known."""
        return max((self.rank.get(v, 0) for v in expr.free_symbols), default=-1)  # type: ignore

    def _contracted(self, terms: list[sympy.Expr]) -> str | None:
        """``fma(a, b, rest)`` for the product ``a*b`` that is known last, so that one operation
        is left on the longest chain."""
        late = max(terms, key=self._known)
        rest = sympy.Add(*[t for t in terms if t != late])
        if not isinstance(late, sympy.Mul) or not rest.free_symbols:
            return None
        factors = [f for part in late.args for f in sympy.Mul.make_args(part)]
        if any(f.is_number or (f.is_Pow and f.exp.is_negative) for f in factors):
            return None
        *head, last = sorted(factors, key=self._known)
        left = sympy.Mul(*head, evaluate=False) if len(head) > 1 else head[0]
        return f"fma({self(left)}, {self(last)}, {self(rest)})"

    def _fused_sum(self, terms: Sequence[sympy.Expr]) -> str | None:
        """``lerp``, or a first summand with all following products added by ``addcmul``."""
        blend = _convex_blend(terms) if len(terms) == 2 else None
        if blend and not any(part.is_number for part in blend):
            start, end, weight = blend
            return f"lerp({self(start)}, {self(end)}, {self(weight)})"
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
            left = sympy.Mul(*head, evaluate=False) if len(head) > 1 else head[0]
            text = f"addcmul({text}, {self(left)}, {self(last)})"
        return text

    def _product(self, expr: sympy.Mul) -> tuple[str, int]:
        numerator, denominator = [], []
        for factor in expr.args:
            base, exponent = factor.as_base_exp()
            if exponent.is_number and exponent.is_negative and not isinstance(factor, sympy.exp):
                denominator.append(base**-exponent)
            else:
                numerator.append(factor)
        if self.rank is not None:
            numerator = sorted(numerator, key=self._known)
        if numerator and numerator[0] == -1 and len(numerator) > 1:
            rest = sympy.Mul(*numerator[1:], *(1 / d for d in denominator))
            return f"-{self._factor(rest)}", 1
        text = "*".join(self._factor(f) for f in numerator) if numerator else "1"
        for d in denominator:
            text += f"/{self._atom(d)}"
        return text, 2

    def _power(self, expr: sympy.Pow) -> tuple[str, int]:
        base, exponent = expr.args
        if exponent == 2:
            return f"square({self(base)})", 3
        if exponent == sympy.Rational(1, 2):
            return f"sqrt({self(base)})", 3
        if exponent.is_number and exponent.is_negative:
            return f"1/{self._atom(base**-exponent)}", 2
        if self.rank is not None:
            return self._multiplied(base, exponent)
        return f"{self._atom(base)}**{self._atom(exponent)}", 3

    def _multiplied(self, base: sympy.Expr, exponent: sympy.Expr) -> tuple[str, int]:
        """A positive power by products and a square root, where there is no ``**``."""
        if not exponent.is_number or float(2 * exponent) != int(2 * exponent):
            raise NotImplementedError(
                f"got the power {base**exponent}, expected an integer or half of one as exponent."
            )
        whole, half = divmod(int(2 * exponent), 2)
        if half:
            return f"{self._factor(base**whole)}*sqrt({self(base)})", 2
        if whole % 2:
            return f"{self._atom(base)}*{self._factor(base ** (whole - 1))}", 2
        return f"square({self(base ** (whole // 2))})", 3


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
