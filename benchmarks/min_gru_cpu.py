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

import copy
import importlib
import json
import sys
from typing import Any

import torch
from harness import Call, Row, calls, parser, record, save, target, turns
from report import by, lines
from torch import Tensor, nn

MIXERS = ("MinGRU", "SignedMinGRU", "RotationMinGRU", "GivensMinGRU", "DeltaMinGRU", "MinLSTM")
PATIENCE = 20.0  # seconds after which three turns are enough
DECAY = {"decay": "learnable", "decay_rate": 0.05, "log1p_delta": True}


def passes(layer: nn.Module, x: Tensor, extra: dict[str, Tensor]) -> dict[str, Call]:
    """Forward without gradients, and forward with backward, of one layer."""
    cotangent = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))

    def output(x: Tensor, *_: Tensor) -> Tensor:
        y = layer(x, **extra)
        return y[0] if isinstance(y, tuple) else y

    leaves = [x.clone().requires_grad_(), *layer.parameters()]
    parts = calls(output, leaves, cotangent, unused=True)
    return {"fwd": parts["forward"], "fwd+bwd": parts["both"]}


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
    runs = {n: passes(layer, x, {} if n == "GRU" else extra) for n, layer in layers.items()}
    out: dict[str, dict[str, float]] = {name: {} for name in layers}
    for part in ("fwd", "fwd+bwd"):
        found = turns({name: run[part] for name, run in runs.items()}, repeats, PATIENCE)
        for name, value in found.items():
            out[name][part] = value
    for name, layer in layers.items():
        if name != "GRU":
            out[name]["error"] = error(layer, x, extra)
    return out


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--peer", help="folder with mingru-scans, from pip install --target")
    made.add_argument("--threads", type=int, default=2)
    made.add_argument("--repeats", type=int, default=7)
    made.add_argument("--shape", type=int, nargs=3, default=(8, 1024, 256), metavar=("B", "T", "D"))
    made.add_argument("--only", nargs="+", choices=MIXERS, default=list(MIXERS))
    args = made.parse_args()
    torch.set_num_threads(args.threads)
    import pararnn.cells

    peer: Any = None
    if args.peer:
        sys.path.insert(0, args.peer)
        peer = importlib.import_module("mingru")
    batch, length, width = args.shape = (2, 16, 8) if args.smoke else args.shape
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
    result = record(
        "python benchmarks/min_gru_cpu.py", "cpu", args.revision, dtype="float32",
        shape=list(args.shape), unit="ms, median wall-clock", rows=rows,
        **{"pararnn": pararnn.__version__, "mingru-scans": getattr(peer, "__version__", None)},
    )  # fmt: skip
    file = target(args.out, result, "cpu", "min-gru", args.smoke)
    save(file, result)
    file.with_suffix(".md").write_text(table(result) + "\n", encoding="utf-8")
    print(table(result))


def table(result: Row) -> str:
    """The results as a Markdown table."""
    rows = []
    for row in result["rows"]:
        own, other = row["pararnn"], row.get("mingru-scans", {})
        name = f"`{row['mixer']}`" + (" with decay" if row["decay"] else "")
        errors = " / ".join(f"{side['error']:.0e}" for side in (own, other) if side)
        for part in ("fwd", "fwd+bwd"):
            rows.append(
                [
                    name,
                    part,
                    f"{own[part]:.1f}",
                    f"{other[part]:.1f}" if other else "–",
                    f"{row['GRU'][part]:.1f}" if "GRU" in row else "",
                    f"{other[part] / own[part]:.1f}×" if other else "–",
                    errors if part == "fwd" else "",
                ]
            )
    head = ["mixer", "pass", "pararnn", "mingru-scans", "nn.GRU", "mingru-scans / pararnn",
            "error, both"]  # fmt: skip
    shown = lines(head, rows, 2)
    shown[1] = shown[1].removesuffix("---: |") + "--- |"  # errors are text
    about = (
        f"{result['device']}, torch {result['torch']}, mingru-scans {result['mingru-scans']}, "
        f"{result['dtype']}, B×T×D = {by(result['shape'])}, {result['unit']}, "
        f"{result['date']}; `{result['command']}`."
    )
    return "\n".join([about, "", *shown])


if __name__ == "__main__":
    main()
