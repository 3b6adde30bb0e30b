"""The diagnostics before and after training: the table is that of the results, and the script runs."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.syspath_prepend(str(ROOT))
    yield importlib.import_module("drm_geometry")
    sys.modules.pop("drm_geometry", None)


def test_the_table_follows_from_the_results(script):
    found = json.loads(script.DATA.read_text(encoding="utf-8"))
    assert script.TABLE.read_text(encoding="utf-8") == script.drawn(found)
    page = (ROOT / "docs" / "drm_open_problems.md").read_text(encoding="utf-8")
    assert f'"benchmarks/results/{script.TABLE.name}"' in page
    assert found["command"] in page


def test_a_short_run(script, capsys):
    found = script.measured(1, script.PRESETS["small"]._replace(steps=1, windows=2, length=64))
    assert [(r["model"], r["steps"]) for r in found["rows"]] == [
        (name, steps) for name in script.MODELS for steps in (0, 1)
    ]
    for row in found["rows"]:
        assert 1 < row["path_rank"] < row["pullback_rank"] < row["metric_rank"] < 64
        assert -1 <= row["agreement"] <= 1
        assert 0 < row["gates"] < 1
        assert 0 < row["gap"] < 1
        assert row["turn"] > 0
    assert script.drawn(found).count("| `J` |") == 2
