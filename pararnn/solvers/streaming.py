"""One step at a time, for streaming."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import _checks as checks
from .._operators import Operator
from ..kernels.support import launcher, on_device_of
from ..spec import Spec
from .config import BACKENDS
from .methods.fused import TRANSFORMED, lacking
from .operator import spec_of


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
            launcher().run_decode(spec_of(name), u, dt, h, tuple(params), out)
        if not out.is_inference():
            torch.autograd.graph.increment_version(out)


channelwise_step = Operator(
    "channelwise_step(str spec, Tensor u, Tensor? dt, Tensor h, Tensor[] params, Tensor(a!) out)"
    " -> ()",
    _step,
    lambda *_: None,
    keys=("CUDA", "CPU"),
)


def decode(
    cell: Any,
    x: Tensor | None,
    h: Tensor,
    *,
    drives: Tensor | None = None,
    dt: Tensor | None = None,
    out: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """One step of a cell, for streaming; on a CUDA device by one kernel after the projection.

    It never waits for the device and allocates nothing for the state if ``out`` is given, so a
    CUDA graph can capture it. A sequence decoded step by step has the states of the whole.

    Parameters
    ----------
    cell
        A :class:`~pararnn.Cell`, or any module with ``step(h, x)``.
    x
        Input ``(B, d_in)``; or None, with ``drives (B, C)`` as ``cell.drives(x)`` returns them.
    h
        State ``(B, *state_shape)``, in the parameters' dtype or the state's.
    dt
        Time since the step before, ``(B,)``, for a cell with a time gap.
    out
        Where to write the new state: contiguous, of the shape and dtype of ``h``, which it may be.
    backend
        ``'auto'``, ``'eager'`` (the hand-written step) or ``'fused'``.

    Returns
    -------
    Tensor
        The new state in the dtype of ``h``; ``out`` if it is given. Differentiable, by the
        hand-written step, if gradients are enabled and something requires them.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit, if ``backend='fused'`` cannot be had, or if ``out`` is given
        where gradients are recorded.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend: got {backend!r}, expected one of {BACKENDS}.")
    if dt is not None:
        checks.floating("dt", dt)
    leaves = [t for t in (x, h, drives, dt) if t is not None]
    if torch.is_grad_enabled() or checks.forward_mode():  # else they matter to nothing here
        leaves = [*leaves, *cell.parameters()]
    recorded = torch.is_grad_enabled() and any(t.requires_grad for t in leaves)
    if out is not None:
        if recorded:
            raise ValueError(
                "out: a step that autograd records cannot write to a buffer; use torch.no_grad(), "
                "or leave out away."
            )
        if out.shape != h.shape or out.dtype != h.dtype or out.device != h.device:
            raise ValueError(
                f"out: got {out.dtype} of shape {tuple(out.shape)} on {out.device}, expected "
                f"{h.dtype} of shape {tuple(h.shape)} on {h.device}, like h."
            )
    refused = _decode_refusal(cell, h.device, recorded, checks.transformed(*leaves), backend)
    if refused is not None and backend == "fused":
        raise ValueError(f"backend: got 'fused', but {refused}; use backend='auto'.")
    if refused is not None:
        named = {"drives": drives, "dt": dt}
        following = cell.step(h, x, **{k: v for k, v in named.items() if v is not None})
        return following if out is None else out.copy_(following)
    u, dt = cell.step_inputs(h, x, drives, dt)
    target = torch.empty_like(h, memory_format=torch.contiguous_format) if out is None else out
    if not target.is_contiguous():
        raise ValueError("out: got a tensor that is not contiguous; use out.contiguous().")
    shape = (-1, cell.state_slots, cell.channels)
    params = list(cell.recurrent_params())
    start = h.contiguous().view(shape)
    u = u.reshape(start.shape[0], u.shape[-1])
    dt = None if dt is None else dt.reshape(-1)
    channelwise_step(cell.spec.fingerprint, u, dt, start, params, target.view(shape))
    return target


def _decode_refusal(
    cell: Any, device: torch.device, recorded: bool, transformed: bool, backend: str
) -> str | None:
    if backend == "eager":
        return "asked for: backend='eager'"
    if not isinstance(getattr(cell, "spec", None), Spec):
        return f"{type(cell).__name__} has no Spec"
    if recorded:
        return "gradients are recorded"
    if transformed:
        return TRANSFORMED
    return lacking(cell.spec, device, backend)
