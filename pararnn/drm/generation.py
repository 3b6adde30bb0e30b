"""Reading and writing token by token: prefill and decode agree with the whole forward.

A :class:`Stream` keeps what later tokens look at: the sum of the open block and the geometry at its start,
or the last state of a recurrence and the geometry that it keeps; the inputs in reach of the mixer's
convolutions; the last states that memory and refinement see; the memory. Its size does not depend on
how much was read, and neither does the work of a token: it evaluates the parts once, at that token.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from pararnn import checks

from .block import block_states
from .config import DRMConfig
from .dynamics import Geometry
from .graph import ended, mapped, tensors
from .memory import SelectiveMemory
from .model import DRM, Before, DRMState
from .parallel import parallel_rollout
from .recurrent import recurrent_states
from .rollout import Rollout


@dataclass(frozen=True)
class Stream:
    """A text that has been read so far: what later tokens look at, as long as the parameters stay.

    Attributes
    ----------
    length : int
        Tokens that have been read.
    start, reached : Tensor
        The state at the start of the open block, and that plus its increments, ``(B, d_state)``, the
        latter in float32 at least.
    before : Before
        What the corrections look at.
    memory : Tensor, optional
        After the last token, ``(B, d_state)``; None without a memory, and where one starts anew from the
        state at the start of the block.
    geometry : Geometry, optional
        On the block path, at the start of the open block; on the recurrent path, the last one. None
        where it is to be evaluated anew.
    """

    length: int
    start: Tensor
    reached: Tensor
    before: Before
    memory: Tensor | None
    geometry: Geometry | None

    def detach(self) -> Stream:
        """The same stream without a graph, to train on a long text with an update a piece."""
        return mapped(self, Tensor.detach)


def start_stream(model: DRM, batch: int) -> Stream:
    """The empty text."""
    return _opened(model, model.initial_state(batch), 0)


def read(model: DRM, tokens: Tensor, stream: Stream | None = None) -> tuple[Tensor, Stream]:
    """Logits after each of some tokens, and the stream to go on from.

    However a text is cut into pieces, the logits are those of the whole, up to rounding. Whole blocks
    are computed as by the model itself; a single token costs the same wherever it is.

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
        After these tokens. The one given stays valid. It keeps its graph, as a :class:`DRMState` does.

    Raises
    ------
    TypeError, ValueError
        If tokens or stream do not fit the model.
    """
    _integers("read: tokens", tokens)
    if stream is None:
        stream = start_stream(model, tokens.shape[0])
    if not isinstance(stream, Stream):
        raise TypeError(
            f"read: stream: got {type(stream).__name__}, expected a Stream; use the one that read "
            "returned, or start_stream(model, batch)."
        )
    if stream.start.shape[0] != tokens.shape[0]:
        raise ValueError(
            f"read: got {tokens.shape[0]} rows of tokens and a stream of {stream.start.shape[0]}, "
            "expected as many."
        )
    if not _fits(model, stream):
        raise ValueError(
            "read: stream: got that of a model of another width or with other parts, expected one that "
            "read or start_stream returned for this model."
        )
    tokens = tokens.to(stream.start.device, torch.int64)
    block, every = model.config.block_length, _resume_every(model.config)
    logits, at = [], 0
    while at < tokens.shape[1]:
        left = tokens.shape[1] - at
        if every and left >= every and stream.length % every == 0:
            size = left // every * every
            memory = stream.memory if model.carries_memory else None
            out = model(tokens[:, at : at + size], DRMState(stream.start, memory))
            logits.append(out.logits)
            stream = _opened(model, out.state, stream.length + size)
        else:
            size = min(left, block - stream.length % block) if block else left
            found, stream = _within(model, tokens[:, at : at + size], stream)
            logits.append(found)
        at += size
    empty = stream.start.new_empty(tokens.shape[0], 0, model.config.vocab_size)
    return torch.cat(logits, 1) if logits else empty, stream


def _fits(model: DRM, stream: Stream) -> bool:
    """Whether the model has a use for all of a stream, and needs no more."""
    before, memory = stream.before, stream.memory is not None
    layers = len(model.mixer.convs) if model.mixer is not None else 0
    return (
        stream.start.shape[1] == model.config.d_state
        and len(before.refined) == len(model.refinement)
        and len(before.mixer) in (0, layers)
        and (memory or not model.carries_memory)
        and (not memory or model.memory is not None)
    )


def _within(model: DRM, tokens: Tensor, stream: Stream) -> tuple[Tensor, Stream]:
    """As :func:`read`, for one token or more of one block."""
    c, e, strength = model.config, model.embedding(tokens), model.strength()
    base = _base(model, e, stream, strength)

    def remembered(memory: SelectiveMemory, f: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        return memory.scan(f, u, stream.start if stream.memory is None else stream.memory)

    states, before, memory = model.correct(
        base.states,
        base.increments,
        e,
        base.mass(),
        base.risk(),
        stream.before,
        strength,
        remembered,
    )
    geometry = base.geometry[-1] if base.geometry and c.path != "parallel" else None
    length = stream.length + e.shape[1]
    if c.block_length and length % c.block_length == 0:
        final = c.path == "block" and c.block_carry == "final"
        z = (states if final else base.states)[:, -1]
        state = DRMState(z, memory if model.carries_memory else None)
        after = _opened(model, state, length, geometry if c.path == "recurrent" else None)
    else:
        reached = stream.reached + base.increments.sum(1, dtype=stream.reached.dtype)
        after = Stream(length, stream.start, reached, before, memory, geometry)
    first, *rest = ended((states, *tensors(after)), (), model.weights(()))
    through = cast(Iterator[Tensor], iter(rest))
    return model.emitter(cast(Tensor, first)), mapped(after, lambda x: next(through))


def _base(model: DRM, e: Tensor, stream: Stream, strength: float) -> Rollout:
    """Base states of tokens of one block."""
    c, dynamics, geometry, last = model.config, model.dynamics, stream.geometry, stream.before.base
    if c.path == "parallel":
        return parallel_rollout(dynamics, last, e, strength, measure=False)[0]
    if c.path == "recurrent":
        taken = stream.length * c.flow_steps
        return recurrent_states(
            dynamics, last, e, strength, measure=False, geometry=geometry, taken=taken
        )
    return block_states(
        dynamics,
        stream.start,
        e,
        strength,
        measure=False,
        geometry=geometry,
        reached=stream.reached,
    )


def _opened(model: DRM, state: DRMState, length: int, geometry: Geometry | None = None) -> Stream:
    """A stream at the start of a block."""
    reached = state.z.to(checks.state_dtype(state.z.dtype))
    return Stream(length, state.z, reached, model.before(state.z), state.memory, geometry)


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
        If the prompt is empty, or ``length``, ``temperature`` or ``top_k`` is out of range, or logits are
        not finite.
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
        finite = torch.ones((), dtype=torch.bool, device=stream.start.device)
        for _ in range(length):
            logits, stream = read(model, piece, stream)
            last = logits[:, -1]
            finite = finite & last.isfinite().all()
            if checks.readable(finite):
                _finite(finite, len(drawn))
            piece = _draw(last.nan_to_num(), temperature, top_k, generator)
            drawn.append(piece)
        _finite(finite, len(drawn))
    return torch.cat(drawn, 1) if drawn else prompt.new_empty(prompt.shape[0], 0).long()


def _finite(finite: Tensor, drawn: int) -> None:
    """Raise unless all logits were finite; on a device this is asked once, at the end."""
    if not bool(finite):
        raise ValueError(
            f"generate: got logits that are not finite by token {drawn}, expected numbers to draw from; "
            "check the parameters for NaN and infinity."
        )


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
    """Tokens from one place where a block starts with new geometry to the next; 0: at the start only."""
    if c.path == "block":
        return c.block_length
    return math.lcm(
        c.block_length, c.geometry_interval // math.gcd(c.geometry_interval, c.flow_steps)
    )
