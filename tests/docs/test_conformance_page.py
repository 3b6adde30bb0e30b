"""The tables on the page of the conformance suite have the clauses that there are."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))  # for `conformance`; behind an installed pararnn, if there is one

from conformance.clauses import CELL, CLAUSES  # noqa: E402

PAGE = (ROOT / "docs" / "conformance.md").read_text(encoding="utf-8")


def test_the_table_that_is_not_run_is_of_todays_clauses():
    table = PAGE.partition("--cell ParaM2RNN\n")[2].partition("\n```")[0]
    rows = re.findall(
        r"^ *C(\d+)  (.*?)  +((?:pass|skip)(?: +(?:pass|skip))*)", table, re.MULTILINE
    )
    assert [(int(n), title) for n, title, _ in rows] == [
        (c.number, c.title) for c in CLAUSES if c.about == CELL
    ]
    marks = " ".join(marks for *_, marks in rows).split()
    passed, skipped = marks.count("pass"), marks.count("skip")
    assert f"4 cells: {passed} passed, 0 failed, {skipped} skipped" in table


def test_how_many_clauses_there_are():
    pages = PAGE + (ROOT / "docs" / "add_a_cell.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^(\d+) clauses, ", pages, re.MULTILINE)) == {str(len(CLAUSES))}
