"""Imports go down only, and what is on top of the library uses its public names only.

    cli, cards, testing → drm, tasks, layers → cells → solvers → scan, kernels → spec

What is read is the text: an import inside a function, or for types alone, counts too.
"""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import pararnn

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "pararnn"

RANKS = (
    {"cli", "__main__"},
    {"cards", "testing"},
    {"distributed"},
    {"drm", "tasks", "layers"},
    {"cells"},
    {"solvers"},
    {"scan", "kernels"},
    {"spec"},
    {"checks", "commands", "_clients", "_operators", "_precision"},
    {"_checks"},
)
"""From the top down."""
BESIDE = {("scan", "kernels"), ("__main__", "cli"), ("drm", "layers"), ("tasks", "layers")}
"""Who may import whom of its own rank."""

UPWARD = {("pararnn/scan/backend.py", "pararnn.solvers.scans")}
"""Imports that go up on purpose: the fused kernel of a scan is the one operator of all recurrences, which is
above the scans. ``plugged_in`` imports it when a kernel is first asked for, so that it registers itself."""

CLIENTS = ("drm", "tasks")
PUBLIC = {f"pararnn{name}" for name in ("", ".cells", ".checks", ".commands", ".layers", ".scan",
                                        ".solvers", ".spec", ".tasks")}  # fmt: skip
"""Modules whose ``__all__`` clients take names from; a client's own folder is its own affair."""


class Import(NamedTuple):
    """``name`` of ``module``, as a file says; without a name, the module itself."""

    file: str
    line: int
    module: str
    name: str

    @property
    def room(self) -> str:
        """The folder or file of the package that is imported from; empty for the package."""
        if self.module == "pararnn" and self.name in pararnn.__all__:
            return vars(pararnn)["_HOME_OF"].get(self.name, "").removeprefix("pararnn.")
        whole = f"{self.module}.{self.name}".split(".")
        return whole[1] if len(whole) > 1 else ""


def imports(text: str, file: str) -> Iterator[Import]:
    """Those of the package, by absolute names, of a file of it."""
    package = file.removesuffix(".py").split("/")[:-1]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(file, node.lineno, alias.name, "")
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield Import(file, node.lineno, module, alias.name)


def ours() -> Iterator[Import]:
    for path in sorted(PACKAGE.rglob("*.py")):
        file = path.relative_to(ROOT).as_posix()
        for found in imports(path.read_text(encoding="utf-8"), file):
            if found.module.split(".")[0] == "pararnn":
                yield found


def room_of(file: str) -> str:
    return file.removeprefix("pararnn/").split("/")[0].removesuffix(".py")


def rank(room: str) -> int:
    """Place in the order, from the top.

    Raises
    ------
    LookupError
        If the room has none.
    """
    for i, rooms in enumerate(RANKS):
        if room in rooms:
            return i
    raise LookupError(f"{room}: no place in the order of imports; add it to RANKS.")


def upward(found: Import) -> bool:
    """Whether an import goes up, or sideways where it may not."""
    here, there = room_of(found.file), found.room
    if here == "__init__" or here == there or there == "":
        return False
    below = rank(there) - rank(here)
    return below < 0 or (below == 0 and (here, there) not in BESIDE)


def private(found: Import) -> bool:
    """Whether a client takes what is not public."""
    here = room_of(found.file)
    if here not in CLIENTS or found.room == here:
        return False
    if found.module not in PUBLIC:
        return True
    public = importlib.import_module(found.module)
    whole = f"{found.module}.{found.name}"
    return found.name not in public.__all__ and whole not in PUBLIC


def shown(found: list[Import]) -> str:
    return "\n".join(f"{i.file}:{i.line} imports {i.name or i.module} of {i.module}" for i in found)


def test_imports_go_down():
    found = [i for i in ours() if upward(i)]
    assert not [i for i in found if (i.file, i.module) not in UPWARD], shown(found)
    assert {(i.file, i.module) for i in found} == UPWARD, "an exception that is none any more"


def test_clients_use_public_names():
    found = [i for i in ours() if private(i)]
    assert not found, shown(found)


def test_clients_do_not_know_each_other_and_nothing_knows_them():
    found = [i for i in ours() if i.room in CLIENTS and room_of(i.file) != i.room]
    assert not found, shown(found)


@pytest.mark.parametrize(
    ("text", "file", "up", "hidden"),
    [
        ("from ..cells import Cell", "pararnn/solvers/api.py", True, False),
        ("def f():\n    from ..layers.paths import explain", "pararnn/spec/spec.py", True, False),
        ("import pararnn.drm", "pararnn/cells/cell.py", True, False),
        ("from pararnn.tasks import Task", "pararnn/drm/mqar.py", True, False),
        ("from ..drm import DRM", "pararnn/tasks/run.py", True, True),
        ("from .. import drm", "pararnn/tasks/run.py", True, True),
        ("from ..scan import affine", "pararnn/kernels/walk.py", True, False),
        ("from ..kernels import plan", "pararnn/scan/fused_delta.py", False, False),
        ("from .plan import Plan", "pararnn/kernels/walk.py", False, False),
        ("from ...spec import Spec", "pararnn/drm/cards/flow.py", False, False),
        ("from ...spec.fragment import Fragment", "pararnn/drm/cards/flow.py", False, True),
        ("from .. import _checks as checks", "pararnn/drm/bound.py", False, True),
        ("from pararnn.solvers.config import Solution", "pararnn/drm/parallel.py", False, True),
        ("from pararnn.scan import containment", "pararnn/drm/block.py", False, True),
        ("from pararnn import checks, solve", "pararnn/drm/block.py", False, False),
        ("from .. import solve", "pararnn/spec/spec.py", True, False),
        ("import pararnn.solvers.engine", "pararnn/tasks/run.py", False, True),
    ],
)
def test_what_is_a_violation(text, file, up, hidden):
    found = list(imports(text, file))
    assert any(map(upward, found)) == up
    assert any(map(private, found)) == hidden


def test_a_new_folder_needs_a_place():
    with pytest.raises(LookupError, match="add it to RANKS"):
        upward(Import("pararnn/cells/cell.py", 1, "pararnn.elsewhere", "x"))
    for path in PACKAGE.iterdir():
        if path.suffix == ".py" or (path / "__init__.py").exists():
            assert path.stem == "__init__" or rank(path.stem) >= 0


@pytest.mark.parametrize("client", CLIENTS)
def test_a_client_can_be_lifted_out(client, tmp_path):
    """Without its folder the cells have their cards and the command its other commands."""
    copy = tmp_path / "pararnn"
    copy.mkdir()
    for path in PACKAGE.iterdir():
        if path.name not in (client, "__pycache__"):
            (copy / path.name).symlink_to(path)
    code = (
        "import sys, pararnn; from pararnn import cli; assert cli.main(['list']) == 0\n"
        "from pararnn.cards import card_text, part_names\n"
        "card_text('ParaGRU')\n"
        "print('parts', *part_names())\n"
        "print('client', *sorted(m for m in sys.modules if m == 'pararnn.' + sys.argv[1]))\n"
        "print('home', pararnn.__file__)\n"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, client],
        cwd=tmp_path, capture_output=True, text=True, env={"PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    *listed, parts, known, home = done.stdout.splitlines()
    assert home == f"home {copy / '__init__.py'}"
    assert known == "client"
    assert ("DRM" in parts.split()) == any(x.split()[0] == "DRM" for x in listed)
    assert ("DRM" in parts.split()) == (client != "drm")
