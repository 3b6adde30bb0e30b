"""Recurrent cells for PyTorch that train in parallel over time.

Public names are loaded on first use, so that ``import pararnn`` costs next to nothing beyond
``import torch``.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "pararnn.spec": (
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
        "softplus",
        "tanh",
    ),
    "pararnn.cells": (
        "Cell",
        "CellEntry",
        "DeltaMinGRU",
        "GivensMinGRU",
        "MinGRU",
        "MinLSTM",
        "Mixer",
        "ParaCfC",
        "ParaGRU",
        "ParaLSTM",
        "ParaM2RNN",
        "ParaNLRU",
        "ParaSLSTM",
        "RotationMinGRU",
        "SignedMinGRU",
        "cell_names",
        "get_cell",
        "m2rnn_gates",
    ),
    "pararnn.solvers": (
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
    ),
    "pararnn.scan": (
        "delta_scan",
        "linear_scan",
        "matrix_affine_scan",
        "matrix_scan",
        "parallel_scan_log",
    ),
    "pararnn.layers": (
        "AgreementReport",
        "Explanation",
        "MinGRUBlock",
        "MinGRUStack",
        "ParaRNN",
        "explain",
        "verify_agreement",
    ),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = sorted([*_HOME_OF, "__version__"])

if TYPE_CHECKING:
    from .cells import Cell as Cell
    from .cells import CellEntry as CellEntry
    from .cells import DeltaMinGRU as DeltaMinGRU
    from .cells import GivensMinGRU as GivensMinGRU
    from .cells import MinGRU as MinGRU
    from .cells import MinLSTM as MinLSTM
    from .cells import Mixer as Mixer
    from .cells import ParaCfC as ParaCfC
    from .cells import ParaGRU as ParaGRU
    from .cells import ParaLSTM as ParaLSTM
    from .cells import ParaM2RNN as ParaM2RNN
    from .cells import ParaNLRU as ParaNLRU
    from .cells import ParaSLSTM as ParaSLSTM
    from .cells import RotationMinGRU as RotationMinGRU
    from .cells import SignedMinGRU as SignedMinGRU
    from .cells import cell_names as cell_names
    from .cells import get_cell as get_cell
    from .cells import m2rnn_gates as m2rnn_gates
    from .layers import AgreementReport as AgreementReport
    from .layers import Explanation as Explanation
    from .layers import MinGRUBlock as MinGRUBlock
    from .layers import MinGRUStack as MinGRUStack
    from .layers import ParaRNN as ParaRNN
    from .layers import explain as explain
    from .layers import verify_agreement as verify_agreement
    from .scan import delta_scan as delta_scan
    from .scan import linear_scan as linear_scan
    from .scan import matrix_affine_scan as matrix_affine_scan
    from .scan import matrix_scan as matrix_scan
    from .scan import parallel_scan_log as parallel_scan_log
    from .solvers import NewtonConfig as NewtonConfig
    from .solvers import NewtonDivergenceError as NewtonDivergenceError
    from .solvers import NewtonWarning as NewtonWarning
    from .solvers import Solution as Solution
    from .solvers import decode as decode
    from .solvers import newton_apply as newton_apply
    from .solvers import newton_m2rnn_factorized as newton_m2rnn_factorized
    from .solvers import sequential_apply as sequential_apply
    from .solvers import shooting_apply as shooting_apply
    from .solvers import solve as solve
    from .spec import Spec as Spec
    from .spec import SpecError as SpecError
    from .spec import SpecWarning as SpecWarning
    from .spec import cos as cos
    from .spec import exp as exp
    from .spec import expm1 as expm1
    from .spec import log as log
    from .spec import log1p as log1p
    from .spec import maximum as maximum
    from .spec import positive as positive
    from .spec import sigmoid as sigmoid
    from .spec import sin as sin
    from .spec import snap as snap
    from .spec import softplus as softplus
    from .spec import tanh as tanh


def __getattr__(name: str) -> Any:
    if name in _HOME_OF:
        value = getattr(import_module(_HOME_OF[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'pararnn' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
