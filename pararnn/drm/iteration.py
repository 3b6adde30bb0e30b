"""Corrections of many values at once, until they settle; forwards and backwards in time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from .steps import Slopes, Steps

SLOWEST = 0.9  # rate at which corrections are taken to shrink, where they shrink no faster


class Autocast:
    """The setting of autocast now, to be found again in the backward pass."""

    def __init__(self, device: torch.device):
        self.device = device.type
        self.enabled = torch.is_autocast_enabled(self.device)
        self.dtype = torch.get_autocast_dtype(self.device)

    def __call__(self) -> torch.autocast:
        return torch.autocast(self.device, self.dtype, self.enabled)


class Plan(NamedTuple):
    """How to sweep: ``window`` tokens at once, at most ``cap`` corrections (0: as many as tokens), to
    a relative error ``tol``, with the ``autocast`` of the forward pass."""

    steps: Steps
    autocast: Autocast
    window: int
    cap: int
    tol: float

    def most(self, length: int) -> int:
        """Largest number of corrections of a window."""
        return min(self.cap or length, length)


@dataclass
class Report:
    """What the windows took, as :class:`~pararnn.drm.Sweeps` says it; filled while they run."""

    corrections: list[int] = field(default_factory=list)
    looped: list[bool] = field(default_factory=list)
    backward: list[int] = field(default_factory=list)
    error: float = 0.0


class Settled(NamedTuple):
    """Values ``(B, T, d)``, which of them are within the tolerance ``(B, T)``, the number of
    corrections, and the largest error of those that are."""

    values: Tensor
    settled: Tensor
    corrections: int
    error: float


def sweep(
    mismatch: Callable[[Tensor], tuple[Tensor, Slopes]],
    guess: Tensor,
    floor: Tensor,
    tol: float,
    cap: int,
) -> Settled:
    """Correct ``guess (B, T, d)``, values that depend on those before them, until it settles.

    Parameters
    ----------
    mismatch
        Mismatches of some values, and the slopes that carry corrections on.
    floor
        Size that an error is relative to, at least, ``(B, 1)``.
    tol, cap
        Relative error to end at, and largest number of corrections.
    """

    def so_far(x: Tensor) -> Tensor:
        """The largest entry up to each step, ``(B, T)``."""
        return x.detach().abs().amax(-1).cummax(1).values

    values = guess
    settled = torch.zeros(guess.shape[:2], dtype=torch.bool, device=guess.device)
    error = settled.to(guess.dtype)
    last: Tensor | None = None
    for k in range(1, cap + 1):
        residual, slopes = mismatch(values)
        change = slopes.carried(residual)
        size = so_far(change)
        rate = torch.full_like(size, SLOWEST) if last is None else (size / last).nan_to_num(0.0)
        rate, last = rate.clamp(max=SLOWEST), size
        values = torch.where(settled.unsqueeze(-1), values, values + change)
        scale = torch.maximum(floor, so_far(values)).clamp(min=torch.finfo(size.dtype).tiny)
        left = rate / (1 - rate) * size / scale
        error = torch.where(settled, error, left)
        # k states are exact by now, unless a correction went through what is not finite.
        exact = values[:, :k].isfinite().all(-1) & ~settled[:, :k]
        error[:, :k] = error[:, :k].masked_fill(exact, 0.0)
        settled = settled | (error <= tol)
        if bool(settled.all()):
            break
    worst = float(error.where(settled, 0.0).max()) if error.numel() else 0.0
    return Settled(values, settled, k, worst)
