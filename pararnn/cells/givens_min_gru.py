"""GivensMinGRU: blocks that the input turns by several rounds of plane rotations."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from .. import _checks as checks
from ..spec import Spec, cos, sigmoid, sin
from .mixer import decay_stage
from .rotation_min_gru import LearnedStart


def brick_wall(block_size: int, rounds: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Pairs of every round: (0, 1), (2, 3), … in even ones, (1, 2), …, (k − 1, 0) in odd ones."""
    return tuple(
        tuple((i, (i + 1) % block_size) for i in range(r % 2, block_size, 2)) for r in range(rounds)
    )


@cache
def givens_spec(block_size: int, rounds: int, decay: str | None, log1p_delta: bool) -> Spec:
    """``h' = G_R … G_1 h + σ(z) v`` in every block, each ``G`` a set of plane rotations."""
    label = f"{block_size}, {rounds}" + (", decay" if decay else "")
    with Spec(f"GivensMinGRU[{label}]", axes=("n",), output="all") as s:
        h = [s.state(f"h_{i}") for i in range(block_size)]
        walls = brick_wall(block_size, rounds)
        angles = iter(
            s.drives([f"theta_{q}" for q in range(rounds * block_size // 2)], inline=False)
        )
        u = s.drives([f"u_z{i}" for i in range(block_size)])
        v = s.drives([f"v_{i}" for i in range(block_size)])
        gamma = decay_stage(s, decay, log1p_delta)
        turned = list(h)
        for r, pairs in enumerate(walls, 1):
            before = list(turned)
            for i, j in pairs:
                angle = next(angles)
                c, b = cos(angle), sin(angle)
                turned[i] = s.let(
                    f"g_{r}_{i}", c * before[i] - b * before[j], latex=f"g_{{{r},{i}}}", node=True
                )
                turned[j] = s.let(
                    f"g_{r}_{j}", b * before[i] + c * before[j], latex=f"g_{{{r},{j}}}", node=True
                )
        for i in range(block_size):
            moved = turned[i] if gamma == 1 else gamma * turned[i]
            s.next(h[i], moved + sigmoid(u[i]) * v[i])
    return s


class GivensMinGRU(LearnedStart):
    """Minimal GRU over blocks: ``h_t = G_{R} ⋯ G_{1} h_{t−1} + z_t ⊙ (W_h x_t)``.

    Every round ``G_r`` turns ``block_size / 2`` planes of a block, each by an angle of its own,
    ``W_θ x_t``; the planes of odd rounds are shifted by one, so that rounds mix the whole block.
    Slot ``i`` holds the ``i``-th number of every block, and the output is slot after slot.

    Parameters
    ----------
    d_in, d_h
        Input and output width; also by ``input_size`` and ``hidden_size``. ``d_h`` is a multiple
        of ``block_size``.
    bias
        Whether the input heads have biases.
    block_size
        Width of a block; even.
    rounds
        Number of rounds.
    decay, decay_rate, log1p_delta
        Time-aware decay, one rate a block; see :class:`~pararnn.cells.mixer.Mixer`.
    device, dtype
        As for :class:`torch.nn.Linear`.

    Raises
    ------
    TypeError, ValueError
        If a width is missing, not positive or no multiple of ``block_size``, ``block_size`` is not
        even and positive, ``rounds`` is not positive, or an argument of the decay is none; in a
        call, if there is a ``dt`` without a decay or a decay without one.

    References
    ----------
    Feng et al., arXiv:2410.01201; Jing et al., arXiv:1612.05231.
    """

    @property
    def orthogonal(self) -> bool:
        """Whether the transition keeps norms: without a decay it does."""
        return self.decay is None

    def __init__(
        self,
        d_in: int | None = None,
        d_h: int | None = None,
        bias: bool = True,
        *,
        block_size: int = 8,
        rounds: int = 3,
        hidden_size: int | None = None,
        **kwargs: Any,
    ):
        width = checks.either("d_h", d_h, "hidden_size", hidden_size)
        checks.positive("rounds", rounds)
        if checks.positive("block_size", block_size) % 2:
            raise ValueError(f"block_size: got {block_size}, expected an even number.")
        if width % block_size:
            raise ValueError(
                f"d_h: got {width}, expected a multiple of block_size={block_size}; choose one of "
                "them so that d_h % block_size == 0."
            )
        self.block_size, self.rounds = block_size, rounds
        super().__init__(d_in, bias=bias, sizes={"n": width // block_size}, **kwargs)

    def make_spec(self) -> Spec:
        return givens_spec(self.block_size, self.rounds, self.decay, self.log1p_delta)

    def recurrence(self, *given: Tensor) -> tuple[Tensor, ...]:
        k = self.block_size
        drives, gamma = self.apart(given[k:])
        angles = torch.stack(drives[: -2 * k])
        h = torch.stack(given[:k])
        for r in range(self.rounds):
            # Rolled by one in odd rounds, neighbours are always (0, 1), (2, 3), …
            pairs = torch.roll(h, -(r % 2), 0).unflatten(0, (k // 2, 2))
            theta = angles[r * k // 2 : (r + 1) * k // 2]
            c, s = torch.cos(theta), torch.sin(theta)
            first, second = pairs[:, 0], pairs[:, 1]
            turned = torch.stack([c * first - s * second, s * first + c * second], 1)
            h = torch.roll(turned.flatten(0, 1), r % 2, 0)
        gate, candidate = torch.stack(drives[-2 * k : -k]), torch.stack(drives[-k:])
        return (gamma * h + torch.sigmoid(gate) * candidate).unbind(0)

    def hyperparameters(self) -> dict[str, Any]:
        own = {"block_size": self.block_size, "rounds": self.rounds}
        return super().hyperparameters() | own
