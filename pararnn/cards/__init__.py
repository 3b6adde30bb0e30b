"""Cards: what the pages, the catalog and the terminal say about a cell, from its Spec and Facts.

``card(cell)`` gives the data, ``card_text(cell)`` the card for a terminal, ``card_markdown(cell)``
the card as one Markdown page. All three take a registered name, a cell, a cell class or a Spec, so
they serve a user's own cell as well. Parts of models, which are no cells, have cards of the same kind;
models register them with :func:`pararnn.cells.register_parts`. ``write_fragments(directory)`` writes the pieces that the pages of this
library include.
"""

from .fragments import write_fragments
from .markdown import card_markdown
from .model import Card, NumberedEquation, Row, Variant, card, find_part, part_names
from .terminal import card_text

__all__ = [
    "Card",
    "NumberedEquation",
    "Row",
    "Variant",
    "card",
    "card_markdown",
    "card_text",
    "find_part",
    "part_names",
    "write_fragments",
]
