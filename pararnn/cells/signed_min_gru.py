"""SignedMinGRU: a linear recurrence whose transitions have a sign, so that it can count modulo 2."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from .. import _checks as checks
from ..spec import Spec, sigmoid, tanh
from .mixer import Mixer, decay_stage, faded


@cache
def signed_min_gru_spec(coupled: bool, decay: str | None, log1p_delta: bool) -> Spec:
    """``h' = tanh(s) h + σ(z) v``; coupled: ``(1 − σ(z)) tanh(s)`` for the transition."""
    kind = "coupled" if coupled else ""
    label = ", ".join(filter(None, (kind, "decay" if decay else "")))
    with Spec("SignedMinGRU" + (f"[{label}]" if label else "")) as s:
        h = s.state("h")
        u_z, v, u_s = s.drives("u_z v u_s")
        gamma = decay_stage(s, decay, log1p_delta)
        z = s.let("z", sigmoid(u_z))
        if coupled:
            k = s.let("k", sigmoid(-u_z))
            a = s.let("a", k * tanh(u_s))
        else:
            a = s.let("a", tanh(u_s))
        s.next(h, faded(gamma, a) * h + z * v)
    return s


class SignedMinGRU(Mixer):
    """Minimal GRU with transitions in (−1, 1): ``h_t = tanh(W_s x_t) h_{t−1} + z_t (W_h x_t)``.

    Parameters
    ----------
    d_in, d_h
        Input and output width; also by ``input_size`` and ``hidden_size``.
    bias
        Whether the three input heads have biases.
    learnable_h0
        Whether the start is a trained vector, at first 0.
    coupled
        Whether the transition is ``(1 − z) tanh(W_s x)`` instead: the gate then also forgets. The
        parameters are the same.
    decay, decay_rate, log1p_delta
        Time-aware decay; see :class:`~pararnn.cells.mixer.Mixer`.
    device, dtype
        As for :class:`torch.nn.Linear`.

    Raises
    ------
    TypeError, ValueError
        If a width is missing or not positive, or an argument of the decay is none; in a call, if
        there is a ``dt`` without a decay or a decay without one.

    References
    ----------
    Feng et al., arXiv:2410.01201; Grazzi et al., arXiv:2411.12537.
    """

    def __init__(
        self,
        d_in: int | None = None,
        d_h: int | None = None,
        bias: bool = True,
        *,
        learnable_h0: bool = False,
        coupled: bool = False,
        **kwargs: Any,
    ):
        self.coupled = checks.flag("coupled", coupled)
        self.learnable_h0 = checks.flag("learnable_h0", learnable_h0)
        super().__init__(d_in, d_h, bias, **kwargs)
        self.starts_at_zero = not learnable_h0  # type: ignore[misc]
        self.h0: nn.Parameter | None = None
        if learnable_h0:
            self.h0 = nn.Parameter(self._like.new_zeros(self.d_h))

    def make_spec(self) -> Spec:
        return signed_min_gru_spec(self.coupled, self.decay, self.log1p_delta)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if getattr(self, "h0", None) is not None:
            nn.init.zeros_(self.h0)  # type: ignore[arg-type]

    def init_state(self, *batch: int) -> Tensor:
        """The zero state, or ``h0`` if that is learned."""
        if self.h0 is None:
            return super().init_state(*batch)
        checks.batch(batch)
        return self.h0.to(self.state_dtype).expand(*batch, -1)

    def recurrence(self, h: Tensor, *given: Tensor) -> Tensor:
        (u_z, v, u_s), gamma = self.apart(given)
        turn = torch.tanh(u_s)
        if self.coupled:
            turn = torch.sigmoid(-u_z) * turn
        return gamma * turn * h + torch.sigmoid(u_z) * v

    def hyperparameters(self) -> dict[str, Any]:
        own = {"learnable_h0": self.learnable_h0, "coupled": self.coupled}
        return super().hyperparameters() | own
