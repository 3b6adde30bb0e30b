"""What a solver needs to know of a recurrence ``h_t = f(h_{t−1}, u_t)``.

There are two kinds, and :func:`~pararnn.solvers.problem.prepare` makes one of them of a module, once a
call: :class:`~pararnn.solvers.spec_recurrence.SpecRecurrence`, whose derivatives are printed from a
Spec, and :class:`~pararnn.solvers.module_recurrence.ModuleRecurrence`, which takes those of any
``step`` by automatic differentiation.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from ..scan import Algebra
from ..scan.inputs import cut
from ..spec import Spec

Coefficients = tuple[Tensor, ...]
Index = slice | tuple[slice, ...]


def pack(u: Tensor, dt: Tensor | None) -> Tensor:
    """Drives ``(..., C)`` and time gaps ``(...)`` as ``(..., C + 1)``, in the wider of their dtypes:
    bfloat16 would round the gaps to three digits."""
    if dt is None:
        return u
    dtype = torch.promote_types(u.dtype, dt.dtype)
    return torch.cat([u.to(dtype), dt.unsqueeze(-1).to(dtype)], -1)


class Recurrence(ABC):
    """A recurrence with its parameters. All methods take any leading dimensions.

    Inputs ``u`` are what a step reads: packed drives ``(..., C)``, with time gaps as one more
    column, or the raw input ``(..., d_in)`` of a module.

    Attributes
    ----------
    spec : Spec or None
        Where the derivatives come from; None if from automatic differentiation.
    state_shape : tuple of int
        Of one sample.
    dtype : torch.dtype
        Of states.
    raw_params : tuple of Tensor
        Parameters as they were given, in the order of their gradients.
    bounds : list
        Invariant interval ``(low, high)`` of every slot, or None.
    n_state : int
        How many of the numbers of a linearization are coefficients of the Jacobian.
    linear : bool
        Whether the Jacobian does not contain the state.
    structure : str
        Jacobian class.
    """

    spec: Spec | None = None
    state_shape: tuple[int, ...]
    dtype: torch.dtype
    raw_params: tuple[Tensor, ...]
    bounds: list[tuple[float, float] | None]
    n_state: int
    linear = False
    structure = "unknown"

    @abstractmethod
    def using(self, params: Sequence[Tensor], dtype: torch.dtype | None = None) -> Self:
        """The same recurrence with other parameters, and with states of another dtype."""

    # -- of the module that it was made of ---------------------------------------------------------

    @property
    @abstractmethod
    def name(self) -> str:
        """For reports."""

    @property
    @abstractmethod
    def width(self) -> int:
        """Of what a layer passes on."""

    @abstractmethod
    def written(self, h: Tensor, u: Tensor) -> Tensor:
        """Next state by the hand-written step, which autograd records."""

    @abstractmethod
    def output(self, states: Tensor, u: Tensor) -> Tensor:
        """What a layer passes on, ``(..., width)``, from new states, in the dtype of a layer."""

    # -- of every step -----------------------------------------------------------------------------

    @abstractmethod
    def step(self, h: Tensor, u: Tensor, out: Tensor | None = None) -> Tensor:
        """Next state ``(..., *state_shape)``. It may be written to ``out``, and is then ``out``."""

    @abstractmethod
    def step_with_operator(
        self, h: Tensor, u: Tensor, kind: str, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """:meth:`step`, and the transition operator of ``kind`` at ``h``."""

    @abstractmethod
    def coefficients(self, h: Tensor, u: Tensor) -> Coefficients:
        """What the Jacobian at ``h`` is made of, each number broadcastable to a state."""

    @abstractmethod
    def linearization(self, h: Tensor, u: Tensor) -> Coefficients:
        """:meth:`coefficients`, followed by what :meth:`gradients` needs besides."""

    @abstractmethod
    def tangent(self, coefficients: Coefficients, v: Tensor) -> Tensor:
        """``J v``."""

    @abstractmethod
    def transpose(self, coefficients: Coefficients, v: Tensor) -> Tensor:
        """``Jᵀ v``."""

    @abstractmethod
    def gradients(
        self,
        linearization: Coefficients,
        h: Tensor,
        u: Tensor,
        cotangent: Tensor,
        u_bar: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        """Cotangents of ``u`` (written to ``u_bar`` if given) and of the parameters, summed over the
        leading dimensions, of steps from ``h`` whose results have this cotangent."""

    # -- operators that a correction carries -------------------------------------------------------

    @abstractmethod
    def algebra(self, kind: str) -> Algebra | None:
        """Algebra of the operators of ``kind``, or None if they are not formed."""

    @abstractmethod
    def operator(self, coefficients: Coefficients, kind: str, like: Tensor) -> Tensor:
        """Transition operators of ``kind``, from coefficients at states shaped as ``like``."""

    @property
    @abstractmethod
    def cheap_kind(self) -> str:
        """The operator that ``jacobian='auto'`` carries along a chunk."""

    @property
    @abstractmethod
    def single_kind(self) -> str:
        """The exact operator of single steps: formed, or in factors only."""

    # -- ready-made --------------------------------------------------------------------------------

    def operator_at(self, h: Tensor, u: Tensor, kind: str) -> Tensor:
        """Transition operators of ``kind`` at states ``h``."""
        return self.operator(self.coefficients(h, u), kind, h)

    def linearized(self, before: Tensor, u: Tensor, resets: Tensor | None) -> Linearization:
        """The linear recurrence of the Jacobians at the states ``before`` every step."""
        return Linearization(self, self.coefficients(before, u), before, resets)


@dataclass(frozen=True)
class Linearization:
    """``J_t`` of a range of steps at the states ``before``; zero where ``resets`` is set."""

    recurrence: Recurrence
    coefficients: Coefficients
    before: Tensor
    resets: Tensor | None

    def at(self, index: Any) -> Linearization:
        """The same for some rows and steps."""
        return Linearization(
            self.recurrence,
            tuple(c[index] for c in self.coefficients),
            self.before[index],
            None if self.resets is None else self.resets[index],
        )

    def apply(self, v: Tensor, reverse: bool = False) -> Tensor:
        """``J v``, or ``Jᵀ v``."""
        act = self.recurrence.transpose if reverse else self.recurrence.tangent
        return cut(act(self.coefficients, v), self.resets)
