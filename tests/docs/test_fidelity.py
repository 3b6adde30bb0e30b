"""The rules on the page of fidelity labels hold for every card in the catalog."""

from __future__ import annotations

import re
from pathlib import Path

import pararnn
from pararnn.cards import part_names
from pararnn.cells.facts import FIDELITY_LABELS

DOCS = Path(__file__).resolve().parents[2] / "docs"


def shown() -> list[list[str]]:
    catalog = (DOCS / "_generated" / "catalog.md").read_text(encoding="utf-8")
    return [text.split(" / ") for text in re.findall(r'data-fidelity="([^"]*)"', catalog)]


def test_the_page_defines_exactly_the_labels():
    page = (DOCS / "fidelity.md").read_text(encoding="utf-8")
    defined = page.partition("## The labels")[2].partition("\n## ")[0]
    assert re.findall(r"^### (\S+)$", defined, re.MULTILINE) == list(FIDELITY_LABELS)


def test_cards_use_the_labels_as_the_page_says():
    assert len(shown()) == len(pararnn.cell_names()) + len(part_names())
    for labels in shown():
        assert set(labels) <= set(FIDELITY_LABELS)
        assert labels == ["paper-faithful"] or "paper-faithful" not in labels


def test_what_differs_is_listed():
    for name in pararnn.cell_names():
        facts = pararnn.get_cell(name).facts
        if {"paper-core", "research-variant"} & set(facts.fidelity):
            assert facts.deviations, name
