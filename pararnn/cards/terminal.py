"""The card of a cell for a terminal: plain text, 80 columns unless told otherwise."""

from __future__ import annotations

import textwrap

from .clauses import label
from .model import Card, card
from .plain import plain, printable, terms


def card_text(subject: object, width: int = 80) -> str:
    """The card of a cell as plain text.

    Arguments and errors are those of :func:`pararnn.cards.card`; ``width`` is the line length
    (at least 72); equations and code are not broken.
    """
    c = subject if isinstance(subject, Card) else card(subject)  # type: ignore[arg-type]
    writer = _Writer(width)
    writer.title(c.title, _fidelity(c))
    if c.summary:
        writer.paragraph(c.summary)
    if c.sources:
        writer.heading("Sources")
        for s in c.sources:
            places = [s.venue] if s.venue != "arXiv" else []
            places += [f"arXiv:{s.arxiv}"] if s.arxiv else []
            where = ", ".join([s.authors, s.title, *places])
            writer.item("-", f"{where}. Here: {s.equations}.")
    if c.symbols:
        writer.heading("Symbols and shapes")
        writer.table([[plain(s.latex), s.shape, s.meaning] for s in c.symbols])
    writer.heading("Equations")
    for option, lines in c.groups:
        writer.option(option)
        writer.equations([(e.text, f"({e.number})") for e in lines])
    if c.variants:
        writer.heading("Jacobian class")
    for v in c.variants:
        writer.option(v.option)
        writer.paragraph(f"{v.spec.jac_structure}. {v.jacobian_class.meaning}")
        for line in v.jacobian:
            writer.broken(line)
    writer.heading("Parallel path")
    if c.parallel_path:
        writer.paragraph(c.parallel_path)
    header = ["one step of one sample", *(v.option or "size" for v in c.variants)]
    rows = [
        [costs[0].quantity, *(plain(cost.latex) for cost in costs)]
        for costs in zip(*(v.costs for v in c.variants), strict=True)
    ]
    if rows:
        writer.table([header, *rows])
    if len(c.variants) == 1:
        writer.paragraph(f"Shooting corrects with: {c.variants[0].jacobian_class.operator}.")
    writer.heading("Numerical behaviour")
    writer.paragraph(c.numerics)
    if c.part:
        writer.heading("What is not claimed")
        for text in c.part.not_claimed:
            writer.item("-", text)
    if c.deviations:
        writer.heading("Deviations")
        for d in c.deviations:
            where = f"{'Checked by' if c.part else 'Contract'}: {label(d.clause)}"
            writer.item("-", f"{d.what}. Why: {d.why}. Effect: {d.effect}. {where}.")
    for note in c.notes:
        writer.paragraph(note)
    if c.part and c.part.switches:
        writer.heading("Notes and published system")
        for switch in c.part.switches:
            ours, theirs = switch.values
            text = f"{switch.name}: {ours!r}: {switch.notes}. "
            text += f"Published, {theirs!r}: {switch.published}. Effect: {switch.effect}."
            writer.item("-", text)
    if c.variants:
        writer.heading("Generated step")
    for v in c.variants:
        writer.option(v.option)
        writer.verbatim(v.source("step"))
    if c.sources:
        writer.heading("Citation")
        writer.verbatim(c.bibtex)
    return "\n".join(map(printable, writer.lines)) + "\n"


def _fidelity(c: Card) -> str:
    if not c.fidelity:
        return "no fidelity label"
    if len({c.fidelity, *(v.fidelity for v in c.variants)}) == 1:
        return " / ".join(c.fidelity)
    return "; ".join(f"{' / '.join(v.fidelity)} ({v.option})" for v in c.variants)


class _Writer:
    def __init__(self, width: int):
        self.width = max(width, 72)
        self.lines: list[str] = []

    def title(self, name: str, labels: str) -> None:
        self.lines += [name, "=" * len(name), f"Fidelity: {labels}"]

    def heading(self, text: str) -> None:
        self.lines += ["", text, "-" * len(text)]

    def option(self, option: str) -> None:
        if option:
            self.lines.append(f"{option}:")

    def paragraph(self, text: str) -> None:
        self.lines += textwrap.wrap(text, self.width, break_on_hyphens=False)

    def item(self, mark: str, text: str) -> None:
        self.lines += textwrap.wrap(
            text,
            self.width,
            initial_indent=f"{mark} ",
            subsequent_indent=" " * (len(mark) + 1),
            break_on_hyphens=False,
        )

    def equations(self, rows: list[tuple[str, str]]) -> None:
        """Equal signs below each other, numbers at the right."""
        left = max(text.index(" = ") for text, _ in rows)
        padded = [" " * (left - text.index(" = ")) + text for text, _ in rows]
        right = max(map(len, padded))
        self.lines += [
            f"  {text:{right}}  {number}" for text, (_, number) in zip(padded, rows, strict=True)
        ]

    def broken(self, latex: str) -> None:
        """An equation, broken at its sums where it is too long for one line."""
        text = plain(latex)
        if len(text) + 2 <= self.width:
            self.lines.append(f"  {text}")
            return
        first, *rest = (plain(term) for term in terms(latex))
        self.lines.append(f"  {first}")
        self.lines += [" " * (first.index(" = ") + 3) + term for term in rest]

    def table(self, rows: list[list[str]]) -> None:
        """Columns below each other; the last one is wrapped."""
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
        indent = sum(widths) + 2 * len(widths)
        for row in rows:
            head = "".join(f"{cell:{w}}  " for cell, w in zip(row, widths, strict=False))
            room = max(self.width - indent, 20)
            first, *rest = textwrap.wrap(row[-1], room, break_on_hyphens=False) or [""]
            self.lines.append(f"{head}{first}".rstrip())
            self.lines += [" " * indent + line for line in rest]

    def verbatim(self, text: str) -> None:
        self.lines += text.rstrip().splitlines()
