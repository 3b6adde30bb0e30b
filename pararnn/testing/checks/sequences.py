"""Clauses about time: causality, streaming, resets, lengths."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn

from pararnn import NewtonConfig

from ..context import Context, converted, error, tolerance
from ..reference import amplification, apart, loop, start
from . import checks
from .solving import name

WAYS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("auto", {"method": "auto"}),
    ("sequential", {"method": "sequential"}),
    ("newton", {"method": "newton"}),
    ("newton, exact", {"method": "newton", "config": NewtonConfig(jacobian="exact")}),
    ("shooting", {"method": "shooting"}),
    ("shooting, chunks of 4", {"method": "shooting", "config": NewtonConfig(chunk_length=4)}),
    (
        "shooting, Picard, chunks of 6",
        {"method": "shooting", "config": NewtonConfig(chunk_length=6, jacobian="none")},
    ),
)


@checks("causality")
def causality(ctx: Context) -> None:
    linear = getattr(ctx.cell(), "jac_structure", "") == "linear"
    length = 61 if linear else 29  # a scan of many steps is in chunks
    for dtype in ctx.wide_dtypes():
        for gain, _ in ((g, r) for g in (1.0, 3.0) for r in ctx.rounds()):
            cell = converted(ctx.cell(gain=gain), dtype)
            x, h0 = ctx.inputs(cell, 3, length), ctx.state(cell, 3)
            for label, options in WAYS:
                given = x.clone().requires_grad_()
                states = ctx.api.solve(cell, given, h0=h0, **options).states
                for cut, size in ((1, 5.0), (10, 5.0), (10, 1e30), (length - 1, 5.0)):
                    later = x.clone()
                    later[:, cut:] = size * ctx.inputs(cell, 3, length - cut)
                    other = ctx.api.solve(cell, later, h0=h0, **options).states
                    ctx.same_bits(f"prefix, {label}", other[:, :cut], states[:, :cut])
                (leak,) = torch.autograd.grad(states[:, :10].sum(), given, retain_graph=True)
                ctx.within("gradient of the prefix on later inputs", leak[:, 10:].abs().max(), 0.0)


@checks("streaming")
def streaming(ctx: Context) -> None:
    length = 31
    for dtype in ctx.wide_dtypes():
        for _ in ctx.rounds():
            wide = ctx.cell()
            x, h0 = ctx.inputs(wide, 3, length), ctx.state(wide, 3)
            kappa = amplification(wide, loop(wide, x, h0), h0, x)
            cell, x, h0 = converted(wide, dtype), x.to(dtype), h0.to(dtype)
            bound = tolerance(dtype, kappa)
            for label, options in WAYS:
                whole = ctx.api.solve(cell, x, h0=h0, **options)
                for cuts in ((0, 7, 8, 20, length), (0, 16, length)):
                    pieces, carry = [], h0
                    for begin, end in itertools.pairwise(cuts):
                        part = ctx.api.solve(cell, x[:, begin:end], h0=carry, **options)
                        pieces.append(part.states)
                        carry = part.final_state
                    gap = error(torch.cat(pieces, 1), whole.states)
                    ctx.within(f"pieces − whole, {label}, {name(dtype)}", gap, bound)
                    gap = error(carry, whole.final_state)
                    ctx.within(f"carried state − final state, {name(dtype)}", gap, bound)
            layer_streaming(ctx, cell, x, bound)


def layer_streaming(ctx: Context, cell: nn.Module, x: Tensor, bound: float) -> None:
    """``ParaRNN.step`` in a loop gives what ``forward`` gives."""
    if not hasattr(cell, "spec"):
        return
    layer = ctx.api.layer(cell)
    x, more = apart(cell, x)
    output, final = layer(x, **more)
    state, outputs = None, []
    for t in range(x.shape[1]):
        y, state = layer.step(x[:, t], state, **{k: v[:, t] for k, v in more.items()})
        outputs.append(y)
    ctx.within("ParaRNN.step − forward", error(torch.stack(outputs, 1), output), bound)
    state = torch.stack(tuple(state)) if not isinstance(state, Tensor) else state
    ctx.within("ParaRNN.step − forward, h_n", error(state.reshape(final.shape), final), bound)


@checks("resets")
def resets(ctx: Context) -> None:
    length = 26
    for dtype in ctx.wide_dtypes():
        for _ in ctx.rounds():
            wide = ctx.cell()
            x, h0 = ctx.inputs(wide, 4, length), ctx.state(wide, 4)
            kappa = amplification(wide, loop(wide, x, h0), h0, x)
            cell, x, h0 = converted(wide, dtype), x.to(dtype), h0.to(dtype)
            bound = tolerance(dtype, kappa)
            marks = torch.rand(4, length, generator=ctx.generator) < 0.15
            marks[0] = False  # one row without, one that ignores h0, two at and beside an edge
            marks[1, 0] = True
            marks[2, 12], marks[3, 13] = True, True
            marks = marks.to(ctx.device)
            expected = separately(cell, x, h0, marks)
            ctx.within("loop with resets − separate runs",
                       error(loop(cell, x, h0, marks), expected), bound)  # fmt: skip
            for label, options in WAYS:
                given, initial = x.clone().requires_grad_(), h0.clone().requires_grad_()
                states = ctx.api.solve(cell, given, h0=initial, resets=marks, **options).states
                ctx.within(f"{label}, {name(dtype)}", error(states, expected), bound)
                leaks(ctx, states, given, initial, marks)
            layers_reset(ctx, cell, x, h0, marks, expected, bound)
            poisoned(ctx, cell, h0)
            for function in ("sequential_apply", "newton_apply", "shooting_apply"):
                states = getattr(ctx.api, function)(cell, x, h0=h0, resets=marks)
                ctx.within(f"{function}, {name(dtype)}", error(states, expected), bound)


def layers_reset(
    ctx: Context,
    cell: nn.Module,
    x: Tensor,
    h0: Tensor,
    marks: Tensor,
    states: Tensor,
    bound: float,
) -> None:
    """A layer around the cell, and the cell called as a layer, restart where it does."""
    if not hasattr(cell, "spec"):
        return
    x, more = apart(cell, x)
    wanted = cell.output(states, x)
    output, _ = ctx.api.layer(cell)(x, h0.unsqueeze(0), resets=marks, **more)
    ctx.within("a layer with resets − separate runs", error(output, wanted), bound)
    if hasattr(cell, "stream"):
        output = cell(x, h0, *more.values(), resets=marks)
        ctx.within("a mixer with resets − separate runs", error(output, wanted), bound)


def poisoned(ctx: Context, cell: nn.Module, h0: Tensor) -> None:
    """Nothing of a bad number is left after a reset, nor in a gradient."""
    row, reset, length = 3, 37, 61
    x = ctx.inputs(cell, 4, length)
    marks = torch.zeros(4, length, dtype=torch.bool, device=ctx.device)
    marks[row, reset] = True
    for label, options in WAYS:
        clean = ctx.api.solve(cell, x, h0=h0, resets=marks, **options).states
        for poison in (float("nan"), float("inf")):
            given = x.clone()
            given[row, reset - 5, : cell.d_in] = poison  # no time gap: clause 28 has its rules
            given.requires_grad_()
            states = ctx.api.solve(cell, given, h0=h0, resets=marks, **options).states
            ctx.same_bits(
                f"{poison} before a reset, {label}", states[row, reset:], clean[row, reset:]
            )
            if options["method"] == "sequential":
                continue
            (gradient,) = torch.autograd.grad(states[row, reset:].sum(), given)
            ctx.within("gradient before a reset", gradient[row, :reset].abs().sum(), 0.0)
            ctx.require(
                bool(gradient[row, reset:].isfinite().all()),
                f"{label}, {poison}: got a gradient that is not finite after a reset",
            )


def separately(cell: nn.Module, x: Tensor, h0: Tensor, marks: Tensor) -> Tensor:
    """Every stretch between resets as a sequence of its own."""
    rows = []
    for row in range(x.shape[0]):
        cuts = [0, *[t for t in range(1, x.shape[1]) if marks[row, t]], x.shape[1]]
        parts = []
        for begin, end in itertools.pairwise(cuts):
            fresh = begin > 0 or bool(marks[row, 0])
            initial = torch.zeros_like(h0[row : row + 1]) if fresh else h0[row : row + 1]
            parts.append(loop(cell, x[row : row + 1, begin:end], initial))
        rows.append(torch.cat(parts, 1))
    return torch.cat(rows).detach()


def leaks(ctx: Context, states: Tensor, x: Tensor, h0: Tensor, marks: Tensor) -> None:
    """No gradient crosses a reset: exactly zero before the last one, and in h0."""
    gx, gh = torch.autograd.grad(states[:, -1].sum(), (x, h0))
    for row in range(x.shape[0]):
        where = [t for t in range(x.shape[1]) if marks[row, t]]
        if where:
            ctx.within("gradient across a reset, x", gx[row, : where[-1]].abs().sum(), 0.0)
            ctx.within("gradient across a reset, h0", gh[row].abs().max(), 0.0)


@checks("variable-length")
def variable_length(ctx: Context) -> None:
    lengths = (1, 5, 13, 24)
    for dtype in ctx.wide_dtypes():
        for _ in ctx.rounds():
            wide = ctx.cell()
            x, h0 = ctx.inputs(wide, len(lengths), max(lengths)), ctx.state(wide, len(lengths))
            kappa = amplification(wide, loop(wide, x, h0), h0, x)
            cell, x, h0 = converted(wide, dtype), x.to(dtype), h0.to(dtype)
            for row, n in enumerate(lengths):
                x[row, n:] = 100 * ctx.inputs(cell, 1, max(lengths) - n)[0]
            valid = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
            valid = valid.to(ctx.device)
            for label, options in WAYS:
                given = x.clone().requires_grad_()
                states = ctx.api.solve(cell, given, h0=h0, **options).states
                for row, n in enumerate(lengths):
                    alone = loop(cell, x[row : row + 1, :n], h0[row : row + 1])
                    gap = error(states[row : row + 1, :n], alone)
                    ctx.within(f"{label}, {name(dtype)}", gap, tolerance(dtype, kappa))
                (gradient,) = torch.autograd.grad(states[valid].square().sum(), given)
                ctx.within("gradient of padding", gradient[~valid].abs().sum(), 0.0)
            layer_lengths(ctx, cell, x, h0, torch.tensor(lengths, device=ctx.device), valid)
    if torch.bfloat16 in ctx.dtypes:
        unrounded_finals(ctx, torch.tensor(lengths, device=ctx.device))


def layer_lengths(
    ctx: Context, cell: nn.Module, x: Tensor, h0: Tensor, lengths: Tensor, valid: Tensor
) -> None:
    """A layer that is told the lengths does not look at padding, whatever it holds."""
    layer, found = ctx.api.layer(cell), []
    for filler in (0.0, 1e3, float("nan"), float("inf")):
        given = x.clone()
        given[~valid] = filler
        given.requires_grad_()
        inner, more = apart(cell, given)
        output, h_n = layer(inner, h0[None], lengths=lengths, **more)
        loss = output.square().sum() + h_n.square().sum()
        leaves = (given, *cell.parameters())
        gradients = torch.autograd.grad(loss, leaves, materialize_grads=True)
        ctx.within("gradient of padding, lengths", gradients[0][~valid].abs().sum(), 0.0)
        ctx.within("output in padding", output[~valid].abs().sum(), 0.0)
        found.append((output, h_n, *gradients))
    for other in found[1:]:
        for first, second in zip(found[0], other, strict=True):
            ctx.same_bits("what the padding holds", second, first)
    for row, n in enumerate(lengths.tolist()):
        states = loop(cell, x[row : row + 1, :n], h0[row : row + 1])
        gap = error(found[0][1][0, row], states[0, -1])
        ctx.within(f"final state of a row, {name(x.dtype)}", gap, tolerance(x.dtype, 10.0))


def unrounded_finals(ctx: Context, lengths: Tensor) -> None:
    """``h_n`` of padded rows in bfloat16: that of a float32 cell on the same drives."""
    cell = converted(ctx.cell(), torch.bfloat16)
    if not hasattr(cell, "drives"):
        return
    twin = converted(cell, torch.float32)
    x, more = apart(cell, ctx.inputs(cell, len(lengths), int(lengths.max())))
    x = x.contiguous()  # as a layer makes it: a product of other strides may be rounded otherwise
    u = cell.drives(x).detach().float()
    _, h_n = ctx.api.layer(cell)(x, lengths=lengths, **more)
    ctx.require(h_n.dtype == torch.float32, f"h_n: got {h_n.dtype}, expected torch.float32")
    for row, n in enumerate(lengths.tolist()):
        h = twin.init_state(1)
        for t in range(n):
            now = {key: value[row : row + 1, t].float() for key, value in more.items()}
            h = twin.step(h, drives=u[row : row + 1, t], **now)
        gap = error(h_n[0, row], h[0])
        ctx.within("final state in bfloat16 − in float32", gap, tolerance(torch.float32, 10.0))


@checks("shapes")
def shapes(ctx: Context) -> None:
    lengths = (0, 1, 2, 3, 7, 16, 31) if not ctx.exhaustive else range(67)
    for dtype in ctx.wide_dtypes():
        wide = ctx.cell()
        cell = converted(wide, dtype)
        for batch, length in [*((2, n) for n in lengths), (0, 0), (0, 5), (1, 11)]:
            x, h0 = ctx.inputs(cell, batch, length), ctx.state(cell, batch)
            expected = loop(cell, x, h0).detach()
            for label, options in WAYS:
                place = f"B={batch}, T={length}, {label}"
                given, initial = x.clone().requires_grad_(), h0.clone().requires_grad_()
                solution = ctx.api.solve(cell, given, h0=initial, **options)
                for what, got, wanted in (
                    ("states", solution.states, expected),
                    ("final state", solution.final_state, expected[:, -1] if length else h0),
                ):
                    ctx.require(
                        got.shape == wanted.shape and got.dtype == dtype,
                        f"{place}, {what}: got {tuple(got.shape)} {got.dtype}, expected "
                        f"{tuple(wanted.shape)} {dtype}",
                    )
                    ctx.within(f"values, {name(dtype)}", error(got, wanted), tolerance(dtype, 1.0))
                total = solution.states.sum() + solution.final_state.sum()
                gx, gh = torch.autograd.grad(total, (given, initial), allow_unused=length == 0)
                ctx.require(
                    gh is not None and bool(gh.isfinite().all()),
                    f"{place}: got no finite gradient of h0",
                )
                ctx.require(gx is None or gx.shape == x.shape, f"{place}: gradient of x")
            zero = ctx.api.solve(cell, x).final_state
            ctx.require(zero.shape == (batch, *cell.state_shape), f"T={length} without h0")
            ctx.require(start(cell, x).dtype == zero.dtype, "dtype of the final state without h0")
