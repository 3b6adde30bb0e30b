"""The card as data: what is written in Facts, and what is derived from Specs."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any

from torch import nn

from .. import _clients
from ..cells import Cell, CellEntry, Formula, Part, get_cell, registered_parts
from ..cells.facts import Deviation, Facts, Source, Symbol
from ..cells.registry import CELLS
from ..spec import Equation, Spec
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
    def structure(self) -> tuple[str, ...]:
        """Jacobian class, with the sub-class of a linear one."""
        found = (self.spec.jac_structure, self.spec.linear_class)
        return tuple(name for name in found if name)

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
class Row:
    """A line of the catalog: a variant of a cell, or a part of a model."""

    name: str
    option: str
    update: str
    structure: tuple[str, ...]
    fidelity: tuple[str, ...]
    path: str


@dataclass(frozen=True, kw_only=True)
class Card:
    """Everything that a card says. Without Facts (a user's own cell) the sources, deviations and
    prose are empty and the table of symbols is derived.

    The card of a part of a model has its ``part``. Its equations are not all of a Spec; its
    variants are the recurrences among them, if there are any.
    """

    title: str
    slug: str
    family: str = "own cell"
    summary: str = ""
    fidelity: tuple[str, ...] = ()
    sources: tuple[Source, ...] = ()
    symbols: tuple[Symbol, ...]
    deviations: tuple[Deviation, ...] = ()
    parallel_path: str = ""
    numerics: str
    notes: tuple[str, ...] = ()
    variants: tuple[Variant, ...]
    equations: tuple[NumberedEquation, ...]
    part: Part | None = None

    @property
    def groups(self) -> list[tuple[str, tuple[NumberedEquation, ...]]]:
        """The equations as the page groups them: by option, those of a part together."""
        if self.part:
            return [("", self.equations)]
        return [(v.option, v.equations) for v in self.variants]

    @property
    def rows(self) -> list[Row]:
        """Its lines in the catalog."""
        if self.part:
            part = self.part
            (update,) = (e.latex for e in self.equations if e.name == part.update)
            return [Row(part.name, "", update, part.structure, part.fidelity, part.path)]
        return [
            Row(v.name, v.option, v.update, v.structure, v.fidelity, v.jacobian_class.path)
            for v in self.variants
        ]

    @property
    def bibtex(self) -> str:
        return "\n\n".join(source.bibtex for source in self.sources)


def card(subject: str | Cell | type[nn.Module] | nn.Module | Spec) -> Card:
    """The card of a cell, or of a part of a model.

    Parameters
    ----------
    subject
        A registered name (``"ParaGRU"`` has all its variants, ``"ParaGRU[head]"`` one), a cell, a
        class with a ``spec``, a Spec, or a part of a model, by name or its module.

    Raises
    ------
    KeyError
        If no cell or part of this name is registered.
    TypeError
        If the subject is none of these, or a module without a Spec.
    """
    part = find_part(subject)
    if part:
        return _part_card(part)
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


def parts() -> tuple[Part, ...]:
    """Parts of models that have cards, those of all clients, in catalog order."""
    for _ in _clients.modules("cards"):
        pass  # each registers its own
    return registered_parts()


def part_names() -> tuple[str, ...]:
    """Names of the parts of models that have cards, in catalog order."""
    return tuple(part.name for part in parts())


def find_part(subject: object) -> Part | None:
    """The part with this name, or whose module this is."""
    for part in parts():
        names = {part.name, part.slug, *(m.__name__ for m in part.modules)}
        if subject in names if isinstance(subject, str) else subject in part.modules:
            return part
        if isinstance(subject, part.modules):
            return part
    return None


def _numbered(
    slug: str, lines: Iterable[Equation | Formula], first: int
) -> tuple[NumberedEquation, ...]:
    return tuple(
        NumberedEquation(i, f"eq-{slug.replace('_', '-')}-{i}", line.name, line.latex)
        for i, line in enumerate(lines, first)
    )


def _part_card(part: Part) -> Card:
    equations: tuple[NumberedEquation, ...] = ()
    variants = []
    for item in part.equations:
        lines = item.latex() if isinstance(item, Spec) else [item]
        numbered = _numbered(part.slug, lines, 1 + len(equations))
        equations += numbered
        if isinstance(item, Spec) and item.needs_state:
            variants.append(Variant(part.name, "", part.fidelity, item, numbered))
    return Card(**_stated(part), variants=tuple(variants), equations=equations, part=part)


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
    return replace(
        full, fidelity=variant.fidelity, variants=(variant,), equations=variant.equations
    )


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
    variants: list[Variant] = []
    equations: tuple[NumberedEquation, ...] = ()
    for name, option, fidelity, spec in parts:
        numbered = _numbered(slug, spec.latex(), 1 + len(equations))
        equations += numbered
        variants.append(Variant(name, option, fidelity, spec, numbered))
    spec = variants[0].spec
    stated = {"title": title, "slug": slug} | (_stated(facts) if facts else {})
    stated["symbols"] = stated.get("symbols") or derived_symbols(spec)
    stated["numerics"] = stated.get("numerics") or _box(spec)
    return Card(**stated, variants=tuple(variants), equations=equations)


def _stated(facts: Facts) -> dict[str, Any]:
    return {f.name: getattr(facts, f.name) for f in fields(Facts)}


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
        weight, bias = drive.affine.split(f" {drive.of}_t + ")
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
