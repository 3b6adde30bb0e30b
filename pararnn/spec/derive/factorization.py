"""The factorized Jacobian of a Spec.

Between its linear maps a Spec is elementwise, so its Jacobian is a small signal-flow graph. The
*nodes* are the state slots, the drives and parameters, and for every linear stage its operand
``q`` and its output ``p = M q``. An *edge* ``(target, source)`` carries an elementwise coefficient
``∂target/∂source`` with all ``p`` held as independent variables. Then

    dq = Σ c(q, h) dh + Σ c(q, p) dp,      dp = M dq,      dh' = Σ c(h', h) dh + Σ c(h', p) dp

is the JVP, and reading the graph backwards is the VJP. Nothing larger than a state is formed.
A stage that its Spec declares a node is both a target and a source, like a map that is 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import sympy

from ..declarations import Elementwise, Linear, Stage
from ..functions import primitive_of

if TYPE_CHECKING:
    from ..spec import Spec

Edges = Mapping[sympy.Symbol, sympy.Expr]


def operand_symbol(stage: Stage) -> sympy.Symbol:
    """The node that stands for the input of a linear stage; a node of its own stands for itself."""
    if isinstance(stage, Elementwise):
        return stage.symbol
    return sympy.Symbol(f"_{stage.symbol.name}_in", real=True)


@dataclass(frozen=True)
class Factorization:
    """Edges of the signal-flow graph, by target: ``edges[target][source] = coefficient``.

    Targets are linear operands and nodes (in stage order), and the slots' next symbols.
    """

    spec: Spec
    stops: tuple[Stage, ...]
    edges: Mapping[sympy.Symbol, Edges]

    @cached_property
    def linear(self) -> tuple[Linear, ...]:
        return tuple(st for st in self.stops if isinstance(st, Linear))

    @cached_property
    def slots(self) -> tuple[sympy.Symbol, ...]:
        return tuple(s.symbol for s in self.spec.slots)

    @cached_property
    def outputs(self) -> tuple[sympy.Symbol, ...]:
        return tuple(s.next_symbol for s in self.spec.slots)

    @cached_property
    def state_edges(self) -> tuple[tuple[sympy.Symbol, sympy.Symbol], ...]:
        """(target, source) pairs that carry a perturbation of the state, in evaluation order."""
        carriers = set(self.slots)
        pairs = []
        for target in (*(operand_symbol(s) for s in self.stops), *self.outputs):
            found = [src for src in self.edges[target] if src in carriers]
            pairs += [(target, src) for src in found]
            for stage in self.stops:
                if operand_symbol(stage) == target and found:
                    carriers.add(stage.symbol)
        return tuple(pairs)

    @cached_property
    def coefficients(self) -> tuple[sympy.Expr, ...]:
        """The distinct coefficients that are not plain numbers: first those of
        :attr:`state_edges` (the first :attr:`n_state`), then those of drives and parameters."""
        others = [(t, s) for t, row in self.edges.items() for s in row]
        found = (self.edges[t][s] for t, s in (*self.state_edges, *others))
        return tuple(dict.fromkeys(c for c in found if not c.is_number))

    @cached_property
    def n_state(self) -> int:
        """How many of :attr:`coefficients` carry a perturbation of the state."""
        state = {self.edges[t][s] for t, s in self.state_edges}
        return sum(c in state for c in self.coefficients)

    def position(self, target: sympy.Symbol, source: sympy.Symbol) -> int | None:
        """Index of an edge's coefficient in :attr:`coefficients`; None if it is a number."""
        c = self.edges[target][source]
        return None if c.is_number else self.coefficients.index(c)

    def value(self, target: sympy.Symbol, source: sympy.Symbol) -> sympy.Expr:
        """An edge's coefficient as programs know it: a number, or the name of an argument."""
        i = self.position(target, source)
        return self.edges[target][source] if i is None else sympy.Symbol(f"_c{i}", real=True)

    @cached_property
    def operands(self) -> tuple[sympy.Expr, ...]:
        """Operands of weighted linear stages that are more than a slot, each once."""
        found = (st.operand for st in self.linear if st.map.structure != "contract")
        return tuple(dict.fromkeys(o for o in found if o not in self.slots))

    @cached_property
    def path(self) -> tuple[Stage, ...]:
        """Linear stages and nodes on the path from the state to its update."""
        sources = {s for _, s in self.state_edges}
        targets = {t for t, _ in self.state_edges}
        return tuple(
            st for st in self.stops if st.symbol in sources and operand_symbol(st) in targets
        )

    @cached_property
    def carrying(self) -> tuple[Linear, ...]:
        """Linear stages on the path from the state to its update."""
        return tuple(st for st in self.path if isinstance(st, Linear))

    @cached_property
    def state_dependent(self) -> frozenset[sympy.Symbol]:
        """Symbols whose value depends on the previous state."""
        found = set(self.slots)
        for stage in self.spec.stages:
            if stage.expr.free_symbols & found:
                found.add(stage.symbol)
        return frozenset(found)

    @cached_property
    def jac_structure(self) -> str:
        if not any(
            c.free_symbols & self.state_dependent for c in self.coefficients[: self.n_state]
        ):
            return "linear"
        structures = {st.map.structure for st in self.carrying}
        named = (("contract", "dense"), ("right", "m2rnn"), ("dense", "dense"), ("head", "head"))
        for structure, name in named:
            if structure in structures:
                return name
        return "diag" if len(self.slots) == 1 else f"block{len(self.slots)}"

    @cached_property
    def linear_class(self) -> str | None:
        if self.jac_structure != "linear":
            return None
        structures = {st.map.structure for st in self.carrying} - {"diagonal"}
        if "contract" in structures:
            return "householder" if self.columnwise else "dense"
        for structure in ("right", "dense", "head"):
            if structure in structures:
                return structure
        return {1: "diag", 2: "planar"}.get(len(self.slots), f"block{len(self.slots)}")

    @cached_property
    def columnwise(self) -> bool:
        """Whether the Jacobian is one matrix that acts on every column of a matrix state alike:
        only sums over the rows, and no coefficient that varies along the columns."""
        axes = self.spec.axes
        return (
            len(self.slots) == 1
            and len(axes) > 1
            and all(st.map.dim == -2 for st in self.carrying)
            and not any(axes[-1] in self.spec.axes_of(c) for c in self.coefficients[: self.n_state])
        )

    def channel_jacobian(self, named: Sequence[sympy.Expr]) -> list[list[sympy.Expr]]:
        """Entries ``∂h'_i/∂h_j`` of a channelwise Spec, over names of the first :attr:`n_state`
        coefficients and the diagonals of the maps."""
        rows: dict[sympy.Symbol, list[sympy.Expr]] = {
            s: [sympy.Integer(int(i == j)) for j in range(len(self.slots))]
            for i, s in enumerate(self.slots)
        }

        def combine(target: sympy.Symbol) -> list[sympy.Expr]:
            total = [sympy.Integer(0)] * len(self.slots)
            for t, source in self.state_edges:
                if t == target and source in rows:
                    i = self.position(t, source)
                    c = self.edges[t][source] if i is None else named[i]
                    total = [a + c * b for a, b in zip(total, rows[source], strict=True)]
            return total

        for stage in self.path:
            rows[stage.symbol] = combine(operand_symbol(stage))
            if isinstance(stage, Linear):
                weight = sympy.Symbol(stage.map.name, real=True)
                rows[stage.symbol] = [weight * e for e in rows[stage.symbol]]
        return [combine(out) for out in self.outputs]


def partial(stage: Elementwise, symbol: sympy.Symbol) -> sympy.Expr:
    """``∂stage/∂symbol``, written with the stage's own output where it is a function call."""
    primitive = primitive_of(stage.expr)
    if primitive is None:
        return sympy.diff(stage.expr, symbol)
    inner = stage.expr.args
    slopes = primitive.derivatives(inner, stage.symbol)
    return sum(
        (slope * sympy.diff(x, symbol) for slope, x in zip(slopes, inner, strict=True)),
        sympy.Integer(0),
    )


def factorize(spec: Spec, *, at: Sequence[sympy.Symbol] = ()) -> Factorization:
    """Forward accumulation through the elementwise stages, stopping at every linear map.

    It stops at the stages of ``at`` too (new slot values, say), so that a later stage's dependence
    on one is an edge of its own: shorter to read, but a slot then is both a target and a source.
    """
    sources = [s.symbol for s in spec.slots]
    sources += [d.symbol for d in spec.drive_list] + [p.symbol for p in spec.param_list]
    tangent: dict[sympy.Symbol, dict[sympy.Symbol, sympy.Expr]] = {
        s: {s: sympy.Integer(1)} for s in sources
    }

    def accumulate(terms: list[tuple[sympy.Symbol, sympy.Expr]]) -> dict:
        total: dict[sympy.Symbol, sympy.Expr] = {}
        for symbol, coefficient in terms:
            for source, inner in tangent[symbol].items():
                total[source] = total.get(source, sympy.Integer(0)) + coefficient * inner
        return {s: c for s, c in total.items() if c != 0}

    def ordered(expr: sympy.Expr) -> list[sympy.Symbol]:
        return [s for s in tangent if s in expr.free_symbols]

    edges: dict[sympy.Symbol, dict[sympy.Symbol, sympy.Expr]] = {}
    updates = [s.next_symbol for s in spec.slots]
    stops: list[Stage] = []
    for stage in spec.stages:
        if isinstance(stage, Linear):
            terms = [(s, sympy.diff(stage.operand, s)) for s in ordered(stage.operand)]
            edges[operand_symbol(stage)] = accumulate(terms)
            tangent[stage.symbol] = {stage.symbol: sympy.Integer(1)}
            stops.append(stage)
        else:
            terms = [(s, partial(stage, s)) for s in ordered(stage.expr)]
            tangent[stage.symbol] = accumulate(terms)
            if stage.node or stage.symbol in at:
                edges[stage.symbol] = tangent[stage.symbol]
                tangent[stage.symbol] = {stage.symbol: sympy.Integer(1)}
            if stage.node:
                stops.append(stage)
    edges |= {symbol: tangent[symbol] for symbol in updates if symbol not in at}
    return Factorization(spec, tuple(stops), edges)
