"""The pages on performance show what the committed results say."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = {"channelwise_page": "performance.md", "linear_page": "linear_performance.md"}


@pytest.fixture
def load(monkeypatch):
    """A script of the benchmarks by its name."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    for name in PAGES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module


def results(script):
    return json.loads(script.newest().read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", PAGES)
def test_tables_and_plots_follow_from_the_results(load, name):
    script = load(name)
    prose = (ROOT / "docs" / PAGES[name]).read_text(encoding="utf-8")
    for path, text in script.outputs(results(script)):
        target = path.relative_to(ROOT).as_posix()
        assert f'"{target}"' in prose, f"{PAGES[name]} does not include {target}"
        assert path.read_text(encoding="utf-8") == text, (
            f"{target} is out of date; run: python benchmarks/{name}.py"
        )


@pytest.mark.parametrize("name", PAGES)
def test_every_check_of_the_results_passed(load, name):
    found = results(load(name))
    assert found["failures"] == {}
    assert [row for row in found["checks"] if not row["ok"]] == []
    assert found.get("giant", {"ok": True})["ok"]


@pytest.mark.parametrize(
    ("milliseconds", "mebibytes", "measured", "reached"),
    [
        (2.0, 49, "5.00×, 0.49", True),
        (2.0, 51, "5.00×, 0.51", False),
        (2.6, 49, "3.85×, 0.49", False),
    ],
)
def test_speed_and_memory_are_of_one_configuration(
    load, milliseconds, mebibytes, measured, reached
):
    """Layers of 10 ms and 100 MiB beside one that is fast and one that is small."""

    def row(time, peak, **labels):
        return {"mixer": "SignedMinGRU", "precision": "TF32", "both": {"median": time}} | (
            {"peak": peak * 2**20} | labels
        )

    layers = [row(1.0, 99, library="pararnn"), row(10.0, 100, library="mingru-scans")]
    groups = [row(9.0, 10, samples=1), row(milliseconds, mebibytes, samples=2)]
    goals = list(load("linear_page").goals({"scan": [], "layers": layers, "groups": groups}))
    what = "speed and peak memory of one configuration"
    assert goals == [
        ("SignedMinGRU, TF32, as fast as mingru-scans", "≥ 4×", "10×", True),
        (f"SignedMinGRU, TF32, whole batch, {what}", "≥ 4×, ≤ 0.5", "10×, 0.99", False),
        (f"SignedMinGRU, TF32, groups of 2, {what}", "≥ 4×, ≤ 0.5", measured, reached),
        (f"SignedMinGRU, TF32, groups of 1, {what}", "≥ 4×, ≤ 0.5", "1.11×, 0.10", False),
    ]
