"""Directions and their gates, from the state (notes, section 2)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pararnn import checks

from .networks import rows, trunk

BASIS_SPREAD = 0.02


@dataclass(frozen=True)
class Directions:
    r"""Directions of states of leading shape ``(...)``.

    Attributes
    ----------
    vectors : Tensor
        \(V_i\), ``(..., n, d_state)``; neither orthogonal nor independent in general.
    gates : Tensor
        \(a_i \in [0, 1]\), ``(..., n)``.
    """

    vectors: Tensor
    gates: Tensor

    @property
    def mass(self) -> Tensor:
        r"""\(\mathrm{dimD} = \sum_i a_i\), ``(...)``: how much gate is open. It is not a rank."""
        return self.gates.sum(-1)

    def weights(self, coefficients: Tensor) -> Tensor:
        r"""\(\kappa_i = a_i c_i\), for coefficients ``(..., m, n)``."""
        rows("coefficients", coefficients, self.gates.shape[:-1], self.gates.shape[-1])
        return self.gates.unsqueeze(-2) * coefficients

    def velocity(self, coefficients: Tensor) -> Tensor:
        r"""\(v^{raw} = \sum_i a_i c_i V_i\), ``(..., m, d_state)``, in the span of the directions
        (section 3)."""
        return self.weights(coefficients) @ self.vectors


class DirectionField(nn.Module):
    r"""\(n\) directions \(V_i(z)\) and soft gates \(a_i(z)\).

    With the trunk \(g(z) = \mathrm{GELU}(A_2\,\mathrm{GELU}(A_1 z))\), directions are a linear map of
    \(g\), or with ``basis=q`` combinations \(B(g)\,\Phi\) of q learned vectors: these never leave
    the row space of \(\Phi\). Gates are \(\sigma((\mathrm{head}(g) + \text{bias})/\tau)\).

    Parameters
    ----------
    d_state, n_directions, hidden
        Widths.
    basis
        q, 0 for none.
    normalize
        Divide each direction by its Euclidean norm, at least ``floor``, or the smallest normal number
        of the dtype. No row overflows or underflows on the way. The gradient of a row is divided by
        its norm too, so ``floor`` bounds how much it grows where a direction vanishes.
    floor
        > 0; shorter directions stay shorter than 1.
    temperature, logit_bias
        \(\tau\) and the bias of the gates.
    top_k, top_k_renormalize
        Keep the k largest gates and make the rest 0, rescaling them to the former sum if asked,
        unless their own underflows. 0 keeps all. Of equal gates the first are kept; where the choice
        changes, gates jump, and gradients are those of the gates that are kept.
    dropout
        Probability of dropout in the trunk, in training.

    Raises
    ------
    TypeError, ValueError
        If a size is not a positive integer, ``top_k`` is larger than ``n_directions``, or ``floor``
        or ``temperature`` is not above 0.
    """

    def __init__(
        self,
        d_state: int,
        n_directions: int,
        hidden: int,
        *,
        basis: int = 0,
        normalize: bool = True,
        floor: float = 1e-12,
        temperature: float = 1.5,
        logit_bias: float = -1.0,
        top_k: int = 0,
        top_k_renormalize: bool = False,
        dropout: float = 0.0,
    ):
        super().__init__()
        self.d_state = checks.positive("d_state", d_state)
        self.n_directions = checks.positive("n_directions", n_directions)
        if not 0 <= top_k <= n_directions:
            raise ValueError(f"top_k: got {top_k}, expected 0 to n_directions={n_directions}.")
        if not temperature > 0:
            raise ValueError(f"temperature: got {temperature}, expected a number > 0.")
        if not floor > 0:
            raise ValueError(f"floor: got {floor}, expected a number > 0, which divides.")
        self.normalize, self.floor = normalize, floor
        self.temperature, self.logit_bias = temperature, logit_bias
        self.top_k, self.top_k_renormalize = top_k, top_k_renormalize
        self.trunk = trunk(d_state, checks.positive("hidden", hidden), dropout)
        self.basis: nn.Parameter | None = None
        if basis:
            self.basis = nn.Parameter(
                BASIS_SPREAD * torch.randn(checks.positive("basis", basis), d_state)
            )
        self.heads = nn.Linear(hidden, n_directions * (basis or d_state))
        self.gate_head = nn.Linear(hidden, n_directions)

    def forward(self, z: Tensor) -> Directions:
        """Directions of states ``z (..., d_state)``.

        Raises
        ------
        TypeError, ValueError
            If ``z`` is not a floating-point tensor of this width.
        """
        checks.shaped("DirectionField: z", z, (self.d_state,))
        g = self.trunk(z)
        vectors = self.heads(g).unflatten(-1, (self.n_directions, -1))
        if self.basis is not None:
            vectors = vectors @ self.basis
        if self.normalize:
            vectors = self._normalized(vectors)
        gates = torch.sigmoid((self.gate_head(g) + self.logit_bias) / self.temperature)
        return Directions(vectors, self._largest(gates))

    def _normalized(self, rows: Tensor) -> Tensor:
        """``rows / max(‖row‖, floor)``, by their largest entry first: no square overflows."""
        least = max(self.floor, torch.finfo(rows.dtype).tiny)
        rows = rows / rows.detach().abs().amax(-1, keepdim=True).clamp(min=least)
        return F.normalize(rows, dim=-1, eps=1.0)

    def _largest(self, gates: Tensor) -> Tensor:
        if not self.top_k:
            return gates
        order = gates.sort(dim=-1, descending=True, stable=True).indices
        index = order[..., : self.top_k]
        kept = gates * torch.zeros_like(gates).scatter(-1, index, 1.0)
        if self.top_k_renormalize:
            share = kept.sum(-1, keepdim=True).clamp(min=torch.finfo(kept.dtype).tiny)
            kept = kept * (gates.sum(-1, keepdim=True) / share)
        return kept
