"""What the cards of the DRM and its parts say, as data beside the Specs of their equations.

The files have the form of :mod:`pararnn.cells.facts`; :mod:`pararnn.cards` renders them.
"""

from .block import BLOCK
from .flow import FLOW
from .memory import MEMORY
from .metric import METRIC
from .model import MODEL
from .part import Formula, Part
from .switches import Switch

PARTS: tuple[Part, ...] = (MODEL, FLOW, METRIC, BLOCK, MEMORY)
"""In catalog order."""

__all__ = ["PARTS", "Formula", "Part", "Switch"]
