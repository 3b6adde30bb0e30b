"""What a check is given: the cell under test, the library's functions, seeds and tolerances."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import pararnn
from pararnn.spec import bounds, oracle

from .kinds import CELL, AnyCell
from .reference import apart

UNIT_ROUNDOFF = {torch.float64: 2.0**-53, torch.float32: 2.0**-24}
BASE_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
ROUNDINGS = 16
"""Rounding errors of one step, in units of the roundoff: the contract's page derives the number."""


class Violation(AssertionError):
    """A clause does not hold; the message has the measured number and the bound."""


def fed(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function(cell, x, …)`` for inputs or drives that carry time gaps in their last column."""

    @functools.wraps(function)
    def call(cell: Any, x: Any = None, *args: Any, **options: Any) -> Any:
        x, more = apart(cell, x)
        if "drives" in options:
            options["drives"], more = apart(cell, options["drives"])
        return function(cell, x, *args, **options, **more)

    return call


SOLVERS = (pararnn.solve, pararnn.sequential_apply, pararnn.newton_apply, pararnn.shooting_apply)
FED = {function.__name__: fed(function) for function in SOLVERS}


class NotApplicable(Exception):
    """A clause says nothing about this cell, device or dtype; the message is the reason."""


@dataclass(frozen=True)
class Api:
    """The public functions that the checks call. A mutant of the solver replaces some of them."""

    solve: Callable[..., Any] = FED["solve"]
    sequential_apply: Callable[..., Tensor] = FED["sequential_apply"]
    newton_apply: Callable[..., Tensor] = FED["newton_apply"]
    shooting_apply: Callable[..., Tensor] = FED["shooting_apply"]
    layer: Callable[..., nn.Module] = lambda cell: pararnn.ParaRNN(cell)
    step: Callable[..., Any] = oracle.step
    dense_jacobian: Callable[..., Any] = oracle.dense_jacobian
    jvp: Callable[..., Any] = oracle.jvp
    vjp: Callable[..., Any] = oracle.vjp
    prove_jacobian: Callable[..., bool] = oracle.prove_jacobian
    derivative_bounds: Callable[..., Any] = bounds.derivative_bounds


@dataclass(frozen=True)
class Subject:
    """What is under test: its name in the report and how to build one.

    ``factory()`` returns a module with ``step(h, x)``, ``state_shape`` and ``d_in``: a
    :class:`pararnn.Cell`, or any other that has these. ``about`` says which clauses are for it.
    """

    name: str
    factory: Callable[[], nn.Module]
    about: str = CELL

    @staticmethod
    def registered(name: str) -> Subject:
        return Subject(name, lambda: pararnn.get_cell(name).factory())


@dataclass
class Context:
    """One clause on one cell. Checks draw from it, measure into it, and raise through it."""

    subject: Subject
    clause: str
    api: Api = field(default_factory=Api)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dtypes: tuple[torch.dtype, ...] = (
        torch.float64,
        torch.float32,
        torch.bfloat16,
        torch.float16,
    )
    seed: int = 0
    exhaustive: bool = False
    measured: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.generator = torch.Generator()
        self.reseed(0)

    # -- drawing -------------------------------------------------------------------------------

    def reseed(self, number: int) -> None:
        text = f"{self.seed}/{number}/{self.clause}/{self.subject.name}"
        self.generator.manual_seed(zlib.crc32(text.encode()))

    def rounds(self, quick: int = 1, exhaustive: int = 4) -> Iterator[int]:
        """Independent repetitions, each with its own seed."""
        for number in range(exhaustive if self.exhaustive else quick):
            self.reseed(number)
            yield number

    def uniform(self, *shape: int, high: float = 1.0) -> Tensor:
        """Uniform in ``(-high, high)``, drawn on the CPU in float64: equal on every device."""
        unit = torch.rand(shape, generator=self.generator, dtype=torch.float64)
        return (2 * unit - 1) * high

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def cell(self, *, gain: float = 1.0, unbounded: bool = False, **changes: Any) -> AnyCell:
        """A float64 cell with every parameter drawn afresh, none zero and none at a bound.

        ``gain`` scales the recurrent parameters; ``unbounded`` (implied by a gain above 1) lifts
        a bound on them. ``changes`` are hyperparameters.
        """
        cell: AnyCell = self.subject.factory()
        if (gain > 1 or unbounded) and "max_recurrent_norm" in self.hyperparameters(cell):
            changes = {"max_recurrent_norm": None} | changes
        if changes:
            cell = cell.rebuilt(**changes)
        cell = cell.to(device=self.device, dtype=torch.float64)
        recurrent = set(recurrent_names(cell))
        with torch.no_grad():
            for name, p in cell.named_parameters():
                high = 0.45 if p.ndim < 2 else 1.2 * p.shape[-1] ** -0.5
                scale = gain if name in recurrent or not recurrent else 1.0
                p.copy_(self.uniform(*p.shape, high=high * scale))
        return cell

    def inputs(self, cell: AnyCell, batch: int, length: int, scale: float = 1.0) -> Tensor:
        """Normal inputs ``(batch, length, d_in)`` in the dtype and on the device of the cell; and
        one column more, of time gaps in (0.1, 2.1), if it takes any."""
        x = scale * self.normal(batch, length, cell.d_in)
        if getattr(getattr(cell, "spec", None), "gap", None) is not None:
            x = torch.cat([x, 1.1 + self.uniform(batch, length, 1)], -1)
        return self.like(cell, x)

    def state(self, cell: AnyCell, batch: int) -> Tensor:
        """A state inside the box ``[-0.9, 0.9]``, moved into the declared bounds of its slots."""
        state = self.uniform(batch, *cell.state_shape, high=0.9)
        for i, slot in enumerate(getattr(getattr(cell, "spec", None), "slots", ())):
            low, high = slot.bounds or (-math.inf, math.inf)
            part = state[:, i] if cell.state_slots > 1 else state
            part += max(low + 0.9, 0.0) + min(high - 0.9, 0.0)
        return self.like(cell, state)

    def like(self, cell: AnyCell, value: Tensor) -> Tensor:
        parameter = next(cell.parameters())
        return value.to(device=parameter.device, dtype=parameter.dtype)

    # -- asking --------------------------------------------------------------------------------

    @staticmethod
    def hyperparameters(cell: AnyCell) -> dict[str, Any]:
        return cell.hyperparameters() if hasattr(cell, "hyperparameters") else {}

    def spec_of(self, cell: AnyCell) -> Any:
        """The cell's Spec, or the clause does not apply."""
        spec = getattr(cell, "spec", None)
        if spec is None:
            raise NotApplicable("the cell has no Spec; its Jacobian comes from torch.func")
        return spec

    def wide_dtypes(self) -> tuple[torch.dtype, ...]:
        """Those of float64 and float32 that were asked for, or the clause does not apply."""
        chosen = tuple(d for d in self.dtypes if d in UNIT_ROUNDOFF)
        if not chosen:
            raise NotApplicable("neither float64 nor float32 was asked for (--dtype)")
        return chosen

    # -- judging -------------------------------------------------------------------------------

    def within(self, label: str, value: float | Tensor, bound: float) -> None:
        """Record a measured number; it must be at most ``bound`` (and so not NaN)."""
        value = float(value.detach()) if isinstance(value, Tensor) else float(value)
        worst = self.measured.get(label, 0.0)
        self.measured[label] = value if value != value else max(value, worst)
        if not value <= bound:
            raise Violation(f"{label}: got {value:.3g}, expected at most {bound:.3g}")

    @contextlib.contextmanager
    def explained(self, place: str) -> Iterator[None]:
        """Say in a violation where it happened."""
        try:
            yield
        except Violation as reason:
            raise Violation(f"{place}: {reason}") from None

    def require(self, condition: bool, message: str) -> None:
        if not condition:
            raise Violation(message)

    def same_bits(self, label: str, a: Tensor, b: Tensor) -> None:
        """Equal shapes, dtypes and values, NaN equal to NaN; no tolerance."""
        self.require(
            a.shape == b.shape and a.dtype == b.dtype,
            f"{label}: got {tuple(a.shape)} {a.dtype}, expected {tuple(b.shape)} {b.dtype}",
        )
        different = (a != b) & ~(a.isnan() & b.isnan())
        count = int(different.sum())
        self.measured[label] = max(float(count), self.measured.get(label, 0.0))
        if count:
            gap = (a - b)[different].abs().max()
            raise Violation(
                f"{label}: got {count} of {a.numel()} values that differ (by up to {gap:.3g}), "
                "expected the same bits"
            )


def is_cell(made: Any) -> bool:
    """Whether this is a module with ``step(h, x)`` and ``state_shape``."""
    return isinstance(made, nn.Module) and hasattr(made, "step") and hasattr(made, "state_shape")


def converted(cell: AnyCell, dtype: torch.dtype) -> AnyCell:
    """A copy of the cell in another dtype; :meth:`torch.nn.Module.to` would change it in place.
    The copy shares the Spec, and so the programs derived from it."""
    spec = getattr(cell, "spec", None)
    return copy.deepcopy(cell, {id(spec): spec}).to(dtype)


def recurrent_names(cell: AnyCell) -> list[str]:
    spec = getattr(cell, "spec", None)
    return list(spec.parameter_shapes(cell.sizes)) if spec is not None else []


def box(cell: AnyCell) -> tuple[Tensor, Tensor] | None:
    """Ends of the invariant box that every slot declares, broadcastable to a state, or None."""
    spec = getattr(cell, "spec", None)
    if spec is None or any(slot.bounds is None for slot in spec.slots):
        return None
    ends = torch.tensor([slot.bounds for slot in spec.slots], dtype=torch.float64)
    shape = [len(spec.slots)] * (len(spec.slots) > 1) + [1] * len(spec.axes)
    low, high = (end.reshape(shape).to(next(cell.parameters()).device) for end in ends.unbind(1))
    return low, high


def error(value: Tensor, reference: Tensor) -> float:
    """``max|value − reference| / max|reference|``; NaN where they do not both have numbers."""
    if value.shape != reference.shape:
        raise Violation(f"got shape {tuple(value.shape)}, expected {tuple(reference.shape)}")
    if not reference.numel():
        return 0.0
    value, reference = value.detach().double(), reference.detach().double()
    scale = reference.abs().max()
    gap = (value - reference).abs().max()
    return float(gap / scale) if scale > 0 else float(gap)


def tolerance(dtype: torch.dtype, kappa: float) -> float:
    """Tolerance of two trajectories that each satisfy the recurrence up to rounding."""
    return max(BASE_TOLERANCE[dtype], ROUNDINGS * UNIT_ROUNDOFF[dtype] * kappa)
