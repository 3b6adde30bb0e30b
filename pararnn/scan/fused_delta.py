"""The delta rule on a GPU: chunks all at once in kernels, and their starts in one between them.

A second derivative takes the eager path.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._checks import state_dtype
from .._operators import Operator
from ..kernels import missing
from ..kernels.support import on_device_of
from .backend import Fused, register_fused
from .delta import NAME, in_chunks
from .inputs import common_dtype
from .wy import differentiable

LARGEST = {torch.float32: 128, torch.float64: 64}
"""Rows of a state that a program holds."""


_CALL = "Tensor[] sequences, Tensor start, Tensor? resets, int most"


def _forward(
    sequences: list[Tensor], start: Tensor, resets: Tensor | None, most: int
) -> tuple[Tensor, ...]:
    """Outputs ``(B, T, H, dv)`` and the final state ``(B, H, dk, dv)``, then what the backward pass
    reads. The arguments are those of :func:`~.delta.in_chunks`."""
    from ..kernels.delta import run_delta

    with on_device_of(start):
        y, end, kept = run_delta(sequences, start.flatten(0, 1), most, resets)
    return y, end.view(start.shape), *kept


def _empty(
    sequences: list[Tensor], start: Tensor, resets: Tensor | None, most: int
) -> tuple[Tensor, ...]:
    from ..kernels.delta import Chunks

    y, *kept = Chunks(sequences, most).outputs()
    return y.squeeze(2), start.new_empty(start.shape), *kept


def _gradients(
    arguments: Sequence[Any],
    kept: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    needs: dict[str, bool],
) -> dict[str, Any]:
    sequences, start, resets, most = arguments
    q, v = sequences[0], sequences[2]
    d_y, d_end = grads[:2]
    d_y = v.new_zeros(*q.shape[:2], *v.shape[3:]) if d_y is None else d_y
    d_end = torch.zeros_like(start) if d_end is None else d_end
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():

        def run(*given: Tensor) -> tuple[Tensor, Tensor]:
            return in_chunks(list(given[:-1]), given[-1], most, resets)

        *bars, first = differentiable(run, [*sequences, start], (d_y, d_end))
    else:
        *bars, first = delta_backward(sequences, list(kept), resets, most, d_y, d_end)
    return {"sequences": bars, "start": first}


delta_chunks = Operator(
    f"delta_chunks({_CALL}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _forward,
    _empty,
    gradients=_gradients,
    kept=(2, 3, 4, 5),
)


def _backward(
    sequences: list[Tensor],
    kept: list[Tensor],
    resets: Tensor | None,
    most: int,
    d_y: Tensor,
    d_end: Tensor,
) -> list[Tensor]:
    """Cotangents of the sequences and of the first state."""
    from ..kernels.delta import run_delta_back

    with on_device_of(d_end):
        bars = d_y, d_end.flatten(0, 1)
        found, first = run_delta_back(sequences, kept, most, *bars, resets)
    return [*found, first.view(d_end.shape)]


def _empty_back(
    sequences: list[Tensor],
    kept: list[Tensor],
    resets: Tensor | None,
    most: int,
    d_y: Tensor,
    d_end: Tensor,
) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in (*sequences, d_end)]


delta_backward = Operator(
    "delta_chunks_backward(Tensor[] sequences, Tensor[] kept, Tensor? resets, int most, Tensor d_y, "
    "Tensor d_end) -> Tensor[]",
    _backward,
    _empty_back,
)


def fused_chunks(
    sequences: list[Tensor], start: Tensor, most: int, resets: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """:func:`~.delta.in_chunks`, by kernels."""
    if start.numel() == 0:
        return in_chunks(sequences, start, most, resets)
    y, end, *_ = delta_chunks(sequences, start, resets, most)
    return y, end


def _lacks(q: Tensor, k: Tensor, *others: Tensor | None) -> str | None:
    """Why the kernels cannot run a delta rule; None if they can."""
    dtype = state_dtype(common_dtype(q, k, *others))
    if q.shape[-1] > LARGEST[dtype]:
        return (
            f"the kernels hold {dtype} states of at most {LARGEST[dtype]} rows, not "
            f"dk={q.shape[-1]}"
        )
    if torch._C._are_functorch_transforms_active():
        return "torch.func transforms the eager scan only"
    return None if torch.compiler.is_compiling() else missing(q.device)


register_fused(NAME, Fused(_lacks, fused_chunks))
