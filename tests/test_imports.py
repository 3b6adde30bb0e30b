"""Imports go down only, in the order of the table on the page of the design."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "pararnn"
DOORS = {("scan/backend.py", "solvers")}
"""The one file that imports upwards, inside a function."""


def rooms() -> list[str]:
    """Folders and modules of the table, the lowest first; ``_checks`` and its like are below all."""
    page = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    table = page.partition("## Folders")[2].partition("\n\nA folder imports")[0]
    cells = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
    return [name for cell in cells for name in re.findall(r"`(\w+)(?:/|\.py)`", cell)]


def imported(path: Path) -> set[str]:
    """Rooms that a module imports from."""
    package, found = path.relative_to(ROOT).parts[:-1], set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            home = package[: len(package) - node.level + 1] if node.level else ()
            home = (*home, *(node.module or "").split("."))
            found |= {(*filter(None, home), name.name)[:2] for name in node.names}
        elif isinstance(node, ast.Import):
            found |= {tuple(name.name.split("."))[:2] for name in node.names}
    return {names[1] for names in found if names[0] == "pararnn" and len(names) > 1}


def test_the_table_has_every_folder():
    folders = {p.name for p in PACKAGE.iterdir() if (p / "__init__.py").exists()}
    assert set(rooms()) == folders | {"cli"}


def test_imports_go_down():
    order = {room: i for i, room in enumerate(rooms())}
    wrong = []
    for path in PACKAGE.rglob("*.py"):
        inside = path.relative_to(PACKAGE)
        here = order.get(inside.parts[0].removesuffix(".py"))
        if here is None:
            if inside.name.startswith("__"):
                continue  # the public names, and the command
            here = -1
        for room in imported(path) & order.keys():
            if order[room] > here and (inside.as_posix(), room) not in DOORS:
                wrong.append(f"{inside} imports pararnn.{room}")
    assert not wrong
