"""The base class of a user's test: one test a clause."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor

import pararnn

from .checks import load
from .context import Api, Context, NotApplicable, Subject, Violation, is_cell
from .extra import extra
from .implementation import api_of
from .kinds import AnyCell

SOLVER = (
    "residual",
    "agreement",
    "scale",
    "gradients",
    "double-backward",
    "causality",
    "batch-independence",
    "streaming",
    "resets",
    "variable-length",
    "shapes",
    "time-gap",
    "determinism",
    "invariances",
    "backends",
    "nan-containment",
    "finite",
    "memory",
)
"""Clauses about the answer of any implementation; the others are about cells, or about the settings,
messages and layers of the library."""


class Conformance:
    """The contract for a cell or an implementation, as a test class of pytest.

    Name the subclass ``Test…`` and give it ``make``. pytest then runs one test a clause,
    ``TestMyCell::test_clause[resets]``; a clause that does not apply is skipped with its reason, and a
    failure says the clause, the place, the number that was got and the one that was expected.

    ::

        class TestMyCell(Conformance):
            def make(self):
                return MyCell(5, 6)

    An implementation has a ``solve``, too. It is checked by the clauses in :data:`SOLVER`, on the cell
    of ``make``; those about the library's own settings are not for it.

    ::

        class TestMySolver(Conformance):
            def make(self):
                return pararnn.ParaGRU(5, 6)

            def solve(self, cell, x, *, h0=None, resets=None, **options):
                return my_states(cell, x, h0, resets)

    Attributes
    ----------
    clauses : tuple of str, optional
        Names of clauses, from the contract's page, instead of all that are for a cell or an
        implementation.
    device : str
        The device under test.
    dtypes : tuple of torch.dtype
        Those of the clauses that have a choice.
    seed : int
        Of all draws: cells, inputs and states.
    exhaustive : bool
        More seeds, sizes and settings; some minutes.
    """

    clauses: ClassVar[tuple[str, ...] | None] = None
    device: ClassVar[str] = "cpu"
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (
        torch.float64,
        torch.float32,
        torch.bfloat16,
        torch.float16,
    )
    seed: ClassVar[int] = 0
    exhaustive: ClassVar[bool] = False

    def make(self) -> AnyCell:
        """A new cell: a :class:`pararnn.Cell`, or any module with ``step(h, x)``, ``state_shape`` and
        ``d_in``. Checks draw its parameters afresh, and want it small: a width of 5 or 6."""
        raise NotImplementedError(
            f"{type(self).__name__}: got no make(self), expected one that returns a cell."
        )

    def solve(self, cell: AnyCell, x: Tensor | None = None, **options: Any) -> Any:
        """The states ``(B, T, *state_shape)`` of ``cell`` for ``x (B, T, d_in)``.

        Parameters
        ----------
        **options
            As :func:`pararnn.solve` takes them: ``h0 (B, *state_shape)``, ``resets (B, T)``,
            ``dt (B, T)`` for a cell with time gaps, ``method`` and ``config``, which an implementation
            that has no such choice ignores.

        Returns
        -------
        Tensor or Solution
            States alone, or an object that has also ``final_state`` and what else
            :class:`pararnn.Solution` reports. A clause about a report is skipped without one.
        """
        return pararnn.solve(cell, x, **options)

    def names(self) -> tuple[str, ...]:
        """The clauses that are checked.

        Raises
        ------
        ValueError
            If ``clauses`` names one that there is not.
        """
        known = load()
        if self.clauses is None:
            return SOLVER if self._own_solve() else tuple(known)
        for name in self.clauses:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"one of {', '.join(known)}."
                raise ValueError(
                    f"{type(self).__name__}.clauses: got {name!r}, expected the name of a clause: {hint}"
                )
        return self.clauses

    def check(self, name: str) -> dict[str, float]:
        """Check one clause, without pytest.

        Returns
        -------
        dict of str to float
            What was measured, by what it is.

        Raises
        ------
        Violation
            If the clause does not hold.
        NotApplicable
            If it says nothing about this cell, device or dtype.
        """
        __tracebackhide__ = True
        made = self.make()
        if not is_cell(made):
            raise TypeError(
                f"{type(self).__name__}.make: got {type(made).__name__}, expected a cell: a module with "
                "step(h, x) and state_shape."
            )
        context = Context(
            Subject(type(self).__name__, self.make),
            name,
            api=api_of(self.solve) if self._own_solve() else Api(),
            device=torch.device(self.device),
            dtypes=self.dtypes,
            seed=self.seed,
            exhaustive=self.exhaustive,
        )
        with one_thread():
            try:
                load()[name](context)
            except Violation as problem:
                raise Violation(f"clause {name}: {problem}") from None
        return context.measured

    def _own_solve(self) -> bool:
        return type(self).solve is not Conformance.solve

    # -- pytest --------------------------------------------------------------------------------

    def pytest_generate_tests(self, metafunc: Any) -> None:
        if "clause" in metafunc.fixturenames:
            metafunc.parametrize("clause", self.names())

    def test_clause(self, clause: str) -> None:
        try:
            self.check(clause)
        except NotApplicable as reason:
            extra("pytest").skip(f"clause {clause}: {reason}")


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """The tensors are tiny: threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
