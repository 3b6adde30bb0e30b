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

from .. import _checks as checks
from .cotangents import cotangents
from .dynamics import DRMDynamics
from .iteration import Autocast, Plan, Report, sweep
from .steps import Slopes, Steps, require_plain_steps, shifted

TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-6}
HALF_TOLERANCE = 1e-3
ROUGH = 0.01  # relative accuracy of an error


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
    error_estimate : float
        Of the largest distance from the loop's states, over ``max(1, |state|)``: the sum over
        windows of what is left after the last correction, if corrections go on shrinking at the
        rate at which they last shrank. Where a difference of states grows over time, the error is
        larger. NaN if a state is not finite.
    error_bound : float, optional
        With ``certify``, twice the largest entry of the next Newton correction of the whole
        sequence, growth included: a bound of the distance from the loop's states as long as the
        square of that distance is negligible. In the dtype of the states, so their rounding is not
        bounded. NaN if a state is not finite, None if not asked for.
    backward : list of int
        Corrections of each window's cotangents, from the last window to the first; -1 where the
        loop was differentiated instead. Empty before the backward pass.
    """

    states: Tensor = field(repr=False)
    corrections: tuple[int, ...]
    looped: tuple[bool, ...]
    error_estimate: float
    error_bound: float | None = None
    backward: list[int] = field(default_factory=list)

    @property
    def converged(self) -> bool:
        """Whether no window needed the loop."""
        return not any(self.looped)


def sweep_states(
    dynamics: DRMDynamics,
    z: Tensor,
    e: Tensor,
    strength: float,
    *,
    window: int = 0,
    max_corrections: int = 0,
    tol: float = 0.0,
    certify: bool = False,
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
        Estimated error of a window to end at, over ``max(1, |state|)``. 0: 1e-13 in float64, 1e-6 in
        float32, 1e-3 where velocities are in half precision.
    certify
        Also compute ``error_bound``, with Jacobian–vector products: about as much work again.

    Raises
    ------
    ValueError
        If a step would depend on more than its state and token: geometry that is kept for several
        steps, a graph that is cut, or dropout in training.
    NotImplementedError
        Under a transform of ``torch.func``.
    """
    require_plain_steps(dynamics)
    params = list(dynamics.parameters())
    if not torch.compiler.is_compiling() and any(map(_transformed, (z, e, *params))):
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
        _error_bound(plan, z.detach(), e.detach(), states.detach()) if certify else None,
        report.backward,
    )


def _transformed(value: Tensor) -> bool:
    return torch._C._functorch.is_functorch_wrapped_tensor(value)


@torch.no_grad()
def _error_bound(plan: Plan, z: Tensor, e: Tensor, states: Tensor) -> float:
    """Twice the largest entry of the errors of given states, to first order."""
    error = torch.zeros_like(z, dtype=checks.state_dtype(z.dtype))
    largest = error.new_zeros(())
    for at in range(0, e.shape[1], plan.window):
        tokens, known = (x[:, at : at + plan.window] for x in (e, states))
        errors = _errors(plan, error, states[:, at - 1] if at else z, tokens, known)
        error = errors[:, -1]
        # NaN stays, as it would not in Python's max.
        largest = torch.maximum(largest, errors.abs().max()) if errors.numel() else largest
    return 2 * float(largest)


def _errors(plan: Plan, error: Tensor, start: Tensor, tokens: Tensor, states: Tensor) -> Tensor:
    """Of a window: ``δ_t = J_t δ_{t-1} + r_t``, from that of its start, with mismatches ``r``."""
    before = shifted(start, states)
    reached = plan.steps(before, tokens)
    residual = (plan.steps.bounded(reached) - states).to(error.dtype)
    slopes = plan.steps.slopes(reached).to(error.dtype)

    def mismatch(errors: Tensor) -> tuple[Tensor, Slopes]:
        tangent = shifted(error, errors).to(before.dtype)
        pushed = torch.func.jvp(lambda x: plan.steps.step(x, tokens), (before,), (tangent,))[1]
        return pushed + residual - errors, slopes

    floor = torch.maximum(residual.abs().amax((1, 2)), error.abs().amax(1)).unsqueeze(1)
    return sweep(mismatch, residual, floor, ROUGH, tokens.shape[1]).values


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
        def mismatch(states: Tensor) -> tuple[Tensor, Slopes]:
            before = shifted(start, states).to(tokens.dtype)
            reached = plan.steps(before, tokens).to(states.dtype)
            return plan.steps.bounded(reached) - states, plan.steps.slopes(reached)

        length = tokens.shape[1]
        guess = start.unsqueeze(1).expand(-1, length, -1)
        floor = start.new_ones(start.shape[0], 1)
        found = sweep(mismatch, guess, floor, plan.tol, plan.most(length))
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
