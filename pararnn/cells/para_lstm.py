"""ParaLSTM: coupled input and forget gates, peepholes, and diagonal recurrent weights."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..spec import Spec, sigmoid, tanh
from .constraints import BoundedCell
from .danieli import DENSE_INPUT, PAPER, PROJECTED_BOUND
from .facts import Deviation, Facts, Source, Symbol


@cache
def lstm_spec() -> Spec:
    """Danieli et al., arXiv:2510.21450, eq. 3.1b with the diagonal maps of eq. 3.3."""
    with Spec("ParaLSTM") as s:
        c, h = s.state("c", bounds=(-1, 1)), s.state("h", bounds=(-1, 1))
        u_f, u_z, u_o = s.drives("u_f u_z u_o")
        A_f, A_z, A_o, C_f, C_o = s.maps("A_f A_z A_o C_f C_o", structure="diagonal")
        p = s.let("p", A_f(h) + C_f(c) + u_f)
        f = s.let("f", sigmoid(p))
        i = s.let("i", sigmoid(-p))  # 1 - f, with its digits where f is near 1
        z = s.let("z", tanh(A_z(h) + u_z))
        s.next(c, f * c + i * z)
        o = s.let("o", sigmoid(A_o(h) + C_o(s.updated(c)) + u_o))
        s.next(h, o * tanh(s.updated(c)))
    return s


class ParaLSTM(BoundedCell):
    """Long short-term memory with one gate for forgetting and writing, peepholes, and diagonal
    recurrent weights.

    The state has two slots, the memory ``c`` and the output ``h``: shape ``(B, 2, d_h)``. A layer
    passes ``h`` on.

    Parameters
    ----------
    d_in, d_h
        Input width and width of each slot; also by ``input_size`` and ``hidden_size``.
    max_recurrent_norm
        Bound on the entries of the recurrent vectors and of the peepholes (App. C.1): they are
        projected to ``[-c, c]``. None: no bound.
    bias, device, dtype
        As for :class:`torch.nn.Linear`.

    Raises
    ------
    TypeError, ValueError
        If a width is missing or not positive, or the bound is not positive.

    References
    ----------
    Danieli et al., ParaRNN, arXiv:2510.21450, eq. 3.1b, 3.3 and App. C.1; coupled gates and
    peepholes as in Greff et al., arXiv:1503.04069.
    """

    A_f: Tensor
    A_z: Tensor
    A_o: Tensor
    C_f: Tensor
    C_o: Tensor

    def __init__(
        self,
        d_in: int | None = None,
        d_h: int | None = None,
        max_recurrent_norm: float | None = 0.5,
        **kwargs: Any,
    ):
        super().__init__(
            d_in, d_h, spec=lstm_spec(), max_recurrent_norm=max_recurrent_norm, **kwargs
        )

    def recurrence(
        self,
        c: Tensor,
        h: Tensor,
        u_f: Tensor,
        u_z: Tensor,
        u_o: Tensor,
        A_f: Tensor,
        A_z: Tensor,
        A_o: Tensor,
        C_f: Tensor,
        C_o: Tensor,
    ) -> tuple[Tensor, Tensor]:
        forget = u_f + A_f * h + C_f * c
        # The coupled input gate 1 − σ(x) is σ(−x).
        kept = torch.sigmoid(forget) * c
        written = torch.sigmoid(-forget) * torch.tanh(u_z + A_z * h)
        memory = kept + written
        return memory, torch.sigmoid(u_o + A_o * h + C_o * memory) * torch.tanh(memory)

    facts = Facts(
        title="ParaLSTM",
        slug="para_lstm",
        family="nonlinear",
        fidelity=("paper-faithful",),
        summary="Long short-term memory with coupled input and forget gates, peepholes and "
        "diagonal recurrent weights; two state slots.",
        sources=(
            replace(
                PAPER,
                equations="eq. 3.1b (gates), 3.3 (diagonal maps), 3.2b (Jacobian), App. A.1 "
                "(guess), App. C.1 (initialisation and bound)",
            ),
            Source(
                key="greff2017lstm",
                authors="Greff, Srivastava, Koutnik, Steunebrink, Schmidhuber",
                title="LSTM: A Search Space Odyssey",
                venue="IEEE Transactions on Neural Networks and Learning Systems 28(10)",
                year=2017,
                arxiv="1503.04069",
                equations="the variant with coupled input and forget gates (CIFG), and peepholes",
                bibtex="""@article{greff2017lstm,
  title   = {{LSTM}: A Search Space Odyssey},
  author  = {Greff, Klaus and Srivastava, Rupesh K. and Koutn{\\'i}k, Jan and Steunebrink, Bas R. and Schmidhuber, J{\\"u}rgen},
  journal = {IEEE Transactions on Neural Networks and Learning Systems},
  volume  = {28},
  number  = {10},
  pages   = {2222--2232},
  year    = {2017},
  eprint  = {1503.04069},
  archivePrefix = {arXiv}
}""",
            ),
        ),
        symbols=(
            Symbol("x_t", "(B, d_in)", "input at step t"),
            Symbol("c_t", "(B, d_h)", "memory, slot 0; zero at the start unless h0 is given"),
            Symbol("h_t", "(B, d_h)", "output, slot 1; zero at the start unless h0 is given"),
            Symbol("f_t, z_t, o_t", "(B, d_h)", "forget gate, candidate, output gate"),
            Symbol(
                "p_t, i_t",
                "(B, d_h)",
                "the forget gate's argument, and 1 - f_t, with its digits where f_t is near 1",
            ),
            Symbol("W_*, b_*", "(d_h, d_in), (d_h,)", "input weights, packed in one Linear"),
            Symbol("a_*", "(d_h,)", "recurrent vectors, applied to h"),
            Symbol("c_f, c_o", "(d_h,)", "peepholes: c_f on the old memory, c_o on the new one"),
        ),
        deviations=(
            PROJECTED_BOUND,
            DENSE_INPUT,
            Deviation(
                "Recurrent vectors and peepholes start Gaussian with standard deviation "
                "1/sqrt(d_h)",
                "the paper says Xavier Gaussian for a diagonal matrix; this counts it as d_h x d_h",
                "initial values only",
                "constraint",
            ),
        ),
        parallel_path="Multiple shooting with exact chunk Jacobians, one 2 x 2 block a channel; "
        "chunk length 1 is the paper's Newton method (Algorithm 1) with guess f(0, x_t).",
        numerics="Both slots stay in [-1, 1] if they start there, and every output lies within "
        "tanh(1) = 0.76. Bounded weights (0.5) keep the coupling between steps weak; f near 1 "
        "gives a memory that hardly forgets.",
        notes=(
            "The paper writes the candidate's nonlinearity as a symbol of its own; here it is tanh, "
            "as in the paper's released code.",
            "torch.nn.LSTM has a separate input gate, no peepholes and dense recurrent matrices.",
        ),
    )
