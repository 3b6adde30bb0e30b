"""One file a cell, its Spec and its module with the hand-written step, and one of its card's facts.

They are registered in :mod:`.registry`.
"""

from .cell import Cell
from .delta_min_gru import DeltaMinGRU
from .facts import Deviation, Facts, Source, Symbol
from .givens_min_gru import GivensMinGRU
from .min_gru import MinGRU
from .min_lstm import MinLSTM
from .mixer import Mixer
from .para_cfc import ParaCfC
from .para_gru import ParaGRU
from .para_lstm import ParaLSTM
from .para_m2rnn import ParaM2RNN, m2rnn_gates
from .para_nlru import ParaNLRU
from .para_slstm import ParaSLSTM
from .parts import (
    Formula,
    Part,
    Switch,
    Table,
    read_part,
    read_switches,
    register_parts,
    registered_parts,
)
from .registry import CellEntry, cell_names, get_cell
from .rotation_min_gru import RotationMinGRU
from .signed_min_gru import SignedMinGRU

__all__ = [
    "Cell",
    "CellEntry",
    "DeltaMinGRU",
    "Deviation",
    "Facts",
    "Formula",
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
    "Part",
    "RotationMinGRU",
    "SignedMinGRU",
    "Source",
    "Switch",
    "Symbol",
    "Table",
    "cell_names",
    "get_cell",
    "m2rnn_gates",
    "read_part",
    "read_switches",
    "register_parts",
    "registered_parts",
]
