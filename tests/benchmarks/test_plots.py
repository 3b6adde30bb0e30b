"""Figures: the same every time, and fit to stand beside others in one page."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parents[2]
FIGURES = sorted(p for p in (ROOT / "docs" / "assets").glob("*.svg") if p.name != "mark.svg")


@pytest.fixture
def plots(monkeypatch):
    if not (ROOT / "benchmarks").is_dir():
        pytest.skip("the benchmarks are not part of an installed package")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("plots")


def drawn(plots, title="One & two"):
    plot = plots.Plot(title, 'said "so" & so', (0, 2), (-2, 1), log=True)
    plot.line([(0, 0.001), (1, 0.1), (2, 1e9)], plots.BLUE)
    plot.across([(0, "0"), (2, "2")], "x")
    plot.level(1, "level")
    plot.upright(1, "K")
    plot.legend([(plots.BLUE, "a")])
    return plot


def test_the_same_every_time(plots):
    path, text = drawn(plots).write("some_name")
    assert path == ROOT / "docs" / "assets" / "some_name.svg"
    assert drawn(plots).write("some_name") == (path, text)
    root = ElementTree.fromstring(text)
    assert root.attrib["role"] == "img"
    assert root.attrib["aria-label"] == 'said "so" & so'
    said = [t.text for t in root.iter() if t.tag.endswith("}text")]
    assert {"One & two", "level", "K", "a", "x", "10⁻²", "10¹"} <= set(said)


def test_values_outside_stay_at_the_edge(plots):
    plot = drawn(plots)
    assert [plot.at(v) for v in (0.0, 1e-3, 0.1, 10.0, 1e9)] == [-2, -2, -1, 1, 1]


@pytest.mark.parametrize("path", FIGURES, ids=lambda p: p.stem)
def test_a_figure_is_a_part_of_a_page(path):
    text = path.read_text(encoding="utf-8")
    root = ElementTree.fromstring(text)
    assert root.attrib["aria-label"]
    assert "currentColor" in text
    for word in ("<style", "<?xml", "<!DOCTYPE", "metadata", "font-family: ", "#010203", "#000000"):
        assert word not in text
    assert not re.search(r"\n\s*\n", text)  # it would end the HTML in a page
    ids = {e.attrib["id"] for e in root.iter() if "id" in e.attrib}
    used = set(re.findall(r'(?:url\(|href=")#(\w+)', text))
    assert used == ids


def test_no_id_is_in_two_figures():
    ids = [i for p in FIGURES for i in set(re.findall(r' id="(\w+)"', p.read_text("utf-8")))]
    assert FIGURES
    assert len(ids) == len(set(ids))
