"""Printing a Spec as source code.

A *program* is a function of slots, drives and recurrent parameters, printed as text:

==================  ==========================================================================
``step``            next value of every slot
``read``            what a layer passes on, where that is not the state: arguments of ``step``, with
                    the new state for every slot
``step_jacobian``   (channelwise Specs) the same statements, then the S×S Jacobian entries
``affine``          (linear, channelwise Specs) arguments of ``step`` without the slots; the
                    state-carrying coefficients, then the next value of every slot from zero
``coefficients``    state-carrying coefficients of the factorized Jacobian
``linearization``   those, the coefficients of drives and parameters, and operands of linear maps
``channel_jacobian``  the S×S entries from coefficients and (the diagonals of) the maps
``tangent``         JVP from coefficients: perturbation of the state → of its update
``transpose``       VJP from coefficients: cotangent of the update → of the state
``majorant``        ``tangent`` with absolute coefficients: bounds a perturbation from above
``gradients``       from a linearization and the cotangent of the update: the cotangents of drives
                    and elementwise parameters, and (cotangent, operand) of every linear map
``adjoint``         (channelwise Specs) one step of the backward pass: ``linearization``,
                    ``transpose`` and ``gradients`` in one; arguments of ``step``, then cotangents
                    of the update → cotangents of every argument
==================  ==========================================================================

Three dialects share one printer. ``plain`` uses operators and named functions only, so the same
text runs on NumPy arrays of floats, of mpmath numbers, or of SymPy expressions. ``torch`` fuses
``a + b*c`` into ``addcmul`` and ``(1-z)*a + z*b`` into ``lerp``, and works in place on the
temporaries that it has just made. ``triton`` is plain text under ``@triton.jit``, with
the value that is known last in the last operation. Printed text is deterministic: equal Specs,
equal bytes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import sympy

from .complements import Complements
from .declarations import Elementwise, Linear
from .expressions import ExpressionPrinter, with_slopes
from .factorize import operand_symbol
from .primitives import sigmoid

if TYPE_CHECKING:
    from .factorize import Factorization
    from .spec import Spec

PROGRAMS = (
    "step",
    "read",
    "step_jacobian",
    "affine",
    "coefficients",
    "linearization",
    "channel_jacobian",
    "tangent",
    "transpose",
    "gradients",
    "majorant",
    "adjoint",
)
DIALECTS = ("plain", "torch", "triton")


class _Writer:
    """Collects the statements of one function."""

    def __init__(self, spec: Spec, dialect: str):
        if dialect not in DIALECTS:
            raise ValueError(f"got dialect {dialect!r}, expected one of {DIALECTS}.")
        self.spec = spec
        self.dialect = dialect
        rank = {stage.symbol: i for i, stage in enumerate(spec.stages, 1)}
        self.printer = ExpressionPrinter(dialect == "torch", rank if dialect == "triton" else None)
        self.lines: list[str] = []
        self.complements = Complements()
        self.whole: dict[str, str] = {}  # lines of stages with complements, if these are not used
        self.temporaries = 0
        self.targets: list[str] = []

    def assign(self, name: str, text: str) -> None:
        self.lines.append(f"    {name} = {text}")

    def forward(self, at: Mapping[sympy.Symbol, sympy.Expr] | None = None) -> None:
        """The stages, one statement each. Diagonal maps are written as products in place. With
        symbols given a value, ``at`` that value; numbers then have no statement."""
        shorthand: dict[sympy.Symbol, sympy.Expr] = dict(at or {})
        for stage in self.spec.stages:
            if not isinstance(stage, Linear):
                expr = self.complements(stage.expr).xreplace(shorthand)
                if expr.is_number:
                    shorthand[stage.symbol] = expr
                    continue
                self.stage(stage, expr)
            elif stage.map.structure == "diagonal":
                weight = sympy.Symbol(stage.map.name, real=True)
                operand = self.complements(stage.operand).xreplace(shorthand)
                # Kept unevaluated, so that a*(r*h) is computed in the order of the page.
                product = sympy.Mul(weight, operand, evaluate=False)
                shorthand[stage.symbol] = operand if operand == 0 else product
            else:
                operand = self.printer(self.complements(stage.operand).xreplace(shorthand))
                self.assign(
                    stage.symbol.name, f"{stage.map.structure}({stage.map.argument}, {operand})"
                )
        self.shorthand = shorthand

    def stage(self, stage: Elementwise, expr: sympy.Expr) -> None:
        """An elementwise stage and its complement, which share their argument."""
        name = stage.symbol.name
        rest = self.complements.add(stage.symbol, self.complements(stage.expr))
        if rest is None:
            self.assign(name, self.printer(expr))
            return
        inner = expr.args[0]
        if not inner.as_coeff_Mul()[1].is_Symbol:
            self.whole[name] = f"    {name} = {self.printer(expr)}"
            self.assign(f"_{name}_in", self.printer(inner))
            inner = sympy.Symbol(f"_{name}_in", real=True)
        self.assign(name, self.printer(expr.func(inner)))
        complement = self.complements.symbol_of(stage.symbol)
        shared = -inner if isinstance(expr, sigmoid) else inner
        self.assign(complement.name, self.printer(rest.func(shared)))
        if self.printer.rank is not None:
            self.printer.rank[complement] = self.printer.rank[stage.symbol]

    def into(self, outputs: Sequence[str]) -> None:
        """Let a single output be written to an optional argument ``_out``, where its statement
        makes a tensor as large as the state anyway."""
        if not self.printer.fused or len(outputs) > 1:
            return
        update = self.spec.stages[-1]
        whole = self.spec.axes_of(update.symbol) == self.spec.axes
        text = self.lines[-1]
        call = text.strip().startswith((f"{outputs[0]} = lerp(", f"{outputs[0]} = addcmul("))
        call = call and not text.endswith("_()")
        if call and whole and update.symbol in self.spec.factorization.state_dependent:
            self.lines[-1] = f"{text[:-1]}, out=_out)"
            self.targets = ["_out=None"]

    def expressions(self, exprs: Sequence[sympy.Expr]) -> list[str]:
        """Print several expressions after common-subexpression elimination."""
        exprs = [self.complements(e).xreplace(getattr(self, "shorthand", {})) for e in exprs]
        if self.printer.fused:
            exprs = [with_slopes(e) for e in exprs]
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
        head = f"def {name}({', '.join(args)}):"
        if self.dialect == "triton":
            head = f"@triton.jit\n{head}"
        lines = _live(self.lines, tail)
        assigned = {line.split()[0]: line for line in lines}
        for stage, whole in self.whole.items():
            if stage in assigned and f"_{stage}_co" not in assigned:
                lines[lines.index(assigned[stage])] = whole
                lines.remove(assigned[f"_{stage}_in"])
        return "\n".join([head, *lines, f"    return ({tail})"]) + "\n"


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
        If the program or the dialect is unknown, or ``step_jacobian`` or ``adjoint`` is asked of a
        Spec that mixes channels.
    """
    if program not in PROGRAMS:
        raise ValueError(f"got program {program!r}, expected one of {PROGRAMS}.")
    writer = _Writer(spec, dialect)
    fz = spec.factorization
    outputs = [s.next_symbol.name for s in spec.slots]
    if program in ("step_jacobian", "adjoint") and not spec.channelwise:
        raise ValueError(
            f"{spec.name}: {program!r} needs a channelwise Spec, but maps mix channels; "
            "use 'coefficients' with 'tangent' or 'transpose'."
        )
    if program == "step":
        writer.forward()
        writer.into(outputs)
        return writer.text("step", [*arguments(spec), *writer.targets], outputs)
    if program == "read":
        return _print_read(spec, writer)
    if program == "step_jacobian":
        writer.forward()
        writer.into(outputs)
        entries = [e for row in fz.channel_jacobian(writer.coefficients()) for e in row]
        args = [*arguments(spec), *writer.targets]
        return writer.text(program, args, outputs + writer.expressions(entries))
    if program == "affine":
        return _print_affine(spec, writer)
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
    if program == "adjoint":
        return _print_adjoint(spec, writer)
    if program == "gradients":
        return _print_gradients(spec, writer)
    if program == "transpose":
        return _print_transpose(spec, writer)
    return _print_tangent(spec, writer, program)


def _print_affine(spec: Spec, writer: _Writer) -> str:
    """What a linear recurrence needs of the drives: its operator's coefficients, and its input."""
    fz = spec.factorization
    if fz.jac_structure != "linear" or not spec.channelwise:
        raise ValueError(
            f"{spec.name}: 'affine' needs a channelwise Spec that is linear in its state, got class "
            f"{fz.jac_structure!r}."
        )
    writer.forward({s.symbol: sympy.Integer(0) for s in spec.slots})
    values = writer.expressions(fz.coefficients[: fz.n_state])
    inputs = [writer.printer(s.next_symbol.xreplace(writer.shorthand)) for s in spec.slots]
    return writer.text("affine", arguments(spec)[len(spec.slots) :], values + inputs)


def _print_read(spec: Spec, writer: _Writer) -> str:
    """The read-out from the new state."""
    read = spec.readout
    if read is None:
        raise ValueError(f"{spec.name}: it has no read-out; a layer passes on the state.")
    operand = writer.printer(read.operand)
    writer.assign(read.symbol.name, f"{read.map.structure}({read.map.argument}, {operand})")
    args = arguments(spec)
    args[: len(spec.slots)] = [s.next_symbol.name for s in spec.slots]
    return writer.text("read", args, [read.symbol.name])


def _coefficient_symbols(count: int) -> list[sympy.Symbol]:
    return [sympy.Symbol(f"_c{i}", real=True) for i in range(count)]


def _edge_value(fz: Factorization, target: sympy.Symbol, source: sympy.Symbol) -> sympy.Expr:
    """An edge's coefficient as programs know it: a number, or the name of an argument."""
    i = fz.position(target, source)
    return fz.edges[target][source] if i is None else sympy.Symbol(f"_c{i}", real=True)


def _transposed(spec: Spec, writer: _Writer) -> list[str]:
    """Read the signal-flow graph of the state backwards: cotangents of the slots."""
    fz = spec.factorization
    bar = {out: sympy.Symbol(f"_{out.name}_bar", real=True) for out in fz.outputs}

    def gathered(source: sympy.Symbol) -> str:
        edges = [(t, s) for t, s in fz.state_edges if s == source and t in bar]
        if not edges:
            return f"zero({bar[fz.outputs[0]].name})"
        return writer.printer(sum(_edge_value(fz, t, s) * bar[t] for t, s in edges))

    for stage in reversed(fz.path):
        if not isinstance(stage, Linear):
            writer.assign(f"_{stage.symbol.name}_bar", gathered(stage.symbol))
            bar[stage.symbol] = sympy.Symbol(f"_{stage.symbol.name}_bar", real=True)
            continue
        outer, inner = f"_{stage.symbol.name}_bar", f"{operand_symbol(stage).name}_bar"
        writer.assign(outer, gathered(stage.symbol))
        writer.assign(inner, f"{stage.map.structure}_t({stage.map.argument}, {outer})")
        bar[operand_symbol(stage)] = sympy.Symbol(inner, real=True)
    return [gathered(slot) for slot in fz.slots]


def _print_transpose(spec: Spec, writer: _Writer) -> str:
    fz = spec.factorization
    results = _transposed(spec, writer)
    names = [c.name for c in _coefficient_symbols(fz.n_state)]
    args = [*(f"_{o.name}_bar" for o in fz.outputs), *names, *recurrent_arguments(spec)]
    return writer.text("transpose", args, results)


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

    for stage in fz.path:
        name = f"_{stage.symbol.name}_dot"
        if not isinstance(stage, Linear):
            writer.assign(name, gathered(stage.symbol))
            dot[stage.symbol] = sympy.Symbol(name, real=True)
            continue
        call = f"{stage.map.structure}_abs" if absolute else stage.map.structure
        writer.assign(name, f"{call}({stage.map.argument}, {gathered(operand_symbol(stage))})")
        dot[stage.symbol] = sympy.Symbol(name, real=True)
    names = [c.name for c in _coefficient_symbols(fz.n_state)]
    args = [*(dot[s].name for s in fz.slots), *names, *recurrent_arguments(spec)]
    return writer.text(program, args, [gathered(out) for out in fz.outputs])


def _gradient_results(
    spec: Spec, writer: _Writer, operands: Mapping[sympy.Expr, str]
) -> tuple[list[str], list[tuple[str, str]]]:
    """Cotangents of drives and elementwise parameters, and (cotangent, operand) of every
    linear stage; ``"None"`` where there is none."""
    fz = spec.factorization
    bar = {out: sympy.Symbol(f"_{out.name}_bar", real=True) for out in fz.outputs}

    def cotangent(source: sympy.Symbol) -> sympy.Expr:
        terms = [
            _edge_value(fz, target, source) * bar[target]
            for target, row in fz.edges.items()
            if source in row and target in bar
        ]
        return sum(terms, sympy.Integer(0))

    pairs = []
    assigned: dict[sympy.Expr, str] = {}
    for stage in reversed(fz.stops):
        total = cotangent(stage.symbol)
        name = f"_{stage.symbol.name}_bar"
        if not isinstance(stage, Linear):
            if total != 0:
                writer.assign(name, writer.printer(total))
                bar[stage.symbol] = sympy.Symbol(name, real=True)
            continue
        if total == 0:
            pairs.append(("None", "None"))
            continue
        writer.assign(name, writer.printer(total))
        assigned[total] = name
        weighted = stage.map.structure != "contract"  # no weight, no gradient of one
        operand = operands.get(stage.operand, str(stage.operand))
        pairs.append((name, operand) if weighted else ("None", "None"))
        inner = f"{operand_symbol(stage).name}_bar"
        writer.assign(inner, f"{stage.map.structure}_t({stage.map.argument}, {name})")
        bar[operand_symbol(stage)] = sympy.Symbol(inner, real=True)
    sources = [*(d.symbol for d in spec.drive_list), *(p.symbol for p in spec.param_list)]
    # A drive that enters next to a linear output (A h + u) has that output's cotangent.
    totals = [cotangent(s) for s in sources]
    texts = iter(writer.expressions([t for t in totals if t != 0 and t not in assigned]))
    results = ["None" if t == 0 else assigned[t] if t in assigned else next(texts) for t in totals]
    return results, pairs[::-1]


def _print_gradients(spec: Spec, writer: _Writer) -> str:
    """Cotangents of what enters one step besides the state, from those of the next state."""
    fz = spec.factorization
    operands = {o: f"_q{i}" for i, o in enumerate(fz.operands)}
    results, pairs = _gradient_results(spec, writer, operands)
    args = [
        *(f"_{o.name}_bar" for o in fz.outputs),
        *(s.name for s in fz.slots),
        *(c.name for c in _coefficient_symbols(len(fz.coefficients))),
        *operands.values(),
        *recurrent_arguments(spec),
    ]
    return writer.text("gradients", args, results + [name for pair in pairs for name in pair])


def _print_adjoint(spec: Spec, writer: _Writer) -> str:
    """One step of the backward pass of a channelwise Spec."""
    fz = spec.factorization
    writer.forward()
    operands = {o: f"_q{i}" for i, o in enumerate(fz.operands)}
    names = [c.name for c in _coefficient_symbols(len(fz.coefficients))]
    values = writer.expressions([*fz.coefficients, *fz.operands])
    for name, text in zip([*names, *operands.values()], values, strict=True):
        writer.assign(name, text)
    slots = _transposed(spec, writer)
    results, pairs = _gradient_results(spec, writer, operands)
    count = len(spec.drive_list)
    maps: dict[str, list[str]] = {m.name: [] for m in spec.map_list}
    for stage, (cotangent, operand) in zip(fz.linear, pairs, strict=True):
        if cotangent != "None":
            maps[stage.map.name].append(f"{operand}*{cotangent}")
    none = f"zero(_{fz.outputs[0].name}_bar)"
    weights = [" + ".join(terms) or none for terms in maps.values()]
    rest = [none if text == "None" else text for text in results]
    args = [*arguments(spec), *(f"_{o.name}_bar" for o in fz.outputs)]
    writer.lines = list(dict.fromkeys(writer.lines))  # both walks over the graph begin alike
    return writer.text("adjoint", args, slots + rest[:count] + weights + rest[count:])


def load(source: str, namespace: Mapping[str, Any]) -> Any:
    """Turn printed source into a function, over the operations that ``namespace`` supplies."""
    scope = dict(namespace)
    exec(compile(source, f"<pararnn:{source[4 : source.index('(')]}>", "exec"), scope)
    return scope[source[4 : source.index("(")]]
