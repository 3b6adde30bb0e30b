"""Writes the generated pieces of the site: the parts of every registered card, and the catalog."""

from __future__ import annotations

from pathlib import Path

from ..cells.registry import CELLS
from .markdown import PARTS, labelled
from .model import Card, Variant, card
from .typeset import escape, formula


def cards() -> list[Card]:
    """Cards of all registered cells, one a page, in catalog order."""
    return [card(slug) for slug in dict.fromkeys(entry.slug for entry in CELLS.values())]


def write_fragments(directory: Path) -> None:
    """Write ``<slug>/<part>.md`` for every card, and ``catalog.md``."""
    every = cards()
    for c in every:
        folder = directory / c.slug
        folder.mkdir(parents=True, exist_ok=True)
        for name, part in PARTS.items():
            (folder / f"{name}.md").write_text(part(c), encoding="utf-8")
    (directory / "catalog.md").write_text(catalog(every), encoding="utf-8")


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
    return HEADER + "".join(_row(c, v) for c in every for v in c.variants) + "</tbody>\n</table>\n"


def _row(c: Card, v: Variant) -> str:
    labels = " / ".join(v.fidelity)
    path = v.jacobian_class.path
    option = f"<br>`{v.option}`" if v.option else ""
    cite = ", ".join(
        f"[{escape(s.authors.split(',')[0])} {s.year}](https://arxiv.org/abs/{s.arxiv})"
        for s in c.sources[:1]
    )
    return f"""\
<tr data-family="{c.family}" data-jac-structure="{v.spec.jac_structure}" \
data-fidelity="{labels}" data-path="{path}" markdown>
<th scope="row" markdown="span">[{c.title}](cells/{c.slug}.md){option}</th>
<td markdown="span">{formula(v.update)}</td>
<td>{c.family}</td>
<td markdown="span">{v.structure}</td>
<td markdown="span">{labelled(v.fidelity, "")}</td>
<td>{path}</td>
<td markdown="span">{cite}</td>
</tr>
"""
