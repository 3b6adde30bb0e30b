"""Where the published system differs from its notes, switch by switch; the texts are data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...cells.facts.load import read, record
from ..config import DRMConfig


@dataclass(frozen=True)
class Switch:
    """A field of :class:`DRMConfig` where the published system differs from its notes.

    Attributes
    ----------
    name
        The field. Its default is the notes; :meth:`DRMConfig.published` sets the other value.
    notes, published
        What either value means.
    effect
        What the difference does.
    """

    name: str
    notes: str
    published: str
    effect: str

    @property
    def values(self) -> tuple[Any, Any]:
        """That of the notes and that of the published system."""
        return getattr(DRMConfig(), self.name), getattr(DRMConfig().published(), self.name)


_FILE = Path(__file__).parent / "switches.toml"

SWITCHES: Mapping[str, Switch] = {
    name: record(Switch, row, f"{_FILE.name}: [{name}]", {}, name=name)
    for name, row in read(_FILE).items()
}
"""All of them by name."""
