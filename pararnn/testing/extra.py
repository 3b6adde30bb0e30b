"""What only testing needs is imported where it is needed, and an error says how to get it."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType


def extra(name: str) -> ModuleType:
    """A module of the extra ``test``.

    Raises
    ------
    ModuleNotFoundError
        If it is not installed.
    """
    try:
        return import_module(name)
    except ModuleNotFoundError as problem:
        if problem.name != name.partition(".")[0]:
            raise
        raise ModuleNotFoundError(
            f"pararnn.testing: got no module {name!r}, expected the extra 'test': "
            "pip install 'pararnn[test]'",
            name=problem.name,
        ) from None
