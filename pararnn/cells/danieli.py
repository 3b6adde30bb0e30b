"""What the cells of Danieli et al. share on their cards: the paper, and how ours deviate."""

from __future__ import annotations

from .facts import Deviation, Source

PAPER = Source(
    key="danieli2026pararnn",
    authors="Danieli, Rodriguez, Sarabia, Suau, Zappella",
    title="ParaRNN: Unlocking Parallel Training of Nonlinear RNNs for Large Language Models",
    venue="ICLR 2026",
    year=2026,
    arxiv="2510.21450",
    equations="",
    bibtex="""@inproceedings{danieli2026pararnn,
  title     = {{ParaRNN}: Unlocking Parallel Training of Nonlinear {RNNs} for Large Language Models},
  author    = {Danieli, Federico and Rodriguez, Pau and Sarabia, Miguel and Suau, Xavier and Zappella, Luca},
  booktitle = {International Conference on Learning Representations},
  year      = {2026},
  eprint    = {2510.21450},
  archivePrefix = {arXiv}
}""",
)
"""The paper; a cell adds its ``equations``."""

PROJECTED_BOUND = Deviation(
    "The bound of App. C.1 is a projection inside the forward pass, through which the "
    "gradient passes straight",
    "the paper clips weights during training and does not give the mechanism",
    "the effective weight is the clipped one at every moment; with project_() after "
    "every optimizer step the stored one is, too",
    "constraint",
)

DENSE_INPUT = Deviation(
    "W_* is dense over the whole input",
    "the paper's multi-head option makes it block-diagonal",
    "more input parameters; the recurrence is the same",
    "equation",
)
