"""Reading and writing token by token: prefill and decode agree with the whole forward.

A state can be taken up at the end of a block only, since a block's geometry, its mixer and its
memory's first input start there. A :class:`Stream` keeps that state and the tokens of the open block,
which is computed anew for each token: at most one block of work a token, however long the text.
Without mixer and memory the recurrence can be taken up wherever its geometry is new: with an interval
of 1, one step of work a token.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import _checks as checks
from .config import DRMConfig
from .model import DRM, DRMState


@dataclass(frozen=True)
class Stream:
    """A text that has been read so far.

    Attributes
    ----------
    state
        At the last place where the text can be taken up, as after a whole block.
    open
        Tokens after it, ``(B, j)``, fewer than a block.
    """

    state: DRMState
    open: Tensor


def start_stream(model: DRM, batch: int) -> Stream:
    """The empty text."""
    state = model.initial_state(batch)
    return Stream(state, torch.empty(batch, 0, dtype=torch.int64, device=state.z.device))


def read(model: DRM, tokens: Tensor, stream: Stream | None = None) -> tuple[Tensor, Stream]:
    """Logits after each of some tokens, and the stream to go on from.

    However a text is cut into pieces, the logits are those of the whole, up to rounding. With
    ``block_length=0`` the block never ends, and each call computes the whole text.

    Parameters
    ----------
    model
        In evaluation, or in training without warm-up, dropout and truncation.
    tokens
        ``(B, T)`` integers; ``T`` may be 0.
    stream
        To go on from; the empty text if not given.

    Returns
    -------
    logits
        ``(B, T, vocab_size)``.
    stream
        After these tokens. The one given stays valid.

    Raises
    ------
    TypeError, ValueError
        If tokens or stream do not fit the model.
    NotImplementedError
        If geometry is kept over flow steps of the recurrent path in a way that does not end with
        each block.
    """
    _integers("read: tokens", tokens)
    every = _resume_every(model.config)
    if stream is None:
        stream = start_stream(model, tokens.shape[0])
    if not isinstance(stream, Stream):
        raise TypeError(
            f"read: stream: got {type(stream).__name__}, expected a Stream; use the one that read "
            "returned, or start_stream(model, batch)."
        )
    if stream.open.shape[0] != tokens.shape[0]:
        raise ValueError(
            f"read: got {tokens.shape[0]} rows of tokens and a stream of {stream.open.shape[0]}, "
            "expected as many."
        )
    pending = torch.cat([stream.open, tokens.to(stream.open)], 1)
    whole = pending.shape[1] // every * every if every else 0
    logits, state = [], stream.state
    if whole:
        out = model(pending[:, :whole], state)
        logits.append(out.logits)
        state = out.state
    rest = pending[:, whole:]
    if rest.shape[1] or not whole:
        logits.append(model(rest, state).logits)
    return torch.cat(logits, 1)[:, stream.open.shape[1] :], Stream(state, rest)


def generate(
    model: DRM,
    prompt: Tensor,
    length: int,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Tokens drawn one after the other, without gradients and in evaluation.

    Parameters
    ----------
    model
        Its mode is restored afterwards.
    prompt
        ``(B, T)`` integers, at least one each.
    length
        How many tokens to draw.
    temperature
        Logits are divided by it; with 0 the likeliest token is taken.
    top_k
        Draw among the k likeliest tokens only (more where they tie); 0: among all.
    generator
        Source of randomness; PyTorch's global one if not given.

    Returns
    -------
    Tensor
        ``(B, length)`` int64, without the prompt.

    Raises
    ------
    TypeError
        If an argument is of another type.
    ValueError
        If the prompt is empty, or ``length``, ``temperature`` or ``top_k`` is out of range.
    """
    if _integers("generate: prompt", prompt).shape[1] == 0:
        raise ValueError(
            f"generate: prompt: got shape {tuple(prompt.shape)}, expected (B, T) with T ≥ 1."
        )
    checks.whole("generate: length", length)
    checks.number("generate: temperature", temperature)
    if checks.whole("generate: top_k", top_k) > model.config.vocab_size:
        raise ValueError(
            f"generate: top_k: got {top_k}, expected 0 (all) to vocab_size="
            f"{model.config.vocab_size}."
        )
    drawn: list[Tensor] = []
    with _evaluation(model), torch.no_grad():
        stream, piece = start_stream(model, prompt.shape[0]), prompt
        for _ in range(length):
            logits, stream = read(model, piece, stream)
            piece = _draw(logits[:, -1], temperature, top_k, generator)
            drawn.append(piece)
    return torch.cat(drawn, 1) if drawn else prompt.new_empty(prompt.shape[0], 0).long()


def _integers(name: str, tokens: object) -> Tensor:
    if not isinstance(tokens, Tensor):
        raise TypeError(
            f"{name}: got {type(tokens).__name__}, expected an integer tensor (B, T); text becomes "
            "one by torch.tensor([list(text.encode())])."
        )
    if tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool:
        raise TypeError(f"{name}: got {tokens.dtype}, expected integers.")
    if tokens.ndim != 2:
        raise ValueError(f"{name}: got shape {tuple(tokens.shape)}, expected (B, T).")
    return tokens


def _draw(
    logits: Tensor, temperature: float, top_k: int, generator: torch.Generator | None
) -> Tensor:
    """One token a row, ``(B, 1)``."""
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    if top_k:
        least = logits.topk(top_k, -1).values[:, -1:]
        logits = logits.masked_fill(logits < least, -math.inf)
    # In float64 and with the largest at 0, no temperature overflows.
    logits = logits.double() - logits.double().amax(-1, keepdim=True)
    return torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)


@contextmanager
def _evaluation(model: DRM) -> Iterator[None]:
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def _resume_every(c: DRMConfig) -> int:
    """Tokens from one place where a text can be taken up to the next; 0: at its start only.

    Geometry that is kept over several flow steps has to be new there.
    """
    if c.path == "block":
        return c.block_length
    fresh = c.geometry_interval // math.gcd(c.geometry_interval, c.flow_steps)
    if not (c.corrected and (c.mixer or c.memory)):
        return fresh
    if c.block_length % fresh:
        raise NotImplementedError(
            f"read: got geometry_interval={c.geometry_interval} and blocks of {c.block_length} "
            f"tokens with {c.flow_steps} flow steps each, expected blocks of whole intervals; "
            "change block_length."
        )
    return c.block_length
