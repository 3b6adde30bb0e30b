"""Numbers at the ends of the range of float32, by the fused kernels, against loops in float64.

``python benchmarks/gpu_ranges.py`` prints a line of JSON a check, then PASS or FAIL, and exits with 1
if one fails. States walk over many orders of magnitude while the products of a chunk's coefficients
underflow or overflow; cotangents do the same, and are infinite or NaN; ordinary numbers need no
repair. ``--device cpu --chunk 4 --width 2`` tries the script in Triton's interpreter.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import sys
from collections.abc import Iterable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from pararnn import NewtonConfig, ParaGRU, SignedMinGRU, solve, verify_agreement
from pararnn.kernels.support import launcher
from pararnn.scan import delta_scan, linear_scan, matrix_scan, reference
from pararnn.solvers.methods import fused

# Orders of magnitude of the start, and of what every chunk multiplies it by; and of what its first
# half does before its second half takes it back.
WALKS: dict[str, tuple[float, tuple[float, ...], float]] = {
    "a subnormal product": (30, (0, -40, -1, -1), 0),
    "a product of zero": (30, (0, -50, -1, -1), 0),
    "products of two chunks": (30, (0, -24, -24, -1), 0),
    "an infinite product": (-22, (0, 44, -1, -10), 0),
    "there and back in a chunk": (22, (0, 0, 0, 0), -44),
    "there and back": (22, (0, -44, 44, 0), 0),
    "a large start": (30, (-20, -20, -3, -3), 0),
    "a small start": (-30, (20, 20, 3, 3), 0),
}
SCANS: tuple[Any, ...] = (linear_scan, matrix_scan)
LOOPS: tuple[Any, ...] = (reference.linear, reference.matrix)
Results = Iterator[dict[str, Any]]


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@contextlib.contextmanager
def cut(chunk: int) -> Iterator[list[Tensor]]:
    """Scans in chunks of this length; the records of their mismatches."""
    found: list[Tensor] = []
    launch, run = launcher(), launcher().run_forward

    def recorded(*args: Any) -> Any:
        found.append((out := run(*args))[3])
        return out

    chosen = fused.plan

    def plan(*sizes: Any, **more: Any) -> Any:
        return chosen(*sizes, **more | {"length": chunk, "warmup": chunk // 4})

    with mock.patch.object(fused, "plan", plan), mock.patch.object(launch, "run_forward", recorded):
        yield found


def walk(name: str, chunk: int, width: int) -> tuple[Tensor, Tensor]:
    """Coefficients ``(1, T, width)``, and the first state or cotangent ``(1, width)``."""
    start, chunks, there = WALKS[name]
    way = torch.tensor([1.0, -1.0], dtype=torch.float64).repeat_interleave(chunk // 2)
    powers = torch.cat([total / chunk + way * (2 * there / chunk) for total in chunks])
    signs = drawn(0, 1, len(powers), width).sign()
    return signs * (10**powers).float().view(1, -1, 1), torch.full((1, width), 10.0**start)


def as_planes(a: Tensor, *vectors: Tensor) -> tuple[Tensor, ...]:
    """The same, turned, with vectors of two numbers."""
    turn = torch.tensor([[0.6, -0.8], [0.8, 0.6]])
    return a[..., None, None] * turn, *(torch.stack([v, v / 2], -1) for v in vectors)


def judged(check: str, found: Any, wanted: Any, sizes: Any, steps: int) -> dict[str, Any]:
    """Relative to their sizes, numbers are right to the roundoffs of their steps."""
    error, limit = 0.0, 4 * steps * 2.0**-24
    for x, y, size in zip(found, wanted, sizes, strict=True):
        part = (x.detach().double() - y.detach()).abs() / size.detach().clamp_min(1e-37)
        error = max(error, float(part.nan_to_num(torch.inf).max()))
    return {"check": check, "good": error <= limit, "error": error, "limit": limit}


def ranges(chunk: int, width: int, device: str, names: Iterable[str] = tuple(WALKS)) -> Results:
    """States, and cotangents the other way, over many orders of magnitude."""
    for name, planes, back in itertools.product(names, (False, True), (False, True)):
        a, start = walk(name, chunk, width)
        bar = torch.zeros_like(a)
        bar[:, -1] = start
        given: tuple[Tensor, ...] = (a, 0 * bar, start, bar)
        given = (a.flip(1), 0 * bar, 0 * start, bar) if back else given
        op, b, h0, bar = (x.to(device) for x in (as_planes(*given) if planes else given))
        leaves = [b.requires_grad_(), h0.requires_grad_()]
        with cut(chunk):
            found = [SCANS[planes](op, *leaves, backend="fused")]
            wanted = [LOOPS[planes](op, *leaves)]
            if back:
                found = list(torch.autograd.grad(found, leaves, bar))
                wanted = list(torch.autograd.grad(wanted, leaves, bar.double()))
        sizes = [y.abs().amax(-1, keepdim=True) if planes else y.abs() for y in wanted]
        what = f"{name}, {'planes' if planes else 'scalars'}, {'back' if back else 'forth'}"
        yield judged(what, found, wanted, sizes, a.shape[1])


def alternating(chunk: int, width: int, device: str) -> Results:
    """Coefficients of 1e-8 and 1e7 in turn, beside drives."""
    a = torch.tensor([1e-8, 1e7]).repeat(2 * chunk).view(1, -1, 1) * torch.ones(width)
    b, h0 = drawn(1, *a.shape), torch.full((1, width), 1e22)
    b[:, 1::2] *= 1e5
    with cut(chunk):
        found = SCANS[0](a.to(device), b.to(device), h0.to(device), backend="fused")
    sizes = [reference.linear(a.abs(), b.abs(), h0)]
    yield judged("alternating", [found.cpu()], [reference.linear(a, b, h0)], sizes, a.shape[1])


def not_finite(chunk: int, width: int, device: str) -> Results:
    """A cotangent that is not finite reaches the steps before it that the loop lets it reach."""
    config = NewtonConfig(backend="fused", chunk_length=chunk, warmup=1)
    hows: tuple[dict[str, Any], ...] = ({"config": config}, {"method": "sequential"})
    cases = itertools.product((ParaGRU, SignedMinGRU), (False, True), (torch.nan, torch.inf))
    for kind, hidden, bad in cases:
        u = drawn(2, 2, 5 * chunk, 3 * width)
        if hidden and kind is SignedMinGRU:
            u[..., 2 * width :] = 1e-12
        elif hidden:  # saturated: nothing of the state is kept
            u[:] = 20
        bar, resets = torch.ones(2, 5 * chunk, width), torch.zeros(2, 5 * chunk, dtype=torch.bool)
        bar[1, -2, 0], resets[:, chunk + 1] = bad, True
        masks: list[Tensor] = []
        for how, dtype in zip(hows, (torch.float32, torch.float64), strict=True):
            torch.manual_seed(0)
            cell = kind(2, width).to(device, dtype)
            here = u.to(device, dtype).requires_grad_()
            states = solve(cell, drives=here, resets=resets.to(device), **how).states
            (found,) = torch.autograd.grad(states, here, bar.to(device, dtype))
            masks.append(found.isfinite())
        what = f"{kind.__name__}, cotangent {bad}{', products of zero' * hidden}"
        yield {"check": what, "good": torch.equal(*masks), "bad": [int((~m).sum()) for m in masks]}


def verdict(chunk: int, width: int, device: str) -> Results:
    """A NaN passes chunks whose products underflow, and the report says so."""
    cell = SignedMinGRU(2, width).to(device)
    u = drawn(3, 2, 5 * chunk, 3 * width).to(device)
    u[..., 2 * width :] = 1e-8
    u[1, chunk + 1, 0] = torch.nan
    config = NewtonConfig(backend="fused", chunk_length=chunk, warmup=1)
    found = solve(cell, drives=u, config=config)
    wanted = solve(cell, drives=u, method="sequential").states
    good = torch.equal(found.states.isnan(), wanted.isnan()) and not found.converged
    yield {"check": "NaN", "good": good and found.path == "fused"}
    x = drawn(4, 2, 5 * chunk, 2).to(device)
    x[1, chunk + 1, 0] = torch.nan
    said = verify_agreement(cell, x, config).verdict
    yield {"check": "verdict of a NaN", "good": said == "NOT FINITE", "verdict": said}


def ordinary(chunk: int, width: int, device: str) -> Results:
    """Ordinary numbers are not walked again: no repairs, and cotangents that are the same without."""
    shape = (2, 8 * chunk, width)
    for memory, planes in itertools.product((0.5, 0.999, 1.0), (False, True)):
        a = torch.full(shape, memory) * (drawn(5, *shape).abs().exp() ** -0.1 if memory < 1 else 1)
        given: tuple[Tensor, ...] = (a, drawn(6, *shape), drawn(7, 2, width), drawn(8, *shape))
        given = as_planes(*given) if planes else given
        if planes and memory == 1:  # quarter turns of a start on an axis: numbers near 0
            given[0][:] = torch.tensor([[-4.4e-8, -1.0], [1.0, -4.4e-8]])
            given[1].zero_(), given[2][..., 1].zero_()
        *leaves, bar = (x.to(device).requires_grad_() for x in given)
        with cut(chunk) as records:
            states = SCANS[planes](*leaves, backend="fused")
            bars = torch.autograd.grad(states, leaves, bar, retain_graph=True)
            with mock.patch.object(launcher(), "repair_back", mock.MagicMock()):
                plain = torch.autograd.grad(states, leaves, bar)
        repairs, same = int(records[0][-1, 0].sum()), all(map(torch.equal, bars, plain))
        what = f"ordinary {'planes' if planes else 'scalars'}, {memory}"
        yield {"check": what, "good": same and repairs == 0, "repairs": repairs, "back": same}


OVERFLOWS = ({"v": 3.2e38}, {"k": 1e25}, {"beta": 3e38}, {"gamma": 1e20}, {"k": 1e30, "v": 1e30})


def delta_resets(chunk: int, width: int, device: str) -> Results:
    """No bit after a reset differs for an overflow before it, in the delta rule; and nothing crosses."""
    for micro, overflow in itertools.product((1, 3), OVERFLOWS):
        steps, rows = 2 * chunk, min(width, 64)
        shape, reset = (2, steps, micro, 2), steps // 2 + 3
        k = drawn(9, *shape, rows)
        clean = {
            "q": drawn(10, 2, steps, 2, rows),
            "k": k / k.norm(dim=-1, keepdim=True),
            "v": drawn(11, *shape, rows),
            "beta": drawn(12, *shape).sigmoid(),
            "h0": drawn(13, 2, 2, rows, rows),
            "gamma": drawn(14, 2, steps, 2).sigmoid(),
        }
        spoiled = {name: x.clone() for name, x in clean.items()}
        for name, number in overflow.items():
            spoiled[name][1, reset - 5 : reset - 2] = number
        resets = torch.zeros(2, steps, dtype=torch.bool, device=device)
        resets[1, reset] = True
        found = []
        for values in (clean, spoiled):
            leaves = {n: x.to(device).requires_grad_() for n, x in values.items()}
            y, end = delta_scan(**leaves, resets=resets, chunk_size=chunk, backend="fused")
            seen = [y[0], y[1, reset:], end]
            loss = torch.stack([x.sin().sum() for x in seen]).sum()
            grads = torch.autograd.grad(loss, list(leaves.values()))
            found.append([*seen, y[1, : reset - 5], *grads])
        good = all(map(torch.equal, *found))
        crossed = max(float(g[1, :reset].abs().max()) for g in (*found[1][4:8], found[1][9]))
        what = f"delta rule of {micro}, {' and '.join(overflow)} before a reset"
        yield {"check": what, "good": good and crossed == 0, "crossed": crossed}
    want = reference.delta(**{n: x.double() for n, x in clean.items()}, resets=resets.cpu())[0]
    got = y.detach().cpu().double()[1, reset:]
    error = float((got - want[1, reset:]).abs().max() / want.abs().max())
    yield {"check": "delta rule after a reset", "good": error < 1e-4, "error": error}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--chunk", type=int, default=64)
    parser.add_argument("--width", type=int, default=96)
    args = parser.parse_args()
    good = True
    for check in (ranges, alternating, not_finite, verdict, ordinary, delta_resets):
        for result in check(args.chunk, args.width, args.device):
            good = good and bool(result["good"])
            print(json.dumps(result), flush=True)
    print("PASS" if good else "FAIL")
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
