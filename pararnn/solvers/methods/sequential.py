"""The reference: a loop over the hand-written step."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..._checks import full_precision
from ..._precision import exactly
from ...scan.inputs import cut
from ..config import HostProgress, Solution
from ..cost import loop_cost
from ..module_recurrence import ModuleRecurrence
from ..problem import Problem
from .method import Choice, Method, asked_otherwise
from .results import solution_of


class Sequential(Method):
    """Plain PyTorch, which autograd differentiates any number of times, and transforms and compilers
    see through."""

    name = "sequential"

    def unfit(self, problem: Problem) -> str | None:
        if (other := asked_otherwise(problem, self.name)) is not None:
            return other
        if problem.method == "auto" and not problem.free:
            return "asked for: chunk_length or max_iters"
        return None

    def cost(self, problem: Problem) -> float:
        numbers = problem.numbers
        own = problem.spec is None and problem.recorded
        # Of a Spec's recurrence, the printed step makes the same loop, without a graph.
        twice = 1 if problem.spec is None else 2
        return twice * loop_cost(problem.total, numbers, problem.u.device.type, own)

    def choice(self, problem: Problem) -> Choice:
        total = problem.total
        if problem.method == self.name:
            reason = "asked for: loop over the hand-written step"
        elif problem.transformed:
            reason = "torch.func transforms and forward-mode derivatives: loop over the hand-written step"
        elif torch.compiler.is_compiling():
            reason = "compiled: loop over the hand-written step"
        else:
            reason = (
                f"{problem.recurrence.name} has no Spec: derivatives by automatic differentiation "
                f"may cost more than the loop over {total} steps"
            )
        return Choice(self.name, "eager", max(total, 1), min(total, 1), reason)

    def run(self, problem: Problem, choice: Choice) -> Solution:
        return solution_of(problem, choice, sequential_states(problem), HostProgress())


def sequential_states(problem: Problem) -> Tensor:
    """States ``(B, T, *state_shape)`` in the state's dtype, recorded by autograd."""
    recurrence = problem.recurrence
    if isinstance(recurrence, ModuleRecurrence):  # its parameters are its own affair
        with full_precision(problem.u.device):
            return _loop(problem)

    def run(u: Tensor, start: Tensor | None, dt: Tensor | None, *params: Tensor) -> tuple[Tensor]:
        live = recurrence.using(params)
        return (_loop(replace(problem, recurrence=live, u=u, start=start, dt=dt)),)

    given = problem.u, problem.start, problem.dt, *problem.params
    (states,) = exactly(run, problem.u.device, *given)
    return states


def _loop(problem: Problem) -> Tensor:
    recurrence, h = problem.recurrence, problem.h0
    states = []
    masks = None if problem.resets is None else problem.resets.unbind(1)
    for t, u in enumerate(problem.inputs.unbind(1)):
        h = cut(h, None if masks is None else masks[t])
        before, version = h, _version(h)
        h = recurrence.written(h, u)
        if _version(before) != version:
            raise ValueError(
                f"{recurrence.name}: its step wrote into the state it was given; return a new "
                "tensor instead, e.g. h + dh for h.add_(dh)."
            )
        if h.shape != before.shape:
            raise ValueError(
                f"{recurrence.name}: got a next state of shape {tuple(h.shape)}, expected "
                f"{tuple(before.shape)}, the shape of the state before; nothing is broadcast."
            )
        states.append(h)
    return torch.stack(states, 1) if states else _none(problem)


def _none(problem: Problem) -> Tensor:
    """The states of no steps. They depend on everything, and all gradients are zero."""
    states = problem.h0.unsqueeze(1)[:, :0]
    for given in (problem.u, problem.dt, *problem.params):
        if given is not None and given.requires_grad:
            states = states + given.flatten()[:0].sum().to(states.dtype)
    return states


def _version(h: Tensor) -> int:
    """Counts the writes into a tensor, where PyTorch counts them."""
    return 0 if torch.compiler.is_compiling() or h.is_inference() else h._version
