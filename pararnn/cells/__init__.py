"""One file a cell: its Spec, its module with the hand-written step, and its card's facts."""

from .cell import Cell
from .facts import Deviation, Facts, Source, Symbol
from .para_cfc import ParaCfC
from .para_gru import ParaGRU
from .para_lstm import ParaLSTM
from .para_m2rnn import ParaM2RNN, m2rnn_gates
from .para_nlru import ParaNLRU
from .para_slstm import ParaSLSTM
from .registry import CellEntry, cell_names, get_cell

__all__ = [
    "Cell",
    "CellEntry",
    "Deviation",
    "Facts",
    "ParaCfC",
    "ParaGRU",
    "ParaLSTM",
    "ParaM2RNN",
    "ParaNLRU",
    "ParaSLSTM",
    "Source",
    "Symbol",
    "cell_names",
    "get_cell",
    "m2rnn_gates",
]
