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
from typing import Any

import torch
from torch import Tensor

from .._checks import state_dtype
from ..kernels.plan import Plan, plan
from ..kernels.support import channels, on_device_of, processors
from ..spec import Spec
from .dynamics import SpecDynamics, pack
from .implicit import Problem, differentiable_gradients

Settings = tuple[int, int, int, float]
"""Chunk length, warm-up, corrections and tolerance, as the operators take them."""
_SPECS: dict[str, Spec] = {}
_REPORTS: list[list[tuple[Tensor, Plan]]] = []


def register(spec: Spec) -> str:
    """Make a Spec known to the operators; returns its name there."""
    _SPECS[spec.fingerprint] = spec
    return spec.fingerprint


def spec_of(name: str) -> Spec:
    """The Spec that was registered under a name."""
    return _SPECS[name]


@contextmanager
def reports() -> Iterator[list[tuple[Tensor, Plan]]]:
    """Collect the mismatches and the plan of the solves that run inside."""
    found: list[tuple[Tensor, Plan]] = []
    _REPORTS.append(found)
    try:
        yield found
    finally:
        _REPORTS.pop()


_LIBRARY = torch.library.Library("pararnn", "DEF")
_SETTINGS = "int length, int warmup, int corrections, float tol"
_LIBRARY.define(
    "channelwise(str spec, Tensor u, Tensor? dt, Tensor? h0, Tensor? resets, Tensor[] params, "
    f"{_SETTINGS}) -> (Tensor, Tensor, Tensor)"
)
_LIBRARY.define(
    "channelwise_backward(str spec, Tensor u, Tensor? dt, Tensor? h0, Tensor? resets, "
    "Tensor[] params, Tensor last, Tensor others, Tensor? grad, Tensor? rest, Tensor? final, "
    f"bool dt_grad, {_SETTINGS}) -> (Tensor, Tensor, Tensor, Tensor)"
)


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


def _forward(
    name: str,
    u: Tensor,
    dt: Tensor | None,
    h0: Tensor | None,
    resets: Tensor | None,
    params: Sequence[Tensor],
    *settings: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    from ..kernels import launch

    spec = _SPECS[name]
    chosen = planned(spec, u, settings, backward=False)
    if u.numel() == 0:
        last, others, final = _empty(name, u)
        final, miss = final.zero_() if h0 is None else final.copy_(h0), u.new_empty(0)
    else:
        with on_device_of(u):
            problem = launch.Problem(spec, u, tuple(params), dt, h0, resets)
            last, others, final, miss = launch.run_forward(problem, chosen)
    if _REPORTS:
        _REPORTS[-1].append((miss, chosen))
    return last, others, final


def _backward(
    name: str,
    u: Tensor,
    dt: Tensor | None,
    h0: Tensor | None,
    resets: Tensor | None,
    params: Sequence[Tensor],
    last: Tensor,
    others: Tensor,
    grad: Tensor | None,
    rest: Tensor | None,
    final: Tensor | None,
    dt_grad: bool,
    *settings: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from ..kernels import launch

    spec = _SPECS[name]
    if u.numel() == 0:
        out = _empty_back(name, u, dt, h0, resets, params, last, others, grad, rest, final, dt_grad)
        for t in out:
            t.zero_()
        return (*out[:2], out[2] if final is None else final.clone(), out[3])
    with on_device_of(u):
        chosen = planned(spec, u, settings, backward=True)
        problem = launch.Problem(spec, u, tuple(params), dt, h0, resets)
        (u_bar,), dt_bar, h0_bar, w_bar = launch.run_adjoint(
            problem, chosen, last, others, grad, rest, final, dt_grad=dt_grad
        )
        return u_bar, dt_bar, h0_bar, w_bar


def _empty(name: str, u: Tensor, *_others: Any) -> tuple[Tensor, Tensor, Tensor]:
    spec = _SPECS[name]
    (B, T, _), D, S = u.shape, channels(spec, u), len(spec.slots)
    state, shown = state_dtype(u.dtype), S if spec.output == "all" else 1
    return (
        u.new_empty(B, T, shown * D),
        u.new_empty(B, T, S - shown, D, dtype=state),
        u.new_empty(B, S, D, dtype=state),
    )


def _empty_back(
    name: str,
    u: Tensor,
    dt: Tensor | None,
    h0: Tensor | None,
    resets: Tensor | None,
    params: Sequence[Tensor],
    last: Tensor,
    others: Tensor,
    grad: Tensor | None,
    rest: Tensor | None,
    final: Tensor | None,
    dt_grad: bool,
    *settings: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    spec = _SPECS[name]
    (B, T, width), D, S = u.shape, channels(spec, u), len(spec.slots)
    state = state_dtype(u.dtype)
    return (
        u.new_empty(B, T, width),
        u.new_empty(B if dt_grad else 0, T, D, dtype=state),
        u.new_empty(B, S, D, dtype=state),
        u.new_empty(len(params), D, dtype=state),
    )


for _device in ("CUDA", "CPU"):
    _LIBRARY.impl("channelwise", _forward, _device)
    _LIBRARY.impl("channelwise_backward", _backward, _device)
torch.library.register_fake("pararnn::channelwise", _empty, lib=_LIBRARY)
torch.library.register_fake("pararnn::channelwise_backward", _empty_back, lib=_LIBRARY)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    name, u, dt, h0, resets, params, *settings = inputs
    last, others, _ = output
    ctx.set_materialize_grads(False)
    ctx.name, ctx.settings, ctx.count = name, settings, len(params)
    ctx.save_for_backward(u, dt, h0, resets, last, others, *params)


def _gradients(
    ctx: Any, grad: Tensor | None, rest: Tensor | None, final: Tensor | None
) -> tuple[Any, ...]:
    u, dt, h0, resets, last, others, *params = ctx.saved_tensors
    nothing = (None,) * len(ctx.settings)
    if rest is not None and others.shape[2] == 0:
        rest = None
    if grad is None and rest is None and final is None:
        return None, None, None, None, None, [None] * ctx.count, *nothing
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        found = _twice(ctx.name, u, dt, h0, resets, params, last, others, grad, rest, final)
        return None, *found[:3], None, found[3], *nothing
    dt_grad = dt is not None and ctx.needs_input_grad[2]
    u_bar, dt_bar, h0_bar, w_bar = torch.ops.pararnn.channelwise_backward(
        ctx.name,
        u,
        dt,
        h0,
        resets,
        params,
        last,
        others,
        grad,
        rest,
        final,
        dt_grad,
        *ctx.settings,
    )
    bars = [
        (w if p.ndim else w.sum()).to(p.dtype).reshape(p.shape)
        for w, p in zip(w_bar.unbind(0), params, strict=True)
    ]
    gaps = dt_bar.sum(-1).to(dt.dtype) if dt_grad else None
    return None, u_bar, gaps, None if h0 is None else h0_bar, None, bars, *nothing


torch.library.register_autograd(
    "pararnn::channelwise", _gradients, setup_context=_setup, lib=_LIBRARY
)


def _twice(
    name: str,
    u: Tensor,
    dt: Tensor | None,
    h0: Tensor | None,
    resets: Tensor | None,
    params: Sequence[Tensor],
    last: Tensor,
    others: Tensor,
    grad: Tensor | None,
    rest: Tensor | None,
    final: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor | None, list[Tensor | None]]:
    """Gradients that can be differentiated again, by eager operations."""
    spec, state = _SPECS[name], state_dtype(u.dtype)
    S, D = len(spec.slots), channels(spec, u)
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
    start = last.new_zeros(last.shape[0], S, D, dtype=state) if h0 is None else h0
    start = start.squeeze(1) if S == 1 else start

    def make(values: tuple[Tensor, ...]) -> SpecDynamics:
        return SpecDynamics(spec, {spec.axes[0]: D}, values, state)

    problem = Problem(make, lambda *_: g, resets)
    packed_bar, start_bar, bars = differentiable_gradients(
        problem, make(tuple(params)), stacked(others, last), packed, start, g, tuple(params)
    )
    u_bar = packed_bar[..., : u.shape[-1]].to(u.dtype)
    dt_bar = None if dt is None else packed_bar[..., -1].to(dt.dtype)
    h0_bar = None if h0 is None else (start_bar.unsqueeze(1) if S == 1 else start_bar)
    return (
        u_bar,
        dt_bar,
        h0_bar,
        [b if b is None else b.to(p.dtype) for b, p in zip(bars, params, strict=True)],
    )


# -- one step ----------------------------------------------------------------------------------

_LIBRARY.define(
    "channelwise_step(str spec, Tensor u, Tensor? dt, Tensor h, Tensor[] params, Tensor(a!) out)"
    " -> ()"
)


def _step(
    name: str,
    u: Tensor,
    dt: Tensor | None,
    h: Tensor,
    params: Sequence[Tensor],
    out: Tensor,
) -> None:
    from ..kernels import launch

    if out.numel():
        with on_device_of(u):
            launch.run_decode(_SPECS[name], u, dt, h, tuple(params), out)


for _device in ("CUDA", "CPU"):
    _LIBRARY.impl("channelwise_step", _step, _device)
torch.library.register_fake("pararnn::channelwise_step", lambda *_: None, lib=_LIBRARY)
