"""A scalar risk of a state, which adds to the metric energy (notes, section 11)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pararnn import checks

from .config import DRMConfig

LARGEST_MASS = 10.0
LARGEST_FACTOR = 10.0
POWERS = (0.25, 4.0)


class RiskField(nn.Module):
    r"""Two learned probabilities of a state and the risk mass that they make.

    \[ (b, u) = \sigma(\mathrm{MLP}(z)),\qquad
       \rho = \min(|\alpha_b|\, b^{|\beta_b|} + |\alpha_u|\, u^{|\beta_u|},\; 10), \]

    with \(|\alpha| \le 10\) and \(1/4 \le |\beta| \le 4\). The powers are taken as
    \(\exp(\beta \log\sigma)\), whose slope in the logit, \(\beta b^\beta(1-b)\), stays finite as
    \(b \to 0\); that of a power of \(b\) with \(\beta < 1\) does not.

    The mass is for the energy only, \(G + \rho I\); it is not part of naturalization. At the cap
    its gradient is zero. A field that is ``'disabled'`` has its parameters and returns zeros.

    Parameters
    ----------
    config
        ``d_state, hidden_size, risk`` are read.

    Raises
    ------
    ValueError
        If ``config.risk`` is ``'absent'``.
    """

    def __init__(self, config: DRMConfig):
        super().__init__()
        if config.risk == "absent":
            raise ValueError(
                "RiskField: got a configuration with risk='absent', expected 'enabled' or "
                "'disabled'; build no field, or change it."
            )
        self.d_state, self.enabled = config.d_state, config.risk == "enabled"
        self.inner = nn.Linear(config.d_state, config.hidden_size)
        self.outer = nn.Linear(config.hidden_size, 2)
        self.alpha = nn.Parameter(torch.full((2,), 0.1))
        self.beta = nn.Parameter(torch.full((2,), 1.5))

    def probabilities(self, z: Tensor) -> Tensor:
        """Blindspot and dubiety ``(..., 2)`` of states ``(..., d_state)``, in [0, 1]."""
        return self._logs(z).exp()

    def forward(self, z: Tensor) -> Tensor:
        """Risk mass ``(...)``, in [0, 10], of states ``(..., d_state)``.

        Raises
        ------
        TypeError, ValueError
            If ``z`` is not a floating-point tensor of this width.
        """
        if not self.enabled:
            checks.shaped("RiskField: z", z, (self.d_state,))
            return z.new_zeros(z.shape[:-1], dtype=checks.state_dtype(z.dtype))
        alpha = self.alpha.abs().clamp(max=LARGEST_FACTOR)
        beta = self.beta.abs().clamp(*POWERS)
        return (alpha * torch.exp(beta * self._logs(z))).sum(-1).clamp(max=LARGEST_MASS)

    def _logs(self, z: Tensor) -> Tensor:
        checks.shaped("RiskField: z", z, (self.d_state,))
        logits = self.outer(F.gelu(self.inner(z)))
        return F.logsigmoid(logits.to(checks.state_dtype(logits.dtype)))
