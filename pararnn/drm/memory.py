"""Selective memory: gated, element-wise affine, solved by an associative scan (notes, section 9)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pararnn import checks
from pararnn.scan import linear_scan

from .config import DRMConfig
from .networks import shifted


class SelectiveMemory(nn.Module):
    r"""A memory that forgets and writes per coordinate.

    With \(h_t = \mathrm{SiLU}(W_{in}[z'_{t-1}; e_t] + b)\),

    \[ f_t = \sigma(W_f h_t + b_f + \beta),\quad w_t = \sigma(W_w h_t + b_w),\quad
       c_t = \tanh(W_c h_t + b_c),\qquad m_t = f_t \odot m_{t-1} + w_t \odot c_t. \]

    The model adds \(\eta m_t\) to the state and chooses the first \(m\). The gates see states
    without the memory of their block, so they are known for the whole block at once and the
    recurrence is linear: :func:`pararnn.scan.linear_scan` composes its affine maps. There is no
    division by a product of gates. Under half precision gates, candidate and memory are in float32.

    Parameters
    ----------
    config
        ``d_state, d_token, memory_hidden, memory_forget_bias`` (\(\beta\)) are read.
    backend
        As for :func:`pararnn.scan.linear_scan`.
    """

    def __init__(self, config: DRMConfig, *, backend: str = "auto"):
        super().__init__()
        self.d_state, self.d_token = config.d_state, config.d_token
        self.forget_bias, self.backend = config.memory_forget_bias, backend
        hidden = config.memory_hidden
        self.in_proj = nn.Linear(self.d_state + self.d_token, hidden)
        self.forget = nn.Linear(hidden, self.d_state)
        self.write = nn.Linear(hidden, self.d_state)
        self.candidate = nn.Linear(hidden, self.d_state)

    def maps(self, states: Tensor, start: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The affine maps ``(f, u)`` of every step, both ``(B, L, d_state)``, with ``u = w ⊙ c``.

        Arguments are those of :meth:`forward`.
        """
        previous = shifted(start, states)
        h = F.silu(self.in_proj(torch.cat([previous, tokens], -1)))
        f, w, c = self.forget(h), self.write(h), self.candidate(h)
        with checks.full_precision(states.device):
            dtype = checks.state_dtype(f.dtype)
            f, w, c = f.to(dtype), w.to(dtype), c.to(dtype)
            return torch.sigmoid(f + self.forget_bias), torch.sigmoid(w) * torch.tanh(c)

    def forward(
        self, states: Tensor, start: Tensor, tokens: Tensor, memory: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Run a block, or one step of it.

        Parameters
        ----------
        states
            States ``z'`` before the memory, ``(B, L, d_state)``.
        start
            The state before the first of them, ``(B, d_state)``.
        tokens
            Token embeddings, ``(B, L, d_token)``.
        memory
            The memory to start from, ``(B, d_state)``.

        Returns
        -------
        memories
            ``m`` after each step, ``(B, L, d_state)``.
        memory
            The one after the last step, ``(B, d_state)``; the given one if ``L`` is 0.

        Raises
        ------
        TypeError, ValueError
            If a shape or dtype does not fit; nothing is broadcast.
        """
        name = type(self).__name__
        if checks.floating(f"{name}: states", states).ndim != 3:
            raise ValueError(
                f"{name}: states: got shape {tuple(states.shape)}, expected (B, L, "
                f"{self.d_state}); one step has L = 1."
            )
        batch, length = states.shape[:2]
        for what, value, shape in (
            ("states", states, (batch, length, self.d_state)),
            ("start", start, (batch, self.d_state)),
            ("tokens", tokens, (batch, length, self.d_token)),
            ("memory", memory, (batch, self.d_state)),
        ):
            checks.shaped(f"{name}: {what}", value, shape, 0)
        return self.scan(*self.maps(states, start, tokens), memory)

    def scan(self, f: Tensor, u: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Apply the maps ``(f, u)``, both ``(B, L, d_state)``, one after the other.

        Returns what :meth:`forward` does.
        """
        with checks.full_precision(f.device):
            m, last = linear_scan(f, u, memory.to(f.dtype), backend=self.backend, return_state=True)
            return m, last

    def extra_repr(self) -> str:
        return f"forget_bias={self.forget_bias}"
