"""The two shapes of network that the parts share."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import _checks as checks


def trunk(width: int, hidden: int, dropout: float) -> nn.Sequential:
    """``GELU(A₂ GELU(A₁ z))`` of width ``hidden``, with dropout between."""
    return nn.Sequential(
        nn.Linear(width, hidden),
        nn.GELU(),
        nn.Dropout(dropout),
        nn.Linear(hidden, hidden),
        nn.GELU(),
    )


class StateTokenNetwork(nn.Module):
    r"""\(\tanh(C_2\,\mathrm{GELU}(C_1 [z; e] + b_1) + b_2)\) for one state and several tokens.

    The first map is applied to state and tokens apart, so the state's share is computed once.

    Parameters
    ----------
    d_state, d_token, hidden, width
        Widths of state, token, hidden layer and result.
    dropout
        Probability of dropout after the GELU, in training.

    Raises
    ------
    TypeError, ValueError
        If a width is not a positive integer.
    """

    def __init__(self, d_state: int, d_token: int, hidden: int, width: int, dropout: float = 0.0):
        super().__init__()
        self.d_state = checks.positive("d_state", d_state)
        self.d_token = checks.positive("d_token", d_token)
        self.first = nn.Linear(d_state + d_token, checks.positive("hidden", hidden))
        self.drop = nn.Dropout(dropout)
        self.second = nn.Linear(hidden, width)

    def forward(self, z: Tensor, e: Tensor) -> Tensor:
        """``(..., m, width)`` of states ``z (..., d_state)`` and tokens ``e (..., m, d_token)``.

        Raises
        ------
        TypeError, ValueError
            If an input is not a floating-point tensor of these shapes.
        """
        name = type(self).__name__
        checks.trailing(f"{name}: z", checks.floating(f"{name}: z", z), (self.d_state,))
        rows(f"{name}: e", e, z.shape[:-1], self.d_token)
        of_z, of_e = self.first.weight.split([self.d_state, self.d_token], 1)
        shared = F.linear(z, of_z, self.first.bias).unsqueeze(-2)
        return torch.tanh(self.second(self.drop(F.gelu(shared + F.linear(e, of_e)))))


def rows(name: str, value: Tensor, lead: tuple[int, ...], width: int) -> Tensor:
    """Check that ``value`` is ``(*lead, m, width)``: several vectors for each state."""
    fits = checks.floating(name, value).ndim == len(lead) + 2
    if not fits or value.shape[:-2] != lead or value.shape[-1] != width:
        dims = ", ".join([*map(str, lead), "m", str(width)])
        raise ValueError(
            f"{name}: got shape {tuple(value.shape)}, expected ({dims}), m vectors for each state; "
            "use .unsqueeze(-2) for one."
        )
    return value
