"""What cards say about cells that is neither derived nor measured.

A registered cell has a file ``<slug>.toml`` here, with the fields of :class:`Facts`. Sources are
cited by their keys in ``bibliography.toml``; what several cards say in the same words is in
``shared.toml``. The files are read when a card is asked for, by :mod:`.load`.
"""

from .form import FIDELITY_LABELS, Deviation, Facts, Source, Symbol

__all__ = ["FIDELITY_LABELS", "Deviation", "Facts", "Source", "Symbol"]
