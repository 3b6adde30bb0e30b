"""Checked arguments of a solve: what every solving function starts from."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .. import _checks as checks
from ..spec import Spec
from .config import NewtonConfig
from .module_recurrence import ModuleRecurrence
from .recurrence import Recurrence, pack
from .spec_recurrence import SpecRecurrence

DEFAULT = NewtonConfig()


@dataclass(frozen=True)
class Problem:
    """A recurrence on a sequence, and how it is asked to be solved.

    Attributes
    ----------
    recurrence : Recurrence
    u : Tensor
        Packed drives ``(B, T, C)``, or the raw input of a module without a Spec.
    start : Tensor or None
        Initial state in the state's dtype; None is zero.
    resets : Tensor or None
        ``(B, T)`` bool.
    dt : Tensor or None
        Time gaps ``(B, T)`` of a recurrence that has them.
    config, method
        As for :func:`~pararnn.solve`.
    layer : bool
        Whether only the output and the final state are asked for.
    """

    recurrence: Recurrence
    u: Tensor
    config: NewtonConfig
    start: Tensor | None = None
    resets: Tensor | None = None
    dt: Tensor | None = None
    method: str = "auto"
    layer: bool = False

    # -- sizes -------------------------------------------------------------------------------------

    @property
    def spec(self) -> Spec | None:
        return self.recurrence.spec

    @property
    def params(self) -> tuple[Tensor, ...]:
        return self.recurrence.raw_params

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the state."""
        return self.recurrence.dtype

    @property
    def total(self) -> int:
        """Steps of the sequence."""
        return self.u.shape[1]

    @property
    def numbers(self) -> int:
        """Numbers of the states of one step of the batch."""
        return self.u.shape[0] * math.prod(self.recurrence.state_shape)

    @property
    def free(self) -> bool:
        """Whether neither method nor chunks nor iterations are asked for."""
        config = self.config
        return self.method == "auto" and config.chunk_length is None and config.max_iters is None

    # -- tensors -----------------------------------------------------------------------------------

    @property
    def h0(self) -> Tensor:
        """The initial state, ``(B, *state_shape)``."""
        if self.start is not None:
            return self.start
        shape = (self.u.shape[0], *self.recurrence.state_shape)
        return torch.zeros(shape, device=self.u.device, dtype=self.dtype)

    @property
    def inputs(self) -> Tensor:
        """What a recurrence reads at every step: ``u``, with time gaps as one more column."""
        return pack(self.u, self.dt)

    @property
    def _tensors(self) -> tuple[Tensor | None, ...]:
        return self.u, self.start, self.dt, *self.params

    @property
    def traced(self) -> bool:
        """Whether nothing runs yet: inside a compiler or exporter, or on meta tensors."""
        return torch.compiler.is_compiling() or self.u.is_meta

    @property
    def recorded(self) -> bool:
        """Whether autograd records this solve."""
        return torch.is_grad_enabled() and any(
            t is not None and t.requires_grad for t in self._tensors
        )

    @property
    def transformed(self) -> bool:
        """Whether ``torch.func`` or forward mode looks into this solve."""
        return checks.transformed(*self._tensors)

    @property
    def differentiated(self) -> bool:
        """Whether ``torch.func`` or forward mode differentiates this solve."""
        return checks.differentiated(*self._tensors)

    @property
    def versions(self) -> tuple[int, ...]:
        """How often each tensor was written to, where PyTorch counts it."""
        if torch.compiler.is_compiling():
            return ()
        tensors = (t for t in (*self._tensors, self.resets) if t is not None)
        return tuple(0 if t.is_inference() else t._version for t in tensors)

    # -- other problems ----------------------------------------------------------------------------

    def detached(self) -> Problem:
        """The same without an autograd graph."""
        start, dt = (None if t is None else t.detach() for t in (self.start, self.dt))
        recurrence = self.recurrence.using([p.detach() for p in self.params])
        return replace(self, recurrence=recurrence, u=self.u.detach(), start=start, dt=dt)

    def in_float64(self) -> Problem:
        """The same on the same drives in float64, without gradients."""
        recurrence, params = self.recurrence, [p.detach().double() for p in self.params]
        if isinstance(recurrence, ModuleRecurrence):
            module = copy.deepcopy(recurrence.module).double()
            recurrence = ModuleRecurrence(module, params, torch.float64)
        else:
            recurrence = recurrence.using(params, torch.float64)
        u, start = self.u.detach().double(), self.h0.detach().double()
        dt = None if self.dt is None else self.dt.detach().double()
        return replace(self, recurrence=recurrence, u=u, start=start, dt=dt)


def as_recurrence(cell: Any, like: Tensor) -> Recurrence:
    """The recurrence of a :class:`~pararnn.Cell` or of any module with a ``step``; ``like`` is an
    input of it.

    Raises
    ------
    TypeError
        If it is neither.
    """
    if not hasattr(cell, "step") or not hasattr(cell, "state_shape"):
        raise TypeError(
            f"cell: got {type(cell).__name__}, expected a Cell or a module with a method "
            "step(h, x) and an attribute state_shape."
        )
    if isinstance(getattr(cell, "spec", None), Spec):
        return SpecRecurrence.of(cell)
    return ModuleRecurrence.of(cell, like)


def prepare(
    cell: Any,
    x: Tensor | None,
    h0: Tensor | None = None,
    resets: Tensor | None = None,
    drives: Tensor | None = None,
    dt: Tensor | None = None,
    config: NewtonConfig | None = None,
    **asked: Any,
) -> Problem:
    """Check the arguments of a solve; nothing is broadcast or converted silently. What is ``asked``
    for besides is kept: ``method`` and ``layer``."""
    if (x is None) == (drives is None):
        raise TypeError("got both or neither of x and drives, expected exactly one.")
    name = "x" if x is not None else "drives"
    source = checks.floating(name, x if x is not None else drives)
    if source.ndim != 3:
        raise ValueError(
            f"{name}: got shape {tuple(source.shape)}, expected (B, T, features); "
            f"add a batch dimension with {name}.unsqueeze(0)."
        )
    recurrence = as_recurrence(cell, source)
    if recurrence.spec is None:
        u, dtype, device = _of_module(recurrence, source, x is not None, dt)
    else:
        u, dtype, device = _of_cell(cell, source, x is not None)
    checks.same_device(name, source, device)
    batch, length = u.shape[:2]
    if h0 is not None:
        h0 = _checked_start(h0, (batch, *recurrence.state_shape), dtype, recurrence.dtype, device)
        if recurrence.spec is not None:
            cell.check_start("h0", h0)
    elif recurrence.spec is not None and not cell.starts_at_zero:
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
    if recurrence.spec is not None:
        dt = checks.time_gaps(cell, dt, (batch, length))
    return Problem(recurrence, u, config or DEFAULT, h0, resets, dt, **asked)


def _of_cell(cell: Any, source: Tensor, projects: bool) -> tuple[Tensor, torch.dtype, torch.device]:
    """Drives of a :class:`~pararnn.Cell`; its dtype and device."""
    like = cell.like
    device, dtype = like.device, like.dtype
    u = cell.drives(source) if projects else checks.trailing("drives", source, (cell.drive_width,))
    if u.dtype != dtype and checks.autocast_dtype(device) is None:
        raise TypeError(
            f"drives: got dtype {u.dtype}, expected {dtype} as the cell's parameters; "
            "convert one of them with .to(...)."
        )
    return u, dtype, device


def _of_module(
    recurrence: Recurrence, source: Tensor, projects: bool, dt: Tensor | None
) -> tuple[Tensor, torch.dtype, torch.device]:
    """What any module with a ``step`` reads; its dtype and device."""
    if not projects:
        raise TypeError(f"drives: {recurrence.name} has no Spec, so give x.")
    if dt is not None:
        raise TypeError(
            f"dt: got time gaps, expected none for {recurrence.name}, which has no Spec; leave dt "
            "out, or make it a feature of x."
        )
    like = (*recurrence.raw_params, source)[0]
    return source, like.dtype, like.device


def _checked_start(
    h0: Tensor,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    state: torch.dtype,
    device: torch.device,
) -> Tensor:
    """An initial state, in the dtype of states."""
    checks.same_device("h0", checks.floating("h0", h0), device)
    if tuple(h0.shape) != shape:
        raise ValueError(
            f"h0: got shape {tuple(h0.shape)}, expected {shape}; nothing is broadcast, "
            "use h0.expand(...) if all samples start alike."
        )
    if h0.dtype not in (dtype, state):
        wanted = " or ".join(dict.fromkeys((str(dtype), str(state))))
        raise TypeError(f"h0: got dtype {h0.dtype}, expected {wanted}; convert it with .to(...).")
    return h0.to(state)
