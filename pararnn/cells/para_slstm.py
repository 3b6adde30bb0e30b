"""ParaSLSTM: exponential gates, a normalizer and a stabilizer, with diagonal recurrent weights."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .. import _checks as checks
from ..spec import Spec, exp, maximum, sigmoid, softplus, tanh
from .cell import Cell

FORGET_GATES = ("sigmoid", "exp")
EMPTY = 10_000
"""How far below the logarithm of the input gate the scale of an empty state is put: its gate is
then 0."""


@cache
def slstm_spec(forget: str) -> Spec:
    """Beck et al., arXiv:2405.04517, section 2.2, in its stabilised form.

    A step returns a normalizer of at least 1: its larger gate is exactly 1. So ``e``, which is 1 for
    the zero state and 0 for every other, tells the two cases apart. What comes after an empty state
    has the scale of its input gate, and keeps nothing.
    """
    with Spec(f"ParaSLSTM[{forget}]") as s:
        c, n = s.state("c"), s.state("n", bounds=(1, math.inf))
        m, h = s.state("m"), s.state("h")
        u_i, u_f, u_z, u_o = s.drives("u_i u_f u_z u_o")
        R_i, R_f, R_z, R_o = s.maps("R_i R_f R_z R_o", structure="diagonal")
        i_log = s.let("i_log", R_i(h) + u_i, latex=r"\log i")
        f_in = R_f(h) + u_f
        f_log = s.let("f_log", -softplus(-f_in) if forget == "sigmoid" else f_in, latex=r"\log f")
        z = s.let("z", tanh(R_z(h) + u_z))
        o = s.let("o", sigmoid(R_o(h) + u_o))
        e = s.let("e", maximum(1 - 2 * n, 0))
        p = s.let("p", (1 - e) * (f_log + m) + e * (i_log - EMPTY))
        s.next(m, maximum(p, i_log))
        i = s.let("i", exp(i_log - s.updated(m)), latex="i'")
        f = s.let("f", exp(p - s.updated(m)), latex="f'")
        s.next(c, f * c + i * z)
        s.next(n, f * n + i)
        s.next(h, o * (s.updated(c) / s.updated(n)))
    return s


class ParaSLSTM(Cell):
    """Long short-term memory with an exponential input gate, normalized and stabilised.

    The state has four slots, the memory ``c``, its normalizer ``n``, the stabilizer ``m`` and the
    output ``h``: shape ``(B, 4, d_h)``. A layer passes ``h`` on.

    Parameters
    ----------
    d_in, d_h
        Input width and width of each slot; also by ``input_size`` and ``hidden_size``.
    forget
        The forget gate: ``'sigmoid'``, or ``'exp'`` of its pre-activation.
    bias, device, dtype
        As for :class:`torch.nn.Linear`.

    Raises
    ------
    TypeError, ValueError
        If a width is missing or not positive, or ``forget`` is neither.

    References
    ----------
    Beck et al., xLSTM, arXiv:2405.04517, section 2.2.
    """

    def __init__(
        self,
        d_in: int | None = None,
        d_h: int | None = None,
        forget: str = "sigmoid",
        **kwargs: Any,
    ):
        self.forget = checks.one_of("forget", forget, FORGET_GATES)
        super().__init__(d_in, d_h, spec=slstm_spec(forget), **kwargs)

    def recurrence(
        self,
        c: Tensor,
        n: Tensor,
        m: Tensor,
        h: Tensor,
        u_i: Tensor,
        u_f: Tensor,
        u_z: Tensor,
        u_o: Tensor,
        R_i: Tensor,
        R_f: Tensor,
        R_z: Tensor,
        R_o: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        write, forget = u_i + R_i * h, u_f + R_f * h
        if self.forget == "sigmoid":
            forget = functional.logsigmoid(forget)
        empty = torch.relu(1 - 2 * n)
        old = (1 - empty) * (forget + m) + empty * (write - EMPTY)
        top = torch.maximum(write, old)
        write, keep = torch.exp(write - top), torch.exp(old - top)
        memory = keep * c + write * torch.tanh(u_z + R_z * h)
        normalizer = keep * n + write
        out = torch.sigmoid(u_o + R_o * h) * (memory / normalizer)
        return memory, normalizer, top, out

    def hyperparameters(self) -> dict[str, Any]:
        return {
            "d_in": self.d_in,
            "d_h": self.d_h,
            "forget": self.forget,
            "bias": self.has_bias,
        }
