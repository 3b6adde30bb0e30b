"""Clauses about one step: the equation, its Jacobian, its bounds, its weights."""

from __future__ import annotations

import itertools

import mpmath
import numpy as np
import torch
from torch import Tensor, nn

import pararnn

from ..context import Context, NotApplicable, box, error
from ..equations import DIGITS, EQUATIONS, written_out
from ..reference import advance, jacobians
from ..reference import drives as packed
from . import checks

STEP = 1e-13  # float64, one step: about 10 + n roundings of 1.1e-16, each damped by the gates
EACH = 1e-11  # of a number that is a product of gates, or a sum of a few that hardly cancel


def arrays(cell: nn.Module, h: Tensor, x: Tensor) -> tuple:
    """State, drives and recurrent parameters of the Spec's oracle, as float64 arrays."""
    drives = tuple(u.detach().double().cpu().numpy() for u in cell.split(packed(cell, x)))
    params = tuple(p.detach().double().cpu().numpy() for p in cell.recurrent_params())
    return h.detach().double().cpu().numpy(), drives, params


def digits(value: object) -> Tensor:
    """An array of mpmath numbers, rounded to float64."""
    return torch.from_numpy(np.asarray(value, dtype=object).astype(np.float64))


def each(value: Tensor, reference: Tensor) -> float:
    """``max |value − reference| / |reference|``, every number by itself, down to 1e-290."""
    return float(((value - reference).abs() / reference.abs().clamp_min(1e-290)).max())


@checks("equation")
def equation(ctx: Context) -> None:
    cell = ctx.cell()
    spec = ctx.spec_of(cell)
    name = ctx.subject.name
    ctx.require(
        name in EQUATIONS or name not in pararnn.cell_names(),
        f"got no equation of {name}, expected that of its source, written out scalar by scalar; "
        "put it into EQUATIONS of pararnn/testing/equations.py",
    )
    if getattr(cell, "recurrence", None) is None:
        raise NotApplicable("the cell has no hand-written recurrence: no second source to compare")
    labels = {1.0: "usual", 1e-6: "near zero", 30.0: "saturated"}
    for _, (scale, label) in itertools.product(ctx.rounds(2), labels.items()):
        cell = ctx.cell(unbounded=True)
        if scale < 1:  # drives and states near zero: a tanh with cancellation loses its digits
            nn.init.zeros_(cell.in_proj.bias)
        x, h = ctx.inputs(cell, 4, 1, scale)[:, 0], min(scale, 1.0) * ctx.state(cell, 4)
        by_hand = advance(cell, h, x).detach().cpu()
        state, drives, params = arrays(cell, h, x)
        derived = ctx.api.step(spec, state, drives, params)
        ctx.within(
            f"hand-written − Spec float64, {label}", error(by_hand, torch.tensor(derived)), STEP
        )
        with mpmath.workdps(DIGITS):
            many = ctx.api.step(spec, state, drives, params, "mpmath")
        ctx.within(
            f"hand-written − Spec {DIGITS} digits, {label}", error(by_hand, digits(many)), STEP
        )
        if scale > 1:  # from nothing, a gate that is open leaves very little, with all its digits
            h = torch.zeros_like(h)
            state = np.zeros_like(state)
            with mpmath.workdps(DIGITS):
                many = digits(ctx.api.step(spec, state, drives, params, "mpmath"))
            by_hand = advance(cell, h, x).detach().cpu()
            derived = torch.tensor(ctx.api.step(spec, state, drives, params))
            for label, value in (("hand-written", by_hand), ("Spec float64", derived)):
                ctx.within(
                    f"{label} − Spec {DIGITS} digits, each number, from zero",
                    each(value, many),
                    EACH,
                )
        if ctx.subject.name in EQUATIONS:
            paper = np.stack(
                [written_out(ctx.subject.name, cell, a, b) for a, b in zip(h, x, strict=True)]
            )
            ctx.within(
                f"hand-written − paper's equation, {label}", error(by_hand, digits(paper)), STEP
            )


@checks("jacobian-proof")
def jacobian_proof(ctx: Context) -> None:
    cell = ctx.cell()
    spec = ctx.spec_of(cell)
    sizes = {axis: 2 + i for i, axis in enumerate(spec.axes)}
    if "heads" in cell.sizes and "heads" not in spec.axes:
        sizes = dict.fromkeys(spec.axes, 4) | {"heads": 2}
    try:
        proved = ctx.api.prove_jacobian(spec, sizes)
    except AssertionError as reason:
        ctx.require(False, str(reason))
    ctx.require(proved is True, f"prove_jacobian: got {proved!r}, expected True")
    ctx.measured["entries proved"] = float(np.prod(spec.state_shape(sizes))) ** 2


@checks("jacobian")
def jacobian(ctx: Context) -> None:
    cell = ctx.cell()
    spec = ctx.spec_of(cell)
    for _ in ctx.rounds():
        cell = ctx.cell(unbounded=True)
        x, h = ctx.inputs(cell, 2, 1), ctx.state(cell, 2)
        autograd = jacobians(cell, h[:, None], x)[:, 0].cpu()
        for row in range(2):
            state, drives, params = arrays(cell, h[row], x[row, 0])
            dense = torch.from_numpy(ctx.api.dense_jacobian(spec, state, drives, params))
            ctx.within(
                "autograd of the hand-written step − dense", error(autograd[row], dense), STEP
            )
            for _ in range(3):
                v = ctx.normal(*cell.state_shape)
                forward = torch.from_numpy(ctx.api.jvp(spec, state, drives, params, v.numpy()))
                reverse = torch.from_numpy(ctx.api.vjp(spec, state, drives, params, v.numpy()))
                flat = v.flatten()
                ctx.within("factorized JVP − dense", error(forward.flatten(), dense @ flat), STEP)
                ctx.within("factorized VJP − dense", error(reverse.flatten(), dense.T @ flat), STEP)


def pattern(cell: nn.Module) -> Tensor:
    """Entries of ``∂vec(h')/∂vec(h)`` that the declared class allows to differ from zero."""
    structure, slots = cell.jac_structure, cell.state_slots
    shape = tuple(cell.sizes[axis] for axis in cell.spec.axes)
    width = int(np.prod(shape))
    own = torch.eye(width, dtype=torch.bool)
    kinds = {m.structure for m in cell.spec.map_list}
    if structure == "linear":  # the class says nothing about mixing; the maps do
        structure = next((k for k in ("right", "dense", "head") if k in kinds), "diag")
        structure = "householder" if cell.spec.linear_class == "householder" else structure
    if structure == "head":
        block = width // cell.sizes["heads"]
        own = torch.kron(torch.eye(cell.sizes["heads"]), torch.ones(block, block)) > 0
    elif structure == "dense":
        own = torch.ones(width, width, dtype=torch.bool)
    elif structure == "householder":  # heads do not mix, and columns of a head do not
        *copies, rows, columns = shape
        mixed = torch.kron(torch.ones(rows, rows), torch.eye(columns))
        own = torch.kron(torch.eye(int(np.prod(copies))), mixed) > 0
    elif structure in ("m2rnn", "right"):  # rows of the state do not mix
        own = torch.kron(torch.eye(shape[0]), torch.ones(shape[1], shape[1])) > 0
    elif structure != "diag" and structure != f"block{slots}":
        raise NotApplicable(f"no zero pattern is defined for the class {structure!r}")
    return own.repeat(slots, slots)


@checks("structure")
def structure(ctx: Context) -> None:
    cell = ctx.cell()
    spec = ctx.spec_of(cell)
    ctx.require(
        cell.jac_structure == spec.jac_structure,
        f"jac_structure: got {cell.jac_structure!r} on the cell, expected {spec.jac_structure!r} "
        "as derived from its Spec",
    )
    allowed = pattern(cell)
    seen = torch.zeros_like(allowed)
    for _ in ctx.rounds(2):
        cell = ctx.cell(unbounded=True)
        h, x = ctx.state(cell, 3), ctx.inputs(cell, 3, 1)
        for dense in jacobians(cell, h[:, None], x)[:, 0].cpu():
            ctx.within("largest entry outside the pattern", dense[~allowed].abs().sum(), 0.0)
            seen |= dense != 0
    if cell.jac_structure != "linear":
        missing = int((allowed & ~seen).sum())
        ctx.measured["entries of the pattern never used"] = float(missing)
        ctx.require(
            missing == 0 or cell.state_slots > 1,
            f"got {missing} entries that the class {cell.jac_structure!r} allows and that are "
            "always zero; a sparser class fits",
        )


@checks("bounds")
def bounds(ctx: Context) -> None:
    cell = ctx.cell()
    spec = ctx.spec_of(cell)
    declared = box(cell)
    if declared is None:
        raise NotApplicable("a state slot declares no bounds, so there is no invariant box")
    low, high = declared
    lowest = torch.where(low.isinf(), high.clamp_max(4.0) - 8, low).cpu()  # to sample from
    highest = torch.where(high.isinf(), lowest.to(high) + 8, high).cpu()
    gap = {"gap": 8.4} if spec.gap is not None else {}  # the largest that is drawn below
    for gain, _ in itertools.product((1.0, 4.0), ctx.rounds(2)):
        cell = ctx.cell(gain=gain)
        params = tuple(p.detach().cpu().numpy() for p in cell.recurrent_params())
        first, second = (
            torch.tensor(b).flatten()
            for b in ctx.api.derivative_bounds(spec, params, cell.sizes, **gap)
        )
        ctx.require(
            bool(first.isfinite().all() and second.isfinite().all()), "got an infinite bound"
        )
        n = 24
        corners = torch.rand(n, *cell.state_shape, generator=ctx.generator) < 0.5
        inside = lowest + (highest - lowest) * torch.rand(
            n, *cell.state_shape, generator=ctx.generator, dtype=torch.float64
        )
        h = torch.cat([torch.where(corners, lowest, highest), inside]).to(ctx.device)
        x = ctx.inputs(cell, 2 * n, 1)[:, 0] * ctx.uniform(2 * n, 1, high=4.0).to(ctx.device)
        if gap:
            x[:, -1] = x[:, -1].abs()
        following = advance(cell, h, x)
        outside = torch.maximum(following - high, low - following).max()
        ctx.within("step out of the invariant box", outside, 1e-15)
        rows, curvature = derivatives(cell, h, x)
        ctx.within("‖J‖ / its bound", (rows.cpu() / first).max(), 1 + 1e-12)
        ctx.within(
            "‖D²f‖ / its bound", (curvature.cpu() / second.clamp_min(1e-300)).max(), 1 + 1e-12
        )


def derivatives(cell: nn.Module, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """For every sample and output: the row sum of ``|J|``, and a lower bound of the largest
    ``|vᵀ H w|`` over sign vectors v, w, by alternating maximization."""
    h = h.detach().requires_grad_()
    out = advance(cell, h, x).flatten(1)
    rows, curvature = [], []
    for i in range(out.shape[1]):
        (gradient,) = torch.autograd.grad(out[:, i].sum(), h, create_graph=True)
        gradient = gradient.flatten(1)
        rows.append(gradient.abs().sum(1).detach())
        hessian = torch.stack(
            [
                torch.autograd.grad(g.sum(), h, retain_graph=True, materialize_grads=True)[
                    0
                ].flatten(1)
                for g in gradient.unbind(1)
            ],
            1,
        )
        v = torch.ones_like(gradient).detach()
        for _ in range(4):
            v = torch.where((hessian.mT @ v[..., None])[..., 0] >= 0, 1.0, -1.0).to(v)
            w = (hessian @ v[..., None])[..., 0]
            v = torch.where(w >= 0, 1.0, -1.0).to(v)
        curvature.append((v * w).sum(1).abs())
    return torch.stack(rows, 1), torch.stack(curvature, 1)


@checks("constraint")
def constraint(ctx: Context) -> None:
    cell = ctx.cell()
    if "max_recurrent_norm" not in ctx.hyperparameters(cell):
        raise NotApplicable("the cell bounds no recurrent weight")
    entrywise = all(m.structure == "diagonal" for m in cell.spec.map_list)
    default = ctx.subject.factory().max_recurrent_norm
    expected = 0.5 if entrywise else None
    ctx.require(default == expected, f"default bound: got {default!r}, expected {expected!r}")
    for bad in (True, "0.5", float("nan"), 0.0, -1.0, float("inf")):
        try:
            ctx.cell(max_recurrent_norm=bad)
        except (TypeError, ValueError):
            continue
        ctx.require(False, f"max_recurrent_norm={bad!r}: got no error")
    bound = 0.7
    for _ in ctx.rounds():
        raw, outside = ctx.cell(gain=6.0), 0
        cell = raw.rebuilt(max_recurrent_norm=bound).to(ctx.device, torch.float64)
        cell.load_state_dict(raw.state_dict())
        weights = [getattr(cell, m.name) for m in cell.spec.map_list]
        effective = cell.recurrent_params()[: len(weights)]
        x, h0 = ctx.inputs(cell, 2, 7), ctx.state(cell, 2)
        for weight, used in zip(weights, effective, strict=True):
            cotangent = ctx.uniform(*used.shape).to(ctx.device)
            (gradient,) = torch.autograd.grad(used, weight, cotangent)
            if entrywise:
                clipped = weight.detach().clamp(-bound, bound)
                ctx.within("effective weight − clipped weight", error(used, clipped), 0.0)
                ctx.within("gradient − straight through", error(gradient, cotangent), 0.0)
                outside += int((weight.abs() > bound).sum())
            else:
                scale = torch.linalg.matrix_norm(weight.detach(), 2).clamp_min(bound)[:, None, None]
                norms = torch.linalg.matrix_norm(used.detach(), 2)
                ctx.within("spectral norm − bound", (norms - bound).max(), 1e-14)
                ctx.within(
                    "effective weight − rescaled weight",
                    error(used, weight.detach() * (bound / scale)),
                    1e-14,
                )
        if entrywise:
            ctx.require(outside > 0, "no entry was outside the bound; the draw is too small")
        same = raw.rebuilt(max_recurrent_norm=None).to(ctx.device, torch.float64)
        same.load_state_dict(raw.state_dict())
        with torch.no_grad():
            for m, used in zip(same.spec.map_list, effective, strict=True):
                getattr(same, m.name).copy_(used)
        ctx.within(
            "solve with the bound − solve with the bounded weights",
            error(
                ctx.api.solve(cell, x, h0=h0).states.detach(),
                ctx.api.solve(same, x, h0=h0).states.detach(),
            ),
            1e-10,
        )
