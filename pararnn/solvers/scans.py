"""Scans in one kernel call: the recurrence itself as the Spec of the one operator.

``h_t = A_t h_{t−1} + b_t`` is a Spec like any other, with one slot for every entry of a block and a
drive for every number of ``A_t`` and ``b_t``. Each is a tensor of its own, of any strides, so that
nothing is packed.
"""

from __future__ import annotations

from functools import cache
from typing import Any, cast

import torch
from torch import Tensor

from .._checks import state_dtype
from ..kernels import missing
from ..scan.backend import Fused, register_fused
from ..scan.inputs import Options, common_dtype
from ..scan.linear import Result, linear_scan
from ..scan.log import exp as selecting_exp
from ..spec import Spec, exp
from . import operator
from .methods.fused import CORRECTIONS

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


operator.FAMILIES["scan"] = scan_spec


# -- the public functions ------------------------------------------------------------------------


def _run(
    kind: str, drives: list[Tensor], h0: Tensor | None, options: Options
) -> tuple[Tensor, Tensor]:
    """States ``(B, T, S, D)`` and the last one ``(B, S, D)`` of drives ``(B, T, D)``."""
    dtype, resets = common_dtype(*drives), options.resets
    drives = [u.to(dtype) for u in drives]
    if options.reverse:
        drives = [u.flip(1) for u in drives]
        resets = None if resets is None else resets.flip(1)
    slots = 1 if kind == "log" else int(kind)
    wide = torch.float64 if kind == "log" else state_dtype(dtype)
    if h0 is not None:
        h0 = h0.to(wide) if slots > 1 else h0.to(wide).squeeze(1)
    settings = operator.Settings("fused", cap=CORRECTIONS)
    sizes = [drives[0].shape[2]]
    call = operator.Call(f"scan:{kind}", sizes, wide, drives, None, h0, resets, [], *settings)
    states, _, final, _ = operator.solve(*call)
    final = final if slots > 1 else final.unsqueeze(1)
    states = states.flip(1) if options.reverse else states
    return states.unflatten(2, (-1, drives[0].shape[2])), final


def _linear(a: Tensor, b: Tensor, h0: Tensor | None, options: Options) -> Result:
    def run(b: Tensor, h0: Tensor | None) -> tuple[Tensor, Tensor]:
        flat = None if h0 is None else h0.unsqueeze(1).flatten(1).unsqueeze(1)
        drives = [x.unsqueeze(2).flatten(2) for x in (a, b)]
        states, final = _run("1", drives, flat, options)
        return states.reshape(a.shape), final.reshape(a.shape[0], *a.shape[2:])

    if options.coefficients:
        ones = a.new_ones(a.shape[0], *a.shape[2:])
        return run(torch.zeros_like(b), ones)[0], run(b, None)[0]
    states, final = run(b, h0)
    return (states, final) if options.return_state else states


def _sums(b: Tensor, h0: Tensor) -> Tensor:
    ones = b.new_ones((), dtype=common_dtype(b, h0)).expand_as(b)
    return cast(Tensor, linear_scan(ones, b, h0, backend="fused"))


def _blocks(a: Tensor, b: Tensor, h0: Tensor | None, options: Options) -> Result:
    """Blocks ``(B, T, n, k, k)`` on states ``(B, n, k, v)``: a lane for every column."""
    batch, length, n, k = a.shape[:4]

    def run(b: Tensor, h0: Tensor | None) -> tuple[Tensor, Tensor]:
        v = b.shape[-1]
        wide = a.unsqueeze(-1).expand(batch, length, n, k, k, v)
        drives = [wide[..., i, j, :].flatten(2) for i in range(k) for j in range(k)]
        drives += [b[..., i, :].flatten(2) for i in range(k)]
        first = None if h0 is None else h0.transpose(1, 2).flatten(2)
        states, final = _run(str(k), drives, first, options)
        shape = (batch, length, n, k, v)
        return (
            states.unflatten(3, (n, v)).transpose(2, 3).reshape(shape),
            final.unflatten(2, (n, v)).transpose(1, 2),
        )

    if options.coefficients:
        eye = torch.eye(k, dtype=a.dtype, device=a.device).expand(batch, n, k, k)
        return run(a.new_zeros(a.shape), eye)[0], run(b, None)[0]
    states, final = run(b, h0)
    return (states, final) if options.return_state else states


def _planes(m: Tensor, b: Tensor, h0: Tensor | None, options: Options) -> Any:
    """2×2 blocks on vectors."""
    first = None if h0 is None else h0.unsqueeze(-1)
    found = _blocks(m, b.unsqueeze(-1), first, options)
    if options.coefficients:
        return found[0], found[1].squeeze(-1)
    return tuple(x.squeeze(-1) for x in found) if isinstance(found, tuple) else found.squeeze(-1)


def _logarithms(
    log_coeffs: Tensor, log_values: Tensor, h0: Tensor | None, options: Options
) -> Result:
    if h0 is None:
        h0, log_values = selecting_exp(log_values[:, 0].double()), log_values[:, 1:]
    states, final = _run("log", [log_coeffs, log_values], h0.unsqueeze(1), options)
    return (states.squeeze(2), final.squeeze(1)) if options.return_state else states.squeeze(2)


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
