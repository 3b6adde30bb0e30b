"""A recurrence from any module with a ``step``: derivatives by automatic differentiation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from .._checks import state_dtype
from ..scan import Algebra, Flat
from .recurrence import Coefficients, Recurrence

LARGEST_FLAT = 32
"""States of up to this many numbers carry a dense Jacobian of an opaque step: as many JVPs, each
of all steps at once, are far cheaper than one product a step."""


SIDE = 1 << 18
"""Numbers of the states that one JVP of all steps is for, at most, where it has several columns."""


class ModuleRecurrence(Recurrence):
    """The recurrence of any module with ``step(h, x)`` and ``state_shape``; Jacobians by
    ``torch.func``. Leading dimensions are flattened into the batch of ``step``."""

    def __init__(self, module: Any, params: Sequence[Tensor], dtype: torch.dtype):
        self.module: Any = module
        self.raw_params = self.params = tuple(params)
        self.dtype = dtype
        self.state_shape = tuple(self.module.state_shape)
        self.size = math.prod(self.state_shape)
        self.slots = int(getattr(module, "state_slots", 1))
        self.n_state = 2  # the linearization point: state and input
        self.bounds = [None]
        self.structure = str(getattr(module, "jac_structure", "unknown"))
        own = module.parameters()
        self.own = all(p is q for p, q in zip(self.params, own, strict=True))

    @classmethod
    def of(cls, module: nn.Module, like: Tensor) -> ModuleRecurrence:
        """That of a module, whose states are as wide as its parameters, or as ``like``."""
        params = tuple(module.parameters())
        return cls(module, params, state_dtype((params[0] if params else like).dtype))

    def using(self, params: Sequence[Tensor], dtype: torch.dtype | None = None) -> Self:
        return type(self)(self.module, params, dtype or self.dtype)

    @property
    def name(self) -> str:
        return type(self.module).__name__

    @property
    def width(self) -> int:
        return self.size // (self.state_shape[0] if self.slots > 1 else 1)

    def written(self, h: Tensor, u: Tensor) -> Tensor:
        dtype = self.params[0].dtype if self.params else h.dtype
        return self.module.step(h.to(dtype), u).to(h.dtype)

    def output(self, states: Tensor, u: Tensor) -> Tensor:
        """The states; of several slots, the last one."""
        shape = self.state_shape
        if self.slots > 1:
            states, shape = states[..., -1, :], shape[1:]
        return states.to(u.dtype).flatten(-len(shape)) if len(shape) > 1 else states.to(u.dtype)

    def _call(self, h: Tensor, u: Tensor, params: Sequence[Tensor]) -> Tensor:
        lead = h.shape[: h.ndim - len(self.state_shape)]
        stepper = _StepOf(self.module)
        dtype = params[0].dtype if params else u.dtype
        given = h.reshape(-1, *self.state_shape).to(dtype), u.reshape(-1, *u.shape[len(lead) :])
        flat = given[0]
        if self.own and params is self.params:
            out = stepper(*given)
        else:
            names = (name for name, _ in self.module.named_parameters())
            values = {f"module.{n}": p for n, p in zip(names, params, strict=True)}
            out = functional_call(stepper, values, given)
        if out.shape != flat.shape:
            raise ValueError(
                f"{type(self.module).__name__}.step: got a next state of shape {tuple(out.shape)}, "
                f"expected {tuple(flat.shape)}, the shape of the state that was passed."
            )
        return out.reshape(h.shape).to(self.dtype)

    def step(self, h: Tensor, u: Tensor, out: Tensor | None = None) -> Tensor:
        return self._call(h, u, self.params)

    def step_with_operator(
        self, h: Tensor, u: Tensor, kind: str, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        return self.step(h, u), self.operator((h, u), kind, h)

    def coefficients(self, h: Tensor, u: Tensor) -> Coefficients:
        """The linearization point itself: products are taken by automatic differentiation."""
        return (h, u)

    linearization = coefficients

    def tangent(self, coefficients: Coefficients, v: Tensor) -> Tensor:
        h, u = coefficients
        return torch.func.jvp(lambda s: self._call(s, u, self.params), (h,), (v,))[1]

    def transpose(self, coefficients: Coefficients, v: Tensor) -> Tensor:
        h, u = coefficients
        return torch.func.vjp(lambda s: self._call(s, u, self.params), h)[1](v)[0]

    def algebra(self, kind: str) -> Algebra | None:
        return Flat(self.state_shape) if kind == "exact" and self.size <= LARGEST_FLAT else None

    @property
    def cheap_kind(self) -> str:
        return "exact" if self.size <= LARGEST_FLAT else "none"

    @property
    def single_kind(self) -> str:
        return "exact" if self.size <= LARGEST_FLAT else "factorized"

    def operator(self, coefficients: Coefficients, kind: str, like: Tensor) -> Tensor:
        """Dense Jacobians ``(..., n, n)``: a JVP has as many columns, side by side as samples, as
        fit into :data:`SIDE` numbers."""
        h, u = coefficients
        count = max(1, min(self.size, SIDE // max(1, h.numel())))
        unit = torch.eye(self.size, dtype=h.dtype, device=h.device)
        columns = []
        for some in unit.reshape(self.size, *self.state_shape).split(count):
            v = some.reshape(len(some), *(1,) * (h.ndim - len(self.state_shape)), *self.state_shape)
            state, inputs = (t.expand(len(some), *t.shape) for t in (h, u))
            state = state.contiguous()  # forward mode takes no overlapping memory
            columns.append(self.tangent((state, inputs), v.expand_as(state)))
        return torch.cat(columns).flatten(-len(self.state_shape)).movedim(0, -1)

    def gradients(
        self,
        linearization: Coefficients,
        h: Tensor,
        u: Tensor,
        cotangent: Tensor,
        u_bar: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        create = torch.is_grad_enabled()
        with torch.enable_grad():
            # Aliases are new nodes of the graph: the gradient stops at them and does not run on
            # into how ``h`` came from the same inputs.
            inputs = [
                t.view_as(t) if create and t.requires_grad else t.detach().requires_grad_()
                for t in (u, *self.params)
            ]
            out = self._call(h if create else h.detach(), inputs[0], inputs[1:])
            first, *rest = torch.autograd.grad(
                out, inputs, cotangent, create_graph=create, allow_unused=True
            )
        first = torch.zeros_like(u) if first is None else first
        if u_bar is None:
            return first, tuple(rest)
        return u_bar.copy_(first), tuple(rest)


def computed_weights(module: nn.Module) -> None:
    """Compute again what hooks of ``torch.nn.utils`` compute before a call: pruned weights, and those
    of ``weight_norm`` and ``spectral_norm``, from the parameters as they are now."""
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, BasePruningMethod | WeightNorm):
            hook(module, ())
        elif isinstance(hook, SpectralNorm):  # a call of the module makes a power iteration
            setattr(module, hook.name, hook.compute_weight(module, do_power_iteration=False))


class _StepOf(nn.Module):
    """Makes ``module.step`` reachable for ``functional_call``."""

    def __init__(self, module: Any):
        super().__init__()
        self.module = module

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        computed_weights(self.module)
        return self.module.step(h, x)
