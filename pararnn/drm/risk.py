"""A scalar risk of a state, which adds to the metric energy (notes, section 11)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import _checks as checks

LARGEST_MASS = 10.0
LARGEST_FACTOR = 10.0
POWERS = (0.25, 4.0)


class Risk(NamedTuple):
    """Risk of states ``(..., d)``: three tensors of shape ``(...)``."""

    blindspot: Tensor
    dubiety: Tensor
    mass: Tensor


class RiskField(nn.Module):
    r"""Two learned probabilities of a state and the risk mass that they make.

    \[ (b, u) = \sigma(\mathrm{MLP}(z)),\qquad
       \rho = \min(|\alpha_b|\, b^{|\beta_b|} + |\alpha_u|\, u^{|\beta_u|},\; 10), \]

    with \(|\alpha| \le 10\) and \(1/4 \le |\beta| \le 4\). The powers are taken as
    \(\exp(\beta \log\sigma)\), whose slope in the logit, \(\beta b^\beta(1-b)\), stays finite as
    \(b \to 0\); that of a power of \(b\) with \(\beta < 1\) does not.

    The mass is for the energy only, \(G + \rho I\); it is not part of naturalization. At the cap
    its gradient is zero.

    Parameters
    ----------
    d_state, hidden
        Widths of state and hidden layer.

    Raises
    ------
    TypeError, ValueError
        If a width is not a positive integer.
    """

    def __init__(self, d_state: int, hidden: int):
        super().__init__()
        self.d_state = checks.positive("d_state", d_state)
        self.inner = nn.Linear(d_state, checks.positive("hidden", hidden))
        self.outer = nn.Linear(hidden, 2)
        self.alpha = nn.Parameter(torch.full((2,), 0.1))
        self.beta = nn.Parameter(torch.full((2,), 1.5))

    def forward(self, z: Tensor) -> Risk:
        """Risk of states ``z`` of shape ``(..., d_state)``.

        Raises
        ------
        TypeError, ValueError
            If ``z`` is not a floating-point tensor of this width.
        """
        checks.trailing("RiskField: z", checks.floating("RiskField: z", z), (self.d_state,))
        logits = self.outer(F.gelu(self.inner(z)))
        log_p = F.logsigmoid(logits.to(checks.state_dtype(logits.dtype)))
        alpha = self.alpha.abs().clamp(max=LARGEST_FACTOR)
        beta = self.beta.abs().clamp(*POWERS)
        mass = (alpha * torch.exp(beta * log_p)).sum(-1).clamp(max=LARGEST_MASS)
        blindspot, dubiety = log_p.exp().unbind(-1)
        return Risk(blindspot, dubiety, mass)
