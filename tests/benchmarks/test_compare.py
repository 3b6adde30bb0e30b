"""Comparing two versions: which rows count as slower, and that nothing is left out silently."""

from __future__ import annotations

import importlib
import math
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def script(monkeypatch):
    if not (ROOT / "benchmarks").is_dir():
        pytest.skip("the benchmarks are not part of an installed package")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("compare")


@pytest.fixture
def results(monkeypatch, script):
    load = importlib.import_module("report")
    return {name: load.load(load.newest(f"h200-{name}")) for name in ("channelwise", "linear")}


def test_every_committed_row_is_compared(script, results):
    """Each row and part has a key of its own."""
    found = results["channelwise"] | {
        k: v for k, v in results["linear"].items() if k in script.SECTIONS
    }
    counts = {s: len(script.medians(s, found)) for s in script.SECTIONS}
    layers = [r for r in found["layers"] if r["library"] == "pararnn"]
    wanted = {
        "main": 3 * len(found["main"]),
        "others": 3 * len(found["others"]),
        "layer": 2 * len(found["layer"]),
        "newton": 2 * len(found["newton"]),
        "memory": len(found["memory"]),
        "overhead": len(found["overhead"]),
        "sweep": 2 * sum(len(r["times"]) for r in found["sweep"]),
        "scan": 2 * len(found["scan"]),
        "groups": 3 * len(found["groups"]),
    }
    assert {s: counts[s] for s in wanted} == wanted
    assert counts["layers"] >= 3 * len(layers)
    assert counts["delta"] >= 2 * len([r for r in found["delta"] if r["library"] == "pararnn"])


def test_slower_rows(script):
    old = {("main", "a", "forward"): 1.0, ("main", "b", "forward"): 2.0, ("main", "c", "both"): 1.0}
    new = {
        ("main", "a", "forward"): 1.04,
        ("main", "b", "forward"): 1.0,
        ("main", "c", "both"): math.nan,
    }
    rows = list(script.compared(old, new))
    assert [(r["row"], r["ratio"]) for r in rows] == [("c", math.inf), ("a", 1.04), ("b", 0.5)]
    best = script.fastest([old, {("main", "a", "forward"): 0.9}])
    assert best[("main", "a", "forward")] == 0.9
    assert best[("main", "b", "forward")] == 2.0


class Fake:
    """Rounds of sections, in which one row of the new version is slow once."""

    def __init__(self, script, slow):
        self.script, self.slow_rounds, self.order = script, dict(slow), []

    def run(self, script, sections, order):
        self.order.append((tuple(sections), order))
        for section in sections:
            self.slow_rounds[section] = self.slow_rounds.get(section, 0) - 1

    def slower(self, section):
        return self.slow_rounds.get(section, 0) > 0


def test_slow_sections_are_measured_again_the_other_way_round(script):
    runs = Fake(script, {"main": 2, "sweep": 3})
    assert script.measure(runs, {"main", "layer", "sweep"}, 1e9) == []
    assert runs.order == [
        (("main", "layer"), (0, 1)),
        (("sweep",), (0, 1)),
        (("main",), (1, 0)),
        (("sweep",), (1, 0)),
        (("sweep",), (0, 1)),
    ]


def test_what_there_is_no_time_for_is_told(script):
    runs = Fake(script, {})
    assert script.measure(runs, {"main", "scan"}, 0.0) == ["main", "scan"]
    assert runs.order == []


def test_a_folder_without_the_library_is_an_error(script, tmp_path, capsys):
    with pytest.raises(SystemExit):
        script.main([str(tmp_path), str(ROOT)])
    assert f"got {tmp_path}, expected a folder that holds pararnn/" in capsys.readouterr().err


@pytest.mark.slow
def test_two_versions_that_are_one(script, tmp_path, capsys):
    out = tmp_path / "rows.jsonl"
    words = ["--smoke", "--cold", "--only", "scan", "--limit", "1e9", "--all", "--out", str(out)]
    assert script.main([*words, str(ROOT), str(ROOT)]) == 0
    rows = list(importlib.import_module("harness").read_lines(out.read_text(encoding="utf-8")))
    assert len(rows) == 8
    assert {r["section"] for r in rows} == {"scan"}
    assert all(r["old"] > 0 and r["new"] > 0 for r in rows)
    assert "| scan | near 1 bfloat16 2×12×8 | both |" in capsys.readouterr().out
