"""A part of the model, from its file of facts."""

from __future__ import annotations

from pathlib import Path

from pararnn.cells import Part, Table, read_part
from pararnn.spec import Spec

from .switches import SWITCHES

CHECKED_BY = "pytest conformance --cell DRM"
Tables = tuple[tuple[str, Table], ...]


def part(slug: str, *modules: type, tables: Tables = (), **specs: Spec) -> Part:
    """The part in the file ``<slug>.toml``. Its list of equations names the Specs among them."""
    path = Path(__file__).parent / f"{slug}.toml"
    return read_part(
        path,
        *modules,
        equations=specs,
        switches=SWITCHES,
        tables=tables,
        checked_by=CHECKED_BY,
    )
