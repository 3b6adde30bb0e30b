"""What the cards of the DRM and its parts say, as data; :mod:`pararnn.cards` renders it."""

from .block import BLOCK
from .flow import FLOW
from .memory import MEMORY
from .metric import METRIC
from .model import MODEL
from .part import Formula, Part, Switch

PARTS: tuple[Part, ...] = (MODEL, FLOW, METRIC, BLOCK, MEMORY)
"""In catalog order."""

__all__ = ["PARTS", "Formula", "Part", "Switch"]
