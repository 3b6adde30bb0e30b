"""Checked arguments of a solve: what every solving function starts from."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import _checks as checks
from ..spec import Spec
from .dynamics import SpecDynamics, pack
from .module_dynamics import ModuleDynamics
from .walkers import Dynamics


def has_spec(cell: Any) -> bool:
    """Whether a module is a cell with a Spec (else it needs a ``step`` and a ``state_shape``)."""
    return hasattr(cell, "spec") and hasattr(cell, "recurrent_params") and hasattr(cell, "drives")


def output_of(cell: Any, states: Tensor, u: Tensor | None = None) -> Tensor:
    """What a layer passes on, flattened to ``(..., width)``: the last slot if there are several
    and the Spec does not say that all are; or what the Spec reads, with the drives ``u``."""
    if has_spec(cell) and cell.spec.readout is not None:
        return cell.output(states, drives=u)
    shape = tuple(cell.state_shape)
    whole = has_spec(cell) and cell.spec.output == "all"
    if getattr(cell, "state_slots", 1) > 1 and not whole:
        states, shape = states[..., -1, :], shape[1:]
    return states.flatten(-len(shape)) if len(shape) > 1 else states


@dataclasses.dataclass
class Task:
    """Checked arguments of one solve."""

    cell: Any
    u: Tensor  # packed drives, or the raw input of a module without a Spec
    start: Tensor | None  # initial state in the state's dtype; None is zero
    resets: Tensor | None
    params: tuple[Tensor, ...]
    dtype: torch.dtype  # of the state
    dt: Tensor | None = None  # time gaps (B, T) of a cell that has them

    @property
    def h0(self) -> Tensor:
        """The initial state, ``(B, *state_shape)``."""
        if self.start is not None:
            return self.start
        shape = (self.u.shape[0], *self.cell.state_shape)
        return torch.zeros(shape, device=self.u.device, dtype=self.dtype)

    @property
    def inputs(self) -> Tensor:
        """What the eager solver reads at every step: ``u``, with time gaps as one more column."""
        return self.u if self.dt is None else pack(self.u, self.dt)

    @property
    def traced(self) -> bool:
        """Whether nothing runs yet: inside a compiler or exporter, or on meta tensors."""
        return torch.compiler.is_compiling() or self.u.is_meta

    @property
    def recorded(self) -> bool:
        """Whether autograd records this solve."""
        given = (t for t in self._given if t is not None)
        return torch.is_grad_enabled() and any(t.requires_grad for t in given)

    @property
    def versions(self) -> tuple[int, ...]:
        """How often each tensor was written to, where PyTorch counts it."""
        if torch.compiler.is_compiling():
            return ()
        given = (t for t in (*self._given, self.resets) if t is not None)
        return tuple(0 if t.is_inference() else t._version for t in given)

    @property
    def transformed(self) -> bool:
        """Whether ``torch.func`` or forward mode looks into this solve."""
        return checks.transformed(*self._given)

    @property
    def differentiated(self) -> bool:
        """Whether ``torch.func`` or forward mode differentiates this solve."""
        return checks.differentiated(*self._given)

    @property
    def _given(self) -> tuple[Tensor | None, ...]:
        return self.u, self.start, self.dt, *self.params

    @property
    def make(self) -> Callable[[tuple[Tensor, ...]], Dynamics]:
        """The recurrence by its recurrent parameters. Autograd keeps it, so it holds no task."""
        cell = self.cell
        if has_spec(cell):
            return functools.partial(_from_spec, cell.spec, cell.sizes, self.dtype)
        return functools.partial(_from_module, cell, self.dtype)

    def detached(self) -> Task:
        """The same without an autograd graph."""
        start, dt = (None if t is None else t.detach() for t in (self.start, self.dt))
        params = tuple(p.detach() for p in self.params)
        return dataclasses.replace(self, u=self.u.detach(), start=start, dt=dt, params=params)

    def in_float64(self) -> Task:
        """The same problem on the same drives in float64, without gradients."""
        cell = self.cell if has_spec(self.cell) else copy.deepcopy(self.cell).double()
        params = tuple(p.detach().double() for p in self.params)
        u, h0 = self.u.detach().double(), self.h0.detach().double()
        dt = None if self.dt is None else self.dt.detach().double()
        return Task(cell, u, h0, self.resets, params, torch.float64, dt)


def _from_spec(
    spec: Spec, sizes: dict[str, int], dtype: torch.dtype, params: tuple[Tensor, ...]
) -> SpecDynamics:
    return SpecDynamics(spec, sizes, params, dtype)


def _from_module(module: Any, dtype: torch.dtype, params: tuple[Tensor, ...]) -> ModuleDynamics:
    return ModuleDynamics(module, [name for name, _ in module.named_parameters()], params, dtype)


def prepare(
    cell: Any,
    x: Tensor | None,
    h0: Tensor | None,
    resets: Tensor | None,
    drives: Tensor | None = None,
    dt: Tensor | None = None,
) -> Task:
    """Check the arguments of a solve; nothing is broadcast or converted silently."""
    if not hasattr(cell, "step") or not hasattr(cell, "state_shape"):
        raise TypeError(
            f"cell: got {type(cell).__name__}, expected a Cell or a module with a method "
            "step(h, x) and an attribute state_shape."
        )
    if (x is None) == (drives is None):
        raise TypeError("got both or neither of x and drives, expected exactly one.")
    name = "x" if x is not None else "drives"
    source = checks.floating(name, x if x is not None else drives)
    if source.ndim != 3:
        raise ValueError(
            f"{name}: got shape {tuple(source.shape)}, expected (B, T, features); "
            f"add a batch dimension with {name}.unsqueeze(0)."
        )
    if has_spec(cell):
        width, device, param_dtype = cell.drive_width, cell.device, cell.dtype
        u = cell.drives(x) if x is not None else checks.trailing("drives", source, (width,))
        params = cell.recurrent_params()
        if u.dtype != param_dtype and checks.autocast_dtype(device) is None:
            raise TypeError(
                f"drives: got dtype {u.dtype}, expected {param_dtype} as the cell's parameters; "
                "convert one of them with .to(...)."
            )
    else:
        if drives is not None:
            raise TypeError(f"drives: {type(cell).__name__} has no Spec, so give x.")
        if dt is not None:
            raise TypeError(
                f"dt: got time gaps, expected none for {type(cell).__name__}, which has no Spec; "
                "leave dt out, or make it a feature of x."
            )
        u, params = source, tuple(cell.parameters())
        device = params[0].device if params else u.device
        param_dtype = params[0].dtype if params else u.dtype
    dtype = checks.state_dtype(param_dtype)
    checks.same_device(name, source, device)
    batch, length = u.shape[:2]
    shape = (batch, *cell.state_shape)
    if h0 is not None:
        checks.same_device("h0", checks.floating("h0", h0), device)
        if tuple(h0.shape) != shape:
            raise ValueError(
                f"h0: got shape {tuple(h0.shape)}, expected {shape}; nothing is broadcast, "
                "use h0.expand(...) if all samples start alike."
            )
        if h0.dtype not in (param_dtype, dtype):
            wanted = " or ".join(dict.fromkeys((str(param_dtype), str(dtype))))
            raise TypeError(
                f"h0: got dtype {h0.dtype}, expected {wanted}; convert it with .to(...)."
            )
        h0 = h0.to(dtype)
        if has_spec(cell):
            cell.check_start("h0", h0)
    elif has_spec(cell) and not cell.starts_at_zero:
        h0 = cell.init_state(batch)
    if resets is not None:
        if not isinstance(resets, Tensor):
            raise TypeError(f"resets: got {type(resets).__name__}, expected a torch.bool tensor.")
        if resets.dtype != torch.bool or tuple(resets.shape) != (batch, length):
            raise ValueError(
                f"resets: got {resets.dtype} of shape {tuple(resets.shape)}, expected torch.bool "
                f"of shape {(batch, length)}."
            )
        resets = checks.same_device("resets", resets, device).clone()
    if has_spec(cell):
        dt = checks.time_gaps(cell, dt, (batch, length))
    return Task(cell, u, h0, resets, params, dtype, dt)
