"""Token embedding and the learned first state (notes, section 1)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pararnn import checks

SPREAD = 0.02


class DRMStateInitializer(nn.Module):
    r"""A learned \(z_0\), the same for every sequence; it starts as \(N(0, 0.02^2)\).

    Raises
    ------
    TypeError, ValueError
        If ``d_state`` is not a positive integer.
    """

    def __init__(self, d_state: int):
        super().__init__()
        self.z0 = nn.Parameter(SPREAD * torch.randn(checks.positive("d_state", d_state)))

    def forward(self, batch: int) -> Tensor:
        """``(batch, d_state)``."""
        if isinstance(batch, bool) or not isinstance(batch, int) or batch < 0:
            raise ValueError(f"batch: got {batch!r}, expected an integer ≥ 0.")
        return self.z0.expand(batch, -1)


class TokenEmbedding(nn.Module):
    r"""\(e_t = E(x_t)\), one learned row a token, \(N(0, 1)\) at first.

    Raises
    ------
    TypeError, ValueError
        If a size is not a positive integer.
    """

    def __init__(self, vocab_size: int, d_token: int):
        super().__init__()
        self.vocab_size = checks.positive("vocab_size", vocab_size)
        self.table = nn.Embedding(vocab_size, checks.positive("d_token", d_token))

    def forward(self, tokens: Tensor) -> Tensor:
        """``(B, T, d_token)`` of ``tokens (B, T)``.

        Raises
        ------
        TypeError
            If tokens are not integers.
        ValueError
            If they are not two-dimensional or, on the CPU, out of the vocabulary.
        """
        if not isinstance(tokens, Tensor) or tokens.dtype not in (torch.int64, torch.int32):
            kind = tokens.dtype if isinstance(tokens, Tensor) else type(tokens).__name__
            raise TypeError(f"tokens: got {kind}, expected an int64 or int32 tensor; use .long().")
        if tokens.ndim != 2:
            raise ValueError(f"tokens: got shape {tuple(tokens.shape)}, expected (B, T).")
        if checks.readable(tokens) and tokens.numel():
            low, high = (int(v) for v in tokens.aminmax())
            if low < 0 or high >= self.vocab_size:
                raise ValueError(
                    f"tokens: got values from {low} to {high}, expected 0 to {self.vocab_size - 1}; "
                    "check vocab_size."
                )
        embedded: Tensor = self.table(tokens)
        return embedded
