"""The cases that `gpu_checks.py` checks: small ones, and one of more than 2³¹ numbers."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from gpu_checks import CELLS, DTYPES, LAYOUTS, Case, Data, make, tolerances
from harness import Row, compared, passes

LENGTHS = (0, 1, 2, 7, 31, 1009, 2051)
WIDTHS = (1, 3, 31, 100)


def jobs() -> Iterator[list[Case]]:
    """All cases, grouped by the kernels they need; those that compile longest first."""
    two = ("ParaGRU[diag]", "ParaLSTM")
    for name in sorted(CELLS, key=lambda name: "SLSTM" not in name):
        cut = {"h0": True, "resets": True}
        yield [Case(name, 3, 257, 31, **cut, chunks=c) for c in ("corrected", "repaired")]
        yield [Case(name, 3, 257, 31, "float64", **cut, chunks=c) for c in ("one", "corrected")]
        for dtype in ("bfloat16", "float16"):
            yield [Case(name, 3, 257, 64, dtype, h0=True, chunks=c) for c in ("one", "corrected")]
        yield [Case(name, 3, 257, 64, grad="states", chunks=c) for c in ("one", "auto")]
    for name in two:
        yield [Case(name, 3, 2051, 1024, chunks=c, grad="states") for c in ("one", "many")]
        yield [Case(name, 3, T, 100, chunks="many", h0=True) for T in LENGTHS]
        yield [Case(name, 3, T, 100, chunks="one", h0=True) for T in LENGTHS]
        yield [Case(name, 3, 257, 31, "float64", h0=True, chunks=c) for c in ("one", "corrected")]
        yield [Case(name, 3, 1009, 1024, "bfloat16", grad="output", chunks="many")]
        for D in WIDTHS:
            yield [Case(name, 3, 257, D, chunks="corrected")]
        for grad in ("sum", "final", "output"):
            yield [Case(name, 3, 257, 64, h0=True, grad=grad, chunks=c) for c in ("one", "many")]
        yield [Case(name, 70_000, 5, 3, h0=True, chunks="one", grad="states")]
        yield [Case(name, 70_000, 40, 1, chunks="corrected")]
        for layout in ("time-major", "strided", "one sample", "one step", "channel-major"):
            yield [Case(name, 3, 257, 31, layout=layout, h0=True, chunks="corrected")]
    for form in ("published", "consistent"):
        yield [Case(f"ParaCfC[{form}]", 3, 257, 64, layout="time-major", chunks="many")]
    yield [Case("ParaNLRU", 3, 257, 31, layout="time-major", chunks="many")]
    yield [Case("ParaSLSTM[exp]", 3, 257, 100, "bfloat16", resets=True, chunks="many")]


def small_jobs() -> Iterator[list[Case]]:
    """A few small cases, for a machine without a GPU."""
    yield [Case("ParaGRU[diag]", 2, T, 3, h0=True, chunks="many") for T in (0, 1, 2, 31)]
    for layout in LAYOUTS:
        yield [Case("ParaGRU[diag]", 2, 40, 3, layout=layout, resets=True, chunks="corrected")]
    for name in CELLS:
        for dtype in DTYPES:
            yield [Case(name, 2, 60, 5, dtype, h0=True, chunks="corrected")]
        yield [Case(name, 2, 60, 5, resets=True, chunks="repaired", grad="sum")]
        yield [Case(name, 2, 60, 5, chunks="one", grad="output")]
        yield [Case(name, 2, 60, 5, chunks="one", grad="final")]


def giant(device: str, total: int, sequences: int = 3, width: int = 1024) -> Row:
    """A bfloat16 problem whose states alone are more than 2³¹ numbers; windows of it are compared
    with the float64 loop, from the stored state before the window on. Gradients (of the sum of the
    states) are those of a window's first half: what is later than its end no longer reaches it."""
    from pararnn import NewtonConfig, solve

    case = Case("ParaGRU[diag]", sequences, total, width, "bfloat16", grad="sum")
    torch.manual_seed(0)
    cell = make(case.cell, width, dtype=torch.bfloat16)
    with torch.no_grad():
        for m in cell.spec.map_list:
            getattr(cell, m.name).uniform_(-0.45, 0.45)
    there = copy.deepcopy(cell).to(device)
    draw = torch.Generator(device).manual_seed(0)
    u = torch.empty(sequences, total, 3 * width, dtype=torch.bfloat16, device=device)
    for row in u:
        row.normal_(generator=draw)
    u.requires_grad_()
    found = solve(there, drives=u, config=NewtonConfig(backend="fused"))
    one = torch.ones((), dtype=u.dtype, device=device).expand(found.states.shape)
    (u_bar,) = torch.autograd.grad(found.states, u, one)
    states = found.states.detach()
    numbers = states.numel()
    window = min(256, total // 4)
    # At the first and last steps, and where the drives and the states pass 2³¹ numbers.
    ends = {(sequences - 1, total), (0, window)}
    for whole in (u, states):
        place = min(2**31, whole.numel() - 1) // whole.shape[2]
        ends.add((place // total, min(max(place % total + window // 2, window), total)))
    errors = []
    for b, end in sorted(ends):
        begin = end - window
        first = states[b : b + 1, begin - 1].cpu().float() if begin else None
        part = Case(case.cell, 1, window, width, "bfloat16", h0=first is not None, grad="sum")
        piece = Data(
            u.detach()[b : b + 1, begin:end].cpu(), first, None, None,
            torch.ones((), dtype=torch.bfloat16).expand(1, window, width), None,
        )  # fmt: skip
        true, allowed = tolerances(cell, part, piece, truncated=device == "cpu")
        half = window if end == total else window // 2
        # The window starts from a rounded state: that error, too, is half a unit in the last place.
        start = torch.finfo(torch.bfloat16).eps / (1 if device == "cpu" else 2) if begin else 0.0
        for name, got, stop in (
            ("states", states[b : b + 1, begin:end], window),
            ("grad drives", u_bar[b : b + 1, begin:end], half),
        ):
            slack = allowed[name][:, :stop] + start * float(true[name].abs().max())
            judged = compared(got[:, :stop], true[name][:, :stop], slack)
            errors.append({"what": name, "sequence": b, "end": end, **judged})
    shape, ok = [sequences, total, width], passes(errors)
    return {"shape": shape, "dtype": "bfloat16", "states": numbers, "ok": ok, "errors": errors}
