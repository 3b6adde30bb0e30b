"""The checks: one function a clause, ``check(ctx)``, which measures and raises on a violation."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from ..context import Context

Check = Callable[[Context], None]
CHECKS: dict[str, Check] = {}
MODULES = (
    "equations",
    "solving",
    "scale",
    "proofs",
    "gradients",
    "sequences",
    "gaps",
    "linear",
    "readout",
    "robustness",
    "memory",
    "modules",
    "drm",
    "drm_geometry",
    "drm_sequences",
    "tasks",
)


def checks(slug: str) -> Callable[[Check], Check]:
    """Register the check of the clause with this slug. Two checks of one clause are an error."""

    def register(function: Check) -> Check:
        if slug in CHECKS:
            raise ValueError(f"clause {slug!r} already has a check, {CHECKS[slug].__name__}")
        CHECKS[slug] = function
        return function

    return register


def load() -> dict[str, Check]:
    """All checks by slug."""
    for name in MODULES:
        import_module(f"{__name__}.{name}")
    return CHECKS
