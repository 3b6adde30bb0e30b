"""Launching the kernels of a Spec: buffers, arguments and order."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from .._checks import state_dtype
from ..spec import Spec
from .body import Shape, body, shape
from .plan import Plan
from .reduce import chain, reduce, reduce_back
from .repair import repair, repair_back
from .support import channels
from .walk import correct, decode, forward
from .walk_back import adjoint_chunks, readjoint

STATE = {torch.float32: tl.float32, torch.float64: tl.float64}


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

    def inputs(self) -> tuple[Any, ...]:
        """What every kernel begins with: inputs, ``h0``, parameters, and the inputs' strides."""
        given = [*self.drives]
        if self.dt is not None:
            given.append(self.dt)
        if self.resets is not None:
            given.append(self.resets.view(torch.uint8))
        return (
            tuple(given),
            None if self.h0 is None else self.h0.contiguous(),
            tuple(p.contiguous() for p in self.params),
            tuple(x.stride(0) for x in given),
            tuple(x.stride(1) for x in given),
            tuple(u.stride(2) for u in self.drives),
        )

    def blocks(self, plan: Plan) -> int:
        """Programs for all lanes."""
        return -(-self.drives[0].shape[0] * self.width // plan.block)

    def shape(self, plan: Plan, dense: bool = False) -> Shape:
        """How the tensors lie."""
        wide = self.drives[0].shape[2]
        packed = all(u.stride(1) == wide and u.stride(2) == 1 for u in self.drives)
        return shape(self.width, wide, packed, dense, plan.block, STATE[self.dtype])


def run_forward(problem: Problem, plan: Plan) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The output ``(B, T, D)`` (``(B, T, S·D)`` if it holds all slots) in the dtype of the drives,
    states of the other slots ``(B, T, S-1, D)`` and after the last step ``(B, S, D)`` in the
    state's; and the record of mismatches ``(corrections + 1, chunks, blocks)``."""
    u, S = problem.drives[0], problem.slots
    (B, T, _), D = u.shape, problem.width
    made = body(problem.spec, plan.unroll, problem.resets is not None, apart=problem.apart)
    chunks = plan.chunks(T)
    several = chunks > 1
    blocks = problem.blocks(plan)
    new = partial(torch.empty, device=u.device, dtype=problem.dtype)
    last = torch.empty(B, T, problem.shown * D, device=u.device, dtype=u.dtype)
    others = new(B, T, S - problem.shown, D)
    final = new(B, S, D)
    reduced = bool(made.reduced.value)
    buffers = 1 if reduced else 2
    edges = new(buffers * chunks * made.rows.value * B * D if several else 0)
    miss = torch.empty(
        (plan.corrections + 1) * several, chunks, blocks, device=u.device, dtype=torch.float32
    )
    inputs, sizes = problem.inputs(), (B, T, plan.length, chunks, blocks, 1)
    stored = (last, others) if others.numel() or problem.shown < S else (last,)
    fixed: dict[str, Any] = {"body": made, "shape": problem.shape(plan), "num_warps": 1}
    common = (*inputs, stored, final, edges)
    grid = (chunks * blocks,)
    if several and reduced:
        reduce[((chunks - 1) * blocks,)](*inputs, edges, *sizes, **fixed)
        chain[(blocks,)](edges, miss, B, chunks, blocks, 1, BACK=False, **fixed)
    forward[grid](*common, *sizes, plan.warmup, plan.tol, SEVERAL=several, **fixed)
    if several:
        meet = u.dtype == problem.dtype
        for k in range(plan.corrections * (not reduced)):
            correct[grid](*common, miss, *sizes, k, plan.tol, MEET=meet, **fixed)
        repair[(blocks,)](*common, miss, *sizes, plan.corrections, plan.tol, MEET=meet, **fixed)
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
    given = (grad is not None, rest is not None)
    made = body(problem.spec, plan.unroll, problem.resets is not None, given, problem.apart)
    chunks = plan.chunks(T)
    several = chunks > 1
    blocks = problem.blocks(plan)
    new = partial(torch.empty, device=u.device, dtype=problem.dtype)
    bars = tuple(torch.empty(u.shape, device=u.device, dtype=u.dtype) for u in problem.drives)
    dt_bar = new(B if dt_grad else 0, T, D)
    h0_bar = new(B, S, D)
    w_bar = new(chunks, len(problem.params), B, D)
    edges = new(chunks * made.rows_back.value * B * D if several else 0)
    rest, final = (None if g is None else g.contiguous() for g in (rest, final))
    stored = (last, others) if others.numel() or problem.shown < S else (last,)
    grads = tuple(g for g in (grad, rest if made.rest.value else None) if g is not None)
    strides = tuple(grad.stride()) if grad is not None else ()
    dense = strides[1:] == (problem.shown * D, 1)
    inputs, sizes = problem.inputs(), (B, T, plan.length, chunks, blocks, 1)
    fixed: dict[str, Any] = {"body": made, "shape": problem.shape(plan, dense), "num_warps": 1}
    common = (
        *inputs, stored, grads, strides, bars, dt_bar if dt_grad else None,
        final, h0_bar, w_bar, edges, *sizes,
    )  # fmt: skip
    grid = (chunks * blocks,)
    reduced = bool(made.reduced.value)
    if several and reduced:
        entering = (*inputs[:1], *inputs[2:], grads, strides, final, edges)
        reduce_back[((chunks - 1) * blocks,)](*entering, *sizes, **fixed)
        chain[(blocks,)](edges, None, B, chunks, blocks, 1, BACK=True, **fixed)
    adjoint_chunks[grid](*common, plan.warmup, plan.tol, SEVERAL=several, **fixed)
    if several and not reduced:
        readjoint[grid](*common, plan.tol, PART=u.dtype == problem.dtype, **fixed)
    if several:
        repair_back[(blocks,)](*common, plan.tol, **fixed)
    return bars, dt_bar, h0_bar, w_bar.sum((0, 2))


def run_decode(
    spec: Spec, u: Tensor, dt: Tensor | None, h: Tensor, params: tuple[Tensor, ...], out: Tensor
) -> None:
    """One step from ``h`` ``(B, S, D)`` with drives ``u`` ``(B, WIDTH)``, written to ``out``,
    which is contiguous and may be ``h``."""
    B, _, D = h.shape
    given = (u,) if dt is None else (u, dt)
    block = 128 if D % 128 == 0 else 32
    made = body(spec, 1, False)
    layout = shape(D, u.shape[1], u.stride(1) == 1, False, block, STATE[state_dtype(u.dtype)])
    decode[(-(-B * D // block),)](
        given,
        h,
        tuple(p.contiguous() for p in params),
        tuple(x.stride(0) for x in given),
        (u.stride(1),),
        out,
        B,
        body=made,
        shape=layout,
        num_warps=block // 32,
    )
