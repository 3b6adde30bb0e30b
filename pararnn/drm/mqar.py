"""Multi-query associative recall as language modelling: the published probe of the variants.

A sequence is ``key value`` for every pair, then ``mark key value`` for every pair in another order.
The model predicts the next token; what counts are the predictions at the queried keys. The sequence
fits into one block of the published size, so the probe does not test what is carried across blocks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from pararnn import checks

from .model import DRM

MARK = 1
KEYS = 32
VALUES = 64
FIRST_KEY = 2
FIRST_VALUE = FIRST_KEY + KEYS
VOCABULARY = 128

SIZES: Mapping[str, Any] = MappingProxyType(
    {
        "vocab_size": VOCABULARY,
        "d_token": 128,
        "d_state": 128,
        "n_directions": 16,
        "metric_rank": 8,
        "hidden_size": 256,
        "direction_basis": 32,
        "metric_basis": 32,
        "block_length": 64,
        "mixer_hidden": 64,
        "memory_hidden": 64,
    }
)
"""Sizes of the published probe, ``variant(name).config(**SIZES)``. All variants get the same memory
width, so the controls are not matched in parameters here."""


class Recall(NamedTuple):
    """Inputs ``(B, T)``, the tokens after them, and the positions where one is asked for, bool."""

    x: Tensor
    y: Tensor
    asked: Tensor

    def to(self, device: torch.device) -> Recall:
        """The same on a device."""
        return Recall(*(v.to(device) for v in self))

    def loss(self, logits: Tensor) -> Tensor:
        """Mean cross entropy of logits ``(B, T, 128)`` where tokens are asked for."""
        return F.cross_entropy(logits[self.asked], self.y[self.asked])

    def right(self, logits: Tensor) -> Tensor:
        """Whether the likeliest token is right, of every position that is asked, flat: 1 or 0."""
        return (logits.argmax(-1) == self.y)[self.asked].double()


def recall_sequences(generator: Generator, batch: int, length: int = 39) -> Recall:
    """Sequences, and where a queried key is asked for its value.

    Parameters
    ----------
    generator
        Source of all randomness.
    batch
        Number of sequences.
    length
        ``5 pairs - 1``: 39 for 8 pairs.

    Raises
    ------
    ValueError
        If the length is none of a whole number of pairs, 1 to 32.
    """
    pairs, rest = divmod(length + 1, 5)
    if rest or not 1 <= pairs <= KEYS:
        raise ValueError(
            f"length: got {length}, expected 5 · pairs - 1 with 1 to {KEYS} pairs, such as 39."
        )
    keys = torch.rand(batch, KEYS, generator=generator).argsort(1)[:, :pairs]
    values = torch.randint(0, VALUES, (batch, pairs), generator=generator)
    order = torch.rand(batch, pairs, generator=generator).argsort(1)
    shown = torch.stack([FIRST_KEY + keys, FIRST_VALUE + values], -1)
    again = shown.gather(1, order.unsqueeze(-1).expand(-1, -1, 2))
    mark = torch.full((batch, pairs, 1), MARK)
    text = torch.cat([shown.flatten(1), torch.cat([mark, again], -1).flatten(1)], 1)
    asked = torch.zeros(batch, 5 * pairs - 1, dtype=torch.bool)
    asked[:, 2 * pairs + 1 :: 3] = True
    return Recall(text[:, :-1], text[:, 1:], asked)


@dataclass(frozen=True)
class RecallResult:
    """Result of a run: mean loss in nats and accuracy at the queried keys, on fresh sequences."""

    loss: float
    accuracy: float
    parameters: int
    steps: int
    seed: int
    seconds: float


def recall_probe(
    model: nn.Module,
    *,
    seed: int = 1,
    steps: int = 1000,
    batch: int = 32,
    lr: float = 3e-4,
    weight_decay: float = 0.01,
    clip: float = 1.0,
    tests: int = 32,
    answer: Callable[[Tensor, int | None], Tensor] | None = None,
) -> RecallResult:
    """Train a model on fresh sequences with AdamW, then test it.

    The defaults are the published protocol. The stream of training batches comes from ``seed``, the
    test batches from ``100000 + seed``; the initial weights are the model's own affair.

    Parameters
    ----------
    model
        Trained in place.
    seed, steps, batch, lr, weight_decay, clip, tests
        Settings; ``clip`` bounds the norm of the whole gradient, ``tests`` counts batches.
    answer
        ``answer(tokens, step)`` gives logits ``(B, T, 128)``, with step None in the test. By
        default the ``logits`` of a :class:`DRM`'s output; give one for any other model.

    Raises
    ------
    TypeError
        If a count is no integer.
    ValueError
        If a count is out of range; if a DRM has another vocabulary than the probe; or if a loss or
        gradient is not finite: nothing is learnt from it, and the run ends.
    """
    for name, count, least in (("steps", steps, 0), ("batch", batch, 1), ("tests", tests, 1)):
        checks.whole(f"recall_probe: {name}", count, least)
    if answer is None and isinstance(model, DRM) and model.config.vocab_size != VOCABULARY:
        raise ValueError(
            f"recall_probe: model: got vocab_size={model.config.vocab_size}, expected {VOCABULARY}, "
            "that of the probe; use vocab_size=128, or the sizes pararnn.drm.mqar.SIZES."
        )
    began = time.perf_counter()
    device = next(model.parameters()).device
    ask = answer or (lambda tokens, step: model(tokens, step=step).logits)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=weight_decay)
    generator = Generator().manual_seed(seed)
    model.train()
    for step in range(steps):
        drawn = recall_sequences(generator, batch).to(device)
        loss = drawn.loss(ask(drawn.x, step))
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
        if not (loss.isfinite() and norm.isfinite()):
            raise ValueError(
                f"recall_probe: got a loss of {float(loss.detach())} with a gradient of norm "
                f"{float(norm)} in step {step}, expected finite numbers; lower lr."
            )
        optimizer.step()
    model.eval()
    losses, right = [], []
    with torch.no_grad():
        generator = Generator().manual_seed(100_000 + seed)
        for _ in range(tests):
            drawn = recall_sequences(generator, batch).to(device)
            logits = ask(drawn.x, None)
            losses.append(drawn.loss(logits))
            right.append(drawn.right(logits))
    return RecallResult(
        float(torch.stack(losses).mean()),
        float(torch.cat(right).mean()),
        sum(p.numel() for p in model.parameters()),
        steps,
        seed,
        time.perf_counter() - began,
    )
