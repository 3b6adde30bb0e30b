"""The language model: embedding, base states by one of three paths, corrections, logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor, nn

from pararnn import checks

from .block import block_states, blockwise_states
from .bound import bound_state
from .config import DRMConfig
from .consistency import Blocks
from .dynamics import DRMDynamics
from .emitter import LanguageEmitter
from .graph import ended, mapped
from .initial import DRMStateInitializer, TokenEmbedding
from .memory import SelectiveMemory
from .mixer import CausalLocalMixer
from .networks import shifted
from .parallel import parallel_rollout
from .recurrent import recurrent_states
from .refinement import DRMRefinementLayer
from .residual import TokenStateResidual
from .rollout import Rollout, joined, trace_of
from .streams import stream
from .sweeps import Sweeps
from .trace import Trace

_STATE = "that the state has a row for each row of tokens, and is of a model of this width"


@dataclass(frozen=True)
class DRMState:
    """Where a sequence can be taken up, at the end of a block.

    A state keeps the graph that it comes from, so that the losses of several pieces can have one backward pass.
    To train on a long text with an update a piece (truncated backpropagation through time), go on from
    :meth:`detach`; without it the second update is an error that says so.

    Attributes
    ----------
    z : Tensor
        ``(B, d_state)``.
    memory : Tensor, optional
        ``(B, d_state)``; None where no memory is carried.
    """

    z: Tensor
    memory: Tensor | None = None

    def detach(self) -> DRMState:
        """The same state without a graph."""
        return mapped(self, Tensor.detach)


@dataclass(frozen=True)
class Before:
    """What the corrections of tokens look at of the tokens before them in their block.

    Attributes
    ----------
    base, moved : Tensor
        The last base state, and the last one after mixer and token residual, ``(B, d_state)``.
    refined : tuple of Tensor
        The last state that came into each refinement layer, ``(B, d_state)``.
    mixer : tuple of Tensor
        See :meth:`CausalLocalMixer.run <pararnn.drm.CausalLocalMixer.run>`; empty before the first token.
    """

    base: Tensor
    moved: Tensor
    refined: tuple[Tensor, ...]
    mixer: tuple[Tensor, ...] = ()


@dataclass(frozen=True)
class DRMOutput:
    """What the model returns.

    Attributes
    ----------
    logits : Tensor
        ``(B, T, vocab_size)``; those at t are of the token after ``x_t``, which the state has
        absorbed.
    states : Tensor
        Emitted states, ``(B, T, d_state)``.
    base : Tensor
        Base states, before mixer, residual and memory, ``(B, T, d_state)``.
    state : DRMState
        After the last token.
    recorded : Trace, optional
        See :attr:`trace`.
    sweeps : Sweeps, optional
        Of the parallel path: whether and how it converged, what it cost and how far it may be off.
    blocks : Blocks, optional
        Recorded with the trace on the block path, to compare it with the recurrence.
    """

    logits: Tensor
    states: Tensor
    base: Tensor
    state: DRMState
    recorded: Trace | None = None
    sweeps: Sweeps | None = None
    blocks: Blocks | None = None

    @property
    def trace(self) -> Trace:
        """Velocities and geometry, for the losses.

        Raises
        ------
        ValueError
            If the model was not asked to record them.
        """
        if self.recorded is None:
            raise ValueError("trace: got an output without one; call the model with trace=True.")
        return self.recorded


class DRM(nn.Module):
    """The geometric state-space language model of the notes.

    It trains under a plain ``DistributedDataParallel``: each parameter is frozen, or gets a gradient in every
    backward pass of the logits. Frozen (``requires_grad`` is False) is what a configuration has but never uses:
    a risk that is ``'disabled'``, the metric where ``naturalization_strength`` is 0, and corrections that do not act on
    the path. ``torch.autograd.grad`` takes no frozen parameters. What is used in some calls only gets a
    gradient of zeros in the others, on which weight decay acts as on any: the metric where the strength of
    naturalization is 0 (step 0 of a warm-up, or a metric that is trained for losses alone), the learned first
    state where a state is given, and a risk that no mixer looks at.

    Parameters
    ----------
    config
        Sizes, parts and semantics; the default is the notes with base dynamics only.

    Raises
    ------
    TypeError
        If ``config`` is not a :class:`DRMConfig`.
    """

    last_step: Tensor

    def __init__(self, config: DRMConfig):
        super().__init__()
        if not isinstance(config, DRMConfig):
            raise TypeError(
                f"config: got {type(config).__name__}, expected a DRMConfig; "
                "use DRMConfig.from_dict(...) for plain values."
            )
        self.config = config
        d, e, seed = config.d_state, config.d_token, config.seed
        with stream(seed, "embedding"):
            self.embedding = TokenEmbedding(config.vocab_size, e)
        with stream(seed, "state"):
            self.initializer = DRMStateInitializer(d)
        self.dynamics = DRMDynamics(config)
        self.mixer: CausalLocalMixer | None = None
        if config.mixer:
            with stream(seed, "mixer"):
                self.mixer = CausalLocalMixer(
                    d,
                    e,
                    config.mixer_hidden,
                    kernel=config.mixer_kernel,
                    layers=config.mixer_layers,
                    growth=config.mixer_dilation_growth,
                    scale=config.mixer_scale,
                )
        self.residual: TokenStateResidual | None = None
        if config.token_residual:
            with stream(seed, "residual"):
                self.residual = TokenStateResidual(d, e, scale=config.token_residual_scale)
        self.memory: SelectiveMemory | None = None
        if config.memory:
            with stream(seed, "memory"):
                self.memory = SelectiveMemory(config)
        self.refinement = nn.ModuleList(
            DRMRefinementLayer(config, 1 + i) for i in range(config.refinement_layers)
        )
        with stream(seed, "emitter"):
            self.emitter = LanguageEmitter(config)
        # The last training step seen; -1 before the first.
        self.register_buffer("last_step", torch.tensor(-1))
        for part in self._unused():
            part.requires_grad_(False)

    def _unused(self) -> list[nn.Module]:
        """Parts that no logits of this configuration depend on."""
        config = self.config
        parts: list[nn.Module | None] = []
        if not config.naturalization_strength:
            fields = (m for m in self.modules() if isinstance(m, DRMDynamics))
            parts += [field.metric for field in fields]
        if config.risk == "disabled":
            parts.append(self.dynamics.risk)
        if not config.corrected:
            parts += [self.mixer, self.residual, self.memory, self.refinement]
        return [part for part in parts if part is not None]

    def _idle(self, given: bool, strength: float) -> list[nn.Parameter]:
        """Parameters that the logits of a call do not depend on, though those of others do."""
        config = self.config
        parts: list[nn.Module | None] = [self.initializer] if given else []
        if not strength:
            parts += [m.metric for m in self.modules() if isinstance(m, DRMDynamics)]
        if self.mixer is None or not config.corrected:
            parts.append(self.dynamics.risk)
        return [p for part in parts if part is not None for p in part.parameters()]

    def weights(self, idle: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """Matrices between tokens and states, without the idle ones."""
        parts = (self.dynamics, self.mixer, self.residual, self.memory, self.refinement)
        known = (p for part in parts if part is not None for p in part.parameters())
        left = {id(p) for p in idle}
        return [p for p in known if p.ndim > 1 and id(p) not in left]

    @property
    def carries_memory(self) -> bool:
        """Whether the memory is one recurrence over all blocks."""
        config = self.config
        return config.memory and config.corrected and config.memory_start == "carried"

    def initial_state(self, batch: int) -> DRMState:
        """The learned first state, and an empty memory."""
        z = self.initializer(batch)
        zero = z.new_zeros(z.shape, dtype=checks.state_dtype(z.dtype))
        return DRMState(z, zero if self.carries_memory else None)

    def forward(
        self,
        tokens: Tensor,
        state: DRMState | None = None,
        *,
        step: int | None = None,
        trace: bool = False,
    ) -> DRMOutput:
        """Logits, states and the state to go on from.

        Parameters
        ----------
        tokens
            ``(B, T)`` integers. Blocks are counted from the first of them.
        state
            To start from; by default the learned one. To go on as if the sequence had been given at
            once, cut it between blocks.
        step
            The training step, for the warm-up of naturalization.
        trace
            Record what the losses look at.

        Raises
        ------
        TypeError, ValueError
            If tokens or state do not fit, or a model in training has a warm-up and is given no
            step.
        """
        config, e, given = self.config, self.embedding(tokens), state is not None
        state = self._checked(state, e)
        strength = self.strength(step)
        final, sweeps = config.path == "block" and config.block_carry == "final", None
        if final:
            base, states, memory = self._block_by_block(state, e, strength, trace)
        else:
            base, sweeps = self._base(state.z, e, strength, trace)
            states, memory = self._corrected(base, state, e, strength)
        idle = self._idle(given, strength)
        values = ended((base.states, states, memory), idle, self.weights(idle))
        base_states, states = cast(Tensor, values[0]), cast(Tensor, values[1])
        last = (states if final else base_states)[:, -1] if e.shape[1] else state.z
        after = DRMState(last, values[2])
        out = DRMOutput(self.emitter(states), states, base_states, after, sweeps=sweeps)
        if not trace:
            return out
        metric = self.dynamics.metric
        frozen = metric is not None and not any(p.requires_grad for p in metric.parameters())
        recorded = replace(trace_of(base), metric_frozen=frozen)
        return replace(out, recorded=recorded, blocks=self._blocks(state.z, out, e, strength))

    def _blocks(self, z: Tensor, out: DRMOutput, e: Tensor, strength: float) -> Blocks | None:
        """Blocks that approximate a recurrence, if there are any."""
        config = self.config
        if config.path != "block" or config.transition == "none":
            return None
        length = min(config.block_length or e.shape[1], e.shape[1]) or 1
        carried = out.states if config.block_carry == "final" else out.base
        start = shifted(z, carried)[:, ::length]
        return Blocks(self.dynamics, start, out.base, e, strength, length)

    def _base(
        self, z: Tensor, e: Tensor, strength: float, measure: bool
    ) -> tuple[Rollout, Sweeps | None]:
        """Base states, which depend on no correction."""
        if self.config.path == "parallel":
            return parallel_rollout(self.dynamics, z, e, strength, measure=measure)
        if self.config.path == "recurrent":
            return recurrent_states(self.dynamics, z, e, strength, measure=measure), None
        length = self.config.block_length
        return blockwise_states(self.dynamics, z, e, strength, length, measure=measure), None

    def _block_by_block(
        self, state: DRMState, e: Tensor, strength: float, measure: bool
    ) -> tuple[Rollout, Tensor, Tensor | None]:
        """Base states, corrected states and the memory, where a block starts from corrected states."""
        rollouts, states = [], []
        for piece in e.split(self.config.block_length or max(1, e.shape[1]), 1):
            base = block_states(self.dynamics, state.z, piece, strength, measure=measure)
            final, memory = self._corrected(base, state, piece, strength)
            state = DRMState(final[:, -1] if piece.shape[1] else state.z, memory)
            rollouts.append(base)
            states.append(final)
        return joined(rollouts), torch.cat(states, 1), state.memory

    def _corrected(
        self, base: Rollout, state: DRMState, e: Tensor, strength: float
    ) -> tuple[Tensor, Tensor | None]:
        """States after mixer, token residual, memory and refinement, and the memory to go on from.

        All blocks at once: they lie side by side in the batch, ``(B·N, L, ...)``, the last one
        filled up with zeros, which nothing before them sees.
        """
        config = self.config
        batch, length = e.shape[:2]
        block = min(config.block_length or length, length) or 1
        count = -(-length // block)

        def apart(x: Tensor) -> Tensor:
            padding = x.new_zeros(batch, count * block - length, *x.shape[2:])
            return torch.cat([x, padding], 1).reshape(batch * count, block, *x.shape[2:])

        def together(x: Tensor) -> Tensor:
            return x.reshape(batch, count * block, *x.shape[2:])[:, :length]

        start = shifted(state.z, base.states)[:, ::block].flatten(0, 1)

        def remembered(memory: SelectiveMemory, f: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
            if state.memory is None:
                return memory.scan(f, u, start)
            m, last = memory.scan(together(f), together(u), state.memory)
            return apart(m), last

        moves = apart(base.states), apart(base.increments), apart(e)
        features = (base.mass(), base.risk()) if self.mixer is not None else (None, None)
        mass, risk = (None if x is None else apart(x) for x in features)
        before = self.before(start)
        states, _, memory = self.correct(*moves, mass, risk, before, strength, remembered)
        return together(states), memory if self.carries_memory else None

    def before(self, start: Tensor) -> Before:
        """What the first tokens of blocks look at, ``start (B, d_state)``."""
        return Before(start, start, (start,) * len(self.refinement))

    def correct(
        self,
        states: Tensor,
        increments: Tensor,
        e: Tensor,
        mass: Tensor | None,
        risk: Tensor | None,
        before: Before,
        strength: float,
        remembered: Callable[[SelectiveMemory, Tensor, Tensor], tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Before, Tensor | None]:
        """Mixer, token residual, memory and refinement, for consecutive tokens of one block; nothing
        on a path on which they do not act.

        Parameters
        ----------
        states, increments
            Base states and what each token added, ``(B, L, d_state)``.
        e
            Embeddings, ``(B, L, d_token)``.
        mass, risk
            dimD and risk mass, ``(B, L)``, or None without.
        before
            Of the tokens before them.
        strength
            Of naturalization.
        remembered
            Memories ``(B, L, d_state)`` and the last one, of the memory and its affine maps.

        Returns
        -------
        states, before, memory
            Corrected states, and what later tokens look at; None without a memory.
        """
        if not self.config.corrected:
            return states, replace(before, base=states[:, -1]), None
        radius = self.dynamics.radius if self.config.bound_corrections else None
        base, history, memory = states, before.mixer, None
        if self.mixer is not None:
            mixed, history = self.mixer.run(states, before.base, increments, e, mass, risk, history)
            states = bound_state(mixed, radius)
        if self.residual is not None:
            states = bound_state(self.residual(states, e), radius)
        moved, refined = states, []
        if self.memory is not None:
            m, memory = remembered(self.memory, *self.memory.maps(states, before.moved, e))
            states = bound_state(states + self.config.memory_scale * m.to(states.dtype), radius)
        for layer, last in zip(self.refinement, before.refined, strict=True):
            refined.append(states[:, -1])
            states = bound_state(layer(states, last, e, strength), radius)
        after = Before(base[:, -1], moved[:, -1], tuple(refined), history)
        return states, after, memory

    def _checked(self, state: DRMState | None, e: Tensor) -> DRMState:
        if state is None:
            return self.initial_state(e.shape[0])
        if not isinstance(state, DRMState):
            raise TypeError(
                f"state: got {type(state).__name__}, expected a DRMState; use the state of an output "
                "of this model, or initial_state(batch)."
            )
        shape = (e.shape[0], self.config.d_state)
        checks.shaped("state.z", state.z, shape, 0, _STATE)
        if (state.memory is not None) != self.carries_memory:
            raise ValueError(
                f"state.memory: got {'a tensor' if state.memory is not None else 'None'}, expected "
                f"{'a tensor' if self.carries_memory else 'None'}; use the state of an output of "
                "this model, or initial_state(batch)."
            )
        if state.memory is not None:
            checks.shaped("state.memory", state.memory, shape, 0, _STATE)
        own = self.initializer.z0.dtype
        for name, value, dtype in (
            ("z", state.z, own),
            ("memory", state.memory, checks.state_dtype(own)),
        ):
            if value is not None and value.dtype != dtype:
                raise TypeError(
                    f"state.{name}: got {value.dtype}, expected {dtype} of a model with parameters of {own}; "
                    "convert it with .to(...)."
                )
        return state

    def strength(self, step: int | None = None) -> float:
        """Of naturalization in a training step, which is remembered; or now, without one.

        Raises
        ------
        ValueError
            If ``step`` is no integer ≥ 0, or None in training with a warm-up.
        """
        config = self.config
        if step is not None:
            if isinstance(step, bool) or not isinstance(step, int) or step < 0:
                raise ValueError(f"step: got {step!r}, expected an integer ≥ 0, or None.")
            if self.training and config.naturalization_warmup:
                self.last_step.fill_(step)
            return config.strength(step)
        if not config.naturalization_warmup:
            return config.naturalization_strength
        if self.training:
            raise ValueError(
                f"step: got None in training with naturalization_warmup="
                f"{config.naturalization_warmup}; give the step, or set the warm-up to 0."
            )
        if config.evaluation_strength == "maximum" or int(self.last_step) < 0:
            return config.naturalization_strength
        return config.strength(int(self.last_step))
