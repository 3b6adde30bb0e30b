"""Checks and conversions that all scans share. Nothing broadcasts."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from .._checks import floating, state_dtype
from .chunks import per_state


@dataclass(frozen=True)
class Options:
    """What a scan is told besides its operators, inputs and initial state."""

    resets: Tensor | None
    reverse: bool
    return_state: bool
    coefficients: bool = False


def tensor(scan: str, name: str, value: object, shape: tuple[int | str, ...]) -> Tensor:
    """``value`` as a floating-point tensor of a shape; names stand for sizes that are free."""
    try:
        got = floating(name, value)
    except TypeError as error:
        raise TypeError(f"{scan}: {error}") from None
    return shaped(scan, name, got, shape)


def shaped(scan: str, name: str, value: Tensor, shape: tuple[int | str, ...]) -> Tensor:
    fits = value.ndim == len(shape) and all(
        isinstance(want, str) or have == want for have, want in zip(value.shape, shape, strict=True)
    )
    if not fits:
        raise ValueError(
            f"{scan}: {name}: got shape {tuple(value.shape)}, expected "
            f"({', '.join(map(str, shape))}); nothing is broadcast, use .expand(...) if it should be."
        )
    return value


def one_device(scan: str, **values: Tensor | None) -> None:
    devices = {name: v.device for name, v in values.items() if v is not None}
    if len(set(devices.values())) > 1:
        listed = ", ".join(f"{name} on {device}" for name, device in devices.items())
        raise ValueError(f"{scan}: got {listed}, expected one device; move them with .to(...).")


def reset_mask(scan: str, resets: object, like: Tensor) -> Tensor | None:
    """Resets ``(B, T)`` of a sequence ``(B, T, ...)``."""
    if resets is None:
        return None
    if not isinstance(resets, Tensor) or resets.dtype != torch.bool:
        got = resets.dtype if isinstance(resets, Tensor) else type(resets).__name__
        raise TypeError(
            f"{scan}: resets: got {got}, expected a bool tensor of shape (B, T); convert it with "
            "resets.bool()."
        )
    one_device(scan, resets=resets, sequence=like)
    return shaped(scan, "resets", resets, tuple(like.shape[:2]))


def common_dtype(*values: Tensor | None) -> torch.dtype:
    """Dtype of a scan's results: the one that all inputs promote to."""
    dtypes = [v.dtype for v in values if v is not None]
    return functools.reduce(torch.promote_types, dtypes)


def accumulated(dtype: torch.dtype, *values: Tensor) -> tuple[Tensor, ...]:
    """The values in the dtype that states are accumulated in: float32 at least."""
    return tuple(v.to(state_dtype(dtype)) for v in values)


def cut(values: Tensor, resets: Tensor | None) -> Tensor:
    """``values`` with 0 where the state starts anew. The mask has the leading dimensions."""
    return values if resets is None else values.masked_fill(per_state(resets, values), 0)
