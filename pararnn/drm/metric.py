"""The relational metric: a diagonal plus a matrix of low rank (notes, section 4)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pararnn import checks

from .bound import fits_dtype
from .networks import rows, trunk

BASIS_SPREAD = 0.02
SMALLEST = 1e-8


@dataclass(frozen=True)
class Metric:
    r"""\(G = \mathrm{diag}(D) + U U^\top\) for states of leading shape ``(...)``.

    \(D > 0\), so G is positive definite and its exact rank is d, whatever the width r of U.

    Attributes
    ----------
    diagonal : Tensor
        D, ``(..., d)``.
    factor : Tensor
        U, ``(..., d, r)``.

    Raises
    ------
    TypeError, ValueError
        If they are not floating-point tensors of these shapes; on the CPU also if a number of D is
        not above 0. A NaN is let through and stays with its state.
    """

    diagonal: Tensor
    factor: Tensor

    def __post_init__(self) -> None:
        checks.floating("diagonal", self.diagonal)
        checks.floating("factor", self.factor)
        if self.factor.shape[:-1] != self.diagonal.shape:
            raise ValueError(
                f"factor: got shape {tuple(self.factor.shape)}, expected "
                f"({', '.join([*map(str, self.diagonal.shape), 'r'])}), r columns for the diagonal "
                "that was given."
            )
        d = self.diagonal.detach()
        if checks.readable(d) and bool((d <= 0).any()):
            raise ValueError(
                f"diagonal: got {float(d[d <= 0].min()):.3g}, expected numbers > 0, which "
                "keep the metric positive definite; take softplus(…) + eps."
            )

    def _rows(self, name: str, value: Tensor) -> Tensor:
        return rows(name, value, self.diagonal.shape[:-1], self.diagonal.shape[-1])

    def energy(self, v: Tensor, risk: Tensor | None = None) -> Tensor:
        r"""\(v^\top (G + \rho I)\, v = v^\top D v + \rho\lVert v\rVert^2 + \lVert U^\top v\rVert^2\).

        Parameters
        ----------
        v
            Velocities ``(..., m, d)``.
        risk
            \(\rho\), ``(...)``; none adds nothing.

        Returns
        -------
        Tensor
            ``(..., m)``, not negative.
        """
        self._rows("v", v)
        d = self.diagonal
        if risk is not None:
            if risk.shape != d.shape[:-1]:
                raise ValueError(
                    f"risk: got shape {tuple(risk.shape)}, expected {tuple(d.shape[:-1])}."
                )
            d = d + risk.unsqueeze(-1)
        return (d.unsqueeze(-2) * v.square()).sum(-1) + (v @ self.factor).square().sum(-1)

    def coupling(self, vectors: Tensor) -> Tensor:
        r"""\(C_{ij} = V_i^\top G V_j\), ``(..., n, n)``, of vectors ``(..., n, d)``."""
        self._rows("vectors", vectors)
        low = vectors @ self.factor
        return (vectors * self.diagonal.unsqueeze(-2)) @ vectors.mT + low @ low.mT

    def dense(self) -> Tensor:
        """G as a matrix, ``(..., d, d)``."""
        return torch.diag_embed(self.diagonal) + self.factor @ self.factor.mT

    def condition_bound(self) -> Tensor:
        r"""\((\max D + \lVert U\rVert_F^2) / \min D\), ``(...)``: an upper bound of the condition
        number of G, often far above it. \(\min D\) is taken as at least 1e-8."""
        top = self.diagonal.amax(-1) + self.factor.square().sum((-2, -1))
        return top / self.diagonal.amin(-1).clamp(min=SMALLEST)

    def numerical_rank(self, tolerance: float) -> Tensor:
        r"""A diagnostic, not the rank: how many eigenvalues exceed ``tolerance`` times the largest.

        The exact rank of G is d. O(d³).
        """
        if not 0 < tolerance < 1:
            raise ValueError(f"tolerance: got {tolerance}, expected a number between 0 and 1.")
        eigenvalues = torch.linalg.eigvalsh(self.dense())
        return (eigenvalues > tolerance * eigenvalues[..., -1:]).sum(-1)


class RelationalMetric(nn.Module):
    r"""\(G(z) = D(z) + U(z)U(z)^\top\) with \(D = \mathrm{softplus}(d(z)) + \epsilon\).

    U is a linear map of the trunk divided by \(\sqrt r\), or with ``basis=q`` combinations of q
    learned vectors, so that its columns stay in one q-dimensional space.

    Parameters
    ----------
    d_state, hidden
        Widths.
    rank
        Columns r of U; 0 leaves a diagonal metric.
    basis
        q, 0 for none.
    eps
        \(\epsilon > 0\), the floor of D. With 0 the rank of G could fall below d.
    dropout
        Probability of dropout in the trunk, in training.

    Raises
    ------
    TypeError, ValueError
        If a size is not a positive integer, or ``eps`` is not above 0.
    """

    def __init__(
        self,
        d_state: int,
        rank: int,
        hidden: int,
        *,
        basis: int = 0,
        eps: float = 1e-4,
        dropout: float = 0.0,
    ):
        super().__init__()
        self.d_state = checks.positive("d_state", d_state)
        if not eps > 0:
            raise ValueError(f"eps: got {eps}, expected a number > 0, which keeps the rank at d.")
        self.rank = rank if rank == 0 else checks.positive("rank", rank)
        self.eps = eps
        self.trunk = trunk(d_state, checks.positive("hidden", hidden), dropout)
        self.diagonal_head = nn.Linear(hidden, d_state)
        self.basis: nn.Parameter | None = None
        if rank and basis:
            self.basis = nn.Parameter(
                BASIS_SPREAD * torch.randn(checks.positive("basis", basis), d_state)
            )
        self.factor_head = nn.Linear(hidden, rank * (basis or d_state)) if rank else None

    def forward(self, z: Tensor) -> Metric:
        """The metric at states ``z (..., d_state)``.

        Raises
        ------
        TypeError, ValueError
            If ``z`` is not a floating-point tensor of this width, or its dtype has no normal number
            ``eps``.
        """
        name = "RelationalMetric: z"
        checks.shaped(name, z, (self.d_state,))
        g = self.trunk(z)
        diagonal = F.softplus(self.diagonal_head(g))
        diagonal = diagonal + fits_dtype("metric_eps", self.eps, diagonal.dtype)
        if self.factor_head is None:
            return Metric(diagonal, diagonal.new_empty(*diagonal.shape, 0))
        if self.basis is None:
            factor = self.factor_head(g).unflatten(-1, (self.d_state, self.rank))
        else:
            factor = (self.factor_head(g).unflatten(-1, (self.rank, -1)) @ self.basis).mT
        return Metric(diagonal, factor / self.rank**0.5)
