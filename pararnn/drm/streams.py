"""Random numbers for the start of each part, from a stream of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

OFFSETS = {
    "embedding": 101,
    "state": 102,
    "direction": 103,
    "metric": 104,
    "flow": 105,
    "risk": 106,
    "emitter": 107,
    "mixer": 108,
    "residual": 109,
    "memory": 110,
    "direct": 112,
}
"""What is added to the seed for each part."""

LAYER = 1000


@contextmanager
def stream(seed: int, part: str, index: int = 0) -> Iterator[None]:
    """Draw from the stream of a part; the CPU's global generator is left as it was.

    So a part starts alike in every model that has it with the same sizes and seed. ``index`` tells
    several of a kind apart.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed + OFFSETS[part] + LAYER * index)
        yield
