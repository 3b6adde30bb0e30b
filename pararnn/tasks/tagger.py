"""The model around a stack: it answers at every step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pararnn.layers import MinGRUStack

from .registry import Model
from .task import Task


class Tagger(nn.Module):
    """Embedding of the symbols (a linear map of numbers), the stack, a linear map to the answers.

    Parameters
    ----------
    task, model
        What to answer, and with what.
    n_layers
        Layers of the stack; 1 if not given, or as many as the model names.
    width
        Width of the embedding and of the stack.

    Raises
    ------
    ValueError
        If the number of layers contradicts the model, or a model that decays with time is to learn
        a task without time gaps.
    """

    def __init__(self, task: Task, model: Model, n_layers: int | None = None, width: int = 64):
        super().__init__()
        named = len(model.mixer) if isinstance(model.mixer, list) else None
        if n_layers is not None and named not in (None, n_layers):
            raise ValueError(
                f"n_layers: got {n_layers}, but {model.name} names {named} layers; leave it out."
            )
        if model.decay and not task.timed:
            raise ValueError(
                f"model: {model.name} decays with time, but the task {task.name} has no time gaps; "
                "choose a model without decay."
            )
        self.n_layers = n_layers or named or 1
        self.feature, self.decay = task.timed and model.feature, model.decay
        embed = nn.Embedding if task.symbols else nn.Linear
        self.embed = embed(task.inputs, width)
        core: Any
        if model.mixer is None:
            core = nn.GRU(width + self.feature, width, self.n_layers, batch_first=True)
        else:
            settings = None if model.mixer_kwargs is None else dict(model.mixer_kwargs)
            core = MinGRUStack(
                width + self.feature,
                width,
                self.n_layers,
                mixer=model.mixer,
                mixer_kwargs=settings,
            )
        self.core = core
        self.head = nn.Linear(width, task.outputs)

    def forward(self, x: Tensor, dt: Tensor | None = None) -> Tensor:
        """Answers ``(B, T, outputs)`` for ``x (B, T)`` or ``(B, T, F)``, and time gaps ``(B, T)``
        where the task has them."""
        x = self.embed(x)
        if self.feature:
            if dt is None:
                raise ValueError("dt: the task has time gaps, got none; give dt of shape (B, T).")
            x = torch.cat((x, dt.log1p().unsqueeze(-1)), -1)
        states, _ = self.core(x, dt=dt) if self.decay else self.core(x)
        return self.head(states)
