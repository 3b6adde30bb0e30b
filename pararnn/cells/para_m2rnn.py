"""ParaM2RNN: the matrix-state recurrence of M²RNN."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from .. import _checks as checks
from ..spec import Spec, sigmoid, tanh
from .cell import Cell
from .facts import Deviation, Facts, Source, Symbol
from .gates import shares


@cache
def m2rnn_spec() -> Spec:
    """Mishra et al., arXiv:2603.14360, eq. 19 and 20, with the forget gate of one linear map."""
    with Spec("ParaM2RNN", axes=("K", "V")) as s:
        H = s.state("H", bounds=(-1, 1))
        (k,) = s.drives("k", axes=("K",), inline=False)
        (v,) = s.drives("v", axes=("V",), inline=False)
        (u_f,) = s.drives("u_f", axes=())
        W = s.map("W", structure="right")
        f = s.let("f", sigmoid(u_f))
        Z = s.let("Z", tanh(W(H) + k * v))
        s.next(H, f * H + (1 - f) * Z)
    return s


class ParaM2RNN(Cell):
    """Matrix-state recurrence ``H' = f H + (1 − f) tanh(H W + k vᵀ)``.

    This is the core of M²RNN, not its block: the convolution, the SiLU, the read-out ``Hᵀq`` and
    the output gate are outside.

    Parameters
    ----------
    d_in
        Input width; also by ``input_size``.
    k_dim, v_dim
        Rows and columns of the state, shape ``(B, k_dim, v_dim)``; ``d_h = k_dim * v_dim``.
    bias, device, dtype
        As for :class:`torch.nn.Linear`.

    Raises
    ------
    TypeError, ValueError
        If a size is missing or not a positive integer.

    References
    ----------
    Mishra, Tan, Stoica, Gonzalez, Dao, M²RNN, arXiv:2603.14360, eq. 19 and 20.
    """

    W: Tensor

    def __init__(
        self,
        d_in: int | None = None,
        k_dim: int | None = None,
        v_dim: int | None = None,
        **kwargs: Any,
    ):
        self.k_dim = checks.positive("k_dim", k_dim)
        self.v_dim = checks.positive("v_dim", v_dim)
        sizes = {"K": self.k_dim, "V": self.v_dim}
        super().__init__(d_in, spec=m2rnn_spec(), sizes=sizes, **kwargs)

    def reset_parameters(self) -> None:
        """Input map as for every cell; ``W`` starts as the identity, as in the paper's code."""
        super().reset_parameters()
        nn.init.eye_(self.W)

    def recurrence(self, H: Tensor, k: Tensor, v: Tensor, u_f: Tensor, W: Tensor) -> Tensor:
        kept, written = shares(u_f[..., None, None])
        return kept * H + written * torch.tanh(H @ W + k[..., :, None] * v[..., None, :])

    def hyperparameters(self) -> dict[str, Any]:
        return {
            "d_in": self.d_in,
            "k_dim": self.k_dim,
            "v_dim": self.v_dim,
            "bias": self.has_bias,
        }

    facts = Facts(
        title="ParaM2RNN",
        slug="para_m2rnn",
        family="nonlinear",
        fidelity=("research-variant", "paper-core"),
        summary="Matrix-state recurrence with a tanh of a right multiplication; the core of "
        "M²RNN without its block.",
        sources=(
            Source(
                key="mishra2026m2rnn",
                authors="Mishra, Tan, Stoica, Gonzalez, Dao",
                title="M²RNN: Non-Linear RNNs with Matrix-Valued States for Scalable Language "
                "Modeling",
                venue="arXiv",
                year=2026,
                arxiv="2603.14360",
                equations="eq. 19 and 20 (matrix-state recurrence)",
                bibtex="""@article{mishra2026m2rnn,
  title   = {{M$^2$RNN}: Non-Linear {RNNs} with Matrix-Valued States for Scalable Language Modeling},
  author  = {Mishra, Mayank and Tan, Shawn and Stoica, Ion and Gonzalez, Joseph and Dao, Tri},
  journal = {arXiv preprint arXiv:2603.14360},
  year    = {2026},
  eprint  = {2603.14360},
  archivePrefix = {arXiv}
}""",
            ),
        ),
        symbols=(
            Symbol("x_t", "(B, d_in)", "input at step t"),
            Symbol("H_t", "(B, K, V)", "matrix state, K = k_dim, V = v_dim; flat width d_h = K V"),
            Symbol("k_t, v_t", "(B, K), (B, V)", "key and value; their outer product is written"),
            Symbol("f_t", "(B,)", "forget gate, one number a sample, broadcast over the matrix"),
            Symbol("W", "(V, V)", "right-multiply transition; starts as the identity"),
        ),
        deviations=(
            Deviation(
                "k, v and the gate logit come from one linear map of x",
                "the paper's block has a causal convolution of width 4 and SiLU before k and v",
                "this cell alone is not the paper's block",
                "equation",
            ),
            Deviation(
                "f = sigmoid(w x + b)",
                "the paper's gate is exp(-exp(A_log) softplus(x + dt_bias)), per head",
                "another gate family; still a function of the input only",
                "equation",
            ),
            Deviation(
                "No read-out H^T q, no skip w_r v, no RMSNorm, no output gate, no W_o",
                "these are feed-forward and belong to an outer block",
                "the output of the cell is the state",
                "equation",
            ),
            Deviation(
                "The gradient is the true gradient",
                "the paper's training code clips the state's gradient to [-1, 1] at every step",
                "gradients differ from the paper's wherever its clip is active",
                "gradients",
            ),
        ),
        parallel_path="Multiple shooting with a row-averaged quasi-Jacobian, a V×V right "
        "multiplication; or factorized Newton (newton_m2rnn_factorized), whose linear systems use "
        "JVPs only. The dense (KV)² Jacobian exists as an oracle.",
        numerics="States stay in [-1, 1] if they start there. Iteration counts grow with the "
        "memory of the gate: a chunk forgets its start at the rate of f.",
        notes=(
            "Do not present this cell as the full Mishra et al. block: check the paper's block "
            "diagram before claiming architecture parity. Implementing a core and calling it the "
            "architecture is a mistake that is easy to make.",
        ),
    )


def m2rnn_gates(cell: ParaM2RNN, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Key ``(..., K)``, value ``(..., V)`` and forget gate ``f = σ(·)``, shape ``(...)``.

    ``f`` is broadcast over the matrix in the recurrence. ``x`` has shape ``(..., d_in)``.
    """
    k, v, u_f = cell.split(cell.drives(x))
    return k, v, torch.sigmoid(u_f)
