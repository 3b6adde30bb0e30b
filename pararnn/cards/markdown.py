"""The parts of a card as Markdown for the site, each a section that a page includes."""

from __future__ import annotations

from collections.abc import Callable
from urllib.parse import quote

from ..cells import Switch
from .clauses import anchor, is_test, label
from .costs import PATHS, SCAN
from .model import Card, NumberedEquation, Variant, card
from .plain import terms
from .typeset import code, escape, fence, formula, prose, safe, shape, table


def fidelity(c: Card, root: str = "../") -> str:
    """Labels with links to their definitions; by variant where they differ."""
    if not c.fidelity:
        return "*No fidelity label: this cell has no `facts`.*\n"
    if len({c.fidelity, *(v.fidelity for v in c.variants)}) == 1:
        return f"**Fidelity:** {labelled(c.fidelity, root)}\n"
    each = "; ".join(f"{labelled(v.fidelity, root)} for {code(v.option)}" for v in c.variants)
    return f"**Fidelity:** {each}\n"


def labelled(labels: tuple[str, ...], root: str) -> str:
    return " / ".join(f"[{escape(name)}]({root}fidelity.md#{quote(name)})" for name in labels)


def summary(c: Card) -> str:
    return f"{prose(c.summary)}\n" if c.summary else ""


def sources(c: Card) -> str:
    """What the cell follows, with equation numbers."""
    lines = [
        f"- {prose(s.authors)}, *{prose(s.title)}*"
        + (f", {prose(s.venue)}" if s.venue != "arXiv" else "")
        + (
            f", [arXiv:{escape(s.arxiv)}](https://arxiv.org/abs/{quote(s.arxiv)})"
            if s.arxiv
            else ""
        )
        + (f". Here: {prose(s.equations)}." if s.equations else ".")
        for s in c.sources
    ]
    return "\n".join(lines or ["- none: an own cell"]) + "\n"


def symbols(c: Card) -> str:
    rows = [[formula(s.latex), shape(s.shape), prose(s.meaning)] for s in c.symbols]
    return table(["Symbol", "Shape", "Meaning"], rows, "Symbols and shapes")


def equations(c: Card) -> str:
    """Every equation in a block of its own, with its number and permalink."""
    parts = []
    for option, lines in c.groups:
        if option:
            parts.append(f"**{code(option)}**\n")
        parts += [_equation(e) for e in lines]
    return "\n".join(parts)


def _equation(e: NumberedEquation) -> str:
    return (
        f'<div class="equation" id="{e.anchor}" markdown>\n\n'
        rf"\[ {safe(e.latex)} \tag{{{e.number}}} \]"
        f'\n\n<a class="headerlink" href="#{e.anchor}" title="Link to this equation">¶</a>\n\n</div>\n'
    )


def jacobian(c: Card) -> str:
    """Class, meaning, and the factorized form as it was derived."""
    parts = []
    for v in c.variants:
        heading = f"**{code(v.option)}**: class" if v.option else "Class"
        slots = f" ({len(v.spec.slots)} state slots)" if len(v.spec.slots) > 1 else ""
        structure = ", ".join(f"`{word}`" for word in v.structure)
        parts.append(f"{heading} {structure}{slots}. {v.jacobian_class.meaning}\n")
        parts += [aligned(line) for line in v.jacobian]
    return "\n".join(parts)


def aligned(latex: str) -> str:
    """A displayed equation, broken at its sums."""
    first, *rest = terms(safe(latex))
    left, _, right = first.partition(" = ")
    lines = [f"{left} = {{}}& {right}", *(f"& {term}" for term in rest)]
    body = " \\\\\n".join(lines)
    return f"\\[\n\\begin{{aligned}}\n{body}\n\\end{{aligned}}\n\\]\n"


def parallel(c: Card) -> str:
    """How the cell is solved, and the cost table."""
    parts = [f"{prose(c.parallel_path)}\n"] if c.parallel_path else []
    if not c.variants:
        return "\n".join(parts)
    header = [
        "One step of one sample",
        *(code(v.option) if v.option else "size" for v in c.variants),
    ]
    rows = []
    for lines in zip(*(v.costs for v in c.variants), strict=True):
        rows.append([lines[0].quantity, *(formula(line.latex) for line in lines)])
    rows.append(["what shooting corrects with", *(v.jacobian_class.operator for v in c.variants)])
    parts.append(table(header, rows, "Cost of one step"))
    parts.append(
        "\\(T\\) steps, chunks of \\(L\\), \\(k\\) corrections, a guess from \\(w\\) warm-up steps:\n"
    )
    linear = all(v.spec.jac_structure == "linear" and v.spec.channelwise for v in c.variants)
    known = (PATHS[0], SCAN, *PATHS[1:]) if linear else PATHS
    paths = [[p.name, p.passes, p.depth] for p in known]
    parts.append(
        table(["Path", "Passes over the data", "One after another"], paths, "Cost of a solve")
    )
    return "\n".join(parts)


def numerics(c: Card) -> str:
    return f"{prose(c.numerics)}\n"


def deviations(c: Card, root: str = "../") -> str:
    if not c.deviations:
        return "None stated.\n"
    rows = [
        [
            prose(d.what),
            prose(d.why),
            prose(d.effect),
            code(d.clause)
            if is_test(d.clause)
            else f"[{label(d.clause)}]({root}contract.md#{anchor(d.clause)})",
        ]
        for d in c.deviations
    ]
    header = ["What", "Why", "Effect", "Checked by" if c.part else "Contract clause"]
    text = table(header, rows, "Deviations from the sources")
    return text + "".join(f"\n{prose(note)}\n" for note in c.notes)


def switches(c: Card) -> str:
    """Fields of the configuration that choose between the notes and the published system."""
    rows = [
        [code(s.name), *_choice(s), prose(s.effect)] for s in (c.part.switches if c.part else ())
    ]
    header = ["Switch", "The notes, the default", "The published system", "Effect"]
    return table(header, rows, "Switches between the notes and the published system")


def _choice(s: Switch) -> list[str]:
    texts = zip(s.values, (s.notes, s.published), strict=True)
    return [f"{code(repr(value))}: {prose(text)}" for value, text in texts]


def not_claimed(c: Card) -> str:
    return "".join(f"- {prose(text)}\n" for text in (c.part.not_claimed if c.part else ()))


def source(c: Card) -> str:
    """The derived programs; numbers in comments are those of the equations."""
    parts = []
    for v in c.variants:
        if v.option:
            parts.append(f"**{code(v.option)}**\n")
        parts.append(_fence(v.source("step")))
        inner = "\n".join(_fence(v.source(program)) for program in _linearization(v))
        indented = "\n".join(f"    {line}" if line else "" for line in inner.splitlines())
        parts.append(f'??? note "Linearization"\n\n{indented}\n')
    return "\n".join(parts)


def _linearization(v: Variant) -> tuple[str, ...]:
    return ("step_jacobian",) if v.spec.channelwise else ("coefficients", "tangent")


def _fence(text: str) -> str:
    return fence(text, "python")


def citation(c: Card) -> str:
    return fence(f"{c.bibtex}\n", "bibtex") if c.sources else "Nothing to cite.\n"


PARTS: dict[str, Callable[[Card], str]] = {
    "fidelity": fidelity,
    "sources": sources,
    "symbols": symbols,
    "equations": equations,
    "jacobian": jacobian,
    "parallel": parallel,
    "not_claimed": not_claimed,
    "deviations": deviations,
    "switches": switches,
    "source": source,
    "citation": citation,
}

HEADINGS = {
    "sources": "Sources",
    "symbols": "Symbols and shapes",
    "equations": "Equations",
    "jacobian": "Jacobian class",
    "parallel": "Parallel path",
    "numerics": "Numerical behaviour",
    "not_claimed": "What is not claimed",
    "deviations": "Deviations",
    "switches": "Notes and published system",
    "source": "Generated code",
    "citation": "Citation",
}


def parts_of(c: Card) -> dict[str, Callable[[Card], str]]:
    """Those parts that a card has: no Jacobian without a recurrence, no switches of a cell."""
    absent = set()
    if not c.sources:
        absent |= {"sources", "deviations", "citation"}
    if not c.variants:
        absent |= {"jacobian", "source"}
    if not c.part:
        absent |= {"not_claimed"}
    if not (c.part and c.part.switches):
        absent |= {"switches"}
    return {name: part for name, part in PARTS.items() if name not in absent}


def card_markdown(subject: object) -> str:
    """The card of a cell as one Markdown page, formulas in ``\\( \\)`` and ``\\[ \\]``.

    Arguments and errors are those of :func:`pararnn.cards.card`. Links go to the pages of the site.
    """
    c = subject if isinstance(subject, Card) else card(subject)  # type: ignore[arg-type]
    parts = {**parts_of(c), "numerics": numerics}
    page = [f"# {escape(c.title)}\n", fidelity(c), summary(c)]
    for name, heading in HEADINGS.items():
        if name in parts:
            page += [f"## {heading}\n", parts[name](c)]
    return "\n".join(part for part in page if part)
