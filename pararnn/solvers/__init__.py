"""The dial from sequential to Newton, and everything that it reports."""

from .api import (
    newton_apply,
    newton_m2rnn_factorized,
    sequential_apply,
    shooting_apply,
    solve,
)
from .config import NewtonConfig, NewtonDivergenceError, NewtonWarning, Solution
from .streaming import decode

__all__ = [
    "NewtonConfig",
    "NewtonDivergenceError",
    "NewtonWarning",
    "Solution",
    "decode",
    "newton_apply",
    "newton_m2rnn_factorized",
    "sequential_apply",
    "shooting_apply",
    "solve",
]
