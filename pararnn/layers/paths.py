"""Which path a module would take, and why."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..solvers import NewtonConfig
from ..solvers.methods import candidates, choose
from ..solvers.problem import Problem, as_recurrence
from .agreement import recorded_calls
from .min_gru import MinGRUBlock, MinGRUStack
from .para_rnn import ParaRNN, takes_gaps


@dataclass(frozen=True)
class LayerPath:
    """What one layer would run; see :class:`~pararnn.Solution` for the attributes.

    ``methods`` says of every method why it is unfit, or what it is modelled to take, in
    microseconds; the cheapest that fits comes first, and is taken.
    """

    cell: str
    path: str
    method: str
    chunk_length: int
    chunks: int
    reason: str
    methods: tuple[tuple[str, str | float], ...] = ()

    def __str__(self) -> str:
        chunks = f"{self.chunks} chunk{'s' if self.chunks != 1 else ''} of {self.chunk_length}"
        head = f"{self.cell}: {self.path}, {self.method}, {chunks}. {self.reason}"
        return "\n".join([head, *(f"   {_said(*m)}" for m in self.methods)])


def _said(method: str, verdict: str | float) -> str:
    """One line of the list of methods."""
    if isinstance(verdict, str):
        return f"{method}: unfit: {verdict}"
    if math.isinf(verdict):
        return f"{method}: may take longer than the loop"
    return f"{method}: about {verdict:,.0f} µs by the cost model"


@dataclass(frozen=True)
class Explanation:
    """What every layer of a module would run. ``str()`` of it is one line a layer, and below it
    one a method."""

    layers: tuple[LayerPath, ...]

    def __str__(self) -> str:
        return "\n".join(f"{i}: {layer}" for i, layer in enumerate(self.layers))


def explain(
    module: Any, x: Tensor, config: NewtonConfig | None = None, *, method: str | None = None
) -> Explanation:
    """Say which path a module would take on an input, and why.

    Parameters
    ----------
    module
        A :class:`~pararnn.ParaRNN`, a :class:`~pararnn.MinGRUBlock` or
        :class:`~pararnn.MinGRUStack`, or a cell: these are not run. Or any model that contains
        ParaRNN layers or mixers, which is run once, to see what they get.
    x
        Input ``(B, T, d_in)`` (time first, or one sequence ``(T, d_in)``, if that is how the layer
        takes it): only its shape, dtype and device matter. Of a model, what it takes.
    config, method
        As for :func:`~pararnn.solve`; a layer's own if not given.

    Raises
    ------
    TypeError
        If the module is none of these, or the input no tensor.
    ValueError
        If the input does not have three dimensions (or two, for a ParaRNN).
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"x: got {type(x).__name__}, expected a tensor of shape (B, T, d_in).")
    cells: list[Any]
    if isinstance(module, ParaRNN):
        cells = list(module.cells)
        config = config or module.config
        method = method or module.solver
        x, *_ = module.batched(x)
    elif isinstance(module, MinGRUStack):
        cells = [block.mixer for block in module.blocks.children()]
    elif isinstance(module, MinGRUBlock):
        cells = [module.mixer]
    elif hasattr(module, "step") and hasattr(module, "state_shape"):
        cells = [module]
    else:
        with torch.no_grad():
            calls = recorded_calls(module, x, config)
        return Explanation(
            tuple(_path(c.cell, c.x, c.config or NewtonConfig(), method or c.solver) for c in calls)
        )
    if x.ndim != 3:
        raise ValueError(f"x: got shape {tuple(x.shape)}, expected (B, T, d_in).")
    return Explanation(
        tuple(_path(c, x, config or NewtonConfig(), method or "auto") for c in cells)
    )


def _path(cell: Any, x: Tensor, config: NewtonConfig, method: str) -> LayerPath:
    u, recurrence = x, as_recurrence(cell, x)
    if recurrence.spec is not None:
        dtype = cell.dtype if cell.exact_drives else cell.output_dtype
        u = torch.empty(1, dtype=dtype, device=cell.device)
        u = u.expand(*x.shape[:2], cell.drive_width)
    gaps = u[..., 0] if takes_gaps(cell) else None
    problem = Problem(recurrence, u, config, dt=gaps, method=method, layer=True)
    _, chosen = choose(problem)
    return LayerPath(
        recurrence.name,
        chosen.path,
        chosen.method,
        chosen.chunk_length,
        chosen.chunks,
        chosen.reason,
        tuple((m.name, cost if why is None else why) for m, why, cost in candidates(problem)),  # type: ignore[misc]
    )
