"""The public solving functions."""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn

from .config import (
    TOLERANCE,
    NewtonConfig,
    NewtonDivergenceError,
    NewtonWarning,
    Progress,
    Solution,
)
from .cost import chunk_length
from .engine import Outcome, Plan, run
from .fused import refusal, settings, solve_fused
from .implicit import Problem, Solve, linearized
from .linear import linear, scannable, transformable_states
from .operators import planned
from .partition import Partition
from .sequential import sequential_states
from .task import Task, has_spec, output_of, prepare
from .walkers import CellWalker, Dynamics

METHODS = ("auto", "sequential", "newton", "shooting")
DEFAULT = NewtonConfig()


def _box(dynamics: Dynamics, h0: Tensor) -> tuple[Tensor, Tensor] | None:
    """Invariant box of the state, if every slot has one and ``h0`` lies in it."""
    bounds = [b for b in dynamics.bounds if b is not None]
    if len(bounds) < len(dynamics.bounds):
        return None
    lo, hi = (
        torch.tensor([b[i] for b in bounds], dtype=h0.dtype, device=h0.device) for i in (0, 1)
    )
    if len(bounds) > 1:
        shape = (-1, *(1,) * (len(dynamics.state_shape) - 1))
        lo, hi = lo.reshape(shape), hi.reshape(shape)
    inside = ((h0 >= lo) & (h0 <= hi)).flatten(1).all(1)
    # A row that starts outside is not clipped; rows do not influence each other.
    inside = inside.reshape(-1, 1, *(1,) * (h0.ndim - 1))
    huge = torch.finfo(h0.dtype).max
    return torch.where(inside, lo, -huge), torch.where(inside, hi, huge)


def _plan(
    dynamics: Dynamics, config: NewtonConfig, length: int, warmup: int, dtype: torch.dtype
) -> Plan:
    single, pinned = length == 1, config.max_iters is not None
    cheap = dynamics.single_kind if single else dynamics.cheap_kind
    if config.jacobian == "auto" or (single and config.jacobian == "exact"):
        # A pinned solve must have its operator in every pass; an unpinned one tries without.
        first, later = (cheap, cheap) if pinned or single else ("none", cheap)
    else:
        first = later = config.jacobian
        if not single and later != "none" and dynamics.algebra(later) is None:
            raise ValueError(
                f"jacobian={later!r} is not formed along chunks for this Jacobian class; use "
                "'auto', 'none', or chunk_length=1 for exact factorized Newton."
            )
    return Plan(
        tol=config.tol or TOLERANCE[dtype],
        scale=1.0,
        warmup=config.warmup or warmup,
        first_kind=first,
        later_kind=later,
        max_iters=config.max_iters,
        cap=config.iteration_cap,
        fallback=config.on_divergence == "sequential"
        or (config.on_divergence == "auto" and not pinned),
    )


def _parallel(
    task: Task, config: NewtonConfig, length: int, warmup: int
) -> tuple[Tensor, Outcome | None]:
    """Solve with chunks of ``length``; returns states in the state's dtype, and the outcome."""
    total = task.u.shape[1]
    outcome: list[Outcome] = []

    def forward(dynamics: Dynamics, u: Tensor, h0: Tensor) -> Tensor:
        out = torch.empty(u.shape[0], total, *h0.shape[1:], dtype=h0.dtype, device=h0.device)
        if total == 0:
            return out

        def linear_solver(mismatch: Tensor, before: Tensor) -> Tensor:
            linear = linearized(problem, dynamics, problem.restarted(before), u)
            return linear.solve(mismatch, torch.zeros_like(h0), reverse=False)

        walker = CellWalker(
            dynamics,
            u,
            task.resets,
            Partition(total, length),
            out,
            _box(dynamics, h0),
            linear_solver,
        )
        plan = _plan(dynamics, config, length, warmup, h0.dtype)
        result = run(walker, h0, plan)
        outcome.append(result)
        if length == 1 and config.max_iters is not None and not result.fallback:
            return result.iterate.contiguous()  # the Newton iterate itself, as in the paper
        return out

    problem = Problem(task.make, forward, task.resets)
    states = Solve.apply(problem, task.inputs, task.h0, *task.params)
    return states, outcome[0] if outcome else None


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
        refused by any other. A negative one is an error on the CPU and not checked elsewhere.

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
    chosen = choice(task, config, method, layer)
    if chosen.path == "fused":
        solution = _fused(task, config, chosen)
    else:
        solution = _eager(task, config, chosen)
        if not solution.converged:
            _report_divergence(solution, config)
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
        If the settings contradict each other, or ``backend='fused'`` cannot be had.
    """
    total = task.u.shape[1]
    length, reason = _asked_length(total, config, method)
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
    device, numbers = task.u.device.type, task.u.shape[0] * math.prod(task.cell.state_shape)
    if refused is None and torch.compiler.is_compiling():
        # The operator plans when it runs, for the sizes that it gets.
        told = config.warmup or 0
        return Choice("fused", method, length or 0, 0, told, "compiled", asked, False)
    if refused is None:
        plan = planned(task.cell.spec, task.u, settings(config, length), backward=False)
        length, warmup = plan.length, plan.warmup
    else:
        best, warmup = chunk_length(total, numbers, device)
        length, warmup = best if length is None else length, config.warmup or warmup
    chunks = -(-total // length) if total else 0
    if not asked:
        reason = (
            f"cost model: {total} steps × {numbers} numbers on {device} → "
            f"{chunks} chunk{'s' if chunks != 1 else ''} of {length}"
        )
    loop = method == "sequential" and refused is not None
    if loop:
        reason = "asked for: loop over the hand-written step"
    elif refused is not None and device != "cpu" and refused not in reason:
        reason = f"{reason}; not fused: {refused}"
    label = method
    if method != "newton":
        label = "sequential" if chunks <= 1 else "newton" if length == 1 else "shooting"
    path = "eager" if refused else "fused"
    return Choice(path, label, length, chunks, warmup, reason, asked, loop)


def _free(config: NewtonConfig, method: str) -> bool:
    """Whether neither method nor chunks nor iterations are asked for."""
    return method == "auto" and config.chunk_length is None and config.max_iters is None


def _one_scan(task: Task, config: NewtonConfig, method: str, layer: bool) -> bool:
    """Whether nothing speaks against solving a linear recurrence by one scan."""
    free = _free(config, method) and config.jacobian in ("auto", "exact")
    if not (free and has_spec(task.cell)):
        return False
    return scannable(task.cell.spec) or (layer and hasattr(task.cell, "through"))


def _asked_length(total: int, config: NewtonConfig, method: str) -> tuple[int | None, str]:
    """The chunk length that was asked for, or None, and what to say about it."""
    if method == "sequential":
        return max(total, 1), "asked for: method='sequential'"
    if method == "newton":
        if config.chunk_length not in (None, 1):
            raise ValueError(
                f"method='newton' has chunk_length 1, got {config.chunk_length}; use "
                "method='shooting'."
            )
        return 1, "asked for: Newton over single steps"
    if config.chunk_length is not None:
        length = min(config.chunk_length, max(total, 1))
        return length, f"asked for: chunk_length={config.chunk_length}"
    return None, ""


def _fused(task: Task, config: NewtonConfig, chosen: Choice) -> Solution:
    """Solve by the kernels."""
    found = solve_fused(task, settings(config, chosen.chunk_length if chosen.asked else None))
    shape = (task.u.shape[0], *task.cell.state_shape)
    return _solution(chosen, found.final.reshape(shape), found.progress, (found.last, found.states))


def _eager(task: Task, config: NewtonConfig, chosen: Choice) -> Solution:
    """Solve by PyTorch operations."""
    outcome = None
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
        states, outcome = _parallel(task, config, chosen.chunk_length, chosen.warmup)
    final = states[:, -1].clone() if states.shape[1] else task.h0
    rounded = states.to(task.u.dtype)
    read = has_spec(task.cell) and task.cell.spec.readout is not None
    output = output_of(task.cell, states if read else rounded, task.u)
    return _solution(chosen, final, _progress(outcome), (output, lambda: rounded))


def _through(task: Task, config: NewtonConfig, chosen: Choice) -> Solution:
    """A layer's output without its states, which are solved for when they are asked for."""
    output, final = task.cell.through(task.u, task.start, resets=task.resets, dt=task.dt)

    @functools.cache
    def states() -> Tensor:
        length, warmup = chunk_length(task.u.shape[1], final.numel(), task.u.device.type)
        return _parallel(task, config, length, warmup)[0].to(task.u.dtype)

    return _solution(chosen, final, HostProgress(), (output, states))


def _solution(
    chosen: Choice,
    final: Tensor,
    progress: Progress | None,
    parts: tuple[Tensor, Callable[[], Tensor]],
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
    )


@dataclasses.dataclass(frozen=True)
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


def _progress(outcome: Outcome | None) -> HostProgress:
    if outcome is None:
        return HostProgress()
    return HostProgress(
        outcome.converged,
        outcome.iterations,
        outcome.passes,
        tuple(outcome.history),
        outcome.fallback,
    )


def _report_divergence(solution: Solution, config: NewtonConfig) -> None:
    history = ", ".join(f"{r:.1e}" for r in solution.residual_history)
    message = (
        f"{solution.method} solve ended after {solution.iterations} iterations with residual "
        f"{solution.residual:.1e}, above its tolerance; residuals: {history}. Raise max_iters, "
        "leave it unset to iterate until converged, or bound the recurrent weights."
    )
    if config.on_divergence == "raise":
        raise NewtonDivergenceError(message, solution.residual_history)
    if config.on_divergence in ("auto", "warn"):
        warnings.warn(message, NewtonWarning, stacklevel=4)


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
