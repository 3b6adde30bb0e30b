"""Layers around cells, and the check that they compute what their cells say."""

from .agreement import AgreementReport, LayerAgreement, verify_agreement
from .min_gru import MinGRUBlock, MinGRUStack
from .mixers import MIXERS
from .para_rnn import ParaRNN, takes_gaps
from .paths import Explanation, LayerPath, explain

__all__ = [
    "MIXERS",
    "AgreementReport",
    "Explanation",
    "LayerAgreement",
    "LayerPath",
    "MinGRUBlock",
    "MinGRUStack",
    "ParaRNN",
    "explain",
    "takes_gaps",
    "verify_agreement",
]
