"""The kernels as operators of PyTorch.

``pararnn::channelwise`` solves a channelwise recurrence on the device without a host sync,
``pararnn::channelwise_backward`` is its backward pass, ``pararnn::channelwise_step`` one step.
``torch.compile`` sees opaque, differentiable calls, and CUDA graphs can capture them. A second
derivative takes the eager path (:mod:`pararnn.solvers.implicit`), which is exact, too. A Spec
travels by its fingerprint; zero, or a negative number of warm-up steps, leaves a setting to the
cost model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._checks import state_dtype
from .._operators import Operator
from ..kernels.plan import Plan, plan
from ..kernels.support import channels, launcher, on_device_of, processors
from ..spec import Spec
from .dynamics import SpecDynamics, pack
from .implicit import Problem, differentiable_gradients

Report = tuple[Tensor, Plan]
_SPECS: dict[str, Spec] = {}
_REPORTS: ContextVar[list[Report] | None] = ContextVar("reports", default=None)


def register(spec: Spec) -> str:
    """Make a Spec known to the operators; returns its name there."""
    _SPECS[spec.fingerprint] = spec
    return spec.fingerprint


def spec_of(name: str) -> Spec:
    """The Spec that was registered under a name."""
    return _SPECS[name]


@contextmanager
def reports() -> Iterator[list[Report]]:
    """Collect the mismatches and the plan of the solves that run inside, in this thread."""
    found: list[Report] = []
    outer = _REPORTS.set(found)
    try:
        yield found
    finally:
        _REPORTS.reset(outer)


class Settings(NamedTuple):
    """How to cut a sequence, as the operators are told."""

    length: int
    warmup: int
    corrections: int
    tol: float


def planned(spec: Spec, u: Tensor, settings: Settings, backward: bool) -> Plan:
    length, warmup, corrections, tol = settings
    return plan(
        spec,
        u.shape[0],
        u.shape[1],
        channels(spec, u),
        u.element_size(),
        processors(u.device),
        backward=backward,
        length=length or None,
        warmup=None if warmup < 0 else warmup,
        corrections=corrections or None,
        tol=tol or None,
    )


class Call(NamedTuple):
    """Arguments of ``pararnn::channelwise``, and the first ones of its backward pass."""

    name: str
    u: Tensor
    dt: Tensor | None
    h0: Tensor | None
    resets: Tensor | None
    params: Sequence[Tensor]
    length: int
    warmup: int
    corrections: int
    tol: float

    @property
    def spec(self) -> Spec:
        return _SPECS[self.name]

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Samples, steps, slots and channels."""
        return self.u.shape[0], self.u.shape[1], len(self.spec.slots), channels(self.spec, self.u)

    @property
    def state(self) -> torch.dtype:
        """Dtype of states."""
        return state_dtype(self.u.dtype)

    def planned(self, backward: bool) -> Plan:
        return planned(self.spec, self.u, Settings(*self[6:]), backward)

    def problem(self) -> Any:
        """The same, as the kernels are launched with it."""
        return launcher().Problem(
            self.spec, self.u, tuple(self.params), self.dt, self.h0, self.resets
        )


_CALL = (
    "str spec, Tensor u, Tensor? dt, Tensor? h0, Tensor? resets, Tensor[] params, "
    "int length, int warmup, int corrections, float tol"
)


def _forward(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Output, states of the slots that are not in it, and the final state."""
    call = Call(*given)
    chosen = call.planned(backward=False)
    if call.u.numel() == 0:
        last, others, final = _empty(*given)
        final = final.zero_() if call.h0 is None else final.copy_(call.h0)
        miss = call.u.new_empty(0)
    else:
        with on_device_of(call.u):
            last, others, final, miss = launcher().run_forward(call.problem(), chosen)
    found = _REPORTS.get()
    if found is not None:
        found.append((miss, chosen))
    return last, others, final


def _empty(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
    call = Call(*given)
    (B, T, S, D), u, state = call.sizes, call.u, call.state
    shown = S if call.spec.output == "all" else 1
    return (
        u.new_empty(B, T, shown * D),
        u.new_empty(B, T, S - shown, D, dtype=state),
        u.new_empty(B, S, D, dtype=state),
    )


def _gradients(
    arguments: Sequence[Any],
    kept: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    needs: dict[str, bool],
) -> dict[str, Any]:
    call, (last, others), (grad, rest, final) = Call(*arguments), kept, grads
    if others.shape[2] == 0:
        rest = None
    if grad is None and rest is None and final is None:
        return {}
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        return _twice(call, last, others, grad, rest, final)
    dt_grad = call.dt is not None and needs["dt"]
    u_bar, dt_bar, h0_bar, w_bar = channelwise_backward(
        *call, last, others, grad, rest, final, dt_grad
    )
    bars = [
        (w if p.ndim else w.sum()).to(p.dtype).reshape(p.shape)
        for w, p in zip(w_bar.unbind(0), call.params, strict=True)
    ]
    return {
        "u": u_bar,
        "dt": dt_bar.sum(-1).to(call.dt.dtype) if call.dt is not None and dt_grad else None,
        "h0": None if call.h0 is None else h0_bar,
        "params": bars,
    }


def _twice(
    call: Call,
    last: Tensor,
    others: Tensor,
    grad: Tensor | None,
    rest: Tensor | None,
    final: Tensor | None,
) -> dict[str, Any]:
    """Gradients that can be differentiated again, by eager operations."""
    spec, u, dt, state = call.spec, call.u, call.dt, call.state
    _, _, S, D = call.sizes
    packed = u if dt is None else pack(u, dt)

    def stacked(front: Tensor | None, back: Tensor | None) -> Tensor:
        parts = [
            others.new_zeros(others.shape) if front is None else front,
            (last.new_zeros(last.shape) if back is None else back).to(state).unflatten(-1, (-1, D)),
        ]
        whole = torch.cat(parts, 2)
        return whole.squeeze(2) if S == 1 else whole

    g = stacked(rest, grad)
    if final is not None:
        end = final.squeeze(1) if S == 1 else final
        g = torch.cat([g[:, :-1], (g[:, -1] + end).unsqueeze(1)], 1)
    start = last.new_zeros(last.shape[0], S, D, dtype=state) if call.h0 is None else call.h0
    start = start.squeeze(1) if S == 1 else start

    def make(values: tuple[Tensor, ...]) -> SpecDynamics:
        return SpecDynamics(spec, {spec.axes[0]: D}, values, state)

    problem, params = Problem(make, call.resets), tuple(call.params)
    packed_bar, start_bar, bars = differentiable_gradients(
        problem, make(params), stacked(others, last), packed, start, g, params
    )
    return {
        "u": packed_bar[..., : u.shape[-1]].to(u.dtype),
        "dt": None if dt is None else packed_bar[..., -1].to(dt.dtype),
        "h0": None if call.h0 is None else (start_bar.unsqueeze(1) if S == 1 else start_bar),
        "params": [b if b is None else b.to(p.dtype) for b, p in zip(bars, params, strict=True)],
    }


channelwise = Operator(
    f"channelwise({_CALL}) -> (Tensor, Tensor, Tensor)",
    _forward,
    _empty,
    gradients=_gradients,
    kept=(0, 1),
)


def _backward(*given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Cotangents of the drives, of the time gaps by channel, of the start and of the parameters by
    channel."""
    call, (last, others, grad, rest, final, dt_grad) = Call(*given[:10]), given[10:]
    if call.u.numel() == 0:
        u_bar, dt_bar, h0_bar, w_bar = (t.zero_() for t in _empty_back(*given))
        return u_bar, dt_bar, h0_bar if final is None else final.clone(), w_bar
    with on_device_of(call.u):
        (u_bar,), dt_bar, h0_bar, w_bar = launcher().run_adjoint(
            call.problem(),
            call.planned(backward=True),
            last,
            others,
            grad,
            rest,
            final,
            dt_grad=dt_grad,
        )
    return u_bar, dt_bar, h0_bar, w_bar


def _empty_back(*given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    call, dt_grad = Call(*given[:10]), given[-1]
    (B, T, S, D), u, state = call.sizes, call.u, call.state
    return (
        u.new_empty(u.shape),
        u.new_empty(B if dt_grad else 0, T, D, dtype=state),
        u.new_empty(B, S, D, dtype=state),
        u.new_empty(len(call.params), D, dtype=state),
    )


channelwise_backward = Operator(
    f"channelwise_backward({_CALL}, Tensor last, Tensor others, Tensor? grad, Tensor? rest, "
    "Tensor? final, bool dt_grad) -> (Tensor, Tensor, Tensor, Tensor)",
    _backward,
    _empty_back,
)


def _step(
    name: str,
    u: Tensor,
    dt: Tensor | None,
    h: Tensor,
    params: Sequence[Tensor],
    out: Tensor,
) -> None:
    if out.numel():
        with on_device_of(u):
            launcher().run_decode(_SPECS[name], u, dt, h, tuple(params), out)
        if not out.is_inference():
            torch.autograd.graph.increment_version(out)


channelwise_step = Operator(
    "channelwise_step(str spec, Tensor u, Tensor? dt, Tensor h, Tensor[] params, Tensor(a!) out)"
    " -> ()",
    _step,
    lambda *_: None,
)
