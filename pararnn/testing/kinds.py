"""What can be under test."""

from __future__ import annotations

from typing import Any

CELL = "cell"
"""What most clauses are about."""

AnyCell = Any
"""A module with ``step(h, x)``, ``state_shape`` and ``d_in``: a :class:`pararnn.Cell`, or another."""
