"""LaTeX of a Spec: the author's order, time indices, and the field's usual operators."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import sympy

from ..declarations import Linear, Read
from ..derive.factorization import factorize, operand_symbol
from ..functions import primitive_of

if TYPE_CHECKING:
    from ..spec import Spec


@dataclass(frozen=True)
class Equation:
    """One numbered line of a card: the symbol that it defines, and its LaTeX."""

    name: str
    latex: str


class LatexPrinter:
    """Prints expressions of one Spec. ``symbols`` maps a SymPy symbol to LaTeX text."""

    def __init__(self, spec: Spec, symbols: Callable[[sympy.Symbol], tuple[str, int]]):
        self.spec = spec
        self.symbols = symbols

    def __call__(self, expr: sympy.Expr) -> str:
        return self._print(expr)[0]

    def _wrap(self, expr: sympy.Expr, at_least: int) -> str:
        text, level = self._print(expr)
        return text if level >= at_least else f"({text})"

    def _print(self, expr: sympy.Expr) -> tuple[str, int]:
        """LaTeX and binding strength: 1 sum, 2 product, 3 atom."""
        if isinstance(expr, sympy.Symbol):
            return self.symbols(expr)
        if isinstance(expr, sympy.Float) and float(expr).is_integer():
            expr = sympy.Integer(int(expr))
        if isinstance(expr, sympy.Rational):
            text = sympy.latex(expr)
            return text, 3 if expr >= 0 else 1
        if isinstance(expr, sympy.Add):
            return self._sum(expr), 1
        if isinstance(expr, sympy.Mul):
            return self._product(expr)
        if isinstance(expr, sympy.Pow):
            return self._power(expr)
        primitive = primitive_of(expr)
        if primitive is not None:
            return rf"{primitive.latex}({', '.join(map(self, expr.args))})", 3
        return sympy.latex(expr), 1

    def _sum(self, expr: sympy.Add) -> str:
        text = ""
        for i, term in enumerate(expr.args):
            sign, body = _signed(term)
            printed = self._wrap(body, 2) if sign < 0 else self._print(body)[0]
            if i == 0:
                text = printed if sign > 0 else f"-{printed}"
            else:
                text += f" {'+' if sign > 0 else '-'} {printed}"
        return text

    def _product(self, expr: sympy.Mul) -> tuple[str, int]:
        sign, body = _signed(expr)
        if sign < 0:
            return f"-{self._wrap(body, 2)}", 1
        above, below = [], []
        for factor in _flat(expr):
            base, exponent = (
                factor.args if isinstance(factor, sympy.Pow) else (factor, sympy.Integer(1))
            )
            if exponent.is_number and exponent.is_negative:
                below.append(base if exponent == -1 else sympy.Pow(base, -exponent))
            else:
                above.append(factor)
        text = self._factors(above) if above else "1"
        if below:
            return rf"\frac{{{text}}}{{{self._factors(below)}}}", 3
        return text, 2

    def _factors(self, factors: list[sympy.Expr]) -> str:
        if len(factors) == 1:
            return self(factors[0])
        axes = [_shown(self.spec, f) for f in factors]
        text = self._wrap(factors[0], 3)
        for left, right, factor in zip(axes, axes[1:], factors[1:], strict=False):
            printed = self._wrap(factor, 3)
            if left and right and not set(left) & set(right):
                text += rf" {printed}^\top"
                continue
            glue = r" \odot " if left and right else r"\, " if text[-1] in ")}" else " "
            text += glue + printed
        return text

    def _power(self, expr: sympy.Pow) -> tuple[str, int]:
        base, exponent = expr.args
        if exponent == sympy.Rational(1, 2):
            return rf"\sqrt{{{self(base)}}}", 3
        if exponent.is_number and exponent.is_negative and not base.is_number:
            below = base if exponent == -1 else sympy.Pow(base, -exponent)
            return rf"\frac{{1}}{{{self(below)}}}", 3
        # On a matrix state, an exponent could be read as a matrix power.
        mark = r"\odot " if len(_shown(self.spec, base)) > 1 else ""
        return rf"{self._wrap(base, 3)}^{{{mark}{self(exponent)}}}", 3


def _signed(term: sympy.Expr) -> tuple[int, sympy.Expr]:
    """Split a leading minus sign off a term, keeping the author's order of the rest."""
    if isinstance(term, sympy.Mul) and term.args[0].is_number and term.args[0].is_negative:
        first, *rest = term.args
        if first != -1:
            rest = [-first, *rest]
        body = rest[0] if len(rest) == 1 else sympy.Mul(*rest, evaluate=False)
        return -1, body
    if term.is_number and term.is_negative:
        return -1, -term
    return 1, term


def _shown(spec: Spec, expr: sympy.Expr) -> tuple[str, ...]:
    """Axes of an expression on the page, which shows one of several parallel copies."""
    return tuple(a for a in spec.axes_of(expr) if a not in spec.parallel)


def _flat(product: sympy.Mul) -> tuple[sympy.Expr, ...]:
    """Factors of ``a * b * c``, which Python groups from the left."""
    first, *rest = product.args
    return (*(_flat(first) if isinstance(first, sympy.Mul) else (first,)), *rest)


Factor = tuple[str, int, tuple[str, ...]]
"""LaTeX of a factor, its binding strength and its axes."""


def _sum_over(axis: str, factors: list[Factor]) -> str:
    """The sum over one axis of a product: of two vectors, or of a vector and a matrix, as a
    product of theirs (all vectors are columns); else with a sign of summation."""
    texts = [text if level >= 3 else f"({text})" for text, level, _ in factors]
    if len(factors) == 2:
        (left, right), (a, b) = texts, (axes for *_, axes in factors)
        if a == b == (axis,):
            return rf"{left}^\top {right}"
        for vector, matrix, axes in ((left, right, b), (right, left, a)):
            if (a if vector is left else b) == (axis,) and len(axes) == 2 and axis in axes:
                mark = r"^\top" if axes[0] == axis else ""
                return rf"{matrix}{mark} {vector}"
    return rf"\sum_{{{axis}}} {' '.join(texts)}"


def _apply(structure: str, matrix: str, operand: str, level: int) -> str:
    wrapped = operand if level >= 3 else f"({operand})"
    if structure == "diagonal":
        return rf"{matrix} \odot {wrapped}"
    if structure == "right":
        return f"{wrapped} {matrix}"
    return f"{matrix} {wrapped}"


def _stage_symbols(spec: Spec) -> Callable[[sympy.Symbol], tuple[str, int]]:
    """Symbols as the page shows them: time indices, inline affine drives and linear maps."""
    table: dict[sympy.Symbol, tuple[str, int]] = {}
    printer = LatexPrinter(spec, lambda s: table.get(s, (s.name, 3)))
    for slot in spec.slots:
        table[slot.symbol] = (_timed(slot.latex, "t-1"), 3)
        table[slot.next_symbol] = (_timed(slot.latex, "t"), 3)
    for drive in spec.drive_list:
        table[drive.symbol] = (drive.affine, 1) if drive.inline else (_timed(drive.latex, "t"), 3)
    for param in spec.param_list:
        table[param.symbol] = (param.latex, 3)
    for stage in spec.stages:
        if isinstance(stage, Linear) and stage.map.structure == "contract":
            table[stage.symbol] = (_contraction(spec, printer, stage), 2)
        elif isinstance(stage, Linear):
            text, level = printer._print(stage.authored)
            table[stage.symbol] = (_apply(stage.map.structure, stage.map.latex, text, level), 2)
        elif stage.hidden:
            table[stage.symbol] = printer._print(stage.expr)
        elif stage.symbol not in table:
            table[stage.symbol] = (_timed(stage.latex, "t"), 3)
    return lambda s: table[s]


def _contraction(spec: Spec, printer: LatexPrinter, stage: Linear | Read) -> str:
    expr = stage.authored
    factors = _flat(expr) if isinstance(expr, sympy.Mul) else (expr,)
    return _sum_over(stage.map.latex, [(*printer._print(f), _shown(spec, f)) for f in factors])


def _timed(latex: str, index: str) -> str:
    """``z`` → ``z_t``, ``h`` → ``h_{t-1}``; a subscript of its own is kept in front of the time."""
    base, _, sub = latex.partition("_")
    sub = sub[1:-1] if sub.startswith("{") else sub
    inner = f"{sub},{index}" if sub else index
    return f"{base}_{inner}" if len(inner) == 1 else f"{base}_{{{inner}}}"


def equations(spec: Spec) -> list[Equation]:
    """Every line that the page shows, in the author's order."""
    symbols = _stage_symbols(spec)
    printer = LatexPrinter(spec, symbols)
    lines = [
        Equation(d.name, f"{_timed(d.latex, 't')} = {d.affine}")
        for d in spec.drive_list
        if not d.inline and not d.given
    ]
    for stage in spec.stages:
        if isinstance(stage, Linear) or stage.hidden:
            continue
        name = stage.symbol.name.removesuffix("_next")
        lines.append(Equation(name, f"{symbols(stage.symbol)[0]} = {printer(stage.authored)}"))
    read = spec.readout
    if read is not None:
        text = f"{_timed(read.latex, 't')} = {_contraction(spec, printer, read)}"
        lines.append(Equation(read.symbol.name, text))
    return lines


def jacobian_action(spec: Spec) -> list[str]:
    r"""The factorized Jacobian, as the perturbation ``\dot h_t`` that ``\dot h_{t-1}`` causes."""
    nodes = _written_apart(spec)
    edges = factorize(spec, at=tuple(nodes)).edges
    dots = {s.symbol: (_dotted(s.latex, "t-1"), 3) for s in spec.slots}
    printer = LatexPrinter(spec, _stage_symbols(spec))

    def moved_by(target: sympy.Symbol) -> list[tuple[sympy.Symbol, sympy.Expr]]:
        return [(s, _reordered(c)) for s, c in edges[target].items() if s in dots]

    def combine(target: sympy.Symbol) -> tuple[str, int] | None:
        terms = []
        for source, coefficient in moved_by(target):
            text, level = dots[source]
            linear = spec.jac_structure == "linear"
            sign, coefficient = _signed(coefficient) if linear else (1, coefficient)
            if coefficient == 1:
                bracketed = sign < 0 and level < 2  # else the sign would be that of its first term
                terms.append((sign, f"({text})", 3) if bracketed else (sign, text, level))
                continue
            body = text if level >= 3 else f"({text})"
            own, moved = _shown(spec, coefficient), _shown(spec, source)
            if own and moved and not set(own) & set(moved):
                body = rf" {body}^\top"
            else:
                body = (r" \odot " if own else r"\, ") + body
            terms.append((sign, printer._wrap(coefficient, 2) + body, 2))
        if not terms:
            return None
        (sign, text, level), *rest = terms
        text = text if sign > 0 else f"-{text}"
        text += "".join(f" {'+' if s > 0 else '-'} {t}" for s, t, _ in rest)
        return text, 1 if rest or sign < 0 else level

    lines = {}
    for stage in spec.stages:
        if isinstance(stage, Linear) and stage.map.structure == "contract":
            parts = [
                _sum_over(
                    stage.map.latex,
                    [(*dots[s], _shown(spec, s)), (*printer._print(c), _shown(spec, c))],
                )
                for s, c in moved_by(operand_symbol(stage))
            ]
            if parts:
                dots[stage.symbol] = (" + ".join(parts), 2 if len(parts) == 1 else 1)
        elif isinstance(stage, Linear):
            operand = combine(operand_symbol(stage))
            if operand:
                dots[stage.symbol] = (_apply(stage.map.structure, stage.map.latex, *operand), 2)
        elif stage.symbol in nodes:
            moved, left = combine(stage.symbol), _dotted(nodes[stage.symbol], "t")
            lines[stage.symbol] = f"{left} = {moved[0] if moved else 0}"
            if moved:
                dots[stage.symbol] = (left, 3)
    return [lines[symbol] for symbol in nodes]


def _written_apart(spec: Spec) -> dict[sympy.Symbol, str]:
    """What the Jacobian's action has a line for, and its LaTeX: nodes, the updates, and where sums
    mix a matrix state, the states between micro-steps."""
    nodes = {
        st.symbol: st.latex
        for st in spec.factorization.path
        if not isinstance(st, Linear) and not st.hidden
    }
    updates = nodes | {s.next_symbol: s.latex for s in spec.slots}
    if all(stage.map.structure != "contract" for stage in spec.factorization.carrying):
        return updates
    moved = spec.factorization.state_dependent
    between = {
        st.symbol: st.latex
        for st in spec.stages
        if not isinstance(st, Linear)
        and not st.hidden
        and st.symbol in moved - set(updates)
        and spec.axes_of(st.expr) == spec.axes
    }
    return between | updates


def _dotted(latex: str, index: str) -> str:
    base = latex.partition("_")[0]
    return rf"\dot{{{base}}}" + _timed(latex, index)[len(base) :]


def _reordered(expr: sympy.Expr) -> sympy.Expr:
    """Positive terms first, recursively, for reading; the value is unchanged."""
    if not expr.args:
        return expr
    args = [_reordered(a) for a in expr.args]
    if isinstance(expr, sympy.Add):
        args.sort(key=lambda a: (_signed(a)[0] < 0, not a.is_number))
    elif isinstance(expr, sympy.Mul):
        args.sort(key=lambda a: (not a.is_number, isinstance(a, sympy.Add)))
    else:
        return expr.func(*args)
    return expr.func(*args, evaluate=False)
