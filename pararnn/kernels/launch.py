"""Launching the kernels of a Spec: buffers, arguments and order."""

from __future__ import annotations

import linecache
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from .._checks import state_dtype
from ..spec import Spec
from .plan import Plan
from .support import channels
from .template import Template

STATE = {torch.float32: tl.float32, torch.float64: tl.float64}


@lru_cache(maxsize=512)
def kernels(
    spec: Spec,
    unroll: int,
    resets: bool,
    grads: tuple[bool, bool] = (True, False),
    apart: bool = False,
) -> dict[str, Any]:
    """The kernels of a Spec as Triton functions, by name."""
    template = Template(spec, unroll, resets, grads, apart)
    text = template.text()
    settings = f"{unroll} {resets} {grads} {apart}"
    name = f"<pararnn kernels of {spec.name} {spec.fingerprint[:12]} {settings}>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    scope: dict[str, Any] = {"__name__": "pararnn.kernels.generated"}
    exec(compile(text, name, "exec"), scope)
    return scope | {"template": template}


@dataclass
class Problem:
    """One recurrence on the device: what every launch needs."""

    spec: Spec
    u: Tensor | tuple[Tensor, ...]  # (B, T, WIDTH), or every drive (B, T, D); any strides
    params: tuple[Tensor, ...]
    dt: Tensor | None = None  # (B, T)
    h0: Tensor | None = None  # (B, S, D) in the state's dtype
    resets: Tensor | None = None  # (B, T) bool
    wide: bool = False  # whether states are float64 whatever the drives are

    apart: bool = field(init=False)  # whether every drive is a tensor of its own
    drives: tuple[Tensor, ...] = field(init=False)
    dtype: torch.dtype = field(init=False)  # of states
    width: int = field(init=False)  # channels of a slot
    slots: int = field(init=False)
    shown: int = field(init=False)  # slots that the output holds

    def __post_init__(self) -> None:
        self.apart = not isinstance(self.u, Tensor)
        self.drives = (self.u,) if isinstance(self.u, Tensor) else self.u
        u = self.drives[0]
        self.dtype = torch.float64 if self.wide else state_dtype(u.dtype)
        self.width = u.shape[2] if self.apart else channels(self.spec, u)
        self.slots = len(self.spec.slots)
        self.shown = self.slots if self.spec.output == "all" else 1

    def inputs(self) -> list[Any]:
        """Arguments that every kernel begins with, in the template's order."""
        dt, resets = self.dt, self.resets
        given: list[Any] = [*self.drives]
        batch = [u.stride(0) for u in self.drives]
        time = [u.stride(i) for u in self.drives for i in (1, 2)]
        if dt is not None:
            given.append(dt)
            batch.append(dt.stride(0))
            time.append(dt.stride(1))
        if resets is not None:
            given.append(resets.view(torch.uint8))
            batch.append(resets.stride(0))
            time.append(resets.stride(1))
        h0 = None if self.h0 is None else self.h0.contiguous()
        return [*given, h0, *(p.contiguous() for p in self.params), *batch, *time]

    def layout(self, plan: Plan) -> tuple[int, dict[str, Any]]:
        """Number of lane blocks, and the compile-time constants of every kernel."""
        u, D = self.drives[0], self.width
        constants = {
            "D": D,
            "WIDTH": u.shape[2],
            "PACKED": all(u.stride(1) == u.shape[2] and u.stride(2) == 1 for u in self.drives),
            "BLOCK": plan.block,
            "ALIGNED": D % plan.block == 0,
            "DTYPE": STATE[self.dtype],
            "num_warps": 1,
        }
        return -(-u.shape[0] * D // plan.block), constants


def lanes(constants: dict[str, Any]) -> dict[str, Any]:
    """The constants of a kernel that only knows lanes."""
    return {name: constants[name] for name in ("D", "BLOCK", "ALIGNED", "num_warps")}


def run_forward(problem: Problem, plan: Plan) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The output ``(B, T, D)`` (``(B, T, S·D)`` if it holds all slots) in the dtype of the drives,
    states of the other slots ``(B, T, S-1, D)`` and after the last step ``(B, S, D)`` in the
    state's; and the record of mismatches ``(corrections + 1, chunks, blocks)``."""
    u, S = problem.drives[0], problem.slots
    (B, T, _), D = u.shape, problem.width
    found = kernels(problem.spec, plan.unroll, problem.resets is not None, apart=problem.apart)
    template = found["template"]
    chunks = plan.chunks(T)
    several = chunks > 1
    blocks, constants = problem.layout(plan)
    new = partial(torch.empty, device=u.device, dtype=problem.dtype)
    last = torch.empty(B, T, problem.shown * D, device=u.device, dtype=u.dtype)
    others = new(B, T, S - problem.shown, D)
    final = new(B, S, D)
    buffers = 1 if template.reduced else 2
    edges = new(buffers * chunks * template.rows * B * D if several else 0)
    miss = torch.empty(
        (plan.corrections + 1) * several, chunks, blocks, device=u.device, dtype=torch.float32
    )
    stored = [last, others] if template.others else [last]
    inputs, sizes = problem.inputs(), [B, T, plan.length, chunks, blocks, 1]
    common = [*inputs, *stored, final, edges, miss, *sizes]
    grid = (chunks * blocks,)
    if several and template.reduced:
        found["reduce"][((chunks - 1) * blocks,)](*inputs, edges, *sizes, **constants)
        found["chain"][(blocks,)](edges, miss, B, chunks, blocks, 1, **lanes(constants))
    found["forward"][grid](*common, plan.warmup, plan.tol, SEVERAL=several, **constants)
    if several:
        meet = u.dtype == problem.dtype
        for k in range(plan.corrections * (not template.reduced)):
            found["correct"][grid](*common, k, plan.tol, MEET=meet, **constants)
        found["repair"][(blocks,)](*common, plan.corrections, plan.tol, MEET=meet, **constants)
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
) -> tuple[tuple[Tensor, ...], Tensor, Tensor, Tensor]:
    """Cotangents of the drives, of ``dt`` by channel ``(B, T, D)``, of ``h0`` and of the parameters
    ``(P, D)``, from those of the output, of the other slots' states and of the final state."""
    u, S = problem.drives[0], problem.slots
    (B, T, _), D = u.shape, problem.width
    grads = (grad is not None, rest is not None)
    found = kernels(problem.spec, plan.unroll, problem.resets is not None, grads, problem.apart)
    template = found["template"]
    chunks = plan.chunks(T)
    several = chunks > 1
    blocks, constants = problem.layout(plan)
    new = partial(torch.empty, device=u.device, dtype=problem.dtype)
    bars = tuple(torch.empty(u.shape, device=u.device, dtype=u.dtype) for u in problem.drives)
    dt_bar = new(B if dt_grad else 0, T, D)
    h0_bar = new(B, S, D)
    w_bar = new(chunks, len(problem.params), B, D)
    edges = new(chunks * template.rows_back * B * D if several else 0)
    rest, final = (None if g is None else g.contiguous() for g in (rest, final))
    stored = [last, others] if template.others else [last]
    incoming = [g for g in (grad, rest) if g is not None]
    outputs: list[Any] = [*bars, *[dt_bar if dt_grad else None] * template.timed]
    strides = list(grad.stride()) if grad is not None else []
    constants["DENSE"] = strides[1:] == [problem.shown * D, 1]
    inputs, sizes = problem.inputs(), [B, T, plan.length, chunks, blocks, 1]
    common = [*inputs, *stored, *incoming, *outputs, final, h0_bar, w_bar, edges, *sizes]
    grid = (chunks * blocks,)
    if several and template.reduced:
        found["reduce_back"][((chunks - 1) * blocks,)](
            *inputs, *incoming, final, edges, *sizes, *strides, **constants
        )
        found["chain_back"][(blocks,)](edges, B, chunks, blocks, 1, **lanes(constants))
    found["adjoint_chunks"][grid](
        *common, plan.warmup, *strides, plan.tol, SEVERAL=several, **constants
    )
    if several and not template.reduced:
        part = u.dtype == problem.dtype
        found["readjoint"][grid](*common, *strides, plan.tol, PART=part, **constants)
    return bars, dt_bar, h0_bar, w_bar.sum((0, 2))


def run_decode(
    spec: Spec, u: Tensor, dt: Tensor | None, h: Tensor, params: tuple[Tensor, ...], out: Tensor
) -> None:
    """One step from ``h`` ``(B, S, D)`` with drives ``u`` ``(B, WIDTH)``, written to ``out``,
    which is contiguous and may be ``h``."""
    B, _, D = h.shape
    decode = kernels(spec, 1, False)["decode"]
    gap = [] if dt is None else [dt]
    strides = [u.stride(0), *(g.stride(0) for g in gap), u.stride(1)]
    block = 128 if D % 128 == 0 else 32
    decode[(-(-B * D // block),)](
        *(u, *gap, h, *(p.contiguous() for p in params), out, B, *strides),
        D=D,
        BLOCK=block,
        ALIGNED=D % block == 0,
        DTYPE=STATE[state_dtype(u.dtype)],
        num_warps=block // 32,
    )
