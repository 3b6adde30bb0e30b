"""A direct way from the token into the state (notes, section 8)."""

from __future__ import annotations

from torch import Tensor, nn

from pararnn import checks


class TokenStateResidual(nn.Module):
    r"""\(z'_t = \bar z_t + \eta\, W e_t\), without bias.

    Parameters
    ----------
    d_state, d_token
        Widths.
    scale
        \(\eta\).

    Raises
    ------
    TypeError, ValueError
        If a width is not a positive integer.
    """

    def __init__(self, d_state: int, d_token: int, *, scale: float = 0.1):
        super().__init__()
        self.d_state = checks.positive("d_state", d_state)
        self.d_token = checks.positive("d_token", d_token)
        self.scale = scale
        self.proj = nn.Linear(d_token, d_state, bias=False)

    def forward(self, states: Tensor, e: Tensor) -> Tensor:
        """``(..., d_state)`` of states of this shape and embeddings ``(..., d_token)``.

        Raises
        ------
        TypeError, ValueError
            If a shape or dtype does not fit.
        """
        name = type(self).__name__
        checks.shaped(f"{name}: states", states, (self.d_state,))
        checks.shaped(
            f"{name}: e",
            e,
            (*states.shape[:-1], self.d_token),
            0,
        )
        moved: Tensor = states + self.scale * self.proj(e)
        return moved

    def extra_repr(self) -> str:
        return f"scale={self.scale}"
