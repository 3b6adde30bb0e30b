"""Which code runs a scan: the eager operations of this package, or a fused kernel.

A kernel is plugged in with :func:`register_fused`, by a module that is imported when a kernel is
first asked for. It gets what the public function gets, checked, and records its own
derivative.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

BACKENDS = ("auto", "eager", "fused")


@dataclass(frozen=True)
class Fused:
    """A kernel for a scan: ``lacks`` says why it cannot run the given tensors, or None if it can;
    ``run`` computes what the public function returns, from the same tensors."""

    lacks: Callable[..., str | None]
    run: Callable[..., Any]


_FUSED: dict[str, Fused] = {}


def register_fused(scan: str, fused: Fused) -> None:
    """Plugs a kernel in for a scan, named as its public function."""
    _FUSED[scan] = fused


def plugged_in() -> None:
    """Import what plugs kernels in. The operator of all recurrences is above this package."""
    import pararnn.scan.fused_delta
    import pararnn.solvers.scans  # noqa: F401


def pick(scan: str, backend: str, *values: Tensor | None) -> Callable[..., Any] | None:
    """The kernel to run, or None for the eager path.

    Raises
    ------
    ValueError
        If there is no such backend.
    RuntimeError
        If ``backend`` is ``'fused'`` and no kernel can run this.
    """
    if backend not in BACKENDS:
        raise ValueError(
            f"{scan}: backend: got {backend!r}, expected one of {', '.join(BACKENDS)}."
        )
    if backend == "eager":
        return None
    device = next(v.device for v in values if v is not None)
    if backend == "auto" and device.type == "cpu":
        return None
    plugged_in()
    fused = _FUSED.get(scan)
    reason = "there is no fused kernel for it" if fused is None else fused.lacks(*values)
    if fused is not None and reason is None:
        return fused.run
    if backend == "fused":
        raise RuntimeError(
            f"{scan}: got backend='fused', but {reason}; use backend='auto' or 'eager'."
        )
    return None
