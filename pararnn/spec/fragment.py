"""Part of a computation as a Spec: elementwise equations between values that are given.

A card prints them and a test compares them with the module; nothing is solved with them.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import sympy

from .backends import BACKENDS
from .declarations import Drive, Linear
from .names import latex_of, split_names
from .oracle import align
from .spec import Spec


class Fragment(Spec):
    """A Spec that may lack a state, and may use values that no input weight gives.

    Parameters
    ----------
    name, axes
        As for :class:`Spec`; the axes are those of its largest value.
    """

    needs_state = False

    def given(
        self, *names: str, axes: tuple[str, ...] | None = None, latex: str = ""
    ) -> tuple[sympy.Symbol, ...]:
        """Declare values that come from outside and are printed by their symbol."""
        axes = self.axes if axes is None else tuple(axes)
        self._check_axes("given value", axes)
        out = []
        for name in split_names(names):
            symbol = self._claim(name, axes)
            shown = latex or latex_of(name)
            self.drive_list += (Drive(symbol, axes, shown, "", inline=False, given=True),)
            out.append(symbol)
        return tuple(out)

    def evaluate(self, **values: np.ndarray | float) -> Mapping[str, np.ndarray]:
        """Every stage by name, in float64.

        Parameters
        ----------
        values
            All states, drives, given values and constants by name, of shape ``(..., *their axes)``.
            A drive's value is that of its affine function.

        Returns
        -------
        dict
            Arrays that broadcast against ``(..., *axes)``.

        Raises
        ------
        TypeError
            If a value is missing, or one is not known.
        """
        axes = {s.symbol: self.axes for s in self.slots}
        axes |= {d.symbol: d.axes for d in self.drive_list}
        axes |= {p.symbol: p.axes for p in self.param_list}
        expected = {symbol.name for symbol in axes}
        if expected != set(values):
            raise TypeError(
                f"{self.name}: got values of {', '.join(sorted(values))}, expected "
                f"{', '.join(sorted(expected))}."
            )
        known: dict[sympy.Symbol, np.ndarray] = {
            symbol: align(self, np.asarray(values[symbol.name], dtype=np.float64), own)
            for symbol, own in axes.items()
        }
        for stage in self.stages:
            function = sympy.lambdify(
                list(known), stage.expr, modules=[BACKENDS["float64"], "numpy"]
            )
            value = function(*known.values())
            if isinstance(stage, Linear):
                value = value.sum(axis=stage.map.dim, keepdims=True)
            known[stage.symbol] = value
        return {st.symbol.name.removesuffix("_next"): known[st.symbol] for st in self.stages}
