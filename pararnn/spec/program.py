"""Printing a Spec as source code.

A *program* is a function of slots, drives and recurrent parameters, printed as text:

==================  ==========================================================================
``step``            next value of every slot
``step_jacobian``   (channelwise Specs) the same statements, then the S×S Jacobian entries
``coefficients``    state-carrying coefficients of the factorized Jacobian
``linearization``   those, the coefficients of drives and parameters, and operands of linear maps
``channel_jacobian``  the S×S entries from coefficients and (the diagonals of) the maps
``tangent``         JVP from coefficients: perturbation of the state → of its update
``transpose``       VJP from coefficients: cotangent of the update → of the state
``majorant``        ``tangent`` with absolute coefficients: bounds a perturbation from above
``gradients``       from a linearization and the cotangent of the update: the cotangents of drives
                    and elementwise parameters, and (cotangent, operand) of every linear map
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
    from .factorize import Factorization
    from .spec import Spec

PROGRAMS = (
    "step",
    "step_jacobian",
    "coefficients",
    "linearization",
    "channel_jacobian",
    "tangent",
    "transpose",
    "gradients",
    "majorant",
)
DIALECTS = ("plain", "torch")


class sigmoid_backward(sympy.Function):
    """``g·y(1−y)``, what differentiating ``y = sigmoid(x)`` gives, as one operation."""


class tanh_backward(sympy.Function):
    """``g·(1−y²)``, what differentiating ``y = tanh(x)`` gives, as one operation."""


_SLOPES = (sigmoid_backward, tanh_backward)


def _with_slopes(expr: sympy.Expr) -> sympy.Expr:
    """Recognise the two derivatives in products, before common subexpressions break them up."""
    if not expr.args:
        return expr
    args = [_with_slopes(a) for a in expr.args]
    if not isinstance(expr, sympy.Mul) or any(a.is_number for a in args):
        return expr.func(*args)
    for y in args:
        if isinstance(y, sympy.Symbol) and 1 - y in args and len(args) > 2:
            return sigmoid_backward(sympy.Mul(*[f for f in args if f not in (y, 1 - y)]), y)
    for slope in args:
        square = 1 - slope
        if isinstance(square, sympy.Pow) and square.base.is_Symbol and square.exp == 2:
            return tanh_backward(sympy.Mul(*[f for f in args if f != slope]), square.base)
    return expr.func(*args)


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
        if isinstance(expr, _SLOPES):
            return f"{type(expr).__name__}({', '.join(map(self, expr.args))})", 3
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
        self.targets: list[str] = []

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

    def into(self, outputs: Sequence[str]) -> None:
        """Let a single output be written to an optional argument ``_out``, where its statement
        makes a tensor as large as the state anyway."""
        if not self.printer.fused or len(outputs) > 1:
            return
        self.targets = ["_out=None"]
        update = self.spec.stages[-1]
        whole = self.spec.axes_of(update.symbol) == self.spec.axes
        text = self.lines[-1]
        call = text.strip().startswith((f"{outputs[0]} = lerp(", f"{outputs[0]} = addcmul("))
        call = call and not text.endswith("_()")
        if call and whole and update.symbol in self.spec.factorization.state_dependent:
            self.lines[-1] = f"{text[:-1]}, out=_out)"

    def expressions(self, exprs: Sequence[sympy.Expr]) -> list[str]:
        """Print several expressions after common-subexpression elimination."""
        exprs = [e.xreplace(getattr(self, "shorthand", {})) for e in exprs]
        if self.printer.fused:
            exprs = [_with_slopes(e) for e in exprs]
        names = (sympy.Symbol(f"_x{i}", real=True) for i in range(self.temporaries, 10**6))
        replacements, reduced = sympy.cse(exprs, symbols=names, order="canonical")
        self.temporaries += len(replacements)
        for symbol, expr in replacements:
            self.assign(symbol.name, self.printer(expr))
        return [self.printer(e) for e in reduced]

    def coefficients(self) -> list[sympy.Symbol]:
        """Assign every state-carrying coefficient to a name, so that e.g. ``1 - z`` stays one
        term and is not reordered into a longer sum, where it would cancel."""
        fz = self.spec.factorization
        named = []
        for i, text in enumerate(self.expressions(fz.coefficients[: fz.n_state])):
            name = text if text.isidentifier() else f"_c{i}"
            if name != text:
                self.assign(name, text)
            named.append(sympy.Symbol(name, real=True))
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
        writer.into(outputs)
        return writer.text("step", [*arguments(spec), *writer.targets], outputs)
    if program == "step_jacobian":
        if not spec.channelwise:
            raise ValueError(
                f"{spec.name}: {program!r} needs a channelwise Spec, but maps mix channels; "
                "use 'coefficients' with 'tangent' or 'transpose'."
            )
        writer.forward()
        writer.into(outputs)
        entries = [e for row in fz.channel_jacobian(writer.coefficients()) for e in row]
        args = [*arguments(spec), *writer.targets]
        return writer.text(program, args, outputs + writer.expressions(entries))
    if program == "coefficients":
        writer.forward()
        values = writer.expressions(fz.coefficients[: fz.n_state])
        return writer.text(program, arguments(spec), values)
    if program == "linearization":
        writer.forward()
        values = writer.expressions([*fz.coefficients, *fz.operands])
        return writer.text(program, arguments(spec), values)
    if program == "channel_jacobian":
        named = _coefficient_symbols(fz.n_state)
        entries = [e for row in fz.channel_jacobian(named) for e in row]
        args = [s.name for s in named] + recurrent_arguments(spec)
        return writer.text(program, args, writer.expressions(entries))
    if program == "gradients":
        return _print_gradients(spec, writer)
    if program == "transpose":
        return _print_transpose(spec, writer)
    return _print_tangent(spec, writer, program)


def _coefficient_symbols(count: int) -> list[sympy.Symbol]:
    return [sympy.Symbol(f"_c{i}", real=True) for i in range(count)]


def _edge_value(fz: Factorization, target: sympy.Symbol, source: sympy.Symbol) -> sympy.Expr:
    """An edge's coefficient as programs know it: a number, or the name of an argument."""
    i = fz.position(target, source)
    return fz.edges[target][source] if i is None else sympy.Symbol(f"_c{i}", real=True)


def _print_transpose(spec: Spec, writer: _Writer) -> str:
    """Read the signal-flow graph of the state backwards."""
    fz = spec.factorization
    bar = {out: sympy.Symbol(f"_{out.name}_bar", real=True) for out in fz.outputs}

    def gathered(source: sympy.Symbol) -> str:
        edges = [(t, s) for t, s in fz.state_edges if s == source and t in bar]
        if not edges:
            return f"zero({bar[fz.outputs[0]].name})"
        return writer.printer(sum(_edge_value(fz, t, s) * bar[t] for t, s in edges))

    for stage in reversed(fz.carrying):
        outer, inner = f"_{stage.symbol.name}_bar", f"{operand_symbol(stage).name}_bar"
        writer.assign(outer, gathered(stage.symbol))
        writer.assign(inner, f"{stage.map.structure}_t({stage.map.name}, {outer})")
        bar[operand_symbol(stage)] = sympy.Symbol(inner, real=True)
    names = [c.name for c in _coefficient_symbols(fz.n_state)]
    args = [*(bar[o].name for o in fz.outputs), *names, *recurrent_arguments(spec)]
    return writer.text("transpose", args, [gathered(slot) for slot in fz.slots])


def _print_tangent(spec: Spec, writer: _Writer, program: str) -> str:
    """``tangent``, and ``majorant`` with absolute values: the signal-flow graph forwards."""
    fz = spec.factorization
    absolute = program == "majorant"
    dot = {s: sympy.Symbol(f"_{s.name}_dot", real=True) for s in fz.slots}

    def gathered(target: sympy.Symbol) -> str:
        edges = [(t, s) for t, s in fz.state_edges if t == target and s in dot]
        if not edges:
            return f"zero({dot[fz.slots[0]].name})"
        values = [(_edge_value(fz, t, s), dot[s]) for t, s in edges]
        return writer.printer(
            sum((abs(c) if absolute and c.is_number else c) * v for c, v in values)
        )

    for stage in fz.carrying:
        call = f"{stage.map.structure}_abs" if absolute else stage.map.structure
        name = f"_{stage.symbol.name}_dot"
        writer.assign(name, f"{call}({stage.map.name}, {gathered(operand_symbol(stage))})")
        dot[stage.symbol] = sympy.Symbol(name, real=True)
    names = [c.name for c in _coefficient_symbols(fz.n_state)]
    args = [*(dot[s].name for s in fz.slots), *names, *recurrent_arguments(spec)]
    return writer.text(program, args, [gathered(out) for out in fz.outputs])


def _print_gradients(spec: Spec, writer: _Writer) -> str:
    """Cotangents of what enters one step besides the state, from those of the next state."""
    fz = spec.factorization
    bar = {out: sympy.Symbol(f"_{out.name}_bar", real=True) for out in fz.outputs}
    operands = {o: f"_q{i}" for i, o in enumerate(fz.operands)}

    def cotangent(source: sympy.Symbol) -> sympy.Expr:
        terms = [
            _edge_value(fz, target, source) * bar[target]
            for target, row in fz.edges.items()
            if source in row and target in bar
        ]
        return sum(terms, sympy.Integer(0))

    pairs = []
    assigned: dict[sympy.Expr, str] = {}
    for stage in reversed(fz.linear):
        total = cotangent(stage.symbol)
        name = f"_{stage.symbol.name}_bar"
        if total == 0:
            pairs += ["None", "None"]
            continue
        writer.assign(name, writer.printer(total))
        assigned[total] = name
        pairs += [operands.get(stage.operand, str(stage.operand)), name]
        inner = f"{operand_symbol(stage).name}_bar"
        writer.assign(inner, f"{stage.map.structure}_t({stage.map.name}, {name})")
        bar[operand_symbol(stage)] = sympy.Symbol(inner, real=True)
    sources = [*(d.symbol for d in spec.drive_list), *(p.symbol for p in spec.param_list)]
    # A drive that enters next to a linear output (A h + u) has that output's cotangent.
    totals = [cotangent(s) for s in sources]
    texts = iter(writer.expressions([t for t in totals if t != 0 and t not in assigned]))
    results = ["None" if t == 0 else assigned[t] if t in assigned else next(texts) for t in totals]
    args = [
        *(bar[o].name for o in fz.outputs),
        *(s.name for s in fz.slots),
        *(c.name for c in _coefficient_symbols(len(fz.coefficients))),
        *operands.values(),
        *recurrent_arguments(spec),
    ]
    return writer.text("gradients", args, results + pairs[::-1])


def load(source: str, namespace: Mapping[str, Any]) -> Any:
    """Turn printed source into a function, over the operations that ``namespace`` supplies."""
    scope = dict(namespace)
    exec(compile(source, f"<pararnn:{source[4 : source.index('(')]}>", "exec"), scope)
    return scope[source[4 : source.index("(")]]
