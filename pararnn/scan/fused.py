"""Scans in one kernel call: the channelwise kernels, with the recurrence itself as their Spec.

``h_t = A_t h_{t−1} + b_t`` is a Spec like any other, with one slot for every entry of a block and a
drive for every number of ``A_t`` and ``b_t``. Each is a tensor of its own, of any strides, so that
nothing is packed. A second derivative takes the eager path.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from .._checks import state_dtype
from .._operators import Operator
from ..kernels import missing
from ..kernels.plan import Plan, plan
from ..kernels.support import launcher, on_device_of, processors
from ..spec import Spec, exp
from .autograd import scan
from .backend import Fused, register_fused
from .inputs import Options, common_dtype
from .linear import Result, linear_scan
from .log import exp as selecting_exp

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


class Call(NamedTuple):
    """Arguments of ``pararnn::scan``, and the first ones of its backward pass."""

    kind: str
    drives: Sequence[Tensor]
    h0: Tensor | None
    resets: Tensor | None

    @property
    def spec(self) -> Spec:
        return scan_spec(self.kind)

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Samples, steps, slots and channels."""
        B, T, D = self.drives[0].shape
        return B, T, len(self.spec.slots), D

    @property
    def state(self) -> torch.dtype:
        """Dtype of states."""
        return torch.float64 if self.kind == "log" else state_dtype(self.drives[0].dtype)

    def prepared(self, backward: bool) -> tuple[Any, Plan]:
        """The same, as the kernels are launched with it, and how it is cut."""
        (B, T, _, D), u, wide = self.sizes, self.drives[0], self.kind == "log"
        size = 8 if wide else u.element_size()
        chosen = plan(self.spec, B, T, D, size, processors(u.device), backward=backward)
        problem = launcher().Problem(
            self.spec, tuple(self.drives), (), h0=self.h0, resets=self.resets, wide=wide
        )
        return problem, chosen


_CALL = "str kind, Tensor[] drives, Tensor? h0, Tensor? resets"


def _forward(*given: Any) -> tuple[Tensor, Tensor]:
    """States ``(B, T, S·D)`` and the last one ``(B, S, D)``."""
    call = Call(*given)
    if call.drives[0].numel() == 0:
        states, final = _empty(*given)
        return states, final.zero_() if call.h0 is None else final.copy_(call.h0)
    with on_device_of(call.drives[0]):
        states, _, final, _ = launcher().run_forward(*call.prepared(backward=False))
    return states, final


def _empty(*given: Any) -> tuple[Tensor, Tensor]:
    call = Call(*given)
    (B, T, S, D), u = call.sizes, call.drives[0]
    return u.new_empty(B, T, S * D), u.new_empty(B, S, D, dtype=call.state)


def _gradients(
    arguments: Sequence[Any],
    kept: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    needs: dict[str, bool],
) -> dict[str, Any]:
    call = Call(*arguments)
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        bars, start = _twice(call, *grads)
    else:
        bars, start = scan_backward(*call, *kept, *grads)
    return {"drives": list(bars), "h0": None if call.h0 is None else start}


def _twice(call: Call, grad: Tensor | None, final: Tensor | None) -> tuple[list[Tensor], Tensor]:
    """Gradients that can be differentiated again: those of the eager scan."""
    (B, T, S, D), drives, h0, dtype = call.sizes, call.drives, call.h0, call.state
    start = drives[0].new_zeros(B, S, D, dtype=dtype) if h0 is None else h0.to(dtype)
    with torch.enable_grad():
        start = start if start.requires_grad else start.detach().requires_grad_()
        given = [u if u.requires_grad else u.detach().requires_grad_() for u in drives]
        wide = [u.to(dtype) for u in given]
        if call.kind == "log":
            wide = [selecting_exp(u) for u in wide]
        op = torch.stack(wide[: S * S], 2).unflatten(2, (S, S))
        states = scan(op, torch.stack(wide[S * S :], 2), start, "block", resets=call.resets)
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


fused_scan = Operator(
    f"scan({_CALL}) -> (Tensor, Tensor)", _forward, _empty, gradients=_gradients, kept=(0,)
)


def _backward(*given: Any) -> tuple[list[Tensor], Tensor]:
    """Cotangents of the drives and of the start."""
    call, (states, grad, final) = Call(*given[:4]), given[4:]
    if call.drives[0].numel() == 0:
        bars, start = _empty_back(*given)
        return bars, start.zero_() if final is None else final.clone()
    others = states.new_empty(*states.shape[:2], 0, call.sizes[-1])
    with on_device_of(states):
        problem, chosen = call.prepared(backward=True)
        found, _, start, _ = launcher().run_adjoint(
            problem, chosen, states, others, grad, None, final
        )
    return list(found), start


def _empty_back(*given: Any) -> tuple[list[Tensor], Tensor]:
    _, start = _empty(*given[:4])
    return [u.new_empty(u.shape) for u in given[1]], start


scan_backward = Operator(
    f"scan_backward({_CALL}, Tensor states, Tensor? grad, Tensor? final) -> (Tensor[], Tensor)",
    _backward,
    _empty_back,
)


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
    start = None if h0 is None else h0.to(Call(kind, drives, h0, resets).state)
    states, final = fused_scan(kind, drives, start, resets)
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
