"""Cells and solvers that are wrong on purpose, each with the clauses that must notice.

A cell mutant is a subclass with one method changed; a solver mutant wraps a public function or
replaces a method inside the library for the time of the check. No file is edited.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import sympy
import torch
from torch import Tensor, nn

import pararnn
import pararnn.cells.cell
import pararnn.drm.block
import pararnn.drm.dynamics
import pararnn.drm.generation
import pararnn.drm.memory
import pararnn.drm.model
import pararnn.drm.sweeps
import pararnn.tasks.recall
import pararnn.tasks.words
from pararnn import NewtonConfig, Solution, Spec, drm, sigmoid, tanh, tasks
from pararnn import _checks as checks
from pararnn._operators import Operator
from pararnn.cells.entry import takes_run
from pararnn.layers import para_rnn
from pararnn.scan import affine, chunks
from pararnn.scan import delta as scan_delta
from pararnn.solvers import adjoint, enclosure, engine, walkers
from pararnn.solvers import scale as solver_scale
from pararnn.solvers.adjoint import AdjointSolve
from pararnn.solvers.api import solve_layer
from pararnn.solvers.config import Kept
from pararnn.solvers.spec_recurrence import SpecRecurrence
from pararnn.spec import bounds, functions, oracle
from pararnn.spec.derive.complements import Complements
from pararnn.testing.context import Api, Context, NotApplicable, Subject, Violation, fed
from pararnn.testing.reference import loop, shifted, stepwise

from .checks import load
from .clauses import DRM

DIAG, HEAD, MATRIX = "ParaGRU[diag]", "ParaGRU[head]", "ParaM2RNN"
LSTM, NLRU = "ParaLSTM", "ParaNLRU"
SLSTM, CFC, TIMED = "ParaSLSTM[sigmoid]", "ParaCfC[published]", "ParaCfC[consistent]"
LOG, SIGNED, ROTATION, GIVENS, DELTA = (
    "MinGRU[plain]",
    "SignedMinGRU[decoupled]",
    "RotationMinGRU[snapped]",
    "GivensMinGRU",
    "DeltaMinGRU[nh=1]",
)
Change = Callable[[nn.Module], None]


@dataclass(frozen=True)
class Mutant:
    """One defect. ``killers`` are clauses that must be violated, the quickest first."""

    name: str
    what: str
    cell: str
    killers: tuple[str, ...]
    methods: dict[str, Any] = dataclasses.field(default_factory=dict)
    api: dict[str, Any] = dataclasses.field(default_factory=dict)
    patch: Callable[[], AbstractContextManager] = contextlib.nullcontext
    factory: Callable[[], nn.Module] | None = None

    def subject(self) -> Subject:
        def build() -> nn.Module:
            cell = pararnn.get_cell(self.cell).factory()
            if self.methods:
                cell.__class__ = type(type(cell).__name__, (type(cell),), dict(self.methods))
            return cell

        return Subject(self.cell, self.factory or build)

    def verdict(self, slug: str) -> str | None:
        """The violation that a clause finds, or None if it finds none."""
        check = load()[slug]
        context = Context(self.subject(), slug, api=Api(**self.api))
        with self.patch():
            try:
                check(context)
            except Violation as violation:
                return str(violation)
            except NotApplicable:
                return None
        return None


# -- cells -----------------------------------------------------------------------------------------


def gru(variant: Callable[..., Tensor]) -> dict[str, Any]:
    """A recurrence from ``variant(mixed, h, z, r, u_n, A_n)``, given correct gates."""

    def recurrence(self, h, u_z, u_r, u_n, A_z, A_r, A_n):
        z = torch.sigmoid(self._mixed(A_z, h) + u_z)
        r = torch.sigmoid(self._mixed(A_r, h) + u_r)
        return variant(self._mixed, h, z, r, u_n, A_n)

    return {"recurrence": recurrence}


def candidate(mixed, h, r, u_n, a):
    return torch.tanh(mixed(a, r * h) + u_n)


def m2rnn(variant: Callable[..., Tensor]) -> dict[str, Any]:
    def recurrence(self, H, k, v, u_f, W):
        f = torch.sigmoid(u_f)[..., None, None]
        return variant(H, k[..., :, None] * v[..., None, :], f, W)

    return {"recurrence": recurrence}


def lstm(variant: Callable[..., tuple[Tensor, Tensor]]) -> dict[str, Any]:
    """A recurrence from ``variant(c, f, z, o)``, given a correct forget gate and candidate;
    ``o(m)`` is the output gate with its peephole on ``m``."""

    def recurrence(self, c, h, u_f, u_z, u_o, A_f, A_z, A_o, C_f, C_o):
        f = torch.sigmoid(A_f * h + C_f * c + u_f)
        z = torch.tanh(A_z * h + u_z)
        return variant(c, f, z, lambda m: torch.sigmoid(A_o * h + C_o * m + u_o))

    return {"recurrence": recurrence}


def nlru(variant: Callable[..., Tensor]) -> dict[str, Any]:
    """A recurrence from ``variant(h, log_a, gated, n)``: the state, the logarithm of the decay, the
    input gate and the candidate."""

    def recurrence(self, h, u_r, u_i, u_n, w, Lambda):
        log_a = -8 * nn.functional.softplus(Lambda, threshold=40) * torch.sigmoid(u_r) - 1e-24
        return variant(h, log_a, torch.sigmoid(u_i), torch.tanh(u_n + w * h))

    return {"recurrence": recurrence}


def delta(
    key: Callable[[Tensor], Tensor] = lambda u: nn.functional.normalize(u, dim=-1),
    size: float = 2.0,
    order: int = 1,
    late: bool = False,
) -> dict[str, Any]:
    """A recurrence with other keys, another largest step size, another order of the corrections, or
    the decay after them."""

    def recurrence(self, H, *given):
        (_, *heads), gamma = self.apart(given)
        gamma = gamma[..., None, None] if isinstance(gamma, Tensor) else gamma
        H = H if late else gamma * H
        n = self.nh
        steps = list(zip(heads[:n], heads[n : 2 * n], heads[2 * n :], strict=True))
        for u, v, logit in steps[::order]:
            k = key(u)
            error = v[..., None, :] - k[..., None, :] @ H
            H = H + size * torch.sigmoid(logit)[..., None, None] * k[..., :, None] * error
        return gamma * H if late else H

    return {"recurrence": recurrence}


def in_chunks(change: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    """The chunked form with other arguments."""

    def changed(self, drives, h0=None, **options):
        given = {"drives": drives, "h0": h0} | options
        return type(self).__mro__[1].through(self, **(given | change(given)))

    return {"through": changed}


def min_gru(variant: Callable[..., Tensor]) -> dict[str, Any]:
    """A recurrence from ``variant(h, u_z, u_h, gamma)``."""

    def recurrence(self, h, *given):
        (u_z, u_h), gamma = self.apart(given)
        return variant(h, u_z, u_h, gamma)

    return {"recurrence": recurrence}


def positive(x: Tensor) -> Tensor:
    return torch.where(x >= 0, x + 0.5, torch.sigmoid(x))


def signed(variant: Callable[..., Tensor]) -> dict[str, Any]:
    """A recurrence from ``variant(h, a, added)``: the state, the transition, what the input adds."""

    def recurrence(self, h, u_z, v, u_s):
        return variant(h, torch.tanh(u_s), torch.sigmoid(u_z) * v)

    return {"recurrence": recurrence}


@takes_run
def without_resets(self, *given, resets=None, **named):
    return type(self).__mro__[1].forward(self, *given, **named)


def rotation(angle: Callable[..., Tensor]) -> dict[str, Any]:
    """A recurrence with another angle, from that of the input and the order of its grid."""

    def recurrence(self, x, y, u_zx, u_zy, v_x, v_y, theta, u_d, *grid):
        theta = angle(theta, *grid) if grid else theta
        c, s, flat = torch.cos(theta), torch.sin(theta), torch.tanh(u_d) * y
        return (
            c * x - s * flat + torch.sigmoid(u_zx) * v_x,
            s * x + c * flat + torch.sigmoid(u_zy) * v_y,
        )

    return {"recurrence": recurrence}


def on_grid(theta: Tensor, m: Tensor) -> Tensor:
    """The nearest angle of the grid, without a derivative."""
    return (theta * m / (2 * torch.pi)).round() * (2 * torch.pi / m)


def both_positive(self, *given):
    """Rotations with the same sign for both sines."""
    k = self.block_size
    h, drives = list(given[:k]), given[k:]
    for q, theta in enumerate(drives[: -2 * k]):
        r, p = divmod(q, k // 2)
        i = (2 * p + r % 2) % k
        j = (i + 1) % k
        c, s = torch.cos(theta), torch.sin(theta)
        h[i], h[j] = c * h[i] + s * h[j], s * h[i] + c * h[j]
    gates, values = drives[-2 * k : -k], drives[-k:]
    return tuple(x + torch.sigmoid(z) * v for x, z, v in zip(h, gates, values, strict=True))


def scale(log_a: Tensor) -> Tensor:
    return torch.sqrt(-torch.expm1(2 * log_a))


def blended(c: Tensor, f: Tensor, z: Tensor) -> Tensor:
    return f * c + (1 - f) * z


def output(memory: Tensor, o: Tensor) -> tuple[Tensor, Tensor]:
    return memory, o * torch.tanh(memory)


def cancelling_tanh(x: Tensor) -> Tensor:
    return 2 * torch.sigmoid(2 * x) - 1


def transposed_head(self, a: Tensor, h: Tensor) -> Tensor:
    heads = h.unflatten(-1, (self.n_heads, -1))
    return torch.einsum("nji,...nj->...ni", a, heads).flatten(-2)


def slstm(
    top: Callable[..., Tensor] = torch.maximum,
    old: Callable[..., Tensor] = lambda log_f, m, n, log_i: torch.where(
        n > 0, log_f + m, log_i - 200
    ),
    log_forget: Callable[[Tensor], Tensor] = nn.functional.logsigmoid,
    out: Callable[..., Tensor] = lambda o, c, n: o * c / n,
    normalizer: Callable[..., Tensor] = lambda f, n, i: f * n + i,
) -> dict[str, Any]:
    """A recurrence of the sLSTM with one of its parts replaced."""

    def recurrence(self, c, n, m, h, u_i, u_f, u_z, u_o, R_i, R_f, R_z, R_o):
        log_i, log_f = u_i + R_i * h, log_forget(u_f + R_f * h)
        z, o = torch.tanh(u_z + R_z * h), torch.sigmoid(u_o + R_o * h)
        left = old(log_f, m, n, log_i)
        m = top(left, log_i)
        f, i = torch.exp(left - m), torch.exp(log_i - m)
        c, n = f * c + i * z, normalizer(f, n, i)
        return c, n, m, out(o, c, n)

    return {"recurrence": recurrence}


def cfc(variant: Callable[..., Tensor]) -> dict[str, Any]:
    """A recurrence from ``variant(f, g, k, dt)``."""

    def recurrence(self, h, u_f, u_g, u_k, dt, R_f, R_g, R_k):
        g, k = torch.tanh(u_g + R_g * h), torch.tanh(u_k + R_k * h)
        return variant(u_f + R_f * h, g, k, dt[..., None])

    return {"recurrence": recurrence}


def timed(variant: Callable[..., Tensor]) -> dict[str, Any]:
    """A recurrence from ``variant(h, k, rate, dt)``."""

    def recurrence(self, h, u_f, u_k, dt, R_f, R_k):
        rate = nn.functional.softplus(u_f + R_f * h, threshold=40)
        return variant(h, torch.tanh(u_k + R_k * h), rate, dt[..., None])

    return {"recurrence": recurrence}


def gated(h: Tensor, k: Tensor, gate: Tensor) -> Tensor:
    return gate * h + (1 - gate) * k


def moved(h: Tensor, k: Tensor, rate: Tensor, dt: Tensor) -> Tensor:
    return h + torch.expm1(-rate * dt) * (h - k)


def fed_through(api: dict[str, Any]) -> dict[str, Any]:
    """Solvers for inputs that carry their time gaps in the last column."""
    return {name: fed(function) for name, function in api.items()}


def late_gaps(cell, x, config, options):
    """Every step is given the gap of the step before."""
    options["dt"] = options["dt"].roll(1, 1)
    return cell, x, config, options


def without_bias(self, x: Tensor) -> Tensor:
    return nn.functional.linear(x, self.in_proj.weight)


def reordered(self, u: Tensor) -> tuple[Tensor, ...]:
    z, r, n = pararnn.Cell.split(self, u)
    return r, z, n


def wrong_bound(self) -> tuple[Tensor, ...]:
    c = self.max_recurrent_norm
    maps = (self.A_z, self.A_r, self.A_n)
    return maps if c is None else tuple(a.clamp(-2 * c, 2 * c) for a in maps)


def dead_outside(self) -> tuple[Tensor, ...]:
    c = self.max_recurrent_norm
    maps = (self.A_z, self.A_r, self.A_n)
    return maps if c is None else tuple(a.clamp(-c, c) for a in maps)


def unbounded_peepholes(self) -> tuple[Tensor, ...]:
    return *pararnn.ParaLSTM.recurrent_params(self)[:3], self.C_f, self.C_o


def unchecked_step(self, h: Tensor, x: Tensor | None = None, *, drives: Tensor | None = None):
    u = self.in_proj(x) if drives is None else drives
    return self.advance(h, u, self.recurrent_params())


class SwappedTwice(pararnn.ParaGRU):
    """Spec and hand-written step agree, and both are wrong: update gate the other way round."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        with Spec("SwappedTwice") as s:
            h = s.state("h", bounds=(-1, 1))
            u_z, u_r, u_n = s.drives("u_z u_r u_n")
            A_z, A_r, A_n = s.maps("A_z A_r A_n", structure="diagonal")
            z = s.let("z", sigmoid(A_z(h) + u_z))
            r = s.let("r", sigmoid(A_r(h) + u_r))
            n = s.let("n", tanh(A_n(r * h) + u_n))
            s.next(h, z * h + (1 - z) * n)
        self.spec = s

    def recurrence(self, h, u_z, u_r, u_n, A_z, A_r, A_n):
        return super().recurrence(h, -u_z, u_r, u_n, -A_z, A_r, A_n)


class Blend(pararnn.Cell):
    """A gate between the state and a new value. Its Spec is its own, so that no program is cached."""

    def __init__(self) -> None:
        with Spec("Blend") as s:
            h = s.state("h", bounds=(-1, 1))
            u_z, u_n = s.drives("u_z u_n")
            z = s.let("z", sigmoid(u_z))
            s.next(h, z * h + (1 - z) * tanh(u_n))
        super().__init__(3, 4, spec=s)

    def recurrence(self, h: Tensor, u_z: Tensor, u_n: Tensor) -> Tensor:
        return torch.sigmoid(u_z) * h + torch.sigmoid(-u_z) * torch.tanh(u_n)


def wrong_derivative() -> AbstractContextManager:
    """``tanh' = 1 − tanh`` in the table from which Jacobians are derived."""
    row = dataclasses.replace(functions.PRIMITIVES[sympy.tanh], derivative=lambda x, y: 1 - y)
    return mock.patch.dict(functions.PRIMITIVES, {sympy.tanh: row})


def elman() -> nn.Module:
    """A fresh Spec every time, so that nothing derived before is cached."""
    with Spec("Elman") as s:
        h = s.state("h", bounds=(-1, 1))
        (u,) = s.drives("u")
        w = s.map("w", structure="diagonal")
        s.next(h, tanh(w(h) + u))
    return pararnn.Cell(3, 4, spec=s)


def past_the_projection(self, states, x=None, *, drives=None):
    if drives is None:
        drives = nn.functional.linear(x, self.in_proj.weight, self.in_proj.bias)
    return type(self).__mro__[1].output(self, states, drives=drives)


def multiplied_padding(self, x, h0, resets, dt, lengths):
    valid = torch.arange(x.shape[1], device=x.device) < lengths[:, None]
    output, h_n = self._run(x * valid[..., None], h0, resets, dt, lengths)
    return output * valid[..., None], h_n


def rounded_layer(*given, unrounded=False, **named):
    return solve_layer(*given, **named)


# -- solvers ---------------------------------------------------------------------------------------


def solving(change: Callable[..., Any]) -> dict[str, Any]:
    """An API whose ``solve`` is ``change(solution, cell, x, config, **options)``; every other
    way to solve goes through it."""

    def solve(cell, x=None, config=None, **options):
        return change(pararnn.solve(cell, x, config, **options), cell, x, config, **options)

    return through(solve)


def asking(change: Callable[..., tuple]) -> dict[str, Any]:
    """An API that changes the question: ``change(cell, x, config, options)``."""

    def solve(cell, x=None, config=None, **options):
        cell, x, config, options = change(cell, x, config, dict(options))
        return pararnn.solve(cell, x, config, **options)

    return through(solve)


def through(solve: Callable[..., Solution]) -> dict[str, Any]:
    def apply(method: str) -> Callable[..., Tensor]:
        return lambda cell, x, config=None, **options: (
            solve(cell, x, config, method=method, **options).states
        )

    return {
        "solve": solve,
        "newton_apply": apply("newton"),
        "shooting_apply": apply("shooting"),
    }


REPORTED = ("converged", "iterations", "passes", "residual", "residual_history", "fallback")


def saying(solution: Solution, **changes: Any) -> Solution:
    """A solution that says something else."""
    report = {name: changes.pop(name, getattr(solution, name)) for name in REPORTED}
    return dataclasses.replace(solution, progress=SimpleNamespace(**report), **changes)


def with_states(solution: Solution, states: Tensor) -> Solution:
    final = (
        states[:, -1].to(solution.final_state.dtype) if states.shape[1] else solution.final_state
    )
    slots = states.ndim == 4 and states.shape[-1] == solution.output.shape[-1]
    output = states[:, :, -1] if slots else states.flatten(2)
    return dataclasses.replace(solution, final_state=final, parts=(output, Kept(states)))


def initial(cell: nn.Module, solution: Solution, options: dict) -> Tensor:
    h0 = options.get("h0")
    return torch.zeros_like(solution.final_state) if h0 is None else h0


def off_by_one(solution, cell, x, config, **options):
    return with_states(solution, shifted(solution.states, initial(cell, solution, options)))


def boundary(solution, cell, x, config, **options):
    """The second chunk starts from the state one step too early."""
    cut = solution.chunk_length
    if x is None or not 1 < cut < x.shape[1]:
        return solution
    rest = loop(cell, x[:, cut:], solution.states[:, cut - 2])
    return with_states(solution, torch.cat([solution.states[:, :cut], rest], 1))


def stale_carry(cell, x, config, options):
    """Chunks start from their guesses, which are never corrected."""
    config = config or NewtonConfig(chunk_length=4)
    stale = dataclasses.replace(config, max_iters=0, warmup=1, on_divergence="ignore")
    if options.get("method") != "sequential":
        options["method"] = "shooting" if options.get("method") == "auto" else options.get("method")
    return cell, x, stale, options


def unchecked_three(solution, cell, x, config, **options):
    config = config or NewtonConfig()
    if config.max_iters is not None or options.get("method") != "newton":
        return solution
    config = dataclasses.replace(config, max_iters=3, on_divergence="ignore", chunk_length=None)
    quick = pararnn.solve(cell, x, config, **options)
    return saying(quick, converged=True, residual=0.0)


def one_step_gradient(solution, cell, x, config, **options):
    """Backpropagation truncated after one step: right states, wrong gradients."""
    if x is None or not x.shape[1]:
        return solution
    states = solution.states.detach()
    previous = shifted(states, initial(cell, solution, options))
    through_one = stepwise(cell, previous, x)
    return with_states(solution, states + through_one - through_one.detach())


def gradient_across_resets(solution, cell, x, config, **options):
    """Right states, but a gradient that goes on behind a reset."""
    if options.get("resets") is None:
        return solution
    leaky = pararnn.solve(cell, x, config, **{**options, "resets": None}).states
    return with_states(solution, solution.states + 1e-3 * (leaky - leaky.detach()))


def polishing(solution, cell, x, config, **options):
    """As many corrections for every chunk and row as the slowest needs: nothing is frozen."""
    if solution.iterations == 0:
        return solution
    config = dataclasses.replace(
        config or NewtonConfig(), max_iters=solution.iterations, on_divergence="ignore"
    )
    return pararnn.solve(cell, x, config, **options)


def leaking(states: Tensor) -> Tensor:
    return states + 1e-9 * states.mean(1, keepdim=True)


def no_rows_apart(solution, cell, x, config, **options):
    bad = solution.states.isnan().any()
    return with_states(solution, torch.where(bad, torch.nan, solution.states))


def noisy(states: Tensor) -> Tensor:
    return states + 1e-7 * torch.rand_like(states)


def altered(change: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    return solving(lambda solution, *_, **__: with_states(solution, change(solution.states)))


def reported(**changes: Callable[[Solution], Any]) -> dict[str, Any]:
    """Right states, wrong report."""
    return solving(
        lambda solution, *_, **__: saying(
            solution, **{name: change(solution) for name, change in changes.items()}
        )
    )


def narrow_inside(solution, cell, x, config, **options):
    """States carried in the dtype of the drives."""
    u = options.get("drives")
    if u is None or u.dtype in (torch.float64, torch.float32):
        return solution
    params = tuple(p.float() for p in cell.recurrent_params())
    h, states = options["h0"].float(), []
    for t in range(u.shape[1]):
        h = cell.advance(h.to(u.dtype).float(), u[:, t], params)
        states.append(h.to(u.dtype))
    return with_states(solution, torch.stack(states, 1))


def rounded(cell, x, config, options):
    if x is not None and x.dtype == torch.float32:
        x = x.bfloat16().float()
    return cell, x, config, options


def assuming_contiguous(cell, x, config, options):
    if x is not None and not x.is_contiguous():
        strides = torch.empty(x.shape, device="meta").stride()
        x = x.as_strided(x.shape, strides)
    return cell, x, config, options


def changing(**changes: Callable[[Any], Any]) -> Callable[..., tuple]:
    """A question with some options changed (``resets``, ``h0``)."""

    def change(cell, x, config, options):
        for name, of in changes.items():
            if options.get(name) is not None:
                options[name] = of(options[name])
        return cell, x, config, options

    return change


def configured(**fields: Any) -> Callable[..., tuple]:
    """A question with some settings overridden."""

    def change(cell, x, config, options):
        config = dataclasses.replace(config or NewtonConfig(), **fields)
        return cell, x, config, options

    return change


def expanding_h0(cell, x, config, options):
    h0 = options.get("h0")
    if h0 is not None and x is not None and h0.shape[0] == 1:
        options["h0"] = h0.expand(x.shape[0], *h0.shape[1:])
    return cell, x, config, options


def quasi_for_exact(cell, x, config, options):
    if config is not None and config.jacobian == "exact":
        config = dataclasses.replace(config, jacobian="quasi")
    return cell, x, config, options


def forgetful_layer(cell: nn.Module) -> nn.Module:
    layer = pararnn.ParaRNN(cell)
    step = layer.step
    layer.step = lambda x, state: step(x, None)  # type: ignore[method-assign]
    return layer


def scaled_bounds(*args: Any, **kwargs: Any):
    first, second = bounds.derivative_bounds(*args, **kwargs)
    return first / 2, second


def replaced(owner: Any, name: str, value: Any) -> Callable[[], AbstractContextManager]:
    return lambda: mock.patch.object(owner, name, value)


def loose() -> AbstractContextManager:
    def mismatch_of(*args: Any) -> tuple[Tensor, Tensor]:
        difference, relative = original(*args)
        return difference, relative * 1e-6

    original = engine.mismatch_of
    return mock.patch.object(engine, "mismatch_of", mismatch_of)


def floored() -> AbstractContextManager:
    """Mismatches relative to max(1, |state|)."""

    def sizes(*args: Any, **kwargs: Any) -> Tensor:
        return original(*args, **kwargs).clamp_min(1.0)

    original = solver_scale.sizes
    return mock.patch.object(walkers, "sizes", sizes)


def all_rows_together() -> AbstractContextManager:
    """The largest state of a batch, in the place of that of a lane."""

    def sizes(*args: Any, **kwargs: Any) -> Tensor:
        size = original(*args, **kwargs)
        return size.amax().expand_as(size)

    original = solver_scale.sizes
    return mock.patch.object(walkers, "sizes", sizes)


def holding_results(self: Operator, ctx: Any, arguments: Any, results: Any) -> None:
    saved(self, ctx, arguments, results)
    ctx.results = results


saved = Operator.save


def no_second_order(ctx: Any, v: Tensor) -> tuple[Tensor | None, ...]:
    before, u, _, *params = ctx.saved_tensors
    inputs = zip((v, before, u, *params), ctx.needs_input_grad[2:], strict=True)
    return None, None, *(torch.zeros_like(t) if needed else None for t, needed in inputs)


def constant_rounding(recurrence: SpecRecurrence, h: Tensor, u: Tensor) -> enclosure.Ball:
    ball = ENCLOSED(recurrence, h, u)
    size = 32 * torch.finfo(h.dtype).eps * ball.value.abs().max().clamp_min(1)
    return enclosure.Ball(ball.value, torch.zeros_like(ball.value) + size)


def rounding_without_start(recurrence: SpecRecurrence, h: Tensor, u: Tensor) -> enclosure.Ball:
    ball = ENCLOSED(recurrence, h, u)
    return enclosure.Ball(ball.value, torch.cat([ball.radius[:, 1:2], ball.radius[:, 1:]], 1))


def exact_product(self: enclosure.Ball, other: Any) -> enclosure.Ball:
    return enclosure.Ball((found := MULTIPLIED(self, other)).value, torch.zeros_like(found.value))


ENCLOSED, MULTIPLIED = enclosure.step, enclosure.Ball.__mul__


def times_zero(x: Tensor, b: Tensor, mark: Tensor | None) -> Tensor:
    """A reset as a product."""
    if mark is None:
        return x
    return x.copy_(torch.where(chunks.per_state(mark, x), 0 * x + b, x))


@contextlib.contextmanager
def resets_multiply() -> Iterator[None]:
    with (
        mock.patch.object(affine, "restarted", times_zero),
        mock.patch.object(chunks, "restarted", times_zero),
    ):
        yield


@contextlib.contextmanager
def rows_walked_again() -> Iterator[None]:
    """A row is walked again as a whole if one chunk of it must be."""

    def differing(end: Tensor, *given: Any) -> Tensor | None:
        found = original(end, *given)
        if found is None:
            return None
        return chunks.per_state(found.flatten(1).any(1), found).expand_as(found).clone()

    def misses(self: chunks.Chunks, place: Any, x0: Tensor) -> Tensor:
        return torch.ones(len(x0), dtype=torch.bool)

    original = chunks.differing
    with (
        mock.patch.object(chunks, "differing", differing),
        mock.patch.object(chunks.Chunks, "_misses", misses),
    ):
        yield


# -- the DRM ---------------------------------------------------------------------------------------


def bounded_twice(z: Tensor, radius: float | None) -> Tensor:
    return drm.bound_state(drm.bound_state(z, radius), radius)


def seen_late(self: Any, states: Tensor, start: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    return MAPS(self, torch.cat([states[:, 1:], states[:, -1:]], 1), states[:, 0], tokens)


def without_floor(self: Any, z: Tensor) -> drm.Metric:
    found = METRIC(self, z)
    least = torch.finfo(z.dtype).tiny  # a Metric takes numbers > 0
    return drm.Metric((found.diagonal - self.eps).clamp(min=least), found.factor)


def out_of_the_span(
    metric: Any,
    directions: Any,
    coefficients: Tensor,
    s: float,
    damping: float,
    form: str,
    *rest: Any,
) -> Tensor:
    return drm.naturalize(metric, directions.velocity(coefficients), s, damping)


@contextlib.contextmanager
def one_stream(seed: int, part: str, index: int = 0) -> Iterator[None]:
    if part == "embedding":
        torch.manual_seed(seed)
    yield


@contextlib.contextmanager
def streams_joined() -> Iterator[None]:
    """Parts draw one after the other."""
    with (
        mock.patch.object(pararnn.drm.model, "stream", one_stream),
        mock.patch.object(pararnn.drm.dynamics, "stream", one_stream),
    ):
        yield


def in_single(metric: Any, v: Tensor, damping: float = 0.0, precision: str = "safe") -> Tensor:
    return SOLVE(metric, v.float(), damping, "single").to(v.dtype)


def endpoint(self: Any, states: Tensor, *given: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
    """A correction from the end of the block, spread over it."""
    mixed, history = MIXER(self, states, *given)
    return mixed + 1e-6 * states[:, -1:], history


class Emptied(drm.Stream):
    def __init__(self, *values: Any, **named: Any):
        names = [f.name for f in dataclasses.fields(drm.Stream)]
        given = dict(zip(names, values, strict=False)) | named
        memory = given["memory"]
        super().__init__(**given | {"memory": None if memory is None else torch.zeros_like(memory)})


def divided(f: Tensor, u: Tensor, h0: Tensor | None = None, **options: Any) -> Any:
    """The scan as a cumulative sum, divided by the product of the gates before it."""
    product = f.cumprod(1)
    h = product * (u / product).cumsum(1)
    h = h if h0 is None else h + product * h0.unsqueeze(1)
    return (h, h[:, -1]) if options.get("return_state") else h


def all_terms(output: Any, targets: Tensor, config: Any, weights: Any = None) -> drm.Loss:
    loss = drm_loss(output, targets, config, weights)
    return dataclasses.replace(loss, total=loss.total + 0.0 * output.trace.energy().sum())


MAPS, METRIC = drm.SelectiveMemory.maps, drm.RelationalMetric.forward
MIXER, SOLVE, drm_loss = drm.CausalLocalMixer.run, drm.solve_metric, drm.drm_loss


def squared_first(z: Tensor, radius: float | None) -> Tensor:
    norm = torch.linalg.vector_norm(z, dim=-1, keepdim=True).clamp(min=radius)
    return radius * torch.tanh(z / norm)


def drm_mutants() -> Iterator[Mutant]:
    """Of the language model."""
    yield Mutant("bounded twice", "Bnd(Bnd(z)) for Bnd(z) in blocks", DRM,
                 ("drm-paths", "drm-model"),
                 patch=replaced(pararnn.drm.block, "bound_state", bounded_twice))  # fmt: skip
    yield Mutant("memory of its own state", "gates see z'_t for z'_{t-1}", DRM, ("drm-model",),
                 patch=replaced(drm.SelectiveMemory, "maps", seen_late))  # fmt: skip
    yield Mutant("no floor", "D without ε", DRM, ("drm-metric", "drm-model"),
                 patch=replaced(drm.RelationalMetric, "forward", without_floor))  # fmt: skip
    yield Mutant("solved in float32", "where the solution is to be safe", DRM, ("drm-metric",),
                 patch=replaced(drm, "solve_metric", in_single))  # fmt: skip
    yield Mutant("out of the span", "the whole metric for the Gram matrix", DRM,
                 ("drm-span", "drm-model"),
                 patch=replaced(pararnn.drm.dynamics, "naturalize_in_span", out_of_the_span))  # fmt: skip
    yield Mutant("one random stream", "a metric changes what other parts draw", DRM,
                 ("drm-ablation",),
                 patch=streams_joined)  # fmt: skip
    yield Mutant("nothing frozen", "what no logits depend on waits for gradients", DRM,
                 ("drm-ablation",),
                 patch=replaced(drm.DRM, "_unused", lambda self: []))  # fmt: skip
    yield Mutant("no path to what is idle", "a first state in a call from a given one", DRM,
                 ("drm-ablation",),
                 patch=replaced(drm.DRM, "_idle", lambda self, given, strength: []))  # fmt: skip
    yield Mutant("loose sweeps", "states taken as settled too early", DRM, ("drm-paths",),
                 patch=replaced(pararnn.drm.sweeps, "TOLERANCE", {torch.float64: 1e-5}))  # fmt: skip
    yield Mutant("squares that overflow", "a long state is bounded to 0", DRM, ("drm-paths",),
                 patch=replaced(drm, "bound_state", squared_first))  # fmt: skip
    yield Mutant("endpoint correction", "spread over its block", DRM, ("drm-causality", "drm-model"),
                 patch=replaced(drm.CausalLocalMixer, "run", endpoint))  # fmt: skip
    yield Mutant("emptied memory", "pieces of a text start without one", DRM, ("drm-streaming",),
                 patch=replaced(pararnn.drm.generation, "Stream", Emptied))  # fmt: skip
    yield Mutant("division", "by the product of the gates", DRM, ("drm-memory",),
                 patch=replaced(pararnn.drm.memory, "linear_scan", divided))  # fmt: skip
    yield Mutant("zero times NaN", "a term of weight 0 added", DRM, ("drm-terms",),
                 patch=replaced(drm, "drm_loss", all_terms))  # fmt: skip


def contradicting(generator: torch.Generator, batch: int, length: int, *, pairs: int = 8) -> Any:
    """Random symbols between write new pairs for keys that are asked for."""
    drawn = tasks.recall.recall(generator, batch, length, pairs=pairs)
    filler = drawn.x[:, 2 * pairs : length - pairs]
    filler.copy_(torch.randint(0, 64, filler.shape, generator=generator))
    return drawn


def ends_late(generator: torch.Generator, batch: int, length: int) -> Any:
    """A session's first bit counts for the session before."""
    drawn = tasks.words.session_parity(generator, batch, length)
    return dataclasses.replace(drawn, y=drawn.y ^ ((drawn.dt > 1) & (drawn.x == 1)).long())


def task(name: str, draw: Callable[..., Any]) -> Callable[[], AbstractContextManager]:
    """A task whose sequences are drawn otherwise."""
    other = dataclasses.replace(tasks.TASKS[name], draw=draw)
    return lambda: mock.patch.dict(tasks.TASKS, {name: other})


def task_mutants() -> Iterator[Mutant]:
    """Of the probe tasks."""
    yield Mutant("contradicting filler", "writes new pairs for keys that are asked for", DRM,
                 ("task-answers",), patch=task("MQAR", contradicting))  # fmt: skip
    yield Mutant("late session", "its first bit is not counted", DRM, ("task-answers",),
                 patch=task("session-parity", ends_late))  # fmt: skip
    yield Mutant("selected by what judges", "validation and fitted share their batches", DRM,
                 ("task-answers",), patch=shared_batches)  # fmt: skip


def shared_batches() -> AbstractContextManager:
    protocol = dataclasses.replace(tasks.WORDS)
    object.__setattr__(protocol, "validation", protocol.fitted)
    return mock.patch.object(tasks, "WORDS", protocol)


def mutants() -> Iterator[Mutant]:
    """All of them."""
    yield from drm_mutants()
    yield from task_mutants()
    swap = gru(lambda mix, h, z, r, u, a: (1 - r) * h + r * candidate(mix, h, z, u, a))
    for cell in (DIAG, HEAD):
        yield Mutant("swapped gates", "z and r exchanged", cell, ("equation", "agreement"), swap)
    yield Mutant("swapped update", "z h + (1 − z) n", DIAG, ("equation", "agreement"),
                 gru(lambda mix, h, z, r, u, a: z * h + (1 - z) * candidate(mix, h, r, u, a)))  # fmt: skip
    yield Mutant("missing 1 − z", "h + z n", DIAG, ("equation", "bounds"),
                 gru(lambda mix, h, z, r, u, a: h + z * candidate(mix, h, r, u, a)))  # fmt: skip
    yield Mutant("reset after the map", "r ⊙ (A_n h)", HEAD, ("equation", "jacobian"),
                 gru(lambda mix, h, z, r, u, a: (1 - z) * h + z * torch.tanh(r * mix(a, h) + u)))  # fmt: skip
    yield Mutant("no reset gate", "A_n h", DIAG, ("equation", "jacobian"),
                 gru(lambda mix, h, z, r, u, a: (1 - z) * h + z * torch.tanh(mix(a, h) + u)))  # fmt: skip
    yield Mutant("cancelling tanh", "2 σ(2x) − 1", DIAG, ("equation",),
                 gru(lambda mix, h, z, r, u, a: (1 - z) * h + z * cancelling_tanh(mix(a, r * h) + u)))  # fmt: skip
    yield Mutant("transposed head matrices", "h A instead of A h", HEAD,
                 ("equation", "jacobian", "agreement"), {"_mixed": transposed_head})  # fmt: skip
    yield Mutant("transposed right matrix", "H Wᵀ", MATRIX, ("equation", "jacobian"),
                 m2rnn(lambda H, kv, f, W: f * H + (1 - f) * torch.tanh(H @ W.mT + kv)))  # fmt: skip
    yield Mutant("swapped forget gate", "(1 − f) H + f Z", MATRIX, ("equation", "agreement"),
                 m2rnn(lambda H, kv, f, W: (1 - f) * H + f * torch.tanh(H @ W + kv)))  # fmt: skip
    yield Mutant("subtracted gate", "1 − f for σ(−x)", MATRIX, ("equation",),
                 m2rnn(lambda H, kv, f, W: f * H + (1 - f) * torch.tanh(H @ W + kv)))  # fmt: skip
    yield Mutant("printed subtraction", "1 − z for σ(−x) in programs", "Blend", ("equation",),
                 patch=replaced(Complements, "__call__", lambda self, expr: expr), factory=Blend)  # fmt: skip
    yield Mutant("missing 1 − f", "f H + Z", MATRIX, ("equation", "bounds"),
                 m2rnn(lambda H, kv, f, W: f * H + torch.tanh(H @ W + kv)))  # fmt: skip
    yield Mutant("early peephole", "the output gate sees the old memory", LSTM,
                 ("equation", "jacobian"),
                 lstm(lambda c, f, z, o: output(blended(c, f, z), o(c))))  # fmt: skip
    yield Mutant("no peephole", "the output gate sees no memory", LSTM, ("equation", "jacobian"),
                 lstm(lambda c, f, z, o: output(blended(c, f, z), o(0 * c))))  # fmt: skip
    yield Mutant("uncoupled gates", "f c + z", LSTM, ("equation", "bounds"),
                 lstm(lambda c, f, z, o: output(f * c + z, o(f * c + z))))  # fmt: skip
    yield Mutant("swapped coupled gates", "(1 − f) c + f z", LSTM, ("equation", "agreement"),
                 lstm(lambda c, f, z, o: output(blended(c, 1 - f, z), o(blended(c, 1 - f, z)))))  # fmt: skip
    yield Mutant("bare output", "o c for o tanh(c)", LSTM, ("equation", "jacobian"),
                 lstm(lambda c, f, z, o: (blended(c, f, z), o(blended(c, f, z)) * blended(c, f, z))))  # fmt: skip
    yield Mutant("swapped slots", "(h, c) returned for (c, h)", LSTM, ("equation", "agreement"),
                 lstm(lambda c, f, z, o: output(blended(c, f, z), o(blended(c, f, z)))[::-1]))  # fmt: skip
    yield Mutant("unbounded peepholes", "only the recurrent vectors are projected", LSTM,
                 ("constraint",), {"recurrent_params": unbounded_peepholes})  # fmt: skip
    yield Mutant("cancelling scale", "√(1 − a²) from a", NLRU, ("equation",),
                 nlru(lambda h, a, i, n: a.exp() * h + torch.sqrt(1 - a.exp() ** 2) * i * n))  # fmt: skip
    yield Mutant("squared scale", "(1 − a²) for its root", NLRU,
                 ("equation", "jacobian"),
                 nlru(lambda h, a, i, n: a.exp() * h + scale(a) ** 2 * i * n))  # fmt: skip
    yield Mutant("scale 1 − a", "a GRU's", NLRU, ("equation", "agreement"),
                 nlru(lambda h, a, i, n: a.exp() * h - torch.expm1(a) * i * n))  # fmt: skip
    yield Mutant("dropped scale", "a h + i n", NLRU, ("equation", "agreement"),
                 nlru(lambda h, a, i, n: a.exp() * h + i * n))  # fmt: skip
    yield Mutant("full start", "the stabilizer of the empty state counts as 0", SLSTM,
                 ("equation",), slstm(old=lambda log_f, m, n, log_i: log_f + m))  # fmt: skip
    yield Mutant("forgotten stabilizer", "m not carried over", SLSTM, ("equation", "jacobian"),
                 slstm(old=lambda log_f, m, n, log_i: torch.where(n > 0, log_f, log_i - 200)))  # fmt: skip
    yield Mutant("minimum", "for the maximum", SLSTM, ("equation", "agreement"),
                 slstm(top=torch.minimum))  # fmt: skip
    yield Mutant("stabilizer without gradient", "m detached", SLSTM, ("jacobian", "gradients"),
                 slstm(top=lambda a, b: torch.maximum(a, b).detach()))  # fmt: skip
    yield Mutant("forget gate without logarithm", "σ for log σ", SLSTM, ("equation", "agreement"),
                 slstm(log_forget=torch.sigmoid))  # fmt: skip
    yield Mutant("no normalizer", "o c for o c / n", SLSTM, ("equation", "jacobian"),
                 slstm(out=lambda o, c, n: o * c))  # fmt: skip
    yield Mutant("epsilon", "o c / (n + 1e-6)", SLSTM, ("equation",),
                 slstm(out=lambda o, c, n: o * c / (n + 1e-6)))  # fmt: skip
    yield Mutant("early forgetting", "n forgets what it counts now", SLSTM, ("equation", "agreement"),
                 slstm(normalizer=lambda f, n, i: f * (n + i)))  # fmt: skip
    yield Mutant("timeless gate", "σ(−f) for σ(−f Δt)", CFC, ("time-gap", "equation"),
                 cfc(lambda f, g, k, dt: gated(g, k, torch.sigmoid(-f))))  # fmt: skip
    yield Mutant("gate the other way", "σ(f Δt)", CFC, ("equation", "agreement"),
                 cfc(lambda f, g, k, dt: gated(g, k, torch.sigmoid(f * dt))))  # fmt: skip
    yield Mutant("gap without gradient", "dt detached", CFC, ("gradients", "time-gap"),
                 cfc(lambda f, g, k, dt: gated(g, k, torch.sigmoid(-f * dt.detach()))))  # fmt: skip
    yield Mutant("half a step in no time", "σ(−rate Δt) for its exponential", TIMED,
                 ("time-gap", "equation"),
                 timed(lambda h, k, rate, dt: gated(h, k, torch.sigmoid(-rate * dt))))  # fmt: skip
    yield Mutant("cancelling decay", "1 − exp(−x)", TIMED, ("time-gap",),
                 timed(lambda h, k, rate, dt: gated(h, k, torch.exp(-rate * dt))))  # fmt: skip
    yield Mutant("least gap", "gaps below 1e-8 count as 1e-8", TIMED, ("time-gap",),
                 timed(lambda h, k, rate, dt: moved(h, k, rate, dt.clamp_min(1e-8))))  # fmt: skip
    yield Mutant("Euler step", "rate Δt for 1 − exp(−rate Δt)", TIMED, ("equation", "time-gap"),
                 timed(lambda h, k, rate, dt: gated(h, k, 1 - rate * dt)))  # fmt: skip
    yield Mutant("late gaps", "the gap of the step before", TIMED, ("agreement", "time-gap"),
                 api=fed_through(asking(late_gaps)))  # fmt: skip
    yield Mutant("bare candidate", "W_h x for g(W_h x)", LOG, ("positivity", "equation"),
                 min_gru(lambda h, u_z, u_h, _: torch.sigmoid(-u_z) * h
                         + torch.sigmoid(u_z) * u_h))  # fmt: skip
    yield Mutant("unchecked start", "negative ones are taken", LOG, ("positivity",),
                 {"check_start": lambda self, name, h: None})  # fmt: skip
    yield Mutant("all fades", "what the input adds, too", "MinGRU[decay]", ("decay", "equation"),
                 min_gru(lambda h, u_z, u_h, gamma: gamma * (
                     torch.sigmoid(-u_z) * h + torch.sigmoid(u_z) * positive(u_h))))  # fmt: skip
    yield Mutant("other gaps", "negative ones count as positive, NaN as 7", SIGNED, ("decay",),
                 {"_gaps": lambda self, dt, dims: dt.abs().nan_to_num(7.0)})  # fmt: skip
    yield Mutant("a little quadratic", "a h + h² / 1e6", SIGNED, ("linearity", "equation"),
                 signed(lambda h, a, added: a * h + 1e-6 * h * h + added))  # fmt: skip
    yield Mutant("lost sign", "|a| h", SIGNED, ("equation", "jacobian"),
                 signed(lambda h, a, added: a.abs() * h + added))  # fmt: skip
    yield Mutant("off the grid", "angles are not rounded", ROTATION, ("snap", "equation"),
                 rotation(lambda theta, m: theta))  # fmt: skip
    yield Mutant("flat grid", "the derivative of a rounding is zero", ROTATION,
                 ("snap", "gradients"), rotation(on_grid))  # fmt: skip
    yield Mutant("no rotation", "both sines positive", GIVENS, ("orthogonality", "equation"),
                 {"recurrence": both_positive})  # fmt: skip
    yield Mutant("wrong twice", "Spec and step agree on z h + (1 − z) n", DIAG, ("equation",),
                 factory=lambda: SwappedTwice(5, 6))  # fmt: skip
    yield Mutant("dropped bias", "drives without b", DIAG, ("equation",), {"drives": without_bias})
    yield Mutant("reordered drives", "packed r, z, n", HEAD, ("equation",), {"split": reordered})
    yield Mutant("wrong clamp", "twice the bound", DIAG, ("constraint",),
                 {"recurrent_params": wrong_bound})  # fmt: skip
    yield Mutant("dead clamp", "no gradient outside the bound", DIAG, ("constraint",),
                 {"recurrent_params": dead_outside})  # fmt: skip
    yield Mutant("unbounded heads", "spectral norm not limited", HEAD, ("constraint",),
                 {"recurrent_params": lambda self: (self.A_z, self.A_r, self.A_n)})  # fmt: skip
    yield Mutant("wrong class", "a head cell that says diag", HEAD, ("structure",),
                 {"jac_structure": property(lambda s: "diag", lambda s, v: None)})  # fmt: skip
    yield Mutant("unchecked step", "no argument checks", DIAG, ("errors",),
                 {"step": unchecked_step})  # fmt: skip

    yield Mutant("transposed JVP", "Jᵀv for Jv", HEAD, ("jacobian",), api={"jvp": oracle.vjp})
    yield Mutant("wrong derivative", "tanh' = 1 − tanh", DIAG, ("jacobian-proof", "jacobian"),
                 patch=wrong_derivative, factory=elman)  # fmt: skip
    yield Mutant("bounds too small", "half the first derivative's bound", DIAG, ("bounds",),
                 api={"derivative_bounds": scaled_bounds})  # fmt: skip

    yield Mutant("ignored h0", "every solve starts from zero", DIAG,
                 ("agreement", "streaming", "residual"),
                 api=asking(changing(h0=torch.zeros_like)))  # fmt: skip
    yield Mutant("off by one", "h_{t−1} returned for h_t", DIAG, ("agreement", "residual"),
                 api=solving(off_by_one))  # fmt: skip
    yield Mutant("raw keys", "not divided by their norm", DELTA, ("equation", "readout"),
                 delta(key=lambda u: u))  # fmt: skip
    yield Mutant("no reflection", "β in (0, 1)", DELTA, ("equation", "readout"),
                 delta(size=1.0))  # fmt: skip
    yield Mutant("last correction first", "micro-steps in reverse", "DeltaMinGRU[nh=2]",
                 ("equation", "readout"), delta(order=-1))  # fmt: skip
    yield Mutant("late decay", "what is written fades, too", "DeltaMinGRU[decay]",
                 ("decay", "equation"), delta(late=True))  # fmt: skip
    yield Mutant("another read-out", "half the query", DELTA, ("readout",),
                 {"reading": lambda self, H, q: (q[..., None, :] @ H).squeeze(-2) / 2})  # fmt: skip
    yield Mutant("forgotten start", "chunks start from zero", DELTA, ("readout",),
                 in_chunks(lambda given: {"h0": None}))  # fmt: skip
    yield Mutant("resets of states only", "not of what is read", DELTA, ("readout",),
                 in_chunks(lambda given: {"resets": None}))  # fmt: skip
    yield Mutant("NaN in the chunk", "earlier tokens, too", DELTA, ("readout",),
                 patch=replaced(scan_delta, "_solved", lambda s, start, resets, most, run:
                                run(s, start, most, resets)))  # fmt: skip

    yield Mutant("chunk boundary", "a chunk starts one state early", HEAD,
                 ("agreement", "residual", "linear-solve"), api=solving(boundary))  # fmt: skip
    yield Mutant("stale carry", "chunk starts never corrected", DIAG, ("agreement", "residual"),
                 api=asking(stale_carry))  # fmt: skip
    yield Mutant("unchecked K = 3", "three iterations, called converged", HEAD,
                 ("residual", "agreement"), api=solving(unchecked_three))  # fmt: skip
    yield Mutant("stale final state", "the state before the last", DIAG,
                 ("residual", "streaming"),
                 api=reported(final_state=lambda s: s.states[:, -2] if s.states.shape[1] > 1
                              else s.final_state))  # fmt: skip
    yield Mutant("single precision inside", "float64 solved in float32", DIAG,
                 ("agreement", "streaming"), api=altered(lambda h: h.float().to(h.dtype)))  # fmt: skip
    yield Mutant("rounded inputs", "float32 inputs as bfloat16", MATRIX,
                 ("agreement",), api=asking(rounded))  # fmt: skip
    yield Mutant("wrong Newton operator", "a diagonal for the exact Jacobian", HEAD,
                 ("linear-solve", "convergence"), api=asking(quasi_for_exact))  # fmt: skip

    yield Mutant("optimistic count", "iterations under-reported", DIAG, ("pinned",),
                 api=reported(iterations=lambda s: max(s.iterations - 1, 0)))  # fmt: skip
    yield Mutant("optimistic residual", "always zero", DIAG, ("pinned",),
                 api=reported(residual=lambda s: 0.0, residual_history=lambda s: (0.0,)))  # fmt: skip
    yield Mutant("always converged", "says so", DIAG, ("pinned", "divergence"),
                 api=reported(converged=lambda s: True))  # fmt: skip
    yield Mutant("silent divergence", "on_divergence ignored", DIAG, ("divergence",),
                 api=asking(configured(on_divergence="ignore")))  # fmt: skip
    yield Mutant("too many iterations", "counts twice", DIAG, ("convergence", "pinned"),
                 api=reported(iterations=lambda s: 2 * s.iterations + s.chunks))  # fmt: skip
    yield Mutant("residual as certificate", "a small residual taken for a small error", HEAD,
                 ("certificate",), api=reported(error_bound=lambda s: s.residual))  # fmt: skip
    yield Mutant("no certificate", "always infinite", DIAG, ("certificate",),
                 api=reported(error_bound=lambda s: float("inf")))  # fmt: skip
    yield Mutant("constant rounding", "32 units in the last place, whatever was evaluated", DIAG,
                 ("certificate",),
                 patch=replaced(enclosure, "step", constant_rounding))  # fmt: skip
    yield Mutant("start forgotten", "the rounding of the step from h0 taken for that of a later one", DIAG,
                 ("certificate",),
                 patch=replaced(enclosure, "step", rounding_without_start))  # fmt: skip
    yield Mutant("exact products", "the rounding of products is left out", DIAG,
                 ("certificate",),
                 patch=replaced(enclosure.Ball, "__mul__", exact_product))  # fmt: skip

    yield Mutant("one-step gradient", "truncated backpropagation", DIAG,
                 ("linear-solve", "gradients"), api=solving(one_step_gradient))  # fmt: skip
    yield Mutant("adjoint not transposed", "J for Jᵀ", HEAD, ("linear-solve", "gradients"),
                 patch=replaced(SpecRecurrence, "transpose", SpecRecurrence.tangent))  # fmt: skip
    yield Mutant("no second derivative", "the adjoint's own derivative is zero", DIAG,
                 ("double-backward",),
                 patch=replaced(AdjointSolve, "backward", staticmethod(no_second_order)))  # fmt: skip

    yield Mutant("h0 without gradient", "detached", DIAG, ("linear-solve", "gradients"),
                 api=asking(changing(h0=lambda h: h.detach() + 0 * h)))  # fmt: skip
    yield Mutant("final state without gradient", "detached", DIAG, ("gradients",),
                 api=reported(final_state=lambda s: s.final_state.detach()))  # fmt: skip
    yield Mutant("loose mismatch", "accepted when a million times too large", HEAD,
                 ("agreement",), patch=loose)  # fmt: skip
    yield Mutant("gradient across resets", "the mask is not used backwards", HEAD, ("resets",),
                 api=solving(gradient_across_resets))  # fmt: skip

    yield Mutant("dropped resets", "mask ignored", DIAG, ("resets",),
                 api=asking(changing(resets=lambda m: torch.zeros_like(m))))  # fmt: skip
    yield Mutant("a mixer goes on", "resets are taken and ignored", SIGNED, ("resets",),
                 {"forward": without_resets})  # fmt: skip
    yield Mutant("resets multiply", "zero times what came before", SIGNED, ("resets",),
                 patch=resets_multiply)  # fmt: skip
    yield Mutant("zero times NaN", "in the gradients of what came before a reset", DIAG, ("resets",),
                 patch=replaced(adjoint, "silent", lambda *_: None))  # fmt: skip
    yield Mutant("trusted products", "what they find is not checked", SIGNED, ("scan-range",),
                 patch=replaced(chunks.Chunks, "settle", lambda self: None))  # fmt: skip
    yield Mutant("trusted chunks", "of a delta rule, whatever their products", SIGNED, ("scan-range",),
                 patch=replaced(scan_delta, "in_range",
                                lambda run, given, start, *_: run(given, start)))  # fmt: skip
    yield Mutant("rows as wholes", "one chunk decides for all of its row", SIGNED, ("scan-range",),
                 patch=rows_walked_again)  # fmt: skip
    yield Mutant("late reset", "one step after", MATRIX, ("resets",),
                 api=asking(changing(resets=lambda m: m.roll(1, 1))))  # fmt: skip
    yield Mutant("polishing all", "chunks not frozen", HEAD, ("causality", "batch-independence"),
                 api=solving(polishing))  # fmt: skip
    yield Mutant("leak through time", "a mean over time", DIAG, ("causality", "variable-length"),
                 api=altered(leaking))  # fmt: skip
    yield Mutant("leak through the batch", "a mean over rows", DIAG, ("batch-independence",),
                 api=altered(lambda h: h + 1e-13 * h.mean(0) if h.numel() else h))  # fmt: skip
    yield Mutant("forgetful layer", "ParaRNN.step drops its state", DIAG, ("streaming",),
                 api={"layer": forgetful_layer})  # fmt: skip
    yield Mutant("own output", "an autograd node holds what it returned", DIAG, ("memory",),
                 patch=replaced(Operator, "save", holding_results))  # fmt: skip
    yield Mutant("reports with a graph", "Solution.detached does nothing", DIAG, ("memory",),
                 patch=replaced(Solution, "detached", lambda self: self))  # fmt: skip
    yield Mutant("reports that lead to a graph", "only the output is detached", LOG, ("memory",),
                 patch=replaced(Kept, "detached", lambda self: self))  # fmt: skip
    yield Mutant("noise", "1e-7 of it", DIAG, ("determinism",), api=altered(noisy))
    yield Mutant("contiguous assumed", "strides ignored", DIAG, ("invariances",),
                 api=asking(assuming_contiguous))  # fmt: skip
    yield Mutant("zero for T = 0", "final state not h0", DIAG, ("shapes",),
                 api=reported(final_state=lambda s: s.final_state if s.states.shape[1]
                              else s.final_state * 0))  # fmt: skip
    yield Mutant("narrow inside", "states carried in half precision", DIAG, ("half-precision",),
                 api=solving(narrow_inside))  # fmt: skip
    yield Mutant("broadcast h0", "one h0 for all rows", DIAG, ("errors",),
                 api=asking(expanding_h0))  # fmt: skip
    yield Mutant("NaN everywhere", "one bad row spoils the batch", DIAG, ("nan-containment",),
                 api=solving(no_rows_apart))  # fmt: skip
    for cell in (DIAG, HEAD, MATRIX, LSTM):
        yield Mutant("absolute floor", "small mismatches count relative to 1", cell, ("scale",),
                     patch=floored)  # fmt: skip
    yield Mutant("scale of the batch", "a small row is compared to a large one", DIAG,
                 ("scale", "batch-independence"), patch=all_rows_together)  # fmt: skip
    yield Mutant("success of NaN", "converged whatever the states are", DIAG, ("finite",),
                 patch=replaced(Solution, "finite", True))  # fmt: skip
    yield Mutant("past the projection", "queries from its weight", DELTA, ("modules",),
                 {"output": past_the_projection})  # fmt: skip
    yield Mutant("bypassed cell", "a layer does not call it", DIAG, ("modules",),
                 patch=replaced(para_rnn, "entered",
                                lambda module, run, *given, **named: run(*given, **named)))  # fmt: skip
    yield Mutant("stale weights", "a pruned weight as it was at the last call", DIAG, ("modules",),
                 patch=replaced(pararnn.cells.cell, "computed_weights", lambda module: None))  # fmt: skip
    yield Mutant("multiplied padding", "by 0, which leaves NaN", DIAG, ("variable-length",),
                 patch=replaced(para_rnn.ParaRNN, "_padded", multiplied_padding))  # fmt: skip
    yield Mutant("rounded final states", "of padded rows in half precision", DIAG,
                 ("variable-length",),
                 patch=replaced(para_rnn, "solve_layer", rounded_layer))  # fmt: skip
    yield Mutant("unchecked steps", "from any state", LOG, ("positivity",),
                 {"check_state": lambda self, name, h: None})  # fmt: skip
    yield Mutant("endless gaps", "infinity is one", TIMED, ("time-gap",),
                 patch=replaced(checks, "FOREVER", float("inf")))  # fmt: skip
    yield Mutant("any bound", "True is 1", DIAG, ("constraint",),
                 patch=replaced(checks, "bound", lambda name, value: value))  # fmt: skip
    yield Mutant("whole turns", "are not taken off an angle", ROTATION, ("snap",),
                 rotation(lambda theta, m: on_grid(theta, m) + (theta - theta.detach())))  # fmt: skip
    yield Mutant("NaN hidden", "replaced by zero", DIAG, ("nan-containment",),
                 api=altered(torch.nan_to_num))  # fmt: skip
