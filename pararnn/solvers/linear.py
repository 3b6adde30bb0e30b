"""Recurrences that are linear in their state, in PyTorch operations: one exact scan.

Where no map mixes channels, ``h_t = A_t h_{t−1} + b_t`` with ``A_t`` and ``b_t`` from the drives
alone. Both come from a few operations on the whole sequence, and a scan has all states; its adjoint
is a scan of the same kind. The operator ``pararnn::linear`` is all of it: compilers and exporters see
one node, ``torch.vmap`` puts what it maps over into the batch, and nothing but drives and states is
kept for the backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from .._checks import full_precision
from .._operators import LIBRARY, Operator
from ..scan import affine_scan
from ..scan.autograd import scan
from ..spec import Spec
from .columns import column_scan
from .dynamics import SpecDynamics, pack
from .implicit import GROUP, Problem, differentiable_gradients, first_order
from .operators import spec_of
from .task import Task


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
    a = dynamics.operator(coefficients, "exact", b)
    return affine_scan(a, b, h0, resets=resets, out=out)


def transformable_states(task: Task) -> Tensor:
    """All states from operations that derivatives of ``torch.func`` and forward mode see through,
    any number of times. It keeps the operators of all steps."""
    with full_precision(task.u.device):
        dynamics = cast(SpecDynamics, task.make(task.params))
        coefficients, b = dynamics.affine(task.inputs)
        op = dynamics.operator(coefficients, "exact", b)
        if not dynamics.several:
            return scan(op, b, task.h0, resets=task.resets)
        axes = task.cell.state_shape[1:]
        given = op.flatten(4), b.flatten(3), task.h0.flatten(2)
        states = scan(*given, "block", resets=task.resets)
        return states.unflatten(-1, axes)


def groups(u: Tensor, numbers: int) -> list[slice]:
    """Rows to compute at a time, so that intermediates stay in the cache of a CPU."""
    size = u.shape[0] if u.device.type != "cpu" else GROUP // max(1, u.shape[1] * numbers)
    size = max(1, size)
    return [slice(i, i + size) for i in range(0, u.shape[0], size)]


# -- the operator ------------------------------------------------------------------------------


class Call(NamedTuple):
    """Arguments of ``pararnn::linear``, and the first ones of its backward pass."""

    name: str
    sizes: Sequence[int]
    u: Tensor
    dt: Tensor | None
    h0: Tensor | None
    resets: Tensor | None
    params: Sequence[Tensor]

    @property
    def spec(self) -> Spec:
        return spec_of(self.name)

    @property
    def named_sizes(self) -> dict[str, int]:
        """Sizes by axis; after those of the axes, the number of heads if there are any."""
        return dict(zip((*self.spec.axes, "heads"), self.sizes, strict=False))

    @property
    def state(self) -> torch.dtype:
        """Dtype of states: drives may be narrower than the parameters, under autocast."""
        given = (self.u, self.h0, *self.params)
        wide = any(t is not None and t.dtype == torch.float64 for t in given)
        return torch.float64 if wide else torch.float32

    def make(self, params: Sequence[Tensor]) -> SpecDynamics:
        return SpecDynamics(self.spec, self.named_sizes, params, self.state)

    def prepared(self) -> tuple[SpecDynamics, Tensor, Tensor]:
        """The recurrence, its packed inputs and its initial state."""
        u, h0 = self.u, self.h0
        dynamics = self.make(self.params)
        if h0 is None:
            h0 = u.new_zeros(u.shape[0], *dynamics.state_shape, dtype=self.state)
        return dynamics, u if self.dt is None else pack(u, self.dt), h0.to(self.state)

    def cotangents(
        self, packed_bar: Tensor, h0_bar: Tensor, bars: Sequence[Tensor | None]
    ) -> tuple[Tensor, Tensor | None, Tensor, list[Tensor | None]]:
        """Those of drives, of time gaps, of the initial state and of the parameters, in the dtypes
        of these."""
        weights = [
            None if g is None else g.to(p.dtype) for g, p in zip(bars, self.params, strict=True)
        ]
        h0_bar = h0_bar if self.h0 is None else h0_bar.to(self.h0.dtype)
        if self.dt is None:
            return packed_bar.to(self.u.dtype), None, h0_bar, weights
        u_bar, dt_bar = packed_bar[..., :-1].to(self.u.dtype), packed_bar[..., -1].to(self.dt.dtype)
        return u_bar.contiguous(), dt_bar.contiguous(), h0_bar, weights


CALL = "str spec, int[] sizes, Tensor u, Tensor? dt, Tensor? h0, Tensor? resets, Tensor[] params"


def _forward(*given: Any) -> Tensor:
    call = Call(*given)
    u, resets = call.u, call.resets
    with torch.no_grad(), full_precision(u.device):
        dynamics, packed, h0 = call.prepared()
        out = torch.empty(*u.shape[:2], *dynamics.state_shape, dtype=h0.dtype, device=u.device)
        for rows in groups(u, h0[:1].numel()):
            local = None if resets is None else resets[rows]
            linear_states(dynamics, packed[rows], h0[rows], local, out[rows])
    return out


def empty_states(*given: Any) -> Tensor:
    """Room for all states."""
    call = Call(*given)
    shape = call.spec.state_shape(call.named_sizes)
    return call.u.new_empty(*call.u.shape[:2], *shape, dtype=call.state)


def gradients(
    arguments: Sequence[Any],
    kept: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    needs: dict[str, bool],
) -> dict[str, Any]:
    """Cotangents of the arguments of a call, from all its states and their cotangents."""
    call, (states,), (grad,) = Call(*arguments), kept, grads
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        with full_precision(call.u.device):
            dynamics, packed, start = call.prepared()
            problem = Problem(call.make, call.resets)
            found = differentiable_gradients(
                problem, dynamics, states, packed, start, cast(Tensor, grad), tuple(call.params)
            )
            bars = call.cotangents(*found)
    else:
        bars = linear_backward(*call, states, grad)
    u_bar, dt_bar, h0_bar, weights = bars
    return {
        "u": u_bar,
        "dt": None if call.dt is None else dt_bar,
        "h0": None if call.h0 is None else h0_bar,
        "params": list(weights),
    }


linear = Operator(
    f"linear({CALL}) -> Tensor",
    _forward,
    empty_states,
    keys=("CompositeExplicitAutograd",),
    gradients=gradients,
    kept=(0,),
)


def _backward(*given: Any) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    *arguments, states, grad = given
    call = Call(*arguments)
    with torch.no_grad(), full_precision(call.u.device):
        if call.u.shape[1] == 0:
            u_bar, dt_bar, h0_bar, bars = _empty_back(*given)
            return u_bar, dt_bar.zero_(), h0_bar.zero_(), [g.zero_() for g in bars]
        dynamics, packed, start = call.prepared()
        problem = Problem(call.make, call.resets)
        found = first_order(problem, dynamics, states, packed, start, grad)
        u_bar, gaps, h0_bar, weights = call.cotangents(*found)
    dt_bar = call.u.new_zeros(0) if gaps is None else gaps
    bars = [
        torch.zeros_like(p) if g is None else g for g, p in zip(weights, call.params, strict=True)
    ]
    return u_bar, dt_bar, h0_bar, bars


def _empty_back(*given: Any) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    call, states = Call(*given[:-2]), given[-2]
    like = states if call.h0 is None else call.h0
    return (
        call.u.new_empty(call.u.shape),
        call.u.new_empty(0) if call.dt is None else call.dt.new_empty(call.dt.shape),
        like.new_empty(states.shape[0], *states.shape[2:]),
        [p.new_empty(p.shape) for p in call.params],
    )


linear_backward = Operator(
    f"linear_backward({CALL}, Tensor states, Tensor grad) -> (Tensor, Tensor, Tensor, Tensor[])",
    _backward,
    _empty_back,
    keys=("CompositeExplicitAutograd",),
)


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
            linear(
                name, sizes, *(None if v is None else v[i] for v in spread), [p[i] for p in weights]
            )
            for i in range(count)
        ]
        return torch.stack(each), 0
    folded = [None if v is None else v.flatten(0, 1) for v in spread]
    return linear(name, sizes, *folded, params).unflatten(0, (count, -1)), 0


torch.library.register_vmap(linear.name, _mapped, lib=LIBRARY)
