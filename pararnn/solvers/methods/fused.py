"""The kernels: a channelwise recurrence on the device, without a host sync."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor

from ... import kernels
from ...kernels.plan import CORRECTIONS, Plan, plan
from ...kernels.support import channels, launcher, on_device_of, processors
from ...spec import Spec
from .. import operator
from ..config import Solution
from ..operator import Call, Gradients, Results, Settings
from ..problem import Problem
from .method import Choice, Method
from .results import call_of, packed

TRANSFORMED = "torch.func transforms and forward-mode derivatives do not see into a kernel"


def lacking(spec: Spec, device: torch.device, backend: str) -> str | None:
    """Why the kernels do not take a Spec on a device; None if they do."""
    reason = kernels.channelwise(spec)
    if reason is not None:
        return f"{spec.name} has no fused kernels: {reason}"
    if device.type == "cpu" and backend == "auto":
        return "the tensors are on 'cpu'"
    return None if torch.compiler.is_compiling() else kernels.missing(device)


class Fused(Method):
    """One call of the kernels."""

    name = "fused"

    def unfit(self, problem: Problem) -> str | None:
        config, method = problem.config, problem.method
        if config.backend == "eager":
            return "asked for: backend='eager'"
        if problem.spec is None:
            return f"{problem.recurrence.name} has no Spec"
        if method == "newton" or (method == "sequential" and config.backend == "auto"):
            return f"asked for: method={method!r}"
        if config.max_iters is not None:
            return "asked for: max_iters, and the kernels do as many corrections as are needed"
        if config.on_divergence not in ("auto", "sequential"):
            return f"asked for: on_divergence={config.on_divergence!r}, which the host must watch"
        if config.jacobian in ("quasi", "none"):
            return f"asked for: jacobian={config.jacobian!r}, and the kernels carry exact Jacobians"
        if problem.transformed:
            return TRANSFORMED
        return lacking(problem.spec, problem.u.device, config.backend)

    def cost(self, problem: Problem) -> float:
        """That of the kernels' own model (:mod:`pararnn.kernels.plan`)."""
        return _plan(problem, _settings(problem)).cost

    def choice(self, problem: Problem) -> Choice:
        total, settings = problem.total, _settings(problem)
        reason = ""
        if problem.method == "sequential":
            reason = "asked for: method='sequential'"
        elif settings.length:
            reason = f"asked for: chunk_length={settings.length}"
        if torch.compiler.is_compiling():  # the operator plans when it runs, for its sizes
            length = settings.length
            return Choice(problem.method, "fused", length, 0, "compiled", length, settings.warmup)
        cut = _plan(problem, settings)
        chunks = -(-total // cut.length) if total else 0
        if not reason:
            reason = (
                f"cost model: {total} steps × {problem.numbers} numbers on {problem.u.device.type} → "
                f"{chunks} chunk{'s' if chunks != 1 else ''} of {cut.length}"
            )
        label = "sequential" if chunks <= 1 else "newton" if cut.length == 1 else "shooting"
        return Choice(label, "fused", cut.length, chunks, reason, settings.length, cut.warmup)

    def run(self, problem: Problem, choice: Choice) -> Solution:
        output, others, final, progress = operator.solve(*call_of(problem, _settings(problem)))
        states = FusedStates(output, others, final.shape)
        return packed(choice, output, states, final, progress, (others, final))


def _settings(problem: Problem) -> Settings:
    """What the operator is told."""
    config = problem.config
    whole = problem.method == "sequential"
    return Settings(
        "fused",
        length=max(problem.total, 1) if whole else config.chunk_length or 0,
        warmup=-1 if config.warmup is None else config.warmup,
        tol=config.tol or 0.0,
        cap=min(config.iteration_cap, CORRECTIONS),
    )


def _plan(problem: Problem, settings: Settings) -> Plan:
    """How the kernels cut a problem."""
    u, spec = problem.u, cast(Spec, problem.spec)
    return _cut(spec, u, channels(spec, u), u.element_size(), settings, backward=False)


def _cut(
    spec: Spec, u: Tensor, width: int, itemsize: int, told: Settings | Call, backward: bool
) -> Plan:
    return plan(
        spec,
        u.shape[0],
        u.shape[1],
        width,
        itemsize,
        processors(u.device),
        backward=backward,
        length=told.length or None,
        warmup=None if told.warmup < 0 else told.warmup,
        corrections=told.cap,
        tol=told.tol or None,
    )


@dataclass(frozen=True)
class DeviceProgress:
    """How a fused solve went. Reading it waits for the device."""

    miss: Tensor  # mismatch before every correction, by chunk and block; then repairs
    plan: Plan
    total: int
    converged: bool = True  # what the corrections leave is repaired

    @cached_property
    def residual_history(self) -> tuple[float, ...]:
        if self.miss.numel() == 0:
            return (0.0,)
        largest = self.miss[:-1].amax((1, 2)).tolist()
        met = [i for i, value in enumerate(largest) if value <= self.plan.tol]
        return tuple(largest[: met[0] + 1] if met else [*largest, self.plan.tol])

    @property
    def residual(self) -> float:
        return self.residual_history[-1]

    @property
    def iterations(self) -> int:
        return sum(value > self.plan.tol for value in self.residual_history)

    @cached_property
    def fallback(self) -> bool:
        if self.miss.numel() == 0:
            return False
        return bool(self.miss[-1, 0].sum() > 0)

    @property
    def passes(self) -> float:
        several = self.plan.chunks(self.total) > 1
        return 1 + self.iterations + several * self.plan.warmup / self.plan.length


@dataclass(frozen=True)
class FusedStates:
    """All states, from the output and the slots that are not in it."""

    output: Tensor
    others: Tensor
    shape: torch.Size  # of the final state

    def __call__(self) -> Tensor:
        """``(B, T, D)`` or ``(B, T, S, D)``, in the dtype of the drives."""
        if len(self.shape) == 2:
            return self.output
        shown = self.output.unflatten(-1, (-1, self.shape[2]))
        if self.others.shape[2] == 0:
            return shown
        return torch.cat([self.others.to(self.output.dtype), shown], 2)

    def detached(self) -> FusedStates:
        return FusedStates(self.output.detach(), self.others.detach(), self.shape)


# -- in the operator -------------------------------------------------------------------------------


def _launched(call: Call, backward: bool) -> tuple[Any, Plan]:
    """A call as the kernels are launched with it, and how it is cut."""
    u, spec = call.drives[0], call.spec
    slots, width = len(spec.slots), call.sizes[0]
    apart, wide = len(call.drives) > 1, call.dtype == torch.float64
    h0 = None if call.h0 is None else call.h0.reshape(u.shape[0], slots, width)
    drives = tuple(call.drives) if apart else u
    arguments = spec, drives, tuple(call.params), call.dt, h0, call.resets, wide
    made = _cut(spec, u, width, 8 if wide else u.element_size(), call, backward)
    return launcher().Problem(*arguments), made


def run_fused(call: Call) -> Results:
    u = call.drives[0]
    if u.numel() == 0:
        output, others, final = operator.empty_results(call)
        final = final.zero_() if call.h0 is None else final.copy_(call.h0)
        made = _cut(call.spec, call.u, call.state_shape[-1], 4, call, False)
        return output, others, final, DeviceProgress(call.u.new_empty(0), made, call.u.shape[1])
    with on_device_of(u):
        problem, made = _launched(call, backward=False)
        output, others, final, miss = launcher().run_forward(problem, made)
    final = final.squeeze(1) if problem.slots == 1 else final
    return output, others, final, DeviceProgress(miss, made, u.shape[1])


def run_fused_back(
    call: Call,
    output: Tensor,
    others: Tensor,
    grad: Tensor | None,
    rest: Tensor | None,
    final: Tensor | None,
    dt_grad: bool,
) -> Gradients:
    with on_device_of(call.u):
        problem, made = _launched(call, backward=True)
        if final is not None:
            final = final.reshape(final.shape[0], len(call.spec.slots), -1)
        bars, dt_bar, h0_bar, w_bar = launcher().run_adjoint(
            problem, made, output, others, grad, rest, final, dt_grad=dt_grad
        )
    weights = [
        (w if p.ndim else w.sum()).to(p.dtype).reshape(p.shape)
        for w, p in zip(w_bar.unbind(0), call.params, strict=True)
    ]
    gaps = dt_bar.sum(-1).to(call.dt.dtype) if call.dt is not None and dt_grad else None
    return list(bars), gaps, h0_bar.view(h0_bar.shape[0], *call.state_shape), weights


operator.RUNS["fused"] = operator.Run(run_fused, run_fused_back)
