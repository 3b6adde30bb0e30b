"""Three DRM variants on bytes: directions, no directions, no geometry.

The text is Python's own reference, which comes with Python. Each variant reads windows at random
places, the same ones for all; the last tenth of the text is for validation. SSM_CONTROL gets as many
parameters as J.

    python examples/drm_bytes.py --steps 300 --seeds 3
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Sequence
from pydoc_data.topics import topics
from typing import NamedTuple

import torch

from pararnn.drm import DRM, DRMConfig, drm_loss, matched_memory, parameter_count, variant

NAMES = ("J", "J_NO_DIRECTION", "SSM_CONTROL")
SIZES = {
    "d_token": 64,
    "d_state": 64,
    "hidden_size": 128,
    "n_directions": 16,
    "metric_rank": 8,
    "direction_basis": 0,  # directions are not confined to a fixed subspace
    "metric_basis": 16,
    "naturalization_warmup": 0,
    "block_length": 32,
    "mixer_hidden": 32,
    "memory_hidden": 32,
}


class Row(NamedTuple):
    name: str
    parameters: int
    nats: float
    deviation: float | None  # of the seeds; None for a single one
    tokens_a_second: float


def text() -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes to train on, and bytes to validate on."""
    joined = "\n\n".join(topics[key] for key in sorted(topics)).encode()
    data = torch.frombuffer(bytearray(joined), dtype=torch.uint8).long()
    cut = len(data) * 9 // 10
    return data[:cut], data[cut:]


def settings(name: str, seed: int) -> DRMConfig:
    """Configuration of a variant; the memory of SSM_CONTROL is widened until it is as large as J."""
    config = variant(name).config(**SIZES, seed=seed)
    if name == "SSM_CONTROL":
        target = parameter_count(variant("J").config(**SIZES))
        config = config.changed(memory_hidden=matched_memory(config, target))
    return config


def train(config: DRMConfig, data: torch.Tensor, steps: int, batch: int, length: int) -> DRM:
    model = DRM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    generator = torch.Generator().manual_seed(config.seed)
    for step in range(steps):
        at = torch.randint(len(data) - length, (batch, 1), generator=generator)
        window = data[at + torch.arange(length + 1)]
        output = model(window[:, :-1], step=step)
        loss = drm_loss(output, window[:, 1:], config).total
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        optimizer.step()
    return model.eval()


@torch.no_grad()
def validate(model: DRM, data: torch.Tensor, length: int, windows: int) -> float:
    """Nats a byte over windows that do not overlap."""
    count = min(windows, (len(data) - 1) // length)
    x = data[: count * length].view(count, length)
    y = data[1 : count * length + 1].view(count, length)
    return float(drm_loss(model(x), y, model.config).total)


def compare(steps: int, seeds: int, batch: int, length: int, windows: int) -> list[Row]:
    data, held_out = text()
    rows = []
    for name in NAMES:
        spent, nats = 0.0, []
        for seed in range(seeds):
            began = time.perf_counter()
            model = train(settings(name, seed), data, steps, batch, length)
            spent += time.perf_counter() - began
            nats.append(validate(model, held_out, length, windows))
        mean = statistics.mean(nats)
        deviation = statistics.stdev(nats) if seeds > 1 else None
        rate = steps * seeds * batch * length / spent
        rows.append(Row(name, parameter_count(model.config), mean, deviation, rate))
    return rows


def main(arguments: Sequence[str] | None = None) -> list[Row]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--windows", type=int, default=256, help="windows of the validation")
    rows = compare(**vars(parser.parse_args(arguments)))
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
