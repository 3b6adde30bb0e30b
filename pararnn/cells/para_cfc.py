"""ParaCfC: a closed-form continuous-time cell, which is told how much time has passed."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .. import _checks as checks
from ..spec import Spec, expm1, sigmoid, softplus, tanh
from .cell import Cell
from .gates import shares

FORMS = ("published", "consistent")


@cache
def cfc_spec(form: str) -> Spec:
    """Hasani et al., Nature Machine Intelligence 2022 (arXiv:2106.13898): the closed form with
    sigmoidal time gates, and one whose gate is an exponential decay from the old state."""
    with Spec(f"ParaCfC[{form}]") as s:
        h = s.state("h", bounds=(-1, 1))
        if form == "published":
            u_f, u_g, u_k = s.drives("u_f u_g u_k")
            R_f, R_g, R_k = s.maps("R_f R_g R_k", structure="diagonal")
            dt = s.time_gap("dt")
            f = s.let("f", R_f(h) + u_f)
            g = s.let("g", tanh(R_g(h) + u_g))
            k = s.let("k", tanh(R_k(h) + u_k))
            a = s.let("a", sigmoid(-(f * dt)))
            s.next(h, a * g + (1 - a) * k)
        else:
            u_f, u_k = s.drives("u_f u_k")
            R_f, R_k = s.maps("R_f R_k", structure="diagonal")
            dt = s.time_gap("dt")
            f = s.let("f", R_f(h) + u_f)
            k = s.let("k", tanh(R_k(h) + u_k))
            w = s.let("w", -expm1(-(softplus(f) * dt)))
            s.next(h, (1 - w) * h + w * k)
    return s


class ParaCfC(Cell):
    """Closed-form continuous-time cell with diagonal recurrent weights.

    Every step needs the time since the step before: ``dt``, shape ``(B,)`` in
    :meth:`~pararnn.Cell.step` and ``(B, T)`` for a sequence.

    Parameters
    ----------
    d_in, d_h
        Input and state width; also by ``input_size`` and ``hidden_size``.
    form
        ``'published'``: ``h' = σ(−f Δt) g + (1 − σ(−f Δt)) k``, as in the paper.
        ``'consistent'``: ``h' = a h + (1 − a) k`` with ``a = exp(−softplus(f) Δt)``, so that no
        time means no change.
    bias, device, dtype
        As for :class:`torch.nn.Linear`.

    Raises
    ------
    TypeError, ValueError
        If a width is missing or not positive, or ``form`` is neither.

    References
    ----------
    Hasani et al., Closed-form continuous-time neural networks, Nature Machine Intelligence 4
    (2022), arXiv:2106.13898.
    """

    def __init__(
        self,
        d_in: int | None = None,
        d_h: int | None = None,
        form: str = "published",
        **kwargs: Any,
    ):
        self.form = checks.one_of("form", form, FORMS)
        super().__init__(d_in, d_h, spec=cfc_spec(form), **kwargs)

    def recurrence(self, h: Tensor, *given: Tensor) -> Tensor:
        if self.form == "published":
            u_f, u_g, u_k, dt, R_f, R_g, R_k = given
            start = torch.tanh(u_g + R_g * h)
            end = torch.tanh(u_k + R_k * h)
            past, left = shares((u_f + R_f * h) * dt[..., None])
            return left * start + past * end
        u_f, u_k, dt, R_f, R_k = given
        rate = functional.softplus(u_f + R_f * h, threshold=40)
        left = h - torch.tanh(u_k + R_k * h)
        return h + torch.expm1(-rate * dt[..., None]) * left

    def hyperparameters(self) -> dict[str, Any]:
        return {
            "d_in": self.d_in,
            "d_h": self.d_h,
            "form": self.form,
            "bias": self.has_bias,
        }
