"""Clauses about the solver's answer: it satisfies the recurrence, and it is the right one."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from pararnn import NewtonConfig, NewtonDivergenceError, NewtonWarning

from ..context import ROUNDINGS, UNIT_ROUNDOFF, Context, box, converted, error, tolerance
from ..reference import (
    amplification,
    block_bidiagonal,
    jacobians,
    loop,
    shifted,
    sizes,
    start,
    stepwise,
)
from . import checks

LIMIT = {torch.float64: 1e-12, torch.float32: 1e-6}  # of the reported residual


def formed(cell: nn.Module, jacobian: str, chunk: int) -> bool:
    """Whether the solver carries this correction along chunks; else it refuses with an error."""
    if chunk == 1 or jacobian in ("auto", "none"):
        return True
    if not hasattr(cell, "spec"):
        return jacobian == "exact" and math.prod(cell.state_shape) <= 64
    return not (jacobian == "exact" and cell.jac_structure == "m2rnn")


def settings(
    cell: nn.Module, length: int, exhaustive: bool = False
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Ways to solve: every method, chunk lengths around the edges, every correction."""
    for method in ("auto", "sequential", "newton", "shooting"):
        yield method, {"method": method}
    lengths = {2, 5, length - 1, length + 9}
    if exhaustive:
        lengths |= {1, 3, 4, 7, 8, 11, 16, length // 2, length}
    for chunk in sorted(lengths):
        config = NewtonConfig(chunk_length=chunk)
        yield f"shooting, chunks of {chunk}", {"method": "shooting", "config": config}
    for jacobian in ("exact", "quasi", "none"):
        config = NewtonConfig(jacobian=jacobian)
        yield f"newton, {jacobian}", {"method": "newton", "config": config}
        if not formed(cell, jacobian, 4):
            continue
        config = NewtonConfig(jacobian=jacobian, chunk_length=4)
        yield f"shooting, {jacobian}", {"method": "shooting", "config": config}


def misfit(cell: nn.Module, previous: Tensor, x: Tensor, states: Tensor) -> float:
    """Largest ``|h_t − f(h_{t−1})|``, relative to the largest state of the row up to there."""
    stepped = stepwise(cell, previous, x).detach()
    size = sizes(torch.maximum(states.abs(), stepped.abs()), previous[:, 0])
    return float(((stepped - states).abs().flatten(2).amax(2) / size).max())


def largest_jacobian(cell: nn.Module, previous: Tensor, x: Tensor) -> float:
    """``max ‖J_t‖_∞`` along a trajectory."""
    return float(jacobians(cell, previous, x).abs().sum(-1).max())


@checks("residual")
def residual(ctx: Context) -> None:
    length = 29
    for dtype in ctx.wide_dtypes():
        for gain in (1.0, 12.0):
            for _ in ctx.rounds():
                cell = converted(ctx.cell(gain=gain), dtype)
                x, h0 = ctx.inputs(cell, 3, length), ctx.state(cell, 3)
                for label, options in settings(cell, length, ctx.exhaustive):
                    solution = ctx.api.solve(cell, x, h0=h0, **options)
                    states = solution.states.detach()
                    previous = shifted(states, h0)
                    gap = misfit(cell, previous, x, states)
                    stretch = max(1.0, largest_jacobian(cell, previous, x))
                    rounding = ROUNDINGS * UNIT_ROUNDOFF[dtype]
                    ctx.require(solution.converged, f"{label}, gain {gain}: got converged=False")
                    ctx.within(f"reported residual, {name(dtype)}", solution.residual, LIMIT[dtype])
                    ctx.within(
                        f"max|h_t − f(h_t−1)| / ‖J‖, {name(dtype)}",
                        gap / stretch,
                        solution.residual + rounding,
                    )
                    ctx.same_bits(
                        "final state − last state",
                        solution.final_state.detach(),
                        states[:, -1],
                    )


@checks("agreement")
def agreement(ctx: Context) -> None:
    # The cost model cuts the longer sequences into chunks, the shorter ones only if told to.
    for gain, batch, length in ((1.0, 3, 37), (2.5, 3, 37), (1.0, 2, 263), (2.5, 1, 263)):
        for _ in ctx.rounds():
            wide = ctx.cell(gain=gain)
            x, h0 = ctx.inputs(wide, batch, length), ctx.state(wide, batch)
            kappa = amplification(wide, loop(wide, x, h0), h0, x)
            ctx.measured["κ"] = max(kappa, ctx.measured.get("κ", 0.0))
            for dtype in ctx.wide_dtypes():
                cell = converted(wide, dtype)
                given, initial = x.to(dtype), h0.to(dtype)
                compare(ctx, cell, given, initial, tolerance(dtype, kappa))


def compare(ctx: Context, cell: nn.Module, x: Tensor, h0: Tensor, bound: float) -> None:
    reference = loop(cell, x, h0).detach()
    length = x.shape[1]
    for label, options in settings(cell, length, ctx.exhaustive):
        if length > 100 and label not in ("auto", "newton", "shooting"):
            continue
        gap = error(ctx.api.solve(cell, x, h0=h0, **options).states, reference)
        with ctx.explained(f"{label}, T={length}"):
            ctx.within(name(x.dtype), gap, bound)
    zero = loop(cell, x).detach()
    for function in ("sequential_apply", "newton_apply", "shooting_apply"):
        for start_state, wanted in ((None, zero), (h0, reference)):
            gap = error(getattr(ctx.api, function)(cell, x, h0=start_state), wanted)
            ctx.within(f"{function}, {name(x.dtype)}", gap, bound)


@checks("linear-solve")
def linear_solve(ctx: Context) -> None:
    length, batch = 7, 2
    for gain, _ in ((g, r) for g in (1.0, 2.5) for r in ctx.rounds()):
        cell = ctx.cell(gain=gain)
        x, h0 = ctx.inputs(cell, batch, length), ctx.state(cell, batch)
        # The adjoint: DFᵀ μ = w by a dense solver, then one local product for every gradient.
        states = loop(cell, x, h0).detach()
        previous = shifted(states, h0)
        blocks = jacobians(cell, previous, x)
        w = ctx.like(cell, ctx.normal(*states.shape))
        dense = block_bidiagonal(blocks)
        mu = torch.linalg.solve(dense.mT, w.reshape(batch, -1, 1))[..., 0]
        local = x.clone().requires_grad_()
        (stepwise(cell, previous, local) * mu.reshape(states.shape)).sum().backward()
        first = mu.reshape(batch, length, -1)[:, 0]
        wanted = (blocks[:, 0].mT @ first[..., None])[..., 0].reshape(h0.shape)
        for label, options in settings(cell, length):
            given, initial = x.clone().requires_grad_(), h0.clone().requires_grad_()
            solved = ctx.api.solve(cell, given, h0=initial, **options).states
            gx, gh = torch.autograd.grad((solved * w).sum(), (given, initial))
            for what, got, expected in (("x", gx, local.grad), ("h0", gh, wanted)):
                with ctx.explained(f"{label}, gain {gain}"):
                    ctx.within(f"adjoint − dense solve, {what}", error(got, expected), 1e-10)
        newton_step(ctx, cell, x, h0)


def newton_step(ctx: Context, cell: nn.Module, x: Tensor, h0: Tensor) -> None:
    """One pinned iteration with exact Jacobians is the dense solution of ``DF(H⁰) Δ = −F(H⁰)``
    from ``h_t⁰ = f(0, x_t)``, cut to the invariant box."""
    batch, length = x.shape[:2]
    zero = torch.zeros(batch, length, *cell.state_shape, dtype=x.dtype, device=x.device)
    guess = stepwise(cell, zero, x).detach()
    previous = shifted(guess, h0)
    residual = guess - stepwise(cell, previous, x).detach()
    dense = block_bidiagonal(jacobians(cell, previous, x))
    delta = torch.linalg.solve(dense, -residual.reshape(batch, -1, 1)).reshape(guess.shape)
    corrected = guess + delta
    limits = box(cell)
    if limits is not None:
        corrected = corrected.clamp(*limits)
    config = NewtonConfig(max_iters=1, jacobian="exact", on_divergence="ignore")
    solution = ctx.api.solve(cell, x, config, method="newton", h0=h0)
    ctx.within("Newton step − dense solve", error(solution.states, corrected), 1e-10)


@checks("pinned")
def pinned(ctx: Context) -> None:
    length = 48
    for dtype in ctx.wide_dtypes():
        for gain, _ in ((g, r) for g in (1.0, 4.0) for r in ctx.rounds()):
            cell = converted(ctx.cell(gain=gain), dtype)
            x = ctx.inputs(cell, 2, length)
            for method, chunk in (("newton", 1), ("shooting", 5)):
                for count in (0, 1, 2, 3, 6):
                    config = NewtonConfig(
                        max_iters=count,
                        chunk_length=chunk,
                        tol=LIMIT[dtype],
                        on_divergence="ignore",
                    )
                    solution = ctx.api.solve(cell, x, config, method=method)
                    ctx.require(
                        solution.iterations == count,
                        f"{method}, max_iters={count}: got {solution.iterations} iterations",
                    )
                    honest(ctx, cell, x, solution, dtype)


def honest(ctx: Context, cell: nn.Module, x: Tensor, solution: Any, dtype: Any) -> None:
    """The report says what was reached: the residual bounds the recomputed one, ``converged``
    means that it is within the tolerance, and the history ends with it."""
    states = solution.states.detach()
    previous = shifted(states, start(cell, x))
    gap = misfit(cell, previous, x, states)
    stretch = max(1.0, largest_jacobian(cell, previous, x))
    rounding = ROUNDINGS * UNIT_ROUNDOFF[dtype]
    ctx.require(not solution.fallback, "got a fallback in a pinned solve that was to ignore")
    ctx.require(
        solution.converged == (solution.residual <= LIMIT[dtype]),
        f"got converged={solution.converged} with residual {solution.residual:.3g}",
    )
    ctx.require(
        len(solution.residual_history) > 0 and solution.residual_history[-1] == solution.residual,
        "the residual history does not end with the residual",
    )
    excess = gap / (stretch * (solution.residual + rounding))
    ctx.within("recomputed residual / reported one", excess, 1.0)


@checks("divergence")
def divergence(ctx: Context) -> None:
    length = 48
    for dtype in ctx.wide_dtypes():
        wide = ctx.cell(gain=2.0)
        x, h0 = ctx.inputs(wide, 2, length), ctx.state(wide, 2)
        kappa = amplification(wide, loop(wide, x, h0), h0, x)
        cell, x, h0 = converted(wide, dtype), x.to(dtype), h0.to(dtype)
        reference = loop(cell, x, h0).detach()

        def run(on_divergence: str, cell=cell, x=x, h0=h0) -> Any:
            config = NewtonConfig(
                chunk_length=2, jacobian="none", iteration_cap=1, on_divergence=on_divergence
            )
            return ctx.api.solve(cell, x, config, method="shooting", h0=h0)

        for choice in ("auto", "sequential"):
            solution = run(choice)
            ctx.require(solution.fallback and solution.converged, f"{choice}: got no fallback")
            ctx.within(
                f"fallback − loop, {name(dtype)}",
                error(solution.states, reference),
                tolerance(dtype, kappa),
            )
        try:
            run("raise")
        except NewtonDivergenceError as failure:
            history = failure.residual_history
            ctx.require(len(history) >= 1, "the error carries no residual history")
            ctx.require(history[-1] > 1e-6, f"raised with residual {history[-1]:.3g}")
        else:
            ctx.require(False, "on_divergence='raise': got no NewtonDivergenceError")
        for choice, expected in (("warn", True), ("ignore", False)):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                solution = run(choice)
            warned = any(issubclass(w.category, NewtonWarning) for w in caught)
            ctx.require(warned == expected, f"{choice}: got a NewtonWarning: {warned}")
            ctx.require(not solution.converged, f"{choice}: got converged=True")
            ctx.require(not solution.fallback, f"{choice}: got a fallback that was not asked for")


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
