"""Times the mixers of the linear-scan family on the CPU: whole layers, forward and backward.

    pip install --no-deps --target DIR mingru-scans
    python benchmarks/min_gru_cpu.py --peer DIR [--threads 2] [--repeats 7]

Every mixer of `pararnn` from width D to width D, with and without decay, beside the one of the same
name in mingru-scans and beside `torch.nn.GRU`, in one process. The calls of the libraries take
turns, so that a machine that slows down slows all of them. Medians of wall-clock times; gradients
are those of the input and of all parameters. Each layer's error is the largest difference from the
same layer in float64, over the largest value. Results go to
`benchmarks/results/<date>-cpu-min-gru.json`, and as a table to the `.md` beside it.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import importlib
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

RESULTS = Path(__file__).resolve().parent / "results"
MIXERS = ("MinGRU", "SignedMinGRU", "RotationMinGRU", "GivensMinGRU", "DeltaMinGRU", "MinLSTM")
PATIENCE = 20.0  # seconds after which three turns are enough
DECAY = {"decay": "learnable", "decay_rate": 0.05, "log1p_delta": True}


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def calls(layer: nn.Module, x: Tensor, extra: dict[str, Tensor]) -> dict[str, Callable[[], object]]:
    """Forward without gradients, and forward with backward, of one layer."""
    leaf = x.clone().requires_grad_()
    cotangent = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    leaves = [leaf, *layer.parameters()]

    def output(inputs: Tensor) -> Tensor:
        y = layer(inputs, **extra)
        return y[0] if isinstance(y, tuple) else y

    def forward() -> None:
        with torch.no_grad():
            output(x)

    return {
        "fwd": forward,
        "fwd+bwd": lambda: torch.autograd.grad(output(leaf), leaves, cotangent, allow_unused=True),
    }


@torch.no_grad()
def error(layer: nn.Module, x: Tensor, extra: dict[str, Tensor]) -> float:
    """Largest difference from the same layer in float64, over the largest value."""
    wide = copy.deepcopy(layer).double()
    y, exact = layer(x, **extra), wide(x.double(), **{k: v.double() for k, v in extra.items()})
    return float((y - exact).abs().max() / exact.abs().max())


def row(
    layers: dict[str, nn.Module], x: Tensor, extra: dict[str, Tensor], repeats: int
) -> dict[str, dict[str, float]]:
    """Median times in milliseconds, and errors, of layers that take turns."""
    runs = {name: calls(layer, x, {} if name == "GRU" else extra) for name, layer in layers.items()}
    out: dict[str, dict[str, float]] = {name: {} for name in layers}
    for part in ("fwd", "fwd+bwd"):
        times: dict[str, list[float]] = {name: [] for name in layers}
        for name in layers:
            runs[name][part]()
        start = time.perf_counter()
        for turn in range(repeats):
            if turn >= 3 and time.perf_counter() - start > PATIENCE:
                break
            for name in layers:
                times[name].append(1e3 * seconds(runs[name][part]))
        for name in layers:
            out[name][part] = statistics.median(times[name])
    for name, layer in layers.items():
        if name != "GRU":
            out[name]["error"] = error(layer, x, extra)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer", help="folder with mingru-scans, from pip install --target")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument(
        "--shape", type=int, nargs=3, default=(8, 1024, 256), metavar=("B", "T", "D")
    )
    parser.add_argument("--only", nargs="+", choices=MIXERS, default=list(MIXERS))
    parser.add_argument("--out", type=Path, help="where to write the JSON")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    import pararnn.cells

    peer: Any = None
    if args.peer:
        sys.path.insert(0, args.peer)
        peer = importlib.import_module("mingru")
    batch, length, width = args.shape
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(batch, length, width, generator=generator)
    gaps = torch.rand(batch, length, generator=generator)
    rows = []
    for name in args.only:
        for decay in (False, True):
            settings: dict[str, Any] = DECAY if decay else {}
            torch.manual_seed(0)
            layers: dict[str, nn.Module] = {
                "pararnn": getattr(pararnn.cells, name)(width, width, **settings)
            }
            if hasattr(peer, name):
                layers["mingru-scans"] = getattr(peer, name)(width, width, **settings)
            if not decay:
                layers["GRU"] = nn.GRU(width, width, batch_first=True)
            extra = {"delta_t": gaps} if decay else {}
            rows.append({"mixer": name, "decay": decay, **row(layers, x, extra, args.repeats)})
            print(json.dumps(rows[-1]), file=sys.stderr)
    today = datetime.date.today().isoformat()
    result = {
        "date": today,
        "command": "python benchmarks/min_gru_cpu.py --peer DIR",
        "device": f"{platform.machine()} CPU, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "pararnn": pararnn.__version__,
        "mingru-scans": getattr(peer, "__version__", None),
        "dtype": "float32",
        "shape": list(args.shape),
        "unit": "ms, median wall-clock",
        "rows": rows,
    }
    target = args.out or RESULTS / f"{today}-cpu-min-gru.json"
    target.parent.mkdir(exist_ok=True)
    target.write_text(json.dumps(result, indent=1) + "\n")
    target.with_suffix(".md").write_text(table(result) + "\n")
    print(table(result))


def table(result: dict[str, Any]) -> str:
    """The results as a Markdown table."""
    lines = [
        f"{result['device']}, torch {result['torch']}, mingru-scans {result['mingru-scans']}, "
        f"{result['dtype']}, B×T×D = {'×'.join(map(str, result['shape']))}, {result['unit']}, "
        f"{result['date']}; `{result['command']}`.",
        "",
        "| mixer | pass | pararnn | mingru-scans | nn.GRU | mingru-scans / pararnn | error, both |",
        "| --- | --- | ---: | ---: | ---: | ---: | --- |",
    ]
    for row in result["rows"]:
        own, other = row["pararnn"], row.get("mingru-scans", {})
        name = f"`{row['mixer']}`" + (" with decay" if row["decay"] else "")
        errors = " / ".join(f"{side['error']:.0e}" for side in (own, other) if side)
        for part in ("fwd", "fwd+bwd"):
            lines.append(
                f"| {name} | {part} | {own[part]:.1f} | "
                + (f"{other[part]:.1f}" if other else "–")
                + " | "
                + (f"{row['GRU'][part]:.1f}" if "GRU" in row else "")
                + " | "
                + (f"{other[part] / own[part]:.1f}×" if other else "–")
                + f" | {errors if part == 'fwd' else ''} |"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
