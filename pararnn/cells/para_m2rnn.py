"""ParaM2RNN: the matrix-state recurrence of M²RNN."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from .. import _checks as checks
from ..spec import Spec, sigmoid, tanh
from .cell import Cell
from .gates import shares


@cache
def m2rnn_spec() -> Spec:
    """Mishra et al., arXiv:2603.14360, eq. 19 and 20, with the forget gate of one linear map."""
    with Spec("ParaM2RNN", axes=("K", "V")) as s:
        H = s.state("H", bounds=(-1, 1))
        (k,) = s.drives("k", axes=("K",), inline=False)
        (v,) = s.drives("v", axes=("V",), inline=False)
        (u_f,) = s.drives("u_f", axes=())
        W = s.map("W", structure="right")
        f = s.let("f", sigmoid(u_f))
        Z = s.let("Z", tanh(W(H) + k * v))
        s.next(H, f * H + (1 - f) * Z)
    return s


class ParaM2RNN(Cell):
    """Matrix-state recurrence ``H' = f H + (1 − f) tanh(H W + k vᵀ)``.

    This is the core of M²RNN, not its block: the convolution, the SiLU, the read-out ``Hᵀq`` and
    the output gate are outside.

    Parameters
    ----------
    d_in
        Input width; also by ``input_size``.
    k_dim, v_dim
        Rows and columns of the state, shape ``(B, k_dim, v_dim)``; ``d_h = k_dim * v_dim``.
    bias, device, dtype
        As for :class:`torch.nn.Linear`.

    Raises
    ------
    TypeError, ValueError
        If a size is missing or not a positive integer.

    References
    ----------
    Mishra, Tan, Stoica, Gonzalez, Dao, M²RNN, arXiv:2603.14360, eq. 19 and 20.
    """

    W: Tensor

    def __init__(
        self,
        d_in: int | None = None,
        k_dim: int | None = None,
        v_dim: int | None = None,
        **kwargs: Any,
    ):
        self.k_dim = checks.positive("k_dim", k_dim)
        self.v_dim = checks.positive("v_dim", v_dim)
        sizes = {"K": self.k_dim, "V": self.v_dim}
        super().__init__(d_in, spec=m2rnn_spec(), sizes=sizes, **kwargs)

    def reset_parameters(self) -> None:
        """Input map as for every cell; ``W`` starts as the identity, as in the paper's code."""
        super().reset_parameters()
        nn.init.eye_(self.W)

    def recurrence(self, H: Tensor, k: Tensor, v: Tensor, u_f: Tensor, W: Tensor) -> Tensor:
        kept, written = shares(u_f[..., None, None])
        return kept * H + written * torch.tanh(H @ W + k[..., :, None] * v[..., None, :])

    def hyperparameters(self) -> dict[str, Any]:
        return {
            "d_in": self.d_in,
            "k_dim": self.k_dim,
            "v_dim": self.v_dim,
            "bias": self.has_bias,
        }


def m2rnn_gates(cell: ParaM2RNN, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Key ``(..., K)``, value ``(..., V)`` and forget gate ``f = σ(·)``, shape ``(...)``.

    ``f`` is broadcast over the matrix in the recurrence. ``x`` has shape ``(..., d_in)``.
    """
    k, v, u_f = cell.split(cell.drives(x))
    return k, v, torch.sigmoid(u_f)
