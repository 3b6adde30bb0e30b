"""A part of the model as its card describes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...cells.facts import Facts, Source
from ...spec import Spec
from ..config import DRMConfig

NOTES = Source(
    key="muniz2026notes",
    authors="Muniz",
    title="Mathematical Notes",
    venue="the notes on the DRM language emitter, 31 July 2026",
    year=2026,
    arxiv="",
    equations="",
    bibtex="""@misc{muniz2026notes,
  title  = {Mathematical Notes},
  author = {Muniz, Felipe Maya},
  year   = {2026},
  note   = {docs/math.md of the drm-language-emitter, commit 5b32a34}
}""",
)
"""The notes that every part follows; a part adds its sections."""


@dataclass(frozen=True)
class Formula:
    """An equation that no Spec holds: it has networks, matrices or sums over time."""

    name: str
    latex: str


@dataclass(frozen=True)
class Switch:
    """A field of :class:`DRMConfig` where the published system differs from its notes.

    Attributes
    ----------
    name
        The field. Its default is the notes; :meth:`DRMConfig.published` sets the other value.
    notes, published
        What either value means.
    effect
        What the difference does.
    """

    name: str
    notes: str
    published: str
    effect: str

    @property
    def values(self) -> tuple[Any, Any]:
        """That of the notes and that of the published system."""
        return getattr(DRMConfig(), self.name), getattr(DRMConfig().published(), self.name)


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
