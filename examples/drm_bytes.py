"""Three DRM variants on bytes: directions, no directions, no geometry.

Each variant reads windows at random places, the same ones for all; the last tenth of the text is for
validation. SSM_CONTROL gets as many parameters as J. The text comes with Python: its reference, or
with the large preset the source of its standard library.

    python examples/drm_bytes.py --steps 300 --seeds 3
    python examples/drm_bytes.py --preset large --device cuda --seeds 2 --jobs 6 --out table.json
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import multiprocessing
import statistics
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import torch

from pararnn.drm import DRM, DRMConfig, drm_loss, matched_memory, parameter_count, variant

NAMES = ("J", "J_NO_DIRECTION", "SSM_CONTROL")


class Preset(NamedTuple):
    sizes: dict[str, Any]
    text: str
    steps: int
    batch: int
    length: int
    windows: int
    lr: float


COMMON = {
    "direction_basis": 0,  # directions are not confined to a fixed subspace
    "naturalization_warmup": 0,
}
PRESETS = {
    "small": Preset(
        {
            **COMMON,
            "d_token": 64,
            "d_state": 64,
            "hidden_size": 128,
            "n_directions": 16,
            "metric_rank": 8,
            "metric_basis": 16,
            "block_length": 32,
            "mixer_hidden": 32,
            "memory_hidden": 32,
        },
        text="reference",
        steps=300,
        batch=8,
        length=128,
        windows=256,
        lr=2e-3,
    ),
    "large": Preset(
        {
            **COMMON,
            "d_token": 384,
            "d_state": 384,
            "hidden_size": 768,
            "n_directions": 16,
            "metric_rank": 16,
            "metric_basis": 32,
            "block_length": 64,
            "mixer_hidden": 96,
            "memory_hidden": 96,
        },
        text="library",
        steps=1000,
        batch=32,
        length=512,
        windows=256,
        lr=1e-3,
    ),
}


class Run(NamedTuple):
    name: str
    seed: int
    parameters: int
    nats: float
    tokens_a_second: float


class Row(NamedTuple):
    name: str
    parameters: int
    nats: float
    deviation: float | None  # of the seeds; None for a single one
    tokens_a_second: float  # of one run, while as many others ran as were asked for


def written(kind: str) -> bytes:
    """The reference, or all modules of the standard library but its tests and old tools."""
    if kind == "reference":
        return "\n\n".join(topics[key] for key in sorted(topics)).encode()
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}
    files = (file.relative_to(root) for file in root.rglob("*.py"))
    kept = sorted(file for file in files if left_out.isdisjoint(file.parts))
    return b"\n\n".join((root / file).read_bytes() for file in kept)


@cache
def text(kind: str = "reference") -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes to train on, and bytes to validate on."""
    data = torch.frombuffer(bytearray(written(kind)), dtype=torch.uint8).long()
    cut = len(data) * 9 // 10
    return data[:cut], data[cut:]


def settings(name: str, seed: int, sizes: dict[str, Any]) -> DRMConfig:
    """Configuration of a variant; the memory of SSM_CONTROL is widened until it is as large as J."""
    config = variant(name).config(**sizes, seed=seed)
    if name == "SSM_CONTROL":
        target = parameter_count(variant("J").config(**sizes))
        config = config.changed(memory_hidden=matched_memory(config, target))
    return config


def train(config: DRMConfig, data: torch.Tensor, preset: Preset) -> DRM:
    """A model on the device of the data, after ``preset.steps`` steps."""
    model = DRM(config).to(data.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=preset.lr, weight_decay=0.01)
    generator = torch.Generator().manual_seed(config.seed)
    reach = torch.arange(preset.length + 1)
    for step in range(preset.steps):
        at = torch.randint(len(data) - preset.length, (preset.batch, 1), generator=generator)
        window = data[(at + reach).to(data.device)]
        output = model(window[:, :-1], step=step)
        loss = drm_loss(output, window[:, 1:], config).total
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        optimizer.step()
    return model.eval()


@torch.no_grad()
def validate(model: DRM, data: torch.Tensor, preset: Preset) -> float:
    """Nats a byte over windows that do not overlap, spread over the text."""
    count = min(preset.windows, (len(data) - 1) // preset.length)
    starts = torch.linspace(0, len(data) - 1 - preset.length, count, dtype=torch.float64)
    windows = data[
        (starts.round().long().unsqueeze(1) + torch.arange(preset.length + 1)).to(data.device)
    ]
    losses = [
        drm_loss(model(part[:, :-1]), part[:, 1:], model.config).total * len(part)
        for part in windows.split(preset.batch)
    ]
    return float(torch.stack(losses).sum()) / count


def run(work: tuple[int, str], preset: Preset, device: str) -> Run:
    """One variant with one seed."""
    seed, name = work
    data, held_out = (part.to(device) for part in text(preset.text))
    began = time.perf_counter()
    model = train(settings(name, seed, preset.sizes), data, preset)
    spent = time.perf_counter() - began  # each step waits for its gradient's norm
    rate = preset.steps * preset.batch * preset.length / spent
    nats = validate(model, held_out, preset)
    return Run(name, seed, parameter_count(model.config), nats, rate)


def runs(preset: Preset, seeds: int, device: str, jobs: int) -> Iterator[Run]:
    """All variants with all seeds, so many at a time."""
    work = [(seed, name) for seed in range(seeds) for name in NAMES]
    one = partial(run, preset=preset, device=device)
    if jobs == 1:
        yield from map(one, work)
        return
    with multiprocessing.get_context("spawn").Pool(jobs, torch.set_num_threads, (1,)) as pool:
        yield from pool.imap_unordered(one, work)


def table(found: Sequence[Run]) -> list[Row]:
    rows = []
    for name in NAMES:
        mine = [r for r in found if r.name == name]
        if mine:
            nats = [r.nats for r in mine]
            deviation = statistics.stdev(nats) if len(mine) > 1 else None
            rate = statistics.mean(r.tokens_a_second for r in mine)
            rows.append(Row(name, mine[0].parameters, statistics.mean(nats), deviation, rate))
    return rows


def record(args: argparse.Namespace, preset: Preset, found: Sequence[Run]) -> dict[str, Any]:
    """What was run, on what, and what came out."""
    cuda = torch.device(args.device).type == "cuda"
    data = written(preset.text)
    return {
        "command": " ".join(["python examples/drm_bytes.py", *args.words]),
        "device": torch.cuda.get_device_name() if cuda else "CPU",
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "dtype": "float32",
        "jobs": args.jobs,
        "text": {
            "name": preset.text,
            "bytes": len(data),
            "sha256": hashlib.sha256(data).hexdigest(),
        },
        "preset": preset._asdict(),
        "runs": [r._asdict() for r in found],
    }


def main(arguments: Sequence[str] | None = None) -> list[Row]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", choices=PRESETS, default="small")
    parser.add_argument("--text", choices=("reference", "library"))
    parser.add_argument("--steps", type=int)
    parser.add_argument("--batch", type=int, help="windows a step")
    parser.add_argument("--length", type=int, help="bytes of a window")
    parser.add_argument("--windows", type=int, help="windows of the validation")
    parser.add_argument("--lr", type=float, help="of AdamW")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, each in a process")
    parser.add_argument("--out", type=Path, help="JSON file, written after every run")
    args = parser.parse_args(arguments)
    args.words = sys.argv[1:] if arguments is None else arguments
    given = {k: v for k, v in vars(args).items() if k in Preset._fields and v is not None}
    preset = PRESETS[args.preset]._replace(**given)
    found: list[Run] = []
    for done in runs(preset, args.seeds, args.device, args.jobs):
        found.append(done)
        if args.out:
            content = json.dumps(record(args, preset, found), indent=1)
            args.out.write_text(content + "\n", encoding="utf-8")
            print(done, flush=True)
    rows = table(found)
    print(f"{'variant':16} {'parameters':>10} {'nats/byte':>12} {'bits/byte':>10} {'tokens/s':>9}")
    for r in rows:
        spread = "      " if r.deviation is None else f"±{r.deviation:.3f}"
        print(
            f"{r.name:16} {r.parameters:10,} {r.nats:6.3f}{spread} "
            f"{r.nats / math.log(2):10.3f} {r.tokens_a_second:9,.0f}"
        )
    return rows


if __name__ == "__main__":
    main()
