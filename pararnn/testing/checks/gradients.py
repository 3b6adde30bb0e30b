"""Clauses about derivatives: first order by the implicit function theorem, and second order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck

from pararnn import NewtonConfig

from ..context import BASE_TOLERANCE, ROUNDINGS, UNIT_ROUNDOFF, Context, converted, error
from ..reference import amplification, loop
from . import checks
from .solving import formed, name


def on_a_grid(cell: nn.Module) -> bool:
    """Whether a stage of the cell's Spec rounds an angle."""
    stages = getattr(getattr(cell, "spec", None), "stages", ())
    return any("snap" in str(getattr(stage, "expr", "")) for stage in stages)


Run = Callable[[nn.Module, Tensor, Tensor], tuple[Tensor, Tensor]]


def runs(ctx: Context, cell: nn.Module) -> Iterator[tuple[str, Run]]:
    """Ways to solve, each as a function of (cell, x, h0) that gives states and final state."""

    def through(**options: Any) -> Run:
        def run(cell: nn.Module, x: Tensor, h0: Tensor) -> tuple[Tensor, Tensor]:
            solution = ctx.api.solve(cell, x, h0=h0, **options)
            return solution.states, solution.final_state

        return run

    for method in ("auto", "sequential", "newton", "shooting"):
        yield method, through(method=method)
    for chunk in (3, 5):
        for jacobian in ("exact", "quasi", "none"):
            if not formed(cell, jacobian, chunk):
                continue
            config = NewtonConfig(chunk_length=chunk, jacobian=jacobian)
            yield f"shooting, {jacobian}, {chunk}", through(method="shooting", config=config)


def by_loop(cell: nn.Module, x: Tensor, h0: Tensor) -> tuple[Tensor, Tensor]:
    states = loop(cell, x, h0)
    return states, states[:, -1]


def gradients(
    run: Run, cell: nn.Module, x: Tensor, h0: Tensor, weights: tuple[Tensor, Tensor], **kwargs: Any
) -> dict[str, Tensor]:
    """Gradients of a weighted sum of the states and of the final state."""
    x, h0 = x.detach().clone().requires_grad_(), h0.detach().clone().requires_grad_()
    states, final = run(cell, x, h0)
    loss = (states * weights[0]).sum() + (final * weights[1]).sum()
    targets = {"x": x, "h0": h0} | dict(cell.named_parameters())
    # A learned start has no part in a run from a given one: zero.
    found = torch.autograd.grad(loss, list(targets.values()), materialize_grads=True, **kwargs)
    return dict(zip(targets, found, strict=True))


def gradient_tolerance(dtype: torch.dtype, kappa: float) -> float:
    return max(BASE_TOLERANCE[dtype], ROUNDINGS * UNIT_ROUNDOFF[dtype] * kappa**2)


@checks("gradients")
def first_order(ctx: Context) -> None:
    for gain, length in ((1.0, 17), (2.0, 17), (1.0, 139)):
        for _ in ctx.rounds():
            wide = ctx.cell(gain=gain)
            x, h0 = ctx.inputs(wide, 3, length), ctx.state(wide, 3)
            shape = (3, length, *wide.state_shape)
            weights = ctx.like(wide, ctx.normal(*shape)), ctx.like(wide, ctx.normal(*h0.shape))
            kappa = amplification(wide, loop(wide, x, h0), h0, x)
            for dtype in ctx.wide_dtypes():
                cell = converted(wide, dtype)
                given = x.to(dtype), h0.to(dtype), tuple(w.to(dtype) for w in weights)
                expected = gradients(by_loop, cell, *given)
                bound = gradient_tolerance(dtype, kappa)
                for label, run in [*runs(ctx, cell), ("sequential_apply", sequential(ctx))]:
                    for what, value in gradients(run, cell, *given).items():
                        with ctx.explained(f"{label}, T={length}, gain {gain}, {what}"):
                            ctx.within(name(dtype), error(value, expected[what]), bound)
                if not getattr(cell, "starts_at_zero", True):
                    default_start(ctx, cell, given[0], given[2][0], bound)
    finite_differences(ctx, gradcheck)


def default_start(ctx: Context, cell: nn.Module, x: Tensor, weights: Tensor, bound: float) -> None:
    """Gradients of the parameters where the cell's own start is used, that of a learned one among
    them."""
    found = []
    for run in (lambda: loop(cell, x), lambda: ctx.api.solve(cell, x).states):
        loss = (run() * weights).sum()
        found.append(torch.autograd.grad(loss, list(cell.parameters())))
    for expected, value in zip(*found, strict=True):
        ctx.within(f"from the default start, {name(x.dtype)}", error(value, expected), bound)


def sequential(ctx: Context) -> Run:
    def run(cell: nn.Module, x: Tensor, h0: Tensor) -> tuple[Tensor, Tensor]:
        states = ctx.api.sequential_apply(cell, x, h0=h0)
        return states, states[:, -1]

    return run


def finite_differences(ctx: Context, checker: Callable[..., bool]) -> None:
    """``torch.autograd.gradcheck`` or ``gradgradcheck``, whose references are differences."""
    cell = ctx.cell()
    if on_a_grid(cell):  # its derivative is defined, not that of the function: clause 'snap'
        return
    x = ctx.inputs(cell, 2, 4).requires_grad_()
    h0 = ctx.state(cell, 2).requires_grad_()
    chosen = dict(runs(ctx, cell)) if ctx.exhaustive else {
        label: run for label, run in runs(ctx, cell) if label in ("newton", "shooting, none, 3")
    }  # fmt: skip
    for label, run in chosen.items():

        def function(*inputs: Tensor, run=run) -> tuple[Tensor, Tensor]:
            return run(cell, inputs[0], inputs[1])

        try:
            inputs = (x, h0, *cell.parameters())
            checker(function, inputs, fast_mode=not ctx.exhaustive, atol=1e-7, rtol=1e-5)
        except RuntimeError as reason:
            ctx.require(False, f"{label}: {checker.__name__}: {str(reason)[:300]}")


@checks("double-backward")
def second_order(ctx: Context) -> None:
    length = 9
    for _ in ctx.rounds():
        cell = ctx.cell()
        x, h0 = ctx.inputs(cell, 2, length), ctx.state(cell, 2)
        shape = (2, length, *cell.state_shape)
        weights = ctx.like(cell, ctx.normal(*shape)), ctx.like(cell, ctx.normal(*h0.shape))
        directions: dict[str, Tensor] = {}

        def curvature(run: Run, cell=cell, x=x, h0=h0, weights=weights, directions=directions):
            a, b = x.clone().requires_grad_(), h0.clone().requires_grad_()
            states, final = run(cell, a, b)
            # A nonlinear loss: the second derivative then has both of its terms.
            loss = (states.square() * weights[0]).sum() + (final * weights[1]).sum()
            targets = {"x": a, "h0": b} | dict(cell.named_parameters())
            first = torch.autograd.grad(
                loss, list(targets.values()), create_graph=True, materialize_grads=True
            )
            if not directions:
                directions |= {k: ctx.like(cell, ctx.normal(*v.shape)) for k, v in targets.items()}
            along = sum((g * directions[k]).sum() for k, g in zip(targets, first, strict=True))
            second = torch.autograd.grad(along, list(targets.values()), allow_unused=True)
            return {
                k: torch.zeros_like(v) if g is None else g
                for (k, v), g in zip(targets.items(), second, strict=True)
            }

        expected = curvature(by_loop)
        for label, run in runs(ctx, cell):
            for what, value in curvature(run).items():
                with ctx.explained(f"{label}, second derivative of {what}"):
                    ctx.within("Hessian product − loop's", error(value, expected[what]), 1e-10)
        third_order(ctx, cell, x, h0)
    finite_differences(ctx, gradgradcheck)


def third_order(ctx: Context, cell: nn.Module, x: Tensor, h0: Tensor) -> None:
    """A third derivative is right or an error."""

    def third(run: Run) -> Tensor:
        given = x.clone().requires_grad_()
        value = run(cell, given, h0)[0].pow(3).sum()
        for _ in range(2):
            (gradient,) = torch.autograd.grad(value, given, create_graph=True)
            value = gradient.square().sum()
        return torch.autograd.grad(value, given)[0]

    expected = third(by_loop)
    for label, run in runs(ctx, cell):
        try:
            found = third(run)
        except RuntimeError:
            continue  # said, not hidden
        with ctx.explained(f"{label}, third derivative"):
            ctx.within("third derivative − loop's", error(found, expected), 1e-9)
