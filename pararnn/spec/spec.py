"""The Spec: one staged symbolic definition of a recurrent cell.

A Spec is written inside a ``with`` block and is frozen, validated and immutable afterwards::

    with Spec("ParaGRU") as s:
        h = s.state("h", bounds=(-1, 1))
        u_z, u_r, u_n = s.drives("u_z u_r u_n")
        A_z, A_r, A_n = s.maps("A_z A_r A_n", structure="diagonal")
        z = s.let("z", sigmoid(A_z(h) + u_z))
        r = s.let("r", sigmoid(A_r(h) + u_r))
        n = s.let("n", tanh(A_n(r * h) + u_n))
        s.next(h, (1 - z) * h + z * n)

The block is :mod:`.builder`'s; this module is what can be read of a Spec once it is closed.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING

import sympy

from .builder import Builder
from .declarations import Drive, Linear

if TYPE_CHECKING:
    from .derive.factorization import Factorization
    from .print.latex import Equation


class Spec(Builder):
    """An ordered list of named stages over slots, drives, maps and parameters.

    Parameters
    ----------
    name
        The cell's name, used in messages and generated sources.
    axes
        Names of the axes of one state slot, e.g. ``("d",)`` or ``("K", "V")``. Sizes are given
        later, by the cell.
    output
        What a layer passes on: the ``"last"`` slot, or ``"all"`` of them, one after the other.
    parallel
        Axes that count copies of the recurrence, such as heads: it never mixes them, and the page
        shows one copy.

    Raises
    ------
    SpecError
        On leaving the ``with`` block, if a slot has no update, a name is used twice, or an
        expression uses a symbol that was not declared before it.
    """

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Spec) and self.fingerprint == other.fingerprint

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __deepcopy__(self, memo: object) -> Spec:
        return self  # immutable: copies of a cell share it, and its compiled programs

    def __repr__(self) -> str:
        return f"Spec({self.name!r}, slots={len(self.slots)}, jac_structure={self.jac_structure!r})"

    @cached_property
    def factorization(self) -> Factorization:
        """The factorized Jacobian: elementwise coefficients between linear nodes."""
        from .derive.factorization import factorize

        return factorize(self)

    @cached_property
    def jac_structure(self) -> str:
        """Jacobian class, derived from the maps on the path from the state to its update."""
        return self.factorization.jac_structure

    @property
    def linear_class(self) -> str | None:
        """Sub-class of a Jacobian that does not contain the state, and None for any other:
        ``'diag'``, ``'planar'`` (a 2×2 block a channel), ``'block{S}'``, ``'householder'`` (the
        identity and something of rank one, from a sum over a state axis), or the maps' structure.
        """
        return self.factorization.linear_class

    @property
    def channelwise(self) -> bool:
        """True if no map mixes channels, so that the Jacobian is one S×S block a channel."""
        linear = (st for st in self.stages if isinstance(st, Linear))
        return all(m.structure == "diagonal" for m in (*self.map_list, *(s.map for s in linear)))

    def state_shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Shape of one sample's state: the axes' sizes, behind a slot axis if S > 1."""
        shape = tuple(sizes[a] for a in self.axes)
        return shape if len(self.slots) == 1 else (len(self.slots), *shape)

    @cached_property
    def projected(self) -> tuple[Drive, ...]:
        """The drives that the input projection produces: all but a time gap."""
        return tuple(d for d in self.drive_list if not d.given)

    def drive_shapes(self, sizes: Mapping[str, int]) -> tuple[tuple[int, ...], ...]:
        """Shape of every drive of one sample and step, in packing order; a time gap comes last."""
        return tuple(tuple(sizes[a] for a in d.axes) for d in self.drive_list)

    def packed_width(self, sizes: Mapping[str, int]) -> int:
        """Width of the packed drives that the input projection has to produce."""
        return sum([math.prod([sizes[a] for a in d.axes]) for d in self.projected])

    def parameter_shapes(self, sizes: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
        """Shape of every recurrent parameter, in order: maps, then elementwise parameters.

        A ``head`` map needs ``sizes["heads"]``.
        """
        state = tuple(sizes[a] for a in self.axes)
        shapes: dict[str, tuple[int, ...]] = {}
        for m in self.map_list:
            if m.structure == "head":
                width = state[0] // sizes["heads"]
                shapes[m.name] = (sizes["heads"], width, width)
            else:
                shapes[m.name] = state if m.structure == "diagonal" else (state[-1], state[-1])
        for p in self.param_list:
            shapes[p.name] = tuple(sizes[a] for a in p.axes)
        return shapes

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the canonical text of the Spec: equal for equal recurrences, on any machine."""
        lines = [self.name, repr(self.axes)]
        lines += [f"slot {s.name} {s.bounds}" for s in self.slots]
        lines += [f"{'given' if d.given else 'drive'} {d.name} {d.axes}" for d in self.drive_list]
        lines += [f"map {m.name} {m.structure}" for m in self.map_list]
        lines += [
            f"{'param' if p.trained else 'constant'} {p.name} {p.axes}" for p in self.param_list
        ]
        lines += ["output all"] * (self.output == "all")
        for st in self.stages:
            if isinstance(st, Linear):
                lines.append(f"{st.symbol} = {st.map.name} . {sympy.srepr(st.operand)}")
            else:
                lines.append(f"{st.symbol} {'=' * (1 + st.node)} {sympy.srepr(st.expr)}")
        if self.readout is not None:
            read = self.readout
            lines.append(f"read {read.symbol} = {read.map.name} . {sympy.srepr(read.operand)}")
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    def latex(self) -> list[Equation]:
        """One equation a stage, in the author's order and with time indices."""
        from .print.latex import equations

        return equations(self)

    def jacobian_latex(self) -> list[str]:
        """The derived factorized Jacobian, as its action on a perturbation."""
        from .print.latex import jacobian_action

        return jacobian_action(self)

    def source(self, program: str = "step", dialect: str = "torch") -> str:
        """Printed source of a derived program; see :mod:`pararnn.spec.derive`."""
        from .print import print_program

        return print_program(self, program, dialect)
