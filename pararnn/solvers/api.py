"""The public solving functions."""

from __future__ import annotations

import dataclasses
import warnings

import torch
from torch import Tensor, nn

from .. import _checks as checks
from .config import TOLERANCE, NewtonConfig, NewtonDivergenceError, NewtonWarning, Solution
from .cost import chunk_length
from .dynamics import ModuleDynamics, SpecDynamics
from .engine import Outcome, Plan, run
from .implicit import Problem, Solve, linear_solve
from .partition import Partition
from .walkers import CellWalker, Dynamics

METHODS = ("auto", "sequential", "newton", "shooting")


def has_spec(cell: nn.Module) -> bool:
    """Whether a module is a cell with a Spec (else it needs a ``step`` and a ``state_shape``)."""
    return hasattr(cell, "spec") and hasattr(cell, "recurrent_params") and hasattr(cell, "drives")


@dataclasses.dataclass
class Task:
    """Checked arguments of one solve."""

    cell: nn.Module
    u: Tensor  # packed drives, or the raw input of a module without a Spec
    h0: Tensor
    resets: Tensor | None
    params: tuple[Tensor, ...]

    def make(self, params: tuple[Tensor, ...]) -> Dynamics:
        if has_spec(self.cell):
            return SpecDynamics(self.cell.spec, self.cell.sizes, params)
        names = [name for name, _ in self.cell.named_parameters()]
        return ModuleDynamics(self.cell, names, params)


def prepare(
    cell: nn.Module,
    x: Tensor | None,
    h0: Tensor | None,
    resets: Tensor | None,
    drives: Tensor | None = None,
) -> Task:
    """Check the arguments of a solve; nothing is broadcast or converted silently."""
    if not hasattr(cell, "step") or not hasattr(cell, "state_shape"):
        raise TypeError(
            f"cell: got {type(cell).__name__}, expected a Cell or a module with a method "
            "step(h, x) and an attribute state_shape."
        )
    if (x is None) == (drives is None):
        raise TypeError("got both or neither of x and drives, expected exactly one.")
    source, name = (x, "x") if x is not None else (drives, "drives")
    checks.floating(name, source)
    if source.ndim != 3:
        raise ValueError(
            f"{name}: got shape {tuple(source.shape)}, expected (B, T, features); "
            f"add a batch dimension with {name}.unsqueeze(0)."
        )
    if has_spec(cell):
        width = cell.spec.packed_width(cell.sizes)
        u = cell.drives(x) if x is not None else checks.trailing("drives", drives, (width,))
        params = cell.recurrent_params()
        device, param_dtype = cell.in_proj.weight.device, cell.in_proj.weight.dtype
    else:
        if drives is not None:
            raise TypeError(f"drives: {type(cell).__name__} has no Spec, so give x.")
        u, params = x, tuple(cell.parameters())
        device = params[0].device if params else x.device
        param_dtype = params[0].dtype if params else x.dtype
    dtype = checks.state_dtype(param_dtype)
    checks.same_device(name, source, device)
    batch, length = u.shape[:2]
    shape = (batch, *cell.state_shape)
    if h0 is None:
        h0 = torch.zeros(shape, device=device, dtype=dtype)
    else:
        checks.same_device("h0", checks.floating("h0", h0), device)
        if tuple(h0.shape) != shape:
            raise ValueError(
                f"h0: got shape {tuple(h0.shape)}, expected {shape}; nothing is broadcast, "
                "use h0.expand(...) if all samples start alike."
            )
        if h0.dtype not in (param_dtype, dtype):
            raise TypeError(f"h0: got dtype {h0.dtype}, expected {param_dtype} or {dtype}.")
        h0 = h0.to(dtype)
    if resets is not None:
        if resets.dtype != torch.bool or tuple(resets.shape) != (batch, length):
            raise ValueError(
                f"resets: got {resets.dtype} of shape {tuple(resets.shape)}, expected torch.bool "
                f"of shape {(batch, length)}."
            )
        checks.same_device("resets", resets, device)
    return Task(cell, u, h0, resets, params)


# -- sequential --------------------------------------------------------------------------------


def sequential_states(task: Task) -> Tensor:
    """Loop over the hand-written step, recorded by autograd. States in the state's dtype."""
    cell, h = task.cell, task.h0
    states = []
    steps = task.u.unbind(1)
    masks = task.resets.unbind(1) if task.resets is not None else None
    if has_spec(cell):
        params = tuple(p.to(h.dtype) for p in task.params)
        advance = lambda h, u: cell.advance(h, u, params)  # noqa: E731
    else:
        dtype = task.params[0].dtype if task.params else h.dtype
        advance = lambda h, x: cell.step(h.to(dtype), x).to(h.dtype)  # noqa: E731
    for t, u in enumerate(steps):
        if masks is not None:
            mask = masks[t].reshape(-1, *(1,) * (h.ndim - 1))
            h = torch.where(mask, torch.zeros_like(h), h)
        h = advance(h, u)
        states.append(h)
    if not states:
        return h.new_zeros(h.shape[0], 0, *h.shape[1:])
    return torch.stack(states, 1)


def sequential_apply(
    cell: nn.Module, x: Tensor, *, h0: Tensor | None = None, resets: Tensor | None = None
) -> Tensor:
    """States of a sequence by looping over the cell's hand-written ``step``.

    The reference for everything else: plain PyTorch, differentiated by autograd through the loop.

    Parameters
    ----------
    cell
        A :class:`~pararnn.Cell`, or any module with ``step(h, x)`` and ``state_shape``.
    x
        Inputs ``(B, T, d_in)``.
    h0
        Initial state ``(B, *state_shape)``; zero if not given.
    resets
        Bool mask ``(B, T)``: where True, the step starts from the zero state.

    Returns
    -------
    Tensor
        States ``(B, T, *state_shape)``, in the dtype of ``x``.

    Raises
    ------
    TypeError, ValueError
        If a shape, dtype or device does not fit.
    """
    task = prepare(cell, x, h0, resets)
    return sequential_states(task).to(task.u.dtype)


# -- parallel ----------------------------------------------------------------------------------


def _box(dynamics: Dynamics, h0: Tensor) -> tuple[Tensor, Tensor] | None:
    """Invariant box of the state, if every slot has one and ``h0`` lies in it."""
    if any(b is None for b in dynamics.bounds):
        return None
    lo, hi = (torch.tensor([b[i] for b in dynamics.bounds], dtype=h0.dtype, device=h0.device) for i in (0, 1))
    if len(dynamics.bounds) > 1:
        shape = (-1, *(1,) * (len(dynamics.state_shape) - 1))
        lo, hi = lo.reshape(shape), hi.reshape(shape)
    inside = ((h0 >= lo) & (h0 <= hi)).flatten(1).all(1)
    # A row that starts outside is not clipped; rows do not influence each other.
    inside = inside.reshape(-1, 1, *(1,) * (h0.ndim - 1))
    huge = torch.finfo(h0.dtype).max
    return torch.where(inside, lo, -huge), torch.where(inside, hi, huge)


def _plan(
    dynamics: Dynamics, config: NewtonConfig, length: int, warmup: int, dtype: torch.dtype
) -> Plan:
    single, pinned = length == 1, config.max_iters is not None
    cheap = dynamics.single_kind if single else dynamics.cheap_kind
    if config.jacobian == "auto" or (single and config.jacobian == "exact"):
        # A pinned solve must have its operator in every pass; an unpinned one tries without.
        first, later = (cheap, cheap) if pinned or single else ("none", cheap)
    else:
        first = later = config.jacobian
        if not single and later != "none" and dynamics.algebra(later) is None:
            raise ValueError(
                f"jacobian={later!r} is not formed along chunks for this Jacobian class; use "
                "'auto', 'none', or chunk_length=1 for exact factorized Newton."
            )
    return Plan(
        tol=config.tol or TOLERANCE[dtype],
        scale=1.0,
        warmup=config.warmup or warmup,
        first_kind=first,
        later_kind=later,
        max_iters=config.max_iters,
        cap=config.iteration_cap,
        fallback=config.on_divergence == ("auto" if not pinned else "sequential")
        or config.on_divergence == "sequential",
    )


def _parallel(
    task: Task, config: NewtonConfig, length: int, warmup: int
) -> tuple[Tensor, Outcome | None]:
    """Solve with chunks of ``length``; returns states in the state's dtype, and the outcome."""
    total = task.u.shape[1]
    outcome: list[Outcome] = []

    def forward(dynamics: Dynamics, u: Tensor, h0: Tensor) -> Tensor:
        out = torch.empty(u.shape[0], total, *h0.shape[1:], dtype=h0.dtype, device=h0.device)
        if total == 0:
            return out

        def linear_solver(mismatch: Tensor, before: Tensor) -> Tensor:
            coefficients = dynamics.coefficients(problem.restarted(before), u)
            zero = torch.zeros_like(h0)
            return linear_solve(
                dynamics, coefficients, mismatch, zero, task.resets, reverse=False
            )

        walker = CellWalker(
            dynamics, u, task.resets, Partition(total, length), out, _box(dynamics, h0), linear_solver
        )
        plan = _plan(dynamics, config, length, warmup, h0.dtype)
        result = run(walker, h0, plan)
        outcome.append(result)
        if length == 1 and config.max_iters is not None and not result.fallback:
            return result.iterate.contiguous()  # the Newton iterate itself, as in the paper
        return out

    problem = Problem(task.make, forward, task.resets)
    states = Solve.apply(problem, task.u, task.h0, *task.params)
    return states, outcome[0] if outcome else None


def solve(
    cell: nn.Module,
    x: Tensor | None = None,
    config: NewtonConfig | None = None,
    *,
    method: str = "auto",
    h0: Tensor | None = None,
    resets: Tensor | None = None,
    drives: Tensor | None = None,
) -> Solution:
    """Solve a recurrence over a sequence and report how it went.

    Parameters
    ----------
    cell
        A :class:`~pararnn.Cell`, or any module with ``step(h, x)`` and ``state_shape``. Such a
        step must treat every sample by itself and be deterministic.
    x
        Inputs ``(B, T, d_in)``; or give ``drives``, ``(B, T, C)``, as ``cell.drives(x)`` returns.
    config
        See :class:`NewtonConfig`.
    method
        ``'sequential'`` loops over the hand-written step; ``'newton'`` iterates over single steps
        (Danieli et al., arXiv:2510.21450, Alg. 1); ``'shooting'`` over chunks; ``'auto'`` chooses
        by the cost model.
    h0
        Initial state ``(B, *state_shape)``; zero if not given.
    resets
        Bool mask ``(B, T)``: where True, the step starts from the zero state.

    Returns
    -------
    Solution

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit.
    NewtonDivergenceError
        If the tolerance is not met and ``config.on_divergence == 'raise'``.
    """
    config = config or NewtonConfig()
    if method not in METHODS:
        raise ValueError(f"method: got {method!r}, expected one of {METHODS}.")
    task = prepare(cell, x, h0, resets, drives)
    total = task.u.shape[1]
    numbers = task.h0.numel()
    best, warmup = chunk_length(total, numbers, task.u.device.type)
    if method == "sequential":
        length, reason = max(total, 1), "asked for: loop over the hand-written step"
        states, outcome = sequential_states(task), None
    else:
        if method == "newton":
            if config.chunk_length not in (None, 1):
                raise ValueError(
                    f"method='newton' has chunk_length 1, got {config.chunk_length}; use "
                    "method='shooting'."
                )
            length, reason = 1, "asked for: Newton over single steps"
        elif config.chunk_length is not None:
            length = min(config.chunk_length, max(total, 1))
            reason = f"asked for: chunk_length={config.chunk_length}"
        else:
            length = best
            chunks = -(-total // length) if total else 0
            reason = (
                f"cost model: {total} steps × {numbers} numbers on {task.u.device.type} → "
                f"{chunks} chunk{'s' if chunks != 1 else ''} of {length}"
            )
        states, outcome = _parallel(task, config, length, warmup)
    final = states[:, -1] if total else task.h0
    chunks = -(-total // length) if total else 0
    solution = Solution(
        states=states.to(task.u.dtype),
        final_state=final,
        converged=outcome.converged if outcome else True,
        iterations=outcome.iterations if outcome else 0,
        passes=outcome.passes if outcome else 1.0,
        residual=outcome.history[-1] if outcome else 0.0,
        residual_history=tuple(outcome.history) if outcome else (0.0,),
        error_bound=None,
        method=_label(method, length, chunks),
        chunk_length=length,
        chunks=chunks,
        fallback=outcome.fallback if outcome else False,
        reason=reason,
    )
    if not solution.converged:
        _report_divergence(solution, config)
    if config.certify:
        from .certificate import certify

        bound = certify(task, states.detach()).error_bound
        solution = dataclasses.replace(solution, error_bound=bound)
    return solution


def _label(method: str, length: int, chunks: int) -> str:
    if method == "newton" or (length == 1 and chunks > 1):
        return "newton"
    return "sequential" if chunks <= 1 else "shooting"


def _report_divergence(solution: Solution, config: NewtonConfig) -> None:
    history = ", ".join(f"{r:.1e}" for r in solution.residual_history)
    message = (
        f"{solution.method} solve ended after {solution.iterations} iterations with residual "
        f"{solution.residual:.1e}, above its tolerance; residuals: {history}. Raise max_iters, "
        "leave it unset to iterate until converged, or bound the recurrent weights."
    )
    if config.on_divergence == "raise":
        raise NewtonDivergenceError(message, solution.residual_history)
    if config.on_divergence in ("auto", "warn"):
        warnings.warn(message, NewtonWarning, stacklevel=3)


def newton_apply(
    cell: nn.Module,
    x: Tensor,
    config: NewtonConfig | None = None,
    *,
    h0: Tensor | None = None,
    resets: Tensor | None = None,
) -> Tensor:
    """States by Newton's method over single steps, Algorithm 1 of Danieli et al. (2510.21450).

    The guess is ``f(0, x_t)``; every iteration solves the linearized recurrence. Unpinned, it
    iterates until the tolerance is met; ``NewtonConfig(max_iters=3)`` makes exactly the paper's
    three iterations and warns if they were not enough. Arguments and errors as for :func:`solve`.
    """
    return solve(cell, x, config, method="newton", h0=h0, resets=resets).states


def shooting_apply(
    cell: nn.Module,
    x: Tensor,
    config: NewtonConfig | None = None,
    *,
    h0: Tensor | None = None,
    resets: Tensor | None = None,
) -> Tensor:
    """States by multiple shooting over chunks. Arguments and errors as for :func:`solve`."""
    return solve(cell, x, config, method="shooting", h0=h0, resets=resets).states


def newton_m2rnn_factorized(
    cell: nn.Module,
    x: Tensor,
    config: NewtonConfig | None = None,
    *,
    h0: Tensor | None = None,
    resets: Tensor | None = None,
) -> Tensor:
    """Newton over single steps for a matrix state, with factorized Jacobians only.

    The linear systems are solved with JVPs of the form ``Δ ↦ fΔ + (1−f)(1−Z²) ⊙ (ΔW)``; the
    ``(KV)²`` Jacobian is never formed. States ``(B, T, K, V)``.

    Raises
    ------
    ValueError
        If the cell's Jacobian class is not ``'m2rnn'``.
    """
    structure = getattr(cell, "jac_structure", None)
    if structure != "m2rnn":
        raise ValueError(
            f"cell: got Jacobian class {structure!r}, expected 'm2rnn'; use newton_apply."
        )
    return newton_apply(cell, x, config, h0=h0, resets=resets)
