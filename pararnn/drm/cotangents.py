"""Cotangents of the recurrent path: a linear recurrence backwards in time, by the same sweeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from pararnn import checks

from .iteration import Plan, Report, sweep
from .steps import Slopes, Steps


def cotangents(
    plan: Plan,
    report: Report,
    z: Tensor,
    e: Tensor,
    states: Tensor,
    params: list[Tensor],
    g: Tensor,
) -> list[Tensor | None]:
    """Cotangents of the first state, of tokens and parameters, from those of the states, ``g``."""
    carry = torch.zeros_like(z)
    of_tokens: list[Tensor] = []
    of_params: list[Tensor | None] = [None] * len(params)
    for begin in reversed(range(0, e.shape[1], plan.window)):
        part = slice(begin, begin + plan.window)
        start = states[:, begin - 1] if begin else z
        bars = g[:, part].clone()
        bars[:, -1] += carry
        carry, tokens, *found = _pull(
            plan, report, start, e[:, part], states[:, part], bars, params
        )
        of_tokens.insert(0, tokens)
        of_params = [
            old if new is None else new if old is None else old + new
            for old, new in zip(of_params, found, strict=True)
        ]
    of_e = torch.cat(of_tokens, 1) if of_tokens else torch.zeros_like(e)
    return [carry, of_e, *of_params]


def _pull(
    plan: Plan,
    report: Report,
    start: Tensor,
    tokens: Tensor,
    states: Tensor,
    g: Tensor,
    params: list[Tensor],
) -> list[Any]:
    """Cotangents of a window's first state, tokens and parameters, from those of its states."""
    names = [f"dynamics.{name}" for name, _ in plan.steps.dynamics.named_parameters()]
    live = [p.detach().requires_grad_(p.requires_grad) for p in params]
    start, tokens = start.detach().requires_grad_(), tokens.detach().requires_grad_()
    inner = states[:, :-1].detach().requires_grad_()

    def unbounded(z: Tensor, e: Tensor) -> Tensor:
        swapped = dict(zip(names, live, strict=True))
        return cast(Tensor, torch.func.functional_call(plan.steps, swapped, (z, e)))

    with torch.enable_grad(), plan.autocast():
        moved = unbounded(torch.cat([start.unsqueeze(1), inner], 1), tokens)
        reached = plan.steps.bounded(moved)
    dtype = checks.state_dtype(g.dtype)
    slopes = plan.steps.slopes(moved.detach()).to(dtype).adjoint()
    wide = g.to(dtype).flip(1)

    def reach(bars: Tensor) -> tuple[Tensor, Slopes]:
        """Of ``λ_t = g_t + J_{t+1}ᵀ λ_{t+1}``, backwards in time."""
        (pulled,) = torch.autograd.grad(
            reached, inner, bars.flip(1).to(reached.dtype), retain_graph=True
        )
        summed = wide.clone()
        summed[:, 1:] += pulled.flip(1)
        return summed, slopes

    found = sweep(reach, wide, plan.tol, plan.most(g.shape[1]))
    outputs, bars, count = reached, found.values.flip(1).to(reached.dtype), found.corrections
    if not bool(found.settled.all()):
        with torch.enable_grad(), plan.autocast():
            outputs, bars, count = _looped(plan.steps, unbounded, start, tokens), g, -1
    report.backward.append(count)
    inputs = [start, tokens, *(p for p in live if p.requires_grad)]
    grads = iter(torch.autograd.grad(outputs, inputs, bars, allow_unused=True))
    of_start, of_tokens = next(grads), next(grads)
    return [of_start, of_tokens, *(next(grads) if p.requires_grad else None for p in live)]


def _looped(
    steps: Steps, unbounded: Callable[[Tensor, Tensor], Tensor], z: Tensor, e: Tensor
) -> Tensor:
    """States ``(B, T, d)``, one after the other."""
    states = []
    for token in e.unbind(1):
        z = steps.bounded(unbounded(z, token))
        states.append(z)
    return torch.stack(states, 1)
