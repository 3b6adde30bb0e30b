"""The step of a Spec, with the coefficients of its Jacobian."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import sympy

from ..declarations import Elementwise, Linear
from ..functions import sigmoid
from ..program import Apply, Group, Let, Program, arguments, real, recurrent_arguments
from .complements import Complements

if TYPE_CHECKING:
    from ..spec import Spec


def coefficient_symbols(count: int) -> tuple[sympy.Symbol, ...]:
    return tuple(real(f"_c{i}") for i in range(count))


class Stages:
    """The statements of all stages, and expressions over them as programs know them: with
    complements, and with diagonal maps as products in place. With symbols given a value, ``at`` that
    value; numbers then have no statement."""

    def __init__(self, spec: Spec, at: Mapping[sympy.Symbol, sympy.Expr] | None = None):
        self.spec = spec
        self.statements: list[Let | Group] = []
        self.complements = Complements()
        self.shorthand: dict[sympy.Symbol, sympy.Expr] = dict(at or {})
        self.depth: dict[sympy.Symbol, int] = {}
        for i, stage in enumerate(spec.stages, 1):
            self.depth[stage.symbol] = i
            if not isinstance(stage, Linear):
                self._elementwise(stage)
                continue
            operand = self(stage.operand)
            if stage.map.structure == "diagonal":
                # Kept unevaluated, so that a*(r*h) is computed in the order of the page.
                product = sympy.Mul(real(stage.map.name), operand, evaluate=False)
                self.shorthand[stage.symbol] = operand if operand == 0 else product
            else:
                applied = Apply(stage.map.structure, stage.map.argument, operand)
                self.statements.append(Let(stage.symbol, applied))

    def __call__(self, expr: sympy.Expr) -> sympy.Expr:
        return self.complements(expr).xreplace(self.shorthand)

    def _elementwise(self, stage: Elementwise) -> None:
        """A stage and its complement, which share their argument."""
        symbol, value = stage.symbol, self(stage.expr)
        if value.is_number:
            self.shorthand[symbol] = value
            return
        complement = self.complements.add(symbol, self.complements(stage.expr))
        if complement is None:
            self.statements.append(Let(symbol, value))
            return
        inner = value.args[0]
        if not inner.as_coeff_Mul()[1].is_Symbol:
            inner = real(f"_{symbol.name}_in")
            self.statements.append(Let(inner, value.args[0], brief=True))
        rest = self.complements.symbol_of(symbol)
        self.depth[rest] = self.depth[symbol]
        shared = -inner if isinstance(value, sigmoid) else inner
        self.statements.append(Let(symbol, value.func(inner)))
        self.statements.append(Let(rest, complement.func(shared)))

    def program(
        self,
        name: str,
        outputs: list[sympy.Expr],
        common: int | None = 0,
        inputs: tuple[str, ...] | None = None,
        target: sympy.Symbol | None = None,
    ) -> Program:
        inputs = arguments(self.spec) if inputs is None else inputs
        statements = tuple(self.statements)
        return Program(name, inputs, statements, tuple(outputs), common, self.depth, target)


def _target(spec: Spec) -> sympy.Symbol | None:
    """The update, if it is the last stage and as large as the state anyway."""
    update = spec.stages[-1].symbol
    whole = spec.factorization.outputs == (update,) and spec.axes_of(update) == spec.axes
    return update if whole and update in spec.factorization.state_dependent else None


def step(spec: Spec) -> Program:
    outputs = list(spec.factorization.outputs)
    return Stages(spec).program("step", outputs, None, target=_target(spec))


def step_jacobian(spec: Spec) -> Program:
    fz, stages = spec.factorization, Stages(spec)
    # Every coefficient has a name, so that e.g. 1 - z stays one term and is not reordered into a
    # longer sum, where it would cancel.
    names = coefficient_symbols(fz.n_state)
    values = tuple(map(stages, fz.coefficients[: fz.n_state]))
    stages.statements.append(Group(names, values, named=False))
    entries = [stages(e) for row in fz.channel_jacobian(names) for e in row]
    outputs, common = [*fz.outputs, *entries], len(fz.outputs)
    return stages.program("step_jacobian", outputs, common, target=_target(spec))


def affine(spec: Spec) -> Program:
    """What a linear recurrence needs of the drives: its operator's coefficients, and its input."""
    fz = spec.factorization
    if fz.jac_structure != "linear" or not spec.channelwise:
        raise ValueError(
            f"{spec.name}: 'affine' needs a channelwise Spec that is linear in its state, got class "
            f"{fz.jac_structure!r}."
        )
    stages = Stages(spec, dict.fromkeys(fz.slots, sympy.Integer(0)))
    outputs = [*fz.coefficients[: fz.n_state], *fz.outputs]
    inputs = arguments(spec)[len(fz.slots) :]
    return stages.program("affine", [stages(e) for e in outputs], inputs=inputs)


def coefficients(spec: Spec) -> Program:
    fz, stages = spec.factorization, Stages(spec)
    return stages.program("coefficients", [stages(c) for c in fz.coefficients[: fz.n_state]])


def linearization(spec: Spec) -> Program:
    fz, stages = spec.factorization, Stages(spec)
    values = [stages(e) for e in (*fz.coefficients, *fz.operands)]
    return stages.program("linearization", values)


def channel_jacobian(spec: Spec) -> Program:
    fz = spec.factorization
    names = coefficient_symbols(fz.n_state)
    entries = tuple(e for row in fz.channel_jacobian(names) for e in row)
    inputs = (*(s.name for s in names), *recurrent_arguments(spec))
    return Program("channel_jacobian", inputs, (), entries, common=0)


def read(spec: Spec) -> Program:
    """The read-out from the new state."""
    out = spec.readout
    if out is None:
        raise ValueError(f"{spec.name}: it has no read-out; a layer passes on the state.")
    applied = Apply(out.map.structure, out.map.argument, out.operand)
    new = spec.factorization.outputs
    inputs = (*(s.name for s in new), *arguments(spec)[len(new) :])
    statements, depth = (Let(out.symbol, applied),), dict.fromkeys(new, 1)
    return Program("read", inputs, statements, (out.symbol,), depth=depth)
