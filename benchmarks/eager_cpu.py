"""Times the eager solver on the CPU: ParaGRU (`mix='diag'`), float32, drives given.

    python benchmarks/eager_cpu.py [--peer PYTHON] [--repeats 7]

Three ways to the same states and gradients, in one run and on the same sizes: `pararnn.solve` with
its default settings, a loop over time recorded by autograd (gates as fused as PyTorch allows,
inputs unbound once), and, with `--peer`, pararnn-torch's eager path, run by the Python of a virtual
environment that has it. That package takes no drives, so its projection of a single input feature
is inside its time. Medians of wall-clock times; states of all three are compared with a float64
loop. Results go to `benchmarks/results/<date>-cpu-eager.json` and, as the table that the README and
the benchmarks page show, to the `.md` beside it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable

import torch
from harness import Row, calls, parser, record, save, target, turns
from report import by, lines
from torch import Tensor

SHAPES = ((8, 2048, 256), (1, 16384, 64), (64, 256, 256), (4, 1000, 64))


def problem(batch: int, length: int, width: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Drives (B, T, 3, D), recurrent vectors (3, D) within the default bound, output cotangents."""
    generator = torch.Generator().manual_seed(0)
    drives = torch.randn(batch, length, 3, width, generator=generator)
    weights = (torch.rand(3, width, generator=generator) - 0.5) * 0.999
    cotangent = torch.randn(batch, length, width, generator=generator)
    return tuple(t.to(dtype) for t in (drives, weights, cotangent))


def loop(drives: Tensor, weights: Tensor) -> Tensor:
    """The recurrence as a loop over time."""
    a_z, a_r, a_n = weights.unbind(0)
    h = drives.new_zeros(drives.shape[0], drives.shape[-1])
    states = []
    for u in drives.unbind(1):
        u_z, u_r, u_n = u.unbind(1)
        z = torch.sigmoid(torch.addcmul(u_z, a_z, h))
        r = torch.sigmoid(torch.addcmul(u_r, a_r, h))
        n = torch.tanh(torch.addcmul(u_n, a_n, r * h))
        h = torch.lerp(h, n, z)
        states.append(h)
    return torch.stack(states, 1)


PASSES = {"forward": "fwd", "both": "fwd+bwd"}


def timed(
    forward: Callable[..., Tensor], leaves: list[Tensor], cotangent: Tensor, repeats: int
) -> dict[str, float]:
    parts = calls(lambda *_: forward(), leaves, cotangent)
    return {PASSES[name]: turns({name: run}, repeats)[name] for name, run in parts.items()}


def ours(batch: int, length: int, width: int, repeats: int) -> dict[str, object]:
    from pararnn import ParaGRU, solve

    drives, weights, cotangent = problem(batch, length, width, torch.float32)
    cell = ParaGRU(1, width)
    with torch.no_grad():
        for target, value in zip((cell.A_z, cell.A_r, cell.A_n), weights, strict=True):
            target.copy_(value)
    packed = drives.flatten(2).requires_grad_()
    report = solve(cell, drives=packed)
    exact = loop(*problem(batch, length, width, torch.float64)[:2])
    ours_leaves = [packed, cell.A_z, cell.A_r, cell.A_n]
    leaf = drives.clone().requires_grad_()
    recurrent = weights.clone().requires_grad_()
    return {
        "pararnn": timed(lambda: solve(cell, drives=packed).states, ours_leaves, cotangent, repeats)
        | {"error": float((report.states.detach().double() - exact).abs().max())},
        "loop": timed(
            lambda: loop(leaf, recurrent), [leaf, recurrent], cotangent, max(1, repeats // 2)
        )
        | {"error": float((loop(drives, weights).double() - exact).abs().max())},
        "chosen": report.reason,
        "passes": report.passes,
    }


def peer(batch: int, length: int, width: int, repeats: int) -> dict[str, object]:
    """Runs inside the peer's environment."""
    from pararnn import ParaGRU, newton_apply

    cell = ParaGRU(1, width)
    x = torch.randn(batch, length, 1, requires_grad=True)
    cotangent = problem(batch, length, width, torch.float32)[2]
    return timed(
        lambda: newton_apply(cell, x), [x, *cell.parameters()], cotangent, max(1, repeats // 2)
    )


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--peer", help="Python of an environment with pararnn-torch installed")
    made.add_argument("--repeats", type=int, default=7)
    made.add_argument("--as-peer", nargs=3, type=int, help=argparse.SUPPRESS)
    args = made.parse_args()
    if args.as_peer:
        print(json.dumps(peer(*args.as_peer, repeats=args.repeats)))
        return
    rows = []
    for shape in ((2, 16, 4),) if args.smoke else SHAPES:
        row: dict[str, object] = {"shape": shape, **ours(*shape, repeats=args.repeats)}
        if args.peer:
            command = [args.peer, __file__, "--repeats", str(args.repeats), "--as-peer"]
            out = subprocess.run(
                [*command, *map(str, shape)], capture_output=True, text=True, check=True, cwd="/"
            )
            row["pararnn-torch"] = json.loads(out.stdout.splitlines()[-1])
        rows.append(row)
        print(f"{shape} done", file=sys.stderr)
    result = record(
        "python benchmarks/eager_cpu.py", "cpu", args.revision, dtype="float32",
        unit="ms, median wall-clock", rows=rows,
    )  # fmt: skip
    file = target(args.out, result, "cpu", "eager", args.smoke)
    save(file, result)
    file.with_suffix(".md").write_text(table(result) + "\n", encoding="utf-8")
    print(table(result))


def table(result: Row) -> str:
    """The results as a Markdown table."""
    rows = []
    for row in result["rows"]:
        for part in PASSES.values():
            own, base = row["pararnn"][part], row["loop"][part]
            other = row.get("pararnn-torch", {}).get(part)
            theirs = (f"{other:.1f}", f"{other / own:.1f}×") if other else ("–", "–")
            shown = (f"{own:.1f}", f"{base:.1f}", theirs[0], f"{base / own:.1f}×", theirs[1])
            rows.append([by(row["shape"]), part, *shown])
    head = ["B×T×D", "pass", "pararnn", "loop", "pararnn-torch", "loop / pararnn",
            "pararnn-torch / pararnn"]  # fmt: skip
    about = (
        f"{result['device']}, torch {result['torch']}, {result['dtype']}, {result['unit']}, "
        f"{result['date']}; `{result['command']}`."
    )
    return "\n".join([about, "", *lines(head, rows, 2)])


if __name__ == "__main__":
    main()
