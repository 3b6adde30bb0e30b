"""The language model: embedding, base states by one of two paths, corrections, logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .. import _checks as checks
from .block import block_states
from .bound import bound_state
from .config import DRMConfig
from .dynamics import DRMDynamics
from .emitter import LanguageEmitter
from .initial import DRMStateInitializer, TokenEmbedding
from .memory import SelectiveMemory
from .mixer import CausalLocalMixer
from .recurrent import recurrent_states
from .refinement import DRMRefinementLayer
from .residual import TokenStateResidual
from .rollout import Rollout, trace_of
from .streams import stream
from .trace import Trace


@dataclass(frozen=True)
class DRMState:
    """Where a sequence can be taken up, at the end of a block.

    Attributes
    ----------
    z : Tensor
        ``(B, d_state)``.
    memory : Tensor, optional
        ``(B, d_state)``; None where no memory is carried.
    """

    z: Tensor
    memory: Tensor | None = None


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
    """

    logits: Tensor
    states: Tensor
    base: Tensor
    state: DRMState
    recorded: Trace | None = None

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

    @property
    def carries_memory(self) -> bool:
        """Whether the memory is one recurrence over all blocks."""
        return self.memory is not None and self.config.memory_start == "carried"

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
        e = self.embedding(tokens)
        state = self._checked(state, e)
        strength = self._strength(step)
        run = self._recurrent if self.config.path == "recurrent" else self._blocks
        states, rollouts, after = run(state, e, strength, trace)
        emitted = torch.cat(states, 1) if states else state.z.unsqueeze(1)[:, :0]
        base = torch.cat([r.states for r in rollouts], 1) if rollouts else emitted
        recorded = trace_of(rollouts, e.device) if trace else None
        return DRMOutput(self.emitter(emitted), emitted, base, after, recorded)

    def _blocks(
        self, state: DRMState, e: Tensor, strength: float, measure: bool
    ) -> tuple[list[Tensor], list[Rollout], DRMState]:
        """Base states and corrections, block by block."""
        states, rollouts = [], []
        z, memory = state.z, state.memory
        for piece in self._cut(e):
            rollout = block_states(self.dynamics, z, piece, strength, measure=measure)
            final, memory = self._corrected(
                rollout.states,
                rollout.increments,
                piece,
                rollout.mass(),
                rollout.risk(),
                z,
                memory,
                strength,
            )
            z = (final if self.config.block_carry == "final" else rollout.states)[:, -1]
            states.append(final)
            rollouts.append(rollout)
        return states, rollouts, DRMState(z, memory)

    def _recurrent(
        self, state: DRMState, e: Tensor, strength: float, measure: bool
    ) -> tuple[list[Tensor], list[Rollout], DRMState]:
        """All base states, one after the other; then the corrections, block by block."""
        rollout = recurrent_states(self.dynamics, state.z, e, strength, measure=measure)
        z, memory, states = state.z, state.memory, []
        mass, risk = rollout.mass(), rollout.risk()
        masses = [None] * e.shape[1] if mass is None else self._cut(mass)
        risks = [None] * e.shape[1] if risk is None else self._cut(risk)
        pieces = zip(
            self._cut(rollout.states),
            self._cut(rollout.increments),
            self._cut(e),
            masses,
            risks,
            strict=False,  # what is absent is None as often as needed
        )
        for base, increments, piece, m, r in pieces:
            final, memory = self._corrected(base, increments, piece, m, r, z, memory, strength)
            z = base[:, -1]
            states.append(final)
        return states, [rollout], DRMState(z, memory)

    def _cut(self, sequence: Tensor) -> tuple[Tensor, ...]:
        """Blocks of a sequence ``(B, T, ...)``; none of an empty one."""
        if not sequence.shape[1]:
            return ()
        return sequence.split(self.config.block_length or sequence.shape[1], 1)

    def _corrected(
        self,
        states: Tensor,
        increments: Tensor,
        e: Tensor,
        mass: Tensor | None,
        risk: Tensor | None,
        start: Tensor,
        memory: Tensor | None,
        strength: float,
    ) -> tuple[Tensor, Tensor | None]:
        """States of a block after mixer, token residual, memory and refinement, and its memory."""
        config = self.config
        radius = self.dynamics.radius if config.bound_corrections else None
        if self.mixer is not None:
            mixed = self.mixer(states, start, increments, e, mass, risk)
            states = bound_state(mixed, radius)
        if self.residual is not None:
            states = bound_state(self.residual(states, e), radius)
        if self.memory is not None:
            m, last = self.memory(states, start, e, start if memory is None else memory)
            memory = last if self.carries_memory else None
            states = bound_state(states + config.memory_scale * m.to(states.dtype), radius)
        for layer in self.refinement:
            states = bound_state(layer(states, start, e, strength), radius)
        return states, memory

    def _checked(self, state: DRMState | None, e: Tensor) -> DRMState:
        if state is None:
            return self.initial_state(e.shape[0])
        shape = (e.shape[0], self.config.d_state)
        checks.trailing("state.z", checks.floating("state.z", state.z), shape, 0)
        if (state.memory is not None) != self.carries_memory:
            raise ValueError(
                f"state.memory: got {'a tensor' if state.memory is not None else 'None'}, expected "
                f"{'a tensor' if self.carries_memory else 'None'}; use the state of an output of "
                "this model, or initial_state(batch)."
            )
        if state.memory is not None:
            checks.trailing("state.memory", checks.floating("state.memory", state.memory), shape, 0)
        return state

    def _strength(self, step: int | None) -> float:
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
