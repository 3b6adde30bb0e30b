"""The fused path of a solve: when it is taken, and what it returns."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from .. import kernels
from ..kernels.plan import CORRECTIONS, Plan
from .config import NewtonConfig
from .operators import Call, Settings, channelwise, reports
from .task import Task, has_spec


def unfit(cell: Any, device: torch.device, backend: str) -> str | None:
    """Why the kernels do not take a cell on a device; None if they do."""
    if cell.no_kernel is not None:
        return f"{cell.spec.name} has no fused kernels: {cell.no_kernel}"
    if device.type == "cpu" and backend == "auto":
        return "the tensors are on 'cpu'"
    if torch.compiler.is_compiling():
        return None
    return kernels.missing(device)


TRANSFORMED = "torch.func transforms and forward-mode derivatives do not see into a kernel"


def refusal(task: Task, config: NewtonConfig, method: str) -> str | None:
    """Why a solve takes the eager path; None if the kernels take it."""
    if config.backend == "eager":
        return "asked for: backend='eager'"
    if not has_spec(task.cell):
        return f"{type(task.cell).__name__} has no Spec"
    if method == "newton" or (method == "sequential" and config.backend == "auto"):
        return f"asked for: method={method!r}"
    if config.max_iters is not None:
        return "asked for: max_iters, and the kernels do as many corrections as are needed"
    if config.on_divergence not in ("auto", "sequential"):
        return f"asked for: on_divergence={config.on_divergence!r}, which the host must watch"
    if config.jacobian in ("quasi", "none"):
        return f"asked for: jacobian={config.jacobian!r}, and the kernels carry exact Jacobians"
    if task.transformed:
        return TRANSFORMED
    return unfit(task.cell, task.u.device, config.backend)


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
        found = self.miss[:-1].amax((1, 2)).tolist()
        met = [i for i, value in enumerate(found) if value <= self.plan.tol]
        return tuple(found[: met[0] + 1] if met else [*found, self.plan.tol])

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


def settings(config: NewtonConfig, length: int | None) -> Settings:
    """What the operators are told; None leaves the chunk length to the cost model."""
    warmup = -1 if config.warmup is None else config.warmup
    return Settings(length or 0, warmup, min(config.iteration_cap, CORRECTIONS), config.tol or 0.0)


def solve_fused(task: Task, told: Settings) -> FusedStates:
    """Run the kernels on a task."""
    shape = (task.u.shape[0], task.cell.state_slots, task.cell.channels)
    h0 = None if task.start is None else task.start.reshape(shape)
    call = Call(task.cell.kernel, task.u, task.dt, h0, task.resets, list(task.params), *told)
    if torch.compiler.is_compiling():  # nothing runs yet, so there is nothing to report
        last, others, final = channelwise(*call)
        return FusedStates(last, others, final, None)
    with reports() as collected:
        last, others, final = channelwise(*call)
    found = [DeviceProgress(miss, plan, task.u.shape[1]) for miss, plan in collected]
    return FusedStates(last, others, final, found[0] if found else None)


@dataclass(frozen=True)
class FusedStates:
    """What the kernels return: the output, states of the slots that are not in it, and the final
    state."""

    last: Tensor
    others: Tensor
    final: Tensor
    progress: DeviceProgress | None

    def __call__(self) -> Tensor:
        """All slots, ``(B, T, D)`` or ``(B, T, S, D)``, in the dtype of the drives."""
        if self.final.shape[1] == 1:
            return self.last
        shown = self.last.unflatten(-1, (-1, self.final.shape[2]))
        if self.others.shape[2] == 0:
            return shown
        return torch.cat([self.others.to(self.last.dtype), shown], 2)

    def detached(self) -> FusedStates:
        """The same without an autograd graph."""
        last, others, final = (t.detach() for t in (self.last, self.others, self.final))
        return FusedStates(last, others, final, self.progress)
