"""What a card says about a cell: records, filled from the files of this folder or by a user."""

from __future__ import annotations

from dataclasses import dataclass

FIDELITY_LABELS = (
    "paper-faithful",
    "paper-core",
    "research-variant",
    "notes-faithful",
    "library-original",
)


@dataclass(frozen=True)
class Source:
    """A publication that a cell follows, and which of its equations; ``arxiv`` may be empty."""

    key: str
    authors: str
    title: str
    venue: str
    year: int
    arxiv: str
    equations: str
    bibtex: str


@dataclass(frozen=True)
class Symbol:
    """One row of a card's table of symbols and shapes."""

    latex: str
    shape: str
    meaning: str


@dataclass(frozen=True)
class Deviation:
    """One difference from the source. ``clause`` names the contract clause that covers it; for a
    part of a model, it may be the path of the test file."""

    what: str
    why: str
    effect: str
    clause: str


@dataclass(frozen=True)
class Facts:
    """Everything on a card that is not derived from the Spec or measured.

    Raises
    ------
    ValueError
        If a fidelity label is not one of :data:`FIDELITY_LABELS`.
    """

    title: str
    slug: str
    family: str
    fidelity: tuple[str, ...]
    summary: str
    sources: tuple[Source, ...]
    symbols: tuple[Symbol, ...] = ()
    deviations: tuple[Deviation, ...] = ()
    parallel_path: str = ""
    numerics: str = ""
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        unknown = [label for label in self.fidelity if label not in FIDELITY_LABELS]
        if unknown or not self.fidelity:
            raise ValueError(
                f"{self.title}: got fidelity {self.fidelity}, expected one or more of "
                f"{FIDELITY_LABELS}; the fidelity page defines them."
            )
