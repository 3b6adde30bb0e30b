"""Where the published system differs from its notes, switch by switch; the texts are data."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pararnn.cells import Switch, read_switches

from ..config import DRMConfig

SWITCHES: Mapping[str, Switch] = read_switches(
    Path(__file__).parent / "switches.toml", DRMConfig(), DRMConfig().published()
)
"""All of them by name, with the default and what :meth:`DRMConfig.published` sets."""
