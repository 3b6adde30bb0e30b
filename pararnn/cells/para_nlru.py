"""ParaNLRU: the decay and input scale of the RG-LRU around a nonlinear candidate."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.nn import functional

from ..spec import Spec, exp, sigmoid, softplus, tanh
from .constraints import BoundedCell

SHARPNESS = 8  # the constant c of De et al.
LEAST_DECAY = 1e-24
"""Smallest ``−log a``: keeps the slope of ``√(1 − a²)`` finite. Its square root and its inverse to
the power 3/2 are both far inside the range of float32."""
SLOWEST = (0.9, 0.999)  # initial range of a at an open gate


@cache
def nlru_spec() -> Spec:
    """De et al., arXiv:2402.19427, section 2.4, with ``x_t`` replaced by a tanh of the state.

    ``1 − a²`` is written ``tanh(ℓ)(1 + a²)`` for ``a = exp(−ℓ)``: the same number, without the
    cancellation near ``a = 1``.
    """
    with Spec("ParaNLRU") as s:
        h = s.state("h", bounds=(-math.inf, math.inf))
        u_r, u_i, u_n = s.drives("u_r u_i u_n")
        w = s.map("w", structure="diagonal")
        (Lambda,) = s.params("Lambda")
        r = s.let("r", sigmoid(u_r))
        i = s.let("i", sigmoid(u_i))
        rate = sympy.Mul(SHARPNESS, softplus(Lambda), r)
        decay = s.let("l", rate + sympy.Float(10) ** -24, latex=r"\ell")
        a = s.let("a", exp(-decay))
        q = s.let("q", tanh(decay) * (1 + a**2))
        n = s.let("n", tanh(w(h) + u_n))
        s.next(h, a * h + sympy.sqrt(q) * (i * n))
    return s


class ParaNLRU(BoundedCell):
    """Nonlinear gated linear recurrent unit: ``h' = a h + √(1 − a²) (i tanh(w h + u))``.

    The decay ``a = exp(−8 softplus(Λ) r)`` and both gates depend on the input only, as in the
    RG-LRU; the candidate depends on the state, which makes the recurrence nonlinear.

    Parameters
    ----------
    d_in, d_h
        Input and state width; also by ``input_size`` and ``hidden_size``.
    max_recurrent_norm
        Bound on the entries of ``w``: they are projected to ``[-c, c]``. None: no bound.
    bias, device, dtype
        As for :class:`torch.nn.Linear`.

    Raises
    ------
    TypeError, ValueError
        If a width is missing or not positive, or the bound is not positive.

    References
    ----------
    De et al., Griffin, arXiv:2402.19427, section 2.4 and App. A.
    """

    w: Tensor
    Lambda: Tensor

    def __init__(
        self,
        d_in: int | None = None,
        d_h: int | None = None,
        max_recurrent_norm: float | None = 0.5,
        **kwargs: Any,
    ):
        super().__init__(
            d_in, d_h, spec=nlru_spec(), max_recurrent_norm=max_recurrent_norm, **kwargs
        )

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """As for every cell; ``Λ`` such that an open gate decays by a factor drawn evenly from
        (0.9, 0.999)."""
        super().reset_parameters()
        slowest = torch.empty_like(self.Lambda, dtype=torch.float32).uniform_(*SLOWEST)
        rate = -slowest.log() / SHARPNESS
        self.Lambda.copy_(rate.expm1().log())  # the inverse of softplus

    def recurrence(
        self, h: Tensor, u_r: Tensor, u_i: Tensor, u_n: Tensor, w: Tensor, Lambda: Tensor
    ) -> Tensor:
        slowest = SHARPNESS * functional.logsigmoid(-Lambda)
        log_a = slowest * torch.sigmoid(u_r) - LEAST_DECAY
        scale = torch.sqrt(-torch.expm1(2 * log_a))
        return torch.exp(log_a) * h + scale * torch.sigmoid(u_i) * torch.tanh(u_n + w * h)
