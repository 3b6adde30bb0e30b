"""The two shapes of network that the parts share."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pararnn import checks


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

    The first map is applied to state and tokens apart, so the state's share is computed once. Where it is
    more than a plain linear layer (a hook, an adapter, a parametrisation, a quantised layer), it is called.

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
        checks.shaped(f"{name}: z", z, (self.d_state,))
        rows(f"{name}: e", e, z.shape[:-1], self.d_token)
        return torch.tanh(self.second(self.drop(F.gelu(self._first(z, e)))))

    def _first(self, z: Tensor, e: Tensor) -> Tensor:
        """The first map of states and tokens side by side."""
        if not plain_linear(self.first):
            beside = z.unsqueeze(-2).expand(*e.shape[:-1], -1)
            moved: Tensor = self.first(
                torch.cat([beside.to(torch.promote_types(z.dtype, e.dtype)), e], -1)
            )
            return moved
        of_z, of_e = self.first.weight.split([self.d_state, self.d_token], 1)
        return F.linear(z, of_z, self.first.bias).unsqueeze(-2) + F.linear(e, of_e)


def plain_linear(module: nn.Module) -> bool:
    """Whether calling a module is no more than its weight and bias: a ``Linear`` itself, without hooks,
    and without a ``forward``, a weight or a bias of another kind."""
    if type(module) is not nn.Linear or "forward" in vars(module):
        return False
    if nn.Linear.forward.__module__ != nn.Linear.__module__:  # another one for all layers
        return False
    own = (getattr(module, name, None) for name in _HOOKS)
    everywhere = (getattr(nn.modules.module, f"_global{name}", None) for name in _HOOKS)
    if any(own) or any(everywhere):
        return False
    weight, bias = (module._parameters.get(name) for name in ("weight", "bias"))
    known = (nn.Parameter, Tensor)
    if type(weight) not in known or type(bias) not in (*known, type(None)):
        return False
    return isinstance(weight, Tensor) and weight.is_floating_point()


_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


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


def shifted(start: Tensor, states: Tensor) -> Tensor:
    """What is before each of ``states (B, L, ...)``, with ``start (B, ...)`` before the first."""
    return torch.cat([start.unsqueeze(1), states], 1)[:, : states.shape[1]]
