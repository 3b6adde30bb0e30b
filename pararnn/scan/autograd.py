"""The affine scan as a differentiable function. Its adjoint is the reversed scan of the same kind.

With ``x_t = A_t x_{t−1} + b_t`` and cotangents ``g_t`` of the states, the cotangents of the inputs
are ``λ_t = A_{t+1}ᵀ λ_{t+1} + g_t``, those of the operators ``λ_t x_{t−1}ᵀ``, and that of the
initial state ``A_1ᵀ λ_1``. All three are scans and products, so the derivative can be
differentiated again, any number of times. Where a reset is set, both the state before it and the
cotangent behind it are left out by selection. So is what a product with a cotangent of exactly zero
would be: a state that is not finite, and that nothing depends on, has no derivative.

Eager calls go through :class:`AffineScan`, which ``torch.func`` can transform. Traced ones go
through an operator with the same derivative, so that compilers and exporters see one node,
whatever the length.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._checks import full_precision, readable
from .._operators import watched
from .._precision import exactly
from .affine import affine_scan
from .algebra import Algebra, Block, Diagonal, Left, MaxPlus
from .chunks import chained, per_state
from .inputs import cut

ALGEBRAS: dict[str, Algebra] = {
    "diagonal": Diagonal(),
    "block": Block(),
    "left": Left(),
    "maxplus": MaxPlus(),
}


def scan(
    op: Tensor,
    b: Tensor,
    x0: Tensor,
    kind: str = "diagonal",
    reverse: bool = False,
    resets: Tensor | None = None,
) -> Tensor:
    """States ``(B, T, *state_shape)`` of an affine recurrence, recorded by autograd.

    ``op``, ``b``, ``x0`` and ``resets`` are as in :func:`~pararnn.scan.affine.affine_scan`, the
    numbers of one dtype; ``kind`` names the algebra.
    """
    if torch.compiler.is_compiling():
        return _operator(op, b, x0, resets, kind, reverse)
    return AffineScan.apply(op, b, x0, resets, kind, reverse)


class AffineScan(torch.autograd.Function):
    """``(op, b, x0, resets) → states`` with derivatives of any order and rules for
    ``torch.func``."""

    @staticmethod
    def forward(
        op: Tensor, b: Tensor, x0: Tensor, resets: Tensor | None, kind: str, reverse: bool
    ) -> Tensor:
        return _states(op, b, x0, resets, kind, reverse)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _setup(ctx, inputs, output)
        ctx.save_for_forward(inputs[0], inputs[2], inputs[3], output)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            return _backward(ctx, g, AffineScan.apply)
        with full_precision(g.device):
            return _backward_once(ctx, g)

    @staticmethod
    def jvp(
        ctx: Any, d_op: Tensor | None, d_b: Tensor | None, d_x0: Tensor | None, *_: Any
    ) -> Tensor:
        op, x0, resets, states = ctx.saved_tensors
        forcing = torch.zeros_like(states) if d_b is None else d_b
        with full_precision(op.device):
            if d_op is not None:
                moved = ALGEBRAS[ctx.kind].apply(d_op, _previous(states, x0, ctx.reverse))
                forcing = forcing + cut(moved, resets)
            start = torch.zeros_like(x0) if d_x0 is None else d_x0
            return AffineScan.apply(op, forcing, start, resets, ctx.kind, ctx.reverse)

    @staticmethod
    def vmap(info: Any, dims: tuple[int | None, ...], *inputs: Any) -> tuple[Tensor, int]:
        """The mapped dimension joins the batch."""
        *tensors, kind, reverse = inputs
        folded: list[Any] = []
        for value, dim in zip(tensors, dims[:4], strict=True):
            if value is None:
                folded.append(None)
                continue
            batched = (
                value.unsqueeze(0).expand(info.batch_size, *value.shape)
                if dim is None
                else value.movedim(dim, 0)
            )
            folded.append(batched.flatten(0, 1))
        op, b, x0, resets = folded
        states = scan(op, b, x0, kind, reverse, resets)
        return states.unflatten(0, (info.batch_size, states.shape[0] // info.batch_size)), 0


def _states(
    op: Tensor, b: Tensor, x0: Tensor, resets: Tensor | None, kind: str, reverse: bool
) -> Tensor:
    with full_precision(b.device):
        algebra = ALGEBRAS[kind]
        return affine_scan(op, b, x0, algebra=algebra, resets=resets, reverse=reverse)


@torch.library.custom_op("pararnn::affine_scan", mutates_args=())
def _operator(
    op: Tensor, b: Tensor, x0: Tensor, resets: Tensor | None, kind: str, reverse: bool
) -> Tensor:
    return _states(op, b, x0, resets, kind, reverse)


@_operator.register_fake
def _(op: Tensor, b: Tensor, x0: Tensor, resets: Tensor | None, kind: str, reverse: bool) -> Tensor:
    return torch.empty_like(b, memory_format=torch.contiguous_format)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    op, _, x0, resets, ctx.kind, ctx.reverse = inputs
    ctx.save_for_backward(op, x0, resets, output)


def _previous(states: Tensor, x0: Tensor, reverse: bool) -> Tensor:
    """The state before every step."""
    start = x0.unsqueeze(1)
    return torch.cat([states[:, 1:], start] if reverse else [start, states[:, :-1]], 1)


def doubtful(*values: Tensor) -> bool:
    """Whether some number may not be finite: a sum tells, where it can be looked at."""
    if watched(v.detach() for v in values) or not all(map(readable, values)):
        return True
    return not all(bool(v.detach().sum().isfinite()) for v in values)


def spoiled(states: Tensor, x0: Tensor, resets: Tensor | None, reverse: bool) -> bool:
    """Whether a state, the first one, or an operator that moved one may not be finite. What is not
    finite stays so until a reset, so the last state tells, and those before resets."""
    ends = [states[:, 0 if reverse else -1]]
    if resets is not None:
        later, earlier = _ends(reverse)[2:]
        ends.append(x0)
        if readable(states) and readable(resets):
            ends.append(states[:, earlier][resets[:, later]])
    return doubtful(*ends)


def reached(
    met: Tensor, resets: Tensor | None, reverse: bool, again: Callable[..., Tensor] | None = None
) -> Tensor:
    """Whether a cotangent has been met at a step or before it, in the direction of the adjoint, and
    with no reset between the two: at the others the cotangent of the state is exactly zero."""
    if resets is not None:  # one at a step cuts off what follows: the step itself is still met
        resets = chained(resets, torch.zeros_like(resets[:, 0]), reverse)
    count = met.float()
    start = torch.zeros_like(count[:, 0])
    run = again or AffineScan.apply
    return run(torch.ones_like(count), count, start, resets, "diagonal", reverse) > 0


def silenced(value: Tensor, idle: Tensor) -> Tensor:
    """``value`` without the numbers that are not finite where nothing depends on them."""
    return value.masked_fill(idle & ~value.isfinite(), 0)


def _heard(
    op: Tensor,
    g: Tensor,
    resets: Tensor | None,
    algebra: Algebra,
    reverse: bool,
    again: Callable[..., Tensor] | None = None,
) -> Tensor:
    """Operators of the adjoint, from the cotangents ``g`` of the states that they move; without
    numbers that are not finite where no such cotangent has been met."""
    if op.shape[1] == 0:
        return op
    met = reached(algebra.size(g).detach() != 0, resets, reverse, again)
    return silenced(op, algebra.spread(~met, op))


def _backward(ctx: Any, g: Tensor, again: Callable[..., Tensor]) -> tuple[Tensor | None, ...]:
    """The derivative, made of differentiable operations."""
    op, x0, resets, states = ctx.saved_tensors
    algebra, reverse = ALGEBRAS[ctx.kind], ctx.reverse
    if g.shape[1] == 0:
        return torch.zeros_like(op), torch.zeros_like(g), torch.zeros_like(x0), None, None, None
    first, last, later, earlier = _ends(reverse)
    cuts = None if resets is None else resets[:, later]

    def run(op: Tensor, x0: Tensor, states: Tensor, g: Tensor) -> tuple[Tensor, ...]:
        adjoint = algebra.transpose(op)
        moved, doubt = adjoint[:, later], spoiled(states, x0, resets, reverse)
        if doubt:
            moved = _heard(moved, g[:, later], cuts, algebra, not reverse, again)
        rest = again(moved, g[:, earlier], g[:, last], cuts, ctx.kind, not reverse)
        ends = [rest, g[:, last].unsqueeze(1)]
        cotangent = torch.cat(ends[::-1] if reverse else ends, 1)
        before = _previous(states, x0, reverse)
        if doubt:
            before = silenced(before, algebra.size(cotangent) == 0)
        before = cut(before, resets)  # not a factor of a second derivative, either
        d_op = cut(algebra.outer(cotangent, before), resets)
        return d_op, cotangent, _start(adjoint, cotangent, resets, algebra, first)

    return *exactly(run, g.device, op, x0, states, g), None, None, None


def _backward_once(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    """The same derivative where nothing is recorded, written in place."""
    op, x0, resets, states = ctx.saved_tensors
    algebra, reverse = ALGEBRAS[ctx.kind], ctx.reverse
    if g.shape[1] == 0:
        return torch.zeros_like(op), torch.zeros_like(g), torch.zeros_like(x0), None, None, None
    first, last, later, earlier = _ends(reverse)
    adjoint = algebra.transpose(op)
    cuts = None if resets is None else resets[:, later]
    cotangent = torch.empty_like(g, memory_format=torch.contiguous_format)
    cotangent[:, last] = g[:, last]
    moved, doubt = adjoint[:, later], spoiled(states, x0, resets, reverse)
    affine_scan(
        _heard(moved, g[:, later], cuts, algebra, not reverse) if doubt else moved,
        g[:, earlier],
        g[:, last],
        algebra=algebra,
        resets=cuts,
        reverse=not reverse,
        out=cotangent[:, earlier],
    )
    d_op = d_x0 = None
    if ctx.needs_input_grad[0]:
        if doubt:
            before = silenced(_previous(states, x0, reverse), algebra.size(cotangent) == 0)
            d_op = algebra.outer(cotangent, before)
        else:
            d_op = torch.empty_like(op, memory_format=torch.contiguous_format)
            algebra.outer(cotangent[:, later], states[:, earlier], out=d_op[:, later])
            algebra.outer(cotangent[:, first], x0, out=d_op[:, first])
        d_op = d_op if resets is None else d_op.masked_fill_(per_state(resets, d_op), 0)
    if ctx.needs_input_grad[2]:
        d_x0 = _start(adjoint, cotangent, resets, algebra, first)
    return d_op, cotangent, d_x0, None, None, None


def _ends(reverse: bool) -> tuple[int, int, slice, slice]:
    """In the order of the recurrence: its first step, its last, all but the first, all but the
    last."""
    first, last, later, earlier = 0, -1, slice(1, None), slice(None, -1)
    return (last, first, earlier, later) if reverse else (first, last, later, earlier)


def _start(
    adjoint: Tensor, cotangent: Tensor, resets: Tensor | None, algebra: Algebra, first: int
) -> Tensor:
    """Cotangent of the initial state."""
    op, moved = adjoint[:, first], cotangent[:, first]
    if doubtful(op):
        op = silenced(op, algebra.spread(algebra.size(moved) == 0, op))
    if resets is None:
        return algebra.apply(op, moved)
    return cut(algebra.apply(cut(op, resets[:, first]), moved), resets[:, first])


def _operator_backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    return _backward(ctx, g, _operator)


_operator.register_autograd(_operator_backward, setup_context=_setup)
