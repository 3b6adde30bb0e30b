"""Writing a Spec: what is declared inside its ``with`` block, checked as it is written.

Inside the block SymPy does not evaluate, so the equations keep the order in which they were
written; that order is what the page shows. Everything that computes uses the canonical form.
"""

from __future__ import annotations

import contextlib
import keyword
import warnings
from collections.abc import Iterable
from dataclasses import replace
from typing import ClassVar, Self

import sympy

from .declarations import (
    STRUCTURES,
    Drive,
    Elementwise,
    Linear,
    Map,
    Param,
    Read,
    Slot,
    SpecError,
    SpecWarning,
    Stage,
)
from .functions import PRIMITIVES, RESERVED, expression, primitive_of
from .names import (
    affine,
    axis_names,
    latex_of,
    printable,
    split_names,
    subscript,
    with_subscript,
)

LANGUAGE = (sympy.Symbol, sympy.Rational, sympy.Float, sympy.Add, sympy.Mul, sympy.Pow)


HINTS = (
    "Use the functions of pararnn.spec (sigmoid, tanh, …), not those of torch, numpy or math; unpack "
    "what drives() returns, as in (u,) = s.drives('u'); and put maximum(a, b) for max(a, b): an "
    "expression has no value that 'if' could test."
)
"""What goes wrong where Python itself raises while a Spec is written."""


def canonical(expr: sympy.Expr) -> sympy.Expr:
    """Rebuild an unevaluated expression with SymPy's evaluation switched on."""
    if not expr.args:
        return expr
    return expr.func(*[canonical(a) for a in expr.args])


class Builder:
    """The declarations of a Spec. Every method of the open block adds one; none changes any."""

    needs_state: ClassVar[bool] = True

    def __init__(
        self,
        name: str,
        axes: tuple[str, ...] = ("d",),
        *,
        output: str = "last",
        parallel: tuple[str, ...] = (),
    ):
        self.name = printable("Spec", name, '"\\')
        if output not in ("last", "all"):
            raise SpecError(f"Spec {name!r}: got output {output!r}, expected 'last' or 'all'.")
        self.output = output
        self.axes = axis_names(name, "axes", axes)
        self.parallel = axis_names(name, "parallel", parallel)
        if any(a not in self.axes for a in self.parallel):
            raise SpecError(
                f"Spec {name!r}: got parallel axes {self.parallel}, expected some of the state "
                f"axes {self.axes}."
            )
        self.slots: tuple[Slot, ...] = ()
        self.drive_list: tuple[Drive, ...] = ()
        self.map_list: tuple[Map, ...] = ()
        self.param_list: tuple[Param, ...] = ()
        self.stages: tuple[Stage, ...] = ()
        self.readout: Read | None = None
        self._open = False
        self._frozen = False
        self._names: set[str] = set()
        self._axes: dict[sympy.Symbol, tuple[str, ...]] = {}
        self._evaluate = contextlib.ExitStack()

    def __enter__(self) -> Self:
        if self._frozen:
            raise SpecError(f"Spec {self.name!r} is frozen; define a new Spec to change it.")
        self._open = True
        self._evaluate.enter_context(sympy.evaluate(False))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, *_: object
    ) -> None:
        self._evaluate.close()
        self._open = False
        if kind is None:
            self._freeze()
        elif isinstance(error, TypeError | ValueError) and not isinstance(error, SpecError):
            raise SpecError(
                f"Spec {self.name!r}: got {kind.__name__} ({error}), expected expressions of "
                f"symbols. {HINTS}"
            ) from error

    def _claim(self, name: str, axes: tuple[str, ...] = ()) -> sympy.Symbol:
        """A new symbol, which varies along the axes."""
        if not self._open:
            raise SpecError(
                f"Spec {self.name!r} is not open: declare symbols and stages inside "
                f"'with Spec({self.name!r}) as s:'."
            )
        reason = ""
        if not name.isidentifier() or keyword.iskeyword(name):
            reason = "is not an identifier"
        elif name in self._names:
            reason = "is already used"
        elif name in RESERVED:
            reason = "is that of a function in generated programs"
        elif name.startswith("_"):
            reason = "starts with an underscore, as names in generated programs do"
        if reason:
            raise SpecError(f"Spec {self.name!r}: the name {name!r} {reason}; choose another.")
        self._names.add(name)
        symbol = sympy.Symbol(name, real=True)
        self._axes[symbol] = axes
        return symbol

    def state(
        self, name: str = "h", *, bounds: tuple[float, float] | None = None, latex: str = ""
    ) -> sympy.Symbol:
        """Declare a state slot and return the symbol of its *previous* value ``h_{t-1}``.

        ``bounds`` is an interval that every step maps into itself. An end may be infinite, if the
        derivatives are bounded all the same; with bounds, errors of a solve can be certified.
        """
        symbol, following = self._claim(name, self.axes), self._claim(f"{name}_next")
        if bounds is not None and not bounds[0] < bounds[1]:
            raise SpecError(
                f"Slot {name!r}: got bounds {bounds}, expected (low, high), low < high."
            )
        self.slots += (Slot(symbol, following, latex_of(name, latex), bounds),)
        return symbol

    def drives(
        self,
        *names: str | Iterable[str],
        axes: tuple[str, ...] | None = None,
        inline: bool = True,
        of: str = "x",
    ) -> tuple[sympy.Symbol, ...]:
        """Declare what the input gives at each step, in the order in which it is packed.

        ``of`` is the letter of the input on the page.
        """
        axes = self.axes if axes is None else tuple(axes)
        self._check_axes("drive", axes)
        out = []
        for name in split_names(names):
            symbol = self._claim(name, axes)
            vector = bool(set(axes) - set(self.parallel))
            formula = affine(name if not inline else subscript(name)[1], vector, of)
            self.drive_list += (Drive(symbol, axes, latex_of(name), formula, inline, of=of),)
            out.append(symbol)
        return tuple(out)

    def time_gap(self, name: str = "dt", *, latex: str = r"\Delta t") -> sympy.Symbol:
        r"""Declare the time since the step before, one number a step: ``\Delta t_t ≥ 0``.

        It is a drive that is given with the sequence, not computed from ``x_t``, and the last in
        the order of drives. A Spec has at most one.
        """
        if self.gap is not None:
            raise SpecError(
                f"Spec {self.name!r}: got a second time gap {name!r} beside {self.gap.name!r}; "
                "declare one and use it in several stages."
            )
        symbol = self._claim(name)
        self.drive_list += (Drive(symbol, (), latex, "", inline=False, given=True),)
        return symbol

    def maps(self, *names: str | Iterable[str], structure: str) -> tuple[Map, ...]:
        """Declare recurrent linear maps; call one on an expression to apply it."""
        if structure not in STRUCTURES:
            raise SpecError(
                f"Spec {self.name!r}: got structure {structure!r}, expected one of {STRUCTURES}."
            )
        if structure == "right" and len(self.axes) != 2:
            raise SpecError(
                f"Spec {self.name!r}: structure 'right' multiplies a matrix state from the right, "
                f"but the state axes are {self.axes}; declare two axes, e.g. axes=('K', 'V')."
            )
        if structure in ("head", "dense") and len(self.axes) != 1:
            raise SpecError(
                f"Spec {self.name!r}: structure {structure!r} acts on a vector state, but the "
                f"state axes are {self.axes}; use 'right' or 'diagonal'."
            )
        out = []
        for name in split_names(names):
            self._claim(name)
            base, sub = subscript(name)
            shown = base.lower() if structure == "diagonal" else base
            out.append(Map(name, structure, with_subscript(shown, sub), self))
        self.map_list += tuple(out)
        return tuple(out)

    def map(self, name: str, *, structure: str) -> Map:
        """Declare one recurrent linear map."""
        return self.maps(name, structure=structure)[0]

    def params(
        self, *names: str | Iterable[str], axes: tuple[str, ...] | None = None
    ) -> tuple[sympy.Symbol, ...]:
        """Declare elementwise recurrent parameters (peepholes, time constants, …)."""
        return self._parameters(split_names(names), axes, trained=True)

    def constants(
        self, *names: str | Iterable[str], axes: tuple[str, ...] | None = None
    ) -> tuple[sympy.Symbol, ...]:
        """Declare numbers that are not trained, a step or a rate: parameters whose values the cell
        gives, by its method ``constants()``."""
        return self._parameters(split_names(names), axes, trained=False)

    def _parameters(
        self, names: list[str], axes: tuple[str, ...] | None, trained: bool
    ) -> tuple[sympy.Symbol, ...]:
        axes = self.axes if axes is None else tuple(axes)
        self._check_axes("parameter", axes)
        out = []
        for name in names:
            symbol = self._claim(name, axes)
            self.param_list += (Param(symbol, axes, latex_of(name), trained),)
            out.append(symbol)
        return tuple(out)

    def let(
        self, name: str, expr: sympy.Expr, *, latex: str = "", node: bool = False
    ) -> sympy.Symbol:
        """Name an elementwise stage; it gets a numbered line on the page.

        Between maps, derivatives are multiplied out. A ``node`` is a point where they are chained
        instead: give it to what many later stages use, in a recurrence of many rounds.
        """
        symbol = self._claim(name)
        self._add_elementwise(symbol, self._written(expr, name), latex, node)
        return symbol

    def next(self, slot: sympy.Symbol, expr: sympy.Expr) -> None:
        """Say what the slot becomes: ``slot_t = expr``."""
        for s in self.slots:
            if s.symbol == slot:
                if any(st.symbol == s.next_symbol for st in self.stages):
                    raise SpecError(f"Slot {s.name!r} already has an update; give it only one.")
                self._add_elementwise(s.next_symbol, self._written(expr, s.name), s.latex)
                return
        raise SpecError(f"{slot!r} is not a state slot of {self.name!r}; declare it with state().")

    def updated(self, slot: sympy.Symbol) -> sympy.Symbol:
        """The slot's *new* value, for later stages (a peephole on the new cell state, say)."""
        for s in self.slots:
            if s.symbol == slot:
                return s.next_symbol
        raise SpecError(f"{slot!r} is not a state slot of {self.name!r}.")

    def contract(self, name: str, expr: sympy.Expr, *, over: str) -> sympy.Symbol:
        """Name a sum of ``expr`` over one state axis, e.g. ``kᵀ H`` as
        ``contract("p", k * H, over="K")``. On the page it is printed where it is used."""
        symbol = self._claim(name)
        operand, inner, map_ = self._contraction(name, expr, over)
        self._axes[symbol] = tuple(a for a in self.axes_of(inner) if a != over)
        self.stages += (Linear(symbol, map_, operand, inner),)
        return symbol

    def read(self, name: str, expr: sympy.Expr, *, over: str, latex: str = "") -> sympy.Symbol:
        """Say what a layer passes on, if it is not the state: a sum of ``expr`` over one state axis.

        ``expr`` is a sum of products of the new state (:meth:`updated`), drives and parameters. It
        is the last equation of the page, and no part of the recurrence or its Jacobian.
        """
        if self.readout is not None:
            raise SpecError(
                f"Spec {self.name!r}: got a second read-out {name!r} beside "
                f"{self.readout.symbol.name!r}; there is one."
            )
        symbol = self._claim(name)
        before = self.stages
        operand, inner, map_ = self._contraction(name, expr, over)
        known = {s.next_symbol for s in self.slots} | {d.symbol for d in self.drive_list}
        known |= {p.symbol for p in self.param_list}
        if self.stages != before or inner.free_symbols - known:
            raise SpecError(
                f"Spec {self.name!r}, read-out {name!r}: got {operand}, expected a sum of products "
                "of the new state, updated(…), drives and parameters."
            )
        self._axes[symbol] = tuple(a for a in self.axes_of(inner) if a != over)
        self.readout = Read(symbol, map_, operand, inner, latex_of(name, latex))
        return symbol

    def _contraction(
        self, name: str, expr: sympy.Expr, over: str
    ) -> tuple[sympy.Expr, sympy.Expr, Map]:
        """A sum's operand as written and in canonical form, and the map that sums."""
        operand = self._written(expr, name)
        inner = self._canonical(operand, name)
        if over not in self.axes_of(inner):
            raise SpecError(
                f"Spec {self.name!r}, {name!r}: got a sum over {over!r} of an expression with the "
                f"axes {self.axes_of(inner)}, expected one of these."
            )
        dim = self.axes.index(over) - len(self.axes)
        return operand, inner, Map(f"sum_{over}", "contract", over, dim=dim)

    def _apply_map(self, map_: Map, operand: sympy.Expr) -> sympy.Symbol:
        operand = self._written(operand, map_.name)
        for stage in self.stages:
            if isinstance(stage, Linear) and stage.map == map_ and stage.authored == operand:
                return stage.symbol
        base, sub = subscript(map_.name)
        name = f"{base.lower()}_dot_{sub}" if sub else f"{base.lower()}_dot"
        while name in self._names:
            name += "_"
        symbol = self._claim(name, self.axes)
        inner = self._canonical(operand, name)
        if self.axes_of(inner) != self.axes:
            raise SpecError(
                f"Spec {self.name!r}: the map {map_.name!r} acts on operands with the axes "
                f"{self.axes}, got one with {self.axes_of(inner)}; multiply it into the state "
                "first, or use an elementwise parameter."
            )
        self.stages += (Linear(symbol, map_, operand, inner),)
        return symbol

    def _written(self, expr: object, where: str) -> sympy.Expr:
        try:
            return expression(expr)
        except TypeError as error:
            raise SpecError(f"Spec {self.name!r}, {where!r}: {error}") from None

    def _add_elementwise(
        self, symbol: sympy.Symbol, authored: sympy.Expr, latex: str, node: bool = False
    ) -> None:
        latex = latex_of(symbol.name, latex)
        expr = self._canonical(authored, symbol.name, top=True)
        if expr.is_number:
            raise SpecError(
                f"Spec {self.name!r}, stage {symbol.name!r}: got the constant {expr}, expected an "
                "expression of states, drives or parameters; write the number where it is used."
            )
        self._axes[symbol] = self.axes_of(expr)
        self.stages += (Elementwise(symbol, authored, expr, latex, node=node),)

    def _canonical(self, expr: sympy.Expr, name: str, top: bool = False) -> sympy.Expr:
        with sympy.evaluate(True):
            return self._hoist(self._defined(canonical(expr), name), name, top)

    def _hoist(self, expr: sympy.Expr, name: str, top: bool = True) -> sympy.Expr:
        """Give every nested primitive call a hidden stage, so that a stage is ``f(algebraic)``
        or algebraic. Derivatives can then be written in terms of named outputs. What a function
        of two arguments compares is named too, so that both its value and its derivative see the
        same rounded numbers."""
        if not expr.args:
            return expr
        rebuilt = expr.func(*[self._hoist(a, name, top=False) for a in expr.args])
        primitive = primitive_of(rebuilt)
        if primitive is None or rebuilt.is_number:
            return rebuilt
        if primitive.arity > 1:
            named = [
                a if a.is_Symbol or a.is_number else self._hidden(a, f"{name}_{side}")
                for a, side in zip(rebuilt.args, ("left", "right"), strict=True)
            ]
            rebuilt = rebuilt.func(*named)
        return rebuilt if top else self._hidden(rebuilt, f"{name}_{primitive.name}")

    def _hidden(self, expr: sympy.Expr, name: str) -> sympy.Symbol:
        """The stage with this expression, if need be a new one that is not on the page."""
        for stage in self.stages:
            if isinstance(stage, Elementwise) and stage.expr == expr:
                return stage.symbol
        while name in self._names:
            name += "_"
        symbol = self._claim(name, self.axes_of(expr))
        self.stages += (Elementwise(symbol, expr, expr, "", hidden=True),)
        return symbol

    def _defined(self, expr: sympy.Expr, where: str) -> sympy.Expr:
        known = {s.symbol for s in self.slots} | {st.symbol for st in self.stages}
        known |= {d.symbol for d in self.drive_list} | {p.symbol for p in self.param_list}
        missing = sorted(str(s) for s in expr.free_symbols - known)
        if missing:
            raise SpecError(
                f"Spec {self.name!r}, stage {where!r}: {', '.join(missing)} is used before it is "
                "defined; declare it as a state, drive, parameter or earlier stage."
            )
        for node in sympy.preorder_traversal(expr):
            primitive = primitive_of(node)
            if not isinstance(node, LANGUAGE) and (primitive is None or primitive.internal):
                raise SpecError(
                    f"Spec {self.name!r}, stage {where!r}: got {type(node).__name__} in {expr}, "
                    "expected sums, products, powers, numbers and the functions "
                    f"{', '.join(p.name for p in PRIMITIVES.values() if not p.internal)}."
                )
        return expr

    def _check_axes(self, what: str, axes: tuple[str, ...]) -> None:
        if any(a not in self.axes for a in axes) or list(axes) != [
            a for a in self.axes if a in axes
        ]:
            raise SpecError(
                f"Spec {self.name!r}: got {what} axes {axes}, expected a sub-sequence of the "
                f"state axes {self.axes}."
            )

    def _freeze(self) -> None:
        if self.needs_state and not self.slots:
            raise SpecError(f"Spec {self.name!r} has no state; declare one with state().")
        written = {st.symbol for st in self.stages}
        for slot in self.slots:
            if slot.next_symbol not in written:
                raise SpecError(
                    f"Spec {self.name!r}: slot {slot.name!r} has no update; call next({slot.name}, …)."
                )
        self.drive_list = tuple(sorted(self.drive_list, key=lambda d: d.given))
        self._label_drives()
        used = {s for st in self.stages for s in st.expr.free_symbols}
        if self.readout is not None:
            used |= self.readout.operand.free_symbols
        applied = {st.map.name for st in self.stages if isinstance(st, Linear)}
        idle = [d.name for d in self.drive_list if d.symbol not in used]
        idle += [p.name for p in self.param_list if p.symbol not in used]
        idle += [m.name for m in self.map_list if m.name not in applied]
        if idle:
            warnings.warn(
                f"Spec {self.name!r}: {', '.join(idle)} is declared but never used; use it in a "
                "stage or leave it out.",
                SpecWarning,
                stacklevel=3,
            )
        self._frozen = True
        self._doubt_bounds()

    def _label_drives(self) -> None:
        """Give each of several drives weights of its own name: ``u, v`` → ``W_u x + b_u``, …"""
        if sum(not d.given for d in self.drive_list) > 1:
            self.drive_list = tuple(
                d
                if "_" in d.name or d.given
                else replace(d, affine=affine(d.name, bool(set(d.axes) - set(self.parallel)), d.of))
                for d in self.drive_list
            )

    def _doubt_bounds(self) -> None:
        """Warn of declared bounds that a sampled step leaves."""
        if all(slot.bounds is None for slot in self.slots):
            return
        from .oracle import leaves_bounds

        found = leaves_bounds(self)  # type: ignore[arg-type]  # the Spec that this builds
        if found:
            name, value, bounds = found
            warnings.warn(
                f"Spec {self.name!r}: got bounds {bounds} for slot {name!r}, but a step from inside "
                f"them reached {value:.3g}; give an interval that every step maps into itself, or "
                "leave bounds out.",
                SpecWarning,
                stacklevel=4,
            )

    def axes_of(self, expr: sympy.Expr) -> tuple[str, ...]:
        """Axes along which an expression varies, in the state's order."""
        found: set[str] = set()
        for symbol in expr.free_symbols:
            found |= set(self._axes[symbol])
        return tuple(a for a in self.axes if a in found)

    @property
    def gap(self) -> Drive | None:
        """The time gap, if there is one: the last drive."""
        return next((d for d in self.drive_list if d.given), None)
