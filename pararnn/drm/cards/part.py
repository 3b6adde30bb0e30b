"""A part of the model as its card describes it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ...cells.facts import Facts
from ...cells.facts.load import bibliography, load
from ...spec import Spec
from .switches import SWITCHES, Switch


@dataclass(frozen=True)
class Formula:
    """An equation that no Spec holds: it has networks, matrices or sums over time."""

    name: str
    latex: str


@dataclass(frozen=True, kw_only=True)
class Part(Facts):
    """Facts of a part of the model, with its equations.

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
    """

    name: str
    modules: tuple[type, ...]
    equations: tuple[Spec | Formula, ...]
    update: str
    path: str
    structure: tuple[str, ...] = ()
    not_claimed: tuple[str, ...]
    switches: tuple[Switch, ...] = ()


def part(slug: str, *modules: type, **specs: Spec) -> Part:
    """The part in the file ``<slug>.toml``. Its list of equations names the Specs among them.

    Raises
    ------
    ValueError
        If the file is not of this form.
    """
    named = {**bibliography(), "switches": SWITCHES, "equations": specs}
    path = Path(__file__).parent / f"{slug}.toml"
    return load(path, Part, named, slug=slug, modules=modules)
