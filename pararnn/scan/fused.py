"""Scans in one kernel call: the channelwise template, filled with the recurrence itself.

``h_t = A_t h_{t−1} + b_t`` is a Spec like any other, with one slot for every entry of a block and a
drive for every number of ``A_t`` and ``b_t``. Each is a tensor of its own, of any strides, so that
nothing is packed. A second derivative takes the eager path.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor

from .._checks import state_dtype
from ..kernels import missing
from ..kernels.plan import Plan, plan
from ..kernels.support import on_device_of, processors
from ..spec import Spec, exp
from .autograd import scan
from .backend import Fused, register_fused
from .inputs import common_dtype
from .linear import Result, linear_scan

LARGEST = 8
"""Rows of a block that the registers of a program hold."""


@cache
def scan_spec(kind: str) -> Spec:
    """The recurrence of a kind: ``'log'``, or the number of rows of a block."""
    if kind == "log":
        with Spec("LogScan", output="all") as s:
            h = s.state("h", bounds=(0, float("inf")))
            a, b = s.drives("a b")
            s.next(h, exp(a) * h + exp(b))
        return s
    rows = range(int(kind))
    with Spec(f"Scan{kind}", output="all") as s:
        h = [s.state(f"h{i}") for i in rows]
        m = s.drives(" ".join(f"a{i}_{j}" for i in rows for j in rows))
        b = s.drives(" ".join(f"b{i}" for i in rows))
        for i in rows:
            row = m[i * len(rows) : (i + 1) * len(rows)]
            s.next(h[i], sum(x * y for x, y in zip(row, h, strict=True)) + b[i])
    return s


# -- the operator ------------------------------------------------------------------------------

_LIBRARY = torch.library.Library("pararnn", "FRAGMENT")
_ARGUMENTS = "str kind, Tensor[] drives, Tensor? h0, Tensor? resets"
_LIBRARY.define(f"scan({_ARGUMENTS}) -> (Tensor, Tensor)")
_LIBRARY.define(
    f"scan_backward({_ARGUMENTS}, Tensor states, Tensor? grad, Tensor? final) -> (Tensor[], Tensor)"
)


def _problem(
    kind: str, drives: Sequence[Tensor], h0: Tensor | None, resets: Tensor | None, backward: bool
) -> tuple[Any, Plan]:
    from ..kernels.launch import Problem

    spec, wide = scan_spec(kind), kind == "log"
    (B, T, D), u = drives[0].shape, drives[0]
    size = 8 if wide else u.element_size()
    chosen = plan(spec, B, T, D, size, processors(u.device), backward=backward)
    return Problem(spec, tuple(drives), (), h0=h0, resets=resets, wide=wide), chosen


def _dtype(kind: str, drives: Sequence[Tensor]) -> torch.dtype:
    return torch.float64 if kind == "log" else state_dtype(drives[0].dtype)


def _forward(
    kind: str, drives: Sequence[Tensor], h0: Tensor | None, resets: Tensor | None
) -> tuple[Tensor, Tensor]:
    states, final = _empty(kind, drives, h0, resets)
    if drives[0].numel() == 0:
        return states, final.zero_() if h0 is None else final.copy_(h0)
    from ..kernels.launch import run_forward

    with on_device_of(drives[0]):
        states, _, final, _ = run_forward(*_problem(kind, drives, h0, resets, False))
    return states, final


def _backward(
    kind: str,
    drives: Sequence[Tensor],
    h0: Tensor | None,
    resets: Tensor | None,
    states: Tensor,
    grad: Tensor | None,
    final: Tensor | None,
) -> tuple[list[Tensor], Tensor]:
    if drives[0].numel() == 0:
        bars, start = _empty_back(kind, drives, h0, resets, states, grad, final)
        return bars, start.zero_() if final is None else final.clone()
    from ..kernels.launch import run_adjoint

    others = states.new_empty(*states.shape[:2], 0, drives[0].shape[2])
    with on_device_of(states):
        problem, chosen = _problem(kind, drives, h0, resets, True)
        found = run_adjoint(problem, chosen, states, others, grad, None, final)
    return list(found[0]), found[2]


def _empty(
    kind: str, drives: Sequence[Tensor], h0: Tensor | None, resets: Tensor | None
) -> tuple[Tensor, Tensor]:
    (B, T, D), u, S = drives[0].shape, drives[0], len(scan_spec(kind).slots)
    return u.new_empty(B, T, S * D), u.new_empty(B, S, D, dtype=_dtype(kind, drives))


def _empty_back(kind: str, drives: Sequence[Tensor], *others: Any) -> tuple[list[Tensor], Tensor]:
    _, start = _empty(kind, drives, None, None)
    return [u.new_empty(u.shape) for u in drives], start


for _device in ("CUDA", "CPU"):
    _LIBRARY.impl("scan", _forward, _device)
    _LIBRARY.impl("scan_backward", _backward, _device)
torch.library.register_fake("pararnn::scan", _empty, lib=_LIBRARY)
torch.library.register_fake("pararnn::scan_backward", _empty_back, lib=_LIBRARY)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    kind, drives, h0, resets = inputs
    ctx.set_materialize_grads(False)
    ctx.kind, ctx.count = kind, len(drives)
    ctx.save_for_backward(h0, resets, output[0], *drives)


def _gradients(ctx: Any, grad: Tensor | None, final: Tensor | None) -> tuple[Any, ...]:
    h0, resets, states, *drives = ctx.saved_tensors
    if grad is None and final is None:
        return None, [None] * ctx.count, None, None
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        bars, start = _twice(ctx.kind, drives, h0, resets, grad, final)
    else:
        bars, start = torch.ops.pararnn.scan_backward(
            ctx.kind, drives, h0, resets, states, grad, final
        )
    return None, list(bars), None if h0 is None else start, None


torch.library.register_autograd("pararnn::scan", _gradients, setup_context=_setup, lib=_LIBRARY)


def _twice(
    kind: str,
    drives: Sequence[Tensor],
    h0: Tensor | None,
    resets: Tensor | None,
    grad: Tensor | None,
    final: Tensor | None,
) -> tuple[list[Tensor], Tensor]:
    """Gradients that can be differentiated again: those of the eager scan."""
    dtype, S = _dtype(kind, drives), len(scan_spec(kind).slots)
    (B, T, D) = drives[0].shape
    start = drives[0].new_zeros(B, S, D, dtype=dtype) if h0 is None else h0.to(dtype)
    with torch.enable_grad():
        start = start if start.requires_grad else start.detach().requires_grad_()
        given = [u if u.requires_grad else u.detach().requires_grad_() for u in drives]
        wide = [u.to(dtype) for u in given]
        if kind == "log":
            wide = [u.exp() for u in wide]
        op = torch.stack(wide[: S * S], 2).unflatten(2, (S, S))
        if resets is not None:
            op = op.masked_fill(resets[:, :, None, None, None], 0)
        states = scan(op, torch.stack(wide[S * S :], 2), start, "block")
        end = states[:, -1] if T else start
        outputs, cotangents = [], []
        for value, bar in ((states.flatten(2).to(drives[0].dtype), grad), (end, final)):
            if bar is not None:
                outputs.append(value)
                cotangents.append(bar)
        *bars, first = torch.autograd.grad(
            outputs, [*given, start], cotangents, create_graph=True, materialize_grads=True
        )
    return bars, first


# -- the public functions ------------------------------------------------------------------------


def _run(
    kind: str,
    drives: list[Tensor],
    h0: Tensor | None,
    resets: Tensor | None,
    reverse: bool,
) -> tuple[Tensor, Tensor]:
    """States ``(B, T, S, D)`` and the last one ``(B, S, D)`` of drives ``(B, T, D)``."""
    dtype = common_dtype(*drives)
    drives = [u.to(dtype) for u in drives]
    if reverse:
        drives = [u.flip(1) for u in drives]
        resets = None if resets is None else resets.flip(1)
    start = None if h0 is None else h0.to(_dtype(kind, drives))
    states, final = torch.ops.pararnn.scan(kind, drives, start, resets)
    states = states.flip(1) if reverse else states
    return states.unflatten(2, (-1, drives[0].shape[2])), final


def _linear(
    a: Tensor,
    b: Tensor,
    h0: Tensor | None,
    *,
    resets: Tensor | None,
    reverse: bool,
    coefficients: bool,
    return_state: bool,
) -> Result:
    def run(b: Tensor, h0: Tensor | None) -> tuple[Tensor, Tensor]:
        flat = None if h0 is None else h0.unsqueeze(1).flatten(1).unsqueeze(1)
        drives = [x.unsqueeze(2).flatten(2) for x in (a, b)]
        states, final = _run("1", drives, flat, resets, reverse)
        return states.reshape(a.shape), final.reshape(a.shape[0], *a.shape[2:])

    if coefficients:
        ones = a.new_ones(a.shape[0], *a.shape[2:])
        return run(torch.zeros_like(b), ones)[0], run(b, None)[0]
    states, final = run(b, h0)
    return (states, final) if return_state else states


def _sums(b: Tensor, h0: Tensor) -> Tensor:
    ones = b.new_ones((), dtype=common_dtype(b, h0)).expand_as(b)
    return cast(Tensor, linear_scan(ones, b, h0, backend="fused"))


def _blocks(
    a: Tensor,
    b: Tensor,
    h0: Tensor | None,
    *,
    resets: Tensor | None,
    reverse: bool,
    coefficients: bool,
    return_state: bool,
) -> Result:
    """Blocks ``(B, T, n, k, k)`` on states ``(B, n, k, v)``: a lane for every column."""
    batch, length, n, k = a.shape[:4]

    def run(b: Tensor, h0: Tensor | None) -> tuple[Tensor, Tensor]:
        v = b.shape[-1]
        wide = a.unsqueeze(-1).expand(batch, length, n, k, k, v)
        drives = [wide[..., i, j, :].flatten(2) for i in range(k) for j in range(k)]
        drives += [b[..., i, :].flatten(2) for i in range(k)]
        first = None if h0 is None else h0.transpose(1, 2).flatten(2)
        states, final = _run(str(k), drives, first, resets, reverse)
        shape = (batch, length, n, k, v)
        return (
            states.unflatten(3, (n, v)).transpose(2, 3).reshape(shape),
            final.unflatten(2, (n, v)).transpose(1, 2),
        )

    if coefficients:
        eye = torch.eye(k, dtype=a.dtype, device=a.device).expand(batch, n, k, k)
        return run(a.new_zeros(a.shape), eye)[0], run(b, None)[0]
    states, final = run(b, h0)
    return (states, final) if return_state else states


def _planes(m: Tensor, b: Tensor, h0: Tensor | None, *, coefficients: bool, **options: Any) -> Any:
    """2×2 blocks on vectors."""
    first = None if h0 is None else h0.unsqueeze(-1)
    found = _blocks(m, b.unsqueeze(-1), first, coefficients=coefficients, **options)
    if coefficients:
        return found[0], found[1].squeeze(-1)
    return tuple(x.squeeze(-1) for x in found) if isinstance(found, tuple) else found.squeeze(-1)


def _logarithms(
    log_coeffs: Tensor,
    log_values: Tensor,
    h0: Tensor | None,
    *,
    resets: Tensor | None,
    reverse: bool,
    return_state: bool,
) -> Result:
    if h0 is None:
        h0, log_values = log_values[:, 0].double().exp(), log_values[:, 1:]
    states, final = _run("log", [log_coeffs, log_values], h0.unsqueeze(1), resets, reverse)
    return (states.squeeze(2), final.squeeze(1)) if return_state else states.squeeze(2)


def _lacks(*values: Tensor | None) -> str | None:
    """Why the kernels cannot run these tensors; None if they can."""
    if torch._C._are_functorch_transforms_active():
        return "torch.func transforms the eager scan only"
    first = next(v for v in values if v is not None)
    return None if torch.compiler.is_compiling() else missing(first.device)


def _lacks_blocks(*values: Tensor | None) -> str | None:
    first = next(v for v in values if v is not None)
    if first.shape[-1] > LARGEST:
        return f"a kernel holds blocks of at most {LARGEST} rows, not {first.shape[-1]}"
    return _lacks(*values)


register_fused("linear_scan", Fused(_lacks, _linear))
register_fused("prefix_sum", Fused(_lacks, _sums))
register_fused("matrix_scan", Fused(_lacks, _planes))
register_fused("matrix_affine_scan", Fused(_lacks_blocks, _blocks))
register_fused("parallel_scan_log", Fused(_lacks, _logarithms))
