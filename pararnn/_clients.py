"""Finding the packages on top of the cells: nothing here or below knows their names.

A client is a package inside :mod:`pararnn`, or one that an installed distribution names as an entry point
of the group ``pararnn.clients``. It may have a module ``cards``, which calls
:func:`pararnn.cells.register_parts`, and a module ``command``, with ``register(commands)``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import entry_points
from pkgutil import iter_modules
from types import ModuleType

_HERE = os.path.dirname(__file__)


def modules(name: str) -> Iterator[ModuleType]:
    """The modules of this name of all clients, imported, by the clients' names."""
    for package, folder in sorted(_packages().items()):
        if any(found.name == name for found in iter_modules([folder])):
            yield import_module(f"{package}.{name}")


def _packages() -> dict[str, str]:
    """Name and folder of every client."""
    found = {
        f"{__package__}.{info.name}": os.path.join(_HERE, info.name)
        for info in iter_modules([_HERE])
        if info.ispkg
    }
    for entry in entry_points(group="pararnn.clients"):
        client = import_module(entry.value)
        found[client.__name__] = client.__path__[0]
    return found
