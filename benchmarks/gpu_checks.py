"""Checks the fused kernels against a loop over the hand-written step in float64.

Part of `benchmarks/gpu_channelwise.py`, which runs the cases of `gpu_cases.py` in several processes.

Tolerances are derived, not guessed. Rounding perturbs a step; how much that changes a result is
measured, by the same float64 loop with random perturbations in every step: a state moves by
`noise · max(1, |state|)`, a cotangent by `noise` of itself. `noise` is `ROUNDINGS` roundings of the
state's dtype, plus the solver's tolerance if there are several chunks, whose ends may miss the next
starts by that much. The largest change that this makes, twice, plus `noise` times the largest
entry, is the tolerance; a result in a half-precision dtype may be off by half a unit in its last
place more. The backward pass of half-precision tensors is linearized at the stored, rounded states,
so the perturbed loop is, too. A gradient that sums `n` terms may lose `√n` roundings more.

Before every call the allocator's free memory is filled with ones in every bit (a NaN in every
dtype), so an output that is not written shows.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from harness import Row, checked, compared, poison
from torch import Tensor

ROUNDINGS = 8
SOLVER = {torch.float32: 5e-7, torch.float64: 2e-14}  # NewtonConfig's default tolerance
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


def make(name: str, width: int, **kwargs: Any) -> Any:
    """A cell by its variant name."""
    import pararnn

    kind, _, variant = name.rstrip("]").partition("[")
    option = {"ParaGRU": "mix", "ParaSLSTM": "forget", "ParaCfC": "form"}.get(kind)
    extra = {option: variant} if option else {}
    return getattr(pararnn, kind)(1, width, **extra, **kwargs)


CELLS = (
    "ParaGRU[diag]",
    "ParaLSTM",
    "ParaSLSTM[sigmoid]",
    "ParaSLSTM[exp]",
    "ParaCfC[published]",
    "ParaCfC[consistent]",
    "ParaNLRU",
)


@dataclass(frozen=True)
class Case:
    """One problem: shape, dtype and options. ``layout`` says how the drives lie in memory,
    ``grad`` what the loss depends on, ``chunks`` how the sequence is cut."""

    cell: str
    B: int = 3
    T: int = 257
    D: int = 64
    dtype: str = "float32"
    h0: bool = False
    resets: bool = False
    layout: str = "packed"
    grad: str = "both"
    chunks: str = "auto"

    def __str__(self) -> str:
        options = ["h0"] * self.h0 + ["resets"] * self.resets
        options += [f"layout={self.layout}"] * (self.layout != "packed")
        shape = f"{self.B}×{self.T}×{self.D}"
        return " ".join(
            [self.cell, shape, self.dtype, *options, f"grad={self.grad}", f"chunks={self.chunks}"]
        )


def case_of(row: Row) -> Case:
    """The case of a row of results."""
    return Case(**{f.name: row[f.name] for f in dataclasses.fields(Case)})


# How drives (B, T, C) are made from a leaf: its shape, and the view of it.
LAYOUTS: dict[str, tuple[Callable[..., tuple[int, ...]], Callable[..., Tensor]]] = {
    "packed": (lambda B, T, C: (B, T, C), lambda leaf, B, T: leaf),
    "strided": (lambda B, T, C: (B, T, 2 * C), lambda leaf, B, T: leaf[..., ::2]),
    "time-major": (lambda B, T, C: (T, B, C), lambda leaf, B, T: leaf.transpose(0, 1)),
    "channel-major": (lambda B, T, C: (B, C, T), lambda leaf, B, T: leaf.transpose(1, 2)),
    "one sample": (lambda B, T, C: (1, T, C), lambda leaf, B, T: leaf.expand(B, -1, -1)),
    "one step": (lambda B, T, C: (B, 1, C), lambda leaf, B, T: leaf.expand(-1, T, -1)),
}


def settings(case: Case) -> dict[str, Any]:
    """Arguments of NewtonConfig."""
    return {
        "auto": {},
        "one": {"chunk_length": max(case.T, 1)},
        "many": {"chunk_length": max(case.T // 7, 1)},
        "corrected": {"chunk_length": 24, "warmup": 1},
        "repaired": {"chunk_length": 24, "warmup": 1, "iteration_cap": 1, "tol": 1e-12},
    }[case.chunks]


@dataclass
class Data:
    """Inputs of a case, on the CPU, in the dtypes that the kernels get."""

    leaf: Tensor
    h0: Tensor | None
    resets: Tensor | None
    dt: Tensor | None
    states_bar: Tensor | None
    final_bar: Tensor | None


def drawn(case: Case) -> tuple[Any, Data]:
    """The cell with random recurrent weights below its bound, and random inputs."""
    torch.manual_seed(sum(map(ord, str(case))))
    dtype = DTYPES[case.dtype]
    cell = make(case.cell, case.D, dtype=dtype)
    with torch.no_grad():
        for m in cell.spec.map_list:
            weight = getattr(cell, m.name)
            weight.copy_(0.9 * (torch.rand(weight.shape) - 0.5))
    B, T, C = case.B, case.T, cell.in_proj.out_features
    state = torch.float64 if dtype == torch.float64 else torch.float32
    timed = cell.spec.gap is not None

    def gaps(*shape: int) -> Tensor:
        return torch.rand(shape).to(dtype) * 2

    leaf = torch.randn(LAYOUTS[case.layout][0](B, T, C)).to(dtype)
    h0 = None
    if case.h0:  # a state that the cell can be in
        wide = copy.deepcopy(cell).double()
        h0 = torch.zeros(B, *cell.state_shape, dtype=torch.float64)
        with torch.no_grad():
            for _ in range(3):
                dt = gaps(B).double() if timed else None
                h0 = wide.step(h0, drives=torch.randn(B, C, dtype=torch.float64), dt=dt)
        h0 = h0.to(state)
    resets = torch.rand(B, T) < 0.02 if case.resets else None
    dt = gaps(T, B).t() if timed else None
    shape = (B, T, *cell.state_shape)
    states_bar = final_bar = None
    if case.grad in ("both", "states"):
        states_bar = torch.randn(shape).to(dtype)
    elif case.grad == "sum":
        states_bar = torch.ones((), dtype=dtype).expand(shape)
    elif case.grad == "output":
        states_bar = torch.randn(B, T, case.D).to(dtype)
    if case.grad in ("both", "final"):
        final_bar = torch.randn(B, *cell.state_shape).to(state)
    return cell, Data(leaf, h0, resets, dt, states_bar, final_bar)


def leaves_of(cell: Any, data: Data) -> dict[str, Tensor]:
    """What gradients are taken of, by name."""
    found = {"drives": data.leaf, "h0": data.h0, "dt": data.dt}
    names = [p.name for p in (*cell.spec.map_list, *cell.spec.param_list)]
    found |= {name: getattr(cell, name) for name in names}
    return {k: v.requires_grad_() for k, v in found.items() if v is not None}


def output_of(states: Tensor, slots: int) -> Tensor:
    return states[:, :, -1] if slots > 1 else states


def gradients(
    cell: Any, states: Tensor | None, final: Tensor, data: Data, leaves: dict[str, Tensor]
) -> dict[str, Tensor]:
    pairs = [(states, data.states_bar), (final, data.final_bar)]
    pairs = [(y, bar) for y, bar in pairs if bar is not None and y.requires_grad]
    ys, bars = [y for y, _ in pairs], [bar for _, bar in pairs]
    found: Any = [None] * len(leaves)
    if ys:
        found = torch.autograd.grad(ys, list(leaves.values()), bars, allow_unused=True)
    return {
        f"grad {name}": torch.zeros_like(leaf) if g is None else g
        for (name, leaf), g in zip(leaves.items(), found, strict=True)
    }


Stored = Callable[[Tensor], Tensor]


def cut_off(x: Tensor) -> Tensor:
    """Rounding to bfloat16 toward zero."""
    return (x.float().view(torch.int32) & -(2**16)).view(torch.float32)


# -- the oracle ------------------------------------------------------------------------------------


def exact(
    cell: Any, case: Case, data: Data, noise: float = 0.0, stored: Stored | None = None
) -> dict[str, Tensor]:
    """States, final state and gradients of the loop in float64, perturbed in every step by
    ``noise``, and linearized at states rounded by ``stored``."""
    cell = copy.deepcopy(cell).double()

    def wide(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.detach().double()

    data = Data(wide(data.leaf), wide(data.h0), data.resets, wide(data.dt),
                wide(data.states_bar), wide(data.final_bar))  # fmt: skip
    leaves = leaves_of(cell, data)
    B, T = case.B, case.T
    u = LAYOUTS[case.layout][1](data.leaf, B, T)
    if data.dt is not None:
        u = torch.cat([u, data.dt.unsqueeze(-1)], -1)
    params = cell.recurrent_params()
    h = torch.zeros(B, *cell.state_shape, dtype=torch.float64) if data.h0 is None else data.h0
    draw = torch.Generator().manual_seed(1)
    states = []
    for t, u_t in enumerate(u.unbind(1)):
        if data.resets is not None:
            mask = data.resets[:, t].reshape(-1, *(1,) * (h.ndim - 1))
            h = torch.where(mask, torch.zeros_like(h), h)
        if noise:
            sign = 2.0 * torch.randint(0, 2, h.shape, generator=draw) - 1
            h = h + noise * sign * h.detach().abs().clamp(min=1)
            if h.requires_grad:
                h.register_hook(lambda g, s=sign: g * (1 + noise * s))
        following = cell.advance(h, u_t, params)
        if stored is not None:
            rounded = h.detach().clone()
            last = rounded if cell.state_slots == 1 else rounded[:, -1]
            last.copy_(stored(last))
            at = cell.advance(h + (rounded - h).detach(), u_t, params)
            following = at + (following - at).detach()
        h = following
        states.append(h)
    whole = torch.stack(states, 1) if states else h.new_zeros(B, 0, *h.shape[1:])
    seen = output_of(whole, cell.state_slots) if case.grad == "output" else whole
    found = gradients(cell, seen, h, data, leaves)
    return {"states": whole.detach(), "final state": h.detach(), **found}


def tolerances(
    cell: Any, case: Case, data: Data, truncated: bool = False
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The exact results, and how far every entry of them may be off. ``truncated``: by up to a
    whole unit in the last place, as Triton's interpreter rounds to bfloat16."""
    dtype = DTYPES[case.dtype]
    state = torch.float64 if dtype == torch.float64 else torch.float32
    rounding = torch.finfo(state).eps / 2
    noise = ROUNDINGS * rounding
    if case.chunks != "one":
        noise += SOLVER[state]
    half = dtype if dtype != state else None
    true = exact(cell, case, data)
    stored: Stored | None = None
    if half is not None:
        stored = cut_off if truncated and half == torch.bfloat16 else lambda x: x.to(half)
    moved = exact(cell, case, data, noise, stored)
    allowed = {}
    for name, value in true.items():
        if value.numel() == 0:
            allowed[name] = value
            continue
        of_state = name in ("states", "final state")
        peak = float(value.abs().max())
        slack = 2 * float((moved[name] - value).abs().max())
        slack += noise * (max(1.0, peak) if of_state else peak)
        if not of_state:
            terms = {"grad drives": 1, "grad h0": 1, "grad dt": case.D}.get(name, case.B * case.T)
            slack *= max(1.0, math.sqrt(terms) / ROUNDINGS)
        slack += torch.finfo(state).smallest_normal  # what is smaller may be zero
        ulp = 0.0
        if half is not None and name != "final state" and name != "grad h0":
            ulp = torch.finfo(half).eps / (1 if truncated else 2)
            slack += torch.finfo(half).smallest_normal * ulp
        allowed[name] = slack + ulp * value.abs()
    return true, allowed


# -- the kernels -----------------------------------------------------------------------------------


def computed(cell: Any, case: Case, data: Data, device: str) -> tuple[dict[str, Tensor], Any]:
    """The same results by the fused kernels, and the solver's report."""
    from pararnn import NewtonConfig, solve

    cell = copy.deepcopy(cell).to(device)

    def here(x: Tensor | None) -> Tensor | None:
        # A copy that keeps the strides, zero ones too.
        if x is None or 0 in x.stride():
            return x if x is None else x.detach().to(device)[(0,) * x.ndim].expand(x.shape)
        return torch.empty_strided(
            x.shape, x.stride(), dtype=x.dtype, device=device
        ).copy_(x.detach())  # fmt: skip

    data = Data(*(here(getattr(data, f.name)) for f in dataclasses.fields(Data)))
    leaves = leaves_of(cell, data)
    u = LAYOUTS[case.layout][1](data.leaf, case.B, case.T)
    poison(device, u.numel())
    config = NewtonConfig(backend="fused", **settings(case))
    found = solve(cell, drives=u, h0=data.h0, resets=data.resets, dt=data.dt, config=config)
    results = {
        "states": found.states.detach().cpu(),
        "final state": found.final_state.detach().cpu(),
    }
    poison(device, u.numel())
    seen = found.output if case.grad == "output" else found.states
    grads = gradients(cell, seen, found.final_state, data, leaves)
    return results | {k: g.detach().cpu() for k, g in grads.items()}, found


def check(case: Case, device: str) -> Row:
    """Errors of one case; ``ok`` says whether every entry is within its tolerance."""
    return checked(dataclasses.asdict(case), partial(errors_of, case, device))


def errors_of(case: Case, device: str) -> Row:
    cell, data = drawn(case)
    start = time.perf_counter()
    got, report = computed(cell, case, data, device)
    middle = time.perf_counter()
    true, allowed = tolerances(cell, case, data, truncated=device == "cpu")
    return {
        "iterations": int(report.iterations),
        "fallback": bool(report.fallback),
        "errors": {name: compared(got[name], true[name], allowed[name]) for name in true},
        "seconds": [round(middle - start, 2), round(time.perf_counter() - middle, 2)],
    }


def run_job(cases: list[Case], device: str) -> list[Row]:
    """Cases that share kernels, in one process."""
    torch.set_num_threads(1)
    return [check(case, device) for case in cases]
