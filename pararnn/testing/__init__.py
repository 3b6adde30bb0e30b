"""The numerics contract for what you write: subclass :class:`Conformance` in a test of yours.

A cell or an implementation of your own is checked clause by clause, with `pytest` alone. There are two
oracles, and neither knows the solver: a float64 loop of the cell's step (:mod:`.reference`), and the papers'
equations in 50 digits (:mod:`.equations`). Random cases (:mod:`.cases`) run the same equations in numbers
that carry their rounding (:mod:`.rounding`).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

_HOME_OF = {
    "Conformance": "conformance",
    "Context": "context",
    "NotApplicable": "context",
    "Violation": "context",
}
__all__ = tuple(_HOME_OF)

if TYPE_CHECKING:
    from .conformance import Conformance as Conformance
    from .context import Context as Context
    from .context import NotApplicable as NotApplicable
    from .context import Violation as Violation


def __getattr__(name: str) -> Any:
    if name in _HOME_OF:
        return getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
