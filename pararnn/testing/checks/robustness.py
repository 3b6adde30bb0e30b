"""Clauses about machines and misuse: devices, bits, layouts, narrow dtypes, errors, NaN."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

import pararnn
from pararnn import NewtonConfig

from ..context import Context, NotApplicable, converted, error, tolerance
from ..reference import adjoint, advance, amplification, apart, loop
from ..reference import drives as packed
from . import checks
from .gradients import by_loop, gradient_tolerance, gradients, runs
from .sequences import WAYS
from .solving import name

HALF = (torch.bfloat16, torch.float16)


@checks("batch-independence")
def batch_independence(ctx: Context) -> None:
    for dtype in ctx.wide_dtypes():
        for gain, _ in ((g, r) for g in (1.0, 3.0) for r in ctx.rounds()):
            cell = converted(ctx.cell(gain=gain), dtype)
            length = (
                61 if getattr(cell, "jac_structure", "") == "linear" else 23
            )  # a scan of many is in chunks
            x, h0 = ctx.inputs(cell, 5, length), ctx.state(cell, 5)
            other, initial = 5 * ctx.inputs(cell, 5, length), ctx.state(cell, 5)
            other[2], initial[2] = x[2], h0[2]
            other[4] *= 1e30
            for label, options in WAYS:
                first = ctx.api.solve(cell, x, h0=h0, **options).states
                second = ctx.api.solve(cell, other, h0=initial, **options).states
                ctx.same_bits(f"row, {label}", second[2], first[2])


@checks("backends")
def backends(ctx: Context) -> None:
    if ctx.device.type == "cpu":
        raise NotApplicable("one backend here: the CPU; --device cuda compares it with a GPU")
    for dtype in ctx.wide_dtypes():
        for _ in ctx.rounds():
            wide = ctx.cell()
            x, h0 = ctx.inputs(wide, 3, 33), ctx.state(wide, 3)
            kappa = amplification(wide, loop(wide, x, h0), h0, x)
            weights = ctx.like(wide, ctx.normal(3, 33, *wide.state_shape)), torch.ones_like(h0)
            here = converted(wide, dtype)
            there = converted(wide, dtype).cpu()
            given = x.to(dtype), h0.to(dtype), tuple(w.to(dtype) for w in weights)
            apart = given[0].cpu(), given[1].cpu(), tuple(w.cpu() for w in given[2])
            expected = gradients(by_loop, there, *apart)
            for label, options in WAYS:
                states = ctx.api.solve(here, given[0], h0=given[1], **options).states.cpu()
                reference = ctx.api.solve(there, apart[0], h0=apart[1], **options).states
                gap = error(states, reference)
                ctx.within(f"{label}, {name(dtype)}", gap, tolerance(dtype, kappa))
            for label, run in runs(ctx, here):
                for what, value in gradients(run, here, *given).items():
                    gap = error(value.cpu(), expected[what])
                    bound = gradient_tolerance(dtype, kappa)
                    ctx.within(f"gradient of {what}, {label}, {name(dtype)}", gap, bound)


@checks("determinism")
def determinism(ctx: Context) -> None:
    for dtype in ctx.dtypes:
        cell = converted(ctx.cell(), dtype)
        x, h0 = ctx.inputs(cell, 3, 37), ctx.state(cell, 3)
        for label, options in WAYS:
            found = []
            for _ in range(2):
                given = x.clone().requires_grad_()
                states = ctx.api.solve(cell, given, h0=h0, **options).states
                inputs = (given, *cell.parameters())
                gradients = torch.autograd.grad(
                    states.float().sum(), inputs, materialize_grads=True
                )
                found.append((states, *gradients))
            for first, second in zip(*found, strict=True):
                ctx.same_bits(f"twice, {label}", second, first)


@checks("invariances")
def invariances(ctx: Context) -> None:
    batch, length = 5, 19
    for dtype in ctx.wide_dtypes():
        for _ in ctx.rounds():
            wide = ctx.cell()
            x, h0 = ctx.inputs(wide, batch, length), ctx.state(wide, batch)
            kappa = amplification(wide, loop(wide, x, h0), h0, x)
            cell, x, h0 = converted(wide, dtype), x.to(dtype), h0.to(dtype)
            order = torch.randperm(batch, generator=ctx.generator).to(ctx.device)
            layouts: dict[str, Tensor] = {
                "time first": x.transpose(0, 1).contiguous().transpose(0, 1),
                "channels first": x.mT.contiguous().mT,
                "every other element": torch.stack([x, -x], -1).flatten(-2)[..., ::2],
                "a slice": torch.cat([x, x, x], 1)[:, length : 2 * length],
            }
            for _, options in WAYS:
                plain = ctx.api.solve(cell, x, h0=h0, **options).states
                bound = tolerance(dtype, kappa)
                mixed = ctx.api.solve(cell, x[order], h0=h0[order], **options).states
                ctx.within(f"permuted batch, {name(dtype)}", error(mixed, plain[order]), bound)
                for layout, view in layouts.items():
                    states = ctx.api.solve(cell, view, h0=h0, **options).states
                    ctx.within(f"{layout}, {name(dtype)}", error(states, plain), bound)
                strided = torch.stack([h0, h0], 1)[:, 0]
                states = ctx.api.solve(cell, x, h0=strided, **options).states
                ctx.within(f"strided h0, {name(dtype)}", error(states, plain), bound)
            row = ctx.api.solve(cell, x[:1].expand(batch, -1, -1), h0=h0[:1].expand_as(h0)).states
            gap = error(row, row[:1].expand_as(row))
            ctx.within(f"expanded batch, {name(dtype)}", gap, tolerance(dtype, kappa))


def ulp(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Spacing of ``dtype`` at ``value``, in float32."""
    info = torch.finfo(dtype)
    exponent = torch.floor(torch.log2(value.abs().clamp_min(info.tiny)))
    return torch.exp2(exponent) * info.eps


@checks("half-precision")
def half_precision(ctx: Context) -> None:
    chosen = [d for d in HALF if d in ctx.dtypes]
    if not chosen:
        raise NotApplicable("neither bfloat16 nor float16 was asked for (--dtype)")
    probe = ctx.cell()
    if not hasattr(probe, "drives"):
        raise NotApplicable("the module has no drives(); its arithmetic is its own")
    for dtype in chosen:
        for _ in ctx.rounds():
            cell = converted(ctx.cell(), dtype)
            twin = converted(cell, torch.float32)
            x = ctx.inputs(cell, 3, 29)
            h0 = ctx.state(twin, 3)
            u = packed(cell, x).detach()
            for label, options in WAYS:
                narrow = ctx.api.solve(cell, h0=h0, drives=u, **options)
                wide = ctx.api.solve(twin, h0=h0, drives=u.float(), **options)
                ctx.require(
                    narrow.states.dtype == dtype and narrow.final_state.dtype == torch.float32,
                    f"{label}: got states in {narrow.states.dtype} and a final state in "
                    f"{narrow.final_state.dtype}, expected {dtype} and torch.float32",
                )
                gap = (narrow.states.float() - wide.states).abs() / ulp(wide.states, dtype)
                ctx.within(f"states in ulp, {name(dtype)}", gap.max(), 1.0)
                gap = error(narrow.final_state, wide.final_state)
                ctx.within(f"final state, {name(dtype)}", gap, 1e-5)
                narrow_gradients(ctx, cell, twin, h0, u, options)


def narrow_gradients(ctx: Context, cell, twin, h0, u, options) -> None:
    """Gradients of drives and recurrent parameters: the float32 run's, rounded. Kernels keep what
    the output is made of rounded for the backward pass: theirs are those at the kept states,
    rounded."""
    found, solutions = [], []
    for module, drives in ((cell, u), (twin, u.float())):
        given = drives.clone().requires_grad_()
        solutions.append(ctx.api.solve(module, h0=h0, drives=given, **options))
        states = solutions[-1].states
        names = module.spec.parameter_shapes(module.sizes)
        weights = (getattr(module, n) for n in names)
        inputs = (given, *(w for w in weights if w.requires_grad))
        # One weight per state that both dtypes hold exactly, so that rounding is the only gap.
        weights = torch.linspace(-1, 1, states.numel(), device=u.device).reshape(states.shape)
        weights = (weights * 64).round() / 64
        found.append(torch.autograd.grad((states.float() * weights).sum(), inputs))
    narrow, wide = solutions
    if narrow.path == "fused":
        exact, kept = converted(cell, torch.float64), wide.states.detach().double()
        last = slice(None) if cell.spec.output == "all" else -1
        rounded = (slice(None), slice(None)) + (last,) * (cell.state_slots > 1)
        kept[rounded] = narrow.states.detach().double()[rounded]
        given = (kept, h0.double(), u.double(), weights.double())
        found[1] = tuple(g.float() for g in adjoint(exact, *given))
    for got, want in zip(*found, strict=True):
        slack = 1e-5 * want.abs().max()
        excess = ((got.float() - want).abs() - slack).clamp_min(0) / ulp(want, u.dtype)
        ctx.within(f"gradients in ulp, {name(u.dtype)}", excess.max(), 1.0)


@checks("nan-containment")
def nan_containment(ctx: Context) -> None:
    for dtype in ctx.wide_dtypes():
        for poison in (float("nan"), float("inf")):
            cell = converted(ctx.cell(), dtype)
            x, h0 = ctx.inputs(cell, 4, 21), ctx.state(cell, 4)
            bad = x.clone()
            bad[1, 9, : cell.d_in] = poison  # not a time gap, whose rules are those of clause 28
            for label, options in WAYS if poison != poison else WAYS[:3]:
                clean = ctx.api.solve(cell, x, h0=h0, **options).states
                given = bad.clone().requires_grad_()
                solution = ctx.api.solve(cell, given, h0=h0, **options)
                states = solution.states
                for row in (0, 2, 3):
                    ctx.same_bits(f"{poison} in another row, {label}", states[row], clean[row])
                ctx.same_bits(f"{poison} later, {label}", states[1, :9], clean[1, :9])
                expected = loop(cell, bad, h0).isfinite()
                ctx.require(
                    torch.equal(states.isfinite(), expected),
                    f"{label}, {poison}: got finite states where the loop has none, or none where "
                    "it has",
                )
                others = [0, 2, 3]
                (gradient,) = torch.autograd.grad(states[others].sum(), given, retain_graph=True)
                ctx.require(
                    bool(gradient[others].isfinite().all()),
                    f"{label}, {poison}: got a gradient that is not finite in a clean row",
                )


@checks("errors")
def errors(ctx: Context) -> None:
    cell = converted(ctx.cell(), torch.float32)
    x, h0 = ctx.inputs(cell, 2, 5), ctx.state(cell, 2)
    solve = ctx.api.solve
    wrong = torch.zeros(2, *[n + 1 for n in cell.state_shape], device=ctx.device)
    cases: dict[str, tuple[Callable[[], object], type[Exception] | tuple]] = {
        "x without a time axis": (lambda: solve(cell, x[0]), ValueError),
        "x of integers": (lambda: solve(cell, torch.ones_like(x).long()), TypeError),
        "x a list": (lambda: solve(cell, x.tolist()), TypeError),
        "x on another device": (lambda: solve(cell, x.to("meta")), ValueError),
        "h0 of a wrong shape": (lambda: solve(cell, x, h0=wrong), ValueError),
        "h0 of a wrong batch": (lambda: solve(cell, x, h0=h0[:1]), ValueError),
        "h0 of integers": (lambda: solve(cell, x, h0=h0.long()), TypeError),
        "h0 on another device": (lambda: solve(cell, x, h0=h0.to("meta")), ValueError),
        "resets of a wrong shape": (
            lambda: solve(cell, x, resets=torch.zeros(2, 4, dtype=torch.bool, device=x.device)),
            ValueError,
        ),
        "resets that are not bool": (
            lambda: solve(cell, x, resets=x[..., 0]),
            (TypeError, ValueError),
        ),
        "an unknown method": (lambda: solve(cell, x, method="magic"), ValueError),
        "chunk_length=0": (lambda: NewtonConfig(chunk_length=0), ValueError),
        "chunk_length=2.5": (lambda: NewtonConfig(chunk_length=2.5), TypeError),
        "max_iters=-1": (lambda: NewtonConfig(max_iters=-1), ValueError),
        "tol=0": (lambda: NewtonConfig(tol=0.0), ValueError),
        "an unknown jacobian": (lambda: NewtonConfig(jacobian="full"), ValueError),
        "an unknown on_divergence": (lambda: NewtonConfig(on_divergence="cry"), ValueError),
        "a module without step": (lambda: solve(nn.Linear(3, 3), x), TypeError),
    }
    if hasattr(cell, "spec"):  # without one, the module's own step judges its input
        cases |= {
            "x too wide": (
                lambda: solve(cell, torch.zeros(2, 5, x.shape[-1] + 1).to(x)),
                ValueError,
            ),
            "x in another dtype": (lambda: solve(cell, x.double()), TypeError),
            "step: h of a wrong shape": (lambda: advance(cell, wrong, x[:, 0]), ValueError),
            "step: h of integers": (lambda: advance(cell, h0.long(), x[:, 0]), TypeError),
            "step: batches that differ": (lambda: advance(cell, h0[:1], x[:, 0]), ValueError),
            "step: neither x nor drives": (lambda: cell.step(h0), TypeError),
            "an integer dtype": (
                lambda: type(cell)(**cell.hyperparameters(), dtype=torch.int64),
                (TypeError, ValueError),
            ),
            "d_in=0": (lambda: cell.rebuilt(d_in=0), ValueError),
            "d_in=2.5": (lambda: cell.rebuilt(d_in=2.5), TypeError),
            "d_in=None": (lambda: cell.rebuilt(d_in=None), TypeError),
        }
        given, more = apart(cell, x)
        plain = pararnn.solve
        cases |= {
            "time gaps missing": (lambda: plain(cell, given), TypeError),
            "time gaps of a wrong shape": (lambda: plain(cell, given, dt=x), ValueError),
            "time gaps of integers": (lambda: plain(cell, given, dt=x[..., 0].long()), TypeError),
            "time gaps in another dtype": (
                lambda: plain(cell, given, dt=x[..., -1].double()),
                TypeError,
            ),
            "time gaps of step missing": (lambda: cell.step(h0, given[:, 0]), TypeError),
        } if more else {
            "time gaps not wanted": (lambda: plain(cell, x, dt=x[..., 0]), TypeError),
        }  # fmt: skip
    maps = getattr(getattr(cell, "spec", None), "map_list", ())
    if any(m.structure == "head" for m in maps):
        cases["heads that do not divide"] = (lambda: cell.rebuilt(n_heads=4), ValueError)
    for label, (action, expected) in cases.items():
        try:
            action()
        except expected as problem:
            message = str(problem)
            ctx.require(
                "got" in message and ("expected" in message or "give" in message),
                f"{label}: the message does not say what was got and expected: {message!r}",
            )
        except Exception as problem:
            ctx.require(False, f"{label}: got {type(problem).__name__}: {problem}")
        else:
            ctx.require(False, f"{label}: got no error")
    ctx.measured["cases"] = float(len(cases))
