"""Checks of arguments for models on top of the cells, with the errors that cells have.

Each error says what was got, what was expected, and the fix.
"""

from ._checks import (
    floating,
    full_precision,
    number,
    positive,
    readable,
    state_dtype,
    trailing,
    transformed,
    whole,
    within,
)

__all__ = [
    "floating",
    "full_precision",
    "number",
    "positive",
    "readable",
    "state_dtype",
    "trailing",
    "transformed",
    "whole",
    "within",
]
