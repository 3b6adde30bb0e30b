"""Logits of the next token from a state (notes, section 10)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import _checks as checks

EPS = 1e-6


class _Layer(nn.Module):
    """RMS norm and a GELU or SwiGLU perceptron ``d → hidden → d``, residual or not."""

    def __init__(self, d: int, hidden: int, swiglu: bool, residual: bool, dropout: float):
        super().__init__()
        self.swiglu, self.residual = swiglu, residual
        self.norm = nn.RMSNorm(d, eps=EPS)
        self.inner = nn.Linear(d, 2 * hidden if swiglu else hidden)
        self.drop = nn.Dropout(dropout)
        self.outer = nn.Linear(hidden, d)

    def forward(self, z: Tensor) -> Tensor:
        y = self.inner(self.norm(z))
        if self.swiglu:
            gate, value = y.chunk(2, -1)
            y = F.silu(gate) * value
        else:
            y = F.gelu(y)
        y = self.outer(self.drop(y))
        return z + y if self.residual else y


class LanguageEmitter(nn.Module):
    r"""Logits \(\ell_t = f(z_t)\), position by position.

    With ``layers=1`` and neither ``swiglu`` nor ``residual``:
    RMS norm, ``Linear(d, hidden)``, GELU, dropout, ``Linear(hidden, vocab)``. Otherwise: RMS norm,
    ``layers`` perceptrons ``d → hidden → d`` with their own norm, ``Linear(d, vocab)``.

    Parameters
    ----------
    d_state, hidden, vocab_size
        Widths.
    layers
        Number of perceptrons.
    swiglu
        SiLU-gated perceptrons instead of GELU ones.
    residual
        Add each perceptron to its input.
    dropout
        Probability of dropout inside the perceptrons, in training.

    Raises
    ------
    TypeError, ValueError
        If a width or ``layers`` is not a positive integer.
    """

    def __init__(
        self,
        d_state: int,
        hidden: int,
        vocab_size: int,
        *,
        layers: int = 1,
        swiglu: bool = False,
        residual: bool = False,
        dropout: float = 0.0,
    ):
        super().__init__()
        self.d_state = checks.positive("d_state", d_state)
        checks.positive("hidden", hidden)
        self.vocab_size = checks.positive("vocab_size", vocab_size)
        checks.positive("layers", layers)
        self.norm = nn.RMSNorm(d_state, eps=EPS)
        if layers == 1 and not swiglu and not residual:
            self.body: nn.Module = nn.Sequential(
                nn.Linear(d_state, hidden), nn.GELU(), nn.Dropout(dropout)
            )
            self.head = nn.Linear(hidden, vocab_size)
        else:
            self.body = nn.Sequential(
                *[_Layer(d_state, hidden, swiglu, residual, dropout) for _ in range(layers)]
            )
            self.head = nn.Linear(d_state, vocab_size)

    def forward(self, z: Tensor) -> Tensor:
        """Logits ``(..., vocab_size)`` of states ``(..., d_state)``.

        Raises
        ------
        TypeError, ValueError
            If ``z`` is not a floating-point tensor of this width.
        """
        name = "LanguageEmitter: z"
        checks.trailing(name, checks.floating(name, z), (self.d_state,))
        logits: Tensor = self.head(self.body(self.norm(z)))
        return logits
