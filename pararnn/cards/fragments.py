"""Writes the generated pieces of the site: a file for every registered card, and the tables."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ..cells.facts import Source
from ..cells.parts import Table
from ..cells.registry import CELLS
from .markdown import labelled, parts_of
from .model import Card, Row, card, parts
from .typeset import escape, formula, prose, table


def cards() -> list[Card]:
    """Cards of all registered cells and of the parts of models, one a page, in catalog order."""
    slugs = [*(entry.slug for entry in CELLS.values()), *(part.slug for part in parts())]
    return [card(slug) for slug in dict.fromkeys(slugs)]


def write_fragments(directory: Path) -> None:
    """Write a file ``<slug>.md`` for every card, its tables among its sections, and ``catalog.md``.

    A page includes the sections of its card's file one by one, between its own text.

    Raises
    ------
    ValueError
        If a table of a part has the name of a section that its card has anyway.
    """
    every = cards()
    files = {c.slug: sections(_sections_of(c)) for c in every}
    files["catalog"] = catalog(every)
    for name, text in files.items():
        (directory / f"{name}.md").write_text(text, encoding="utf-8")


def _sections_of(c: Card) -> dict[str, str]:
    found = {name: part(c) for name, part in parts_of(c).items()}
    for name, given in c.part.tables if c.part else ():
        if name in found:
            raise ValueError(
                f"{c.title}: got a table {name!r}, expected another name than those of the card's "
                f"sections, {', '.join(found)}; rename it."
            )
        found[name] = _table(given)
    return found


def _table(given: Table) -> str:
    rows = [
        [prose(text) if i in given.prose else text for i, text in enumerate(row)]
        for row in given.rows
    ]
    return table(list(given.header), rows, given.caption)


def sections(parts: Mapping[str, str]) -> str:
    """Markdown with marks around every part, by which a page can include it."""
    return "\n".join(
        f"<!-- --8<-- [start:{name}] -->\n{text}<!-- --8<-- [end:{name}] -->\n"
        for name, text in parts.items()
    )


HEADER = """\
<table class="catalog" markdown>
<caption markdown="span">The cells of this version. A cell's name leads to its card.</caption>
<thead>
<tr>
<th scope="col">Cell</th>
<th scope="col">Recurrence</th>
<th scope="col">Family</th>
<th scope="col">Jacobian class</th>
<th scope="col">Fidelity</th>
<th scope="col">Parallel path</th>
<th scope="col">Source</th>
</tr>
</thead>
<tbody markdown>
"""


def catalog(every: list[Card]) -> str:
    """The catalog's table: a row a variant, with what it can be filtered by as attributes."""
    return HEADER + "".join(_row(c, row) for c in every for row in c.rows) + "</tbody>\n</table>\n"


def _row(c: Card, row: Row) -> str:
    option = f"<br>`{row.option}`" if row.option else ""
    structure = ", ".join(f"`{word}`" for word in row.structure) or "–"
    return f"""\
<tr data-family="{c.family}" data-jac-structure="{row.structure[0] if row.structure else ""}" \
data-fidelity="{" / ".join(row.fidelity)}" data-path="{row.path}" markdown>
<th scope="row" markdown="span">[{c.title}](cells/{c.slug}.md){option}</th>
<td markdown="span">{formula(row.update)}</td>
<td>{c.family}</td>
<td markdown="span">{structure}</td>
<td markdown="span">{labelled(row.fidelity, "")}</td>
<td>{row.path}</td>
<td markdown="span">{", ".join(map(_cited, c.sources[:1]))}</td>
</tr>
"""


def _cited(s: Source) -> str:
    text = f"{escape(s.authors.split(',')[0])} {s.year}"
    return f"[{text}](https://arxiv.org/abs/{s.arxiv})" if s.arxiv else text
