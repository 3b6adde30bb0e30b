"""RotationMinGRU: planes that the input turns by angles of a finite grid, and stretches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from .. import _checks as checks
from ..spec import Spec, cos, sigmoid, sin, snap_angle, tanh
from .mixer import Mixer, decay_stage, faded

SNAP = (2, 3, 4, 6)


@cache
def rotation_spec(snapped: bool, decay: str | None, log1p_delta: bool) -> Spec:
    """``h' = R(θ) diag(1, d) h + σ(z) v`` in every plane, with ``θ`` on a grid if ``snapped``."""
    label = ", ".join(filter(None, ("" if snapped else "free", "decay" if decay else "")))
    name = "RotationMinGRU" + (f"[{label}]" if label else "")
    with Spec(name, axes=("n",), output="all") as s:
        x, y = s.state("h_x"), s.state("h_y")
        u_zx, u_zy, v_x, v_y = s.drives("u_zx u_zy v_x v_y")
        u_theta, u_d = s.drives("u_theta u_d")
        m = s.constants("m")[0] if snapped else None
        gamma = decay_stage(s, decay, log1p_delta)
        theta = s.let("theta", snap_angle(u_theta, m) if snapped else u_theta)
        c, b = s.let("c", cos(theta)), s.let("s", sin(theta))
        d = s.let("d", tanh(u_d))
        z_x, z_y = s.let("z_x", sigmoid(u_zx)), s.let("z_y", sigmoid(u_zy))
        s.next(x, faded(gamma, c * x - b * (d * y)) + z_x * v_x)
        s.next(y, faded(gamma, b * x + c * (d * y)) + z_y * v_y)
    return s


class LearnedStart(Mixer):
    """What RotationMinGRU and GivensMinGRU share: a learned start ``h0``, at first normal with
    standard deviation 1/2."""

    starts_at_zero = False

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.h0 = nn.Parameter(self._like.new_empty(self.state_shape))
        self.reset_start()

    def reset_start(self) -> None:
        nn.init.normal_(self.h0, std=0.5)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if hasattr(self, "h0"):
            self.reset_start()

    def init_state(self, *batch: int) -> Tensor:
        """The learned start ``h0``."""
        checks.batch(batch)
        return self.h0.to(self.state_dtype).expand(*batch, *self.state_shape)


class RotationMinGRU(LearnedStart):
    """Minimal GRU over planes: ``h_t = R(θ_t) diag(1, d_t) h_{t−1} + z_t ⊙ (W_h x_t)``.

    The state of a plane has two numbers; slot 0 holds all first ones, slot 1 all second ones, and
    the output is slot 0, then slot 1.

    Parameters
    ----------
    d_in, d_h
        Input and output width; also by ``input_size`` and ``hidden_size``. ``d_h`` is even.
    bias
        Whether the input heads have biases.
    snap
        Orders of rotation: plane ``j`` turns by multiples of ``2π/snap[j mod len(snap)]``, the
        nearest one, and gradients pass the rounding straight through. None: any angle.
    decay, decay_rate, log1p_delta
        Time-aware decay, one rate a plane; see :class:`~pararnn.cells.mixer.Mixer`.
    device, dtype
        As for :class:`torch.nn.Linear`.

    Raises
    ------
    TypeError, ValueError
        If a width is missing, not positive or odd, ``snap`` is neither None nor a non-empty
        sequence of positive integers, or an argument of the decay is none; in a call, if there is
        a ``dt`` without a decay or a decay without one.

    References
    ----------
    Feng et al., arXiv:2410.01201; Bengio et al., arXiv:1308.3432 (straight-through estimator).
    """

    def __init__(
        self,
        d_in: int | None = None,
        d_h: int | None = None,
        bias: bool = True,
        *,
        snap: Sequence[int] | None = SNAP,
        hidden_size: int | None = None,
        **kwargs: Any,
    ):
        width = checks.either("d_h", d_h, "hidden_size", hidden_size)
        if width % 2:
            raise ValueError(f"d_h: got {width}, expected an even number: two a plane.")
        self.snap = None if snap is None else orders(snap)
        self._planes = width // 2
        super().__init__(d_in, bias=bias, sizes={"n": self._planes}, **kwargs)

    def make_spec(self) -> Spec:
        return rotation_spec(self.snap is not None, self.decay, self.log1p_delta)

    def constants(self) -> dict[str, Any]:
        if self.snap is None:
            return super().constants()
        grid = [self.snap[j % len(self.snap)] for j in range(self._planes)]
        return {"m": grid} | super().constants()

    def recurrence(self, x: Tensor, y: Tensor, *given: Tensor) -> tuple[Tensor, Tensor]:
        (u_zx, u_zy, v_x, v_y, angle, u_d, *grid), gamma = self.apart(given)
        if grid:
            # Whole turns are taken off while counting, which is exact in float64.
            order = grid[0].double()
            count = torch.round(angle.detach().double() / (2 * math.pi / order))
            count = count - order * torch.round(count / order)
            near = (count * (2 * math.pi / order)).to(angle.dtype)
            angle = near + (angle - angle.detach())  # exactly on the grid, with derivative 1
        turn = torch.polar(torch.ones_like(angle), angle)
        moved = gamma * turn * torch.complex(x, torch.tanh(u_d) * y)
        return (
            moved.real + torch.sigmoid(u_zx) * v_x,
            moved.imag + torch.sigmoid(u_zy) * v_y,
        )

    def hyperparameters(self) -> dict[str, Any]:
        return super().hyperparameters() | {"snap": self.snap}


def orders(snap: object) -> tuple[int, ...]:
    """``snap`` as a tuple of positive integers."""
    if isinstance(snap, str) or not isinstance(snap, Sequence):
        raise TypeError(
            f"snap: got {snap!r} ({type(snap).__name__}), expected None or a sequence of positive "
            "integers, such as (2, 3, 4, 6)."
        )
    if not snap:
        raise ValueError("snap: got no orders, expected at least one, or None for any angle.")
    return tuple(checks.positive("snap", m) for m in snap)
