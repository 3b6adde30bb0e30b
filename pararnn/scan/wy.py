"""The chunks of a delta rule, put together: one after the other, or all at once.

A chunk with start ``S`` has the errors ``u = (I + A)⁻¹ (v − F S)``, the outputs ``y = Q S + P u`` and
the end ``g S + Wᵀ u``; :mod:`.delta` says what ``A, P, F, W, Q`` and ``g`` are. Leading dimensions are
(chunks, copies). On the CPU the chunks are walked one after the other, which takes the fewest
products, with a derivative written by hand. Elsewhere, in traced and mapped calls and in
forward-mode derivatives, every chunk is an affine map of its start, and a scan over the chunks finds
the starts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from .._checks import readable
from .autograd import scan
from .triangular import unit_lower_inverse

Pieces = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]
"""``A (n, N, M, M)``, ``P (n, N, C, M)``, ``v (n, N, M, dv)``, ``F (n, N, M, dk)``,
``W (n, N, M, dk)``, ``Q (n, N, C, dk)``, and ``g (n, N, 1, 1)`` or None for 1."""


def assemble(pieces: Pieces, start: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs ``(n, N, C, dv)`` and the last end, from the first start ``(N, dk, dv)``."""
    given = [t for t in (*pieces, start) if t is not None]
    if all(readable(t) and unpack_dual(t).tangent is None for t in given):
        return Walk.apply(*pieces, start)
    return side_by_side(pieces, start)


def side_by_side(pieces: Pieces, start: Tensor) -> tuple[Tensor, Tensor]:
    """All chunks at once."""
    system, scores, v, faded, written, q, keep = pieces
    # u = value − factor·S
    given = torch.cat([v, faded], -1)
    solved = torch.linalg.solve_triangular(system, given, upper=False, unitriangular=True)
    value, factor = solved.split([v.shape[-1], faded.shape[-1]], -1)
    eye = torch.eye(faded.shape[-1], dtype=v.dtype, device=v.device)
    transition = (eye if keep is None else keep * eye) - written.mT @ factor
    inputs = written.mT @ value
    ends = scan(transition.transpose(0, 1), inputs.transpose(0, 1), start, kind="left")
    ends = ends.transpose(0, 1)
    starts = torch.cat([start.unsqueeze(0), ends[:-1]], 0)
    return q @ starts + scores @ (value - factor @ starts), ends[-1]


class Walk(torch.autograd.Function):
    """One chunk after the other. Its second derivative is that of :func:`side_by_side`."""

    @staticmethod
    def forward(
        ctx: Any,
        system: Tensor,
        scores: Tensor,
        v: Tensor,
        faded: Tensor,
        written: Tensor,
        q: Tensor,
        keep: Tensor | None,
        start: Tensor,
    ) -> tuple[Tensor, Tensor]:
        solving = unit_lower_inverse(system)
        starts = torch.empty((len(v), *start.shape), dtype=v.dtype, device=v.device)
        errors = torch.empty_like(v)
        state = start
        for c in range(len(v)):
            starts[c] = state
            rest = torch.baddbmm(v[c], faded[c], state, alpha=-1)
            torch.bmm(solving[c], rest, out=errors[c])
            kept = state if keep is None else keep[c] * state
            state = torch.baddbmm(kept, written[c].mT, errors[c])
        y = _products(q, starts)
        y = _products(scores, errors, add_to=y)
        ctx.save_for_backward(
            system, scores, v, faded, written, q, keep, start, solving, starts, errors
        )
        return y, state

    @staticmethod
    def backward(ctx: Any, d_y: Tensor, d_end: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, solving, starts, errors = ctx.saved_tensors
        if torch.is_grad_enabled():

            def run(*given: Any) -> tuple[Tensor, Tensor]:
                return side_by_side(given[:-1], given[-1])

            return differentiable(run, inputs, (d_y, d_end))
        _, scores, v, faded, written, q, keep, _ = inputs
        d_starts = _products(q.mT, d_y)  # by the outputs; the chunk's end is added below
        d_errors = _products(scores.mT, d_y)
        d_rest, d_ends = torch.empty_like(v), torch.empty_like(starts)
        d_state = d_end
        for c in reversed(range(len(v))):
            d_ends[c] = d_state
            moved = torch.baddbmm(d_errors[c], written[c], d_state)
            torch.bmm(solving[c].mT, moved, out=d_rest[c])
            kept = d_state if keep is None else keep[c] * d_state
            d_state = torch.baddbmm(d_starts[c] + kept, faded[c].mT, d_rest[c], alpha=-1)
        d_keep = None if keep is None else (d_ends * starts).sum((-2, -1), keepdim=True)
        return (
            _products(d_rest, errors.mT).neg_(),
            _products(d_y, errors.mT),
            d_rest,
            _products(d_rest, starts.mT).neg_(),
            _products(errors, d_ends.mT),
            _products(d_y, starts.mT),
            d_keep,
            d_state,
        )


def _products(a: Tensor, b: Tensor, add_to: Tensor | None = None) -> Tensor:
    """``a @ b`` of all chunks and copies, added in place to a tensor if one is given."""
    left, right = a.flatten(0, 1), b.flatten(0, 1)
    if add_to is None:
        return torch.bmm(left, right).unflatten(0, a.shape[:2])
    add_to.flatten(0, 1).baddbmm_(left, right)
    return add_to


def differentiable(
    run: Callable[..., tuple[Tensor, ...]],
    inputs: Sequence[Tensor | None],
    bars: tuple[Tensor, ...],
) -> tuple[Tensor | None, ...]:
    """Cotangents of the inputs of ``run(*inputs)`` that can be differentiated again."""
    # Views, because an input may be made from another one, whose derivative is not asked for here.
    views = [None if t is None else t.view_as(t) for t in inputs]
    wanted = [t for t in views if t is not None and t.requires_grad]
    grads = iter(torch.autograd.grad(run(*views), wanted, bars, create_graph=True))
    return tuple(None if t is None or not t.requires_grad else next(grads) for t in views)
