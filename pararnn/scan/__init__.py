"""Linear recurrences: one scan for every algebra of transition operators."""

from .affine import affine_scan
from .algebra import Algebra, Block, Dense, Diagonal, Flat, Left, Right

__all__ = ["Algebra", "Block", "Dense", "Diagonal", "Flat", "Left", "Right", "affine_scan"]
