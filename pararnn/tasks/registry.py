"""The tasks and the models, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from . import words
from .pendulum import NOISE, pendulum
from .recall import KEYS, recall
from .task import Task

TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task("parity", words.parity, 2, 2, chance=1 / 2),
        Task("S3", words.s3, 6, 6, chance=1 / 6),
        Task("S3-hier", words.s3_hierarchical, 6, 6, chance=1 / 6),
        Task("S5", words.s5, 120, 120, chance=1 / 120),
        Task("session-parity", words.session_parity, 2, 2, chance=1 / 2, timed=True),
        Task("parity-timestamped", words.parity_timestamped, 2, 2, chance=1 / 2, timed=True),
        Task("MQAR", recall, 2 * KEYS, KEYS, chance=1 / KEYS),
        Task("pendulum", pendulum, 2, 2, chance=NOISE**2, symbols=False, timed=True),
    )
}


@dataclass(frozen=True)
class Model:
    """A stack to probe.

    Attributes
    ----------
    name : str
        As it is given on the command line.
    mixer : str, list of str or None
        For :class:`~pararnn.MinGRUStack`; a list fixes the number of layers. None:
        :class:`torch.nn.GRU`.
    mixer_kwargs : mapping, optional
        For :class:`~pararnn.MinGRUStack`.
    feature : bool
        Whether ``log(1 + dt)`` is one more input of the stack, where the task has time gaps.
    decay : bool
        Whether the stack is given the time gaps, to decay by them.
    """

    name: str
    mixer: str | list[str] | None
    mixer_kwargs: Mapping[str, Any] | None = field(default=None)
    feature: bool = True
    decay: bool = False


_DECAY = {"decay": "learnable", "decay_rate": 0.05, "log1p_delta": True}
_SMALL_DELTA = {"n_heads": 1, "d_k": 8, "d_v": 8, "nh": 2}  # 64 numbers of state, as the others

MODELS: dict[str, Model] = {
    model.name: model
    for model in (
        Model("GRU", None),
        Model("log", "log"),
        Model("signed", "signed"),
        Model("signed-coupled", "signed", {"coupled": True}),
        Model("signed-decay", "signed", _DECAY, decay=True),
        Model("signed-decay-only", "signed", _DECAY, feature=False, decay=True),
        Model("rotation", "rotation"),
        Model("givens", "givens"),
        Model("delta", "delta"),
        Model("delta2", "delta", {"nh": 2}),
        Model("lstm", "lstm"),
        Model("signed+rotation", ["signed", "rotation"]),
        Model("rotation+signed", ["rotation", "signed"]),
        Model("rotation+rotation", ["rotation", "rotation"]),
        Model("signed+givens", ["signed", "givens"]),
        Model("signed+delta2", ["signed", "delta"], {"delta": {"nh": 2}}),
        Model("signed+delta2-small", ["signed", "delta"], {"delta": _SMALL_DELTA}),
    )
}
