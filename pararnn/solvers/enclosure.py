"""Enclosures: the printed programs of a Spec on numbers that know how wrong they may be.

A :class:`Ball` is a float64 tensor with a radius: the exact value, that of the same operations on
real numbers, lies within it. Running a printed program (the ``plain`` dialect) on balls instead of
tensors bounds the rounding of every operand, product, sum and function in it, from the numbers
that occur, so it needs no assumption on their size. Radii are rounded up.

What is assumed: ``+ − × ÷`` and matrix products in float64 are those of IEEE 754 in any order of
summation (with subnormal numbers or without), and torch's elementary functions are right to
:data:`ULPS` units in the last place.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor

from ..scan import Algebra, Block, Dense, Diagonal, Left, Right
from ..spec import Spec
from ..spec.print import print_program
from ..spec.program import load
from .spec_recurrence import SpecRecurrence
from .torch_backend import NAMESPACE

EPS = 2.0**-52
UP = 1 + 2.0**-49
"""More than the relative rounding of the few operations that one radius is made of."""
TINY = 2.0**-1019
"""More than what a few operations can lose to underflow, flushed to zero or not."""
ULPS = 8
"""Units in the last place that a function of torch may be off, in float64."""


def summing(terms: int) -> float:
    """Relative rounding of a sum of so many products, of their magnitudes; twice what it can be."""
    return (terms + 4) * EPS


def over(x: Tensor, terms: int = 1) -> Tensor:
    """An upper bound of a sum of ``terms`` products of numbers that are not negative, as computed."""
    return x * ((1 + summing(terms)) * UP) + terms * TINY


class Ball:
    """All numbers within ``radius`` of ``value``; both broadcast against each other.

    A radius that is not a number says nothing, as an infinite one. The operators are those that
    printed programs use.
    """

    __slots__ = ("radius", "value")

    def __init__(self, value: Tensor, radius: Tensor | float = 0.0):
        self.value, self.radius = value, radius

    @staticmethod
    def of(number: Ball | int | float) -> Ball:
        """A number of a program, which may be an integer beyond float64."""
        if isinstance(number, Ball):
            return number
        value = float(number)
        radius = 0.0 if value == number else EPS * abs(value)
        return Ball(torch.tensor(value, dtype=torch.float64), radius)

    def __repr__(self) -> str:
        return f"Ball({self.value}, {self.radius})"

    @property
    def magnitude(self) -> Tensor:
        """Upper bound of ``|x|``; infinite where nothing is known."""
        return _known((self.value.abs() + self.radius) * UP)

    def ends(self) -> tuple[Tensor, Tensor]:
        """Lower and upper bound of the numbers."""
        lo, hi = self.value - self.radius, self.value + self.radius
        infinity = torch.full_like(hi, math.inf)
        lo = torch.nextafter(torch.where(lo.isnan(), -infinity, lo), -infinity)
        return lo, torch.nextafter(torch.where(hi.isnan(), infinity, hi), infinity)

    def __neg__(self) -> Ball:
        return Ball(-self.value, self.radius)

    def __add__(self, other: Ball | int | float) -> Ball:
        other = Ball.of(other)
        value = self.value + other.value
        return Ball(value, (value.abs() * EPS + self.radius + other.radius) * UP + TINY)

    __radd__ = __add__

    def __sub__(self, other: Ball | int | float) -> Ball:
        return self + (-Ball.of(other))

    def __rsub__(self, other: int | float) -> Ball:
        return Ball.of(other) + (-self)

    def __mul__(self, other: Ball | int | float) -> Ball:
        other = Ball.of(other)
        value = self.value * other.value
        radius = value.abs() * EPS
        if isinstance(other.radius, Tensor) or other.radius:
            radius = radius + self.value.abs() * other.radius
        if isinstance(self.radius, Tensor) or self.radius:
            radius = radius + self.radius * (other.value.abs() + other.radius)
        return Ball(value, radius * UP + TINY)

    __rmul__ = __mul__

    def __truediv__(self, other: Ball | int | float) -> Ball:
        other = Ball.of(other)
        value = self.value / other.value
        least = other.value.abs() * (1 - 4 * EPS) - other.radius * UP
        least = torch.where(least > 0, least, torch.zeros_like(least))
        moved = (self.radius + (value.abs() * UP + TINY) * other.radius) / least
        return Ball(value, (value.abs() * EPS + moved) * UP + TINY)

    def __rtruediv__(self, other: int | float) -> Ball:
        return Ball.of(other) / self

    def __pow__(self, exponent: Ball | int | float) -> Ball:
        if isinstance(exponent, int):
            return _whole_power(self, exponent)
        exponent = Ball.of(exponent)
        lo, hi = (e.clamp_min(0) for e in self.ends())
        # Monotone in the base and in the exponent: its largest and least values are at corners.
        corners = [b**e for b in (lo, hi) for e in exponent.ends()]
        least, most = corners[0], corners[0]
        for corner in corners[1:]:
            least, most = torch.minimum(least, corner), torch.maximum(most, corner)
        return _between(self.value**exponent.value, least, most)

    def __rpow__(self, base: int | float) -> Ball:
        return Ball.of(base) ** self


def _known(x: Tensor) -> Tensor:
    return torch.where(x.isnan(), torch.full_like(x, math.inf), x)


def _whole_power(x: Ball, exponent: int) -> Ball:
    if exponent < 0:
        return 1 / _whole_power(x, -exponent)
    result = Ball.of(1)
    while exponent:
        result = result * x if exponent % 2 else result
        exponent //= 2
        x = x * x if exponent else x
    return result


def _between(value: Tensor, lo: Tensor, hi: Tensor) -> Ball:
    """A function's computed value, and those at the ends of its argument."""
    spread = torch.maximum(hi - value, value - lo)
    largest = torch.maximum(torch.maximum(lo.abs(), hi.abs()), value.abs())
    return Ball(value, (spread + 2 * ULPS * EPS * largest) * UP + TINY)


def _increasing(f: Callable[[Tensor], Tensor], low: float = -math.inf) -> Callable[..., Ball]:
    """Where the function ends at ``low``, so does what rounding may make of its argument."""

    def image(x: Ball | float) -> Ball:
        x = Ball.of(x)
        lo, hi = (e.clamp_min(low) for e in x.ends())
        return _between(f(x.value), f(lo), f(hi))

    return image


def _wave(f: Callable[[Tensor], Tensor]) -> Callable[..., Ball]:
    def image(x: Ball | float) -> Ball:
        x = Ball.of(x)
        value = f(x.value)
        moved = torch.as_tensor(x.radius, dtype=value.dtype, device=value.device)
        moved = torch.where(moved <= 2, moved, 2 * torch.ones_like(moved))
        return Ball(value, (moved + ULPS * EPS * value.abs()) * UP + TINY)

    return image


def _maximum(a: Ball | float, b: Ball | float) -> Ball:
    a, b = Ball.of(a), Ball.of(b)
    radii = (torch.as_tensor(r, dtype=torch.float64, device=x.value.device)
             for x, r in ((a, a.radius), (b, b.radius)))  # fmt: skip
    return Ball(torch.maximum(a.value, b.value), torch.maximum(*radii))


def _heaviside(x: Ball | float) -> Ball:
    x = Ball.of(x)
    # An argument that is exactly 0 is a tie; one that may be on either side may be anything.
    unsure = (x.value.abs() <= x.radius) & (torch.as_tensor(x.radius) > 0)
    unsure = unsure | x.value.isnan() | (torch.as_tensor(x.radius) != torch.as_tensor(x.radius))
    return Ball(NAMESPACE["heaviside"](x.value), unsure.to(torch.float64))


def _positive_slope(x: Ball, y: Ball) -> Ball:
    lo, hi = x.ends()
    below = y * (1 - y)
    one = torch.ones_like(below.value)
    value = torch.where(x.value >= 0, one, below.value)
    radius = torch.where(hi < 0, below.radius, one)  # all its values are within 1 of each other
    return Ball(value, torch.where(lo >= 0, torch.zeros_like(one), radius))


def _counted(x: Ball, m: Ball) -> tuple[Ball, Ball]:
    """The number of the nearest multiple of ``2π/m``, and that unit. Where it is not certain, a radius
    of the multiples that it may be."""
    turns = x * m * Ball(torch.tensor(0.5 / math.pi, dtype=torch.float64), EPS)
    count = turns.value.round()
    sure = (turns.value - count).abs() + turns.radius < 0.5 - EPS * (1 + count.abs())
    near = torch.where(sure, torch.zeros_like(count), turns.radius + 2 + 0 * count)
    full = Ball(torch.tensor(2 * math.pi, dtype=torch.float64), 8 * EPS)
    return Ball(count, near), full / m


def _snap(x: Ball | float, m: Ball | float) -> Ball:
    count, unit = _counted(Ball.of(x), Ball.of(m))
    return count * unit


def _snap_angle(x: Ball | float, m: Ball | float) -> Ball:
    """Less whole turns, which are exact if both are whole numbers that are certain; else they have
    the rounding of their parts, and one turn more or less where the nearest one is not certain."""
    order = Ball.of(m)
    count, unit = _counted(Ball.of(x), order)
    turns = count / order
    near = turns.value.round()
    sure = (turns.value - near).abs() + turns.radius < 0.5 - EPS * (1 + near.abs())
    off = torch.where(sure, torch.zeros_like(near), turns.radius + 2 + 0 * near)
    whole = count - order * Ball(near, off)
    exact = (torch.as_tensor(count.radius) == 0) & (torch.as_tensor(order.radius) == 0)
    exact = exact & (order.value == order.value.round()) & (count.value.abs() < 2.0**51)
    radius = torch.where(exact, torch.zeros_like(near), torch.as_tensor(whole.radius))
    return Ball(count.value - order.value * near, radius) * unit


def _linear(act: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Ball, Ball], Ball]:
    """A map with exact weights: ``|w|`` acts on what each operand may be off, and on what its product
    loses in a sum of so many."""

    def product(weight: Ball, x: Ball) -> Ball:
        value, n = act(weight.value, x.value), weight.value.shape[-1]
        moved = (x.value.abs() * summing(n) + x.radius) * UP
        return Ball(value, over(act(weight.value.abs(), moved), n))

    return product


def _contract(dim: int, x: Ball) -> Ball:
    n = x.value.shape[dim]
    moved = (x.value.abs() * summing(n) + x.radius) * UP
    total = NAMESPACE["contract"]
    return Ball(total(dim, x.value), over(total(dim, moved), n))


def _ratio(p: int, q: int) -> Ball:
    return Ball(torch.tensor(p / q, dtype=torch.float64), EPS * abs(p / q) + TINY)


_FUNCTIONS = ("sigmoid", "tanh", "softplus", "exp", "expm1", "positive")

BALLS: dict[str, Any] = {
    **{name: _increasing(NAMESPACE[name]) for name in _FUNCTIONS},
    "log": _increasing(torch.log, 0.0),
    "log1p": _increasing(torch.log1p, -1.0),
    "sqrt": _increasing(torch.sqrt, 0.0),
    "sin": _wave(torch.sin),
    "cos": _wave(torch.cos),
    "maximum": _maximum,
    "heaviside": _heaviside,
    "positive_slope": _positive_slope,
    "snap": _snap,
    "snap_angle": _snap_angle,
    "square": lambda x: x * x,
    "zero": lambda x: Ball(torch.zeros_like(x.value)),
    "ratio": _ratio,
    "diagonal": lambda w, x: w * x,
    **{name: _linear(NAMESPACE[name]) for name in ("head", "dense", "right")},
    "contract": _contract,
}
"""What printed programs call, on balls."""


@lru_cache(maxsize=256)
def _program(spec: Spec, program: str) -> Callable[..., tuple[Ball | float, ...]]:
    return load(print_program(spec, program, "plain"), BALLS)


def _inputs(recurrence: SpecRecurrence, h: Tensor, u: Tensor) -> list[Ball]:
    parts = (*recurrence._slots(h), *recurrence._drives(u), *recurrence.params)
    return [Ball(x) for x in parts]


def _joined(recurrence: SpecRecurrence, slots: tuple[Ball | float, ...], like: Tensor) -> Ball:
    """Slots as one state, with a radius in every place; infinite where nothing is known."""
    shape = like.select(recurrence.slot_dim, 0).shape if recurrence.several else like.shape
    balls = [Ball.of(s) for s in slots]
    parts = [
        [torch.as_tensor(x, dtype=like.dtype, device=like.device).expand(shape) for x in found]
        for found in ([b.value for b in balls], [b.radius for b in balls])
    ]
    value, radius = (
        torch.stack(p, recurrence.slot_dim) if recurrence.several else p[0] for p in parts
    )
    return Ball(value, _known(radius))


def step(recurrence: SpecRecurrence, h: Tensor, u: Tensor) -> Ball:
    """The exact next states ``(..., *state_shape)`` lie in this ball."""
    return _joined(recurrence, _program(recurrence.spec, "step")(*_inputs(recurrence, h, u)), h)


def jacobian(recurrence: SpecRecurrence, h: Tensor, u: Tensor) -> Ball:
    """The exact operators of ``recurrence.algebra("exact")`` at ``h`` lie in this ball: the tangent of
    unit states, of several at once where the recurrence keeps them apart."""
    found = _program(recurrence.spec, "coefficients")(*_inputs(recurrence, h, u))
    coefficients = [Ball.of(c) for c in found]
    algebra = cast(Algebra, recurrence.algebra("exact"))
    axes, lead = len(recurrence.spec.axes), h.shape[: h.ndim - len(recurrence.state_shape)]
    units, spread = _units(algebra, recurrence.state_shape, h), not isinstance(algebra, Left)
    if spread:
        coefficients = [_spread(c, axes) for c in coefficients]
    basis = units.expand(*lead, *units.shape)
    slots = [Ball(s) for s in recurrence._slots(basis)]
    params = [Ball(p) for p in recurrence.params]
    tangent = _program(recurrence.spec, "tangent")(*slots, *coefficients, *params)
    moved = _joined(recurrence, tangent, basis)
    return Ball(
        *(_arranged(algebra, x, len(lead)) for x in (moved.value, cast(Tensor, moved.radius)))
    )


def columns(recurrence: SpecRecurrence, like: Tensor) -> int:
    """How many numbers of its operator a number of the state has, about."""
    units = _units(cast(Algebra, recurrence.algebra("exact")), recurrence.state_shape, like)
    return units.numel() // max(1, math.prod(recurrence.state_shape))


def _spread(c: Ball, axes: int) -> Ball:
    """A coefficient with a place for the unit states, before the state's axes."""
    value, radius = c.value, c.radius
    value = value.unsqueeze(-axes - 1) if value.ndim >= axes else value
    if isinstance(radius, Tensor) and radius.ndim >= axes:
        radius = radius.unsqueeze(-axes - 1)
    return Ball(value, radius)


def _units(algebra: Algebra, shape: tuple[int, ...], like: Tensor) -> Tensor:
    """States whose tangents are the columns of the operators, ``(columns, *shape)``."""
    if isinstance(algebra, Diagonal):
        return like.new_ones(1, *shape)
    if isinstance(algebra, Block):
        eye = torch.eye(shape[0], dtype=like.dtype, device=like.device)
        return eye.reshape(shape[0], shape[0], *(1,) * algebra.axes).expand(shape[0], *shape)
    if isinstance(algebra, Left):  # whose columns it treats alike: they are the unit states
        eye = torch.eye(shape[-2], dtype=like.dtype, device=like.device)
        return eye.expand(*shape[:-1], shape[-2])
    if isinstance(algebra, Right):
        eye = torch.eye(shape[-1], dtype=like.dtype, device=like.device)
        return eye.unsqueeze(1).expand(shape[-1], *shape)
    count = math.prod(shape)
    if isinstance(algebra, Dense):  # the same place of every head
        columns = count // algebra.heads
        eye = torch.eye(columns, dtype=like.dtype, device=like.device)
        return algebra.unpack(eye.unsqueeze(1).expand(columns, algebra.heads, columns))
    eye = torch.eye(count, dtype=like.dtype, device=like.device)
    return eye.reshape(count, *shape)


def _arranged(algebra: Algebra, x: Tensor, lead: int) -> Tensor:
    """Tangents of the unit states ``(..., columns, *state_shape)`` as operators."""
    if isinstance(algebra, Diagonal):
        return x.squeeze(lead)
    if isinstance(algebra, Block):
        return x.transpose(-algebra.axes - 2, -algebra.axes - 1)
    if isinstance(algebra, Left):
        return x
    if isinstance(algebra, Right):
        return x.movedim(-3, -2)
    if isinstance(algebra, Dense):
        return algebra.pack(x).movedim(-3, -1)
    return x.flatten(lead + 1).mT
