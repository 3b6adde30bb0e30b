"""Staged symbolic specs: one definition of a cell from which everything else is derived."""

from .declarations import SpecError, SpecWarning
from .fragment import Fragment
from .functions import (
    cos,
    exp,
    expm1,
    log,
    log1p,
    maximum,
    positive,
    sigmoid,
    sin,
    snap,
    snap_angle,
    softplus,
    tanh,
)
from .print.latex import Equation
from .spec import Spec

__all__ = [
    "Equation",
    "Fragment",
    "Spec",
    "SpecError",
    "SpecWarning",
    "cos",
    "exp",
    "expm1",
    "log",
    "log1p",
    "maximum",
    "positive",
    "sigmoid",
    "sin",
    "snap",
    "snap_angle",
    "softplus",
    "tanh",
]
