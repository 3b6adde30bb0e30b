"""Facts from TOML files: a file has the fields of a record, and a list of tables those of others.

Lines of a text are joined by spaces, but those of BibTeX. What several files share has a name: as an
element of a list, in a table as ``use = "name"``, whose other keys replace those of the shared one.
A source is ``cite = "key"`` of the bibliography, and which of its equations.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

from .form import Facts

FOLDER = Path(__file__).parent
Named = Mapping[str, Mapping[str, Any]]
"""Shared tables and objects by the field that they stand in, then by name; ``cite`` has sources."""
T = TypeVar("T")


@cache
def of_cell(slug: str) -> Facts:
    """The facts of a registered cell.

    Raises
    ------
    ValueError
        If there is no file, or a key of it is unknown, missing or of the wrong type: with file, key
        and what was expected.
    """
    return load(FOLDER / f"{slug}.toml", Facts, shared(), slug=slug)


@cache
def shared() -> dict[str, dict[str, Any]]:
    """What cells share, by field."""
    return {**read(FOLDER / "shared.toml"), **bibliography()}


@cache
def bibliography(*more: Path) -> dict[str, dict[str, Any]]:
    """Every source by its key, under ``cite``; with those of other files, of which any may be absent.

    Raises
    ------
    ValueError
        If two files have a key.
    """
    found: dict[str, Any] = {}
    for path in (FOLDER / "bibliography.toml", *(path for path in more if path.exists())):
        for key, row in read(path).items():
            if key in found:
                raise ValueError(f"{path}: got {key!r}, which cells cite; leave it out.")
            found[key] = {"key": key, **row}
    return {"cite": found}


def read(path: Path) -> dict[str, Any]:
    """A file as nested tables.

    Raises
    ------
    ValueError
        If there is none, or it is not TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path}: got no file, expected the facts of a card; write it.") from None
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path.name}: got what is not TOML: {error}.") from None


def load(path: Path, kind: type[T], named: Named, /, **given: Any) -> T:
    """The record that a file describes; ``given`` are those of its fields that are not in the file.

    Raises
    ------
    ValueError
        As for :func:`of_cell`.
    """
    return record(kind, read(path), f"{path.name}:", named, **given)


def record(kind: type[T], table: dict[str, Any], at: str, named: Named, /, **given: Any) -> T:
    """A record of a table; ``at`` says in errors where it is."""
    known = {f.name: f for f in fields(kind) if f.name not in given}  # type: ignore[arg-type]
    for key in table:
        if key not in known:
            raise ValueError(f"{at} got a key {key!r}, expected {', '.join(known)}; rename it.")
    for key, f in known.items():
        if key not in table and f.default is MISSING:
            raise ValueError(f"{at} got no {key!r}; write it.")
    hints = get_type_hints(kind)
    values = {key: value(hints[key], key, got, f"{at} {key}", named) for key, got in table.items()}
    try:
        return kind(**given, **values)
    except ValueError as error:
        raise ValueError(f"{at} {error}") from None


def value(hint: Any, field: str, got: Any, at: str, named: Named) -> Any:
    """The value of a field whose type is a text, a number, or a tuple of texts or records."""
    if hint is str:
        if isinstance(got, dict):
            got = expanded(got, "texts", at, named)
        if not isinstance(got, str):
            raise ValueError(f"{at}: got {got!r}, expected a text.")
        return got.strip() if field == "bibtex" else " ".join(got.split())
    if hint is int:
        if type(got) is not int:
            raise ValueError(f"{at}: got {got!r}, expected a whole number.")
        return got
    if not isinstance(got, list):
        raise ValueError(f"{at}: got {got!r}, expected a list.")
    item = get_args(hint)[0]
    return tuple(_item(item, field, one, f"{at}[{i}]", named) for i, one in enumerate(got))


def _item(hint: Any, field: str, got: Any, at: str, named: Named) -> Any:
    if hint is str:
        return value(str, field, got, at, named)
    if not isinstance(got, str | dict):
        raise ValueError(f"{at}: got {got!r}, expected a table or the name of a shared one.")
    got = expanded({"use": got} if isinstance(got, str) else got, field, at, named)
    if not isinstance(got, dict):
        return got
    kind: Any = next(kind for kind in (hint, *get_args(hint)) if is_dataclass(kind))
    return record(kind, got, f"{at}:", named)


def expanded(table: dict[str, Any], field: str, at: str, named: Named) -> Any:
    """A table with what it uses or cites put in; or the shared thing itself, if that is no table."""
    for word, home in (("use", field), ("cite", "cite")):
        if word in table:
            known, name = named.get(home, {}), table[word]
            if not isinstance(name, str) or name not in known:
                raise ValueError(
                    f"{at}: got {word} = {name!r}, expected one of {', '.join(known) or 'none'}."
                )
            own = {key: got for key, got in table.items() if key != word}
            if not isinstance(known[name], dict):
                if own:
                    raise ValueError(f"{at}: got keys beside {word} = {name!r}; leave them out.")
                return known[name]
            table = {**known[name], **own}
    return table
