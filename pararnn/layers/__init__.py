"""Layers around cells, and the check that they compute what their cells say."""

from .agreement import AgreementReport, LayerAgreement, verify_agreement
from .para_rnn import ParaRNN, takes_gaps
from .paths import Explanation, LayerPath, explain

__all__ = [
    "AgreementReport",
    "Explanation",
    "LayerAgreement",
    "LayerPath",
    "ParaRNN",
    "explain",
    "takes_gaps",
    "verify_agreement",
]
