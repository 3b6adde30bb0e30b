"""Names of symbols and axes, and how the page shows them."""

from __future__ import annotations

from collections.abc import Iterable

from sympy.core.alphabets import greeks

from .declarations import SpecError


def split_names(names: Iterable[str | Iterable[str]]) -> list[str]:
    """``("a b", "c")`` and ``(["a", "b"], "c")`` both name a, b and c."""
    out: list[str] = []
    for name in names:
        out += name.replace(",", " ").split() if isinstance(name, str) else split_names(name)
    return out


def subscript(name: str) -> tuple[str, str]:
    """``"A_z"`` → ``("A", "z")``; a name without an underscore has an empty subscript."""
    base, _, sub = name.partition("_")
    return base, sub


def with_subscript(base: str, sub: str) -> str:
    if base.lower() in greeks:
        base = rf"\{base}"
    elif len(base) > 1:
        base = rf"\mathrm{{{base}}}"
    if not sub:
        return base
    if sub in greeks:
        return rf"{base}_\{sub}"
    return f"{base}_{sub}" if len(sub) == 1 else rf"{base}_{{\mathrm{{{sub}}}}}"


def latex_of(name: str, text: str = "") -> str:
    """How the page shows a name, if not as the text given."""
    return printable("latex", text) or with_subscript(*subscript(name))


def affine(name: str, vector: bool, of: str = "x") -> str:
    """The affine function of ``x_t`` that a drive is, its weights named after the drive."""
    base, sub = subscript(name)
    sub = base + sub if sub.isdigit() else sub or base
    weight = with_subscript("W", sub) if vector else with_subscript("w", sub) + r"^\top"
    return f"{weight} {of}_t + {with_subscript('b', sub)}"


def printable(what: str, text: object, barred: str = "") -> str:
    """A name or LaTeX that is printed as it is: one line, and without what ``barred`` names."""
    if not isinstance(text, str):
        raise SpecError(f"{what}: got {text!r} ({type(text).__name__}), expected text.")
    if not text.isprintable() or any(c in text for c in barred):
        also = f", {' and '.join(barred)}" if barred else ""
        raise SpecError(
            f"{what} {text!r}: got a character that is not printed, or ends what it is printed in, "
            f"expected one line without control characters{also}; choose another."
        )
    return text


def axis_names(spec: str, what: str, axes: object) -> tuple[str, ...]:
    if isinstance(axes, str) or not isinstance(axes, Iterable):
        raise SpecError(f"Spec {spec!r}: got {what}={axes!r}, expected names in a tuple.")
    found = tuple(axes)
    if not all(isinstance(a, str) and a.isidentifier() for a in found):
        raise SpecError(f"Spec {spec!r}: got {what} {found}, expected identifiers.")
    return found
