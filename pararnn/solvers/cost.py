"""The cost model behind ``method='auto'``: chunk length and warm-up from sizes alone.

Walking one step of ``P`` chunks costs ``c0 + c1·n·P``: a fixed overhead and the work on
``n = B × state size`` numbers a chunk. A sequential solve takes ``T`` such steps with ``P = 1``; a
chunked one takes ``L + w`` with ``P = T/L`` (``w`` warm-up steps guess the chunk starts), that is

    (L + w)·c0 + (1 + w/L)·c1·n·T,       least at  L = √(w·c1·n·T / c0).

Only the ratio ``c1/c0`` decides: how many numbers one step must touch to be worth its overhead. No
cell is known by name: a cell with more operations a step scales both constants alike.
"""

from __future__ import annotations

import math

WARMUP = 48
"""Warm-up steps: a step that forgets half of its state leaves 2⁻⁴⁸ of the wrong guess."""

NUMBERS_PER_OVERHEAD = {"cpu": 6_000, "cuda": 2_000_000}
"""``c0 / c1``: numbers that one step processes in the time of its fixed overhead."""


def chunk_length(total: int, numbers: int, device: str) -> tuple[int, int]:
    """Chunk length and warm-up for ``total`` steps on ``numbers = B × state size``.

    The chunk length equals ``total`` where the sequential algorithm is cheaper.
    """
    if total <= 2 * WARMUP or numbers == 0:
        return max(total, 1), WARMUP
    ratio = NUMBERS_PER_OVERHEAD.get(device, NUMBERS_PER_OVERHEAD["cuda"])
    work = numbers / ratio  # c1·n / c0
    best = math.sqrt(WARMUP * work * total)
    length = int(min(max(best, WARMUP), total))
    chunks = max(1, round(total / length))
    length = -(-total // chunks)
    chunked = (length + WARMUP) + (1 + WARMUP / length) * work * total
    if chunks == 1 or chunked >= total * (1 + work):
        return total, WARMUP
    return length, WARMUP
