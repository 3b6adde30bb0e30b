"""Recurrences that are linear in their state, in PyTorch operations: one exact scan.

Where no map mixes channels, ``h_t = A_t h_{t−1} + b_t`` with ``A_t`` and ``b_t`` from the drives
alone. Both come from a few operations on the whole sequence, and a scan has all states; its adjoint
is a scan of the same kind. The operator ``pararnn::linear`` is all of it: compilers and exporters see
one node, ``torch.vmap`` puts what it maps over into the batch, and nothing but drives and states is
kept for the backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from .._checks import full_precision, state_dtype
from ..scan import affine_scan
from ..scan.autograd import scan
from ..spec import Spec
from .columns import column_scan
from .dynamics import SpecDynamics, pack
from .implicit import GROUP, Problem, differentiable_gradients, first_order
from .operators import spec_of
from .task import Task
from .walkers import cut


def scannable(spec: Spec) -> bool:
    """Whether one scan solves a Spec: linear in the state, and channels do not mix."""
    return spec.jac_structure == "linear" and spec.channelwise


def linear_states(
    dynamics: SpecDynamics, u: Tensor, h0: Tensor, resets: Tensor | None, out: Tensor
) -> Tensor:
    """All states ``(B, T, *state_shape)`` from packed drives ``(B, T, C)``, written to ``out``."""
    if u.shape[1] == 0:
        return out
    coefficients, b = dynamics.affine(u)
    if dynamics.several:
        axes = len(dynamics.spec.axes)
        return column_scan(
            dynamics.tangent, coefficients, b, h0, resets, axes=axes, reverse=False, out=out
        )
    a = cut(dynamics.operator(coefficients, "exact", b), resets)
    return affine_scan(a, b, h0, out=out)


def transformable_states(task: Task) -> Tensor:
    """All states from operations that derivatives of ``torch.func`` and forward mode see through,
    any number of times. It keeps the operators of all steps."""
    with full_precision(task.u.device):
        dynamics = cast(SpecDynamics, task.make(task.params))
        coefficients, b = dynamics.affine(task.inputs)
        op = cut(dynamics.operator(coefficients, "exact", b), task.resets)
        if not dynamics.several:
            return scan(op, b, task.h0)
        axes = task.cell.state_shape[1:]
        states = scan(op.flatten(4), b.flatten(3), task.h0.flatten(2), "block")
        return states.unflatten(-1, axes)


def groups(u: Tensor, numbers: int) -> list[slice]:
    """Rows to compute at a time, so that intermediates stay in the cache of a CPU."""
    size = u.shape[0] if u.device.type != "cpu" else GROUP // max(1, u.shape[1] * numbers)
    size = max(1, size)
    return [slice(i, i + size) for i in range(0, u.shape[0], size)]


# -- the operator ------------------------------------------------------------------------------

_LIBRARY = torch.library.Library("pararnn", "FRAGMENT")
_ARGUMENTS = (
    "str spec, int[] sizes, Tensor u, Tensor? dt, Tensor? h0, Tensor? resets, Tensor[] params"
)
_LIBRARY.define(f"linear({_ARGUMENTS}) -> Tensor")
_LIBRARY.define(
    f"linear_backward({_ARGUMENTS}, Tensor states, Tensor grad) -> "
    "(Tensor, Tensor, Tensor, Tensor[])"
)


def _prepared(
    name: str,
    sizes: Sequence[int],
    u: Tensor,
    dt: Tensor | None,
    h0: Tensor | None,
    params: Sequence[Tensor],
) -> tuple[SpecDynamics, Tensor, Tensor]:
    """The recurrence, its packed inputs and its initial state."""
    spec = spec_of(name)
    dtype = state_dtype(u.dtype)
    dynamics = SpecDynamics(spec, dict(zip(spec.axes, sizes, strict=True)), params, dtype)
    if h0 is None:
        h0 = u.new_zeros(u.shape[0], *dynamics.state_shape, dtype=dtype)
    return dynamics, u if dt is None else pack(u, dt), h0.to(dtype)


def _forward(
    name: str,
    sizes: Sequence[int],
    u: Tensor,
    dt: Tensor | None,
    h0: Tensor | None,
    resets: Tensor | None,
    params: Sequence[Tensor],
) -> Tensor:
    with torch.no_grad(), full_precision(u.device):
        dynamics, packed, h0 = _prepared(name, sizes, u, dt, h0, params)
        out = torch.empty(*u.shape[:2], *dynamics.state_shape, dtype=h0.dtype, device=u.device)
        for rows in groups(u, h0[:1].numel()):
            local = None if resets is None else resets[rows]
            linear_states(dynamics, packed[rows], h0[rows], local, out[rows])
    return out


def _backward(
    name: str,
    sizes: Sequence[int],
    u: Tensor,
    dt: Tensor | None,
    h0: Tensor | None,
    resets: Tensor | None,
    params: Sequence[Tensor],
    states: Tensor,
    grad: Tensor,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    with torch.no_grad(), full_precision(u.device):
        dynamics, packed, start = _prepared(name, sizes, u, dt, h0, params)
        if u.shape[1] == 0:
            gaps = u.new_zeros(0) if dt is None else torch.zeros_like(dt)
            zeros = [torch.zeros_like(p) for p in params]
            return torch.zeros_like(u), gaps, torch.zeros_like(start), zeros
        problem = Problem(lambda _: dynamics, lambda *_: states, resets)
        packed_bar, h0_bar, bars = first_order(problem, dynamics, states, packed, start, grad)
    u_bar, dt_bar = _apart(packed_bar, u, dt)
    weights = [
        torch.zeros_like(p) if g is None else g.to(p.dtype)
        for g, p in zip(bars, params, strict=True)
    ]
    return u_bar, u.new_zeros(0) if dt_bar is None else dt_bar, h0_bar, weights


def _apart(bar: Tensor, u: Tensor, dt: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Cotangents of drives and of time gaps, from those of both packed."""
    if dt is None:
        return bar.to(u.dtype), None
    return bar[..., :-1].to(u.dtype).contiguous(), bar[..., -1].to(dt.dtype).contiguous()


def _empty(name: str, sizes: Sequence[int], u: Tensor, *_: Any) -> Tensor:
    spec = spec_of(name)
    shape = spec.state_shape(dict(zip(spec.axes, sizes, strict=True)))
    return u.new_empty(*u.shape[:2], *shape, dtype=state_dtype(u.dtype))


def _empty_back(
    name: str,
    sizes: Sequence[int],
    u: Tensor,
    dt: Tensor | None,
    h0: Tensor | None,
    resets: Tensor | None,
    params: Sequence[Tensor],
    states: Tensor,
    grad: Tensor,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    gaps = u.new_empty(0) if dt is None else dt.new_empty(dt.shape)
    start = states.new_empty(states.shape[0], *states.shape[2:])
    return u.new_empty(u.shape), gaps, start, [p.new_empty(p.shape) for p in params]


_LIBRARY.impl("linear", _forward, "CompositeExplicitAutograd")
_LIBRARY.impl("linear_backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake("pararnn::linear", _empty, lib=_LIBRARY)
torch.library.register_fake("pararnn::linear_backward", _empty_back, lib=_LIBRARY)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    name, sizes, u, dt, h0, resets, params = inputs
    ctx.name, ctx.sizes, ctx.count = name, sizes, len(params)
    ctx.save_for_backward(u, dt, h0, resets, output, *params)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    u, dt, h0, resets, states, *params = ctx.saved_tensors
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        found = _twice(ctx.name, ctx.sizes, u, dt, h0, resets, params, states, grad)
    else:
        found = torch.ops.pararnn.linear_backward(
            ctx.name, ctx.sizes, u, dt, h0, resets, params, states, grad
        )
    u_bar, dt_bar, h0_bar, bars = found
    gaps = None if dt is None else dt_bar
    start = None if h0 is None else h0_bar.to(h0.dtype)
    return None, None, u_bar, gaps, start, None, list(bars)


def _twice(
    name: str,
    sizes: Sequence[int],
    u: Tensor,
    dt: Tensor | None,
    h0: Tensor | None,
    resets: Tensor | None,
    params: Sequence[Tensor],
    states: Tensor,
    grad: Tensor,
) -> tuple[Tensor, Tensor | None, Tensor, list[Tensor | None]]:
    """Gradients that can be differentiated again."""
    dynamics, packed, start = _prepared(name, sizes, u, dt, h0, params)

    def make(values: Sequence[Tensor]) -> SpecDynamics:
        return SpecDynamics(dynamics.spec, dynamics.sizes, values, dynamics.dtype)

    problem = Problem(make, lambda *_: states, resets)
    packed_bar, h0_bar, bars = differentiable_gradients(
        problem, dynamics, states, packed, start, grad, tuple(params)
    )
    u_bar, dt_bar = _apart(packed_bar, u, dt)
    weights = [None if g is None else g.to(p.dtype) for g, p in zip(bars, params, strict=True)]
    return u_bar, dt_bar, h0_bar, weights


torch.library.register_autograd("pararnn::linear", _gradients, setup_context=_setup, lib=_LIBRARY)


def _mapped(info: Any, dims: tuple[Any, ...], *inputs: Any) -> tuple[Tensor, int]:
    """``torch.vmap``: the mapped dimension joins the batch; one call a sample if it is one of the
    recurrent parameters, too."""
    name, sizes, *tensors, params = inputs
    count = info.batch_size

    def front(value: Tensor, dim: int | None) -> Tensor:
        if dim is None:
            return value.unsqueeze(0).expand(count, *value.shape)
        return value.movedim(dim, 0)

    spread = [None if v is None else front(v, d) for v, d in zip(tensors, dims[2:6], strict=True)]
    if any(d is not None for d in dims[6]):
        weights = [front(p, d) for p, d in zip(params, dims[6], strict=True)]
        each = [
            torch.ops.pararnn.linear(
                name, sizes, *(None if v is None else v[i] for v in spread), [p[i] for p in weights]
            )
            for i in range(count)
        ]
        return torch.stack(each), 0
    folded = [None if v is None else v.flatten(0, 1) for v in spread]
    states = torch.ops.pararnn.linear(name, sizes, *folded, params)
    return states.unflatten(0, (count, -1)), 0


torch.library.register_vmap("pararnn::linear", _mapped, lib=_LIBRARY)
