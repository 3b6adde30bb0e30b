"""Checks of arguments for models on top of the cells, with the errors that cells have.

Each error says what was got, what was expected, and the fix.
"""

from torch import Tensor

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
    "shaped",
    "state_dtype",
    "trailing",
    "transformed",
    "whole",
    "within",
]


def shaped(
    name: str,
    value: object,
    shape: tuple[int, ...],
    lead: int | None = None,
    fix: str = "the width that the module was built with",
) -> Tensor:
    """``value`` as a real floating-point tensor whose last dimensions are ``shape``, behind so many
    others if ``lead`` is given; or a ``TypeError`` or ``ValueError`` that says to check ``fix``."""
    return trailing(name, floating(name, value), shape, lead, fix)
