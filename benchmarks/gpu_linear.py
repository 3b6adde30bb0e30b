"""Checks and times the scans and mixers of the linear family on a GPU.

    PYTHONPATH=. python benchmarks/gpu_linear.py [--peer DIR] [--out DIR] [--budget 150]

One run first checks scans and mixers against float64 loops, in several processes, which also fills
Triton's cache; then it measures, alone on the device. `--peer` is a folder made by
`pip install --no-deps --target DIR mingru-scans accelerated-scan fla-core`; what is in it runs in
processes of their own. `--smoke` runs everything at tiny sizes, on a CPU too
(`TRITON_INTERPRET=1`), to test this script. The exit status is 1 if a check or a section failed.

Times are medians of replays of a CUDA graph that holds several calls (`median`, `least`, `most`, in
milliseconds a call; `how` is `graph`); what cannot be captured is timed call by call with events
(`how` is `events`, `why` the reason). Coefficients and inputs of a scan are given.

Tolerances of scans are bounds, not guesses. Every step may lose `ROUNDINGS` roundings of what its
terms add up to without their signs, and the recurrence carries such an error on: the same loop over
absolute values gives the bound of every entry, of a state and of a cotangent. A result that is
stored in half precision may be off by half a unit in its last place more. For mixers the tolerance
is measured: four times the largest error that the loop over the hand-written steps makes in the same
dtype on the CPU, and a few roundings of the largest entry. Their inputs pick a row of the weights
and scale it by a power of two, so that drives are the same numbers in every dtype: an angle that is
rounded to a grid must not depend on how a matrix product rounds.

Results: `<out>/<date>-h200-linear.json` (the name has the device), with

    date, revision, command, device, torch, triton, cuda, seconds      where and how
    failures        sections that raised, with their trace; skipped: sections left out for time
    versions        of the peers
    copy            bandwidth in bytes/s: of three ways to copy 1 GiB, the best one counts
    checks          one row a case: what, dtype, case; ok; by result the largest error, and the
                    largest part of its tolerance used; or the exception
    scan            rows: coefficients, dtype, shape (B, T, D); floor, forward, both (times in ms:
                    states alone; states and gradients), error against float64
    peers           rows: peer, layout, shape; forward, both, error; or the exception
    delta           rows of the delta rule: library, dtype, shape (B, T, heads, rows and columns of a
                    state); floor (queries, keys, values in and outputs out; backward all of them and
                    their cotangents), forward, both, error against float64
    layers          rows: library, mixer, precision, shape; `both`, forward and backward together, as
                    the times above say; `eager`, the same call by call; peak bytes of such a call
                    above what was there before it
    groups          rows as those of layers, of layers that run `samples` of the batch at a time and
                    compute each anew in the backward pass (torch.utils.checkpoint without the state
                    of random numbers, so that a graph can hold it)
    gemm            rows: mixer, precision: the matrix products of the layer alone
"""

from __future__ import annotations

import argparse
import copy
import gc
import importlib
import importlib.metadata
import importlib.util
import json
import math
import multiprocessing
import os
import re
import subprocess
import sys
import time
import traceback
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import gpu_checks
import torch
from gpu_channelwise import (
    DTYPES,
    START,
    Clock,
    copy_bandwidth,
    options,
    recorded,
    say,
    verdict,
)
from gpu_checks import poison
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

HERE = Path(__file__).resolve()
ROUNDINGS = 8
LOOSE = {"float32": 32, "bfloat16": 2}  # roundings of the largest entry that a mixer may be off
SHAPES = ((64, 512, 1024), (8, 2048, 1024), (1, 131072, 256))
COEFFICIENTS = ("sigmoid", "near 1")
DELTA = ((8, 2048, 8, 64), (8, 2048, 4, 128))
LAYER = (8, 2048, 512)
MIXERS = ("MinGRU", "SignedMinGRU", "RotationMinGRU", "GivensMinGRU")
LAYERS = (*MIXERS, "DeltaMinGRU")
OPTIONS: dict[str, dict[str, Any]] = {
    "GivensMinGRU": {"block_size": 8, "rounds": 3},
    "DeltaMinGRU": {"n_heads": 8},
}
DECAY: dict[str, Any] = {"decay": "learnable", "decay_rate": 0.3, "log1p_delta": True}
PRECISIONS = {"float32": "highest", "TF32": "high"}
SAMPLES = (1, 2)  # at a time, of layers that are computed anew in the backward pass
SMOKE = (8, 24, 8)
SMOKE_DELTA = (2, 40, 2, 4)
PEERS = ("fla", "accelerated-scan", "mingru-scans", "mingru-scans, eager")
WARP = "accelerated-scan, CUDA"
PACKAGES = ("mingru-scans", "accelerated-scan", "fla-core")
Row = dict[str, Any]


def unit(dtype: torch.dtype) -> float:
    """The largest relative error of one rounding."""
    return torch.finfo(dtype).eps / 2


# -- checks of scans -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One scan; ``coefficients`` says how they are drawn, ``state`` whether the loss depends on the
    final state, too."""

    scan: str
    B: int
    T: int
    n: int
    coefficients: str = "mixed"
    h0: bool = True
    resets: bool = False
    reverse: bool = False
    strided: bool = False
    state: bool = False

    def __str__(self) -> str:
        options = [k for k in ("h0", "resets", "reverse", "strided", "state") if getattr(self, k)]
        return " ".join([f"{self.B}×{self.T}×{self.n}", self.coefficients, *options])


CASES = (
    Case("linear_scan", 3, 257, 65, resets=True, state=True),
    Case("linear_scan", 2, 2051, 33, "near 1", state=True),
    Case("linear_scan", 2, 1, 7),
    Case("linear_scan", 2, 130, 40, resets=True, reverse=True),
    Case("linear_scan", 1, 8011, 24, "sigmoid", h0=False, resets=True),
    Case("linear_scan", 3, 96, 48, strided=True),
    Case("linear_scan", 70, 259, 129, "sigmoid"),
    Case("matrix_scan", 3, 257, 17, resets=True, state=True),
    Case("matrix_scan", 2, 2051, 5, "near 1"),
    Case("matrix_scan", 2, 1, 7),
    Case("matrix_scan", 2, 130, 40, resets=True, reverse=True),
    Case("parallel_scan_log", 3, 257, 65, "sigmoid", resets=True, state=True),
    Case("parallel_scan_log", 2, 2051, 33, "near 1", reverse=True),
)


def operators(case: Case) -> Tensor:
    """``(B, T, n, k, k)`` in float64: with ``mixed``, some are 0 and some channels are 0, 1, −1 and
    1.01 all the time."""
    size = 2 if case.scan == "matrix_scan" else 1
    shape = (case.B, case.T, case.n)
    if size == 1:
        turned = torch.ones(*shape, 1, 1)
    else:
        angle = 6.3 * torch.rand(shape)
        c, s = angle.cos(), angle.sin()
        turned = torch.stack([torch.stack([c, -s], -1), torch.stack([s, c], -1)], -2)
    if case.coefficients == "sigmoid":
        scale = torch.randn(shape).sigmoid()
    elif case.coefficients == "near 1":
        scale = 1 - 1e-3 * torch.rand(shape)
    else:
        scale = 1.2 * torch.randn(shape).tanh() * (torch.rand(shape) > 0.05)
    A = turned * scale[..., None, None]
    if case.coefficients == "mixed":
        for channel, value in enumerate((0.0, 1.0, -1.0, 1.01)):
            A[:, :, channel] = value * torch.eye(size)
    return A.double()


def walk(A: Tensor, b: Tensor, start: Tensor) -> Tensor:
    """States of ``h_t = A_t h_{t−1} + b_t``, one step after the other."""
    h, states = start, []
    for t in range(b.shape[1]):
        h = torch.einsum("bnij,bnj->bni", A[:, t], h) + b[:, t]
        states.append(h)
    return torch.stack(states, 1)


def oracle(
    A: Tensor, b: Tensor, h0: Tensor, resets: Tensor, bar: Tensor, state_bar: Tensor, half: float
) -> dict[str, tuple[Tensor, Tensor]]:
    """States and gradients of a scan in float64, each with the bound of its error; ``half`` is the
    rounding of what is stored."""
    u, zero = unit(torch.float32), torch.zeros_like(h0)
    A = A.masked_fill(resets[..., None, None, None], 0)
    h = walk(A, b, h0)
    error = walk(A.abs(), ROUNDINGS * u * walk(A.abs(), b.abs(), h0.abs()), zero)
    before = torch.cat([h0.unsqueeze(1), h[:, :-1]], 1)
    before_error = torch.cat([zero.unsqueeze(1), error[:, :-1]], 1) + half * before.abs()

    g = bar.clone()
    g[:, -1] += state_bar
    back = torch.cat([A[:, 1:], torch.zeros_like(A[:, :1])], 1).mT.flip(1)
    adjoint = walk(back, g.flip(1), zero).flip(1)
    size = walk(back.abs(), g.abs().flip(1), zero)
    adjoint_error = walk(back.abs(), ROUNDINGS * u * size, zero).flip(1)
    size = size.flip(1)

    def outer(x: Tensor, y: Tensor) -> Tensor:
        kept = (~resets)[..., None, None, None]
        return kept * x.unsqueeze(-1) * y.unsqueeze(-2)

    into = A[:, 0].mT
    dA = outer(adjoint, before)
    dA_error = outer(adjoint_error, before.abs()) + outer(adjoint.abs(), before_error)
    return {
        "states": (h, error + half * h.abs()),
        "state": (h[:, -1], error[:, -1]),
        "a": (dA, dA_error + (2 * u + half) * dA.abs()),
        "b": (adjoint, adjoint_error + half * adjoint.abs()),
        "h0": (
            torch.einsum("bnij,bnj->bni", into, adjoint[:, 0]),
            torch.einsum(
                "bnij,bnj->bni", into.abs(), adjoint_error[:, 0] + ROUNDINGS * u * size[:, 0]
            ),
        ),
    }


def scan_named(name: str) -> Callable[..., Any]:
    return getattr(importlib.import_module("pararnn.scan"), name)


def check_scan(case: Case, dtype: str, device: str, backend: str) -> dict[str, Any]:
    """Errors by result."""
    torch.manual_seed(sum(map(ord, str(case))))
    kind = DTYPES[dtype]
    half = unit(kind) if kind != torch.float32 else 0.0
    A = operators(case)
    b = torch.randn(A.shape[:-1])
    h0 = torch.randn(case.B, *A.shape[2:-1]) * case.h0
    log = case.scan == "parallel_scan_log"
    if log:
        A, b, h0 = A.log(), b.abs().log(), h0.abs()
        A[:, ::5] = -torch.inf
    A, b = A.to(kind), b.to(kind)
    resets = (torch.rand(case.B, case.T) < 0.03) & case.resets
    bar = torch.randn(b.shape).to(kind)
    state_bar = torch.randn(h0.shape) * case.state

    def forwards(x: Tensor) -> Tensor:
        return x.flip(1) if case.reverse else x

    wide_A, wide_b = (forwards(x.double().exp() if log else x.double()) for x in (A, b))
    wanted = oracle(
        wide_A,
        wide_b,
        h0.double(),
        forwards(resets),
        forwards(bar.double()),
        state_bar.double(),
        half,
    )
    if log:  # the derivative by a logarithm
        for name, x in (("a", wide_A), ("b", wide_b)):
            wanted[name] = (wanted[name][0] * x, wanted[name][1] * x)
    if case.reverse:
        for name in ("states", "a", "b"):
            wanted[name] = (wanted[name][0].flip(1), wanted[name][1].flip(1))

    def public(x: Tensor) -> Tensor:
        """A matrix or a vector of one number is that number."""
        if case.scan == "matrix_scan":
            return x
        return x.reshape(x.shape[: 3 if x.ndim > 3 else 2])

    def put(x: Tensor) -> Tensor:
        x = public(x)
        if case.strided and x.ndim > 2:
            x = x.transpose(1, 2).contiguous().to(device).transpose(1, 2)
        return x.to(device).detach().requires_grad_()

    leaves = {"a": put(A), "b": put(b)} | ({"h0": put(h0)} if case.h0 else {})
    poison(device, b.numel())
    states, state = scan_named(case.scan)(
        leaves["a"],
        leaves["b"],
        leaves.get("h0"),
        resets=resets.to(device) if case.resets else None,
        reverse=case.reverse,
        backend=backend,
        return_state=True,
    )
    poison(device, b.numel())
    outputs, cotangents = [states], [public(bar).to(device)]
    if case.state:
        outputs.append(state)
        cotangents.append(public(state_bar).to(device, state.dtype))
    grads = torch.autograd.grad(outputs, list(leaves.values()), cotangents)
    found = {"states": states, "state": state, **dict(zip(leaves, grads, strict=True))}
    return {
        name: compared(value, public(wanted[name][0]), public(wanted[name][1]))
        for name, value in found.items()
    }


def compared(value: Tensor, exact: Tensor, tolerance: Tensor | float) -> dict[str, float]:
    """As :func:`gpu_checks.compared`; what is smaller than 1e-30 may be zero."""
    return gpu_checks.compared(value, exact, tolerance + 1e-30)


# -- checks of mixers ------------------------------------------------------------------------------


def mixer(name: str, d_in: int, width: int, **kwargs: Any) -> Any:
    """By its name, with ``, decay`` behind it if it has one."""
    kind, _, decay = name.partition(", ")
    cells = importlib.import_module("pararnn.cells")
    options = OPTIONS.get(kind, {}) | (DECAY if decay else {})
    return getattr(cells, kind)(d_in, width, **options, **kwargs)


CHECKED = (*LAYERS, "MinLSTM", "SignedMinGRU, decay", "RotationMinGRU, decay")


@dataclass
class Sequence:
    """Inputs and cotangents of a mixer, on the CPU."""

    x: Tensor
    h0: Tensor | None
    gaps: Tensor | None
    bar: Tensor
    state_bar: Tensor


def looped(cell: Any, data: Sequence, dtype: torch.dtype) -> dict[str, Tensor]:
    """Output, state and gradients by a loop over the hand-written steps in a dtype."""
    cell = copy.deepcopy(cell).to(dtype)
    x = data.x.to(dtype).requires_grad_()
    leaves, names = [x, *cell.parameters()], ["x", *(n for n, _ in cell.named_parameters())]
    h = cell.init_state(x.shape[0])
    if data.h0 is not None:
        start = data.h0.to(cell.state_dtype).requires_grad_()
        h = cell.unflat(start)
        leaves, names = [*leaves, start], [*names, "h_0"]
    outputs = []
    for t in range(x.shape[1]):
        dt = None if data.gaps is None else data.gaps[:, t].to(cell.state_dtype)
        h = cell.step(h, x[:, t], dt=dt)
        outputs.append(cell.output(h, x[:, t]).to(cell.output_dtype))
    y, state = torch.stack(outputs, 1), cell.flat(h)
    return gathered(y, state, leaves, names, data)


def run(cell: Any, data: Sequence, device: str) -> dict[str, Tensor]:
    """The same by the mixer's own way."""
    cell = copy.deepcopy(cell).to(device)
    x = data.x.to(device, cell.in_proj.weight.dtype).requires_grad_()
    leaves, names = [x, *cell.parameters()], ["x", *(n for n, _ in cell.named_parameters())]
    start = None
    if data.h0 is not None:
        start = data.h0.to(device).requires_grad_()
        leaves, names = [*leaves, start], [*names, "h_0"]
    gaps = None if data.gaps is None else data.gaps.to(device)
    poison(device, x.shape[1] * cell.in_proj.out_features)
    y, state = cell(x, start, gaps, return_state=True)
    poison(device, x.shape[1] * cell.in_proj.out_features)
    return gathered(y, state.flatten(1), leaves, names, data)


def gathered(
    y: Tensor, state: Tensor, leaves: list[Tensor], names: list[str], data: Sequence
) -> dict[str, Tensor]:
    bars = [data.bar.to(y.device, y.dtype), data.state_bar.to(state.device, state.dtype)]
    grads = torch.autograd.grad([y, state], leaves, bars, allow_unused=True)
    found = {"output": y, "state": state, **dict(zip(names, grads, strict=True))}
    return {k: v.detach().cpu().double() for k, v in found.items() if v is not None}


def check_mixer(name: str, dtype: str, start: str, device: str) -> dict[str, Any]:
    torch.manual_seed(sum(map(ord, name + start)))
    kind, d_in, width = DTYPES[dtype], 16, 72
    B, T = 3, 131
    cell = mixer(name, d_in, width, dtype=kind)
    with torch.no_grad():
        cell.in_proj.weight.normal_()
        cell.in_proj.bias.zero_()
    picked = torch.nn.functional.one_hot(torch.randint(d_in, (B, T)), d_in)
    scale = torch.tensor([1.0, -1.0, 0.5, -0.5, 2.0])[torch.randint(5, (B, T))]
    gaps = None
    if cell.spec.gap is not None:
        gaps = 3 * torch.rand(B, T) * (torch.rand(B, T) > 0.2)
        gaps[0, T // 2] = 1e10
    data = Sequence(
        x=picked * scale.unsqueeze(-1),
        h0=torch.rand(B, cell.flat_width) if start == "given start" else None,
        gaps=gaps,
        bar=torch.randn(B, T, width).to(kind),
        state_bar=torch.randn(B, cell.flat_width),
    )
    exact, same = looped(cell, data, torch.float64), looped(cell, data, kind)
    found = run(cell, data, device)
    errors = {}
    for key, value in exact.items():
        allowed = 4 * float((same[key] - value).abs().max())
        allowed += LOOSE[dtype] * unit(kind) * float(value.abs().max())
        errors[key] = compared(found[key], value, allowed)
    return errors


# -- jobs of the workers ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """What a worker does, in a process of its own: checks, or compiling what will be timed."""

    kind: str
    name: str = ""
    dtype: str = "float32"
    widths: tuple[int, ...] = (1024, 256)
    device: str = "cpu"
    backend: str = "auto"
    peer: str = ""
    smoke: bool = False

    def __str__(self) -> str:
        return " ".join(filter(None, (self.kind, self.name, self.dtype)))


def jobs(device: str, backend: str, peer: str | None, smoke: bool) -> Iterator[Job]:
    """The longest first."""
    common: dict[str, Any] = {"device": device, "backend": backend, "smoke": smoke}
    for name in reversed(LAYERS):
        for kind in ("layer", "groups"):
            yield Job(kind, name, **common)
    for dtype in DTYPES:
        yield Job("scan", "", dtype, **common)
        yield Job("delta", "pararnn", dtype, **common)
    for name in ("linear_scan", "matrix_scan", "parallel_scan_log"):
        for dtype in DTYPES:
            yield Job("cases", name, dtype, **common)
    for name in reversed(CHECKED):
        for dtype in DTYPES:
            yield Job("mixer", name, dtype, **common)
    if peer:
        for name in ("DeltaMinGRU", "GivensMinGRU", "RotationMinGRU", "MinGRU", "SignedMinGRU"):
            yield Job("peer layer", name, peer=peer, **common)
        for width in (1024, 256):  # many variants to compile
            yield Job("peer", "fla", widths=(width,), peer=peer, **common)
        for name in PEERS[1:]:
            yield Job("peer", name, peer=peer, **common)


def one_of_each(listed: list[Job]) -> list[Job]:
    """The first job of every kind, and of every scan."""
    return list(
        {(j.kind, j.name if j.kind == "cases" else ""): j for j in reversed(listed)}.values()
    )


def work(job: Job) -> list[Row]:
    """Rows of checks; none for a job that only compiles."""
    torch.set_num_threads(1)
    if job.peer:
        see_peers(job.peer)
    if job.kind == "mixer":
        return [
            attempt(job, start, partial(check_mixer, job.name, job.dtype, start, job.device))
            for start in ("given start", "own start")
        ]
    if job.kind == "cases":
        cases = [c for c in CASES if c.scan == job.name]
        return [
            attempt(job, str(c), partial(check_scan, c, job.dtype, job.device, job.backend))
            for c in (cases[:2] if job.smoke else cases)
        ]
    compile_for(job)
    return []


def attempt(job: Job, case: str, check: Callable[[], dict[str, Any]]) -> Row:
    row: Row = {"what": job.name, "dtype": job.dtype, "case": case, "ok": False}
    begin = time.perf_counter()
    try:
        row["errors"] = check()
        row["ok"] = all(e["of tolerance"] <= 1 for e in row["errors"].values())
    except Exception:
        row["exception"] = traceback.format_exc()[-2000:]
    row["seconds"] = round(time.perf_counter() - begin, 1)
    return row


def compile_for(job: Job) -> None:
    """Run once what will be timed."""
    if job.kind == "scan":
        for shape in [SMOKE] if job.smoke else SHAPES:
            leaves, bar = problem("sigmoid", shape, job.dtype, job.device)
            for call in calls(own_scan(job.backend), leaves, bar).values():
                call()
    elif job.kind == "delta":
        for B, _, *sizes in [SMOKE_DELTA] if job.smoke else DELTA:
            leaves, bar = delta_problem((B, 256, *sizes), job.dtype, job.device)
            for call in calls(delta_rule(job.name, job.backend), leaves, bar).values():
                call()
    elif job.kind == "peer":
        peer = PEER[job.name]()
        for shape in [SMOKE] if job.smoke else [(2, 512, width) for width in job.widths]:
            leaves, bar = problem("sigmoid", shape, "float32", job.device)
            leaves, bar = peer.own(leaves, bar)
            for call in calls(peer.run, leaves, bar).values():
                call()
    elif job.kind in ("layer", "groups", "peer layer"):
        B, T, D = SMOKE if job.smoke else LAYER
        build = peer_mixer if job.kind == "peer layer" else mixer
        layer = build(job.name, D, D).to(job.device)
        for count in SAMPLES if job.kind == "groups" else (B,):
            leaves, bar = layer_problem(layer, (count, T, D), job.device)
            torch.autograd.grad(layer(leaves[0]), leaves, bar, allow_unused=True)


# -- timed problems --------------------------------------------------------------------------------


def problem(
    coefficients: str, shape: tuple[int, ...], dtype: str, device: str
) -> tuple[list[Tensor], Tensor]:
    """``[a, b]`` and the cotangent of the states; the same numbers in every process."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"device": device}
    if coefficients == "sigmoid":
        a = torch.randn(shape, **options).sigmoid()
    else:
        a = 1 - 1e-3 * torch.rand(shape, **options)
    b, bar = torch.randn(shape, **options), torch.randn(shape, **options)
    kind = DTYPES[dtype]
    return [a.to(kind).requires_grad_(), b.to(kind).requires_grad_()], bar.to(kind)


def own_scan(backend: str) -> Callable[..., Tensor]:
    scan = scan_named("linear_scan")
    return lambda a, b: scan(a, b, backend=backend)


def calls(
    run: Callable[..., Tensor], leaves: list[Tensor], bar: Tensor
) -> dict[str, Callable[[], object]]:
    def forward() -> None:
        with torch.no_grad():
            run(*leaves)

    return {
        "forward": forward,
        "both": lambda: torch.autograd.grad(run(*leaves), leaves, bar),
    }


def measured(clock: Clock, run: Callable[[], object]) -> Row:
    """In a captured graph if that is possible."""
    try:
        return {**clock.graph(run), "how": "graph"}
    except Exception as error:
        if clock.cuda:
            torch.cuda.synchronize()
        return {**clock.eager(run), "how": "events", "why": repr(error)[:300]}


@torch.no_grad()
def error_of(states: Tensor, leaves: list[Tensor]) -> float:
    """Largest error of some channels' states, over the largest state; the reference is the eager
    scan in float64."""
    a, b = (x.detach()[..., :64].double() for x in leaves)
    exact = scan_named("linear_scan")(a, b, backend="eager")
    return float((states[..., :64] - exact).abs().max() / exact.abs().max())


def scan_row(clock: Clock, own: Peer, coefficients: str, shape: tuple[int, ...], dtype: str) -> Row:
    """Times and error of one scan."""
    leaves, bar = problem(coefficients, shape, dtype, clock.device)
    mine, my_bar = own.own(leaves, bar)
    row: Row = {}
    for part, call in calls(own.run, mine, my_bar).items():
        row[part] = measured(clock, call)
    with torch.no_grad():
        row["error"] = error_of(own.back(own.run(*mine)), leaves)
    return row


# -- the delta rule --------------------------------------------------------------------------------


def delta_problem(shape: tuple[int, ...], dtype: str, device: str) -> tuple[list[Tensor], Tensor]:
    """Queries, keys of norm 1, values and step sizes in (0, 2), and the cotangent of the outputs."""
    torch.manual_seed(0)
    q, k, v, bar = (torch.randn(shape, device=device) for _ in range(4))
    beta = 2 * torch.randn(shape[:-1], device=device).sigmoid()
    leaves = (q, nn.functional.normalize(k, dim=-1), v, beta)
    kind = DTYPES[dtype]
    return [x.to(kind).requires_grad_() for x in leaves], bar.to(kind)


def delta_rule(library: str, backend: str = "auto") -> Callable[..., Tensor]:
    if library == "fla":
        module = fla_module("delta_rule")
        return lambda q, k, v, beta: module.chunk_delta_rule(q, k, v, beta, scale=1.0)[0]
    scan = scan_named("delta_scan")
    return lambda *given: scan(*given, backend=backend)[0]


def delta_row(clock: Clock, library: str, backend: str, shape: tuple[int, ...], dtype: str) -> Row:
    """Times of one delta rule; its error is that of the first row and head."""
    leaves, bar = delta_problem(shape, dtype, clock.device)
    run = delta_rule(library, backend)
    row: Row = {n: measured(clock, call) for n, call in calls(run, leaves, bar).items()}
    with torch.no_grad():
        part = [x.detach()[:1, :, :1].double() for x in leaves]
        exact = delta_rule("pararnn", "eager")(*part)
        off = run(*leaves)[:1, :, :1] - exact
        row["error"] = float(off.abs().max() / exact.abs().max())
    return row


# -- layers ----------------------------------------------------------------------------------------


def layer_problem(
    layer: nn.Module, shape: tuple[int, ...], device: str
) -> tuple[list[Tensor], Tensor]:
    torch.manual_seed(0)
    x = torch.randn(shape, device=device, requires_grad=True)
    return [x, *layer.parameters()], torch.randn(shape, device=device)


class Grouped(nn.Module):
    """A layer that runs the batch in groups and computes each anew in the backward pass: the page on
    blocks and stacks tells how."""

    def __init__(self, layer: nn.Module, samples: int):
        super().__init__()
        self.layer, self.samples = layer, samples

    def forward(self, x: Tensor) -> Tensor:
        parts = [
            checkpoint(self.layer, part, use_reentrant=False, preserve_rng_state=False)
            for part in x.split(self.samples)
        ]
        return torch.cat(parts)


def layer_row(clock: Clock, layer: nn.Module, shape: tuple[int, ...]) -> Row:
    """Forward and backward of a whole layer: its time in a graph, and peak memory."""
    leaves, bar = layer_problem(layer, shape, clock.device)

    def both() -> object:
        return torch.autograd.grad(layer(leaves[0]), leaves, bar, allow_unused=True)

    both()
    row: Row = {"eager": clock.eager(both)}
    if clock.cuda:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        grads = both()
        torch.cuda.synchronize()
        row["peak"] = torch.cuda.max_memory_allocated() - before
        del grads
    row["both"] = measured(clock, both)
    return row


def layer_rows(
    clock: Clock, build: Callable[..., Any], shape: tuple[int, ...], **labels: Any
) -> Iterator[Row]:
    for name in LAYERS:
        for precision, setting in PRECISIONS.items():
            torch.set_float32_matmul_precision(setting)
            row: Row = {**labels, "mixer": name, "precision": precision, "shape": shape}
            try:
                layer = build(name, shape[2], shape[2]).to(clock.device)
                row |= layer_row(clock, layer, shape)
            except Exception:
                row["exception"] = traceback.format_exc()[-1500:]
            torch.set_float32_matmul_precision("highest")
            yield row


# -- peers -----------------------------------------------------------------------------------------


@dataclass
class Peer:
    """A scan: ``own`` brings a problem into its layout, ``back`` its states into ours."""

    layout: str
    run: Callable[..., Tensor]
    own: Callable[..., tuple[list[Tensor], Tensor]] = lambda leaves, bar: (leaves, bar)
    back: Callable[[Tensor], Tensor] = lambda states: states


def see_peers(folder: str) -> None:
    """Make the packages of a folder importable."""
    os.environ["FLA_CACHE_RESULTS"] = "0"  # what was tuned beside other processes does not count
    if folder not in sys.path:
        sys.path.insert(0, folder)


def leaf(x: Tensor) -> Tensor:
    return x.detach().contiguous().requires_grad_()


def mingru_scan(mode: str) -> Peer:
    scan = importlib.import_module("mingru").linear_scan

    def run(a: Tensor, b: Tensor) -> Tensor:
        os.environ["MINGRU_SCAN"] = mode if a.is_cuda else "eager"
        return scan(a, b)[1]

    return Peer("(B, T, D)", run)


def peer_mixer(name: str, d_in: int, width: int) -> nn.Module:
    os.environ["MINGRU_SCAN"] = "triton" if torch.cuda.is_available() else "eager"
    module: nn.Module = getattr(importlib.import_module("mingru"), name)(
        d_in, width, **OPTIONS.get(name, {})
    )
    return module


def fla_module(name: str) -> Any:
    """The module of a recurrence's chunks, without the packages around it, which import everything
    else."""
    found = importlib.util.find_spec("fla")
    if found is None or found.origin is None:
        raise ImportError("no fla in the peers' folder")
    root = Path(found.origin).parent
    for path in ("ops", "ops/common", f"ops/{name}", "modules", "modules/norm"):
        package = types.ModuleType("fla." + path.replace("/", "."))
        package.__path__ = [str(root / path)]
        sys.modules.setdefault(package.__name__, package)
    return importlib.import_module(f"fla.ops.{name}.chunk")


def fla_scan() -> Peer:
    module = fla_module("hgrn")

    def own(leaves: list[Tensor], bar: Tensor) -> tuple[list[Tensor], Tensor]:
        """It is given log a; and it tunes itself anew, so that it is tuned for this shape."""
        for kernel in (module.chunk_hgrn_fwd_kernel_h, module.chunk_hgrn_bwd_kernel_h):
            if hasattr(kernel, "cache"):
                kernel.cache.clear()
        return [leaf(leaves[0].detach().log()), leaf(leaves[1])], bar

    return Peer("(B, T, D), log a", lambda g, x: module.chunk_hgrn(x, g)[0], own)


def trimmed(source: str) -> str:
    """accelerated-scan's CUDA source, for float32 and the lengths that are timed: compiling all of
    it takes minutes. The kernels stay as they are."""
    for kind in ("__nv_bfloat16, at::BFloat16", "__half, at::Half"):
        source = source.replace(f"warpscan<{kind}>(gates, __VA_ARGS__);", "TORCH_CHECK(false);")
    parts = re.split(r"(?=if \(seqlen == )", source)
    for i, part in enumerate(parts):
        length = re.match(r"if \(seqlen == (\d+)", part)
        if length and int(length[1]) not in [shape[1] for shape in SHAPES]:
            parts[i] = re.sub(
                r"DISPATCH_SCAN\(.*?\);", "TORCH_CHECK(false);", part, count=1, flags=re.DOTALL
            )
    return "".join(parts)


def warp_scan() -> Peer:
    from torch.utils import cpp_extension

    build = cpp_extension.load_inline

    def load(*, cuda_sources: list[str], **kwargs: Any) -> Any:
        return build(cuda_sources=list(map(trimmed, cuda_sources)), **kwargs)

    cpp_extension.load_inline = load  # type: ignore[assignment]
    return accelerated_scan("warp")


def accelerated_scan(module: str) -> Peer:
    scan = importlib.import_module(f"accelerated_scan.{module}").scan

    def own(leaves: list[Tensor], bar: Tensor) -> tuple[list[Tensor], Tensor]:
        return [leaf(x.mT) for x in leaves], bar.mT.contiguous()

    return Peer("(B, D, T)", scan, own, lambda states: states.mT)


PEER: dict[str, Callable[[], Peer]] = {
    "mingru-scans": lambda: mingru_scan("triton"),
    "mingru-scans, eager": lambda: mingru_scan("eager"),
    "fla": fla_scan,
    "accelerated-scan": lambda: accelerated_scan("scalar"),
    WARP: warp_scan,
}


def as_peer(job: Row) -> None:
    """Runs in a process of its own; one line of JSON a row."""
    see_peers(job["peer"])
    if job["task"] == "build":
        warp_scan()
        return
    clock = Clock(job["device"])

    def emit(row: Row) -> None:
        print("ROW " + json.dumps(row), flush=True)
        gc.collect()
        if clock.cuda and "exception" not in row:
            torch.cuda.empty_cache()

    if job["task"] == "layers":
        shape = tuple(job["shapes"][0])
        for row in layer_rows(clock, peer_mixer, shape, library="mingru-scans"):
            emit(row)
        return
    if job["task"] == "delta":
        for shape in job["shapes"]:
            row = {"library": "fla", "dtype": "bfloat16", "shape": shape}
            try:
                row |= delta_row(clock, "fla", "", tuple(shape), "bfloat16")
            except Exception as error:
                row["exception"] = repr(error)[:500]
            emit(row)
        return
    for name in job["names"]:
        for shape in job["shapes"]:
            row = {"peer": name, "shape": shape, "dtype": "float32"}
            try:
                peer = PEER[name]()
                row["layout"] = peer.layout
                row |= scan_row(clock, peer, "sigmoid", tuple(shape), "float32")
            except Exception as error:
                row["exception"] = repr(error)[:500]
                emit(row)
                if clock.cuda:
                    torch.cuda.synchronize()  # ends here if the device was left broken
                continue
            emit(row)


# -- sections --------------------------------------------------------------------------------------


class Session:
    """What all sections share, and the results so far."""

    def __init__(self, args: argparse.Namespace):
        self.smoke, self.budget, self.workers = args.smoke, args.budget, args.workers
        self.peer = str(Path(args.peer).resolve()) if args.peer else None
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.backend = args.backend or ("fused" if self.device == "cuda" else "auto")
        self.clock = Clock(self.device)
        self.found: dict[str, Any] = {"failures": {}, "skipped": [], "versions": {}}
        self.bandwidth = 0.0
        self.build: subprocess.Popen[str] | None = None

    def left(self) -> float:
        return self.budget - (time.perf_counter() - START)

    def shapes(self) -> list[tuple[int, ...]]:
        return [SMOKE] if self.smoke else list(SHAPES)

    @property
    def layer_shape(self) -> tuple[int, ...]:
        return SMOKE if self.smoke else LAYER

    # Checks and compilation, in parallel.

    def checks(self) -> None:
        rows = self.found["checks"] = []
        if self.peer and self.clock.cuda:
            self.build = self.start({"task": "build"}, quiet=True)
        listed = list(jobs(self.device, self.backend, self.peer, self.smoke))
        listed = one_of_each(listed) if self.smoke else listed
        context = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(self.workers, mp_context=context, max_tasks_per_child=1)
        futures = {pool.submit(work, job): job for job in listed}
        try:
            for future in as_completed(futures, timeout=max(5, self.left() - 0.4 * self.budget)):
                label = str(futures.pop(future))
                try:
                    result = future.result()
                except Exception:
                    say(f"{label} failed:\n{traceback.format_exc()[-1500:]}")
                    self.found.setdefault("uncompiled", []).append(label)
                    continue
                say(f"done {label}")
                for row in result:
                    rows.append(row)
                    report(row)
        except TimeoutError:
            unfinished = list(map(str, futures.values()))
            self.found["skipped"].append(f"checks and compilation: {', '.join(unfinished)}")
            say(f"out of time for {unfinished}")
        finally:
            children = list((pool._processes or {}).values())
            pool.shutdown(wait=False, cancel_futures=True)
            for child in children:  # one may hang
                if futures and child.is_alive():
                    child.kill()
        rows.sort(key=lambda r: (r["what"], r["dtype"], r["case"]))
        say(f"checks: {sum(r['ok'] for r in rows)} of {len(rows)} cases pass")

    # Times, alone on the device.

    def copy(self) -> None:
        self.found["copy"] = copy_bandwidth(self.clock)
        self.bandwidth = self.found["copy"]["bandwidth"]
        ways = {k: f"{v / 1e12:.2f}" for k, v in self.found["copy"]["ways"].items()}
        say(f"copy bandwidth, TB/s: {ways}")

    def floor(self, shape: tuple[int, ...], dtype: str) -> dict[str, float]:
        """Forward moves a, b and h; backward a, h, the cotangent of h, and those of a and b."""
        numbers = math.prod(shape) * DTYPES[dtype].itemsize
        one = 1e3 * numbers / self.bandwidth if self.bandwidth else math.nan
        return {"forward": 3 * one, "both": 8 * one}

    def scan(self) -> None:
        rows = self.found["scan"] = []
        own = Peer("(B, T, D)", own_scan(self.backend))
        for dtype in DTYPES:
            for coefficients in COEFFICIENTS:
                for shape in self.shapes():
                    row: Row = {"coefficients": coefficients, "dtype": dtype, "shape": shape}
                    try:
                        row["floor"] = self.floor(shape, dtype)
                        row |= scan_row(self.clock, own, coefficients, shape, dtype)
                    except Exception:
                        row["exception"] = traceback.format_exc()[-1500:]
                    rows.append(row)
                    say(f"scan {dtype} {shape} {coefficients}: {brief(row)}")

    def delta(self) -> None:
        rows = self.found["delta"] = []
        shapes = [SMOKE_DELTA] if self.smoke else list(DELTA)
        for dtype in DTYPES:
            for shape in shapes:
                row: Row = {"library": "pararnn", "dtype": dtype, "shape": shape}
                try:
                    row |= delta_row(self.clock, "pararnn", self.backend, shape, dtype)
                except Exception:
                    row["exception"] = traceback.format_exc()[-1500:]
                rows.append(row)
        rows += self.rows_of({"task": "delta", "shapes": shapes}, 40)
        for row in rows:
            one = self.floor(row["shape"], row["dtype"])["forward"] / 3
            row["floor"] = {"forward": 4 * one, "both": 12 * one}
            say(f"delta {row['library']} {row['dtype']} {row['shape']}: {brief(row)}")

    def peers(self) -> None:
        rows = self.found["peers"] = []
        for name in PEERS:  # one that fails takes no other with it
            for row in self.rows_of({"task": "scans", "names": [name]}, 40):
                rows.append(row)
                say(f"{row['peer']} {row['shape']}: {brief(row)}")

    def layers(self) -> None:
        import pararnn

        rows = self.found["layers"] = []
        for row in layer_rows(self.clock, mixer, self.layer_shape, library="pararnn"):
            try:
                B, T, D = self.layer_shape
                x = torch.zeros(B, T, D, device=self.device)
                row["path"] = str(pararnn.explain(mixer(row["mixer"], D, D).to(self.device), x))
            except Exception as error:
                row["path"] = repr(error)[:200]
            rows.append(row)
            say(f"pararnn {row['mixer']} {row['precision']}: {brief(row)}")

    def groups(self) -> None:
        rows = self.found["groups"] = []
        for samples in SAMPLES:

            def build(*given: Any, samples: int = samples) -> nn.Module:
                return Grouped(mixer(*given), samples)

            for row in layer_rows(self.clock, build, self.layer_shape, samples=samples):
                rows.append(row)
                say(f"{samples} at a time, {row['mixer']} {row['precision']}: {brief(row)}")

    def gemm(self) -> None:
        rows = self.found["gemm"] = []
        B, T, D = self.layer_shape
        for name in LAYERS:
            width = mixer(name, D, D).in_proj.out_features
            projection = nn.Linear(D, width, device=self.device)
            leaves, _ = layer_problem(projection, (B, T, D), self.device)
            bar = torch.randn(B, T, width, device=self.device)
            for precision, setting in PRECISIONS.items():
                torch.set_float32_matmul_precision(setting)
                call = calls(lambda x, *_, m=projection: m(x), leaves, bar)["both"]
                row = {"mixer": name, "precision": precision, "both": measured(self.clock, call)}
                rows.append(row)
                say(f"gemm {name} {precision}: {brief(row)}")
        torch.set_float32_matmul_precision("highest")

    def peer_layers(self) -> None:
        rows = self.found.setdefault("layers", [])
        for row in self.rows_of({"task": "layers", "shapes": [self.layer_shape]}, 60):
            rows.append(row)
            say(f"mingru-scans {row['mixer']} {row['precision']}: {brief(row)}")

    def warp(self) -> None:
        """accelerated-scan's CUDA kernels, if they could be built meanwhile."""
        if self.build is None:
            self.found["skipped"].append(WARP)
            return
        try:
            status = self.build.wait(timeout=max(1, self.left() - 15))
        except subprocess.TimeoutExpired:
            self.build.kill()
            self.found["skipped"].append(f"{WARP} (not built in time)")
            return
        if status:
            self.found["skipped"].append(f"{WARP} (does not build here)")
            return
        for row in self.rows_of({"task": "scans", "names": [WARP]}, 40):
            self.found.setdefault("peers", []).append(row)
            say(f"{row['peer']} {row['shape']}: {brief(row)}")

    # Processes of peers.

    def start(self, job: Row, quiet: bool = False) -> subprocess.Popen[str]:
        job = {"shapes": self.shapes(), "device": self.device, "peer": self.peer} | job
        environment = os.environ | {
            "PYTHONPATH": str(HERE.parent.parent),
            "TORCH_CUDA_ARCH_LIST": os.environ.get("TORCH_CUDA_ARCH_LIST", "9.0"),
        }
        return subprocess.Popen(
            [sys.executable, str(HERE), "--as-peer", json.dumps(job)],
            stdout=subprocess.DEVNULL if quiet else subprocess.PIPE,
            stderr=subprocess.DEVNULL if quiet else None,
            text=True,
            env=environment,
            cwd="/",
        )

    def rows_of(self, job: Row, limit: float) -> Iterator[Row]:
        """Rows that a peer's process wrote until it ended or ran out of time."""
        if not self.peer:
            self.found["skipped"].append(f"peers' {job['task']}")
            return
        process = self.start(job)
        try:
            out, _ = process.communicate(timeout=max(10, min(limit, self.left())))
        except subprocess.TimeoutExpired:
            process.kill()
            out, _ = process.communicate()
            self.found["skipped"].append(f"some of the peers' {job['task']} (no time)")
        for line in out.splitlines():
            if line.startswith("ROW "):
                yield json.loads(line[4:])
        if process.returncode:
            say(f"{job.get('names', 'peers')}, {job['task']}: exit status {process.returncode}")


def brief(row: Row) -> str:
    """A row's times in one line."""
    if "exception" in row:
        return row["exception"].strip().splitlines()[-1]
    parts = []
    for part in ("forward", "both", "eager"):
        if part in row:
            of = row[part]["median"] / row["floor"][part] if part in row.get("floor", {}) else 0
            parts.append(f"{part} {row[part]['median']:.4f}" + (f" ({of:.2f}×)" if of else ""))
            if row[part].get("how") == "events":
                parts.append(f"(not captured: {row[part]['why']})")
    if "error" in row:
        parts.append(f"error {row['error']:.1e}")
    if "peak" in row:
        parts.append(f"peak {row['peak'] / 2**20:.0f} MiB")
    return ", ".join(parts)


def report(row: Row) -> None:
    label = f"{row['what']} {row['dtype']} {row['case']}"
    if row["ok"]:
        name, worst = max(row["errors"].items(), key=lambda kv: kv[1]["of tolerance"])
        say(f"ok   {label}: {worst['of tolerance']:.2f} of tolerance ({name}), {row['seconds']} s")
    else:
        bad = row.get("exception") or {
            k: v for k, v in row["errors"].items() if not v["of tolerance"] <= 1
        }
        say(f"FAIL {label}: {bad}")


SECTIONS = (
    "checks",
    "copy",
    "scan",
    "layers",
    "peers",
    "peer_layers",
    "gemm",
    "groups",
    "delta",
    "warp",
)


def versions(folder: str | None) -> dict[str, str]:
    found: dict[str, str] = {}
    if folder is None:
        return found
    for name in PACKAGES:
        for distribution in importlib.metadata.distributions(name=name, path=[folder]):
            found[name] = distribution.version
    return found


def main() -> int:
    parser = options(__doc__, SECTIONS, 150, "the peers")
    parser.add_argument("--backend", choices=("auto", "eager", "fused"), help="of the scans")
    args = parser.parse_args()
    if args.as_peer:
        as_peer(json.loads(args.as_peer))
        return 0
    sys.path[:0] = [str(HERE.parent), str(HERE.parent.parent)]
    session = Session(args)
    session.found["versions"] = versions(session.peer)
    target = recorded(session, args, "linear", SECTIONS, least=8)
    if session.build is not None and session.build.poll() is None:
        session.build.kill()
    return verdict(session.found, target)


if __name__ == "__main__":
    sys.exit(main())
