"""Clauses about sizes: small trajectories are solved as ordinary ones are, and what is no number is
no success."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pararnn import NewtonConfig, verify_agreement

from ..context import Context, converted, tolerance
from ..reference import amplification, lanes, loop, sizes, start
from ..reference import apart as with_gaps
from . import checks

SCALES = {torch.float32: (1e-3, 1e-7), torch.float64: (1e-6, 1e-13)}
WAYS = (
    ("auto", {}),
    ("newton", {"method": "newton"}),
    ("chunks of 8", {"config": NewtonConfig(chunk_length=8, warmup=1)}),
    ("chunks of 8, Picard", {"config": NewtonConfig(chunk_length=8, warmup=1, jacobian="none")}),
)


def apart(cell: nn.Module, states: Tensor, wanted: Tensor) -> float:
    """Largest difference of two trajectories relative to the wanted one: to each lane's largest state
    where lanes do not mix, else to the row's largest state up to there."""
    gap = (states - wanted).detach().abs().double()
    if getattr(cell, "jac_structure", "") == "diag":
        return float((gap / lanes(wanted).double()).max())
    return float((gap.flatten(2).amax(2) / sizes(wanted, 0 * wanted[:, 0]).double()).max())


@checks("scale")
def scale(ctx: Context) -> None:
    batch, length = 2, 61
    for dtype in ctx.wide_dtypes():
        for factor in SCALES[dtype]:
            wide = ctx.cell()
            if hasattr(wide, "in_proj"):  # nothing but the input drives the state
                torch.nn.init.zeros_(wide.in_proj.bias)
            x = ctx.inputs(wide, batch, length)
            rows = ctx.like(wide, torch.tensor([1.0, 1e-3], dtype=torch.float64))
            x[..., : wide.d_in] *= factor * rows[:, None, None]  # time gaps stay
            cell, x = converted(wide, dtype), x.to(dtype)
            wanted = loop(cell, x).detach()
            first = start(cell, x)
            kappa = amplification(wide, loop(wide, x.double()), first.double(), x.double())
            for label, options in WAYS:
                solution = ctx.api.solve(cell, x, **options)
                with ctx.explained(f"{label}, inputs × {factor:g}"):
                    ctx.require(solution.converged, "got converged=False")
                    found = solution.states.detach()
                    for row in (slice(0, 1), slice(1, 2)):
                        gap = apart(cell, found[row], wanted[row])
                        ctx.within(str(dtype).removeprefix("torch."), gap, tolerance(dtype, kappa))


@checks("finite")
def finite(ctx: Context) -> None:
    for dtype in ctx.wide_dtypes():
        cell = converted(ctx.cell(), dtype)
        x = ctx.inputs(cell, 2, 40)
        for poisoned in (False, True):
            if poisoned:
                x[1, 11, 0] = torch.nan
            for method in ("auto", "sequential", "newton", "shooting"):
                solution = ctx.api.solve(cell, x, method=method)
                said = solution.converged, solution.residual < 1, solution.residual_history[-1] < 1
                ctx.require(
                    said == (not poisoned,) * 3,
                    f"{method}, a NaN: {poisoned}: got converged={said[0]} with residual "
                    f"{solution.residual:g}",
                )
            given, more = with_gaps(cell, x)
            report = verify_agreement(cell, given, **more)
            wanted = "NOT FINITE" if poisoned else "PASS"
            ctx.require(
                (report.passed, report.verdict) == (not poisoned, wanted),
                f"verify_agreement, a NaN: {poisoned}: got {report.verdict}",
            )
