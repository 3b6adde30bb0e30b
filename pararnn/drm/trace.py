"""What a run of the model leaves for losses and diagnostics."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .metric import Metric


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
    diagonal, factor
        ``D`` and ``U`` of the metric, ``(B, N, d)`` and ``(B, N, d, r)``: both, or neither.
    risk
        Risk mass, ``(B, N)``.
    metric_frozen
        Whether there is a metric of which no parameter is trained.

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
    metric_frozen: bool = False

    def __post_init__(self) -> None:
        if self.steps.dtype != torch.int64:
            raise TypeError(f"Trace: steps: got {self.steps.dtype}, expected torch.int64.")
        if self.steps.ndim != 1:
            raise ValueError(
                f"Trace: steps: got shape {tuple(self.steps.shape)}, expected (N,), one count a "
                "point of geometry."
            )
        if (self.diagonal is None) != (self.factor is None):
            raise ValueError(
                "Trace: got one of diagonal and factor, expected both or neither; a diagonal metric "
                "has a factor with r = 0."
            )
        points = self.steps.shape[0]
        for what, ndim in (("gates", 3), ("diagonal", 3), ("factor", 4), ("risk", 2)):
            value = getattr(self, what)
            if value is not None and (value.ndim != ndim or value.shape[1] != points):
                raise ValueError(
                    f"Trace: {what}: got shape {tuple(value.shape)}, expected {ndim} dimensions, "
                    f"the second of them N = {points}."
                )

    def metric(self, start: int | None = None, stop: int | None = None) -> Metric | None:
        """The metric at all points of geometry, or from ``start`` to before ``stop``."""
        if self.diagonal is None or self.factor is None:
            return None
        return Metric(self.diagonal[:, start:stop], self.factor[:, start:stop])

    def energy(self) -> Tensor:
        r"""Energy of the velocities, \(v^\top (G + \rho I) v\), ``(B, T)``; without a metric
        \(\lVert v\rVert^2\).

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
        if self.diagonal is None:
            return self.velocity.square().sum(-1)
        counts = self.steps.tolist()
        if counts == [1] * len(counts):  # one point a step
            return self._energy(self.velocity.unsqueeze(2), None, None).squeeze(2)
        parts = self.velocity.split(counts, 1)
        return torch.cat(
            [self._energy(v.unsqueeze(1), i, i + 1)[:, 0] for i, v in enumerate(parts)], 1
        )

    def _energy(self, v: Tensor, start: int | None, stop: int | None) -> Tensor:
        """Energy of ``v (B, N, L, d)`` at some points of geometry: ``(B, N, L)``."""
        metric = self.metric(start, stop)
        if metric is None:
            raise ValueError("Trace: got no metric, expected one.")
        return metric.energy(v, None if self.risk is None else self.risk[:, start:stop])
