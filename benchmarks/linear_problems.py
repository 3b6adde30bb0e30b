"""Scans, delta rules and layers of the linear family that `gpu_linear.py` times, with their inputs.

The same numbers in every process.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from harness import DTYPES, Clock, Row, attempt
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

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
SMOKE = (2, 12, 8)
SMOKE_DELTA = (1, 20, 1, 4)

# -- scans -----------------------------------------------------------------------------------------


@dataclass
class Peer:
    """A scan: ``own`` brings a problem into its layout, ``back`` its states into ours."""

    layout: str
    run: Callable[..., Tensor]
    own: Callable[..., tuple[list[Tensor], Tensor]] = lambda leaves, bar: (leaves, bar)
    back: Callable[[Tensor], Tensor] = lambda states: states


def scan_named(name: str) -> Callable[..., Any]:
    return getattr(importlib.import_module("pararnn.scan"), name)


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
    row = clock.both(own.run, mine, my_bar)
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
    row = clock.both(run, leaves, bar)
    with torch.no_grad():
        part = [x.detach()[:1, :, :1].double() for x in leaves]
        exact = delta_rule("pararnn", "eager")(*part)
        off = run(*leaves)[:1, :, :1] - exact
        row["error"] = float(off.abs().max() / exact.abs().max())
    return row


# -- layers ----------------------------------------------------------------------------------------


def mixer(name: str, d_in: int, width: int, **kwargs: Any) -> Any:
    """By its name, with ``, decay`` behind it if it has one."""
    kind, _, decay = name.partition(", ")
    cells = importlib.import_module("pararnn.cells")
    options = OPTIONS.get(kind, {}) | (DECAY if decay else {})
    return getattr(cells, kind)(d_in, width, **options, **kwargs)


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
        clock.wait()
        torch.cuda.empty_cache()
        row["peak"] = clock.peak(both)
    row["both"] = clock.measured(both)
    return row


def layer_rows(
    clock: Clock, build: Callable[..., Any], shape: tuple[int, ...], **labels: Any
) -> Iterator[Row]:
    def built(name: str) -> nn.Module:
        layer: nn.Module = build(name, shape[2], shape[2]).to(clock.device)
        return layer

    for name in LAYERS:
        for precision, setting in PRECISIONS.items():
            torch.set_float32_matmul_precision(setting)
            named = {**labels, "mixer": name, "precision": precision, "shape": shape}
            row = attempt(named, lambda name=name: layer_row(clock, built(name), shape))
            torch.set_float32_matmul_precision("highest")
            yield row
