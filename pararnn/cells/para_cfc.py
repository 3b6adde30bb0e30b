"""ParaCfC: a closed-form continuous-time cell, which is told how much time has passed."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .. import _checks as checks
from ..spec import Spec, expm1, sigmoid, softplus, tanh
from .cell import Cell
from .facts import Deviation, Facts, Source, Symbol
from .gates import shares

FORMS = ("published", "consistent")


@cache
def cfc_spec(form: str) -> Spec:
    """Hasani et al., Nature Machine Intelligence 2022 (arXiv:2106.13898): the closed form with
    sigmoidal time gates, and one whose gate is an exponential decay from the old state."""
    with Spec(f"ParaCfC[{form}]") as s:
        h = s.state("h", bounds=(-1, 1))
        if form == "published":
            u_f, u_g, u_k = s.drives("u_f u_g u_k")
            R_f, R_g, R_k = s.maps("R_f R_g R_k", structure="diagonal")
            dt = s.time_gap("dt")
            f = s.let("f", R_f(h) + u_f)
            g = s.let("g", tanh(R_g(h) + u_g))
            k = s.let("k", tanh(R_k(h) + u_k))
            a = s.let("a", sigmoid(-(f * dt)))
            s.next(h, a * g + (1 - a) * k)
        else:
            u_f, u_k = s.drives("u_f u_k")
            R_f, R_k = s.maps("R_f R_k", structure="diagonal")
            dt = s.time_gap("dt")
            f = s.let("f", R_f(h) + u_f)
            k = s.let("k", tanh(R_k(h) + u_k))
            w = s.let("w", -expm1(-(softplus(f) * dt)))
            s.next(h, (1 - w) * h + w * k)
    return s


class ParaCfC(Cell):
    """Closed-form continuous-time cell with diagonal recurrent weights.

    Every step needs the time since the step before: ``dt``, shape ``(B,)`` in
    :meth:`~pararnn.Cell.step` and ``(B, T)`` for a sequence.

    Parameters
    ----------
    d_in, d_h
        Input and state width; also by ``input_size`` and ``hidden_size``.
    form
        ``'published'``: ``h' = σ(−f Δt) g + (1 − σ(−f Δt)) k``, as in the paper.
        ``'consistent'``: ``h' = a h + (1 − a) k`` with ``a = exp(−softplus(f) Δt)``, so that no
        time means no change.
    bias, device, dtype
        As for :class:`torch.nn.Linear`.

    Raises
    ------
    TypeError, ValueError
        If a width is missing or not positive, or ``form`` is neither.

    References
    ----------
    Hasani et al., Closed-form continuous-time neural networks, Nature Machine Intelligence 4
    (2022), arXiv:2106.13898.
    """

    def __init__(
        self,
        d_in: int | None = None,
        d_h: int | None = None,
        form: str = "published",
        **kwargs: Any,
    ):
        self.form = checks.one_of("form", form, FORMS)
        super().__init__(d_in, d_h, spec=cfc_spec(form), **kwargs)

    def recurrence(self, h: Tensor, *given: Tensor) -> Tensor:
        if self.form == "published":
            u_f, u_g, u_k, dt, R_f, R_g, R_k = given
            start = torch.tanh(u_g + R_g * h)
            end = torch.tanh(u_k + R_k * h)
            past, left = shares((u_f + R_f * h) * dt[..., None])
            return left * start + past * end
        u_f, u_k, dt, R_f, R_k = given
        rate = functional.softplus(u_f + R_f * h, threshold=40)
        left = h - torch.tanh(u_k + R_k * h)
        return h + torch.expm1(-rate * dt[..., None]) * left

    def hyperparameters(self) -> dict[str, Any]:
        return {
            "d_in": self.d_in,
            "d_h": self.d_h,
            "form": self.form,
            "bias": self.has_bias,
        }

    facts = Facts(
        title="ParaCfC",
        slug="para_cfc",
        family="nonlinear",
        fidelity=("research-variant",),
        summary="Closed-form continuous-time cell for sequences with irregular times, in its "
        "published form (form='published') and in one that no time leaves unchanged "
        "(form='consistent').",
        sources=(
            Source(
                key="hasani2022closed",
                authors="Hasani, Lechner, Amini, Liebenwein, Ray, Tschaikowski, Teschl, Rus",
                title="Closed-form continuous-time neural networks",
                venue="Nature Machine Intelligence 4",
                year=2022,
                arxiv="2106.13898",
                equations="the closed form with sigmoidal time gates, "
                "x(t) = σ(-f t) g + [1 - σ(-f t)] h; its h is called k here",
                bibtex="""@article{hasani2022closed,
  title   = {Closed-form continuous-time neural networks},
  author  = {Hasani, Ramin and Lechner, Mathias and Amini, Alexander and Liebenwein, Lucas and Ray, Aaron and Tschaikowski, Max and Teschl, Gerald and Rus, Daniela},
  journal = {Nature Machine Intelligence},
  volume  = {4},
  pages   = {992--1003},
  year    = {2022},
  doi     = {10.1038/s42256-022-00556-7},
  eprint  = {2106.13898},
  archivePrefix = {arXiv}
}""",
            ),
        ),
        symbols=(
            Symbol("x_t", "(B, d_in)", "input at step t"),
            Symbol(r"\Delta t_t", "(B,)", "time since the step before, not negative"),
            Symbol("h_t", "(B, d_h)", "state; zero at the start unless h0 is given"),
            Symbol("f_t", "(B, d_h)", "how fast time acts; any sign in the published form"),
            Symbol("g_t, k_t", "(B, d_h)", "the two values that time moves between"),
            Symbol("a_t", "(B, d_h)", "time gate of form='published': weight of g"),
            Symbol("w_t", "(B, d_h)", "weight of k in form='consistent'"),
            Symbol("W_*, b_*", "(d_h, d_in), (d_h,)", "input weights, packed in one Linear"),
            Symbol("r_*", "(d_h,)", "recurrent vectors"),
        ),
        deviations=(
            Deviation(
                "f, g and k are affine in x_t and see h_{t-1} through a vector; g and k end in tanh",
                "the paper leaves them open: networks of x and h, here and in its code with a "
                "shared backbone. An elementwise recurrence has one number a channel as Jacobian",
                "a smaller cell; the formula with f, g and k is the paper's in form='published'",
                "structure",
            ),
            Deviation(
                "Time is the gap since the step before",
                "the paper writes the time t since the initial state and restarts at every step",
                "none: it is how the paper applies the form to a sequence",
                "equation",
            ),
            Deviation(
                "form='consistent' decays from the old state: a = exp(-softplus(f) Δt) in place of "
                "σ(-f Δt), and h in place of g",
                "at Δt = 0 the published gate is 1/2: two observations at the same time, or a very "
                "dense sequence, forget the state",
                "another recurrence: Δt = 0 changes nothing, two gaps with the same k and f add up "
                "to one",
                "time-gap",
            ),
        ),
        parallel_path="Multiple shooting with exact chunk Jacobians, one number a channel.",
        numerics="States stay in [-1, 1] if they start there, and in one step come there from "
        "anywhere in form='published'. As Δt goes to 0, form='published' goes to (g + k)/2, which "
        "forgets the old state but for what g and k know of it; form='consistent' goes to the old "
        "state. As Δt grows, both go to k where f is positive.",
        notes=(
            "The gate of the authors' code is σ(a Δt + b) with a second head b, which the paper's "
            "equation does not have; neither has this cell.",
            "w is computed as -expm1(-softplus(f) Δt), so that a gap of 1e-6 moves the state by all "
            "its digits, in float32 too.",
            "A negative gap is an error on the CPU. On a GPU it is not checked, because the check "
            "would wait for the device.",
        ),
    )
