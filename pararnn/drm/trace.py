"""What a run of the model leaves for losses and diagnostics."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Trace:
    """Velocities and the geometry behind them; what a model lacks is None.

    The geometry of a block serves all its steps and is kept once: there are ``N`` points of
    geometry for ``T`` steps, ``N`` the number of blocks, or ``T`` in the recurrent path.

    Attributes
    ----------
    steps
        ``(N,)`` int64: how many steps each point served. Their sum is ``T``.
    velocity
        Applied velocities, ``(B, T, d)``.
    gates
        ``(B, N, n)``, in [0, 1].
    diagonal
        ``D`` of the metric, ``(B, N, d)``.
    factor
        ``U`` of the metric, ``(B, N, d, r)``.
    risk
        Risk mass, ``(B, N)``.

    Raises
    ------
    TypeError, ValueError
        If shapes do not fit each other.
    """

    steps: Tensor
    velocity: Tensor | None = None
    gates: Tensor | None = None
    diagonal: Tensor | None = None
    factor: Tensor | None = None
    risk: Tensor | None = None

    def __post_init__(self) -> None:
        if self.steps.dtype != torch.int64:
            raise TypeError(f"Trace: steps: got {self.steps.dtype}, expected torch.int64.")
        if self.steps.ndim != 1:
            raise ValueError(
                f"Trace: steps: got shape {tuple(self.steps.shape)}, expected (N,), one count a "
                "point of geometry."
            )
        points = self.steps.shape[0]
        for what, ndim in (("gates", 3), ("diagonal", 3), ("factor", 4), ("risk", 2)):
            value = getattr(self, what)
            if value is not None and (value.ndim != ndim or value.shape[1] != points):
                raise ValueError(
                    f"Trace: {what}: got shape {tuple(value.shape)}, expected {ndim} dimensions, "
                    f"the second of them N = {points}."
                )

    def energy(self) -> Tensor:
        r"""Energy of the velocities, :math:`v^\top (G + \rho I) v`, ``(B, T)``; without a metric
        :math:`\lVert v\rVert^2`.

        Raises
        ------
        ValueError
            If there are no velocities.
        """
        if self.velocity is None:
            raise ValueError(
                "Trace: got no velocities, expected a model that has them; this one has no base "
                "dynamics."
            )
        counts = self.steps.tolist()
        if counts == [1] * len(counts):  # one point a step
            return self._energy(self.velocity.unsqueeze(2), slice(None)).squeeze(2)
        parts = self.velocity.split(counts, 1)
        return torch.cat(
            [self._energy(v.unsqueeze(1), slice(i, i + 1))[:, 0] for i, v in enumerate(parts)], 1
        )

    def _energy(self, v: Tensor, at: slice) -> Tensor:
        """Energy of ``v (B, N, L, d)`` at points of geometry: ``(B, N, L)``."""
        if self.diagonal is None:
            return v.square().sum(-1)
        energy = (v.square() @ self.diagonal[:, at].unsqueeze(-1)).squeeze(-1)
        if self.factor is not None and self.factor.shape[-1]:
            energy = energy + (v @ self.factor[:, at]).square().sum(-1)
        if self.risk is not None:
            energy = energy + self.risk[:, at].unsqueeze(-1) * v.square().sum(-1)
        return energy
