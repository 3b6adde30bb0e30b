"""Printing a Spec as source code.

A *program* is a function of slots, drives and recurrent parameters, printed as text:

==================  ==========================================================================
``step``            next value of every slot
``step_jacobian``   (channelwise Specs) the same statements, then the S×S Jacobian entries
``jacobian``        (channelwise Specs) the S×S Jacobian entries alone
``channel_jacobian``  the S×S entries from coefficients and (the diagonals of) the maps
``coefficients``    state-carrying coefficients of the factorized Jacobian
``tangent``         JVP from coefficients: perturbation of the state → of its update
``transpose``       VJP from coefficients: cotangent of the update → of the state
``gradients``       recompute the stages, then the cotangents of drives and elementwise parameters,
                    and (cotangent, operand) of every linear map
``majorant``        ``tangent`` with absolute coefficients: bounds a perturbation from above
==================  ==========================================================================

Two dialects share one printer. ``plain`` uses operators and named functions only, so the same
text runs on NumPy arrays of floats, of mpmath numbers, or of SymPy expressions. ``torch`` fuses
``a + b*c`` into ``addcmul`` and ``(1-z)*a + z*b`` into ``lerp``, and works in place on the
temporaries that it has just made. Printed text is deterministic: equal Specs, equal bytes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import sympy

from .declarations import Linear
from .factorize import operand_symbol
from .primitives import primitive_of

if TYPE_CHECKING:
    from .spec import Spec

PROGRAMS = (
    "step",
    "step_jacobian",
    "jacobian",
    "coefficients",
    "channel_jacobian",
    "tangent",
    "transpose",
    "gradients",
    "majorant",
)
DIALECTS = ("plain", "torch")


class ExpressionPrinter:
    """SymPy expression → Python expression text, with operator precedence handled explicitly."""

    def __init__(self, fused: bool = False):
        self.fused = fused

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
            return self._call(primitive.name, expr.args[0]), 3
        raise NotImplementedError(
            f"got {type(expr).__name__} in {expr}, expected sums, products, powers and the "
            "functions of pararnn.spec.primitives; add a row to that table to extend the language."
        )

    def _call(self, name: str, argument: sympy.Expr) -> str:
        text, level = self._print(argument)
        # Sums and products are fresh and not needed by autograd, so they may be overwritten.
        fresh = self.fused and isinstance(argument, sympy.Add | sympy.Mul)
        fresh = fresh and not argument.is_number
        if fresh and name in ("sigmoid", "tanh", "exp", "log", "sin", "cos"):
            return f"{text if level == 3 else f'({text})'}.{name}_()"
        return f"{name}({text})"

    def _sum(self, expr: sympy.Add) -> tuple[str, int]:
        terms = sorted(expr.args, key=_sum_order)
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

    def _fused_sum(self, terms: Sequence[sympy.Expr]) -> str | None:
        if len(terms) != 2:
            return None
        blend = _convex_blend(terms)
        if blend:
            start, end, weight = blend
            return f"lerp({self(start)}, {self(end)}, {self(weight)})"
        for product, rest in (terms[::-1], terms):
            if (
                isinstance(product, sympy.Mul)
                and not product.args[0].is_number
                and not rest.as_coeff_Mul()[0].is_negative
                and not rest.is_number
            ):
                *head, last = product.args
                left = sympy.Mul(*head, evaluate=False) if len(head) > 1 else head[0]
                return f"addcmul({self(rest)}, {self(left)}, {self(last)})"
        return None

    def _product(self, expr: sympy.Mul) -> tuple[str, int]:
        numerator, denominator = [], []
        for factor in expr.args:
            base, exponent = factor.as_base_exp()
            if exponent.is_number and exponent.is_negative and not isinstance(factor, sympy.exp):
                denominator.append(base**-exponent)
            else:
                numerator.append(factor)
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
        return f"{self._atom(base)}**{self._atom(exponent)}", 3


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


class _Writer:
    """Collects the statements of one function."""

    def __init__(self, spec: Spec, dialect: str):
        if dialect not in DIALECTS:
            raise ValueError(f"got dialect {dialect!r}, expected one of {DIALECTS}.")
        self.spec = spec
        self.printer = ExpressionPrinter(fused=dialect == "torch")
        self.lines: list[str] = []
        self.temporaries = 0

    def assign(self, name: str, text: str) -> None:
        self.lines.append(f"    {name} = {text}")

    def forward(self) -> None:
        """The stages, one statement each. Diagonal maps are written as products in place."""
        shorthand: dict[sympy.Symbol, sympy.Expr] = {}
        for stage in self.spec.stages:
            if not isinstance(stage, Linear):
                expr = stage.expr.xreplace(shorthand)
                self.assign(stage.symbol.name, self.printer(expr))
            elif stage.map.structure == "diagonal":
                weight = sympy.Symbol(stage.map.name, real=True)
                operand = stage.operand.xreplace(shorthand)
                # Kept unevaluated, so that a*(r*h) is computed in the order of the page.
                shorthand[stage.symbol] = sympy.Mul(weight, operand, evaluate=False)
            else:
                operand = self.printer(stage.operand.xreplace(shorthand))
                self.assign(
                    stage.symbol.name, f"{stage.map.structure}({stage.map.name}, {operand})"
                )
        self.shorthand = shorthand

    def expressions(self, exprs: Sequence[sympy.Expr]) -> list[str]:
        """Print several expressions after common-subexpression elimination."""
        exprs = [e.xreplace(getattr(self, "shorthand", {})) for e in exprs]
        names = (sympy.Symbol(f"_x{i}", real=True) for i in range(self.temporaries, 10**6))
        replacements, reduced = sympy.cse(exprs, symbols=names, order="canonical")
        self.temporaries += len(replacements)
        for symbol, expr in replacements:
            self.assign(symbol.name, self.printer(expr))
        return [self.printer(e) for e in reduced]

    def coefficients(self) -> dict[tuple, sympy.Expr]:
        """Assign every varying coefficient to a name, so that e.g. ``1 - z`` stays one term and is
        not reordered into a longer sum, where it would cancel."""
        fz = self.spec.factorization
        texts = self.expressions([fz.edges[t][s] for t, s in fz.varying_edges])
        named = {}
        for i, (edge, text) in enumerate(zip(fz.varying_edges, texts, strict=True)):
            name = text if text.isidentifier() else f"_c{i}"
            if name != text:
                self.assign(name, text)
            named[edge] = sympy.Symbol(name, real=True)
        return named

    def text(self, name: str, args: Sequence[str], results: Sequence[str]) -> str:
        tail = ", ".join(results) + ("," if len(results) == 1 else "")
        body = _live(self.lines, tail)
        return "\n".join([f"def {name}({', '.join(args)}):", *body, f"    return ({tail})"]) + "\n"


def _live(lines: Sequence[str], results: str) -> list[str]:
    """The assignments that the results need."""
    needed = set(re.findall(r"[A-Za-z_]\w*", results))
    kept = []
    for line in reversed(lines):
        name, _, text = line.strip().partition(" = ")
        if name in needed:
            kept.append(line)
            needed |= set(re.findall(r"[A-Za-z_]\w*", text))
    return kept[::-1]


def arguments(spec: Spec) -> list[str]:
    """Argument names of the ``step`` family: slots, drives, then maps and parameters."""
    return [
        *(s.name for s in spec.slots),
        *(d.name for d in spec.drive_list),
        *(m.name for m in spec.map_list),
        *(p.name for p in spec.param_list),
    ]


def recurrent_arguments(spec: Spec) -> list[str]:
    """Argument names of the recurrent parameters: maps, then elementwise parameters."""
    return [*(m.name for m in spec.map_list), *(p.name for p in spec.param_list)]


def print_program(spec: Spec, program: str = "step", dialect: str = "torch") -> str:
    """Source text of one program of the table above.

    Raises
    ------
    ValueError
        If the program or the dialect is unknown, or ``step_jacobian`` is asked of a Spec that
        mixes channels.
    """
    if program not in PROGRAMS:
        raise ValueError(f"got program {program!r}, expected one of {PROGRAMS}.")
    writer = _Writer(spec, dialect)
    fz = spec.factorization
    outputs = [s.next_symbol.name for s in spec.slots]
    if program == "step":
        writer.forward()
        return writer.text("step", arguments(spec), outputs)
    if program in ("step_jacobian", "jacobian"):
        if not spec.channelwise:
            raise ValueError(
                f"{spec.name}: {program!r} needs a channelwise Spec, but maps mix channels; "
                "use 'coefficients' with 'tangent' or 'transpose'."
            )
        writer.forward()
        named = writer.coefficients()
        entries = [e for row in fz.channel_jacobian(named) for e in row]
        results = outputs if program == "step_jacobian" else []
        return writer.text(program, arguments(spec), results + writer.expressions(entries))
    if program == "coefficients":
        writer.forward()
        values = [fz.edges[t][s] for t, s in fz.varying_edges]
        return writer.text(program, arguments(spec), writer.expressions(values))
    if program == "channel_jacobian":
        named = {e: sympy.Symbol(f"_c{i}", real=True) for i, e in enumerate(fz.varying_edges)}
        entries = [e for row in fz.channel_jacobian(named) for e in row]
        args = [s.name for s in named.values()] + recurrent_arguments(spec)
        return writer.text(program, args, writer.expressions(entries))
    if program == "gradients":
        return _print_gradients(spec, writer)
    return _print_linear(spec, writer, program)


def _print_linear(spec: Spec, writer: _Writer, program: str) -> str:
    """``tangent``, ``majorant`` and ``transpose``: the signal-flow graph, forwards or backwards."""
    fz = spec.factorization
    names = [f"_c{i}" for i in range(len(fz.varying_edges))]
    coefficient = {
        edge: sympy.Symbol(name, real=True)
        for edge, name in zip(fz.varying_edges, names, strict=True)
    }
    absolute = program == "majorant"

    def weighted(edge: tuple, value: sympy.Symbol) -> sympy.Expr:
        fixed = fz.edges[edge[0]][edge[1]]
        if fixed.is_number:
            return (abs(fixed) if absolute else fixed) * value
        return coefficient[edge] * value

    if program == "transpose":
        bar = {out: sympy.Symbol(f"_{out.name}_bar", real=True) for out in fz.outputs}
        for stage in reversed(fz.carrying):
            total = sum(
                (
                    weighted((t, s), bar[t])
                    for t, s in fz.state_edges
                    if s == stage.symbol and t in bar
                ),
                sympy.Integer(0),
            )
            writer.assign(f"_{stage.symbol.name}_bar", writer.printer(total))
            name = f"{operand_symbol(stage).name}_bar"
            writer.assign(
                name, f"{stage.map.structure}_t({stage.map.name}, _{stage.symbol.name}_bar)"
            )
            bar[operand_symbol(stage)] = sympy.Symbol(name, real=True)
        results = []
        for slot in fz.slots:
            terms = [weighted((t, s), bar[t]) for t, s in fz.state_edges if s == slot and t in bar]
            results.append(
                writer.printer(sum(terms, sympy.Integer(0)))
                if terms
                else f"zero({bar[fz.outputs[0]].name})"
            )
        inputs = [bar[o].name for o in fz.outputs]
    else:
        dot = {s: sympy.Symbol(f"_{s.name}_dot", real=True) for s in fz.slots}
        for stage in fz.carrying:
            target = operand_symbol(stage)
            total = sum(
                (weighted((t, s), dot[s]) for t, s in fz.state_edges if t == target and s in dot),
                sympy.Integer(0),
            )
            call = f"{stage.map.structure}_abs" if absolute else stage.map.structure
            name = f"_{stage.symbol.name}_dot"
            writer.assign(name, f"{call}({stage.map.name}, {writer.printer(total)})")
            dot[stage.symbol] = sympy.Symbol(name, real=True)
        results = []
        for out in fz.outputs:
            terms = [weighted((t, s), dot[s]) for t, s in fz.state_edges if t == out and s in dot]
            results.append(
                writer.printer(sum(terms, sympy.Integer(0)))
                if terms
                else f"zero({dot[fz.slots[0]].name})"
            )
        inputs = [dot[s].name for s in fz.slots]
    args = [*inputs, *names, *recurrent_arguments(spec)]
    return writer.text(program, args, results)


def _print_gradients(spec: Spec, writer: _Writer) -> str:
    """Cotangents of what enters one step besides the state, from those of the next state."""
    fz = spec.factorization
    bar = {out: sympy.Symbol(f"_{out.name}_bar", real=True) for out in fz.outputs}
    writer.forward()

    def cotangent(source: sympy.Symbol) -> sympy.Expr:
        terms = [
            edges[source] * bar[target]
            for target, edges in fz.edges.items()
            if source in edges and target in bar
        ]
        return sum(terms, sympy.Integer(0))

    pairs = []
    assigned: dict[sympy.Expr, str] = {}
    for stage in reversed(fz.linear):
        total = cotangent(stage.symbol)
        name = f"_{stage.symbol.name}_bar"
        if total == 0:
            pairs.append((stage, "None", "None"))
            continue
        writer.assign(name, writer.expressions([total])[0])
        assigned[total] = name
        (operand,) = writer.expressions([stage.operand])
        if not operand.isidentifier():
            writer.assign(operand_symbol(stage).name, operand)
            operand = operand_symbol(stage).name
        pairs.append((stage, name, operand))
        inner = f"{operand_symbol(stage).name}_bar"
        writer.assign(inner, f"{stage.map.structure}_t({stage.map.name}, {name})")
        bar[operand_symbol(stage)] = sympy.Symbol(inner, real=True)
    pairs.reverse()
    sources = [
        *(d.symbol for d in spec.drive_list),
        *(p.symbol for p in spec.param_list),
    ]
    # A drive that enters next to a linear output (A h + u) has that output's cotangent.
    totals = [cotangent(s) for s in sources]
    texts = iter(writer.expressions([t for t in totals if t != 0 and t not in assigned]))
    results = ["None" if t == 0 else assigned[t] if t in assigned else next(texts) for t in totals]
    results += [part for _, name, operand in pairs for part in (name, operand)]
    args = [b.name for b in (bar[o] for o in fz.outputs)] + arguments(spec)
    return writer.text("gradients", args, results)


def load(source: str, namespace: Mapping[str, Any]) -> Any:
    """Turn printed source into a function, over the operations that ``namespace`` supplies."""
    scope = dict(namespace)
    exec(compile(source, f"<pararnn:{source[4 : source.index('(')]}>", "exec"), scope)
    return scope[source[4 : source.index("(")]]
