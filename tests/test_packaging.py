"""The package as others install it: one version everywhere, and an import that asks for little."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import pararnn

ROOT = Path(__file__).resolve().parents[1]


def test_one_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert pararnn.__version__ == project["version"]
    assert re.findall(r"^version: (.+)$", citation, re.MULTILINE) == [project["version"]]


def test_import_needs_only_torch():
    program = (
        "import sys, torch; before = set(sys.modules); import pararnn;"
        "print(*{name.partition('.')[0] for name in set(sys.modules) - before})"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT
    )
    new = set(done.stdout.split())
    assert "pararnn" in new
    assert new.isdisjoint({"sympy", "mpmath", "triton", "mkdocs", "sybil", "pytest", "yaml"})


def test_every_pin_is_exact():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert [pin for pin in pins if not re.fullmatch(r"[\w.-]+==[\w.]+", pin)] == []
    assert any(pin.startswith("torch==") for pin in pins)


def test_the_wheel_has_the_facts(tmp_path):
    """Data beside the code is in the wheel, too: a card can be read from an installed package."""
    builder = pytest.importorskip("hatchling.builders.wheel")
    (wheel,) = builder.WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
    data = {p.relative_to(ROOT).as_posix() for p in (ROOT / "pararnn").rglob("*.toml")}
    assert len(data) > 12
    assert data <= held
