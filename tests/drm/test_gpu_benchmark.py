"""The benchmark for a GPU runs at tiny sizes on any device."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def script(monkeypatch):
    folder = ROOT / "benchmarks"
    if not folder.is_dir():
        pytest.skip("the benchmarks are not part of an installed package")
    monkeypatch.syspath_prepend(str(folder))
    return importlib.import_module("gpu_drm")


@pytest.mark.slow
def test_smoke(script, tmp_path, monkeypatch):
    only = [word for name in script.SECTIONS for word in ("--only", name)]
    monkeypatch.setattr(sys, "argv", ["gpu_drm.py", "--smoke", "--out", str(tmp_path), *only])
    assert script.main() == 0
    (path,) = tmp_path.iterdir()
    found = json.loads(path.read_text(encoding="utf-8"))
    assert found["failures"] == {}
    assert found["skipped"] == []
    for section in script.SECTIONS:
        assert found[section], section
        assert not [row for row in found[section] if "exception" in row]
    assert all(row["ok"] for row in found["checks"])
    assert all(row["error"] < 1e-6 for row in found["prefix"])
    for row in found["rollout"]:
        for window in row["windows"].values():
            assert window["error"] < 1e-4
    assert all(row["difference"] < 1e-3 for row in found["gradient"])
