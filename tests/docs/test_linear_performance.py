"""The page on the linear family shows what the committed results say."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def page(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    for name in ("linear_page", "channelwise_page", "card_numerics"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module("linear_page")


def test_tables_follow_from_the_results(page):
    prose = (ROOT / "docs" / "linear_performance.md").read_text(encoding="utf-8")
    found = json.loads(page.newest().read_text(encoding="utf-8"))
    for path, text in page.outputs(found):
        name = path.relative_to(ROOT).as_posix()
        assert f'"{name}"' in prose, f"the page does not include {name}"
        assert path.read_text(encoding="utf-8") == text, (
            f"{name} is out of date; run: python benchmarks/linear_page.py"
        )


def test_every_check_of_the_results_passed(page):
    found = json.loads(page.newest().read_text(encoding="utf-8"))
    assert found["failures"] == {}
    assert [row for row in found["checks"] if not row["ok"]] == []
