"""Staged symbolic specs: one definition of a cell from which everything else is derived."""

from .declarations import SpecError
from .latex import Equation
from .primitives import cos, exp, log, sigmoid, sin, softplus, tanh
from .spec import Spec

__all__ = [
    "Equation",
    "Spec",
    "SpecError",
    "cos",
    "exp",
    "log",
    "sigmoid",
    "sin",
    "softplus",
    "tanh",
]
