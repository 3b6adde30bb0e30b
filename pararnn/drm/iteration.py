"""Corrections of many values at once, until they settle; forwards and backwards in time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from .networks import shifted
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
    reach: Callable[[Tensor], tuple[Tensor, Slopes]], guess: Tensor, tol: float, cap: int
) -> Settled:
    """Correct ``guess (B, T, d)``, values that depend on those before them, until it settles.

    A correction is measured against the largest entry of the values so far: of its own row, up to its
    own time, without a floor. A new value is what the step makes of the one before, plus what is carried of
    the correction of that one; no sum of a guess and its correction, whose digits may cancel.

    Parameters
    ----------
    reach
        What the step makes of the values before, and the slopes that carry corrections on.
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
        reached, slopes = reach(values)
        change = slopes.carried(reached - values)
        moved = reached + slopes.applied(shifted(torch.zeros_like(change[:, 0]), change))
        values = torch.where(settled.unsqueeze(-1), values, moved)
        size = so_far(change)
        scale = so_far(values).clamp(min=torch.finfo(size.dtype).tiny)
        # A correction larger than the values themselves tells no rate, nor one that is not finite.
        rate = torch.full_like(size, SLOWEST)
        if last is not None:
            shrunk = (size / torch.minimum(last, scale)).nan_to_num(0.0).clamp(max=SLOWEST)
            rate = shrunk.where(last.isfinite(), rate)
        last, left = size, rate / (1 - rate) * (size / scale)
        error = torch.where(settled, error, left)
        # k states are exact by now, unless a correction went through what is not finite.
        exact = values[:, :k].isfinite().all(-1) & ~settled[:, :k]
        error[:, :k] = error[:, :k].masked_fill(exact, 0.0)
        settled = settled | (error <= tol)
        if bool(settled.all()):
            break
    worst = float(error.where(settled, 0.0).max()) if error.numel() else 0.0
    return Settled(values, settled, k, worst)
