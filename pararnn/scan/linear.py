"""Affine recurrences whose operators are given: one number, a 2×2 or a k×k matrix at a time."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from .._checks import full_precision
from .autograd import scan
from .backend import pick
from .inputs import Options, accumulated, common_dtype, one_device, reset_mask, shaped, tensor

Result = Tensor | tuple[Tensor, Tensor]


def linear_scan(
    a: Tensor,
    b: Tensor,
    h0: Tensor | None = None,
    *,
    resets: Tensor | None = None,
    reverse: bool = False,
    backend: str = "auto",
    coefficients: bool = False,
    return_state: bool = False,
) -> Result:
    r"""States of \(h_t = a_t h_{t-1} + b_t\), entry by entry.

    Coefficients may have any sign and size; one that is 0 forgets the state.

    Parameters
    ----------
    a, b
        Coefficients and inputs, both ``(B, T, ...)``, of any strides.
    h0
        Initial state ``(B, ...)``; zero if not given. With ``reverse`` it is the state after the
        last step.
    resets
        ``(B, T)`` bool; where set, the step starts from the zero state.
    reverse
        Run from the last step to the first: \(h_t = a_t h_{t+1} + b_t\).
    backend
        ``'auto'``, ``'eager'`` or ``'fused'``.
    coefficients
        Return the composed maps instead of states: ``(A, Bc)`` with \(h_t = A_t h_0 + Bc_t\).
    return_state
        Return ``(states, state)``, with the state to go on from: the last in the order of the
        recurrence, in the dtype of accumulation. It is ``h0`` for an empty sequence.

    Returns
    -------
    Tensor or tuple of Tensor
        States ``(B, T, ...)`` in the dtype that ``a`` and ``b`` promote to. Half precision is
        accumulated in float32.

    Raises
    ------
    TypeError
        If an input is not a floating-point tensor, or ``resets`` not a bool one.
    ValueError
        If a shape or a device does not fit, or ``coefficients`` are asked for together with ``h0``
        or ``return_state``.
    RuntimeError
        If ``backend='fused'`` and no kernel can run this.
    """
    name = "linear_scan"
    a = _sequence(name, "a", a)
    if isinstance(b, Tensor) and a.ndim < b.ndim:
        shaped(name, "a", a, tuple(b.shape))
    b = tensor(name, "b", b, tuple(a.shape))
    state_shape = (a.shape[0], *a.shape[2:])
    options = Options(resets, reverse, return_state, coefficients)
    _check(name, a, b, h0, state_shape, options)
    if fused := pick(name, backend, a, b, h0):
        return fused(a, b, h0, options)
    dtype = common_dtype(a, b)
    op, forcing, start = _prepared(dtype, a, b, h0, state_shape)
    if coefficients:
        both = scan(
            torch.stack([op, op], -1),
            torch.stack([torch.zeros_like(forcing), forcing], -1),
            torch.stack([torch.ones_like(start), start], -1),
            reverse=reverse,
            resets=resets,
        ).to(dtype)
        return both[..., 0], both[..., 1]
    states = scan(op, forcing, start, reverse=reverse, resets=resets)
    return result(states, start, dtype, options)


def prefix_sum(b: Tensor, h0: Tensor, *, backend: str = "auto") -> Tensor:
    r"""States of \(h_t = h_{t-1} + b_t\): the :func:`linear_scan` whose coefficients are all 1.

    The eager path is ``torch.cumsum``, the fused one the kernel of that scan. On either, the error of
    a state is at most \(2(t + 1)\) unit roundoffs of \(|h_0| + \sum_{j \le t} |b_j|\).

    Parameters
    ----------
    b
        Inputs ``(B, T, ...)``.
    h0
        Initial state ``(B, ...)``.
    backend
        As for :func:`linear_scan`.

    Returns
    -------
    Tensor
        States ``(B, T, ...)`` in the dtype that ``b`` and ``h0`` promote to. Half precision is
        accumulated in float32.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As in :func:`linear_scan`.
    """
    name = "prefix_sum"
    b = _sequence(name, "b", b)
    tensor(name, "h0", h0, (b.shape[0], *b.shape[2:]))
    one_device(name, b=b, h0=h0)
    if fused := pick(name, backend, b, h0):
        return cast(Tensor, fused(b, h0))
    dtype = common_dtype(b, h0)
    b, start = accumulated(dtype, b, h0)
    # The start is the first term: a sum without it may overflow where the state does not.
    return torch.cat([b[:, :1] + start.unsqueeze(1), b[:, 1:]], 1).cumsum(1).to(dtype)


def matrix_scan(
    m: Tensor,
    b: Tensor,
    h0: Tensor | None = None,
    *,
    resets: Tensor | None = None,
    reverse: bool = False,
    backend: str = "auto",
    coefficients: bool = False,
    return_state: bool = False,
) -> Result:
    r"""States of \(h_t = M_t h_{t-1} + b_t\) for many planes: 2×2 matrices and 2-vectors.

    Parameters
    ----------
    m
        Matrices ``(B, T, n, 2, 2)``.
    b
        Inputs ``(B, T, n, 2)``.
    h0
        Initial state ``(B, n, 2)``; zero if not given.
    resets, reverse, backend, coefficients, return_state
        As in :func:`linear_scan`; the composed maps are ``A (B, T, n, 2, 2)`` and
        ``Bc (B, T, n, 2)``.

    Returns
    -------
    Tensor or tuple of Tensor
        States ``(B, T, n, 2)`` in the dtype that ``m`` and ``b`` promote to.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As in :func:`linear_scan`.
    """
    name = "matrix_scan"
    m = tensor(name, "m", m, ("B", "T", "n", 2, 2))
    batch, length, planes = m.shape[:3]
    b = tensor(name, "b", b, (batch, length, planes, 2))
    options = Options(resets, reverse, return_state, coefficients)
    _check(name, m, b, h0, (batch, planes, 2), options)
    if fused := pick(name, backend, m, b, h0):
        return fused(m, b, h0, options)
    dtype = common_dtype(m, b)
    op, forcing, start = _prepared(dtype, m, b, h0, (batch, planes, 2))
    # The planes last: operations on 2×2 matrices become operations on rows of n numbers.
    op = op.permute(0, 1, 3, 4, 2).contiguous()
    if coefficients:
        # The columns of A follow the recurrence without inputs, from the identity.
        eye = torch.eye(2, dtype=op.dtype, device=op.device)
        columns = torch.cat(
            [forcing.new_zeros(*forcing.shape, 2), forcing.unsqueeze(-1)], -1
        )  # (B, T, n, 2, 3)
        first = torch.cat([eye.expand(batch, planes, 2, 2), start.unsqueeze(-1)], -1)
        states = scan(
            op.unsqueeze(-2).expand(*op.shape[:-1], 3, planes).flatten(-2),
            columns.permute(0, 1, 3, 4, 2).flatten(-2),
            first.permute(0, 2, 3, 1).flatten(-2),
            "block",
            reverse,
            resets,
        )
        states = states.unflatten(-1, (3, planes)).permute(0, 1, 4, 2, 3).to(dtype)
        return states[..., :2], states[..., 2]
    states = scan(op, forcing.mT.contiguous(), start.mT.contiguous(), "block", reverse, resets)
    states = states.mT
    return result(states, start, dtype, options)


def matrix_affine_scan(
    a: Tensor,
    b: Tensor,
    h0: Tensor | None = None,
    *,
    resets: Tensor | None = None,
    reverse: bool = False,
    backend: str = "auto",
    coefficients: bool = False,
    return_state: bool = False,
) -> Result:
    r"""States of \(H_t = A_t H_{t-1} + B_t\) for many blocks: k×k matrices and k×v states.

    Parameters
    ----------
    a
        Matrices ``(B, T, n, k, k)``.
    b
        Inputs ``(B, T, n, k, v)``.
    h0
        Initial state ``(B, n, k, v)``; zero if not given.
    resets, reverse, backend, coefficients, return_state
        As in :func:`linear_scan`; the composed maps are ``(B, T, n, k, k)`` and
        ``(B, T, n, k, v)``.

    Returns
    -------
    Tensor or tuple of Tensor
        States ``(B, T, n, k, v)`` in the dtype that ``a`` and ``b`` promote to.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As in :func:`linear_scan`.
    """
    name = "matrix_affine_scan"
    a = tensor(name, "a", a, ("B", "T", "n", "k", "k"))
    batch, length, blocks, size = a.shape[:4]
    shaped(name, "a", a, (batch, length, blocks, size, size))
    b = tensor(name, "b", b, (batch, length, blocks, size, "v"))
    state_shape = (batch, blocks, size, b.shape[-1])
    options = Options(resets, reverse, return_state, coefficients)
    _check(name, a, b, h0, state_shape, options)
    if fused := pick(name, backend, a, b, h0):
        return fused(a, b, h0, options)
    dtype = common_dtype(a, b)
    op, forcing, start = _prepared(dtype, a, b, h0, state_shape)
    with full_precision(a.device):
        if coefficients:
            eye = torch.eye(size, dtype=op.dtype, device=op.device)
            states = scan(
                op,
                torch.cat([torch.zeros_like(op), forcing], -1),
                torch.cat([eye.expand(batch, blocks, size, size), start], -1),
                "left",
                reverse,
                resets,
            ).to(dtype)
            return states[..., :size], states[..., size:]
        states = scan(op, forcing, start, "left", reverse, resets)
    return result(states, start, dtype, options)


def _sequence(name: str, what: str, value: object) -> Tensor:
    if isinstance(value, Tensor) and value.ndim < 2:
        raise ValueError(
            f"{name}: {what}: got shape {tuple(value.shape)}, expected (B, T, ...); add the "
            "dimensions with .reshape(...)."
        )
    rest = value.ndim - 2 if isinstance(value, Tensor) else 0
    return tensor(name, what, value, ("B", "T", *["any"] * rest))


def _check(
    name: str,
    op: Tensor,
    b: Tensor,
    h0: Tensor | None,
    state_shape: tuple[int, ...],
    options: Options,
) -> None:
    """Checks the initial state, the devices and the options."""
    if h0 is not None:
        tensor(name, "h0", h0, state_shape)
    one_device(name, operators=op, inputs=b, h0=h0)
    reset_mask(name, options.resets, op)
    if options.coefficients and (h0 is not None or options.return_state):
        raise ValueError(
            f"{name}: got coefficients=True together with h0 or return_state, expected it alone; "
            "apply the composed maps to the initial state yourself: h_t = A_t h0 + Bc_t."
        )


def _prepared(
    dtype: torch.dtype, op: Tensor, b: Tensor, h0: Tensor | None, state_shape: tuple[int, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    """Operators, inputs and initial state in the dtype of accumulation."""
    if h0 is None:
        h0 = b.new_zeros(state_shape, dtype=dtype)
    op, b, h0 = accumulated(torch.promote_types(dtype, h0.dtype), op, b, h0)
    return op, b, h0


def result(states: Tensor, start: Tensor, dtype: torch.dtype, options: Options) -> Result:
    if not options.return_state:
        return states.to(dtype)
    last = 0 if options.reverse else -1
    return states.to(dtype), states[:, last] if states.shape[1] else start
