"""What the sections of `gpu_drm.py` share: models, text, a clock, and the results so far."""

from __future__ import annotations

import argparse
import functools
import gc
import os
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpu_channelwise import START, Clock, say
from torch import Tensor
from torch.nn import functional as F

Row = dict[str, Any]

CHECK_SIZES = {
    "d_token": 48,
    "d_state": 96,
    "hidden_size": 128,
    "n_directions": 12,
    "metric_rank": 8,
    "direction_basis": 32,
    "metric_basis": 32,
    "mixer_hidden": 64,
    "memory_hidden": 80,
    "block_length": 64,
    "naturalization_warmup": 0,
}
SMOKE = {
    **CHECK_SIZES,
    "d_token": 8,
    "d_state": 12,
    "hidden_size": 16,
    "metric_rank": 3,
    "direction_basis": 5,
    "metric_basis": 5,
    "mixer_hidden": 6,
    "memory_hidden": 8,
    "block_length": 8,
}


def drawn(shape: tuple[int, ...], device: str = "cpu", seed: int = 0) -> Tensor:
    """Normal numbers, the same on every device."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


@functools.cache
def bytes_of_python(count: int) -> Tensor:
    """The first bytes of Python's own library, file after file."""
    text = bytearray()
    for file in sorted(Path(os.__file__).parent.glob("*.py")):
        if len(text) >= count:
            break
        text += file.read_bytes()
    return torch.frombuffer(text, dtype=torch.uint8)[:count].long()


def batch(shape: tuple[int, int], device: str, seed: int = 0) -> Tensor:
    """Windows of text, ``(B, T + 1)``."""
    text = bytes_of_python(4_000_000)
    starts = torch.randint(
        len(text) - shape[1] - 1, (shape[0],), generator=torch.Generator().manual_seed(seed)
    )
    return torch.stack([text[i : i + shape[1] + 1] for i in starts.tolist()]).to(device)


def loss_of(model: Any, tokens: Tensor, precision: str) -> Tensor:
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=precision == "bfloat16"):
        logits = model(tokens[:, :-1], step=500).logits
    return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


class Session:
    """A run of the benchmark."""

    def __init__(self, args: argparse.Namespace):
        self.smoke, self.budget = args.smoke, args.budget
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.clock = Clock(self.device)
        self.found: dict[str, Any] = {"failures": {}, "skipped": []}

    def left(self) -> float:
        return self.budget - (time.perf_counter() - START)

    def model(self, variant: str, preset: str = "notes", **changes: Any) -> Any:
        """At the published size, in training."""
        from pararnn import drm

        config = drm.variant(variant).config(**(SMOKE if self.smoke else {}))
        config = config.published() if preset == "published" else config
        with torch.device(self.device):
            return drm.DRM(config.changed(**changes))

    def shape(self, shape: tuple[int, int]) -> tuple[int, int]:
        return (2, 16) if self.smoke else shape

    def rows(self, section: str, each: Any, run: Callable[..., Row]) -> None:
        """Fill a section, row by row, while there is time; a row that raises says so."""
        rows = self.found[section] = []
        for case in each:
            if self.left() < 8 and not self.smoke:
                self.found["skipped"].append(f"{section} {case}")
                continue
            try:
                row = run(*case)
            except Exception:
                row = {"case": str(case), "exception": traceback.format_exc()[-1500:]}
                say(f"{section} {case}: {row['exception'].strip().splitlines()[-1]}")
            rows.append(row)
            gc.collect()
            if self.clock.cuda:
                torch.cuda.empty_cache()
        torch.set_float32_matmul_precision("highest")

    @staticmethod
    def rate(timed: Row, shape: tuple[int, int]) -> float:
        return round(1e3 * shape[0] * shape[1] / timed["median"])

    def once(self, run: Callable[[], object]) -> dict[str, float]:
        """Wall-clock times of two calls that wait for the device themselves; the faster one counts."""
        times = []
        for _ in range(2):
            if self.clock.cuda:
                torch.cuda.synchronize()
            begin = time.perf_counter()
            run()
            if self.clock.cuda:
                torch.cuda.synchronize()
            times.append(1e3 * (time.perf_counter() - begin))
        best = round(min(times), 3)
        return {"median": best, "least": best, "most": round(max(times), 3)}
