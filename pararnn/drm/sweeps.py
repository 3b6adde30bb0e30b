"""The recurrent path by repeated sweeps: a batch of velocities, and a linear recurrence each.

The step is ``z ↦ Bnd(z + dt v)``, so the Jacobian of the bound alone, without that of the velocity,
makes a good correction: no derivative of a network is taken. Without a bound this is Picard's
iteration for an integral equation, ``z_t = z_0 + Σ dt v(z_{j-1})``, whose first sweep from a constant
guess is the block path of the notes over the whole window. The cotangents solve a linear recurrence
backwards in time, by the same sweeps.

Where the bound clips the norm, its Jacobian is ``D (I - u uᵀ)``: D the slopes of clip and tanh, u the
unit vector along the state, in which a change is lost. A recurrence of such maps is one linear scan
for D and a triangular system for what is lost, of one number a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from .. import _checks as checks
from ..scan import linear_scan
from .bound import bound_state
from .dynamics import DRMDynamics

TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-6}
HALF_TOLERANCE = 1e-3
ROUGH = 0.01  # relative accuracy of an error
SLOWEST = 0.9  # rate at which corrections are taken to shrink, where they shrink no faster


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
    autocast = _Autocast(e.device)
    dtype = autocast.dtype if autocast.enabled else z.dtype
    plan = _Plan(
        Steps(dynamics, strength),
        autocast,
        window or max(1, e.shape[1]),
        max_corrections,
        tol or TOLERANCE.get(dtype, HALF_TOLERANCE),
    )
    report = _Report()
    states = cast(Tensor, _Solve.apply(plan, report, z, e, *params))
    return Sweeps(
        states,
        tuple(report.corrections),
        tuple(report.looped),
        report.error,
        _error_bound(plan, z.detach(), e.detach(), states.detach()) if certify else None,
        report.backward,
    )


def require_plain_steps(dynamics: DRMDynamics) -> None:
    """Refuse dynamics whose step depends on more than a state and a token.

    Raises
    ------
    ValueError
        If geometry is kept for several steps, a graph would be cut, or dropout is on.
    """
    c = dynamics.config
    if c.geometry_interval != 1:
        raise ValueError(
            f"geometry_interval: got {c.geometry_interval}, expected 1, geometry that belongs to "
            "its state; use recurrent_states for stale geometry."
        )
    if dynamics.training and c.truncation:
        raise ValueError(
            f"truncation: got {c.truncation} in training, expected 0; the parallel path has no "
            "graph over time to cut."
        )
    if dynamics.training and c.dropout:
        raise ValueError(
            f"dropout: got {c.dropout} in training, expected 0; a step is taken several times and "
            "must be found alike."
        )


def _transformed(value: Tensor) -> bool:
    return torch._C._functorch.is_functorch_wrapped_tensor(value)


class Steps(nn.Module):
    """The dynamics' step, from states and tokens of any leading shape, at a given strength of
    naturalization; called, what the step bounds at its end."""

    def __init__(self, dynamics: DRMDynamics, strength: float):
        super().__init__()
        self.dynamics, self.strength = dynamics, strength
        self.state_shape = dynamics.state_shape

    def forward(self, z: Tensor, e: Tensor) -> Tensor:
        return self.dynamics.unbounded_step(z, e, self.strength)

    def step(self, z: Tensor, e: Tensor) -> Tensor:
        return self.bounded(self(z, e))

    def bounded(self, z: Tensor) -> Tensor:
        return bound_state(z, self.dynamics.radius)

    def slopes(self, z: Tensor) -> Slopes:
        """The bound's Jacobians at states ``z (B, T, d)``."""
        radius = self.dynamics.radius
        if radius is None:
            return Slopes(torch.ones_like(z), None, None)
        norm = torch.linalg.vector_norm(z, dim=-1, keepdim=True).clamp(min=radius)
        clip = radius / norm
        diagonal = (1 - torch.tanh(z * clip / radius).square()) * clip
        lost = torch.where(norm > radius, z / norm, 0.0)
        return Slopes(diagonal, lost, diagonal * lost)


class Slopes(NamedTuple):
    """Matrices ``D - y wᵀ`` of every step, each ``(B, T, d)``; without ``w`` and ``y``, ``D``."""

    diagonal: Tensor
    w: Tensor | None
    y: Tensor | None

    def to(self, dtype: torch.dtype) -> Slopes:
        w, y = (None if x is None else x.to(dtype) for x in (self.w, self.y))
        return Slopes(self.diagonal.to(dtype), w, y)

    def adjoint(self) -> Slopes:
        """Their transposes for the steps backwards in time: the last step has none after it."""

        def turned(x: Tensor | None) -> Tensor | None:
            return None if x is None else _before(torch.zeros_like(x[:, 0]), x.flip(1))

        return Slopes(cast(Tensor, turned(self.diagonal)), turned(self.y), turned(self.w))

    def carried(self, b: Tensor) -> Tensor:
        """States of ``x_t = (D_t - y_t w_tᵀ) x_{t-1} + b_t``, from zero.

        With ``α_t = w_tᵀ x_{t-1}``, x is a scan of ``b - y α``, and α solves a triangular system. In
        that system alone, products of D are taken as those of its mean.
        """
        x = cast(Tensor, linear_scan(self.diagonal, b))
        if self.w is None or self.y is None:
            return x
        with checks.full_precision(b.device):
            first = torch.zeros_like(b[:, 0])
            seen = (self.w * _before(first, x)).sum(-1, keepdim=True)
            mean = self.diagonal.mean(-1).clamp(min=torch.finfo(b.dtype).tiny).log().cumsum(1)
            since = _before(first[:, 0], mean).unsqueeze(2) - mean.unsqueeze(1)
            system = (self.w @ self.y.mT * since.clamp(max=0).exp()).tril(-1)
            # What is not finite reaches later states through the scan, and no earlier ones.
            alpha = torch.linalg.solve_triangular(
                system.nan_to_num(0.0, 0.0, 0.0),
                seen.nan_to_num(0.0, 0.0, 0.0),
                upper=False,
                unitriangular=True,
            )
        return cast(Tensor, linear_scan(self.diagonal, b - self.y * alpha))


class _Autocast:
    """The setting of autocast now, to be found again in the backward pass."""

    def __init__(self, device: torch.device):
        self.device = device.type
        self.enabled = torch.is_autocast_enabled(self.device)
        self.dtype = torch.get_autocast_dtype(self.device)

    def __call__(self) -> torch.autocast:
        return torch.autocast(self.device, self.dtype, self.enabled)


class _Plan(NamedTuple):
    steps: Steps
    autocast: _Autocast
    window: int
    cap: int
    tol: float

    def most(self, length: int) -> int:
        """Largest number of corrections of a window."""
        return min(self.cap or length, length)


@dataclass
class _Report:
    corrections: list[int] = field(default_factory=list)
    looped: list[bool] = field(default_factory=list)
    backward: list[int] = field(default_factory=list)
    error: float = 0.0


class _Settled(NamedTuple):
    values: Tensor
    settled: Tensor
    corrections: int
    error: float


def _sweep(
    mismatch: Callable[[Tensor], tuple[Tensor, Slopes]],
    guess: Tensor,
    floor: Tensor,
    tol: float,
    cap: int,
) -> _Settled:
    """Correct ``guess (B, T, d)``, values that depend on those before them, until it settles.

    Parameters
    ----------
    mismatch
        Mismatches of some values, and the slopes that carry corrections on.
    floor
        Size that an error is relative to, at least, ``(B, 1)``.
    tol, cap
        Relative error to end at, and largest number of corrections.
    """

    def so_far(x: Tensor) -> Tensor:
        """The largest entry up to each step, ``(B, T)``."""
        return x.detach().abs().amax(-1).cummax(1).values

    values = guess
    settled = torch.zeros(guess.shape[:2], dtype=torch.bool, device=guess.device)
    error = settled.to(guess.dtype)
    last: Tensor | None = None
    for k in range(1, cap + 1):
        residual, slopes = mismatch(values)
        change = slopes.carried(residual)
        size = so_far(change)
        rate = torch.full_like(size, SLOWEST) if last is None else (size / last).nan_to_num(0.0)
        rate, last = rate.clamp(max=SLOWEST), size
        values = torch.where(settled.unsqueeze(-1), values, values + change)
        scale = torch.maximum(floor, so_far(values)).clamp(min=torch.finfo(size.dtype).tiny)
        left = rate / (1 - rate) * size / scale
        error = torch.where(settled, error, left)
        # k states are exact by now, unless a correction went through what is not finite.
        exact = values[:, :k].isfinite().all(-1) & ~settled[:, :k]
        error[:, :k] = error[:, :k].masked_fill(exact, 0.0)
        settled = settled | (error <= tol)
        if bool(settled.all()):
            break
    worst = float(error.where(settled, 0.0).max()) if error.numel() else 0.0
    return _Settled(values, settled, k, worst)


def _before(start: Tensor, states: Tensor) -> Tensor:
    """The state before each step."""
    return torch.cat([start.unsqueeze(1), states[:, :-1]], 1)


def _looped(
    steps: Steps, unbounded: Callable[[Tensor, Tensor], Tensor], z: Tensor, e: Tensor
) -> Tensor:
    """States ``(B, T, d)``, one after the other."""
    states = []
    for token in e.unbind(1):
        z = steps.bounded(unbounded(z, token))
        states.append(z)
    return torch.stack(states, 1)


@torch.no_grad()
def _error_bound(plan: _Plan, z: Tensor, e: Tensor, states: Tensor) -> float:
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


def _errors(plan: _Plan, error: Tensor, start: Tensor, tokens: Tensor, states: Tensor) -> Tensor:
    """Of a window: ``δ_t = J_t δ_{t-1} + r_t``, from that of its start, with mismatches ``r``."""
    before = _before(start, states)
    reached = plan.steps(before, tokens)
    residual = (plan.steps.bounded(reached) - states).to(error.dtype)
    slopes = plan.steps.slopes(reached).to(error.dtype)

    def mismatch(errors: Tensor) -> tuple[Tensor, Slopes]:
        tangent = _before(error, errors).to(before.dtype)
        pushed = torch.func.jvp(lambda x: plan.steps.step(x, tokens), (before,), (tangent,))[1]
        return pushed + residual - errors, slopes

    floor = torch.maximum(residual.abs().amax((1, 2)), error.abs().amax(1)).unsqueeze(1)
    return _sweep(mismatch, residual, floor, ROUGH, tokens.shape[1]).values


class _Solve(torch.autograd.Function):
    """``(z, e, *parameters) → states``."""

    @staticmethod
    def forward(
        ctx: Any, plan: _Plan, report: _Report, z: Tensor, e: Tensor, *params: Tensor
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
    def _window(plan: _Plan, report: _Report, start: Tensor, tokens: Tensor) -> Tensor:
        def mismatch(states: Tensor) -> tuple[Tensor, Slopes]:
            before = _before(start, states).to(tokens.dtype)
            reached = plan.steps(before, tokens).to(states.dtype)
            return plan.steps.bounded(reached) - states, plan.steps.slopes(reached)

        length = tokens.shape[1]
        guess = start.unsqueeze(1).expand(-1, length, -1)
        floor = start.new_ones(start.shape[0], 1)
        found = _sweep(mismatch, guess, floor, plan.tol, plan.most(length))
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
        plan: _Plan = ctx.plan
        carry = torch.zeros_like(z)
        of_tokens: list[Tensor] = []
        of_params: list[Tensor | None] = [None] * len(params)
        for begin in reversed(range(0, e.shape[1], plan.window)):
            part = slice(begin, begin + plan.window)
            start = states[:, begin - 1] if begin else z
            cotangents = g[:, part].clone()
            cotangents[:, -1] += carry
            pulled = _pull(plan, ctx.report, start, e[:, part], states[:, part], cotangents, params)
            carry, tokens, *found = pulled
            of_tokens.insert(0, tokens)
            of_params = [
                old if new is None else new if old is None else old + new
                for old, new in zip(of_params, found, strict=True)
            ]
        of_e = torch.cat(of_tokens, 1) if of_tokens else torch.zeros_like(e)
        return None, None, carry, of_e, *of_params


def _pull(
    plan: _Plan,
    report: _Report,
    start: Tensor,
    tokens: Tensor,
    states: Tensor,
    g: Tensor,
    params: list[Tensor],
) -> list[Any]:
    """Cotangents of a window's first state, tokens and parameters, from those of its states."""
    names = [f"dynamics.{name}" for name, _ in plan.steps.dynamics.named_parameters()]
    live = [p.detach().requires_grad_(p.requires_grad) for p in params]
    start, tokens = start.detach().requires_grad_(), tokens.detach().requires_grad_()
    inner = states[:, :-1].detach().requires_grad_()

    def unbounded(z: Tensor, e: Tensor) -> Tensor:
        swapped = dict(zip(names, live, strict=True))
        return cast(Tensor, torch.func.functional_call(plan.steps, swapped, (z, e)))

    with torch.enable_grad(), plan.autocast():
        moved = unbounded(torch.cat([start.unsqueeze(1), inner], 1), tokens)
        reached = plan.steps.bounded(moved)
    dtype = checks.state_dtype(g.dtype)
    slopes = plan.steps.slopes(moved.detach()).to(dtype).adjoint()
    wide = g.to(dtype).flip(1)

    def mismatch(cotangents: Tensor) -> tuple[Tensor, Slopes]:
        """Of ``λ_t = g_t + J_{t+1}ᵀ λ_{t+1}``, backwards in time."""
        (pulled,) = torch.autograd.grad(
            reached, inner, cotangents.flip(1).to(reached.dtype), retain_graph=True
        )
        residual = wide - cotangents
        residual[:, 1:] += pulled.flip(1)
        return residual, slopes

    length = g.shape[1]
    floor = wide.abs().amax((1, 2), keepdim=True).squeeze(-1)
    found = _sweep(mismatch, wide, floor, plan.tol, plan.most(length))
    outputs, cotangents, count = reached, found.values.flip(1).to(reached.dtype), found.corrections
    if not bool(found.settled.all()):
        with torch.enable_grad(), plan.autocast():
            outputs, cotangents, count = _looped(plan.steps, unbounded, start, tokens), g, -1
    report.backward.append(count)
    inputs = [start, tokens, *(p for p in live if p.requires_grad)]
    grads = iter(torch.autograd.grad(outputs, inputs, cotangents, allow_unused=True))
    of_start, of_tokens = next(grads), next(grads)
    return [of_start, of_tokens, *(next(grads) if p.requires_grad else None for p in live)]
