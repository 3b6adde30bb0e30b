"""How to solve, and what came out."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from .. import _checks as checks

JACOBIANS = ("auto", "exact", "quasi", "none")
BACKENDS = ("auto", "eager", "fused")
ON_DIVERGENCE = ("auto", "sequential", "raise", "warn", "ignore")
TOLERANCE = {torch.float64: 2e-14, torch.float32: 5e-7}


class NewtonWarning(UserWarning):
    """A pinned solve ended before it converged."""


class NewtonDivergenceError(RuntimeError):
    """A solve did not reach its tolerance, and was asked to raise.

    Attributes
    ----------
    residual_history : tuple of float
        Largest boundary mismatch seen by every pass.
    """

    def __init__(self, message: str, residual_history: tuple[float, ...]):
        super().__init__(message)
        self.residual_history = residual_history


@dataclass(frozen=True)
class NewtonConfig:
    """Settings of the dial from sequential to Newton.

    Parameters
    ----------
    chunk_length
        Steps of a chunk: 1 is Newton over single steps, the sequence length is the sequential
        algorithm. None lets the cost model choose.
    max_iters
        Pin: exactly this many corrections are made, whatever the mismatch. None iterates until
        the tolerance is met.
    tol
        Largest mismatch between the end of a chunk and the start of the next, relative to
        the trajectory: to the state, or to the largest one that its lane has had since a reset
        (which counts 1 at most). None: 5e-7 for float32 states, 2e-14 for float64, a few roundings.
    jacobian
        Operator of the correction: ``'exact'`` chunk Jacobians, ``'quasi'`` (diagonal, or
        row-averaged for a matrix state), ``'none'`` (Picard), or ``'auto'``: none in the first
        pass, then exact where it is cheap (channelwise, or chunk length 1) and quasi elsewhere.
        It changes the number of iterations, never the answer.
    warmup
        The guess of a chunk's start is the state after this many steps before it, run from zero.
        1 is the guess ``f(0, x_t)`` of the paper. None lets the cost model choose.
    iteration_cap
        An unpinned solve makes at most this many corrections, then acts on ``on_divergence``.
    on_divergence
        ``'sequential'``: run what has not converged sequentially, so the answer is right;
        ``'raise'``: :class:`NewtonDivergenceError`; ``'warn'``: :class:`NewtonWarning`;
        ``'ignore'``: only report. ``'auto'``: sequential if unpinned, warn if pinned.
    certify
        Also compute ``Solution.error_bound`` (one float64 pass and two scans more).
    backend
        ``'eager'``: PyTorch operations; ``'fused'``: one kernel call, or an error that says why
        not; ``'auto'``: fused on a CUDA device where the cell and the settings allow it, else
        eager. ``Solution.path`` and ``Solution.reason`` say which ran, and why.

    Raises
    ------
    TypeError, ValueError
        If a value is of a wrong type or out of its range, naming it.
    """

    chunk_length: int | None = None
    max_iters: int | None = None
    tol: float | None = None
    jacobian: str = "auto"
    warmup: int | None = None
    iteration_cap: int = 16
    on_divergence: str = "auto"
    certify: bool = False
    backend: str = "auto"

    def __post_init__(self) -> None:
        for name, least in (("chunk_length", 1), ("max_iters", 0), ("warmup", 1)):
            if getattr(self, name) is not None:
                checks.whole(name, getattr(self, name), least, f"an integer ≥ {least} or None")
        checks.whole("iteration_cap", self.iteration_cap, 1)
        if self.tol is not None:
            wanted = "a number between 0 and 1, or None"
            if isinstance(self.tol, bool) or not isinstance(self.tol, int | float):
                raise TypeError(f"tol: got {self.tol!r}, expected {wanted}.")
            if not 0 < self.tol < 1:
                raise ValueError(f"tol: got {self.tol!r}, expected {wanted}.")
        checks.flag("certify", self.certify)
        for name, allowed in (
            ("jacobian", JACOBIANS),
            ("on_divergence", ON_DIVERGENCE),
            ("backend", BACKENDS),
        ):
            value = getattr(self, name)
            if not isinstance(value, str):
                raise TypeError(f"{name}: got {value!r}, expected one of {allowed}.")
            if value not in allowed:
                raise ValueError(f"{name}: got {value!r}, expected one of {allowed}.")


class Progress(Protocol):
    """How a solve went; see :class:`Solution` for the attributes."""

    @property
    def converged(self) -> bool: ...
    @property
    def iterations(self) -> int: ...
    @property
    def passes(self) -> float: ...
    @property
    def residual(self) -> float: ...
    @property
    def residual_history(self) -> tuple[float, ...]: ...
    @property
    def fallback(self) -> bool: ...


@dataclass(frozen=True)
class HostProgress:
    """How an eager solve went."""

    converged: bool = True
    iterations: int = 0
    passes: float = 1.0
    residual_history: tuple[float, ...] = (0.0,)
    fallback: bool = False

    @property
    def residual(self) -> float:
        return self.residual_history[-1]


def divergence(progress: Progress, method: str, on_divergence: str) -> None:
    """Raise or warn, as asked for, if a solve did not converge.

    Raises
    ------
    NewtonDivergenceError
        If it did not, and ``on_divergence`` is ``'raise'``.
    """
    if progress.converged or on_divergence not in ("raise", "auto", "warn"):
        return
    history = ", ".join(f"{r:.1e}" for r in progress.residual_history)
    message = (
        f"{method} solve ended after {progress.iterations} iterations with residual "
        f"{progress.residual:.1e}, above its tolerance; residuals: {history}. Raise max_iters, "
        "leave it unset to iterate until converged, or bound the recurrent weights."
    )
    if on_divergence == "raise":
        raise NewtonDivergenceError(message, progress.residual_history)
    warnings.warn(message, NewtonWarning, stacklevel=4)


class States(Protocol):
    """Where a solution has its states from, when they are read."""

    def __call__(self) -> Tensor: ...
    def detached(self) -> States:
        """The same without an autograd graph, nor anything that leads to one."""


@dataclass(frozen=True)
class Kept:
    """States that are there."""

    states: Tensor

    def __call__(self) -> Tensor:
        return self.states

    def detached(self) -> Kept:
        return Kept(self.states.detach())


@dataclass(frozen=True)
class Dropped:
    """States that cannot be had any more, and why."""

    reason: str

    def __call__(self) -> Tensor:
        raise RuntimeError(self.reason)

    def detached(self) -> Dropped:
        return self


@dataclass(frozen=True)
class Solution:
    """States of a sequence, and how they were reached.

    After a fused solve, ``converged`` to ``fallback`` and ``states`` of several slots are computed
    when they are read, and reading one of the former waits for the device. Pickles and deep copies
    are :meth:`detached`, with states.

    Attributes
    ----------
    states : Tensor
        ``(B, T, *state_shape)`` in the dtype of the drives.
    output : Tensor
        What a layer passes on, ``(B, T, width)``: the last slot of ``states``, flattened (all of
        them, if the Spec says so).
    final_state : Tensor
        ``(B, *state_shape)`` in the state's dtype (at least float32), to continue from.
    converged : bool
        Whether the largest mismatch is within the tolerance (True after a sequential fallback), and
        all states are finite.
    iterations : int
        Corrections of the chunk starts that were made.
    passes : float
        Walks over the data, verifying and warm-up passes included (a warm-up counts as the
        fraction of the data that it reads).
    residual : float
        Largest mismatch at the end, infinite if a state is not finite; ``residual_history`` has that
        of every pass.
    fallback : bool
        Whether some chunks had to be run sequentially.
    error_bound : float or None
        Proven bound of the largest error of any state, if ``certify`` was set and the proof
        succeeds: infinite if it does not, None if it was not asked for.
    method, chunk_length, chunks
        What ran: ``'sequential'``, ``'newton'``, ``'shooting'``, or ``'scan'`` (a recurrence that is
        linear in its state, solved at once).
    path : str
        ``'fused'`` (GPU kernels) or ``'eager'`` (PyTorch operations).
    reason : str
        Why this path and these chunks were chosen, in a sentence.
    """

    final_state: Tensor = field(repr=False)
    error_bound: float | None
    method: str
    chunk_length: int
    chunks: int
    path: str
    reason: str
    progress: Progress | None = field(repr=False)
    parts: tuple[Tensor, States] = field(repr=False)
    computed: tuple[Tensor, ...] = field(default=(), repr=False)  # what must be finite, detached

    def __repr__(self) -> str:
        """What ran and how it went. On a GPU it waits for the device, as printing a tensor does."""
        ran = f"{self.method} of {self.chunks} × {self.chunk_length} steps, {self.path}"
        if self.progress is None:
            went = "no report"
        else:
            went = (
                f"converged={self.converged}, iterations={self.iterations}, "
                f"residual={self.residual:.1e}, fallback={self.fallback}"
            )
        bound = "" if self.error_bound is None else f", error_bound={self.error_bound:.1e}"
        shape = tuple(self.output.shape)
        return f"Solution(output {shape}, {ran}: {self.reason}; {went}{bound})"

    @property
    def output(self) -> Tensor:
        return self.parts[0]

    @property
    def states(self) -> Tensor:
        # A compiler does not look into a cached_property.
        return self.parts[1]() if torch.compiler.is_compiling() else self._states

    @cached_property
    def _states(self) -> Tensor:
        return self.parts[1]()

    def _progress(self) -> Progress:
        if self.progress is None:
            raise RuntimeError(
                "got no report of a solve inside torch.compile or torch.export, or on meta tensors; "
                "read it from a solve outside, on tensors that have numbers."
            )
        return self.progress

    @cached_property
    def finite(self) -> bool:
        """Whether all numbers that were computed are finite. Reading it waits for the device."""
        return all(bool(t.isfinite().all()) for t in (self.output.detach(), *self.computed))

    @property
    def converged(self) -> bool:
        return self._progress().converged and self.finite

    @property
    def iterations(self) -> int:
        return self._progress().iterations

    @property
    def passes(self) -> float:
        return self._progress().passes

    @property
    def residual(self) -> float:
        return self._progress().residual if self.finite else torch.inf

    @property
    def residual_history(self) -> tuple[float, ...]:
        history = self._progress().residual_history
        return history if self.finite else (*history[:-1], torch.inf)

    @property
    def fallback(self) -> bool:
        return self._progress().fallback

    def detached(self) -> Solution:
        """The same report with tensors that hold no autograd graph, nor anything that leads to
        one."""
        output, states = self.parts
        parts = output.detach(), states.detached()
        return replace(self, final_state=self.final_state.detach(), parts=parts)

    def __getstate__(self) -> dict[str, Any]:
        """That of the :meth:`detached` report, with states, or why there are none any more."""
        try:
            states: States = Kept(self.states.detach())
        except RuntimeError as error:
            states = Dropped(str(error))
        found = self.detached()
        return found.__dict__ | {"parts": (found.output, states)}

    def __copy__(self) -> Solution:
        return replace(self)
