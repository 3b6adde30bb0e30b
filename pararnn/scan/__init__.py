"""Linear recurrences: one scan for every algebra of transition operators."""

from .affine import affine_scan
from .algebra import Algebra, Block, Dense, Diagonal, Flat, Left, MaxPlus, Right
from .delta import delta_scan

__all__ = [
    "Algebra",
    "Block",
    "Dense",
    "Diagonal",
    "Flat",
    "Left",
    "MaxPlus",
    "Right",
    "affine_scan",
    "delta_scan",
]
