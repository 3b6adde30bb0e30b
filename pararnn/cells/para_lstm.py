"""ParaLSTM: coupled input and forget gates, peepholes, and diagonal recurrent weights."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..spec import Spec, sigmoid, tanh
from .constraints import BoundedCell


@cache
def lstm_spec() -> Spec:
    """Danieli et al., arXiv:2510.21450, eq. 3.1b with the diagonal maps of eq. 3.3."""
    with Spec("ParaLSTM") as s:
        c, h = s.state("c", bounds=(-1, 1)), s.state("h", bounds=(-1, 1))
        u_f, u_z, u_o = s.drives("u_f u_z u_o")
        A_f, A_z, A_o, C_f, C_o = s.maps("A_f A_z A_o C_f C_o", structure="diagonal")
        p = s.let("p", A_f(h) + C_f(c) + u_f)
        f = s.let("f", sigmoid(p))
        i = s.let("i", sigmoid(-p))  # 1 - f, with its digits where f is near 1
        z = s.let("z", tanh(A_z(h) + u_z))
        s.next(c, f * c + i * z)
        o = s.let("o", sigmoid(A_o(h) + C_o(s.updated(c)) + u_o))
        s.next(h, o * tanh(s.updated(c)))
    return s


class ParaLSTM(BoundedCell):
    """Long short-term memory with one gate for forgetting and writing, peepholes, and diagonal
    recurrent weights.

    The state has two slots, the memory ``c`` and the output ``h``: shape ``(B, 2, d_h)``. A layer
    passes ``h`` on.

    Parameters
    ----------
    d_in, d_h
        Input width and width of each slot; also by ``input_size`` and ``hidden_size``.
    max_recurrent_norm
        Bound on the entries of the recurrent vectors and of the peepholes (App. C.1): they are
        projected to ``[-c, c]``. None: no bound.
    bias, device, dtype
        As for :class:`torch.nn.Linear`.

    Raises
    ------
    TypeError, ValueError
        If a width is missing or not positive, or the bound is not positive.

    References
    ----------
    Danieli et al., ParaRNN, arXiv:2510.21450, eq. 3.1b, 3.3 and App. C.1; coupled gates and
    peepholes as in Greff et al., arXiv:1503.04069.
    """

    A_f: Tensor
    A_z: Tensor
    A_o: Tensor
    C_f: Tensor
    C_o: Tensor

    def __init__(
        self,
        d_in: int | None = None,
        d_h: int | None = None,
        max_recurrent_norm: float | None = 0.5,
        **kwargs: Any,
    ):
        super().__init__(
            d_in, d_h, spec=lstm_spec(), max_recurrent_norm=max_recurrent_norm, **kwargs
        )

    def recurrence(
        self,
        c: Tensor,
        h: Tensor,
        u_f: Tensor,
        u_z: Tensor,
        u_o: Tensor,
        A_f: Tensor,
        A_z: Tensor,
        A_o: Tensor,
        C_f: Tensor,
        C_o: Tensor,
    ) -> tuple[Tensor, Tensor]:
        forget = u_f + A_f * h + C_f * c
        # The coupled input gate 1 − σ(x) is σ(−x).
        kept = torch.sigmoid(forget) * c
        written = torch.sigmoid(-forget) * torch.tanh(u_z + A_z * h)
        memory = kept + written
        return memory, torch.sigmoid(u_o + A_o * h + C_o * memory) * torch.tanh(memory)
