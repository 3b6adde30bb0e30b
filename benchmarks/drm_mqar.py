"""Multi-query associative recall: the DRM variants, and two recurrent cells beside them.

    python benchmarks/drm_mqar.py --device cuda --seeds 3 --jobs 16 --budget 120

The protocol is that of :func:`pararnn.drm.recall_probe`; its defaults are the published ones. Models
are small, so several runs share a device, each in a process of its own. After every run the results
are written; runs that the budget does not reach are left out, those of the last seeds first.
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

HERE = Path(__file__).resolve()
sys.path.insert(0, str(HERE.parent.parent))

from pararnn import DeltaMinGRU, ParaM2RNN, ParaRNN  # noqa: E402
from pararnn.drm import DRM, VARIANTS, DRMConfig, recall_probe, variant  # noqa: E402
from pararnn.drm.mqar import SIZES, VOCABULARY  # noqa: E402

Row = dict[str, Any]
FIRST = ("J", "J_NO_METRIC", "I", "SSM_CONTROL", "J_NO_DIRECTION", "J_DIRECT_CONTROL")
PRESETS = ("published", "notes")
WIDTH = SIZES["d_state"]
KERNEL = 4
FORGET_BIAS = 3.0
SMOKE = {
    **SIZES,
    "d_token": 8,
    "d_state": 8,
    "hidden_size": 8,
    "n_directions": 4,
    "metric_rank": 2,
    "direction_basis": 4,
    "metric_basis": 4,
    "mixer_hidden": 4,
    "memory_hidden": 4,
}


class Work(NamedTuple):
    """One run: a model by name, semantics of the DRM (None for the others), seed."""

    model: str
    preset: str | None
    seed: int
    steps: int
    tests: int
    device: str
    smoke: bool


# -- the cells beside the DRM ----------------------------------------------------------------------


class MatrixMemory(nn.Module):
    """A ParaM2RNN, read by a query: ``W (Hᵀ q)``. Its forget gate starts near 0.95, as a start at
    1/2 forgets a pair before it is asked for."""

    def __init__(self, width: int, k_dim: int = 32, v_dim: int = 32):
        super().__init__()
        self.shape = (k_dim, v_dim)
        cell = ParaM2RNN(width, k_dim=k_dim, v_dim=v_dim)
        nn.init.constant_(cell.in_proj.bias[-1:], FORGET_BIAS)  # drives: k, v, forget gate
        self.states = ParaRNN(cell)
        self.query = nn.Linear(width, k_dim)
        self.out = nn.Linear(v_dim, width)

    def forward(self, x: Tensor) -> Tensor:
        states = self.states(x)[0].unflatten(-1, self.shape)
        return self.out((self.query(x).unsqueeze(-2) @ states).squeeze(-2))


CELLS: dict[str, Callable[[int], nn.Module]] = {
    "ParaM2RNN": MatrixMemory,
    "DeltaMinGRU": lambda width: DeltaMinGRU(width, width),
}


class Recurrent(nn.Module):
    """Embedding, causal convolution, cell and MLP, each with a norm and a residual; then logits.

    The convolution lets a step see the token before it, as the mixer of a DRM does.
    """

    def __init__(self, cell: str, width: int = WIDTH):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.convolution = nn.Conv1d(width, width, KERNEL, padding=KERNEL - 1, groups=width)
        self.cell = CELLS[cell](width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(4))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor, step: int | None = None) -> Tensor:
        """Logits ``(B, T, VOCABULARY)`` of tokens ``(B, T)``."""
        first, second, third, last = self.norms
        x = self.embedding(tokens)
        near = self.convolution(first(x).mT)[..., : x.shape[1]].mT
        x = x + nn.functional.silu(near)
        x = x + self.cell(second(x))
        x = x + self.mlp(third(x))
        return self.head(last(x))


# -- runs ------------------------------------------------------------------------------------------


def configuration(work: Work) -> DRMConfig:
    """Of a DRM variant, at the sizes of the probe."""
    sizes = SMOKE if work.smoke else SIZES
    config = variant(work.model).config(**sizes, seed=work.seed)
    return config.published() if work.preset == "published" else config


def run(work: Work) -> Row:
    """Train and test one model; an error is part of the result."""
    row: Row = work._asdict()
    try:
        if work.preset is None:
            torch.manual_seed(work.seed)
            model: nn.Module = Recurrent(work.model, 8 if work.smoke else WIDTH)
        else:
            model = DRM(configuration(work))
        model.to(work.device)
        answer = model if work.preset is None else None
        settings = {"seed": work.seed, "steps": work.steps, "tests": work.tests}
        row |= vars(recall_probe(model, answer=answer, **settings))
    except Exception:
        row["exception"] = traceback.format_exc()
    return row


def plan(args: argparse.Namespace) -> list[Work]:
    """All runs, the first seed of every model before the second of any. Variants that the sizes of
    the probe make equal are run once, under the first of their names."""
    rest = [name for name in VARIANTS if name not in FIRST]
    models: list[tuple[str, str | None]] = [(name, "published") for name in FIRST]
    models += [(name, None) for name in CELLS]
    models += [(name, "notes") for name in FIRST]
    models += [(name, "published") for name in rest]
    if args.model:
        models = [(name, preset) for name, preset in models if name in args.model]
    work: dict[object, Work] = {}
    for seed in range(1, args.seeds + 1):
        for name, preset in models:
            made = Work(name, preset, seed, args.steps, args.tests, args.device, args.smoke)
            work.setdefault(made if preset is None else configuration(made), made)
    return list(work.values())


def aliases() -> dict[str, list[str]]:
    """Other names of a variant, by the name under which it is run."""
    runs: dict[DRMConfig, str] = {}
    names: dict[str, list[str]] = {}
    for name in (*FIRST, *VARIANTS):
        first = runs.setdefault(variant(name).config(**SIZES), name)
        if first != name:
            names.setdefault(first, []).append(name)
    return names


def alone() -> None:
    """In every process: its share of the machine is one thread."""
    torch.set_num_threads(1)


def finished(work: list[Work], jobs: int, until: float) -> Iterator[Row]:
    """Results in the order in which they come, until the time is over."""
    with multiprocessing.get_context("spawn").Pool(jobs, alone) as pool:
        results = pool.imap_unordered(run, work)
        for _ in work:
            try:
                yield results.next(timeout=max(0.0, until - time.perf_counter()))
            except multiprocessing.TimeoutError:
                return


def main(arguments: list[str] | None = None) -> Path:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", action="append", help="only this one; repeatable")
    parser.add_argument("--seeds", type=int, default=3, help="1 to this one")
    parser.add_argument("--steps", type=int, default=1000, help="the published number is 1000")
    parser.add_argument("--tests", type=int, default=32, help="test batches")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs at a time")
    parser.add_argument("--budget", type=float, default=3600, help="seconds for all")
    parser.add_argument("--out", type=Path, default=HERE.parent / "results", help="folder")
    parser.add_argument("--revision", default="not given", help="of the code, for the record")
    parser.add_argument("--smoke", action="store_true", help="tiny models, to test the script")
    args = parser.parse_args(arguments)
    known = (*CELLS, *VARIANTS)
    for name in args.model or ():
        if name not in known:
            parser.error(f"--model: got {name!r}, expected one of {', '.join(known)}.")
    began = time.perf_counter()
    cuda = torch.device(args.device).type == "cuda"
    device = torch.cuda.get_device_name() if cuda else "CPU"
    work = plan(args)
    found: Row = {
        "date": datetime.date.today().isoformat(),
        "revision": args.revision,
        "command": " ".join(["python benchmarks/drm_mqar.py", *(arguments or sys.argv[1:])]),
        "device": device,
        "torch": torch.__version__,
        "dtype": "float32",
        "jobs": args.jobs,
        "planned": len(work),
        "aliases": aliases(),
        "rows": [],
    }
    args.out.mkdir(parents=True, exist_ok=True)
    kind = device.split()[-1].lower()
    steps = "" if args.steps == 1000 else f"-{args.steps}"
    target = args.out / f"{found['date']}-{kind}-drm-mqar{steps}{'-smoke' * args.smoke}.json"
    for row in finished(work, args.jobs, began + args.budget):
        found["rows"].append(row)
        found["seconds"] = round(time.perf_counter() - began, 1)
        partial = target.with_suffix(".part")
        partial.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        partial.replace(target)
        label = f"{row['model']} {row['preset'] or ''} seed {row['seed']}"
        if "exception" in row:
            print(f"{label}: {row['exception'].strip().splitlines()[-1]}", flush=True)
        else:
            print(
                f"{label}: {row['loss']:.3f} nats, {row['accuracy']:.1%}, {row['parameters']:,} "
                f"parameters, {row['seconds']:.0f} s",
                flush=True,
            )
    print(f"{len(found['rows'])} of {len(work)} runs in {target}")
    return target


if __name__ == "__main__":
    main()
