"""Argument checks shared by all cells. Each error says what was got, expected, and the fix."""

from __future__ import annotations

import torch
from torch import Tensor


def positive(name: str, value: object) -> int:
    """``value`` as a positive int, or a ``TypeError``/``ValueError`` that names it."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(
            f"{name}: got {value!r} ({type(value).__name__}), expected a positive integer."
        )
    if value < 1:
        raise ValueError(f"{name}: got {value}, expected a positive integer.")
    return value


def either(name: str, value: int | None, alias: str, other: int | None) -> int:
    """A width that can be given under two names, exactly once."""
    if value is not None and other is not None and value != other:
        raise ValueError(f"got {name}={value} and {alias}={other}; they are one size, give one.")
    chosen = value if value is not None else other
    if chosen is None:
        raise TypeError(f"got neither {name} nor {alias}; give one of them.")
    return positive(name, chosen)


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of states and accumulations: float64 for float64, float32 for everything narrower."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def floating(name: str, value: object) -> Tensor:
    """``value`` as a real floating-point tensor."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: got {type(value).__name__}, expected a torch.Tensor.")
    if not value.is_floating_point():
        raise TypeError(
            f"{name}: got dtype {value.dtype}, expected a floating-point dtype; "
            f"convert it with {name}.to(torch.float32)."
        )
    return value


def trailing(name: str, value: Tensor, shape: tuple[int, ...], lead: int | None = None) -> Tensor:
    """Check the last dimensions (and, if given, the number of leading ones)."""
    fits = value.ndim >= len(shape) and tuple(value.shape[value.ndim - len(shape) :]) == shape
    if not fits or (lead is not None and value.ndim != lead + len(shape)):
        dots = "..., " if lead is None else "N, " * lead
        wanted = f"({dots}{', '.join(map(str, shape))})"
        raise ValueError(
            f"{name}: got shape {tuple(value.shape)}, expected {wanted}; "
            f"check the width that the cell was built with."
        )
    return value


def same_device(name: str, value: Tensor, device: torch.device) -> Tensor:
    if value.device != device:
        raise ValueError(
            f"{name}: got device {value.device}, expected {device} as the cell's parameters; "
            f"move one of them with .to(...)."
        )
    return value


def full_precision(device: torch.device) -> torch.autocast:
    """Context in which autocast is off: recurrences run in the dtype of their state."""
    return torch.autocast(device.type, enabled=False)
