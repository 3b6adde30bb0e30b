"""Linear recurrences: one scan for every algebra of transition operators."""

from .affine import affine_scan
from .algebra import Algebra, Block, Dense, Diagonal, Flat, Left, MaxPlus, Right
from .delta import delta_scan
from .linear import linear_scan, matrix_affine_scan, matrix_scan, prefix_sum
from .log import parallel_scan_log

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
    "linear_scan",
    "matrix_affine_scan",
    "matrix_scan",
    "parallel_scan_log",
    "prefix_sum",
]
