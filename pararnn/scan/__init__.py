"""Linear recurrences: one scan for every algebra of transition operators."""

from .affine import affine_scan
from .algebra import Algebra, Block, Dense, Diagonal, Flat, Right

__all__ = ["Algebra", "Block", "Dense", "Diagonal", "Flat", "Right", "affine_scan"]
