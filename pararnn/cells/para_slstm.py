"""ParaSLSTM: exponential gates, a normalizer and a stabilizer, with diagonal recurrent weights."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .. import _checks as checks
from ..spec import Spec, exp, maximum, sigmoid, softplus, tanh
from .cell import Cell
from .facts import Deviation, Facts, Source, Symbol

FORGET_GATES = ("sigmoid", "exp")
EMPTY = 10_000
"""How far below the logarithm of the input gate the scale of an empty state is put: its gate is
then 0."""


@cache
def slstm_spec(forget: str) -> Spec:
    """Beck et al., arXiv:2405.04517, section 2.2, in its stabilised form.

    A step returns a normalizer of at least 1: its larger gate is exactly 1. So ``e``, which is 1 for
    the zero state and 0 for every other, tells the two cases apart. What comes after an empty state
    has the scale of its input gate, and keeps nothing.
    """
    with Spec(f"ParaSLSTM[{forget}]") as s:
        c, n = s.state("c"), s.state("n", bounds=(1, math.inf))
        m, h = s.state("m"), s.state("h")
        u_i, u_f, u_z, u_o = s.drives("u_i u_f u_z u_o")
        R_i, R_f, R_z, R_o = s.maps("R_i R_f R_z R_o", structure="diagonal")
        i_log = s.let("i_log", R_i(h) + u_i, latex=r"\log i")
        f_in = R_f(h) + u_f
        f_log = s.let("f_log", -softplus(-f_in) if forget == "sigmoid" else f_in, latex=r"\log f")
        z = s.let("z", tanh(R_z(h) + u_z))
        o = s.let("o", sigmoid(R_o(h) + u_o))
        e = s.let("e", maximum(1 - 2 * n, 0))
        p = s.let("p", (1 - e) * (f_log + m) + e * (i_log - EMPTY))
        s.next(m, maximum(p, i_log))
        i = s.let("i", exp(i_log - s.updated(m)), latex="i'")
        f = s.let("f", exp(p - s.updated(m)), latex="f'")
        s.next(c, f * c + i * z)
        s.next(n, f * n + i)
        s.next(h, o * (s.updated(c) / s.updated(n)))
    return s


class ParaSLSTM(Cell):
    """Long short-term memory with an exponential input gate, normalized and stabilised.

    The state has four slots, the memory ``c``, its normalizer ``n``, the stabilizer ``m`` and the
    output ``h``: shape ``(B, 4, d_h)``. A layer passes ``h`` on.

    Parameters
    ----------
    d_in, d_h
        Input width and width of each slot; also by ``input_size`` and ``hidden_size``.
    forget
        The forget gate: ``'sigmoid'``, or ``'exp'`` of its pre-activation.
    bias, device, dtype
        As for :class:`torch.nn.Linear`.

    Raises
    ------
    TypeError, ValueError
        If a width is missing or not positive, or ``forget`` is neither.

    References
    ----------
    Beck et al., xLSTM, arXiv:2405.04517, section 2.2.
    """

    def __init__(
        self,
        d_in: int | None = None,
        d_h: int | None = None,
        forget: str = "sigmoid",
        **kwargs: Any,
    ):
        self.forget = checks.one_of("forget", forget, FORGET_GATES)
        super().__init__(d_in, d_h, spec=slstm_spec(forget), **kwargs)

    def recurrence(
        self,
        c: Tensor,
        n: Tensor,
        m: Tensor,
        h: Tensor,
        u_i: Tensor,
        u_f: Tensor,
        u_z: Tensor,
        u_o: Tensor,
        R_i: Tensor,
        R_f: Tensor,
        R_z: Tensor,
        R_o: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        write, forget = u_i + R_i * h, u_f + R_f * h
        if self.forget == "sigmoid":
            forget = functional.logsigmoid(forget)
        empty = torch.relu(1 - 2 * n)
        old = (1 - empty) * (forget + m) + empty * (write - EMPTY)
        top = torch.maximum(write, old)
        write, keep = torch.exp(write - top), torch.exp(old - top)
        memory = keep * c + write * torch.tanh(u_z + R_z * h)
        normalizer = keep * n + write
        out = torch.sigmoid(u_o + R_o * h) * (memory / normalizer)
        return memory, normalizer, top, out

    def hyperparameters(self) -> dict[str, Any]:
        return {
            "d_in": self.d_in,
            "d_h": self.d_h,
            "forget": self.forget,
            "bias": self.has_bias,
        }

    facts = Facts(
        title="ParaSLSTM",
        slug="para_slstm",
        family="nonlinear",
        fidelity=("research-variant", "paper-core"),
        summary="The sLSTM of xLSTM in its stabilised form, with diagonal recurrent weights: an "
        "exponential input gate, a normalizer and a stabilizer; four state slots.",
        sources=(
            Source(
                key="beck2024xlstm",
                authors="Beck, Pöppel, Spanring, Auer, Prudnikova, Kopp, Klambauer, Brandstetter, "
                "Hochreiter",
                title="xLSTM: Extended Long Short-Term Memory",
                venue="NeurIPS 2024",
                year=2024,
                arxiv="2405.04517",
                equations="section 2.2, the forward pass of the sLSTM with its gates and with the "
                "stabilizer state",
                bibtex="""@inproceedings{beck2024xlstm,
  title     = {{xLSTM}: Extended Long Short-Term Memory},
  author    = {Beck, Maximilian and P{\\"o}ppel, Korbinian and Spanring, Markus and Auer, Andreas and Prudnikova, Oleksandra and Kopp, Michael and Klambauer, G{\\"u}nter and Brandstetter, Johannes and Hochreiter, Sepp},
  booktitle = {Advances in Neural Information Processing Systems},
  year      = {2024},
  eprint    = {2405.04517},
  archivePrefix = {arXiv}
}""",
            ),
        ),
        symbols=(
            Symbol("x_t", "(B, d_in)", "input at step t"),
            Symbol("c_t", "(B, d_h)", "memory, scaled down by exp(m_t); slot 0"),
            Symbol("n_t", "(B, d_h)", "normalizer, scaled likewise; slot 1; 0 or at least 1"),
            Symbol("m_t", "(B, d_h)", "stabilizer, the logarithm of the scale; slot 2"),
            Symbol("h_t", "(B, d_h)", "output; slot 3"),
            Symbol(r"\log i_t, \log f_t", "(B, d_h)", "logarithms of input and forget gate"),
            Symbol("i'_t, f'_t", "(B, d_h)", "the stabilised gates; the larger is 1"),
            Symbol("z_t, o_t", "(B, d_h)", "cell input, output gate"),
            Symbol(
                "p_t",
                "(B, d_h)",
                "the old scale after forgetting; below that of the input gate if the state is empty",
            ),
            Symbol("e_t", "(B, d_h)", "1 if the state before is empty, 0 if not"),
            Symbol("W_*, b_*", "(d_h, d_in), (d_h,)", "input weights, packed in one Linear"),
            Symbol("r_*", "(d_h,)", "recurrent vectors, applied to h"),
        ),
        deviations=(
            Deviation(
                "Recurrent weights are diagonal",
                "the paper's are dense within a head, which mixes the channels of a head; diagonal "
                "ones leave a 4 x 4 Jacobian block a channel",
                "another, weaker recurrence: no memory mixing",
                "structure",
            ),
            Deviation(
                "The block around the cell is left out",
                "this is the recurrence only: no convolution and SiLU on the gates' input, no group "
                "norm, no projections",
                "paper-core: a stack of these cells is not an xLSTM",
                "equation",
            ),
            Deviation(
                "The zero state is empty: its stabilizer counts as minus infinity",
                "with a stabilizer that starts at 0, both stabilised quantities underflow to 0/0 "
                "where the first input gates are below exp(-87) (float32). The authors' code makes "
                "such an exception, when the whole state is zero",
                "in exact arithmetic none on c/n and h; c, n and m have another common scale",
                "equation",
            ),
            Deviation(
                "All biases start at 0, recurrent vectors Gaussian with standard deviation 1/sqrt(d_h)",
                "the library's initial values; the authors' code spreads the forget gate's biases",
                "initial values only",
                "equation",
            ),
        ),
        parallel_path="Multiple shooting with exact chunk Jacobians, one 4 x 4 block a channel. "
        "Newton over single steps is possible, but needs many iterations: the scale is "
        "exponential in m.",
        numerics="Both stabilised gates lie in [0, 1] and one of them is 1, so nothing overflows and "
        "n is at least 1 after a step. Nothing bounds c, n and m, so no error bound can be proven.",
        notes=(
            "No epsilon is added to n: it needs none.",
            "At a tie of the maximum each side takes half of the derivative, as in PyTorch. What h "
            "depends on does not change with it: h is the same for every stabilizer m at the new "
            "step, so the two halves cancel.",
            "A state counts as empty below n = 1/2. An h0 from elsewhere must have n of at least "
            "1/2, or be zero: scale c and n up and lower m by the logarithm of the factor.",
        ),
    )
