"""The signal-flow graph backwards: the cotangents of a step, from those of its update."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import sympy

from ..declarations import Linear
from ..program import Apply, Group, Let, Program, arguments, real, recurrent_arguments, zero
from .factorization import operand_symbol
from .forward import Stages, coefficient_symbols

if TYPE_CHECKING:
    from ..spec import Spec

Edge = tuple[sympy.Symbol, sympy.Symbol]


def bar_of(symbol: sympy.Symbol) -> sympy.Symbol:
    return real(f"{'' if symbol.name.startswith('_') else '_'}{symbol.name}_bar")


class Cotangents:
    """One walk over the graph, from the updates to the sources, along some of its edges.

    ``bar`` is the cotangent of every symbol on the way; ``operands`` names the operands of linear
    maps that are more than a slot.
    """

    def __init__(self, spec: Spec, edges: Iterable[Edge]):
        self.spec, self.fz, self.edges = spec, spec.factorization, tuple(edges)
        self.bar = {out: bar_of(out) for out in self.fz.outputs}
        self.inputs = tuple(b.name for b in self.bar.values())
        self.nothing = zero(self.bar[self.fz.outputs[0]])
        self.operands = {o: real(f"_q{i}") for i, o in enumerate(self.fz.operands)}
        self.statements: list[Let] = []
        known: dict[sympy.Expr, sympy.Symbol] = {}
        for stage in reversed(self.fz.stops):
            total = self.total(stage.symbol)
            if total == 0:
                continue
            outer = self.bar[stage.symbol] = bar_of(stage.symbol)
            self.statements.append(Let(outer, total))
            if isinstance(stage, Linear):
                known[total] = outer
                inner = self.bar[operand_symbol(stage)] = bar_of(operand_symbol(stage))
                applied = Apply(f"{stage.map.structure}_t", stage.map.argument, outer)
                self.statements.append(Let(inner, applied))
        sources = [*(d.symbol for d in spec.drive_list), *(p.symbol for p in spec.param_list)]
        totals = map(self.total, sources)
        # A drive that enters next to a linear output (A h + u) has that output's cotangent.
        self.sources = [None if t == 0 else known.get(t, t) for t in totals]

    def total(self, source: sympy.Symbol) -> sympy.Expr:
        """The cotangent of a source."""
        targets = [t for t, s in self.edges if s == source and t in self.bar]
        return sum((self.fz.value(t, source) * self.bar[t] for t in targets), sympy.Integer(0))

    @property
    def slots(self) -> list[sympy.Expr]:
        return [self.total(s) or self.nothing for s in self.fz.slots]

    @property
    def pairs(self) -> list[tuple[sympy.Symbol | None, sympy.Symbol | None]]:
        """(Cotangent, operand) of every linear stage with a weight that has them."""
        return [
            (self.bar[st.symbol], self.operands.get(st.operand, st.operand))
            if st.symbol in self.bar and st.map.structure != "contract"
            else (None, None)
            for st in self.fz.linear
        ]


def every_edge(spec: Spec) -> Iterable[Edge]:
    return ((t, s) for t, row in spec.factorization.edges.items() for s in row)


def transpose(spec: Spec) -> Program:
    fz = spec.factorization
    walk = Cotangents(spec, fz.state_edges)
    names = tuple(c.name for c in coefficient_symbols(fz.n_state))
    inputs = (*walk.inputs, *names, *recurrent_arguments(spec))
    return Program("transpose", inputs, tuple(walk.statements), tuple(walk.slots))


def gradients(spec: Spec) -> Program:
    """Cotangents of what enters one step besides the state, from those of the next state."""
    fz = spec.factorization
    walk = Cotangents(spec, every_edge(spec))
    inputs = (
        *walk.inputs,
        *(s.name for s in fz.slots),
        *(c.name for c in coefficient_symbols(len(fz.coefficients))),
        *(q.name for q in walk.operands.values()),
        *recurrent_arguments(spec),
    )
    outputs = (*walk.sources, *(name for pair in walk.pairs for name in pair))
    return Program("gradients", inputs, tuple(walk.statements), outputs, common=0)


def adjoint(spec: Spec) -> Program:
    """One step of the backward pass of a channelwise Spec."""
    fz, stages, walk = spec.factorization, Stages(spec), Cotangents(spec, every_edge(spec))
    names = (*coefficient_symbols(len(fz.coefficients)), *walk.operands.values())
    stages.statements.append(Group(names, tuple(map(stages, (*fz.coefficients, *fz.operands)))))
    stages.statements += walk.statements
    weights: dict[str, list[sympy.Expr]] = {m.name: [] for m in spec.map_list}
    for stage, (cotangent, operand) in zip(fz.linear, walk.pairs, strict=True):
        if cotangent is not None:
            weights[stage.map.name].append(sympy.Mul(operand, cotangent, evaluate=False))
    maps = [sympy.Add(*terms, evaluate=False) if terms else None for terms in weights.values()]
    sources, count = walk.sources, len(spec.drive_list)
    rest = [*sources[:count], *maps, *sources[count:]]
    outputs = [*walk.slots, *(walk.nothing if out is None else out for out in rest)]
    inputs = (*arguments(spec), *walk.inputs)
    return stages.program("adjoint", outputs, len(fz.slots), inputs)
