"""Card pages: the order of their parts, the seeds' snippets word for word, fresh measurements."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from pararnn.cards.fragments import cards
from pararnn.cards.markdown import HEADINGS, parts_of

ROOT = Path(__file__).resolve().parents[2]
ORDER = (
    "Sources",
    "Symbols and shapes",
    "Equations",
    "Jacobian class",
    "Parallel path",
    "Numerical behaviour",
    "What is not claimed",
    "Deviations",
    "Notes and published system",
    "Reproduce",
    "Generated code",
    "API",
    "Citation",
)

SNIPPETS = {
    "para_gru": (
        """\
import torch
from pararnn import ParaGRU

cell = ParaGRU(32, 32, mix="diag")
h = torch.zeros(2, 32)
x = torch.randn(2, 32)
h = cell.step(h, x)
""",
        """\
from pararnn import verify_agreement, ParaGRU, ParaRNN
import torch

m = ParaRNN(ParaGRU(32, 32, mix="diag"))
x = torch.randn(2, 64, 32)
print(verify_agreement(m, x).to_dict())
""",
    ),
    "para_m2rnn": (
        """\
import torch
from pararnn import ParaM2RNN

cell = ParaM2RNN(d_in=32, k_dim=8, v_dim=8)
H = torch.zeros(2, 8, 8)
x = torch.randn(2, 32)
H = cell.step(H, x)
""",
    ),
}


def page(slug: str) -> str:
    return (ROOT / "docs" / "cells" / f"{slug}.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("card", cards(), ids=lambda c: c.slug)
def test_parts_stand_in_order(card):
    headings = [line[3:] for line in page(card.slug).splitlines() if line.startswith("## ")]
    absent = {HEADINGS[name] for name in HEADINGS.keys() - parts_of(card).keys() - {"numerics"}}
    assert headings == [heading for heading in ORDER if heading not in absent]


@pytest.mark.parametrize("slug", [c.slug for c in cards()])
def test_a_page_is_in_the_navigation(slug):
    assert f"cells/{slug}.md" in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")


@pytest.mark.parametrize("slug", SNIPPETS)
def test_snippets_are_on_the_page_as_they_were_given(slug):
    for snippet in SNIPPETS[slug]:
        assert f"```python\n{snippet}```\n" in page(slug)


def test_the_matrix_cell_is_not_taken_for_its_block():
    start = page("para_m2rnn").partition("## Sources")[0]
    assert "!!! warning" in start
    assert "*not* the paper's architecture" in start


def test_tables_and_plots_follow_from_the_measurements(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    page = importlib.import_module("card_page")
    for target, text in page.outputs(page.report.load(page.DATA)):
        assert target.read_text(encoding="utf-8") == text, (
            f"{target.name} is out of date; run: python benchmarks/card_page.py"
        )
