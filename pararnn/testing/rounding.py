"""Numbers that carry what rounding may do to them.

A :class:`Number` is a float64 tensor whose first dimension has the exact computation first and then
replicas of it, in which every operation is off by a roundoff of the dtype under test, with a random
sign: stochastic arithmetic (Vignes 1993, CESTAC). Two right implementations differ by about as much
as replicas do, wherever cancellation, saturation or chaos make it large; so the spread of the
replicas is a tolerance, for states and, through autograd, for gradients. What overflows the dtype is
infinite in a replica, and what underflows is off by a subnormal number.

Nothing here calls the library.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

REPLICAS = 3
POOL = 61
"""Sign patterns of a shape; operations take them in turn. A prime, so that steps do not repeat."""


class Rounding:
    """How replicas are perturbed: by the roundoff of ``dtype``; not at all with ``replicas=0``."""

    def __init__(self, dtype: torch.dtype, replicas: int = REPLICAS, flush: bool = False):
        info = torch.finfo(dtype)
        self.replicas, self.unit = replicas, info.eps / 2
        self.least = info.tiny if flush else info.tiny * info.eps
        self.largest = info.max if dtype != torch.float64 else math.inf
        self.generator = torch.Generator().manual_seed(0)
        self.pools: dict[torch.Size, Iterator[tuple[Tensor, Tensor]]] = {}

    def number(self, value: Tensor) -> Number:
        """``value (replicas + 1, ...)``, as given."""
        return Number(value, self)

    def copies(self, value: Tensor) -> Tensor:
        """A leaf ``(replicas + 1, ...)`` of equal copies, in float64."""
        value = value.detach().double().cpu()
        return value.expand(self.replicas + 1, *value.shape).clone()

    def _patterns(self, shape: torch.Size) -> Iterator[tuple[Tensor, Tensor]]:
        """Factors near 1 and signed subnormal numbers, those of the exact computation 1 and 0."""
        pairs = []
        for _ in range(POOL):
            sign = 2.0 * torch.randint(0, 2, shape, generator=self.generator).double() - 1
            sign[0] = 0
            pairs.append((1 + self.unit * sign, self.least * sign))
        return itertools.cycle(pairs)

    def rounded(self, value: Tensor, small: bool = False) -> Number:
        """What an operation gives; ``small`` if it may underflow."""
        if not self.replicas:
            return Number(value, self)
        if value.shape not in self.pools:
            self.pools[value.shape] = self._patterns(value.shape)
        factor, least = next(self.pools[value.shape])
        out = value * factor
        if small:
            out = torch.where(value == 0, value, out + least)
        if self.largest < math.inf and bool((value.detach().abs() > self.largest).any()):
            over = out.detach().abs() > self.largest
            over[0] = False
            out = torch.where(over, out * math.inf, out)
        return Number(out, self)

    def accumulated(self, value: Tensor, size: Tensor) -> Number:
        """A sum of products, whose magnitudes add up to ``size``."""
        off = self.rounded(size).value - size
        return Number(value + off.detach(), self)


class Number:
    """A tensor ``(replicas + 1, ...)`` with the arithmetic and the functions of equations."""

    __slots__ = ("rounding", "value")

    def __init__(self, value: Tensor, rounding: Rounding):
        self.value, self.rounding = value, rounding

    def _other(self, other: Any) -> Any:
        return other.value if isinstance(other, Number) else float(other)

    def __add__(self, other: Any) -> Number:
        return self.rounding.rounded(self.value + self._other(other))

    def __sub__(self, other: Any) -> Number:
        return self.rounding.rounded(self.value - self._other(other))

    def __rsub__(self, other: Any) -> Number:
        return self.rounding.rounded(self._other(other) - self.value)

    def __mul__(self, other: Any) -> Number:
        return self.rounding.rounded(self.value * self._other(other), small=True)

    def __truediv__(self, other: Any) -> Number:
        return self.rounding.rounded(self.value / self._other(other), small=True)

    def __rtruediv__(self, other: Any) -> Number:
        return self.rounding.rounded(self._other(other) / self.value, small=True)

    def __pow__(self, exponent: Any) -> Number:
        return self.rounding.rounded(self.value ** self._other(exponent), small=True)

    __radd__, __rmul__ = __add__, __mul__

    def __neg__(self) -> Number:
        return Number(-self.value, self.rounding)

    def __lt__(self, other: Any) -> Tensor:
        return self.value < self._other(other)

    def __ge__(self, other: Any) -> Tensor:
        return self.value >= self._other(other)

    def replaced(self, where: Tensor, by: Number) -> Number:
        return Number(torch.where(where, by.value, self.value), self.rounding)

    def maximum(self, other: Any) -> Number:
        other = other.value if isinstance(other, Number) else torch.tensor(float(other)).double()
        return Number(torch.maximum(self.value, other), self.rounding)

    def _of(self, function: Any) -> Number:
        return self.rounding.rounded(function(self.value), small=True)

    def exp(self) -> Number:
        return self._of(torch.exp)

    def expm1(self) -> Number:
        return self._of(torch.expm1)

    def log(self) -> Number:
        return self._of(torch.log)

    def log1p(self) -> Number:
        return self._of(torch.log1p)

    def tanh(self) -> Number:
        return self._of(torch.tanh)

    def sqrt(self) -> Number:
        return self._of(torch.sqrt)

    def cos(self) -> Number:
        return self._of(torch.cos)

    def sin(self) -> Number:
        return self._of(torch.sin)

    def sigmoid(self) -> Number:
        return self._of(torch.sigmoid)

    def softplus(self) -> Number:
        """Where it is its argument, in any dtype, it is exact."""
        x = self.value
        whole = x.clamp(min=0) + torch.log1p(torch.exp(-x.abs()))
        rounded = self.rounding.rounded(whole, small=True).value
        return Number(torch.where(x > 100, x, rounded), self.rounding)

    def snapped(self, m: Number) -> Number:
        """The nearest multiple of ``2π/m``, less whole turns, with the derivative of the identity."""
        step = 2 * math.pi / m.value
        turns = torch.round((self / Number(step, self.rounding)).value.detach())
        fixed = torch.remainder(turns, m.value) * step
        return Number(self.value + (fixed - self.value).detach(), self.rounding)

    @staticmethod
    def unit(numbers: list[Number]) -> list[Number]:
        """A vector divided by its length, or by 1e-12 if that is larger."""
        whole = torch.stack([n.value for n in numbers], -1)
        rounding = numbers[0].rounding
        top = whole.detach().abs().amax(-1, keepdim=True)
        scale = torch.where((top > 0) & (top < math.inf), top, torch.ones_like(top))
        length = ((whole / scale) ** 2).sum(-1) ** 0.5 * scale.squeeze(-1)
        return [rounding.rounded(n.value / length.clamp(min=1e-12), small=True) for n in numbers]
