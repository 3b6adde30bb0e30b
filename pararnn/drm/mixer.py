"""Causal convolution over the states of a block (notes, section 7)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pararnn import checks

from .networks import shifted


class CausalLocalMixer(nn.Module):
    r"""\(\bar z = \tilde z + \eta\, F(\tilde z, \Delta\tilde z, \delta, e, \mathrm{dimD}, \rho)\).

    A linear map of the features to ``hidden`` and SiLU; then ``layers`` residual layers of depthwise
    convolution, SiLU and a linear map; then a linear map to the state. Layer l dilates by
    ``growth**l``. Padding is on the left only, with zeros, and starts anew in each block: an output
    sees :attr:`reach` tokens, its own included.

    Parameters
    ----------
    d_state, d_token, hidden
        Widths.
    kernel, layers, growth
        Taps of a convolution, number of layers, factor of the dilation from layer to layer.
    scale
        \(\eta\).

    Raises
    ------
    TypeError, ValueError
        If a size is not a positive integer.
    """

    def __init__(
        self,
        d_state: int,
        d_token: int,
        hidden: int,
        *,
        kernel: int = 8,
        layers: int = 1,
        growth: int = 1,
        scale: float = 0.1,
    ):
        super().__init__()
        self.d_state = checks.positive("d_state", d_state)
        self.d_token = checks.positive("d_token", d_token)
        self.kernel, self.scale = checks.positive("kernel", kernel), scale
        checks.positive("hidden", hidden)
        checks.positive("growth", growth)
        self.dilations = [growth**i for i in range(checks.positive("layers", layers))]
        self.in_proj = nn.Linear(3 * d_state + d_token + 2, hidden)
        self.convs = nn.ModuleList(
            nn.Conv1d(hidden, hidden, kernel, dilation=g, groups=hidden) for g in self.dilations
        )
        self.points = nn.ModuleList(nn.Linear(hidden, hidden) for _ in self.dilations)
        self.out_proj = nn.Linear(hidden, d_state)

    @property
    def reach(self) -> int:
        """Tokens that an output depends on."""
        return 1 + (self.kernel - 1) * sum(self.dilations)

    def forward(
        self,
        states: Tensor,
        start: Tensor,
        increments: Tensor,
        e: Tensor,
        mass: Tensor | None = None,
        risk: Tensor | None = None,
    ) -> Tensor:
        """Mixed states of a block, ``(B, L, d_state)``; arguments are those of :meth:`run`."""
        return self.run(states, start, increments, e, mass, risk)[0]

    def run(
        self,
        states: Tensor,
        start: Tensor,
        increments: Tensor,
        e: Tensor,
        mass: Tensor | None = None,
        risk: Tensor | None = None,
        history: tuple[Tensor, ...] = (),
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Mix a block, or go on inside of one.

        Parameters
        ----------
        states, start
            Base states ``(B, L, d_state)`` and the state before them, ``(B, d_state)``.
        increments
            What each token added, ``(B, L, d_state)``.
        e
            Embeddings ``(B, L, d_token)``.
        mass, risk
            dimD and risk mass, ``(B, L)``; 0 if not given.
        history
            What an earlier call returned for the tokens before; zeros if there are none.

        Returns
        -------
        mixed
            ``(B, L, d_state)``.
        history
            What later tokens see of these: the last inputs of each convolution, ``(B, hidden,
            dilation (kernel - 1))``. Its size does not depend on ``L``.

        Raises
        ------
        TypeError, ValueError
            If a shape or dtype does not fit; nothing is broadcast.
        """
        name = type(self).__name__
        checks.shaped(f"{name}: states", states, (self.d_state,), 2)
        batch, length = states.shape[:2]
        for what, value, shape in (
            ("start", start, (batch, self.d_state)),
            ("increments", increments, (batch, length, self.d_state)),
            ("e", e, (batch, length, self.d_token)),
            ("mass", mass, (batch, length)),
            ("risk", risk, (batch, length)),
        ):
            if value is not None:
                checks.shaped(f"{name}: {what}", value, shape, 0)
        previous = shifted(start, states)
        absent = states.new_zeros(batch, length)
        scalars = torch.stack([absent if s is None else s for s in (mass, risk)], -1)
        features = [states, states - previous, increments, e, scalars.to(states.dtype)]
        y = F.silu(self.in_proj(torch.cat(features, -1)))
        layers = zip(self.convs, self.points, self.dilations, strict=True)
        kept = []
        for depth, (conv, point, dilation) in enumerate(layers):
            reach = dilation * (self.kernel - 1)
            padded = torch.cat([history[depth], y.mT], -1) if history else F.pad(y.mT, (reach, 0))
            y = y + point(F.silu(conv(padded)).mT)
            kept.append(padded[..., padded.shape[-1] - reach :])
        mixed: Tensor = states + self.scale * self.out_proj(y)
        return mixed, tuple(kept)
