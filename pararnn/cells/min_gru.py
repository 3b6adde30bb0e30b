"""MinGRU: a gated recurrence that is linear in its state, which stays positive."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from .. import _checks as checks
from ..spec import Spec, positive, sigmoid
from .mixer import Mixer, decay_stage, faded


@cache
def min_gru_spec(decay: str | None, log1p_delta: bool) -> Spec:
    """Feng et al., arXiv:2410.01201, in its log-space form, written in the state itself."""
    with Spec("MinGRU" if decay is None else "MinGRU[decay]") as s:
        h = s.state("h", bounds=(0, float("inf")))
        u_z, u_h = s.drives("u_z u_h")
        gamma = decay_stage(s, decay, log1p_delta)
        z = s.let("z", sigmoid(u_z))
        k = s.let("k", sigmoid(-u_z))
        n = s.let("n", positive(u_h), latex=r"\tilde{h}")
        s.next(h, faded(gamma, k) * h + z * n)
    return s


def candidate(x: Tensor) -> Tensor:
    """``g(x)``: ``x + 1/2`` for ``x ≥ 0``, ``σ(x)`` below; the gradient at 0 is 1."""
    return torch.where(x >= 0, x + 0.5, torch.sigmoid(x))


class PositiveMixer(Mixer):
    """What MinGRU and MinLSTM share: positive states, and a start of 1/2 or ``g(h0_pre)``.

    A given start with a negative entry or a NaN is a ``ValueError``; elsewhere than on the CPU,
    where looking would mean waiting, an assertion of the device. A state that is given to a single
    step may have a NaN, of a step before; on the CPU a negative entry is a ``ValueError``.
    """

    starts_at_zero = False

    def __init__(
        self,
        d_in: int | None = None,
        d_h: int | None = None,
        bias: bool = True,
        *,
        learnable_h0: bool = False,
        **kwargs: Any,
    ):
        self.learnable_h0 = checks.flag("learnable_h0", learnable_h0)
        super().__init__(d_in, d_h, bias, **kwargs)
        self.h0_pre: nn.Parameter | None = None
        if learnable_h0:
            self.h0_pre = nn.Parameter(self._like.new_zeros(self.d_h))

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if getattr(self, "h0_pre", None) is not None:
            nn.init.zeros_(self.h0_pre)  # type: ignore[arg-type]

    def init_state(self, *batch: int) -> Tensor:
        """1/2 everywhere, or ``g(h0_pre)`` if that is learned."""
        if self.h0_pre is None:
            return super().init_state(*batch) + 0.5
        checks.batch(batch)
        return candidate(self.h0_pre.to(self.state_dtype)).expand(*batch, -1)

    def check_start(self, name: str, h: Tensor) -> None:
        message = f"{name}: got a negative entry or a NaN, expected a state: no entry below 0."
        allowed = (h >= 0).all()
        if not checks.readable(h):
            torch._assert_async(allowed, message)
        elif not bool(allowed):
            raise ValueError(message)

    def check_state(self, name: str, h: Tensor) -> None:
        if checks.readable(h) and bool((h < 0).any()):
            raise ValueError(f"{name}: got a negative entry, expected a state: no entry below 0.")

    def hyperparameters(self) -> dict[str, Any]:
        return super().hyperparameters() | {"learnable_h0": self.learnable_h0}


class MinGRU(PositiveMixer):
    """Minimal GRU with positive states: ``h_t = (1 − z_t) h_{t−1} + z_t g(W_h x_t + b_h)``.

    Parameters
    ----------
    d_in, d_h
        Input and output width; also by ``input_size`` and ``hidden_size``.
    bias
        Whether the two input heads have biases.
    learnable_h0
        Whether the start is ``g`` of a trained vector (at first 1/2, as without).
    decay, decay_rate, log1p_delta
        Time-aware decay; see :class:`~pararnn.cells.mixer.Mixer`.
    device, dtype
        As for :class:`torch.nn.Linear`.

    Raises
    ------
    TypeError, ValueError
        If a width is missing or not positive, or an argument of the decay is none; in a call, if
        ``h0`` has an entry below 0 or a NaN, or there is a ``dt`` without a decay or a decay
        without one.

    References
    ----------
    Feng et al., Were RNNs All We Needed?, arXiv:2410.01201.
    """

    def make_spec(self) -> Spec:
        return min_gru_spec(self.decay, self.log1p_delta)

    def recurrence(self, h: Tensor, *given: Tensor) -> Tensor:
        (u_z, u_h), gamma = self.apart(given)
        return torch.sigmoid(-u_z) * gamma * h + torch.sigmoid(u_z) * candidate(u_h)
