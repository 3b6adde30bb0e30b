"""The first oracle: a plain loop over ``cell.step`` in float64, and dense linear algebra beside it.

Nothing here calls the solver; the linear algebra forms every matrix. The second oracle, which does not
even call the step, is :mod:`.equations`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .kinds import AnyCell


def apart(cell: AnyCell, x: Any) -> tuple[Any, dict[str, Tensor]]:
    """Inputs without their last column, and that column as ``dt``, for a cell with time gaps.

    The suite carries time gaps in the last column of every input, so that whatever it does to
    inputs (cut, permute, differentiate) happens to them, too.
    """
    if getattr(getattr(cell, "spec", None), "gap", None) is None or not isinstance(x, Tensor):
        return x, {}
    return x[..., :-1], {"dt": x[..., -1]}


def advance(cell: AnyCell, h: Tensor, x: Tensor) -> Tensor:
    """``cell.step``, with time gaps in the last column of ``x``."""
    x, more = apart(cell, x)
    return cell.step(h, x, **more)


def drives(cell: AnyCell, x: Tensor) -> Tensor:
    """``cell.drives``, with time gaps as they are in the last column of ``x``."""
    x, more = apart(cell, x)
    return torch.cat([cell.drives(x), *(dt[..., None] for dt in more.values())], -1)


def loop(
    cell: AnyCell, x: Tensor, h0: Tensor | None = None, resets: Tensor | None = None
) -> Tensor:
    """All states ``(B, T, *state_shape)``, step by step; where ``resets``, from the zero state."""
    h = start(cell, x) if h0 is None else h0
    states = []
    for t in range(x.shape[1]):
        if resets is not None:
            mask = resets[:, t].reshape(-1, *[1] * (h.ndim - 1))
            h = torch.where(mask, torch.zeros_like(h), h)
        h = advance(cell, h, x[:, t])
        states.append(h)
    return torch.stack(states, 1) if states else start(cell, x)[:, None][:, :0]


def start(cell: AnyCell, x: Tensor) -> Tensor:
    """Where a batch like ``x``'s starts, carried in at least float32: the zero state, if the cell
    does not say otherwise."""
    if not getattr(cell, "starts_at_zero", True):
        return cell.init_state(x.shape[0])
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    return torch.zeros(x.shape[0], *cell.state_shape, dtype=dtype, device=x.device)


def shifted(states: Tensor, h0: Tensor) -> Tensor:
    """``h_{t-1}`` for every t."""
    return torch.cat([h0[:, None].to(states.dtype), states[:, :-1]], 1)


def stepwise(cell: AnyCell, previous: Tensor, x: Tensor) -> Tensor:
    """``f(h_{t-1}, x_t)`` for all t at once."""
    flat = advance(cell, previous.flatten(0, 1), x.flatten(0, 1))
    return flat.reshape(previous.shape)


def sizes(states: Tensor, h0: Tensor) -> Tensor:
    """What differences at every step are relative to, ``(B, T)``: the largest state of the row up to
    there, its start included. No constant: small trajectories are measured by themselves."""
    seen = torch.cat([h0[:, None].to(states.dtype), states], 1).abs().flatten(2).amax(2)
    return seen.cummax(1).values[:, 1:].clamp_min(torch.finfo(states.dtype).tiny)


def lanes(states: Tensor) -> Tensor:
    """The same for every number of a state by itself: the largest of its lane, over a sequence."""
    return states.abs().amax(1, keepdim=True).clamp_min(torch.finfo(states.dtype).tiny)


def jacobians(cell: AnyCell, previous: Tensor, x: Tensor) -> Tensor:
    """Dense ``∂vec(h_t)/∂vec(h_{t-1})``, shape ``(B, T, n, n)``, by autograd of the step."""
    h = previous.detach().clone().requires_grad_()
    out = stepwise(cell, h, x.detach()).flatten(2)
    rows = [
        torch.autograd.grad(out[..., i].sum(), h, retain_graph=True)[0].flatten(2)
        for i in range(out.shape[-1])
    ]
    return torch.stack(rows, -2)


def adjoint(
    cell: AnyCell, states: Tensor, h0: Tensor, u: Tensor, cotangents: Tensor
) -> tuple[Tensor, ...]:
    """Gradients of drives and trained recurrent parameters from the cotangents
    ``(B, T, *state_shape)`` of all states, by autograd of every step at the given states, whatever
    led to them."""
    u = u.detach().clone().requires_grad_()
    parameters = [getattr(cell, name) for name in cell.spec.parameter_shapes(cell.sizes)]
    parameters = [p for p in parameters if p.requires_grad]
    totals = [torch.zeros_like(v) for v in (u, *parameters)]
    before, carried = shifted(states, h0), torch.zeros_like(states[:, 0])
    for t in reversed(range(u.shape[1])):
        h = before[:, t].detach().requires_grad_()
        drives, more = apart(cell, u[:, t])
        out = cell.step(h, drives=drives, **more)
        bar = carried + cotangents[:, t]
        carried, *parts = torch.autograd.grad(out, [h, u, *parameters], bar)
        totals = [a + b for a, b in zip(totals, parts, strict=True)]
    return tuple(totals)


def block_bidiagonal(jacobian: Tensor) -> Tensor:
    """The dense matrix ``DF`` of the residual: identity blocks, ``−J_t`` below the diagonal.

    ``jacobian`` is ``(B, T, n, n)``; its first block belongs to ``h0`` and is not in the matrix.
    """
    batch, length, n, _ = jacobian.shape
    dense = torch.eye(length * n, dtype=jacobian.dtype, device=jacobian.device)
    dense = dense.repeat(batch, 1, 1)
    for t in range(1, length):
        dense[:, t * n : (t + 1) * n, (t - 1) * n : t * n] = -jacobian[:, t]
    return dense


def amplification(cell: AnyCell, states: Tensor, h0: Tensor, x: Tensor) -> float:
    """``κ = ‖DF⁻¹‖_∞``: by how much an error of size 1 in every step can grow along the way."""
    blocks = jacobians(cell, shifted(states, h0), x)
    batch, length, n, _ = blocks.shape
    row, largest = blocks.new_zeros(batch, n, 0), 1.0
    for t in range(length):  # row t of DF⁻¹: the products J_t … J_{s+1} for s ≤ t
        identity = torch.eye(n, dtype=blocks.dtype, device=blocks.device).expand(batch, n, n)
        row = torch.cat([blocks[:, t] @ row, identity], -1)
        largest = max(largest, float(row.abs().sum(-1).max()))
    return largest
