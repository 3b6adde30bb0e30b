"""Word problems: after every symbol, the product of all so far in a group."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cache

import torch
from torch import Generator, Tensor

from .task import Batch

S3_PERMUTATIONS = ((0, 1, 2), (1, 0, 2), (0, 2, 1), (2, 1, 0), (1, 2, 0), (2, 0, 1))
S5_PERMUTATIONS = tuple(itertools.permutations(range(5)))

LATIN_SQUARE = (
    (3, 4, 5, 0, 1, 2),
    (4, 2, 3, 1, 5, 0),
    (2, 3, 4, 5, 0, 1),
    (0, 1, 2, 3, 4, 5),
    (1, 5, 0, 4, 2, 3),
    (5, 0, 1, 2, 3, 4),
)
"""Which permutation a pair of symbols stands for in S3-hier. Relabelling its rows, columns and
entries gives no group's table, so the pairs are read by no shortcut of a group of order 6."""


@cache
def composition_table(permutations: Sequence[Sequence[int]]) -> Tensor:
    """``table[i, j]``: number of the permutation ``m ↦ p_i[p_j[m]]``, int64."""
    number = {tuple(p): i for i, p in enumerate(permutations)}
    return torch.tensor(
        [[number[tuple(p[m] for m in q)] for q in permutations] for p in permutations]
    )


def products(x: Tensor, table: Tensor) -> Tensor:
    """``y_t = x_t ∘ y_{t−1}`` from the identity, number 0, for ``x (B, T)``."""
    state = x.new_zeros(x.shape[0])
    out = torch.empty_like(x)
    for t in range(x.shape[1]):
        state = out[:, t] = table[x[:, t], state]
    return out


def parity(generator: Generator, batch: int, length: int) -> Batch:
    """Bits; is the number of ones so far odd?"""
    x = torch.randint(0, 2, (batch, length), generator=generator)
    return Batch(x, x.cumsum(1) % 2)


def s3(generator: Generator, batch: int, length: int) -> Batch:
    """Permutations of three things; which one are they together so far?"""
    x = torch.randint(0, 6, (batch, length), generator=generator)
    return Batch(x, products(x, composition_table(S3_PERMUTATIONS)))


def s5(generator: Generator, batch: int, length: int) -> Batch:
    """Permutations of five things, in lexicographic order: a group that is not solvable."""
    x = torch.randint(0, 120, (batch, length), generator=generator)
    return Batch(x, products(x, composition_table(S5_PERMUTATIONS)))


def s3_hierarchical(generator: Generator, batch: int, length: int) -> Batch:
    """Every pair of symbols is one permutation, by :data:`LATIN_SQUARE`; which one are they
    together so far? Between the two symbols of a pair the answer stays as it was."""
    x = torch.randint(0, 6, (batch, length), generator=generator)
    pairs = length // 2
    first, second = x[:, : 2 * pairs : 2], x[:, 1 : 2 * pairs : 2]
    states = products(torch.tensor(LATIN_SQUARE)[first, second], composition_table(S3_PERMUTATIONS))
    y = torch.zeros_like(x)
    y[:, 1::2] = states
    y[:, 2::2] = states[:, : (length - 1) // 2]
    return Batch(x, y)


def _gaps(generator: Generator, batch: int, length: int) -> tuple[Tensor, Tensor]:
    """Where a session begins after the first step, with probability 1/20, and the time gaps:
    0.1 to 1 inside of a session, 50 to 100 between two, and 0 at the first step."""
    boundary = torch.rand(batch, length, generator=generator) < 0.05
    boundary[:, :1] = False
    within = 0.1 + 0.9 * torch.rand(batch, length, generator=generator)
    across = 50 + 50 * torch.rand(batch, length, generator=generator)
    dt = torch.where(boundary, across, within)
    dt[:, :1] = 0
    return boundary, dt


def session_parity(generator: Generator, batch: int, length: int) -> Batch:
    """Bits in sessions; is the number of ones since this session began odd? Only a long time gap
    tells that a session begins."""
    x = torch.randint(0, 2, (batch, length), generator=generator)
    boundary, dt = _gaps(generator, batch, length)
    ones = x.cumsum(1)
    # The number of ones never falls, so the maximum is the one at the latest boundary.
    before = torch.where(boundary, ones - x, 0).cummax(1).values if length else ones
    return Batch(x, (ones - before) % 2, dt)


def parity_timestamped(generator: Generator, batch: int, length: int) -> Batch:
    """Parity, with the time gaps of sessions that do not matter."""
    plain = parity(generator, batch, length)
    return Batch(plain.x, plain.y, _gaps(generator, batch, length)[1])
