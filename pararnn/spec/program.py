"""Programs as data: inputs, assignments, applications of linear maps, outputs.

:mod:`.derive` makes them from a Spec, the passes of this module put them in order (what is common is
computed once, what no output needs is left out), and :mod:`.print` writes them down last.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import sympy

if TYPE_CHECKING:
    from .spec import Spec


class Operation(sympy.Function):
    """What programs call besides the functions of a Spec, by its name."""


class zero(Operation):
    """Nothing, in the shape of its argument."""


class tanh_backward(Operation):
    """``g·(1−y²)``, what differentiating ``y = tanh(x)`` gives, as one operation."""


@dataclass(frozen=True)
class Apply:
    """A linear map on an operand: ``function(argument, operand)``, the argument its weight or axis."""

    function: str
    argument: str
    operand: sympy.Expr

    @property
    def free_symbols(self) -> set[sympy.Basic]:
        return self.operand.free_symbols | {real(self.argument)}


@dataclass(frozen=True)
class Let:
    """``symbol = value``. A ``brief`` one is written inside the statement that needs it, where
    only one does."""

    symbol: sympy.Symbol
    value: sympy.Expr | Apply
    brief: bool = False


@dataclass(frozen=True)
class Group:
    """Several values, whose common subexpressions are computed once. Without ``named``, a value
    that is a symbol then needs no other name."""

    symbols: tuple[sympy.Symbol, ...]
    values: tuple[sympy.Expr, ...]
    named: bool = True


@dataclass(frozen=True)
class Program:
    """A function: ``outputs`` of ``inputs``, by way of ``statements``. An output may be None.

    Outputs from ``common`` on are a group. ``depth`` says of some symbols how late they are known;
    ``target`` is an output that may be written to memory that the caller gives.
    """

    name: str
    inputs: tuple[str, ...]
    statements: tuple[Let | Group, ...]
    outputs: tuple[sympy.Expr | None, ...]
    common: int | None = None
    depth: Mapping[sympy.Symbol, int] = field(default_factory=dict)
    target: sympy.Symbol | None = None


def real(name: str) -> sympy.Symbol:
    """A symbol of programs."""
    return sympy.Symbol(name, real=True)


def arguments(spec: Spec) -> tuple[str, ...]:
    """Inputs of the ``step`` family: slots, drives, then maps and parameters."""
    return (
        *(s.name for s in spec.slots),
        *(d.name for d in spec.drive_list),
        *recurrent_arguments(spec),
    )


def recurrent_arguments(spec: Spec) -> tuple[str, ...]:
    """The recurrent parameters: maps, then elementwise parameters."""
    return (*(m.name for m in spec.map_list), *(p.name for p in spec.param_list))


def finished(
    program: Program, change: Callable[[sympy.Expr], sympy.Expr]
) -> tuple[list[Let], list[sympy.Expr | None]]:
    """Statements and outputs with common subexpressions computed once, and without what no output
    needs. ``change`` is made to the values of groups before subexpressions break them up."""
    statements, outputs = _shared(program, change)
    return _brief(_live(statements, outputs), outputs), outputs


def _shared(
    program: Program, change: Callable[[sympy.Expr], sympy.Expr]
) -> tuple[list[Let], list[sympy.Expr | None]]:
    count = 0
    same: dict[sympy.Symbol, sympy.Expr] = {}
    statements: dict[Let, None] = {}  # two walks over one graph may begin alike

    def reduced(values: Sequence[sympy.Expr | None]) -> list[sympy.Expr]:
        nonlocal count
        exprs = {i: v for i, v in enumerate(values) if v is not None and not v.has(zero)}
        symbols = (real(f"_x{i}") for i in range(count, 10**6))
        changed = [change(v.xreplace(same)) for v in exprs.values()]
        temporaries, rest = sympy.cse(changed, symbols=symbols, order="canonical")
        count += len(temporaries)
        statements.update((Let(symbol, value), None) for symbol, value in temporaries)
        left = dict(zip(exprs, rest, strict=True))
        return [left.get(i, v) for i, v in enumerate(values)]

    for statement in program.statements:
        if isinstance(statement, Let):
            statements[statement] = None
            continue
        for symbol, value in zip(statement.symbols, reduced(statement.values), strict=True):
            if value.is_Symbol and not statement.named:
                same[symbol] = value
            else:
                statements[Let(symbol, value)] = None
    outputs = list(program.outputs)
    if program.common is not None:
        outputs[program.common :] = reduced(outputs[program.common :])
    return list(statements), outputs


def _needed(values: Iterable[sympy.Expr | Apply | None]) -> Counter[sympy.Basic]:
    """How many of the values have a symbol in them."""
    return Counter(s for value in values if value is not None for s in value.free_symbols)


def _live(statements: list[Let], outputs: list[sympy.Expr | None]) -> list[Let]:
    needed, kept = set(_needed(outputs)), []
    for statement in reversed(statements):
        if statement.symbol in needed:
            kept.append(statement)
            needed |= statement.value.free_symbols
    return kept[::-1]


def _brief(statements: list[Let], outputs: list[sympy.Expr | None]) -> list[Let]:
    """Without the brief statements that only one other needs."""
    users = _needed([*outputs, *(s.value for s in statements)])
    inside = {s.symbol: s.value for s in statements if s.brief and users[s.symbol] == 1}
    kept = [s for s in statements if s.symbol not in inside]
    return [
        replace(s, value=s.value.xreplace(inside)) if isinstance(s.value, sympy.Expr) else s
        for s in kept
    ]


def load(source: str, namespace: Mapping[str, Any]) -> Any:
    """Turn printed source into a function, over the operations that ``namespace`` supplies."""
    scope = dict(namespace)
    exec(compile(source, f"<pararnn:{source[4 : source.index('(')]}>", "exec"), scope)
    return scope[source[4 : source.index("(")]]
