"""Checks of the scans and mixers of the linear family against float64 loops.

Part of `gpu_linear.py`, which tells how tolerances are found.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import harness
import torch
from harness import DTYPES, poison, unit
from linear_problems import LAYERS, mixer, scan_named
from torch import Tensor

ROUNDINGS = 8
LOOSE = {"float32": 32, "bfloat16": 2}  # roundings of the largest entry that a mixer may be off

# -- scans -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One scan; ``coefficients`` says how they are drawn, ``state`` whether the loss depends on the
    final state, too."""

    scan: str
    B: int
    T: int
    n: int
    coefficients: str = "mixed"
    h0: bool = True
    resets: bool = False
    reverse: bool = False
    strided: bool = False
    state: bool = False

    def __str__(self) -> str:
        options = [k for k in ("h0", "resets", "reverse", "strided", "state") if getattr(self, k)]
        return " ".join([f"{self.B}×{self.T}×{self.n}", self.coefficients, *options])


CASES = (
    Case("linear_scan", 3, 257, 65, resets=True, state=True),
    Case("linear_scan", 2, 2051, 33, "near 1", state=True),
    Case("linear_scan", 2, 1, 7),
    Case("linear_scan", 2, 130, 40, resets=True, reverse=True),
    Case("linear_scan", 1, 8011, 24, "sigmoid", h0=False, resets=True),
    Case("linear_scan", 3, 96, 48, strided=True),
    Case("linear_scan", 70, 259, 129, "sigmoid"),
    Case("matrix_scan", 3, 257, 17, resets=True, state=True),
    Case("matrix_scan", 2, 2051, 5, "near 1"),
    Case("matrix_scan", 2, 1, 7),
    Case("matrix_scan", 2, 130, 40, resets=True, reverse=True),
    Case("parallel_scan_log", 3, 257, 65, "sigmoid", resets=True, state=True),
    Case("parallel_scan_log", 2, 2051, 33, "near 1", reverse=True),
)


def operators(case: Case) -> Tensor:
    """``(B, T, n, k, k)`` in float64: with ``mixed``, some are 0 and some channels are 0, 1, −1 and
    1.01 all the time."""
    size = 2 if case.scan == "matrix_scan" else 1
    shape = (case.B, case.T, case.n)
    if size == 1:
        turned = torch.ones(*shape, 1, 1)
    else:
        angle = 6.3 * torch.rand(shape)
        c, s = angle.cos(), angle.sin()
        turned = torch.stack([torch.stack([c, -s], -1), torch.stack([s, c], -1)], -2)
    if case.coefficients == "sigmoid":
        scale = torch.randn(shape).sigmoid()
    elif case.coefficients == "near 1":
        scale = 1 - 1e-3 * torch.rand(shape)
    else:
        scale = 1.2 * torch.randn(shape).tanh() * (torch.rand(shape) > 0.05)
    A = turned * scale[..., None, None]
    if case.coefficients == "mixed":
        for channel, value in enumerate((0.0, 1.0, -1.0, 1.01)):
            A[:, :, channel] = value * torch.eye(size)
    return A.double()


def walk(A: Tensor, b: Tensor, start: Tensor) -> Tensor:
    """States of ``h_t = A_t h_{t−1} + b_t``, one step after the other."""
    h, states = start, []
    for t in range(b.shape[1]):
        h = torch.einsum("bnij,bnj->bni", A[:, t], h) + b[:, t]
        states.append(h)
    return torch.stack(states, 1)


def oracle(
    A: Tensor, b: Tensor, h0: Tensor, resets: Tensor, bar: Tensor, state_bar: Tensor, half: float
) -> dict[str, tuple[Tensor, Tensor]]:
    """States and gradients of a scan in float64, each with the bound of its error; ``half`` is the
    rounding of what is stored."""
    u, zero = unit(torch.float32), torch.zeros_like(h0)
    A = A.masked_fill(resets[..., None, None, None], 0)
    h = walk(A, b, h0)
    error = walk(A.abs(), ROUNDINGS * u * walk(A.abs(), b.abs(), h0.abs()), zero)
    before = torch.cat([h0.unsqueeze(1), h[:, :-1]], 1)
    before_error = torch.cat([zero.unsqueeze(1), error[:, :-1]], 1) + half * before.abs()

    g = bar.clone()
    g[:, -1] += state_bar
    back = torch.cat([A[:, 1:], torch.zeros_like(A[:, :1])], 1).mT.flip(1)
    adjoint = walk(back, g.flip(1), zero).flip(1)
    size = walk(back.abs(), g.abs().flip(1), zero)
    adjoint_error = walk(back.abs(), ROUNDINGS * u * size, zero).flip(1)
    size = size.flip(1)

    def outer(x: Tensor, y: Tensor) -> Tensor:
        kept = (~resets)[..., None, None, None]
        return kept * x.unsqueeze(-1) * y.unsqueeze(-2)

    into = A[:, 0].mT
    dA = outer(adjoint, before)
    dA_error = outer(adjoint_error, before.abs()) + outer(adjoint.abs(), before_error)
    return {
        "states": (h, error + half * h.abs()),
        "state": (h[:, -1], error[:, -1]),
        "a": (dA, dA_error + (2 * u + half) * dA.abs()),
        "b": (adjoint, adjoint_error + half * adjoint.abs()),
        "h0": (
            torch.einsum("bnij,bnj->bni", into, adjoint[:, 0]),
            torch.einsum(
                "bnij,bnj->bni", into.abs(), adjoint_error[:, 0] + ROUNDINGS * u * size[:, 0]
            ),
        ),
    }


def check_scan(case: Case, dtype: str, device: str, backend: str) -> dict[str, Any]:
    """Errors by result."""
    torch.manual_seed(sum(map(ord, str(case))))
    kind = DTYPES[dtype]
    half = unit(kind) if kind != torch.float32 else 0.0
    A = operators(case)
    b = torch.randn(A.shape[:-1])
    h0 = torch.randn(case.B, *A.shape[2:-1]) * case.h0
    log = case.scan == "parallel_scan_log"
    if log:
        A, b, h0 = A.log(), b.abs().log(), h0.abs()
        A[:, ::5] = -torch.inf
    A, b = A.to(kind), b.to(kind)
    resets = (torch.rand(case.B, case.T) < 0.03) & case.resets
    bar = torch.randn(b.shape).to(kind)
    state_bar = torch.randn(h0.shape) * case.state

    def forwards(x: Tensor) -> Tensor:
        return x.flip(1) if case.reverse else x

    wide_A, wide_b = (forwards(x.double().exp() if log else x.double()) for x in (A, b))
    wanted = oracle(
        wide_A,
        wide_b,
        h0.double(),
        forwards(resets),
        forwards(bar.double()),
        state_bar.double(),
        half,
    )
    if log:  # the derivative by a logarithm
        for name, x in (("a", wide_A), ("b", wide_b)):
            wanted[name] = (wanted[name][0] * x, wanted[name][1] * x)
    if case.reverse:
        for name in ("states", "a", "b"):
            wanted[name] = (wanted[name][0].flip(1), wanted[name][1].flip(1))

    def public(x: Tensor) -> Tensor:
        """A matrix or a vector of one number is that number."""
        if case.scan == "matrix_scan":
            return x
        return x.reshape(x.shape[: 3 if x.ndim > 3 else 2])

    def put(x: Tensor) -> Tensor:
        x = public(x)
        if case.strided and x.ndim > 2:
            x = x.transpose(1, 2).contiguous().to(device).transpose(1, 2)
        return x.to(device).detach().requires_grad_()

    leaves = {"a": put(A), "b": put(b)} | ({"h0": put(h0)} if case.h0 else {})
    poison(device, b.numel())
    states, state = scan_named(case.scan)(
        leaves["a"],
        leaves["b"],
        leaves.get("h0"),
        resets=resets.to(device) if case.resets else None,
        reverse=case.reverse,
        backend=backend,
        return_state=True,
    )
    poison(device, b.numel())
    outputs, cotangents = [states], [public(bar).to(device)]
    if case.state:
        outputs.append(state)
        cotangents.append(public(state_bar).to(device, state.dtype))
    grads = torch.autograd.grad(outputs, list(leaves.values()), cotangents)
    found = {"states": states, "state": state, **dict(zip(leaves, grads, strict=True))}
    return {
        name: compared(value, public(wanted[name][0]), public(wanted[name][1]))
        for name, value in found.items()
    }


def compared(value: Tensor, exact: Tensor, tolerance: Tensor | float) -> dict[str, float]:
    """As :func:`harness.compared`; what is smaller than 1e-30 may be zero."""
    return harness.compared(value, exact, tolerance + 1e-30)


# -- mixers ----------------------------------------------------------------------------------------


CHECKED = (*LAYERS, "MinLSTM", "SignedMinGRU, decay", "RotationMinGRU, decay")


@dataclass
class Sequence:
    """Inputs and cotangents of a mixer, on the CPU."""

    x: Tensor
    h0: Tensor | None
    gaps: Tensor | None
    bar: Tensor
    state_bar: Tensor


def looped(cell: Any, data: Sequence, dtype: torch.dtype) -> dict[str, Tensor]:
    """Output, state and gradients by a loop over the hand-written steps in a dtype."""
    cell = copy.deepcopy(cell).to(dtype)
    x = data.x.to(dtype).requires_grad_()
    leaves, names = [x, *cell.parameters()], ["x", *(n for n, _ in cell.named_parameters())]
    h = cell.init_state(x.shape[0])
    if data.h0 is not None:
        start = data.h0.to(cell.state_dtype).requires_grad_()
        h = cell.unflat(start)
        leaves, names = [*leaves, start], [*names, "h_0"]
    outputs = []
    for t in range(x.shape[1]):
        dt = None if data.gaps is None else data.gaps[:, t].to(cell.state_dtype)
        h = cell.step(h, x[:, t], dt=dt)
        outputs.append(cell.output(h, x[:, t]).to(cell.output_dtype))
    y, state = torch.stack(outputs, 1), cell.flat(h)
    return gathered(y, state, leaves, names, data)


def run(cell: Any, data: Sequence, device: str) -> dict[str, Tensor]:
    """The same by the mixer's own way."""
    cell = copy.deepcopy(cell).to(device)
    x = data.x.to(device, cell.in_proj.weight.dtype).requires_grad_()
    leaves, names = [x, *cell.parameters()], ["x", *(n for n, _ in cell.named_parameters())]
    start = None
    if data.h0 is not None:
        start = data.h0.to(device).requires_grad_()
        leaves, names = [*leaves, start], [*names, "h_0"]
    gaps = None if data.gaps is None else data.gaps.to(device)
    poison(device, x.shape[1] * cell.in_proj.out_features)
    y, state = cell(x, start, gaps, return_state=True)
    poison(device, x.shape[1] * cell.in_proj.out_features)
    return gathered(y, state.flatten(1), leaves, names, data)


def gathered(
    y: Tensor, state: Tensor, leaves: list[Tensor], names: list[str], data: Sequence
) -> dict[str, Tensor]:
    bars = [data.bar.to(y.device, y.dtype), data.state_bar.to(state.device, state.dtype)]
    grads = torch.autograd.grad([y, state], leaves, bars, allow_unused=True)
    found = {"output": y, "state": state, **dict(zip(names, grads, strict=True))}
    return {k: v.detach().cpu().double() for k, v in found.items() if v is not None}


def check_mixer(name: str, dtype: str, start: str, device: str) -> dict[str, Any]:
    torch.manual_seed(sum(map(ord, name + start)))
    kind, d_in, width = DTYPES[dtype], 16, 72
    B, T = 3, 131
    cell = mixer(name, d_in, width, dtype=kind)
    with torch.no_grad():
        cell.in_proj.weight.normal_()
        cell.in_proj.bias.zero_()
    picked = torch.nn.functional.one_hot(torch.randint(d_in, (B, T)), d_in)
    scale = torch.tensor([1.0, -1.0, 0.5, -0.5, 2.0])[torch.randint(5, (B, T))]
    gaps = None
    if cell.spec.gap is not None:
        gaps = 3 * torch.rand(B, T) * (torch.rand(B, T) > 0.2)
        gaps[0, T // 2] = 1e10
    data = Sequence(
        x=picked * scale.unsqueeze(-1),
        h0=torch.rand(B, cell.flat_width) if start == "given start" else None,
        gaps=gaps,
        bar=torch.randn(B, T, width).to(kind),
        state_bar=torch.randn(B, cell.flat_width),
    )
    exact, same = looped(cell, data, torch.float64), looped(cell, data, kind)
    found = run(cell, data, device)
    errors = {}
    for key, value in exact.items():
        allowed = 4 * float((same[key] - value).abs().max())
        allowed += LOOSE[dtype] * unit(kind) * float(value.abs().max())
        errors[key] = compared(found[key], value, allowed)
    return errors
