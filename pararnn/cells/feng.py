"""What the cells of Feng et al. and their variants share on their cards."""

from __future__ import annotations

from dataclasses import replace

from .facts import Deviation, Source, Symbol

PAPER = Source(
    key="feng2024were",
    authors="Feng, Tung, Ahmed, Bengio, Hajimirsadeghi",
    title="Were RNNs All We Needed?",
    venue="arXiv:2410.01201",
    year=2024,
    arxiv="2410.01201",
    equations="",
    bibtex="""@article{feng2024were,
  title   = {Were {RNNs} All We Needed?},
  author  = {Feng, Leo and Tung, Frederick and Ahmed, Mohamed Osama and Bengio, Yoshua and Hajimirsadeghi, Hossein},
  journal = {arXiv preprint arXiv:2410.01201},
  year    = {2024},
  eprint  = {2410.01201},
  archivePrefix = {arXiv}
}""",
)
"""The paper; a cell adds its ``equations``."""

VANILLA = replace(
    PAPER,
    equations="minGRU in its vanilla form, h = (1 - z) h + z h̃ with h̃ = W_h x: gate and candidate "
    "are these, the transition is not",
)

GRU_D = Source(
    key="che2018recurrent",
    authors="Che, Purushotham, Cho, Sontag, Liu",
    title="Recurrent Neural Networks for Multivariate Time Series with Missing Values",
    venue="Scientific Reports 8",
    year=2018,
    arxiv="1606.01865",
    equations="the decay of the hidden state of GRU-D, exp(-max(0, W δ + b)): here without b, with "
    "a positive rate, and optional",
    bibtex="""@article{che2018recurrent,
  title   = {Recurrent Neural Networks for Multivariate Time Series with Missing Values},
  author  = {Che, Zhengping and Purushotham, Sanjay and Cho, Kyunghyun and Sontag, David and Liu, Yan},
  journal = {Scientific Reports},
  volume  = {8},
  year    = {2018},
  eprint  = {1606.01865},
  archivePrefix = {arXiv}
}""",
)

INPUT = Symbol("x_t", "(B, d_in)", "input at step t")
WEIGHTS = Symbol("W_*, b_*", "(d_h, d_in), (d_h,)", "input weights, packed in one Linear")
ONE_SCAN = (
    "One affine scan over time, one number a channel: the Jacobian does not contain the state, so "
    "one iteration is exact."
)

DECAY = Deviation(
    "An optional decay multiplies the transition by exp(-λ f(Δt)), f(Δt) = Δt or log1p(Δt)",
    "sequences with irregular times; off by default",
    "with decay=None, none. With one, the old state fades with time and what the input adds does "
    "not; a gap of 0 is no decay. Gaps that are NaN or negative count as 0, infinite ones as 1e10",
    "time-gap",
)

DECAY_SYMBOLS = (
    Symbol(r"\Delta t_t", "(B,)", "time before step t, not negative; only with a decay"),
    Symbol(r"\gamma_t", "(B, d_h)", "what time leaves of the old state; only with a decay"),
    Symbol(
        r"\rho", "(d_h,)", "the rate λ of a learned decay is softplus(ρ); else it is a constant"
    ),
)

DECAY_NOTE = (
    "The rate of a decay is one constant (decay='fixed') or softplus(ρ), with one trained ρ a "
    "channel (decay='learnable'). The first gap counts like any other."
)
