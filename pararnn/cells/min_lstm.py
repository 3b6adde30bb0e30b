"""MinLSTM: a forget and an input gate that are normalised, linear in the state."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from ..spec import Spec, positive, sigmoid, softplus
from .min_gru import PositiveMixer, candidate
from .mixer import decay_stage, faded


@cache
def min_lstm_spec(decay: str | None, log1p_delta: bool) -> Spec:
    """Feng et al., arXiv:2410.01201: ``f/(f + i)`` and ``i/(f + i)`` as sigmoids of ``log f/i``."""
    with Spec("MinLSTM" if decay is None else "MinLSTM[decay]") as s:
        h = s.state("h", bounds=(0, float("inf")))
        u_f, u_i, u_h = s.drives("u_f u_i u_h")
        gamma = decay_stage(s, decay, log1p_delta)
        q = s.let("q", softplus(-u_i) - softplus(-u_f))
        f = s.let("f", sigmoid(q), latex="f'")
        i = s.let("i", sigmoid(-q), latex="i'")
        n = s.let("n", positive(u_h), latex=r"\tilde{h}")
        s.next(h, faded(gamma, f) * h + i * n)
    return s


class MinLSTM(PositiveMixer):
    """Minimal LSTM with normalised gates: ``h_t = f/(f+i) h_{t−1} + i/(f+i) g(W_h x_t + b_h)``.

    Parameters
    ----------
    d_in, d_h
        Input and output width; also by ``input_size`` and ``hidden_size``.
    bias
        Whether the three input heads have biases.
    learnable_h0
        Whether the start is ``g`` of a trained vector (at first 1/2, as without).
    decay, decay_rate, log1p_delta
        Time-aware decay; see :class:`~pararnn.cells.mixer.Mixer`.
    device, dtype
        As for :class:`torch.nn.Linear`.

    Raises
    ------
    TypeError, ValueError
        As for :class:`~pararnn.MinGRU`.

    References
    ----------
    Feng et al., Were RNNs All We Needed?, arXiv:2410.01201.
    """

    def make_spec(self) -> Spec:
        return min_lstm_spec(self.decay, self.log1p_delta)

    def recurrence(self, h: Tensor, *given: Tensor) -> Tensor:
        (u_f, u_i, u_h), gamma = self.apart(given)
        # f/(f + i) = σ(log f − log i). The logarithm of f + i would be rounded to its own size.
        ratio = functional.logsigmoid(u_f) - functional.logsigmoid(u_i)
        return torch.sigmoid(ratio) * gamma * h + torch.sigmoid(-ratio) * candidate(u_h)
