"""The operations that printed programs call, on torch tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .._checks import transformed
from ..spec import Spec
from ..spec.print import print_program
from ..spec.program import load


def heads(weight: Tensor, x: Tensor) -> Tensor:
    """Block-diagonal product: ``weight (n, out, in)``, ``x (..., n*in)`` → ``(..., n*out)``."""
    n, _, width = weight.shape
    blocks = x.reshape(-1, n, width).transpose(0, 1)
    return torch.bmm(blocks, weight.transpose(1, 2)).transpose(0, 1).reshape(x.shape)


def _softplus(x: Tensor) -> Tensor:
    return functional.softplus(x, threshold=40.0)


def _maximum(a: Tensor | float, b: Tensor | float) -> Tensor:
    """Half the gradient for each at a tie. One of the two may be a number."""
    if not isinstance(a, Tensor):
        a = torch.full((), a, dtype=b.dtype, device=b.device)  # type: ignore[union-attr]
    if not isinstance(b, Tensor):
        b = torch.full((), b, dtype=a.dtype, device=a.device)
    return torch.maximum(a, b)


def _watched(x: Tensor) -> bool:
    """Whether something may differentiate what is done to ``x``: autograd, forward-mode
    derivatives or a transform of ``torch.func``."""
    return (x.requires_grad and torch.is_grad_enabled()) or transformed(x)


def _positive(x: Tensor) -> Tensor:
    if not _watched(x):  # faster than a choice, and the same
        return torch.sigmoid(x.clamp_max(0)).add_(x.clamp_min(0))
    return torch.where(x >= 0, x + 0.5, torch.sigmoid(x))


def _positive_slope(x: Tensor, y: Tensor) -> Tensor:
    if not _watched(y):
        return (y * (1 - y)).masked_fill_(x >= 0, 1.0)
    return torch.where(x >= 0, torch.ones_like(y), y * (1 - y))


def snap(x: Tensor, m: Tensor | float) -> Tensor:
    """The multiple of ``2π/m`` nearest to ``x``, exactly; its derivative is 1."""
    near = torch.round(x.detach() * (m * (0.5 / math.pi))) * (2 * math.pi / m)
    return near + (x - x.detach()) if _watched(x) else near


def snap_angle(x: Tensor, m: Tensor | float) -> Tensor:
    """The multiple of ``2π/m`` nearest to ``x``, less whole turns, exactly; its derivative is 1.

    It counts in float64: a float32 angle of 1e3 is off by 3e-5 from its own multiple.
    """
    order = m.double() if isinstance(m, Tensor) else m
    count = torch.round(x.detach().double() * (order * (0.5 / math.pi)))
    count = count - order * torch.round(count / order)
    near = (count * (2 * math.pi / order)).to(x.dtype)
    return near + (x - x.detach()) if _watched(x) else near


def _heaviside(x: Tensor) -> Tensor:
    return torch.sign(x).mul_(0.5).add_(0.5)


_MAPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "diagonal": torch.mul,
    "head": heads,
    "dense": lambda w, x: x @ w.mT,
    "right": lambda w, x: x @ w,
}


def _variants() -> dict[str, Callable[[Any, Tensor], Tensor]]:
    """Every structure's action, its transposed action, and its action with absolute weights."""
    out: dict[str, Callable[[Any, Tensor], Tensor]] = dict(_MAPS)
    for name, act in _MAPS.items():
        out[f"{name}_t"] = act if name == "diagonal" else _with(act, lambda w: w.mT)
        out[f"{name}_abs"] = _with(act, torch.abs)
    return out | dict.fromkeys(("contract", "contract_t", "contract_abs"), _contract)


def _contract(dim: int, x: Tensor) -> Tensor:
    """Sum over one axis, which stays: the map is its own transpose."""
    return x.sum(dim, keepdim=True).expand_as(x)


def _with(
    act: Callable[[Tensor, Tensor], Tensor], change: Callable[[Tensor], Tensor]
) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda w, x: act(change(w), x)


NAMESPACE: dict[str, Any] = {
    "addcmul": torch.addcmul,
    "lerp": torch.lerp,
    "tanh_backward": torch.ops.aten.tanh_backward,
    "square": torch.square,
    "sqrt": torch.sqrt,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "exp": torch.exp,
    "expm1": torch.expm1,
    "log": torch.log,
    "log1p": torch.log1p,
    "positive": _positive,
    "positive_slope": _positive_slope,
    "snap": snap,
    "snap_angle": snap_angle,
    "sin": torch.sin,
    "cos": torch.cos,
    "softplus": _softplus,
    "maximum": _maximum,
    "heaviside": _heaviside,
    "ratio": lambda p, q: p / q,
    "zero": torch.zeros_like,
    **_variants(),
}


@lru_cache(maxsize=1024)
def compiled(spec: Spec, program: str) -> Callable[..., tuple[Any, ...]]:
    """A printed program of the Spec as a function of tensors (see :mod:`pararnn.spec.derive`)."""
    return load(print_program(spec, program, "torch"), NAMESPACE)


def align(value: Tensor, axes: Sequence[str], state_axes: Sequence[str]) -> Tensor:
    """Insert singleton axes, so that ``(..., *axes)`` broadcasts against ``(..., *state_axes)``."""
    for i, axis in enumerate(reversed(state_axes)):
        if axis not in axes:
            value = value.unsqueeze(-1 - i)
    return value
