"""What the cards of the DRM and its parts say, as data beside the Specs of their equations.

The files have the form of :mod:`pararnn.cells.facts`. Importing this registers the parts.
"""

from pararnn.cells import Part, register_parts

from .block import BLOCK
from .flow import FLOW
from .memory import MEMORY
from .metric import METRIC
from .model import MODEL

PARTS: tuple[Part, ...] = (MODEL, FLOW, METRIC, BLOCK, MEMORY)
"""In catalog order."""

register_parts(*PARTS)

__all__ = ["PARTS"]
