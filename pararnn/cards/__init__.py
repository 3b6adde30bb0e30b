"""Cards: what the pages, the catalog and the terminal say about a cell, from its Spec and Facts.

``card(cell)`` gives the data, ``card_text(cell)`` the card for a terminal, ``card_markdown(cell)``
the card as one Markdown page. All three take a registered name, a cell, a cell class or a Spec, so
they serve a user's own cell as well. ``write_fragments(directory)`` writes the pieces that the
pages of this library's cells include.
"""

from .fragments import write_fragments
from .markdown import card_markdown
from .model import Card, NumberedEquation, Variant, card
from .terminal import card_text

__all__ = [
    "Card",
    "NumberedEquation",
    "Variant",
    "card",
    "card_markdown",
    "card_text",
    "write_fragments",
]
