"""ParaNLRU: the decay and input scale of the RG-LRU around a nonlinear candidate."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.nn import functional

from ..spec import Spec, exp, sigmoid, softplus, tanh
from .constraints import BoundedCell
from .facts import Deviation, Facts, Source, Symbol

SHARPNESS = 8  # the constant c of De et al.
LEAST_DECAY = 1e-24
"""Smallest ``−log a``: keeps the slope of ``√(1 − a²)`` finite. Its square root and its inverse to
the power 3/2 are both far inside the range of float32."""
SLOWEST = (0.9, 0.999)  # initial range of a at an open gate


@cache
def nlru_spec() -> Spec:
    """De et al., arXiv:2402.19427, section 2.4, with ``x_t`` replaced by a tanh of the state.

    ``1 − a²`` is written ``tanh(ℓ)(1 + a²)`` for ``a = exp(−ℓ)``: the same number, without the
    cancellation near ``a = 1``.
    """
    with Spec("ParaNLRU") as s:
        h = s.state("h", bounds=(-math.inf, math.inf))
        u_r, u_i, u_n = s.drives("u_r u_i u_n")
        w = s.map("w", structure="diagonal")
        (Lambda,) = s.params("Lambda")
        r = s.let("r", sigmoid(u_r))
        i = s.let("i", sigmoid(u_i))
        rate = sympy.Mul(SHARPNESS, softplus(Lambda), r)
        decay = s.let("l", rate + sympy.Float(10) ** -24, latex=r"\ell")
        a = s.let("a", exp(-decay))
        q = s.let("q", tanh(decay) * (1 + a**2))
        n = s.let("n", tanh(w(h) + u_n))
        s.next(h, a * h + sympy.sqrt(q) * (i * n))
    return s


class ParaNLRU(BoundedCell):
    """Nonlinear gated linear recurrent unit: ``h' = a h + √(1 − a²) (i tanh(w h + u))``.

    The decay ``a = exp(−8 softplus(Λ) r)`` and both gates depend on the input only, as in the
    RG-LRU; the candidate depends on the state, which makes the recurrence nonlinear.

    Parameters
    ----------
    d_in, d_h
        Input and state width; also by ``input_size`` and ``hidden_size``.
    max_recurrent_norm
        Bound on the entries of ``w``: they are projected to ``[-c, c]``. None: no bound.
    bias, device, dtype
        As for :class:`torch.nn.Linear`.

    Raises
    ------
    TypeError, ValueError
        If a width is missing or not positive, or the bound is not positive.

    References
    ----------
    De et al., Griffin, arXiv:2402.19427, section 2.4 and App. A.
    """

    w: Tensor
    Lambda: Tensor

    def __init__(
        self,
        d_in: int | None = None,
        d_h: int | None = None,
        max_recurrent_norm: float | None = 0.5,
        **kwargs: Any,
    ):
        super().__init__(
            d_in, d_h, spec=nlru_spec(), max_recurrent_norm=max_recurrent_norm, **kwargs
        )

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """As for every cell; ``Λ`` such that an open gate decays by a factor drawn evenly from
        (0.9, 0.999)."""
        super().reset_parameters()
        slowest = torch.empty_like(self.Lambda, dtype=torch.float32).uniform_(*SLOWEST)
        rate = -slowest.log() / SHARPNESS
        self.Lambda.copy_(rate.expm1().log())  # the inverse of softplus

    def recurrence(
        self, h: Tensor, u_r: Tensor, u_i: Tensor, u_n: Tensor, w: Tensor, Lambda: Tensor
    ) -> Tensor:
        slowest = SHARPNESS * functional.logsigmoid(-Lambda)
        log_a = slowest * torch.sigmoid(u_r) - LEAST_DECAY
        scale = torch.sqrt(-torch.expm1(2 * log_a))
        return torch.exp(log_a) * h + scale * torch.sigmoid(u_i) * torch.tanh(u_n + w * h)

    facts = Facts(
        title="ParaNLRU",
        slug="para_nlru",
        family="nonlinear",
        fidelity=("research-variant", "paper-core"),
        summary="The gated decay and the input scale of the RG-LRU, around a candidate that "
        "depends on the state.",
        sources=(
            Source(
                key="de2024griffin",
                authors="De, Smith, Fernando, Botev, et al.",
                title="Griffin: Mixing Gated Linear Recurrences with Local Attention for "
                "Efficient Language Models",
                venue="arXiv",
                year=2024,
                arxiv="2402.19427",
                equations="the RG-LRU of section 2.4 (gates, decay, recurrence, initialisation) "
                "and App. A (decay from its logarithm)",
                bibtex="""@article{de2024griffin,
  title   = {{Griffin}: Mixing Gated Linear Recurrences with Local Attention for Efficient Language Models},
  author  = {De, Soham and Smith, Samuel L. and Fernando, Anushan and Botev, Aleksandar and Cristian-Muraru, George and Gu, Albert and Haroun, Ruba and Berrada, Leonard and Chen, Yutian and Srinivasan, Srivatsan and Desjardins, Guillaume and Doucet, Arnaud and Budden, David and Teh, Yee Whye and Pascanu, Razvan and De Freitas, Nando and Gulcehre, Caglar},
  journal = {arXiv preprint arXiv:2402.19427},
  year    = {2024},
  eprint  = {2402.19427},
  archivePrefix = {arXiv}
}""",
            ),
        ),
        symbols=(
            Symbol("x_t", "(B, d_in)", "input at step t"),
            Symbol("h_t", "(B, d_h)", "state; zero at the start unless h0 is given"),
            Symbol("r_t, i_t", "(B, d_h)", "recurrence gate and input gate"),
            Symbol(r"\ell_t, a_t", "(B, d_h)", "rate of decay, and the decay"),
            Symbol(
                "q_t", "(B, d_h)", "squared scale of what is written: one less the squared decay"
            ),
            Symbol("n_t", "(B, d_h)", "candidate"),
            Symbol("W_*, b_*", "(d_h, d_in), (d_h,)", "input weights, packed in one Linear"),
            Symbol("w", "(d_h,)", "recurrent vector"),
            Symbol(r"\Lambda", "(d_h,)", "decides how slow the decay can be; not bounded"),
        ),
        deviations=(
            Deviation(
                "The input is tanh(w h + W_n x + b_n)",
                "the RG-LRU writes x itself and is linear in the state",
                "research-variant: a nonlinear recurrence, whose Jacobian depends on the state",
                "equation",
            ),
            Deviation(
                "The rate of decay is at least 1e-24",
                "at a = 1 the slope of sqrt(1 - a^2) is infinite, and its product with the zero "
                "slope of the closed gate is NaN",
                "a closed gate writes at a scale of 1.4e-12 instead of 0; gradients are finite "
                "and within rounding of their limits",
                "gradients",
            ),
            Deviation(
                "The gradient is the true gradient",
                "the paper's released code clips the slope of the square root at 1000",
                "gradients differ where sqrt(1 - a^2) is below 5e-4",
                "gradients",
            ),
            Deviation(
                "The recurrence alone, with one linear map of x in front",
                "the paper's recurrent block has a causal convolution before it and a gated branch "
                "beside it",
                "this cell alone is not the paper's block",
                "equation",
            ),
            Deviation(
                "Gate weights W_r and W_i are dense",
                "the paper's are block-diagonal",
                "more input parameters; the recurrence is the same",
                "equation",
            ),
            Deviation(
                "w starts Gaussian with standard deviation 1/sqrt(d_h) and is bounded by 0.5",
                "the paper has no such weight; the bound is that of ParaGRU",
                "a step expands by a factor of sqrt(1 + w^2) = 1.12 at most",
                "constraint",
            ),
        ),
        parallel_path="Multiple shooting with exact chunk Jacobians, one number a channel. With "
        "w = 0 the recurrence is linear, and one iteration is exact.",
        numerics="No interval holds the state for every input: the proven bound is "
        "sqrt(h_0^2 + t) after t steps. The derivatives are bounded on the whole line, so errors "
        "of a solve can be certified all the same. sqrt(1 - a^2) is computed without cancellation.",
        notes=(
            "Section 2.4 of the paper has a = σ(Λ), its App. A takes the decay from softplus(Λ), as "
            "here. The two differ in the sign of Λ only.",
        ),
    )
