"""Models of the probe grid: those of `pararnn.tasks`, variants of them, and nonlinear cells and
attention in the same block as the mixers.

    x ← x + core(LN(x)),   x ← x + MLP(LN(x)),   then a norm and a linear map to the answers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pararnn
from pararnn.tasks import MODELS, Model, Tagger, Task

HEADS = 4


def decaying(rate: float) -> dict[str, Any]:
    return {"decay": "learnable", "decay_rate": rate, "log1p_delta": True}


VARIANTS: dict[str, Model] = {
    model.name: model
    for model in (
        *(Model(f"signed-decay-{r:g}", "signed", decaying(r), decay=True) for r in (0.005, 0.01, 0.02)),
        Model("rotation-continuous", "rotation", {"snap": None}),
        Model("signed+rotation-continuous", ["signed", "rotation"], {"rotation": {"snap": None}}),
        Model("signed+givens-1-round", ["signed", "givens"], {"givens": {"rounds": 1}}),
        Model("signed+givens-2-rounds", ["signed", "givens"], {"givens": {"rounds": 2}}),
        Model("delta3", "delta", {"nh": 3}),
        Model("delta4", "delta", {"nh": 4}),
        Model("signed+delta", ["signed", "delta"]),
        Model("signed+delta4", ["signed", "delta"], {"delta": {"nh": 4}}),
        Model("rotation-5", "rotation", {"snap": (2, 3, 4, 5, 6)}),
    )
}  # fmt: skip


# --------------------------------------------------------------------------------------
# Cores: (B, T, width) to (B, T, width)
# --------------------------------------------------------------------------------------


class Recurrence(nn.Module):
    """A cell over time; a state of another width than the input's is mapped back by a linear map."""

    def __init__(self, cell: nn.Module, width: int, solver: str = "auto"):
        super().__init__()
        self.rnn = pararnn.ParaRNN(cell, solver=solver)
        wide = self.rnn.hidden_size
        self.out = nn.Identity() if wide == width else nn.Linear(wide, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.rnn(x)[0])


class Attention(nn.Module):
    """Causal self-attention with four heads."""

    def __init__(self, width: int):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Torch(nn.Module):
    """A recurrent layer of PyTorch."""

    def __init__(self, kind: type[nn.RNNBase], width: int):
        super().__init__()
        self.rnn = kind(width, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(x)[0]


def m2rnn(width: int, side: int = 8, gate: float = 0.0) -> nn.Module:
    """64 numbers of state by default, as the mixers have. The forget gate starts at the sigmoid of
    ``gate``; the cell's own start is 1/2."""
    cell = pararnn.ParaM2RNN(width, side, side)
    nn.init.constant_(cell.in_proj.bias[-1:], gate)
    return Recurrence(cell, width, "sequential")


CORES: dict[str, Callable[[int], nn.Module]] = {
    "para-gru": lambda w: Recurrence(pararnn.ParaGRU(w, w), w),
    "para-gru-free": lambda w: Recurrence(pararnn.ParaGRU(w, w, max_recurrent_norm=None), w),
    "para-gru-head": lambda w: Recurrence(pararnn.ParaGRU(w, w, mix="head"), w, "sequential"),
    "para-lstm": lambda w: Recurrence(pararnn.ParaLSTM(w, w), w),
    "para-lstm-free": lambda w: Recurrence(pararnn.ParaLSTM(w, w, max_recurrent_norm=None), w),
    "para-slstm": lambda w: Recurrence(pararnn.ParaSLSTM(w, w), w),
    "para-m2rnn": m2rnn,
    "para-m2rnn-kept": lambda w: m2rnn(w, gate=3.0),
    "para-m2rnn-large": lambda w: m2rnn(w, side=32, gate=3.0),
    "block-GRU": lambda w: Torch(nn.GRU, w),
    "block-LSTM": lambda w: Torch(nn.LSTM, w),
    "attention": Attention,
    "attention+positions": Attention,
}
"""By the name of the model. `free`: recurrent weights without a bound. `para-gru-head` and
`para-m2rnn`, whose maps mix channels, run their loop; the others their solver."""


class Block(nn.Module):
    """A pre-norm residual block around a core, with the MLP of `pararnn.MinGRUBlock`."""

    def __init__(self, core: nn.Module, width: int, expansion: int = 4):
        super().__init__()
        self.norm1, self.core, self.norm2 = nn.LayerNorm(width), core, nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, expansion * width), nn.GELU(), nn.Linear(expansion * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.core(self.norm1(x))
        return x + self.mlp(self.norm2(x))


def positions(length: int, width: int, device: torch.device) -> Tensor:
    """Sines and cosines (Vaswani et al., 2017): defined at every length, trained at none."""
    rates = torch.exp(torch.arange(0, width, 2, device=device) * (-math.log(10_000) / width))
    angles = torch.arange(length, device=device).unsqueeze(1) * rates
    return torch.stack((angles.sin(), angles.cos()), -1).flatten(1)


class BlockTagger(nn.Module):
    """What :class:`pararnn.tasks.Tagger` is, with blocks around any core. No time gaps."""

    def __init__(self, task: Task, name: str, n_layers: int | None, width: int):
        super().__init__()
        if task.timed:
            raise ValueError(f"{name}: got the task {task.name}, expected one without time gaps.")
        self.n_layers = n_layers or 1
        self.embed = nn.Embedding(task.inputs, width)
        self.positions = name == "attention+positions"
        self.blocks = nn.Sequential(
            *(Block(CORES[name](width), width) for _ in range(self.n_layers))
        )
        self.norm_out = nn.LayerNorm(width)
        self.head = nn.Linear(width, task.outputs)

    def forward(self, x: Tensor, dt: Tensor | None = None) -> Tensor:
        x = self.embed(x)
        if self.positions:
            x = x + positions(x.shape[1], x.shape[2], x.device)
        return self.head(self.norm_out(self.blocks(x)))


def names() -> list[str]:
    return [*MODELS, *VARIANTS, *CORES]


def built(task: Task, name: str, n_layers: int | None, width: int) -> nn.Module:
    """The model of that name, from the global random state."""
    if name in CORES:
        return BlockTagger(task, name, n_layers, width)
    model = MODELS.get(name) or VARIANTS.get(name)
    if model is None:
        raise ValueError(f"model: got {name!r}, expected one of {', '.join(names())}.")
    return Tagger(task, model, n_layers, width)


def rates(model: nn.Module) -> float | None:
    """Mean of the learned rates of decay; None if there are none."""
    found = [p.detach() for name, p in model.named_parameters() if name.endswith("rho")]
    return float(F.softplus(torch.cat([p.flatten() for p in found])).mean()) if found else None
