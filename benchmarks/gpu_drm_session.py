"""What the sections of `gpu_drm.py` share: models and text."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import torch
from harness import Row
from sessions import Session
from torch import Tensor
from torch.nn import functional as F

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


class DRMSession(Session):
    """A run of the benchmark."""

    topic, script = "drm", "gpu_drm.py"

    def model(self, variant: str, preset: str = "notes", **changes: Any) -> Any:
        """At the published size, in training."""
        from pararnn import drm

        config = drm.variant(variant).config(**(SMOKE if self.smoke else {}))
        config = config.published() if preset == "published" else config
        with torch.device(self.device):
            return drm.DRM(config.changed(**changes))

    def shape(self, shape: tuple[int, int]) -> tuple[int, int]:
        return (2, 16) if self.smoke else shape

    @staticmethod
    def rate(timed: Row, shape: tuple[int, int]) -> float:
        return round(1e3 * shape[0] * shape[1] / timed["median"])
