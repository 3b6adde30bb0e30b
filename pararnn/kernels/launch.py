"""Launching the kernels of a Spec: buffers, arguments and order."""

from __future__ import annotations

import linecache
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from ..spec import Spec
from .template import Template

STATE = {torch.float32: tl.float32, torch.float64: tl.float64}


@dataclass(frozen=True)
class Plan:
    """How the sequence is cut, and how a program is laid out.

    ``length`` steps a chunk, ``warmup`` steps for a guess, at most ``corrections`` Newton
    corrections and then, if ``repair``, what is left in the order of time; ``block`` lanes a
    program on ``warps`` warps, ``unroll`` steps in flight.
    """

    length: int
    warmup: int = 32
    corrections: int = 2
    repair: bool = True
    tol: float = 5e-7
    block: int = 32
    warps: int = 1
    unroll: int = 8


@lru_cache(maxsize=512)
def kernels(
    spec: Spec, unroll: int, resets: bool, grads: tuple[bool, bool] = (True, False)
) -> dict[str, Any]:
    """The kernels of a Spec as Triton functions, by name."""
    template = Template(spec, unroll, resets, grads)
    text = template.text()
    name = f"<pararnn kernels of {spec.name} {spec.fingerprint[:12]} {unroll} {resets} {grads}>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    scope: dict[str, Any] = {"__name__": "pararnn.kernels.generated"}
    exec(compile(text, name, "exec"), scope)
    return scope | {"template": template}


@dataclass(frozen=True)
class Problem:
    """One recurrence on the device: what every launch needs."""

    spec: Spec
    u: Tensor  # (B, T, WIDTH), any strides
    params: tuple[Tensor, ...]
    dt: Tensor | None = None  # (B, T)
    h0: Tensor | None = None  # (B, S, D) in the state's dtype
    resets: Tensor | None = None  # (B, T) bool

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.u.dtype == torch.float64 else torch.float32

    @property
    def width(self) -> int:
        vectors = sum(not d.given for d in self.spec.drive_list)
        return self.u.shape[2] // vectors

    @property
    def slots(self) -> int:
        return len(self.spec.slots)

    def inputs(self) -> list[Any]:
        """Arguments that every kernel begins with, in the template's order."""
        u, dt, resets = self.u, self.dt, self.resets
        batch, time = [u.stride(0)], [u.stride(1), u.stride(2)]
        given: list[Any] = [u]
        if dt is not None:
            given.append(dt)
            batch.append(dt.stride(0))
            time.append(dt.stride(1))
        if resets is not None:
            given.append(resets.view(torch.uint8))
            batch.append(resets.stride(0))
            time.append(resets.stride(1))
        return [*given, self.h0, *self.params, *batch, *time]

    def layout(self, plan: Plan) -> tuple[int, dict[str, Any]]:
        """Number of lane blocks, and the compile-time constants of every kernel."""
        u, D = self.u, self.width
        constants = {
            "D": D,
            "WIDTH": u.shape[2],
            "PACKED": u.stride(1) == u.shape[2] and u.stride(2) == 1,
            "BLOCK": plan.block,
            "ALIGNED": D % plan.block == 0,
            "DTYPE": STATE[self.dtype],
            "num_warps": plan.warps,
        }
        return -(-u.shape[0] * D // plan.block), constants


def run_forward(
    problem: Problem, plan: Plan
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """States of the last slot ``(B, T, D)`` in the dtype of the drives, of the others
    ``(B, T, S-1, D)`` and after the last step ``(B, S, D)`` in the state's; and the record of
    mismatches ``(corrections + 1, chunks, blocks)``."""
    u, S = problem.u, problem.slots
    (B, T, _), D = u.shape, problem.width
    found = kernels(problem.spec, plan.unroll, problem.resets is not None)
    template = found["template"]
    chunks = -(-T // plan.length)
    several = chunks > 1
    blocks, constants = problem.layout(plan)
    new = {"device": u.device, "dtype": problem.dtype}
    last = torch.empty(B, T, D, device=u.device, dtype=u.dtype)
    others = torch.empty(B, T, S - 1, D, **new)
    final = torch.empty(B, S, D, **new)
    edges = torch.empty(2 * chunks * template.rows * B * D if several else 0, **new)
    miss = torch.empty(
        (plan.corrections + 1) * several, chunks, blocks, device=u.device, dtype=torch.float32
    )
    stored = [last, others] if S > 1 else [last]
    common = [*problem.inputs(), *stored, final, edges, miss, B, T, plan.length, chunks, blocks]
    grid = (chunks * blocks,)
    found["forward"][grid](*common, plan.warmup, plan.tol, SEVERAL=several, **constants)
    if several:
        meet = u.dtype == problem.dtype
        for k in range(plan.corrections):
            found["correct"][grid](*common, k, plan.tol, MEET=meet, **constants)
        if plan.repair:
            found["repair"][(blocks,)](
                *common, plan.corrections, plan.tol, MEET=meet, **constants
            )
    return last, others, final, miss


def run_adjoint(
    problem: Problem,
    plan: Plan,
    last: Tensor,
    others: Tensor,
    grad: Tensor | None,
    rest: Tensor | None,
    final: Tensor | None,
    dt_grad: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Cotangents of ``u``, of ``dt`` by channel ``(B, T, D)``, of ``h0`` and of the parameters
    ``(P, D)``, from those of the last slot's states, of the others' and of the final state."""
    u, S = problem.u, problem.slots
    (B, T, width), D = u.shape, problem.width
    grads = (grad is not None, rest is not None)
    found = kernels(problem.spec, plan.unroll, problem.resets is not None, grads)
    template = found["template"]
    chunks = -(-T // plan.length)
    several = chunks > 1
    blocks, constants = problem.layout(plan)
    new = {"device": u.device, "dtype": problem.dtype}
    u_bar = torch.empty(B, T, width, device=u.device, dtype=u.dtype)
    dt_bar = torch.empty(B, T, D, **new) if dt_grad else None
    h0_bar = torch.empty(B, S, D, **new)
    w_bar = torch.empty(chunks, len(problem.params), B, D, **new)
    edges = torch.empty(chunks * (template.rows + 1) * B * D if several else 0, **new)
    stored = [last, others] if S > 1 else [last]
    incoming = [g for g in (grad, rest) if g is not None]
    outputs = [u_bar, *[dt_bar] * template.timed]
    strides = list(grad.stride()) if grad is not None else []
    common = [*problem.inputs(), *stored, *incoming, *outputs, final, h0_bar, w_bar, edges]
    common += [B, T, plan.length, chunks, blocks]
    grid = (chunks * blocks,)
    found["adjoint_chunks"][grid](
        *common, plan.warmup, *strides, plan.tol, SEVERAL=several, **constants
    )
    if several:
        found["readjoint"][grid](*common, *strides, plan.tol, **constants)
    return u_bar, dt_bar, h0_bar, w_bar.sum((0, 2))
