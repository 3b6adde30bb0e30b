"""Layers around cells, and the check that they compute what their cells say."""

from .agreement import AgreementReport, LayerAgreement, verify_agreement
from .para_rnn import ParaRNN, takes_gaps

__all__ = ["AgreementReport", "LayerAgreement", "ParaRNN", "takes_gaps", "verify_agreement"]
