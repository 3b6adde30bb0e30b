"""The page of DRM results shows what the committed results say."""

from __future__ import annotations

import importlib
import json
import statistics
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def page(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("drm_page")


def test_tables_follow_from_the_results(page):
    prose = (ROOT / "docs" / "drm_results.md").read_text(encoding="utf-8")
    for path, text in page.outputs():
        name = path.relative_to(ROOT).as_posix()
        assert f'"{name}"' in prose, f"the page of DRM results does not include {name}"
        assert path.read_text(encoding="utf-8") == text, (
            f"{name} is out of date; run: python benchmarks/drm_page.py"
        )


def test_no_run_failed(page):
    found = json.loads(page.newest("mqar").read_text(encoding="utf-8"))
    assert [r for r in found["rows"] if "exception" in r] == []


def test_numbers_of_a_row(page):
    """Recomputed for one row, with seeds in another order and one that J lacks."""
    rows = [
        {"model": m, "preset": "notes", "seed": s, "loss": 2.0, "accuracy": a, "parameters": 1234}
        for m, s, a in [("J", 2, 0.25), ("J", 1, 0.5), ("I", 1, 0.75), ("I", 3, 0.9), ("I", 2, 1.0)]
    ]
    text = page.mqar_table({"rows": rows, "aliases": {"I": ["K"]}})
    lines = [line for line in text.splitlines() if "notes" in line]
    accuracy, gain = (75.0, 90.0, 100.0), (25.0, 75.0)
    assert lines == [
        f"| `I`, `K` | notes | 1,234 | 3 | 2.000 ± 0.000 | {statistics.mean(accuracy):.1f} ± "
        f"{statistics.stdev(accuracy):.1f} | {statistics.mean(gain):.1f} ± "
        f"{statistics.stdev(gain):.1f} |",
        f"| `J` | notes | 1,234 | 2 | 2.000 ± 0.000 | 37.5 ± {25 / 2**0.5:.1f} | – |",
    ]
    rows[0]["exception"] = "no luck"
    assert "| `J` | notes | 1,234 | 1 | 2.000 | 50.0 | – |" in page.mqar_table(
        {"rows": rows, "aliases": {}}
    )
