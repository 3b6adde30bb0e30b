"""Plain prose of Facts as Markdown: formulas and code are recognised, the rest is escaped.

Facts are written once, as text that reads well in a terminal. A single letter with a subscript
(``W_*``, ``h_{t-1}``) becomes a formula; an option (``mix='head'``), a call (``f(0, x_t)``) or a
longer name with underscores becomes code.
"""

from __future__ import annotations

import re

from .plain import printable

_CALL = r"(?:\b\d+/)?\b[A-Za-z][A-Za-z_0-9]*\((?:[^()]|\([^()]*\))*\)"
_TOKEN = re.compile(
    rf"""(?P<option>\b[a-z_]+='[^']*')
    | (?P<math>(?<![\w(])[A-Za-z]_(?:\*|[A-Za-z]\b|\{{[^}}]*\}}))
    | (?P<interval>\[-?[\d.]+,\ -?[\d.]+\])
    | (?P<call>{_CALL})
    | (?P<name>\b[A-Za-z]\w*_\w+\b)
    | (?P<transposed>\b[A-Z]\^T(?:\ [a-z]\b)?)""",
    re.VERBOSE,
)


def escape(text: str) -> str:
    """Text whose characters mean nothing to Markdown, on one line."""
    text = printable(" ".join(text.split("\n"))).replace("&", "&amp;").replace("<", "&lt;")
    return re.sub(r"([\\`*_\[\]|])", r"\\\1", text)


def formula(latex: str) -> str:
    """Inline formula. A star as a subscript, which stands for "each", is made valid LaTeX."""
    latex = re.sub(r"_\*", r"_{\\ast}", latex).replace("|", r"\vert ")
    return rf"\({safe(latex)}\)"


def safe(latex: str) -> str:
    """LaTeX that a page cannot take for HTML, nor for its end."""
    latex = printable(latex).replace("<", r"\lt ").replace(">", r"\gt ")
    return re.sub(r"\\+([()\[\]])", r"\1", latex)


def code(text: str) -> str:
    """Text as code within a line, whatever it has."""
    text = printable(text)
    if "`" not in text:
        return f"`{text}`"
    longest = max(map(len, re.findall("`+", text)))
    mark = "`" * (longest + 1)
    return f"{mark} {text} {mark}"


def fence(text: str, language: str) -> str:
    """Text as a block of code, whatever it has."""
    text = "\n".join(map(printable, text.split("\n")))
    longest = max([2, *map(len, re.findall("`+", text))])
    mark = "`" * (longest + 1)
    return f"{mark}{language}\n{text}{mark}\n"


def prose(text: str) -> str:
    """One paragraph of Facts as Markdown."""
    parts, last = [], 0
    for match in _TOKEN.finditer(text):
        parts.append(escape(text[last : match.start()]))
        parts.append(_typeset(match))
        last = match.end()
    return "".join([*parts, escape(text[last:])])


def _typeset(match: re.Match[str]) -> str:
    if match["math"] or match["interval"]:
        return formula(match[0])
    if match["transposed"]:
        return formula(match["transposed"].replace("^T", r"^\top"))
    return code(match[0])


def shape(text: str) -> str:
    """Shapes as code, each by itself so that a narrow table can break between them."""
    return ", ".join(code(part) for part in re.split(r"(?<=\)), ", text))


def table(header: list[str], rows: list[list[str]], label: str) -> str:
    """Markdown table in a box that scrolls by itself and can be reached from the keyboard."""
    lines = [f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows)]
    opening = (
        f'<div class="table-box" tabindex="0" role="region" aria-label="{label}" markdown>\n\n'
    )
    return opening + "\n".join(lines) + "\n\n</div>\n"
