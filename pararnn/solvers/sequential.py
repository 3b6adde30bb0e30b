"""The reference: a loop over the hand-written step."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from .._checks import full_precision
from .._precision import exactly
from .task import Task, has_spec, prepare


def sequential_states(task: Task) -> Tensor:
    """Loop over the hand-written step, recorded by autograd. States in the state's dtype."""
    if not has_spec(task.cell):  # its parameters are its own affair
        with full_precision(task.u.device):
            return _loop(task)

    def run(u: Tensor, start: Tensor, dt: Tensor | None, *params: Tensor) -> tuple[Tensor]:
        return (_loop(replace(task, u=u, start=start, dt=dt, params=params)),)

    (states,) = exactly(run, task.u.device, task.u, task.start, task.dt, *task.params)
    return states


def _loop(task: Task) -> Tensor:
    cell, h = task.cell, task.h0
    states = []
    steps = task.inputs.unbind(1)
    masks = task.resets.unbind(1) if task.resets is not None else None
    if has_spec(cell):
        params = tuple(p.to(h.dtype) for p in task.params)
        advance = lambda h, u: cell.advance(h, u, params)  # noqa: E731
    else:
        dtype = task.params[0].dtype if task.params else h.dtype
        advance = lambda h, x: cell.step(h.to(dtype), x).to(h.dtype)  # noqa: E731
    for t, u in enumerate(steps):
        if masks is not None:
            mask = masks[t].reshape(-1, *(1,) * (h.ndim - 1))
            h = torch.where(mask, torch.zeros_like(h), h)
        before, version = h, _version(h)
        shape = h.shape
        h = advance(h, u)
        if _version(before) != version:
            raise ValueError(
                f"{type(cell).__name__}: its step wrote into the state it was given; return a new "
                "tensor instead, e.g. h + dh for h.add_(dh)."
            )
        if h.shape != shape:
            raise ValueError(
                f"{type(cell).__name__}: got a next state of shape {tuple(h.shape)}, expected "
                f"{tuple(shape)}, the shape of the state before; nothing is broadcast."
            )
        states.append(h)
    if not states:
        return _none(task)
    return torch.stack(states, 1)


def _none(task: Task) -> Tensor:
    """The states of no steps. They depend on everything, and all gradients are zero."""
    states = task.h0.unsqueeze(1)[:, :0]
    for given in (task.u, task.dt, *task.params):
        if given is not None and given.requires_grad:
            states = states + given.flatten()[:0].sum().to(states.dtype)
    return states


def _version(h: Tensor) -> int:
    """Counts the writes into a tensor, where PyTorch counts them."""
    return 0 if torch.compiler.is_compiling() or h.is_inference() else h._version


def sequential_apply(
    cell: nn.Module,
    x: Tensor,
    *,
    h0: Tensor | None = None,
    resets: Tensor | None = None,
    dt: Tensor | None = None,
) -> Tensor:
    """States of a sequence by looping over the cell's hand-written ``step``.

    The reference for everything else: plain PyTorch, differentiated by autograd through the loop.

    Parameters
    ----------
    cell
        A :class:`~pararnn.Cell`, or any module with ``step(h, x)`` and ``state_shape``.
    x
        Inputs ``(B, T, d_in)``.
    h0
        Initial state ``(B, *state_shape)``; that of ``cell.init_state`` if not given.
    resets
        Bool mask ``(B, T)``: where True, the step starts from the zero state.
    dt
        Time gaps ``(B, T)``, for a cell whose Spec has them.

    Returns
    -------
    Tensor
        States ``(B, T, *state_shape)``, in the dtype of ``x``.

    Raises
    ------
    TypeError, ValueError
        If a shape, dtype or device does not fit.
    """
    task = prepare(cell, x, h0, resets, dt=dt)
    return sequential_states(task).to(task.u.dtype)
