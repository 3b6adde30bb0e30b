"""The card as data: what is written in Facts, and what is derived from the Spec."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from ..cells import Cell, CellEntry, get_cell
from ..cells.facts import Deviation, Facts, Source, Symbol
from ..cells.registry import CELLS
from ..spec import Spec
from ..spec.declarations import Elementwise
from .costs import Cost, JacobianClass, axis_symbol, costs, jacobian_class
from .plain import plain

STRUCTURE_WORDS = {
    "diagonal": "recurrent vector, a diagonal map",
    "head": "recurrent matrices, one a head",
    "dense": "recurrent matrix",
    "right": "recurrent matrix, multiplies from the right",
}


@dataclass(frozen=True)
class NumberedEquation:
    """One equation of a card, with its number and its place on the page."""

    number: int
    anchor: str
    name: str
    latex: str

    @property
    def text(self) -> str:
        return plain(self.latex)


@dataclass(frozen=True)
class Variant:
    """One recurrence of a card: its equations and everything that is derived from them.

    ``option`` is the constructor argument that chooses it (``mix='diag'``), empty if there is
    only one.
    """

    name: str
    option: str
    fidelity: tuple[str, ...]
    spec: Spec
    equations: tuple[NumberedEquation, ...]

    @property
    def jacobian_class(self) -> JacobianClass:
        return jacobian_class(self.spec)

    @property
    def jacobian(self) -> tuple[str, ...]:
        """LaTeX of the factorized Jacobian's action, one line a slot."""
        return tuple(self.spec.jacobian_latex())

    @property
    def costs(self) -> tuple[Cost, ...]:
        return costs(self.spec)

    @property
    def update(self) -> str:
        """LaTeX of the equations that give the new state."""
        slots = {s.name for s in self.spec.slots}
        lines = [e.latex for e in self.equations if e.name in slots]
        if self.spec.output == "all" and len(lines) > 2:  # alike, but for their numbers
            lines = [lines[0], r"\ldots"]
        return r",\; ".join(lines)

    @property
    def structure(self) -> str:
        """Jacobian class in Markdown, with the sub-class of a linear one."""
        found = [self.spec.jac_structure, self.spec.linear_class]
        return ", ".join(f"`{name}`" for name in found if name)

    def source(self, program: str = "step") -> str:
        """Derived program in the torch dialect, with equation numbers as comments."""
        numbers = {e.name: e.number for e in self.equations}
        lines = []
        for line in self.spec.source(program).rstrip().splitlines():
            assigned = re.match(r"    (\w+) = ", line)
            number = numbers.get(assigned[1].removesuffix("_next")) if assigned else None
            lines.append(f"{line}  # ({number})" if number else line)
        return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class Card:
    """Everything that a card says. Without Facts (a user's own cell) the sources, deviations and
    prose are empty and the table of symbols is derived."""

    title: str
    slug: str
    family: str
    summary: str
    fidelity: tuple[str, ...]
    sources: tuple[Source, ...]
    symbols: tuple[Symbol, ...]
    deviations: tuple[Deviation, ...]
    parallel_path: str
    numerics: str
    notes: tuple[str, ...]
    variants: tuple[Variant, ...]

    @property
    def bibtex(self) -> str:
        return "\n\n".join(source.bibtex for source in self.sources)


def card(subject: str | Cell | type[Cell] | Spec) -> Card:
    """The card of a cell.

    Parameters
    ----------
    subject
        A registered name (``"ParaGRU"`` has all its variants, ``"ParaGRU[head]"`` one), a cell, a
        class with a ``spec``, or a Spec.

    Raises
    ------
    KeyError
        If no cell of this name is registered.
    TypeError
        If the subject is none of these, or a module without a Spec.
    """
    if isinstance(subject, str):
        return _registered(subject)
    if isinstance(subject, Spec):
        return _card(subject.name, None, [(subject.name, "", (), subject)])
    spec = getattr(subject, "spec", None)
    if not isinstance(spec, Spec):
        what = subject.__name__ if isinstance(subject, type) else type(subject).__name__
        raise TypeError(
            f"got {what}, expected a registered name, a Spec, or a cell that has one; a card is "
            "derived from the Spec."
        )
    for entry in CELLS.values():
        if _spec(entry).fingerprint == spec.fingerprint:
            return _registered(entry.name)
    facts = getattr(subject, "facts", None)
    title = facts.title if facts else spec.name
    return _card(title, facts, [(title, "", facts.fidelity if facts else (), spec)])


def _registered(name: str) -> Card:
    chosen = get_cell(name)
    family = [e for e in CELLS.values() if e.slug == chosen.slug]
    full = _card(
        chosen.facts.title,
        chosen.facts,
        [(e.name, _option(e), e.fidelity, _spec(e)) for e in family],
    )
    if name != chosen.name or len(family) == 1:
        return full
    (variant,) = (v for v in full.variants if v.name == name)
    return replace(full, fidelity=variant.fidelity, variants=(variant,))


def _spec(entry: CellEntry) -> Spec:
    return entry.factory().spec


def _option(entry: CellEntry) -> str:
    """The constructor argument behind a variant's name: ``ParaGRU[diag]`` → ``mix='diag'``."""
    _, bracket, value = entry.name.partition("[")
    if not bracket:
        return ""
    value = value.rstrip("]")
    for key, given in entry.factory().hyperparameters().items():
        if given == value:
            return f"{key}={value!r}"
    return value


def _card(title: str, facts: Facts | None, parts: list[tuple[Any, ...]]) -> Card:
    slug = facts.slug if facts else re.sub(r"\W+", "_", title.lower()).strip("_")
    variants, first = [], 1
    for name, option, fidelity, spec in parts:
        equations = tuple(
            NumberedEquation(i, f"eq-{slug.replace('_', '-')}-{i}", e.name, e.latex)
            for i, e in enumerate(spec.latex(), first)
        )
        first += len(equations)
        variants.append(Variant(name, option, fidelity, spec, equations))
    spec = variants[0].spec
    return Card(
        title=title,
        slug=slug,
        family=facts.family if facts else "own cell",
        summary=facts.summary if facts else "",
        fidelity=facts.fidelity if facts else (),
        sources=facts.sources if facts else (),
        symbols=(facts.symbols if facts else ()) or derived_symbols(spec),
        deviations=facts.deviations if facts else (),
        parallel_path=facts.parallel_path if facts else "",
        numerics=(facts.numerics if facts else "") or _box(spec),
        notes=facts.notes if facts else (),
        variants=tuple(variants),
    )


def _box(spec: Spec) -> str:
    boxes = [f"{s.name} in [{s.bounds[0]}, {s.bounds[1]}]" for s in spec.slots if s.bounds]
    if len(boxes) < len(spec.slots):
        return "No invariant interval of the state is declared, so no error bound can be proven."
    return f"States stay in their interval if they start there: {', '.join(boxes)}."


def derived_symbols(spec: Spec) -> tuple[Symbol, ...]:
    """The table of symbols of a Spec that comes without one."""
    shown = {e.name: e.latex.partition(" = ")[0] for e in spec.latex()}

    def shape(axes: Iterable[str], *before: str) -> str:
        sizes = [*before, *(str(axis_symbol(spec, a)) for a in axes)]
        return f"({', '.join(sizes)}{',' if len(sizes) == 1 else ''})"

    rows = [Symbol("x_t", "(B, d_in)", "input at step t")]
    for slot in spec.slots:
        box = f"; stays in [{slot.bounds[0]}, {slot.bounds[1]}]" if slot.bounds else ""
        rows.append(Symbol(shown[slot.name], shape(spec.axes, "B"), f"state, zero at first{box}"))
    updates = {s.next_symbol for s in spec.slots}
    for stage in spec.stages:
        if isinstance(stage, Elementwise) and not stage.hidden and stage.symbol not in updates:
            axes = spec.axes_of(stage.expr)
            rows.append(Symbol(shown[stage.symbol.name], shape(axes, "B"), "stage"))
    for drive in spec.drive_list:
        if drive.given:
            rows.append(Symbol(rf"{drive.latex}_t", "(B,)", "time since the step before, given"))
            continue
        if not drive.inline:
            rows.append(Symbol(shown[drive.name], shape(drive.axes, "B"), "drive"))
        weight, bias = drive.affine.split(" x_t + ")
        weight = weight.removesuffix(r"^\top")
        sizes = ", ".join([*(str(axis_symbol(spec, a)) for a in drive.axes), "d_in"])
        rows.append(
            Symbol(f"{weight}, {bias}", f"({sizes}), {shape(drive.axes)}", "input weight and bias")
        )
    for m in spec.map_list:
        width = str(axis_symbol(spec, spec.axes[-1]))
        sizes = {
            "diagonal": shape(spec.axes),
            "head": f"(n_heads, {width}/n_heads, {width}/n_heads)",
            "dense": f"({width}, {width})",
            "right": f"({width}, {width})",
        }[m.structure]
        rows.append(Symbol(m.latex, sizes, STRUCTURE_WORDS[m.structure]))
    rows += [
        Symbol(p.latex, shape(p.axes), "elementwise recurrent parameter") for p in spec.param_list
    ]
    return tuple(rows)
