"""ParaGRU: the gated recurrent unit with diagonal or per-head recurrent weights."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from .. import _checks as checks
from ..spec import Spec, sigmoid, tanh
from .constraints import BoundedCell

STRUCTURES = {"diag": "diagonal", "head": "head"}
DEFAULT_MAX_NORM = {"diag": 0.5, "head": None}  # App. C.1; dense heads are not clipped silently


@cache
def gru_spec(mix: str) -> Spec:
    """Danieli et al., arXiv:2510.21450, eq. 3.1a with the maps of eq. 3.3 (``mix='diag'``)."""
    with Spec(f"ParaGRU[{mix}]") as s:
        h = s.state("h", bounds=(-1, 1))
        u_z, u_r, u_n = s.drives("u_z u_r u_n")
        A_z, A_r, A_n = s.maps("A_z A_r A_n", structure=STRUCTURES[mix])
        z = s.let("z", sigmoid(A_z(h) + u_z))
        r = s.let("r", sigmoid(A_r(h) + u_r))
        n = s.let("n", tanh(A_n(r * h) + u_n))
        s.next(h, (1 - z) * h + z * n)
    return s


class ParaGRU(BoundedCell):
    """Gated recurrent unit whose recurrent weights are diagonal or dense per head.

    Parameters
    ----------
    d_in, d_h
        Input and state width; also by ``input_size`` and ``hidden_size``.
    mix
        ``'diag'``: vectors ``a_*`` of shape ``(d_h,)``. ``'head'``: matrices ``A_*`` of shape
        ``(n_heads, d_h // n_heads, d_h // n_heads)``.
    n_heads
        Number of heads for ``mix='head'``; must divide ``d_h``. Unused for ``mix='diag'``.
    max_recurrent_norm
        Bound on the recurrent weights (App. C.1). ``'default'``: 0.5 for ``'diag'``, None for
        ``'head'``. For ``'diag'`` every entry is projected to ``[-c, c]``; for ``'head'`` every
        matrix is rescaled to spectral norm at most ``c``.
    bias, device, dtype
        As for :class:`torch.nn.Linear`.

    Raises
    ------
    TypeError, ValueError
        If a width is missing or not positive, ``mix`` is unknown, the heads do not divide the
        width, or the bound is not positive.

    References
    ----------
    Danieli et al., ParaRNN, arXiv:2510.21450, eq. 3.1a, 3.3 and App. C.1; gates of Cho et al.,
    arXiv:1406.1078.
    """

    A_z: Tensor
    A_r: Tensor
    A_n: Tensor

    def __init__(
        self,
        d_in: int | None = None,
        d_h: int | None = None,
        mix: str = "diag",
        n_heads: int = 4,
        max_recurrent_norm: float | str | None = "default",
        **kwargs: Any,
    ):
        checks.one_of("mix", mix, STRUCTURES)
        checks.positive("n_heads", n_heads)
        if isinstance(max_recurrent_norm, str) and max_recurrent_norm == "default":
            max_recurrent_norm = DEFAULT_MAX_NORM[mix]
        self.mix, self.n_heads = mix, n_heads
        sizes = {"heads": n_heads} if mix == "head" else {}
        super().__init__(
            d_in,
            d_h,
            spec=gru_spec(mix),
            sizes=sizes,
            max_recurrent_norm=max_recurrent_norm,
            **kwargs,
        )

    def recurrence(
        self,
        h: Tensor,
        u_z: Tensor,
        u_r: Tensor,
        u_n: Tensor,
        A_z: Tensor,
        A_r: Tensor,
        A_n: Tensor,
    ) -> Tensor:
        z = torch.sigmoid(self._mixed(A_z, h) + u_z)
        r = torch.sigmoid(self._mixed(A_r, h) + u_r)
        n = torch.tanh(self._mixed(A_n, r * h) + u_n)
        return (1 - z) * h + z * n

    def _mixed(self, a: Tensor, h: Tensor) -> Tensor:
        if self.mix == "diag":
            return a * h
        heads = h.unflatten(-1, (self.n_heads, -1))
        return torch.einsum("nij,...nj->...ni", a, heads).flatten(-2)

    def hyperparameters(self) -> dict[str, Any]:
        return {
            "d_in": self.d_in,
            "d_h": self.d_h,
            "mix": self.mix,
            "n_heads": self.n_heads,
            "max_recurrent_norm": self.max_recurrent_norm,
            "bias": self.has_bias,
        }
