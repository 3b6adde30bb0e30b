"""Writes the clauses into ``docs/contract.md``, between its two marks, or checks that they are
those of :mod:`conformance.clauses`: ``python -m conformance.page [--check]``."""

from __future__ import annotations

import sys
from pathlib import Path

from .clauses import CLAUSES, Clause

PAGE = Path(__file__).resolve().parent.parent / "docs" / "contract.md"
BEGIN = (
    "<!-- clauses: begin. Written by `python -m conformance.page`; edit conformance/clauses.py -->"
)
END = "<!-- clauses: end -->"


def overview() -> list[str]:
    rows = [f"| [{c.id}](#{c.anchor}) | `{c.slug}` | {c.title} | {c.tolerance} |" for c in CLAUSES]
    return ["| clause | name | what holds | tolerance |", "| --- | --- | --- | --- |", *rows]


def section(clause: Clause) -> list[str]:
    lines = [f"### {clause.id} {clause.title} {{#{clause.anchor}}}", "", clause.statement, ""]
    lines += [f"*Name.* `{clause.slug}`", "", f"*Tolerance.* {clause.tolerance}.", ""]
    if clause.why:
        lines += [f"*Why this tolerance.* {clause.why}", ""]
    return [*lines, f"*Test.* {clause.test}", ""]


def body() -> str:
    lines = [BEGIN, "", *overview(), ""]
    for clause in CLAUSES:
        lines += section(clause)
    return "\n".join([*lines, END])


def rewritten(page: str) -> str:
    """The page with its clauses as they are in the data."""
    if page.count(BEGIN) != 1 or page.count(END) != 1:
        raise ValueError(
            f"{PAGE.name}: got no single pair of marks, expected {BEGIN!r} and {END!r}"
        )
    before, _, rest = page.partition(BEGIN)
    return before + body() + rest.partition(END)[2]


def main() -> int:
    page = PAGE.read_text(encoding="utf-8")
    wanted = rewritten(page)
    if sys.argv[1:] == ["--check"]:
        if page != wanted:
            print("docs/contract.md differs from its clauses; run: python -m conformance.page")
        return int(page != wanted)
    PAGE.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
