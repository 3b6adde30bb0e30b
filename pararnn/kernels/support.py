"""What the kernels can do, in sentences, without importing Triton."""

from __future__ import annotations

import importlib.util
import os
from contextlib import AbstractContextManager, nullcontext
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from ..spec import Spec
from .programs import programs_text, unprintable


@lru_cache(maxsize=256)
def channelwise(spec: Spec) -> str | None:
    """Why the kernels cannot run a Spec; None if they can."""
    if not spec.channelwise:
        return f"its maps mix channels (Jacobian class {spec.jac_structure!r})"
    if len(spec.axes) != 1:
        return f"its state has {len(spec.axes)} axes, and the kernels walk channels of one"
    given = [d for d in spec.drive_list if d.given]
    if any(d.axes != spec.axes for d in spec.drive_list if not d.given) or len(given) > 1:
        return "a drive does not have one number a channel"
    if len(given) == len(spec.drive_list):
        return "it has no projected drive"
    return unprintable(spec)


def channels(spec: Spec, u: Tensor) -> int:
    """Channels of a state, from packed drives ``(..., WIDTH)``."""
    return u.shape[-1] // len(spec.projected)


def missing(device: torch.device) -> str | None:
    """Why kernels cannot run on a device here; None if they can."""
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"the tensors are on {device.type!r}, and the kernels need a CUDA device"
    if device.type == "cuda" and torch.version.cuda is None:
        return "this build of PyTorch is not for CUDA"
    if not installed():
        return "Triton is not installed (pip install 'pararnn[gpu]')"
    return None


@cache
def installed() -> bool:
    """Whether there is a Triton to import."""
    return importlib.util.find_spec("triton") is not None


@cache
def launcher() -> Any:
    """The module that launches kernels. It imports Triton."""
    from . import launch

    return launch


@lru_cache(maxsize=16)
def processors(device: torch.device) -> int:
    """Processors of a device; 1 where kernels are only interpreted."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def on_device_of(u: Tensor) -> AbstractContextManager[Any]:
    """Context that launches on the tensors' own device."""
    if u.device.type == "cuda" and u.device.index != torch.cuda.current_device():
        return torch.cuda.device(u.device)
    return nullcontext()


def source(spec: Spec) -> str:
    """The device programs of a Spec, which the kernels call: printed, deterministic, and what the
    GPU runs.

    Raises
    ------
    ValueError
        If the Spec is not channelwise, saying why.
    """
    reason = channelwise(spec)
    if reason is not None:
        raise ValueError(f"{spec.name} has no fused kernels: {reason}.")
    return programs_text(spec)
