"""The checks of what is on top of the library, the DRM and the tasks; those of cells and
implementations are in :mod:`pararnn.testing.checks`."""

from __future__ import annotations

from importlib import import_module

from pararnn.testing.checks import Check, Checks
from pararnn.testing.checks import load as of_cells

checks = Checks()
MODULES = ("drm", "drm_geometry", "drm_sequences", "tasks")


def load() -> dict[str, Check]:
    """All checks of the contract by slug."""
    for name in MODULES:
        import_module(f"{__name__}.{name}")
    return of_cells() | checks
