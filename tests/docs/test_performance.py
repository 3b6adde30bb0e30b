"""The performance page shows what the committed results say."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def page(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    path = ROOT / "benchmarks" / "channelwise_page.py"
    spec = importlib.util.spec_from_file_location("channelwise_page", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "channelwise_page", module)
    spec.loader.exec_module(module)
    return module


def test_tables_and_plots_follow_from_the_results(page):
    prose = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    found = json.loads(page.newest().read_text(encoding="utf-8"))
    for path, text in page.outputs(found):
        name = path.relative_to(ROOT).as_posix()
        assert f'"{name}"' in prose, f"the performance page does not include {name}"
        assert path.read_text(encoding="utf-8") == text, (
            f"{name} is out of date; run: python benchmarks/channelwise_page.py"
        )


def test_every_check_of_the_results_passed(page):
    found = json.loads(page.newest().read_text(encoding="utf-8"))
    assert found["failures"] == {}
    assert [row for row in found["checks"] if not row["ok"]] == []
    assert found["giant"]["ok"]
