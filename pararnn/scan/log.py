"""Scan of a recurrence of nonnegative numbers that are given by their logarithms.

The textbook form subtracts sums of logarithms over the whole sequence, and so loses digits as the
sequence grows. Here no such sum is formed. A first scan, over maxima and sums, finds the logarithm
``r_t`` of the largest term of every state. Relative to it the recurrence is

    ``g_t = exp(r_{t−1} + log a_t − r_t) g_{t−1} + exp(log b_t − r_t)``,  ``h_t = exp(r_t) g_t``,

with no exponent above 0, so it can neither overflow nor lose a term that matters. A state that linear
space holds with room to spare keeps ``r_t = 0``, state by state, so what happens later or elsewhere
changes no bit; where all do, the first scan is left out. Both scans run in float64: in float32 the rounding of a
coefficient near 1 alone would cost 3e-3 over 100,000 steps. The result does not depend on
``r_t``, so derivatives may treat it as a constant.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from .._checks import readable
from .autograd import doubtful, scan, silenced
from .backend import pick
from .inputs import Options, common_dtype, one_device, reset_mask, tensor
from .linear import Result, result

NAME = "parallel_scan_log"
LARGEST = 600.0  # largest absolute logarithm of a state that is kept in linear space as it is
SMALLEST = -300.0  # an initial state of 0 is scaled as one of this logarithm would be
OVERFLOW = 800.0  # half of it is representable, all of it is infinite


def parallel_scan_log(
    log_coeffs: Tensor,
    log_values: Tensor,
    h0: Tensor | None = None,
    *,
    resets: Tensor | None = None,
    reverse: bool = False,
    backend: str = "auto",
    return_state: bool = False,
) -> Result:
    r"""States of \(h_t = a_t h_{t-1} + b_t\) from \(\log a_t\) and \(\log b_t\).

    The error does not grow with the length: it is the rounding of the result. Logarithms may be
    ``-inf`` (a coefficient or a value of exactly 0) and of any size; states are right as far as
    the dtype can represent them.

    Parameters
    ----------
    log_coeffs
        \(\log a_t\), ``(B, T, D)``.
    log_values
        ``(B, T + 1, D)``: \(\log h_0\), then \(\log b_1, \dots, \log b_T\). With ``h0``:
        ``(B, T, D)``, without \(\log h_0\).
    h0
        Initial state itself, ``(B, D)``. Unlike its logarithm it has a derivative at 0.
    resets
        ``(B, T)`` bool; where set, the step starts from the zero state.
    reverse
        Run from the last step to the first; \(h_0\) is then the state after the last step, and its
        logarithm still comes first.
    backend
        ``'auto'``, ``'eager'`` or ``'fused'``.
    return_state
        Return ``(states, state)``, with the last state in the order of the recurrence, in float64.

    Returns
    -------
    Tensor or tuple of Tensor
        States ``(B, T, D)``, themselves and not their logarithms, in the dtype that ``log_coeffs``
        and ``log_values`` promote to.

    Raises
    ------
    TypeError
        If an input is not a floating-point tensor, or ``resets`` not a bool one.
    ValueError
        If a shape or a device does not fit.
    RuntimeError
        If ``backend='fused'`` and no kernel can run this.
    """
    log_coeffs = tensor(NAME, "log_coeffs", log_coeffs, ("B", "T", "D"))
    batch, length, width = log_coeffs.shape
    extra = 1 if h0 is None else 0
    log_values = tensor(NAME, "log_values", log_values, (batch, length + extra, width))
    if h0 is not None:
        h0 = tensor(NAME, "h0", h0, (batch, width))
    reset_mask(NAME, resets, log_coeffs)
    one_device(NAME, log_coeffs=log_coeffs, log_values=log_values, h0=h0)
    options = Options(resets, reverse, return_state)
    if fused := pick(NAME, backend, log_coeffs, log_values, h0):
        return fused(log_coeffs, log_values, h0, options)
    dtype = common_dtype(log_coeffs, log_values)
    coeffs = log_coeffs.double()
    values = log_values.double()
    if h0 is None:
        first, values = values[:, 0], values[:, 1:]
    else:
        first = h0.double()
    if _stays(log_coeffs, values, first, h0 is None):
        start = exp(first) if h0 is None else first
        states = scan(exp(coeffs), exp(values), start, reverse=reverse, resets=resets)
    else:
        states, start = _recentred(coeffs, values, first, h0 is None, reverse, resets)
    return result(states, start, dtype, options)


class Exp(torch.autograd.Function):
    """``exp(x)`` whose derivative is 0 where the cotangent is, whatever the exponential is: what a
    reset has cut off has no say."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.exp()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(output)
        ctx.save_for_forward(output)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return _moved(g, *ctx.saved_tensors)

    @staticmethod
    def jvp(ctx: Any, d_x: Tensor) -> Tensor:
        return _moved(d_x, *ctx.saved_tensors)


def _moved(g: Tensor, slope: Tensor) -> Tensor:
    return g * (silenced(slope, g == 0) if doubtful(slope) else slope)


def exp(x: Tensor) -> Tensor:
    # One operation to compilers, which do not look into a function of ours.
    return x.exp() if torch.compiler.is_compiling() else Exp.apply(x)


def _stays(coeffs: Tensor, values: Tensor, first: Tensor, logarithm: bool) -> bool:
    """Whether all states are known to keep ``r_t = 0``: no coefficient is above 1, and no value, of
    which every state has one, is huge or tiny. Not asked where the numbers cannot be looked at."""
    if not all(map(readable, (coeffs, values, first))) or not coeffs.numel():
        return False
    with torch.no_grad():
        coeffs, values, first = (unpack_dual(x).primal for x in (coeffs, values, first))
        least, most = values.aminmax()
        start = first.amax() if logarithm else first.abs().amax().log()
        fits = float(least) >= -LARGEST and float(torch.maximum(most, start)) <= LARGEST
        return fits and bool(coeffs.amax() <= 0)


def _recentred(
    coeffs: Tensor,
    values: Tensor,
    first: Tensor,
    logarithm: bool,
    reverse: bool,
    resets: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """States and the initial state; ``first`` is the initial state or its logarithm."""
    with torch.no_grad():
        r0 = first if logarithm else first.abs().log().clamp_min(SMALLEST)
        r = scan(coeffs.detach(), values.detach(), r0.detach(), "maxplus", reverse, resets)
        r0, r = (torch.where(x.abs() <= LARGEST, 0.0, x) for x in (r0, r))
        ends = [r[:, 1:], r0.unsqueeze(1)] if reverse else [r0.unsqueeze(1), r[:, :-1]]
        before = torch.cat(ends, 1) if r.shape[1] else r
        # Zero and infinite states are what they are at any scale; what comes from 0 is 0.
        before = before.nan_to_num(torch.nan, posinf=0, neginf=-torch.inf)
        r0, r = (x.nan_to_num(torch.nan, posinf=0, neginf=0) for x in (r0, r))
        half = (r.clamp_max(OVERFLOW) / 2).exp().nan_to_num(1.0)  # g is NaN there
        unit = (-r0).exp().nan_to_num(1.0)
    scaled = exp(first - r0) if logarithm else first * unit
    g = scan(exp(before - r + coeffs), exp(values - r), scaled, "diagonal", reverse, resets)
    return g * half * half, exp(first) if logarithm else first
