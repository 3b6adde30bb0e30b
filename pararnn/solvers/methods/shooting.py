"""Multiple shooting: chunks walked side by side, by PyTorch operations.

See :mod:`~pararnn.solvers.engine` for the iteration. A Spec's recurrence runs in the operator; a
module without a Spec cannot travel into one, and runs as a function of autograd that nothing traces.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..._checks import full_precision
from ...scan.inputs import cut
from .. import operator
from ..adjoint import Solve, solve_linear
from ..config import TOLERANCE, HostProgress, NewtonConfig, Solution, divergence
from ..cost import OWN_CAP, Cut, chunk_cut, chunk_length, own_cut
from ..engine import Outcome, Schedule, run
from ..module_recurrence import LARGEST_FLAT
from ..operator import Settings
from ..partition import Partition
from ..problem import Problem
from ..recurrence import Recurrence
from ..walkers import CellWalker
from .method import Choice, Method, asked_otherwise
from .results import call_of, solution_of


class Shooting(Method):
    """Chunks of any length; one of all steps is the sequential algorithm, by the printed step."""

    name = "shooting"

    def unfit(self, problem: Problem) -> str | None:
        if (other := asked_otherwise(problem, self.name)) is not None:
            return other
        if problem.method == "auto" and not problem.free:
            got = "chunk_length or max_iters"
        else:
            got = f"method={problem.method!r}"
        fix = "use method='sequential', or 'auto' without chunk_length and max_iters."
        if problem.transformed:
            return (
                f"got {got} under torch.func or forward-mode derivatives, expected neither: they "
                f"see through a loop only; {fix}"
            )
        if problem.traced and problem.spec is None:
            return (
                f"got {got} for a {problem.recurrence.name}, which has no Spec, inside "
                "torch.compile or torch.export or on meta tensors, where only its loop can run; "
                f"{fix}"
            )
        return None

    def _cut(self, problem: Problem) -> Cut:
        total, device = problem.total, problem.u.device.type
        if problem.spec is not None or not problem.free:
            return chunk_cut(total, problem.numbers, device)
        size = math.prod(problem.recurrence.state_shape)
        batch, dense = problem.u.shape[0], size <= LARGEST_FLAT
        return own_cut(total, batch, size, device, problem.recorded, dense)

    def cost(self, problem: Problem) -> float:
        return self._cut(problem).cost

    def asked_length(self, problem: Problem) -> tuple[int | None, str]:
        """The chunk length that was asked for, or None, and what to say about it."""
        length = problem.config.chunk_length
        return length, "" if length is None else f"asked for: chunk_length={length}"

    def choice(self, problem: Problem) -> Choice:
        total, config = problem.total, problem.config
        length, reason = self.asked_length(problem)
        warmup = -1 if config.warmup is None else config.warmup
        if torch.compiler.is_compiling():  # the operator plans when it runs, for its sizes
            return Choice(problem.method, "eager", length or 0, 0, "compiled", length or 0, warmup)
        asked = length is not None
        length = min(length or self._cut(problem).length, max(total, 1))
        chunks = -(-total // length) if total else 0
        if not asked:
            numbers, device = problem.numbers, problem.u.device.type
            reason = (
                f"cost model: {total} steps × {numbers} numbers on {device} → "
                f"{chunks} chunk{'s' if chunks != 1 else ''} of {length}"
            )
        label = self.name
        if label != "newton":
            label = "sequential" if chunks <= 1 else "newton" if length == 1 else "shooting"
        cap = OWN_CAP if problem.spec is None and problem.free else None
        return Choice(label, "eager", length, chunks, reason, length, warmup, cap)

    def run(self, problem: Problem, choice: Choice) -> Solution:
        settings = told(problem.config, choice.length, choice.warmup, choice.cap)
        states, progress, final = parallel_states(problem, settings)
        if progress is not None:
            divergence(progress, choice.method, problem.config.on_divergence)
        return solution_of(problem, choice, states, progress, final)


def told(config: NewtonConfig, length: int, warmup: int, cap: int | None = None) -> Settings:
    """What the operator is told."""
    most = config.iteration_cap if cap is None else min(cap, config.iteration_cap)
    pinned = -1 if config.max_iters is None else config.max_iters
    return Settings(
        "chunks", length, warmup, pinned, config.tol or 0.0, config.jacobian, most,
        config.on_divergence,
    )  # fmt: skip


def parallel_states(
    problem: Problem, settings: Settings | None = None
) -> tuple[Tensor, HostProgress | None, Tensor | None]:
    """States of a problem in the state's dtype, recorded by autograd, how it went (None where
    nothing ran), and the final state."""
    settings = settings or told(problem.config, 0, -1)
    if problem.spec is not None:
        states, _, final, progress = operator.solve(*call_of(problem, settings))
        return states, progress, final
    went: list[HostProgress] = []

    def solver(recurrence: Recurrence, u: Tensor, h0: Tensor) -> Tensor:
        states, progress = chunked(recurrence, problem.resets, u, h0, settings)
        went.append(progress)
        return states

    given = problem.u, problem.h0, *problem.params
    states = Solve.apply(problem.recurrence, problem.resets, solver, *given)
    return states, went[0] if went else None, None


# -- in the operator -------------------------------------------------------------------------------


def run_chunks(call: operator.Call) -> operator.Results:
    with full_precision(call.u.device):
        arguments = call.resets, call.packed, call.start, call.settings
        states, progress = chunked(call.recurrence(), *arguments)
    final = states[:, -1].clone() if states.shape[1] else call.start.clone()
    return states, states.new_empty(states.shape[0], 0), final, progress


def chunked(
    recurrence: Recurrence, resets: Tensor | None, u: Tensor, h0: Tensor, settings: Settings
) -> tuple[Tensor, HostProgress]:
    """States ``(B, T, *state_shape)``, and how it went."""
    total = u.shape[1]
    out = torch.empty(u.shape[0], total, *h0.shape[1:], dtype=h0.dtype, device=h0.device)
    if total == 0:
        return out, HostProgress()
    best, warmup = chunk_length(total, h0.numel(), u.device.type)
    length = min(settings.length or best, total) if settings.length >= 0 else total

    def linear_solver(mismatch: Tensor, before: Tensor) -> Tensor:
        linear = recurrence.linearized(cut(before, resets), u, resets)
        return solve_linear(linear, mismatch, torch.zeros_like(h0), reverse=False)

    part = Partition(total, length)
    walker = CellWalker(recurrence, u, resets, part, out, _box(recurrence, h0), linear_solver)
    warmup = warmup if settings.warmup < 0 else settings.warmup
    outcome = run(walker, h0, _schedule(recurrence, settings, length, warmup, h0.dtype))
    if length == 1 and settings.max_iters >= 0 and not outcome.fallback:
        out = outcome.iterate.contiguous()  # the Newton iterate itself, as in the paper
    return out, _progress(outcome)


def _box(recurrence: Recurrence, h0: Tensor) -> tuple[Tensor, Tensor] | None:
    """Invariant box of the state, if every slot has one and ``h0`` lies in it."""
    bounds = [b for b in recurrence.bounds if b is not None]
    if len(bounds) < len(recurrence.bounds):
        return None
    lo, hi = (
        torch.tensor([b[i] for b in bounds], dtype=h0.dtype, device=h0.device) for i in (0, 1)
    )
    if len(bounds) > 1:
        shape = (-1, *(1,) * (len(recurrence.state_shape) - 1))
        lo, hi = lo.reshape(shape), hi.reshape(shape)
    inside = ((h0 >= lo) & (h0 <= hi)).flatten(1).all(1)
    # A row that starts outside is not clipped; rows do not influence each other.
    inside = inside.reshape(-1, 1, *(1,) * (h0.ndim - 1))
    huge = torch.finfo(h0.dtype).max
    return torch.where(inside, lo, -huge), torch.where(inside, hi, huge)


def _schedule(
    recurrence: Recurrence, settings: Settings, length: int, warmup: int, dtype: torch.dtype
) -> Schedule:
    single, pinned = length == 1, settings.max_iters >= 0
    cheap = recurrence.single_kind if single else recurrence.cheap_kind
    if settings.jacobian == "auto" or (single and settings.jacobian == "exact"):
        # A pinned solve must have its operator in every pass; an unpinned one tries without.
        first, later = (cheap, cheap) if pinned or single else ("none", cheap)
    else:
        first = later = settings.jacobian
        if not single and later != "none" and recurrence.algebra(later) is None:
            raise ValueError(
                f"jacobian={later!r} is not formed along chunks for this Jacobian class; use "
                "'auto', 'none', or chunk_length=1 for exact factorized Newton."
            )
    return Schedule(
        tol=settings.tol or TOLERANCE[dtype],
        warmup=warmup,
        first_kind=first,
        later_kind=later,
        max_iters=settings.max_iters if pinned else None,
        cap=settings.cap,
        fallback=settings.on_divergence == "sequential"
        or (settings.on_divergence == "auto" and not pinned),
    )


def _progress(outcome: Outcome) -> HostProgress:
    return HostProgress(
        outcome.converged,
        outcome.iterations,
        outcome.passes,
        tuple(outcome.history),
        outcome.fallback,
    )


operator.RUNS["chunks"] = operator.Run(run_chunks, operator.eager_backward)
