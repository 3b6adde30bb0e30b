"""The recurrent path by repeated sweeps: a batch of velocities, and a linear recurrence each.

The step is ``z ↦ Bnd(z + dt v)``, so the Jacobian of the bound alone, without that of the velocity,
makes a good correction: no derivative of a network is taken. Without a bound this is Picard's
iteration for an integral equation, ``z_t = z_0 + Σ dt v(z_{j-1})``, whose first sweep from a constant
guess is the block path of the notes over the whole window.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from pararnn import checks

from .bound import fits_dtype
from .cotangents import cotangents
from .dynamics import DRMDynamics
from .iteration import Autocast, Plan, Report, sweep
from .networks import shifted
from .steps import Slopes, Steps, require_plain_steps

TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-6}
HALF_TOLERANCE = 1e-3
ROUGH = 0.01  # relative accuracy of an error
SWEEPS = 16  # for errors, after which they are carried one after the other
ROUNDINGS, EPSILON = (
    8,
    2.0**-53,
)  # how many times a step rounds in float64 as it is seen to, and its unit


@dataclass(frozen=True)
class Sweeps:
    """States and how they were reached.

    Attributes
    ----------
    states : Tensor
        ``(B, T, d_state)``.
    corrections : tuple of int
        How many each window took. A correction costs a step of all tokens of the window at once.
    looped : tuple of bool
        Windows that reached the largest number of corrections; what had not settled in them was
        computed by the loop. What is not finite never settles.
    remainder : float
        An estimate of the largest distance from the loop's states, over the largest entry of the states so far in
        their window and row: the sum over windows of what is left after the last correction, if
        corrections go on shrinking at the rate at which they last shrank. Where a difference of states
        grows over time, the error is larger; rounding is not in it. NaN if a state is not finite.
    error_estimate : float, optional
        With ``estimate``, an estimate from above of the distance of the states from the recurrence without
        rounding, absolute, growth included; no proof. It is twice the sum of two numbers. One is the largest
        entry of the next Newton correction of the whole sequence, computed in float64. The other is what
        rounding in float64 grows to: an estimate too, as each step is taken to round by 8 times what it is
        seen to, with random signs. Infinite, nothing being known, unless one more correction is at most half as large,
        as it is where squares of the distance are negligible. The loop in the dtype of the states has its
        own distance from there. NaN if a state is not finite, None if not asked for.
    backward : list of int
        Corrections of each window's cotangents, from the last window to the first; -1 where the
        loop was differentiated instead. Empty before the backward pass.
    """

    states: Tensor = field(repr=False)
    corrections: tuple[int, ...]
    looped: tuple[bool, ...]
    remainder: float
    error_estimate: float | None = None
    backward: list[int] = field(default_factory=list)

    @property
    def converged(self) -> bool:
        """Whether no window needed the loop."""
        return not any(self.looped)

    @property
    def reason(self) -> str | None:
        """Why windows were left to the loop, and what to change, in a sentence; None where none was."""
        if self.converged:
            return None
        finite = self.states.detach().isfinite().all(-1)
        if bool(finite.all()):
            return (
                f"{sum(self.looped)} of {len(self.looped)} windows had not settled after "
                f"{max(self.corrections)} corrections and were left to the loop; raise parallel_corrections, or "
                "shorten parallel_window or dt."
            )
        first = int((~finite).int().argmax(1).where(~finite.all(1), finite.shape[1]).min())
        before = self.states.detach()[:, :first].abs()
        largest = f"{float(before.max()):.3g}" if before.numel() else "that of the start"
        return (
            f"states are not finite from token {first} on, the largest entry before being {largest}: a step "
            "overflows, starts from no number, or has a metric without a factor in its precision; bound the "
            "state (bounded_state=True), or lower dt."
        )


@torch.compiler.disable(
    reason="sweep_states ends where its numbers have settled, so it cannot be traced; use path='recurrent' or "
    "'block' with fullgraph=True, or compile without it."
)
def sweep_states(
    dynamics: DRMDynamics,
    z: Tensor,
    e: Tensor,
    strength: float,
    *,
    window: int = 0,
    max_corrections: int = 0,
    tol: float = 0.0,
    estimate: bool = False,
) -> Sweeps:
    r"""States of the recurrent path by quasi-Newton corrections from constant guesses.

    With mismatches \(r_t = f(z_{t-1}, e_t) - z_t\), corrections solve
    \(\Delta_t = A_t\,\Delta_{t-1} + r_t\), where \(A_t\) is the Jacobian of the bound, the identity
    without one. A state settles when it and all before it are within the tolerance, so what comes
    later, and other sequences of the batch, do not change it. After k corrections the first k states
    of a window are those of the loop.

    Gradients are those of the loop (once; a second derivative raises). Nothing is kept for them but
    the states: a window is computed again when its cotangents are.

    Parameters
    ----------
    dynamics
        With a transition.
    z, e
        First state ``(B, d_state)`` and embeddings ``(B, T, d_token)``.
    strength
        Of naturalization.
    window
        Tokens that are solved for at once, each window from the last state of the one before; memory
        grows with its square. 0: the whole sequence.
    max_corrections
        Of a window, before the loop takes over. 0: as many as it has tokens, which always suffices.
    tol
        Estimated error of a window to end at, over the largest entry so far. 0: 1e-13 in float64, 1e-6 in
        float32, 1e-3 where velocities are in half precision.
    estimate
        Also compute ``error_estimate``, with Jacobian–vector products in float64: about three times the work.

    Raises
    ------
    ValueError
        If a step would depend on more than its state and token: geometry that is kept for several
        steps, a graph that is cut, or dropout in training; or the dtype of ``z`` does not have the radius.
    NotImplementedError
        Under a transform of ``torch.func``.
    """
    require_plain_steps(dynamics)
    if dynamics.radius is not None:  # half precision is bounded in float32, which has other numbers
        fits_dtype("bound_state: radius", dynamics.radius, z.dtype)
    params = list(dynamics.parameters())
    if checks.transformed(z, e, *params):
        raise NotImplementedError(
            "sweep_states: got tensors of a torch.func transform, expected plain ones; use "
            "path='recurrent' there, or torch.autograd.grad."
        )
    autocast = Autocast(e.device)
    dtype = autocast.dtype if autocast.enabled else z.dtype
    plan = Plan(
        Steps(dynamics, strength),
        autocast,
        window or max(1, e.shape[1]),
        max_corrections,
        tol or TOLERANCE.get(dtype, HALF_TOLERANCE),
    )
    report = Report()
    states = cast(Tensor, _Solve.apply(plan, report, z, e, *params))
    return Sweeps(
        states,
        tuple(report.corrections),
        tuple(report.looped),
        report.error,
        _error_estimate(plan, z.detach(), e.detach(), states.detach()) if estimate else None,
        report.backward,
    )


@torch.no_grad()
def _error_estimate(plan: Plan, z: Tensor, e: Tensor, states: Tensor) -> float:
    """Of given states, in float64: twice their error to first order and what rounding is estimated to
    grow to; infinite unless a second correction is smaller."""
    exact = _Exact(plan, z, e)
    errors, rounding = exact.errors(states.double(), noise=True)
    again, _ = exact.errors(states.double() + errors)
    first, second, rounded = (_largest(x) for x in (errors, again, rounding))
    if not bool(states.isfinite().all()):
        return math.nan
    return 2 * (first + rounded) if second <= first / 2 + rounded else math.inf


def _largest(x: Tensor) -> float:
    return float(x.abs().max()) if x.numel() else 0.0


class _Exact:
    """The recurrence in float64, whatever the dtype of parameters and states."""

    def __init__(self, plan: Plan, z: Tensor, e: Tensor):
        self.plan, self.z, self.e = plan, z.double(), e.double()
        own = (*plan.steps.named_parameters(), *plan.steps.named_buffers())
        self.own = {k: v.detach() for k, v in own}
        self.wide = self._as(torch.float64)

    def _as(self, dtype: torch.dtype) -> dict[str, Tensor]:
        return {k: v.to(dtype) if v.is_floating_point() else v for k, v in self.own.items()}

    def step(self, z: Tensor, e: Tensor, parameters: dict[str, Tensor] | None = None) -> Tensor:
        with checks.full_precision(z.device):
            own = self.wide if parameters is None else parameters
            return cast(Tensor, torch.func.functional_call(self.plan.steps, own, (z, e)))

    def rounding(self, before: Tensor, tokens: Tensor, reached: Tensor) -> Tensor:
        """What a step is estimated to round by in float64, ``(B, T, 1)``: several times what it is measured to
        round by in float32, in units of that dtype, and at least a few roundings of its largest number."""
        narrow = self.step(before.float(), tokens.float(), self._as(torch.float32))
        seen = (narrow.double() - reached).abs() * (EPSILON / 2.0**-24)
        seen = torch.where(seen.isfinite(), seen, 0.0).amax(-1, keepdim=True)
        size = torch.maximum(reached.abs(), before.abs()).amax(-1, keepdim=True)
        return ROUNDINGS * torch.maximum(seen, EPSILON * size)

    def errors(self, states: Tensor, noise: bool = False) -> tuple[Tensor, Tensor]:
        """Errors of states to first order, ``δ_t = J_t δ_{t-1} + r_t`` with mismatches ``r``; with noise
        also those that rounding makes, ``r`` having its size and random signs."""
        rows, d = self.z.shape
        start, count = self.z, 2 if noise else 1
        error = self.z.new_zeros(count * rows, d)
        found = []
        for at in range(0, self.e.shape[1], self.plan.window):
            tokens, known = (x[:, at : at + self.plan.window] for x in (self.e, states))
            before = shifted(start, known)
            reached = self.step(before, tokens)
            residual = self.plan.steps.bounded(reached) - known
            if noise:
                size = self.rounding(before, tokens, reached)
                residual = torch.cat([residual, size * _signs(known)])
            found.append(self._carried(error, residual, before, reached, tokens))
            error, start = found[-1][:, -1], known[:, -1]
        whole = torch.cat(found, 1) if found else states.new_zeros(count * rows, 0, d)
        return whole[:rows], whole[rows:]

    def _carried(
        self, error: Tensor, residual: Tensor, before: Tensor, reached: Tensor, tokens: Tensor
    ) -> Tensor:
        """Of a window, from that of its start."""
        steps, count = self.plan.steps, residual.shape[0] // max(1, before.shape[0])
        before, tokens = (x.repeat(count, 1, 1) for x in (before, tokens))
        slopes = steps.slopes(reached.repeat(count, 1, 1))

        def pushed(x: Tensor, before: Tensor, tokens: Tensor) -> Tensor:
            def step(z: Tensor) -> Tensor:
                return steps.bounded(self.step(z, tokens))

            return cast(Tensor, torch.func.jvp(step, (before,), (x,))[1])

        def reach(errors: Tensor) -> tuple[Tensor, Slopes]:
            return pushed(shifted(error, errors), before, tokens) + residual, slopes

        length = tokens.shape[1]
        found = sweep(reach, residual, ROUGH, min(length, SWEEPS))
        if bool(found.settled.all()):
            return found.values
        values = []  # errors that grow need about a sweep a step
        for t in range(length):
            error = pushed(error, before[:, t], tokens[:, t]) + residual[:, t]
            values.append(error)
        return torch.stack(values, 1)


def _signs(like: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return (2 * torch.randint(0, 2, like.shape, generator=generator) - 1).to(like)


class _Solve(torch.autograd.Function):
    """``(z, e, *parameters) → states``."""

    @staticmethod
    def forward(
        ctx: Any, plan: Plan, report: Report, z: Tensor, e: Tensor, *params: Tensor
    ) -> Tensor:
        dtype = checks.state_dtype(z.dtype)
        start, windows = z, []
        for tokens in e.split(plan.window, 1) if e.shape[1] else ():
            windows.append(_Solve._window(plan, report, start.to(dtype), tokens).to(z.dtype))
            start = windows[-1][:, -1]
        states = torch.cat(windows, 1) if windows else z.new_empty(z.shape[0], 0, z.shape[1])
        ctx.plan, ctx.report = plan, report
        ctx.save_for_backward(z, e, states, *params)
        return states

    @staticmethod
    def _window(plan: Plan, report: Report, start: Tensor, tokens: Tensor) -> Tensor:
        def reach(states: Tensor) -> tuple[Tensor, Slopes]:
            before = shifted(start, states).to(tokens.dtype)
            reached = plan.steps(before, tokens).to(states.dtype)
            return plan.steps.bounded(reached), plan.steps.slopes(reached)

        length = tokens.shape[1]
        guess = start.unsqueeze(1).expand(-1, length, -1)
        found = sweep(reach, guess, plan.tol, plan.most(length))
        states, rest = found.values, not bool(found.settled.all())
        if rest:
            states, z = states.clone(), start
            for t in range(length):
                reached = plan.steps.step(z.to(tokens.dtype), tokens[:, t]).to(z.dtype)
                z = torch.where(found.settled[:, t, None], states[:, t], reached)
                states[:, t] = z
        report.corrections.append(found.corrections)
        report.looped.append(rest)
        report.error += found.error if not rest or bool(states.isfinite().all()) else math.nan
        return states

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "got create_graph=True in a backward pass through sweeps, expected first "
                "derivatives only; use path='recurrent', or parallel_states, for second ones."
            )
        z, e, states, *params = ctx.saved_tensors
        return None, None, *cotangents(ctx.plan, ctx.report, z, e, states, params, g)
