"""How far blocks are from the recurrence that they approximate, as a term of the loss."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pararnn import checks

from .dynamics import DRMDynamics


@dataclass(frozen=True)
class Blocks:
    """Blocks of a run, and what it takes to run them again by the recurrence.

    Attributes
    ----------
    dynamics : DRMDynamics
        Of the model, with a transition.
    start : Tensor
        State before each block, ``(B, N, d_state)``.
    base : Tensor
        Base states, ``(B, T, d_state)``.
    e : Tensor
        Embeddings, ``(B, T, d_token)``.
    strength : float
        Of naturalization.
    length : int
        Tokens of a block, ≥ 1; the last one may be shorter.
    """

    dynamics: DRMDynamics
    start: Tensor
    base: Tensor
    e: Tensor
    strength: float
    length: int

    def sampled(self, every: int = 1, length: int = 0) -> tuple[Tensor, Tensor]:
        r"""Base states of some tokens, and those of the recurrence.

        The recurrence starts where the block does and runs over the first tokens of the block, with
        geometry at every state. Blocks run beside each other, so the cost is ``length`` steps of
        ``B·N/every`` states. In training with dropout, its masks are others than those of the block.

        Parameters
        ----------
        every
            Of so many blocks, the first is taken.
        length
            Tokens of a block that are taken; 0: all of them.

        Returns
        -------
        base, exact
            Both ``(B, M, d_state)`` for M tokens in their order; ``exact`` has no gradient.

        Raises
        ------
        TypeError, ValueError
            If ``every`` is no integer ≥ 1, or ``length`` none ≥ 0.
        """
        checks.positive("every", every)
        length = min(checks.whole("length", length) or self.length, self.length)
        total = self.e.shape[1]
        first = torch.arange(0, total, every * self.length, device=self.e.device)
        at = first.unsqueeze(1) + torch.arange(length, device=self.e.device)
        there = at < total  # the last block may be shorter
        tokens = self.e[:, at.clamp(max=total - 1)]
        with torch.no_grad():
            z, states = self.start[:, ::every], []
            for token in tokens.unbind(2):
                z = self.dynamics.step(z, token, self.strength)
                states.append(z)
            exact = torch.stack(states, 2)[:, there]
        return self.base[:, at[there]], exact
