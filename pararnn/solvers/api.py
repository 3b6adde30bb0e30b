"""The public solving functions."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor, nn

from .chunks import Told, divergence, parallel, told
from .config import HostProgress, Kept, NewtonConfig, Progress, Solution, States
from .cost import OWN_CAP, chunk_length, own_chunk_length
from .fused import refusal, settings, solve_fused
from .linear import linear, scannable, transformable_states
from .module_dynamics import LARGEST_FLAT
from .operators import planned
from .sequential import sequential_states
from .task import Task, has_spec, output_of, prepare

METHODS = ("auto", "sequential", "newton", "shooting")
DEFAULT = NewtonConfig()
WHOLE = -1  # the chunk length of a solve that is not cut


def solve(
    cell: nn.Module,
    x: Tensor | None = None,
    config: NewtonConfig | None = None,
    *,
    method: str = "auto",
    h0: Tensor | None = None,
    resets: Tensor | None = None,
    drives: Tensor | None = None,
    dt: Tensor | None = None,
) -> Solution:
    """Solve a recurrence over a sequence and report how it went.

    Parameters
    ----------
    cell
        A :class:`~pararnn.Cell`, or any module with ``step(h, x)`` and ``state_shape``. Such a
        step must treat every sample by itself and be deterministic.
    x
        Inputs ``(B, T, d_in)``; or give ``drives``, ``(B, T, C)``, as ``cell.drives(x)`` returns.
    config
        See :class:`NewtonConfig`.
    method
        ``'sequential'`` loops over the hand-written step; ``'newton'`` iterates over single steps
        (Danieli et al., arXiv:2510.21450, Alg. 1); ``'shooting'`` over chunks; ``'auto'`` chooses
        by the cost model.
    h0
        Initial state ``(B, *state_shape)``; the cell's ``init_state(B)`` if not given, which for
        most is zero.
    resets
        Bool mask ``(B, T)``: where True, the step starts from the zero state.
    dt
        Time since the step before, ``(B, T)``: needed by a cell whose Spec has a time gap, and
        refused by any other. A negative one, or NaN, is an error on the CPU and not checked
        elsewhere.

    Returns
    -------
    Solution

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit.
    NewtonDivergenceError
        If the tolerance is not met and ``config.on_divergence == 'raise'``.
    """
    return _solve(prepare(cell, x, h0, resets, drives, dt), config, method)


def solve_layer(
    cell: nn.Module,
    x: Tensor,
    config: NewtonConfig | None = None,
    *,
    method: str = "auto",
    h0: Tensor | None = None,
    resets: Tensor | None = None,
    dt: Tensor | None = None,
    unrounded: bool = False,
) -> Solution:
    """As :func:`solve`, for a layer, which passes on the output and the final state.

    A cell with a method ``through`` gives these without the states in between, if nothing else is
    asked for. States are then solved for when they are read. ``unrounded`` leaves the states in the
    dtype in which they are carried.
    """
    task = prepare(cell, x, h0, resets, None, dt)
    if unrounded and has_spec(cell):
        task = dataclasses.replace(task, u=task.u.to(task.dtype))
    return _solve(task, config, method, layer=True)


def _solve(task: Task, config: NewtonConfig | None, method: str, layer: bool = False) -> Solution:
    config = config or DEFAULT
    if method not in METHODS:
        raise ValueError(f"method: got {method!r}, expected one of {METHODS}.")
    if config.certify and (task.traced or task.transformed):
        raise ValueError(
            "certify: got True inside torch.compile, torch.export or torch.func, or for meta tensors, "
            "where there are no numbers to prove a bound of; certify a solve outside."
        )
    chosen = choice(task, config, method, layer)
    if chosen.path == "fused":
        solution = _fused(task, config, chosen)
    else:
        solution = _eager(task, config, chosen)
        if solution.progress is not None:
            divergence(solution.progress, solution.method, config.on_divergence)
    if config.certify:
        from .certificate import certify

        bound = certify(task, solution.states.detach()).error_bound
        solution = dataclasses.replace(solution, error_bound=bound)
    return solution


@dataclasses.dataclass(frozen=True)
class Choice:
    """What a solve runs, and why."""

    path: str
    method: str
    chunk_length: int
    chunks: int
    warmup: int
    reason: str
    asked: bool  # whether the chunk length was asked for
    loop: bool  # whether the hand-written step runs in a loop
    cap: int | None = None  # corrections that the cost model counts on, at most

    @property
    def scan(self) -> bool:
        """Whether one exact scan solves a linear recurrence."""
        return self.path == "eager" and self.method == "scan"


def choice(task: Task, config: NewtonConfig, method: str, layer: bool = False) -> Choice:
    """Which path and which chunks a solve takes, for all states or only for what a ``layer``
    passes on; from sizes and settings alone.

    Raises
    ------
    ValueError
        If the settings contradict each other, or what is asked for cannot be had.
    """
    total = task.u.shape[1]
    length, reason = _asked_length(config, method)
    asked = length is not None
    refused = refusal(task, config, method)
    if refused is not None and config.backend != "fused" and _one_scan(task, config, method, layer):
        reason = "linear in its state: one exact scan"
        reason += "" if task.u.device.type == "cpu" else f"; not fused: {refused}"
        return Choice("eager", "scan", total, min(total, 1), 0, reason, asked, False)
    if _free(config, method) and config.backend != "fused" and task.transformed:
        reason = (
            "torch.func transforms and forward-mode derivatives: loop over the hand-written step"
        )
        return Choice("eager", "sequential", total, min(total, 1), 0, reason, asked, True)
    if refused is not None and config.backend == "fused":
        raise ValueError(f"backend: got 'fused', but {refused}; use backend='auto'.")
    own = _own_length(task, config) if _free(config, method) and not has_spec(task.cell) else None
    loop = refused is not None and (method == "sequential" or (own is not None and own >= total))
    if refused is not None and not loop:
        _check_parallel(task, method)
    if torch.compiler.is_compiling() and loop and not has_spec(task.cell):
        reason = "compiled: loop over the hand-written step"
        return Choice("eager", "sequential", total, min(total, 1), 0, reason, asked, True)
    if torch.compiler.is_compiling():
        # The operator plans when it runs, for the sizes that it gets.
        path, whole = ("eager", WHOLE) if refused else ("fused", max(total, 1))
        length = whole if length == WHOLE else length or 0
        return Choice(path, method, length, 0, config.warmup or 0, "compiled", asked, False)
    device, numbers = task.u.device.type, task.u.shape[0] * math.prod(task.cell.state_shape)
    if length is not None:
        length = max(total, 1) if length == WHOLE else min(length, max(total, 1))
    if refused is None:
        plan = planned(task.cell.spec, task.u, settings(config, length), backward=False)
        length, warmup = plan.length, plan.warmup
    else:
        best, warmup = chunk_length(total, numbers, device)
        best = best if own is None else own
        length, warmup = best if length is None else length, config.warmup or warmup
    chunks = -(-total // length) if total else 0
    if not asked:
        reason = (
            f"cost model: {total} steps × {numbers} numbers on {device} → "
            f"{chunks} chunk{'s' if chunks != 1 else ''} of {length}"
        )
    if loop and not asked:
        reason = (
            f"{type(task.cell).__name__} has no Spec: derivatives by automatic differentiation may "
            f"cost more than the loop over {total} steps"
        )
    elif loop:
        reason = "asked for: loop over the hand-written step"
    elif refused is not None and device != "cpu" and refused not in reason:
        reason = f"{reason}; not fused: {refused}"
    label = method
    if method != "newton":
        label = "sequential" if chunks <= 1 else "newton" if length == 1 else "shooting"
    path = "eager" if refused else "fused"
    cap = None if own is None else OWN_CAP
    return Choice(path, label, length, chunks, warmup, reason, asked, loop, cap)


def _free(config: NewtonConfig, method: str) -> bool:
    """Whether neither method nor chunks nor iterations are asked for."""
    return method == "auto" and config.chunk_length is None and config.max_iters is None


def _own_length(task: Task, config: NewtonConfig) -> int:
    """Chunk length for a module without a Spec; the whole, where only its loop can run."""
    if task.traced:
        return max(task.u.shape[1], 1)
    size = math.prod(task.cell.state_shape)
    return own_chunk_length(
        task.u.shape[1],
        task.u.shape[0],
        size,
        task.u.device.type,
        task.recorded,
        size <= LARGEST_FLAT,
    )


def _one_scan(task: Task, config: NewtonConfig, method: str, layer: bool) -> bool:
    """Whether nothing speaks against solving a linear recurrence by one scan."""
    free = _free(config, method) and config.jacobian in ("auto", "exact")
    if not (free and has_spec(task.cell)):
        return False
    return scannable(task.cell.spec) or (layer and hasattr(task.cell, "through"))


def _check_parallel(task: Task, method: str) -> None:
    """Raise where the eager solver, as asked for, cannot run."""
    got = "chunk_length or max_iters" if method == "auto" else f"method={method!r}"
    fix = "use method='sequential', or 'auto' without chunk_length and max_iters."
    if task.transformed:
        raise ValueError(
            f"got {got} under torch.func or forward-mode derivatives, expected neither: they see "
            f"through a loop only; {fix}"
        )
    if task.traced and not has_spec(task.cell):
        raise ValueError(
            f"got {got} for a {type(task.cell).__name__}, which has no Spec, inside torch.compile or "
            f"torch.export or on meta tensors, where only its loop can run; {fix}"
        )


def _asked_length(config: NewtonConfig, method: str) -> tuple[int | None, str]:
    """The chunk length that was asked for, or None, and what to say about it."""
    if method == "sequential":
        return WHOLE, "asked for: method='sequential'"
    if method == "newton":
        if config.chunk_length not in (None, 1):
            raise ValueError(
                f"method='newton' has chunk_length 1, got {config.chunk_length}; use "
                "method='shooting'."
            )
        return 1, "asked for: Newton over single steps"
    if config.chunk_length is not None:
        return config.chunk_length, f"asked for: chunk_length={config.chunk_length}"
    return None, ""


def _fused(task: Task, config: NewtonConfig, chosen: Choice) -> Solution:
    """Solve by the kernels."""
    found = solve_fused(task, settings(config, chosen.chunk_length if chosen.asked else None))
    shape = (task.u.shape[0], *task.cell.state_shape)
    computed = (found.others, found.final)
    parts = (found.last, found)
    return _solution(chosen, found.final.reshape(shape), found.progress, parts, computed)


def _eager(task: Task, config: NewtonConfig, chosen: Choice) -> Solution:
    """Solve by PyTorch operations."""
    progress: HostProgress | None = HostProgress()
    if chosen.scan and hasattr(task.cell, "through"):
        return _through(task, config, chosen)
    if chosen.scan and task.differentiated:
        states = transformable_states(task)
    elif chosen.scan:
        cell = task.cell
        sizes = [cell.sizes[a] for a in cell.spec.axes]
        states = linear(
            cell.kernel, sizes, task.u, task.dt, task.start, task.resets, list(task.params)
        )
    elif chosen.loop:
        states = sequential_states(task)
    else:
        asked = told(config, chosen.chunk_length, chosen.warmup)
        asked = asked._replace(cap=min(asked.cap, chosen.cap or asked.cap))
        states, progress = parallel(task, asked)
    final = states[:, -1].clone() if states.shape[1] else task.h0
    rounded = states.to(task.u.dtype)
    read = has_spec(task.cell) and task.cell.spec.readout is not None
    output = output_of(task.cell, states if read else rounded, task.u)
    parts = (output, Kept(rounded))
    return _solution(chosen, final, progress, parts, (rounded, final))


def _through(task: Task, config: NewtonConfig, chosen: Choice) -> Solution:
    """A layer's output without its states, which are solved for when they are asked for."""
    output, final = task.cell.through(task.u, task.start, resets=task.resets, dt=task.dt)
    later = Later(task, told(config, 0, config.warmup or 0), task.versions)
    return _solution(chosen, final, HostProgress(), (output, later), (final,))


@dataclasses.dataclass(frozen=True)
class Later:
    """States that are solved for when they are read."""

    task: Task
    asked: Told
    versions: tuple[int, ...]

    def __call__(self) -> Tensor:
        if self.task.versions != self.versions:
            raise RuntimeError(
                "got parameters or inputs that were changed since this solve, and its states had not "
                "been computed; read states before that, or solve again."
            )
        return parallel(self.task, self.asked)[0].to(self.task.u.dtype)

    def detached(self) -> Later:
        return Later(self.task.detached(), self.asked, self.versions)


def _solution(
    chosen: Choice,
    final: Tensor,
    progress: Progress | None,
    parts: tuple[Tensor, States],
    computed: tuple[Tensor, ...],
) -> Solution:
    return Solution(
        final_state=final,
        error_bound=None,
        method=chosen.method,
        chunk_length=chosen.chunk_length,
        chunks=chosen.chunks,
        path=chosen.path,
        reason=chosen.reason,
        progress=progress,
        parts=parts,
        computed=tuple(t.detach() for t in computed),
    )


def newton_apply(
    cell: nn.Module,
    x: Tensor,
    config: NewtonConfig | None = None,
    *,
    h0: Tensor | None = None,
    resets: Tensor | None = None,
    dt: Tensor | None = None,
) -> Tensor:
    """States by Newton's method over single steps, Algorithm 1 of Danieli et al. (2510.21450).

    The guess is ``f(0, x_t)``; every iteration solves the linearized recurrence. Unpinned, it
    iterates until the tolerance is met; ``NewtonConfig(max_iters=3)`` makes exactly the paper's
    three iterations and warns if they were not enough. Arguments and errors as for :func:`solve`.
    """
    return solve(cell, x, config, method="newton", h0=h0, resets=resets, dt=dt).states


def shooting_apply(
    cell: nn.Module,
    x: Tensor,
    config: NewtonConfig | None = None,
    *,
    h0: Tensor | None = None,
    resets: Tensor | None = None,
    dt: Tensor | None = None,
) -> Tensor:
    """States by multiple shooting over chunks. Arguments and errors as for :func:`solve`."""
    return solve(cell, x, config, method="shooting", h0=h0, resets=resets, dt=dt).states


def newton_m2rnn_factorized(
    cell: nn.Module,
    x: Tensor,
    config: NewtonConfig | None = None,
    *,
    h0: Tensor | None = None,
    resets: Tensor | None = None,
    dt: Tensor | None = None,
) -> Tensor:
    """Newton over single steps for a matrix state, with factorized Jacobians only.

    The linear systems are solved with JVPs of the form ``Δ ↦ fΔ + (1−f)(1−Z²) ⊙ (ΔW)``; the
    ``(KV)²`` Jacobian is never formed. States ``(B, T, K, V)``.

    Raises
    ------
    ValueError
        If the cell's Jacobian class is not ``'m2rnn'``.
    """
    structure = getattr(cell, "jac_structure", None)
    if structure != "m2rnn":
        raise ValueError(
            f"cell: got Jacobian class {structure!r}, expected 'm2rnn'; use newton_apply."
        )
    return newton_apply(cell, x, config, h0=h0, resets=resets, dt=dt)
