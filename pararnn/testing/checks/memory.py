"""The clause about what a solve leaves behind."""

from __future__ import annotations

import gc
import pickle
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pararnn import NewtonConfig

from ..context import Context, converted
from ..reference import apart
from . import checks
from .sequences import WAYS


class Token:
    """Lives as long as the autograd node that holds it, and so as long as any node after that."""


class Marked(torch.autograd.Function):
    """The identity, with a token in its node."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, token: Token) -> Tensor:
        ctx.token = token
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return g, None


@contextmanager
def without_collector() -> Iterator[None]:
    """Cycles of Python objects stay, and are seen."""
    gc.collect()
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


def survives(step: Callable[[Tensor], Any], x: Tensor) -> bool:
    """Whether the graph of a step outlives it. ``step`` is given the marked input; what it returns is
    kept meanwhile."""
    token = Token()
    alive = weakref.ref(token)
    kept = step(Marked.apply(x, token))
    del token
    found = alive() is not None
    del kept
    return found


def tensors() -> int:
    """Tensors that Python knows."""
    return sum(issubclass(type(o), Tensor) for o in gc.get_objects())


def live(device: torch.device) -> tuple[int, int]:
    """Tensors, and bytes on a GPU."""
    return tensors(), torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


@checks("memory")
def memory(ctx: Context) -> None:
    cell = converted(ctx.cell(), torch.float32)
    pinned = NewtonConfig(chunk_length=4, max_iters=1, on_divergence="ignore")
    ways = (*WAYS, ("pinned", {"method": "shooting", "config": pinned}))
    for length in (24, 23):  # with and without a short last chunk
        x = ctx.inputs(cell, 2, length).float().requires_grad_()

        def step(x: Tensor, options: dict[str, Any], backward: bool) -> None:
            solution = ctx.api.solve(cell, x, **options)
            if backward:
                (solution.states.sum() + solution.final_state.sum()).backward()
                cell.zero_grad(set_to_none=True)

        def unrecorded(x: Tensor, step: Callable[..., None] = step) -> None:
            with torch.no_grad():
                for _, options in ways:
                    step(x, options, False)

        with without_collector():
            for label, options in ways:
                for backward in (False, True):
                    run = partial(step, options=options, backward=backward)
                    run(x)  # what is made once
                    where = f"{label}, T={length}, {'with' if backward else 'without'} backward"
                    ctx.require(not survives(run, x), f"{where}: the graph outlives its solve")
            unrecorded(x)
            before = live(ctx.device)
            unrecorded(x), unrecorded(x)
            more = [b - a for a, b in zip(before, live(ctx.device), strict=True)]
            ctx.require(max(more) <= 0, f"T={length}, no_grad: {more} tensors and bytes more")
    _reports(ctx, cell)


def _reports(ctx: Context, cell: Any) -> None:
    layer = ctx.api.layer(cell)
    x = ctx.inputs(cell, 2, 24).float().requires_grad_()

    def step(x: Tensor) -> None:
        given, gaps = apart(cell, x)
        layer(given, **gaps)

    with without_collector():
        ctx.require(not survives(step, x), "the reports of a layer hold its graph")
        (report,) = layer.last_solutions
        copied = pickle.loads(pickle.dumps(report))
        ctx.require(not copied.output.requires_grad, "a pickled report requires a gradient")
        ctx.same_bits("states of a pickled report", copied.states, report.states)
        ctx.require(copied.converged == report.converged, "a pickled report says something else")
