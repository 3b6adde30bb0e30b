"""The eager solve: chunks walked side by side, by PyTorch operations.

A Spec's recurrence runs as the operator ``pararnn::chunks``: autograd, compilers and exporters see one
node, whatever the length, and it plans for the sizes that it gets when it runs. A module without a
Spec cannot travel into an operator, and runs as a function of autograd that nothing traces.

No node reaches its own output: what a solve needs on its way is dropped when it ends.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._checks import full_precision
from .._operators import Operator
from . import linear
from .config import (
    TOLERANCE,
    HostProgress,
    NewtonConfig,
    NewtonDivergenceError,
    NewtonWarning,
    Progress,
)
from .cost import chunk_length
from .engine import Outcome, Plan, run
from .implicit import Problem, Solve, linearized
from .partition import Partition
from .task import Task, has_spec
from .walkers import CellWalker, Dynamics


class Told(NamedTuple):
    """What a solve is told, in the types of an operator."""

    length: int  # of a chunk; 0: the cost model's; -1: of the whole sequence
    warmup: int  # 0: the cost model's
    max_iters: int  # -1: until it converges
    tol: float  # 0: the dtype's
    jacobian: str
    cap: int
    on_divergence: str


def told(config: NewtonConfig, length: int, warmup: int) -> Told:
    """Settings of a solve with chunks of ``length``."""
    pinned = -1 if config.max_iters is None else config.max_iters
    tol, cap = config.tol or 0.0, config.iteration_cap
    return Told(length, warmup, pinned, tol, config.jacobian, cap, config.on_divergence)


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


def _plan(dynamics: Dynamics, asked: Told, length: int, warmup: int, dtype: torch.dtype) -> Plan:
    single, pinned = length == 1, asked.max_iters >= 0
    cheap = dynamics.single_kind if single else dynamics.cheap_kind
    if asked.jacobian == "auto" or (single and asked.jacobian == "exact"):
        # A pinned solve must have its operator in every pass; an unpinned one tries without.
        first, later = (cheap, cheap) if pinned or single else ("none", cheap)
    else:
        first = later = asked.jacobian
        if not single and later != "none" and dynamics.algebra(later) is None:
            raise ValueError(
                f"jacobian={later!r} is not formed along chunks for this Jacobian class; use "
                "'auto', 'none', or chunk_length=1 for exact factorized Newton."
            )
    return Plan(
        tol=asked.tol or TOLERANCE[dtype],
        warmup=warmup,
        first_kind=first,
        later_kind=later,
        max_iters=asked.max_iters if pinned else None,
        cap=asked.cap,
        fallback=asked.on_divergence == "sequential"
        or (asked.on_divergence == "auto" and not pinned),
    )


def chunked(
    problem: Problem, dynamics: Dynamics, u: Tensor, h0: Tensor, asked: Told
) -> tuple[Tensor, HostProgress, tuple[int, int]]:
    """States ``(B, T, *state_shape)``, how it went, and the length and number of chunks."""
    total = u.shape[1]
    out = torch.empty(u.shape[0], total, *h0.shape[1:], dtype=h0.dtype, device=h0.device)
    if total == 0:
        return out, HostProgress(), (asked.length or 1, 0)
    best, warmup = chunk_length(total, h0.numel(), u.device.type)
    length = min(asked.length or best, total) if asked.length >= 0 else total

    def linear_solver(mismatch: Tensor, before: Tensor) -> Tensor:
        linear = linearized(problem, dynamics, problem.restarted(before), u)
        return linear.solve(mismatch, torch.zeros_like(h0), reverse=False)

    part = Partition(total, length)
    box = _box(dynamics, h0)
    walker = CellWalker(dynamics, u, problem.resets, part, out, box, linear_solver)
    result = run(walker, h0, _plan(dynamics, asked, length, asked.warmup or warmup, h0.dtype))
    if length == 1 and asked.max_iters >= 0 and not result.fallback:
        out = result.iterate.contiguous()  # the Newton iterate itself, as in the paper
    return out, _progress(result), (length, part.count)


def _progress(outcome: Outcome) -> HostProgress:
    return HostProgress(
        outcome.converged,
        outcome.iterations,
        outcome.passes,
        tuple(outcome.history),
        outcome.fallback,
    )


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


# -- the operator ------------------------------------------------------------------------------

_REPORTS: ContextVar[list[HostProgress] | None] = ContextVar("chunk reports", default=None)


@contextmanager
def _reports() -> Iterator[list[HostProgress]]:
    """Collect how the solves that run inside went, in this thread."""
    found: list[HostProgress] = []
    outer = _REPORTS.set(found)
    try:
        yield found
    finally:
        _REPORTS.reset(outer)


_GIVEN = len(linear.Call._fields)


def _forward(*given: Any) -> Tensor:
    call, asked = linear.Call(*given[:_GIVEN]), Told(*given[_GIVEN:])
    with torch.no_grad(), full_precision(call.u.device):
        dynamics, packed, h0 = call.prepared()
        problem = Problem(call.make, call.resets)
        states, progress, (length, _) = chunked(problem, dynamics, packed, h0, asked)
    found = _REPORTS.get()
    if found is not None:
        found.append(progress)
    else:  # inside a compiled graph, nobody reads a report
        divergence(progress, "newton" if length == 1 else "shooting", asked.on_divergence)
    return states


def _empty(*given: Any) -> Tensor:
    return linear.empty_states(*given[:_GIVEN])


def _gradients(
    arguments: Sequence[Any],
    kept: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    needs: dict[str, bool],
) -> dict[str, Any]:
    return linear.gradients(arguments[:_GIVEN], kept, grads, needs)


operator = Operator(
    f"chunks({linear.CALL}, int length, int warmup, int max_iters, float tol, str jacobian, "
    "int cap, str on_divergence) -> Tensor",
    _forward,
    _empty,
    keys=("CompositeExplicitAutograd",),
    gradients=_gradients,
    kept=(0,),
)


def parallel(task: Task, asked: Told) -> tuple[Tensor, HostProgress | None]:
    """States of a task in the state's dtype, recorded by autograd, and how it went: None where
    nothing ran (inside ``torch.compile``, on meta tensors)."""
    if not has_spec(task.cell):
        return _of_module(task, asked)
    given = _call(task)
    if torch.compiler.is_compiling():
        return operator(*given, *asked), None
    with _reports() as found:
        states = operator(*given, *asked)
    return states, found[0] if found else None


def _call(task: Task) -> linear.Call:
    cell, start = task.cell, task.start
    sizes = [cell.sizes[a] for a in cell.spec.axes]
    if "heads" in cell.sizes:
        sizes.append(cell.sizes["heads"])
    call = linear.Call(cell.kernel, sizes, task.u, task.dt, start, task.resets, list(task.params))
    if call.state != task.dtype:  # which then only the state itself can tell
        call = call._replace(h0=task.h0)
    return call


def _of_module(task: Task, asked: Told) -> tuple[Tensor, HostProgress | None]:
    progress: list[HostProgress] = []

    def solver(dynamics: Dynamics, u: Tensor, h0: Tensor) -> Tensor:
        states, went, _ = chunked(problem, dynamics, u, h0, asked)
        progress.append(went)
        return states

    problem = Problem(task.make, task.resets)
    states = Solve.apply(problem, solver, task.inputs, task.h0, *task.params)
    return states, progress[0] if progress else None
