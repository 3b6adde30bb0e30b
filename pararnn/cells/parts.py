"""Cards of what is no cell: parts of models, which their packages register."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..spec import Spec
from .facts import Facts


@dataclass(frozen=True)
class Formula:
    """An equation that no Spec holds: it has networks, matrices or sums over time."""

    name: str
    latex: str


@dataclass(frozen=True)
class Switch:
    """A setting in which a published system differs from the notes that a part follows.

    Attributes
    ----------
    name
        The setting. Its default is the notes.
    notes, published
        What either value means.
    effect
        What the difference does.
    values
        That of the notes and that of the published system.
    """

    name: str
    notes: str
    published: str
    effect: str
    values: tuple[Any, Any] = (None, None)


@dataclass(frozen=True, kw_only=True)
class Part(Facts):
    """Facts of a part of a model, with its equations.

    Attributes
    ----------
    name
        By which its card is asked for, and those of its modules.
    modules
        Classes whose card this is.
    equations
        In the order of the page. A Spec stands for all of its lines; one with a state is a
        recurrence, of which Jacobian and code are derived.
    update
        Name of the equation that the catalog shows.
    structure, path
        Jacobian class, if it is a recurrence, and how it runs in parallel, as the catalog says it.
    not_claimed
        What does not follow from any of this.
    switches
        Those that concern this part.
    tables
        More sections of its generated file, by name.
    checked_by
        Arguments of ``pytest`` in a clone that check the model; empty for none.
    """

    name: str
    modules: tuple[type, ...]
    equations: tuple[Spec | Formula, ...]
    update: str
    path: str
    structure: tuple[str, ...] = ()
    not_claimed: tuple[str, ...]
    switches: tuple[Switch, ...] = ()
    tables: tuple[tuple[str, Table], ...] = ()
    checked_by: str = ""


@dataclass(frozen=True)
class Table:
    """A table of a page; cells are prose, as in :class:`Facts`, or Markdown that is taken as it is.

    Attributes
    ----------
    caption
        What it shows.
    header, rows
        Texts.
    prose
        Columns that are prose.
    """

    caption: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    prose: tuple[int, ...] = ()


_PARTS: dict[str, Part] = {}


def register_parts(*parts: Part) -> None:
    """Give parts of models cards, a place in the catalog, and names that ``pararnn show`` knows.

    Raises
    ------
    TypeError
        If one is no :class:`Part`.
    ValueError
        If another part has its name or its slug.
    """
    for part in parts:
        if not isinstance(part, Part):
            raise TypeError(
                f"register_parts: got {type(part).__name__}, expected a Part; give what a card says."
            )
        for known in _PARTS.values():
            if known is not part and {known.name, known.slug} & {part.name, part.slug}:
                raise ValueError(
                    f"register_parts: got {part.name!r} ({part.slug}), expected a name and a slug that no "
                    f"other part has; {known.name!r} ({known.slug}) is registered."
                )
        _PARTS[part.name] = part


def registered_parts() -> tuple[Part, ...]:
    """Those that were registered so far, in that order."""
    return tuple(_PARTS.values())


def read_part(
    path: Path,
    *modules: type,
    equations: Mapping[str, Spec] | None = None,
    switches: Mapping[str, Switch] | None = None,
    **given: Any,
) -> Part:
    """The part that a TOML file ``<slug>.toml`` describes, in the form of :mod:`pararnn.cells.facts`.

    A file ``bibliography.toml`` beside it, if there is one, adds to the sources of the cells.

    Parameters
    ----------
    modules
        Classes whose card this is.
    equations, switches
        Specs and switches that the file's lists name.
    given
        Fields of :class:`Part` that are not in the file.

    Raises
    ------
    ValueError
        If there is no file, or a key of it is unknown, missing or of the wrong type: with file, key
        and what was expected.
    """
    from .facts import load

    named = {
        **load.bibliography(path.with_name("bibliography.toml")),
        "equations": equations or {},
        "switches": switches or {},
    }
    return load.load(path, Part, named, slug=path.stem, modules=modules, **given)


def read_switches(path: Path, notes: object, published: object) -> dict[str, Switch]:
    """Switches of a TOML file, a table each, by name.

    Parameters
    ----------
    notes, published
        Settings of either system, with an attribute of every switch's name: its value there.

    Raises
    ------
    ValueError
        As for :func:`read_part`, or if there is no such setting.
    """
    from .facts import load

    found = {}
    for name, row in load.read(path).items():
        at = f"{path.name}: [{name}]"
        if not (hasattr(notes, name) and hasattr(published, name)):
            raise ValueError(f"{at} got no setting of this name; rename it.")
        values = (getattr(notes, name), getattr(published, name))
        found[name] = load.record(Switch, row, at, {}, name=name, values=values)
    return found
