"""LaTeX of the cards as text that reads well in a terminal: σ(a_z ⊙ h_{t-1} + W_z x_t + b_z)."""

from __future__ import annotations

import re
from collections.abc import Callable

from sympy.core.alphabets import greeks

_WORDS = {
    r"\odot": "⊙",
    r"\ell": "ℓ",
    r"\ast": "*",
    r"\cdot": "·",
    r"\,": "",
    r"\top": "ᵀ",
    r"\left": "",
    r"\right": "",
    r"\;": "",
    r"\quad": "",
    r"\sum": "Σ",
    r"\le": "≤",
    r"\circ": "∘",
    r"\lVert": "‖",
    r"\rVert": "‖",
    r"\ldots": "…",
}
_GREEK = dict(zip(greeks, "αβγδεζηθικλμνξοπρστυφχψω", strict=True))
_WORDS |= {rf"\{name}": letter for name, letter in _GREEK.items()}
_WORDS |= {rf"\{name.capitalize()}": letter.upper() for name, letter in _GREEK.items()}
_ACCENTS = {r"\dot": "\u0307", r"\tilde": "\u0303", r"\hat": "\u0302", r"\bar": "\u0304"}
_RAISED = str.maketrans("0123456789-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻")


def printable(text: str) -> str:
    """Text without control characters, which a terminal would obey: each is shown as �."""
    return "".join(c if c.isprintable() else "�" for c in text)


def plain(latex: str) -> str:
    """Unicode text of an equation. Commands that it does not know keep their name."""
    text = latex
    for command, mark in _ACCENTS.items():
        text = _replace_groups(text, command, lambda body, mark=mark: body + mark)  # type: ignore[misc]
    for command in (r"\mathrm", r"\operatorname", r"\mathbb", r"\mathcal"):
        text = _replace_groups(text, command, lambda body: body)
    text = _fractions(text)
    text = _replace_groups(text, r"\sqrt", lambda body: f"√({body})")
    text = text.replace(r"^\top", "ᵀ").replace(r"^{\odot ", "^{")  # powers are entry by entry
    for command, word in _WORDS.items():
        text = re.sub(re.escape(command) + r"(?![A-Za-z])", word, text)
    text = re.sub(r"\\([A-Za-z]+)", r"\1", text)
    text = re.sub(r"\^\{(-?\d+)\}|\^(\d)", lambda m: (m[1] or m[2]).translate(_RAISED), text)
    text = re.sub(r"_\{(\w+)\}", r"_\1", text)
    return re.sub(r"\s+", " ", text).strip()


def _group(text: str, start: int) -> int:
    """Position after the group ``{…}`` that opens at ``start``."""
    depth = 0
    for i in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0:
            return i + 1
    raise ValueError(f"got LaTeX whose braces do not balance: {text!r}.")


def _replace_groups(text: str, command: str, make: Callable[[str], str]) -> str:
    while (at := text.find(command + "{")) >= 0:
        start = at + len(command)
        end = _group(text, start)
        text = text[:at] + make(text[start + 1 : end - 1]) + text[end:]
    return text


def _fractions(text: str) -> str:
    while (at := text.find(r"\frac{")) >= 0:
        middle = _group(text, at + 5)
        end = _group(text, middle)
        above, below = text[at + 6 : middle - 1], text[middle + 1 : end - 1]
        text = f"{text[:at]}{_atom(above)}/{_atom(below)}{text[end:]}"
    return text


def _atom(text: str) -> str:
    return f"({text})" if re.search(r" [+-] ", text) else text


def terms(latex: str) -> list[str]:
    """The right-hand side of an equation, cut at the sums outside all brackets; the first element
    has the left-hand side too. A long equation breaks there."""
    depth = 0
    parts, last = [], 0
    for i, character in enumerate(latex):
        depth += {"(": 1, "{": 1, ")": -1, "}": -1}.get(character, 0)
        if depth == 0 and latex.startswith((" + ", " - "), i):
            parts.append(latex[last:i])
            last = i + 1
    return [*parts, latex[last:]]
