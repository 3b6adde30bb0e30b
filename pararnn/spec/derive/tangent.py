"""The signal-flow graph of the state forwards: what a perturbation of the state becomes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import sympy

from ..declarations import Linear
from ..program import Apply, Let, Program, real, recurrent_arguments, zero
from .factorization import operand_symbol
from .forward import coefficient_symbols

if TYPE_CHECKING:
    from ..spec import Spec


def tangent(spec: Spec, absolute: bool = False) -> Program:
    fz = spec.factorization
    dot = {s: real(f"_{s.name}_dot") for s in fz.slots}
    perturbations = tuple(d.name for d in dot.values())
    statements = []

    def moved(target: sympy.Symbol) -> sympy.Expr:
        terms = [(fz.value(t, s), dot[s]) for t, s in fz.state_edges if t == target and s in dot]
        if not terms:
            return zero(dot[fz.slots[0]])
        return sum((abs(c) if absolute and c.is_number else c) * v for c, v in terms)

    for stage in fz.path:
        value = moved(operand_symbol(stage))
        if isinstance(stage, Linear):
            function = f"{stage.map.structure}{'_abs' * absolute}"
            value = Apply(function, stage.map.argument, value)
        dot[stage.symbol] = real(f"_{stage.symbol.name}_dot")
        statements.append(Let(dot[stage.symbol], value))
    names = tuple(c.name for c in coefficient_symbols(fz.n_state))
    inputs = (*perturbations, *names, *recurrent_arguments(spec))
    outputs = tuple(map(moved, fz.outputs))
    return Program("majorant" if absolute else "tangent", inputs, tuple(statements), outputs)


def majorant(spec: Spec) -> Program:
    """The same with absolute values."""
    return tangent(spec, absolute=True)
