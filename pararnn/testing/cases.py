"""Random problems that are printed in a line, and their answers by loops that share no code with
the library: the papers' equations (:mod:`.equations`) in the arithmetic of :mod:`.rounding`.

Only the weights are read from a cell. A :class:`Case` says everything: ``str(case)`` is Python that
makes it again, on any machine.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import pararnn
from pararnn import NewtonConfig

from .equations import EQUATIONS
from .rounding import Number, Rounding

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
STATE = {torch.float64: torch.float64, torch.float32: torch.float32, torch.bfloat16: torch.float32}
BASE = {torch.float64: 1e-10, torch.float32: 1e-5}
"""Clauses C6 and C8, where errors do not add up along the trajectory."""
SPREADS = 32
"""Allowed multiple of the replicas' spread. A step makes tens of roundings in both computations and
three replicas rarely show the worst; a chunk's start may be off by eight roundings (5e-7, float32)
more, which is what the solver calls converged."""

DEVICE = torch.device(os.environ.get("PARARNN_DEVICE", "cpu"))
BACKEND = os.environ.get("PARARNN_BACKEND", "auto")


@dataclass(frozen=True)
class Case:
    """A cell with random weights and random drives.

    ``drives`` has pairs: what is added to all entries of a drive, and the power of ten that they
    are multiplied by; the drives of the cell take them in turn. ``h0`` and ``weights`` are powers
    of ten, too; ``resets`` are pairs of row and step, ``spoiled`` are row, step, column and value,
    all taken modulo the sizes.
    """

    cell: str
    width: int = 3
    batch: int = 2
    length: int = 17
    dtype: str = "float64"
    seed: int = 0
    drives: tuple[tuple[float, int], ...] = ((0.0, 0),)
    weights: int = 0
    h0: int | None = None
    resets: tuple[tuple[int, int], ...] = ()
    spoiled: tuple[tuple[int, int, int, float], ...] = ()
    method: str = "shooting"
    chunk_length: int | None = 4
    warmup: int | None = 1
    max_iters: int | None = None
    jacobian: str = "auto"
    cotangents: int = 0

    @property
    def config(self) -> NewtonConfig:
        """Settings that go with the method."""
        length = None if self.method in ("newton", "sequential") else self.chunk_length
        return NewtonConfig(
            chunk_length=length,
            warmup=self.warmup,
            max_iters=self.max_iters,
            jacobian=self.jacobian,
            on_divergence="auto" if self.max_iters is None else "ignore",
            backend=BACKEND,
        )


@dataclass
class Problem:
    """A case in tensors, on the device under test."""

    case: Case
    cell: Any
    drives: Tensor
    h0: Tensor | None
    resets: Tensor | None
    dt: Tensor | None

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.case.dtype]

    @property
    def names(self) -> list[str]:
        """The trained recurrent parameters."""
        shapes = self.cell.spec.parameter_shapes(self.cell.sizes)
        fixed = {p.name for p in self.cell.spec.param_list if not p.trained}
        return [name for name in shapes if name not in fixed]

    def leaves(self) -> dict[str, Tensor]:
        """What gradients are taken of."""
        found = {"drives": self.drives, "h0": self.h0, "dt": self.dt}
        found |= {name: getattr(self.cell, name) for name in self.names}
        return {k: v for k, v in found.items() if v is not None}

    def solve(self, **changes: Any) -> Any:
        """By the library, by the case's method and settings."""
        given: dict[str, Any] = {"h0": self.h0, "resets": self.resets, "dt": self.dt} | changes
        drives = given.pop("drives", self.drives)
        settings = {"method": self.case.method, "config": self.case.config}
        return pararnn.solve(self.cell, drives=drives, **{**settings, **given})


def drawn(case: Case, cell: Any = None) -> Problem:
    """The tensors of a case, for its registered cell or for another."""
    g = torch.Generator().manual_seed(case.seed)
    dtype = DTYPES[case.dtype]

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64)

    if cell is None:
        entry = pararnn.get_cell(case.cell)
        heads = entry.settings.get("mix") == "head"
        cell = entry.factory(2, case.width * (2 if heads else 1))
    if "max_recurrent_norm" in cell.hyperparameters():
        cell = cell.rebuilt(max_recurrent_norm=None)
    cell = cell.to(dtype)
    with torch.no_grad():
        for p in cell.parameters():
            p.copy_(
                (normal(*p.shape) * [1, *p.shape][-1] ** -0.5 * 10.0**case.weights).clamp(
                    -1e30, 1e30
                )
            )
    spec, B, T = cell.spec, case.batch, case.length
    shapes = [s for d, s in zip(spec.drive_list, spec.drive_shapes(cell.sizes), strict=True)
              if d is not spec.gap]  # fmt: skip
    columns = []
    for i, shape in enumerate(shapes):
        offset, power = case.drives[i % len(case.drives)]
        columns.append((normal(B, T, math.prod(shape)) + offset) * 10.0**power)
    drives = torch.cat(columns, -1)
    width = drives.shape[-1]
    for row, step, column, value in case.spoiled:
        if B and T:
            drives[row % B, step % T, column % width] = value
    h0 = resets = dt = None
    if case.h0 is not None:
        h0 = start(cell, normal(B, *cell.state_shape), 10.0**case.h0)
        h0 = h0.to(STATE[dtype]).to(DEVICE)
    if case.resets:
        resets = torch.zeros(B, T, dtype=torch.bool)
        for row, step in case.resets:
            if B and T:
                resets[row % B, step % T] = True
        resets = resets.to(DEVICE)
    if spec.gap is not None:
        dt = (2 * torch.rand(B, T, generator=g, dtype=torch.float64)).to(dtype).to(DEVICE)
    return Problem(case, cell.to(DEVICE), drives.to(dtype).to(DEVICE), h0, resets, dt)


def start(cell: Any, value: Tensor, scale: float) -> Tensor:
    """A state of about this size that the cell can be in."""
    for i, slot in enumerate(cell.spec.slots):
        part = value[:, i] if cell.state_slots > 1 else value
        low, high = slot.bounds or (-math.inf, math.inf)
        part *= scale
        if low == 0:
            part.abs_()
        elif low == 1:
            part.abs_().add_(1)
        elif high < math.inf:
            part.copy_(part.clamp(low, high))
    return value


# -- the loop --------------------------------------------------------------------------------------


def whole(cell: Any) -> bool:
    """Whether channels do not mix, so that the equations of one serve all at once."""
    spec = cell.spec
    return len(spec.axes) == 1 and all(m.structure == "diagonal" for m in spec.map_list)


@dataclass
class Answer:
    """Replicas ``(replicas + 1, B, T, *state_shape)`` of the states, and those of the leaves."""

    states: Tensor
    leaves: dict[str, Tensor]


def loop(problem: Problem, replicas: int = 3, gradients: bool = False) -> Answer:
    """The states of a case by the equations, step by step, in float64."""
    case, cell = problem.case, problem.cell
    rounding = Rounding(STATE[problem.dtype], replicas, flush=DEVICE.type == "cuda")
    leaves = {k: rounding.copies(v).requires_grad_(gradients) for k, v in problem.leaves().items()}
    if "h0" in leaves:
        h = leaves["h0"]
    else:
        h = rounding.copies(cell.init_state(case.batch))
    params = []
    spec = cell.spec
    for name in [*(m.name for m in spec.map_list), *(p.name for p in spec.param_list)]:
        value = leaves[name] if name in leaves else rounding.copies(getattr(cell, name))
        params.append(value.unsqueeze(1))  # one for all rows
    joined, equation = whole(cell), EQUATIONS[case.cell]

    def lists(value: Tensor, depth: int) -> Any:
        """Nested lists of numbers, or with all channels in one."""
        if depth == 0 or (joined and depth == 1):
            return [rounding.number(value)] if depth else rounding.number(value)
        return [lists(v, depth - 1) for v in value.unbind(2)]

    def tensor(value: Any) -> Tensor:
        if isinstance(value, Number):
            return value.value
        parts = [tensor(v) for v in value]
        return parts[0] if joined and isinstance(value[0], Number) else torch.stack(parts, 2)

    maps = [lists(p, p.ndim - 2) for p in params]
    depth, states = h.ndim - 2, []
    shapes = [s for d, s in zip(spec.drive_list, spec.drive_shapes(cell.sizes), strict=True)
              if d is not spec.gap]  # fmt: skip
    sizes = [math.prod(s) for s in shapes]
    for t in range(case.length):
        if problem.resets is not None:
            mask = problem.resets[:, t].cpu().reshape(1, -1, *(1,) * depth)
            h = torch.where(mask, torch.zeros_like(h), h)
        u = leaves["drives"][:, :, t]
        if joined:
            now = [rounding.number(part) for part in u.split(sizes, -1)]
        else:
            now = [rounding.number(part) for part in u.unbind(-1)]
        if "dt" in leaves:
            gap = leaves["dt"][:, :, t]
            now.append(rounding.number(gap.unsqueeze(-1) if joined else gap))
        out = tensor(equation(lists(h, depth), now, maps))
        h = out.expand(h.shape)
        states.append(h)
    empty = h.unsqueeze(2)[:, :, :0]
    return Answer(torch.stack(states, 2) if states else empty, leaves)


# -- the norm --------------------------------------------------------------------------------------


def lanes(cell: Any, value: Tensor) -> Tensor:
    """The largest magnitude of every block whose numbers mix, ``(..., *state_shape)`` broadcast: a
    channel with all its slots, a head, a row of a matrix state, a head of the delta rule; the
    whole state, if nothing less is closed."""
    spec, size = cell.spec, value.detach().abs()
    if cell.state_slots > 1:
        size = size.amax(-len(spec.axes) - 1, keepdim=True)
    if len(spec.axes) == 3:
        size = size.amax((-2, -1), keepdim=True)
    elif len(spec.axes) == 2:
        size = size.amax(-1, keepdim=True)
    elif any(m.structure == "head" for m in spec.map_list):
        heads = cell.sizes["heads"]
        grouped = size.unflatten(-1, (heads, -1))
        size = grouped.amax(-1, keepdim=True).expand(grouped.shape).flatten(-2)
    elif not whole(cell):
        size = size.amax(-1, keepdim=True)
    return size.expand(value.shape)


def running(cell: Any, states: Tensor, h0: Tensor | None) -> Tensor:
    """The contract's scale: the running maximum of a trajectory ``(B, T, *state_shape)``, lane by
    lane, without what is not finite."""
    size = lanes(cell, torch.nan_to_num(states, 0.0, 0.0, 0.0))
    if not size.shape[1]:
        return size
    size = size.clone()
    if h0 is not None:
        first = lanes(cell, torch.nan_to_num(h0.detach().double().cpu(), 0.0, 0.0, 0.0))
        size[:, 0] = torch.maximum(size[:, 0], first)
    return size.cummax(1).values


def spread(replicas: Tensor) -> Tensor:
    """How far replicas are from the exact computation; infinite or NaN where one is not finite."""
    if replicas.shape[0] == 1:
        return torch.zeros_like(replicas[0])
    return (replicas[1:] - replicas[:1]).abs().amax(0)


def judged(what: str, got: Tensor, want: Tensor, allowed: Tensor) -> float:
    """Raise where a number is off by more than is allowed, or is not finite where it should be.

    Returns the part of the numbers that said something: what replicas cannot represent does not.
    """
    if got.shape != want.shape:
        raise AssertionError(f"{what}: got shape {tuple(got.shape)}, expected {tuple(want.shape)}")
    got, want = got.detach().double().cpu(), want.detach()
    known = want.isfinite() & allowed.isfinite()
    error = (got - want).abs()
    wrong = known & ~(error <= allowed)  # also where the error is NaN
    if wrong.any():
        ratio = torch.where(wrong, (error / allowed).nan_to_num(math.inf, math.inf), 0.0)
        at = tuple(int(i) for i in torch.unravel_index(ratio.argmax(), ratio.shape))
        raise AssertionError(
            f"{what}: {int(wrong.sum())} of {int(known.sum())} numbers are off; the worst, at {at}: "
            f"got {float(got[at]):.9g}, expected {float(want[at]):.9g} ± {float(allowed[at]):.2g}"
        )
    return float(known.double().mean()) if known.numel() else 1.0


def ulp(dtype: torch.dtype, value: Tensor) -> Tensor:
    """Half a unit in the last place of what is stored in a narrow dtype."""
    if dtype in BASE:
        return torch.zeros_like(value)
    return value.abs() * torch.finfo(dtype).eps / 2 + torch.finfo(dtype).tiny


def allowed_states(problem: Problem, answer: Answer) -> Tensor:
    """By how much every state may be off: by the contract's norm, or by what rounding does."""
    state = STATE[problem.dtype]
    true = answer.states[0].detach()
    scale = running(problem.cell, true, problem.h0)
    loose = lanes(problem.cell, spread(answer.states.detach()))
    return BASE[state] * scale + SPREADS * loose + torch.finfo(state).tiny


def check_states(problem: Problem, answer: Answer, states: Tensor, final: Tensor) -> float:
    """States and final state of a solve against the loop."""
    true, allowed = answer.states[0].detach(), allowed_states(problem, answer)
    part = judged("states", states, true, allowed + ulp(problem.dtype, true))
    if true.shape[1]:
        judged("final state", final, true[:, -1], allowed[:, -1])
    return part


def check_gradients(problem: Problem, answer: Answer, got: dict[str, Tensor], bar: Tensor) -> float:
    """Gradients of ``(bar · states).sum()`` against autograd through the loop."""
    state = STATE[problem.dtype]
    ones = bar.detach().double().cpu()
    total = (answer.states * ones).sum()
    found = torch.autograd.grad(
        total, list(answer.leaves.values()), allow_unused=True, materialize_grads=True
    )
    least = 1.0
    for name, whole_ in zip(answer.leaves, found, strict=True):
        true = whole_[0]
        finite = torch.where(true.isfinite(), true, 0.0)
        top = finite.abs().max() if finite.numel() else finite.new_zeros(())
        loose = spread(whole_)
        allowed = BASE[state] * top + SPREADS * loose + torch.finfo(state).tiny
        narrow = getattr(got[name], "dtype", state)
        least = min(least, judged(f"gradient of {name}", got[name], true,
                                  allowed + ulp(narrow, true)))  # fmt: skip
    return least
