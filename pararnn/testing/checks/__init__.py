"""The checks: one function a clause, ``check(ctx)``, which measures and raises on a violation."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from ..context import Context

Check = Callable[[Context], None]
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
)


class Checks(dict[str, Check]):
    """Checks by the slug of their clause; as a decorator, ``@checks("resets")``, it takes one in."""

    def __call__(self, slug: str) -> Callable[[Check], Check]:
        """Two checks of one clause are an error."""

        def register(function: Check) -> Check:
            if slug in self:
                raise ValueError(f"clause {slug!r} already has a check, {self[slug].__name__}")
            self[slug] = function
            return function

        return register


checks = Checks()


def load() -> Checks:
    """All checks of cells and implementations, in the order of :data:`MODULES`, whatever was imported
    first."""
    found = Checks()
    for name in MODULES:
        module = import_module(f"{__name__}.{name}").__name__
        found |= {slug: check for slug, check in checks.items() if check.__module__ == module}
    return found
