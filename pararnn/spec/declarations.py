"""What a Spec is made of: slots, drives, maps, parameters and stages, as plain data."""

from __future__ import annotations

from dataclasses import dataclass

import sympy

STRUCTURES = ("diagonal", "head", "dense", "right")


class SpecError(ValueError):
    """A Spec that does not describe a recurrence: says what was got, expected, and the fix."""


class SpecWarning(UserWarning):
    """A Spec that can be used but is not what its author meant, as far as can be told."""


@dataclass(frozen=True)
class Slot:
    """One state tensor. ``bounds`` is an interval that every step maps into itself, or None."""

    symbol: sympy.Symbol
    next_symbol: sympy.Symbol
    latex: str
    bounds: tuple[float, float] | None

    @property
    def name(self) -> str:
        return self.symbol.name


@dataclass(frozen=True)
class Drive:
    """What the input gives at each step: an affine function of ``x_t`` with the given axes.

    ``inline`` drives are printed as their affine formula wherever they occur; the others get a
    line of their own and are printed by their symbol. A ``given`` drive (a time gap) is no
    function of ``x_t``: it comes with the sequence as it is, and no weight belongs to it. ``of`` is
    the letter of the input on the page.
    """

    symbol: sympy.Symbol
    axes: tuple[str, ...]
    latex: str
    affine: str
    inline: bool
    given: bool = False
    of: str = "x"

    @property
    def name(self) -> str:
        return self.symbol.name


@dataclass(frozen=True)
class Map:
    """A named recurrent linear map. Its structure decides the Jacobian class of the cell.

    A map of structure ``contract`` has no weight: it sums over one state axis, the ``dim``-th.
    """

    name: str
    structure: str
    latex: str
    spec: object = None  # the open Spec, so that calling the map adds a stage; never compared
    dim: int = 0

    @property
    def argument(self) -> str:
        """What printed programs give the map's function before its operand."""
        return str(self.dim) if self.structure == "contract" else self.name

    def __call__(self, operand: sympy.Expr) -> sympy.Symbol:
        return self.spec._apply_map(self, operand)  # type: ignore[attr-defined]

    def __mul__(self, other: object) -> sympy.Expr:
        raise SpecError(f"{self.name} is a map: call it, {self.name}(h), to apply it to h.")

    __rmul__ = __mul__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Map) and (self.name, self.structure) == (
            other.name,
            other.structure,
        )

    def __hash__(self) -> int:
        return hash((self.name, self.structure))


@dataclass(frozen=True)
class Param:
    """An elementwise recurrent parameter (not an input weight), with the given axes. A constant is
    one that is not ``trained``: the cell gives its values."""

    symbol: sympy.Symbol
    axes: tuple[str, ...]
    latex: str
    trained: bool = True

    @property
    def name(self) -> str:
        return self.symbol.name


@dataclass(frozen=True)
class Elementwise:
    """``symbol = expr``: a scalar expression, applied at every coordinate.

    ``authored`` keeps the order of terms as written; ``expr`` is its canonical form. Derivatives
    stop at a ``node`` and are chained there, where they would be multiplied out otherwise.
    """

    symbol: sympy.Symbol
    authored: sympy.Expr
    expr: sympy.Expr
    latex: str
    hidden: bool = False  # introduced by the library (a nested function call); not on the page
    node: bool = False


@dataclass(frozen=True)
class Linear:
    """``symbol = map · operand``."""

    symbol: sympy.Symbol
    map: Map
    authored: sympy.Expr
    operand: sympy.Expr

    @property
    def expr(self) -> sympy.Expr:
        """What a stage is computed from, here the operand."""
        return self.operand


@dataclass(frozen=True)
class Read:
    """``symbol = Σ operand`` over one state axis: what a layer passes on, from the new state."""

    symbol: sympy.Symbol
    map: Map
    authored: sympy.Expr
    operand: sympy.Expr
    latex: str


Stage = Elementwise | Linear
