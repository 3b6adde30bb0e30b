"""Logits of the next token from a state (notes, section 10)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pararnn import checks

from .bound import length, power
from .config import DRMConfig

EPS = 1e-6
LARGE = 2.0**40  # a norm whose square is finite, and EPS nothing beside it


def _within(z: Tensor) -> Tensor:
    """States scaled so that the squares of an RMS norm do not overflow, which does not change it."""
    norm = length(z.detach()).unsqueeze(-1)
    return z * torch.where(norm > LARGE, LARGE * power(norm), 1.0).to(z.dtype)


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

    With one layer of the form ``'mlp'`` and no residual: RMS norm, ``Linear(d, hidden)``, GELU,
    dropout, ``Linear(hidden, vocab)``. Otherwise: RMS norm, perceptrons ``d → hidden → d`` with
    their own norm, ``Linear(d, vocab)``. States that no radius bounds are scaled before they are squared.

    Parameters
    ----------
    config
        ``d_state, hidden_size, vocab_size, emitter_layers, emitter_form, emitter_residual,
        dropout`` are read.
    """

    def __init__(self, config: DRMConfig):
        super().__init__()
        self.d_state, self.vocab_size = d, vocab = config.d_state, config.vocab_size
        hidden, layers, residual = (
            config.hidden_size,
            config.emitter_layers,
            config.emitter_residual,
        )
        swiglu = config.emitter_form == "swiglu"
        self.bounded = config.bounded_state
        self.norm = nn.RMSNorm(d, eps=EPS)
        if layers == 1 and not swiglu and not residual:
            self.body = nn.Sequential(nn.Linear(d, hidden), nn.GELU(), nn.Dropout(config.dropout))
            self.head = nn.Linear(hidden, vocab)
        else:
            self.body = nn.Sequential(
                *[_Layer(d, hidden, swiglu, residual, config.dropout) for _ in range(layers)]
            )
            self.head = nn.Linear(d, vocab)

    def forward(self, z: Tensor) -> Tensor:
        """Logits ``(..., vocab_size)`` of states ``(..., d_state)``.

        Raises
        ------
        TypeError, ValueError
            If ``z`` is not a floating-point tensor of this width.
        """
        name = "LanguageEmitter: z"
        checks.shaped(name, z, (self.d_state,))
        if not self.bounded:
            z = _within(z)
        logits: Tensor = self.head(self.body(self.norm(z)))
        return logits
