"""Small states and states that are not finite, by the fused kernels, against a float64 loop.

``python benchmarks/gpu_small_states.py`` prints one line a case and exits with 1 if one is wrong. A
NaN in a result is wrong, unless the case asks for it. ``--device cpu --steps 40`` tries the script in
Triton's interpreter.
"""

from __future__ import annotations

import argparse
import copy
import sys

import torch
from harness import compared
from torch import Tensor

from pararnn import (
    NewtonConfig,
    ParaGRU,
    ParaLSTM,
    RotationMinGRU,
    SignedMinGRU,
    solve,
    verify_agreement,
)
from pararnn.scan import linear_scan

SCALES = (1.0, 1e-3, 1e-6, 1e-8)
LIMIT = 1e-4


def cells(width: int) -> dict[str, torch.nn.Module]:
    """Cells with long memory, driven by nothing but their input."""
    torch.manual_seed(0)
    made = {
        "ParaGRU": (ParaGRU(4, width), -4.0),
        "ParaLSTM": (ParaLSTM(4, width), 4.0),
        "SignedMinGRU": (SignedMinGRU(4, width), -4.0),
        "RotationMinGRU": (RotationMinGRU(4, width), 0.0),
    }
    for cell, gate in made.values():
        with torch.no_grad():
            cell.in_proj.bias.zero_()
            cell.in_proj.bias[:width] = gate
    return {name: cell for name, (cell, _) in made.items()}


def off(found: Tensor, wanted: Tensor, dim: int | None = None) -> float:
    """Largest difference, relative to the largest number so far of a lane, or of a whole tensor."""
    size = wanted.detach().abs()
    size = size.amax() if dim is None else size.cummax(dim).values
    return compared(found, wanted.detach(), size)["of tolerance"]


def solved(cell: torch.nn.Module, u: Tensor, config: NewtonConfig, device: str) -> list[float]:
    """Errors of states, and of the gradients of drives, by drive."""
    here = u.to(device).requires_grad_()
    found = solve(copy.deepcopy(cell).to(device), drives=here, config=config)
    wide = u.double().requires_grad_()
    wanted = solve(copy.deepcopy(cell).double(), drives=wide, method="sequential").states
    g = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (bar,) = torch.autograd.grad(found.states, here, g.float().to(device))
    (right,) = torch.autograd.grad(wanted, wide, g.float().double())
    drives = u.shape[2] // cell.sizes[cell.spec.axes[0]]
    bars = zip(bar.chunk(drives, 2), right.chunk(drives, 2), strict=True)
    worst = max(off(a, b) for a, b in bars if float(b.abs().max()))
    return [off(found.states, wanted, 1), worst] if found.converged else [torch.inf, worst]


def scanned(scale: float, steps: int, width: int, device: str) -> list[float]:
    g = torch.Generator().manual_seed(2)
    a = torch.rand(2, steps, width, generator=g) * 0.1 + 0.89
    b = scale * torch.randn(2, steps, width, generator=g)
    bar = scale * torch.randn(2, steps, width, generator=g)
    near = [t.to(device).requires_grad_() for t in (a, b)]
    wide = [t.double().requires_grad_() for t in (a, b)]
    found = linear_scan(*near, backend="fused")
    h, states = torch.zeros(2, width, dtype=torch.float64), []
    for a_t, b_t in zip(wide[0].unbind(1), wide[1].unbind(1), strict=True):
        h = a_t * h + b_t
        states.append(h)
    wanted = torch.stack(states, 1)
    bars = torch.autograd.grad(found, near, bar.to(device))
    right = torch.autograd.grad(wanted, wide, bar.double())
    return [off(found, wanted, 1), *(off(x, y) for x, y in zip(bars, right, strict=True))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--width", type=int, default=64)
    args = parser.parse_args()
    device, wrong = args.device, 0

    def say(name: str, good: bool, what: str) -> None:
        nonlocal wrong
        wrong += not good
        print(f"{'ok   ' if good else 'WRONG'} {name}: {what}", flush=True)

    length = max(5, args.steps // 16)
    for scale in SCALES:
        x = scale * torch.randn(2, args.steps, 4, generator=torch.Generator().manual_seed(0))
        for name, cell in cells(args.width).items():
            u = cell.drives(x).detach()
            for chunk in (None, length):
                config = NewtonConfig(backend="fused", chunk_length=chunk)
                errors = solved(cell, u, config, device)
                label = f"{name}, inputs × {scale:g}, chunks of {chunk or 'the cost model'}"
                say(label, max(errors) < LIMIT, ", ".join(f"{e:.1e}" for e in errors))
        errors = scanned(scale, args.steps, args.width, device)
        say(f"linear_scan × {scale:g}", max(errors) < LIMIT, ", ".join(f"{e:.1e}" for e in errors))
    for name, cell in cells(args.width).items():
        cell = cell.to(device)
        x = torch.randn(2, args.steps, 4, device=device)
        x[1, args.steps // 2, 0] = torch.nan
        config = NewtonConfig(backend="fused", chunk_length=length)
        found = solve(cell, x, config)
        said = (found.path, found.converged, found.residual)
        say(f"{name} with a NaN", said == ("fused", False, torch.inf), str(said))
        report = verify_agreement(cell, x, config)
        say(f"{name} with a NaN, verdict", report.verdict == "NOT FINITE", report.verdict)
    if device == "cuda":
        found = solve(cells(args.width)["ParaGRU"].to(device), torch.randn(1, 4096, 4).to(device))
        said = f"{found.path}, {found.chunks} chunks"
        say("auto takes the kernels", found.path == "fused" and found.chunks > 1, said)
    print(f"{wrong} wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
