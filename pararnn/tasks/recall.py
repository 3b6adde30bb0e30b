"""Multi-query associative recall: keys with values, then the keys again; which values?"""

from __future__ import annotations

import torch
from torch import Generator

from .task import Batch

KEYS = 32  # symbols 0 to 31; the values are symbols 32 to 63


def recall(generator: Generator, batch: int, length: int, *, pairs: int = 8) -> Batch:
    """``key value`` for every pair, random symbols, and at the end all keys in another order.

    Only the last ``pairs`` steps are asked; the answer is the number of the value, 0 to 31. The
    keys of a sequence differ. The random symbols between are values, and keys that are not asked
    for: a key that is asked for is written once, so its value is what the sequence says.

    Raises
    ------
    ValueError
        If there are more pairs than keys, or the sequence is too short for them.
    """
    if not 1 <= pairs <= KEYS:
        raise ValueError(f"pairs: got {pairs}, expected 1 to {KEYS}, the number of keys.")
    if length < 3 * pairs:
        raise ValueError(
            f"length: got {length}, expected at least {3 * pairs}: {pairs} pairs take two steps "
            "each, and one to be asked."
        )
    drawn = torch.randint(0, 2 * KEYS - pairs, (batch, length), generator=generator)
    keys, unasked = torch.rand(batch, KEYS, generator=generator).argsort(1).tensor_split([pairs], 1)
    values = torch.randint(0, KEYS, (batch, pairs), generator=generator)
    order = torch.rand(batch, pairs, generator=generator).argsort(1)
    others = torch.cat([unasked, torch.arange(KEYS, 2 * KEYS).expand(batch, -1)], 1)
    x = others.gather(1, drawn)
    x[:, 0 : 2 * pairs : 2] = keys
    x[:, 1 : 2 * pairs : 2] = KEYS + values
    x[:, length - pairs :] = keys.gather(1, order)
    y = torch.zeros_like(x)
    y[:, length - pairs :] = values.gather(1, order)
    asked = torch.zeros(batch, length, dtype=torch.bool)
    asked[:, length - pairs :] = True
    return Batch(x, y, asked=asked)
