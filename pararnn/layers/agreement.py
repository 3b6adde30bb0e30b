"""Does the parallel solve agree with the sequential loop? Measured, and proven, layer by layer."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .._checks import full_precision
from ..cells import Mixer
from ..cells.mixer import SPELLINGS
from ..scan.inputs import cut
from ..solvers import NewtonConfig, Solution, solve
from ..solvers.certificate import certify
from ..solvers.methods.sequential import sequential_states
from ..solvers.problem import Problem, prepare
from ..solvers.scale import trajectory
from .para_rnn import ParaRNN, takes_gaps

BASE_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
LOOSEST = 1e-3
"""No dynamics, however sensitive, is passed with a larger difference than this."""


@dataclass(frozen=True)
class LayerAgreement:
    """One layer's comparison. Errors are the largest of any state, relative to the trajectory: to the
    largest state of the lane up to there (:func:`pararnn.solvers.scale.trajectory`).

    Attributes
    ----------
    error
        Against the sequential loop over ``step`` in the same dtype; ``tolerance`` is its limit.
    error_float64
        Against that loop in float64, on the same drives.
    certified
        Proven bound of the distance to the exact trajectory (infinite: no proof). It is no relative
        error: ``distance`` is what to compare with it.
    amplification
        ``κ``: how much a rounding error can grow along this sequence.
    finite
        Whether all states are numbers. Where they are not, the runs may agree in every bit, and the
        layer does not pass.
    distance
        Largest difference from the loop in float64, in units of the state, as ``certified`` is.
    """

    layer: str
    cell: str
    jac_structure: str
    dtype: str
    shape: tuple[int, ...]
    method: str
    chunk_length: int
    iterations: int
    passes: float
    converged: bool
    fallback: bool
    residual: float
    error: float
    tolerance: float
    error_float64: float
    certified: float
    amplification: float
    passed: bool
    reason: str
    finite: bool = True
    distance: float = math.nan

    @property
    def verdict(self) -> str:
        """``'pass'``, ``'NOT FINITE'`` (the runs agree, and some states are not numbers), or
        ``'FAIL'``."""
        agree = self.error <= self.tolerance
        return "pass" if self.passed else "NOT FINITE" if agree and not self.finite else "FAIL"


@dataclass(frozen=True)
class AgreementReport:
    """What :func:`verify_agreement` found. ``str()`` is a readable table."""

    passed: bool
    layers: tuple[LayerAgreement, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, strings and lists, ready for JSON (an absent proof is None)."""

        def plain(value: Any) -> Any:
            if isinstance(value, float) and not math.isfinite(value):
                return None
            return list(value) if isinstance(value, tuple) else value

        layers = [{k: plain(v) for k, v in asdict(layer).items()} for layer in self.layers]
        return {"passed": self.passed, "layers": layers}

    @property
    def verdict(self) -> str:
        """``'PASS'``, ``'NOT FINITE'`` if no layer differs and one has states that are not numbers, or
        ``'FAIL'``."""
        verdicts = [layer.verdict for layer in self.layers if layer.verdict != "pass"]
        if self.passed and not verdicts:
            return "PASS"
        return "NOT FINITE" if verdicts and set(verdicts) == {"NOT FINITE"} else "FAIL"

    def __str__(self) -> str:
        lines = [f"parallel = sequential: {self.verdict}"]
        for a in self.layers:
            shape = "×".join(map(str, a.shape))
            proof = f"{a.certified:.1e}" if math.isfinite(a.certified) else "no proof"
            lines += [
                f"  {a.layer}: {a.cell} ({a.jac_structure}, {a.dtype}, {shape}) {a.verdict}",
                f"    {a.method}, chunks of {a.chunk_length}, {a.iterations} iterations, "
                f"{a.passes:.2f} passes, residual {a.residual:.1e}"
                + (", sequential fallback" if a.fallback else "")
                + (" (one chunk: nothing to run in parallel)" if a.method == "sequential" else ""),
                f"    error {a.error:.1e} (limit {a.tolerance:.1e}), against float64 "
                f"{a.error_float64:.1e}",
                f"    in units of the state: off by {a.distance:.1e}, certified {proof}",
                f"    {a.reason}",
            ]
        return "\n".join(lines)


def verify_agreement(
    module: nn.Module,
    x: Tensor,
    config: NewtonConfig | None = None,
    *,
    h0: Tensor | None = None,
    resets: Tensor | None = None,
    dt: Tensor | None = None,
) -> AgreementReport:
    """Compare the parallel solve of every recurrent layer with the sequential loop.

    DeltaMinGRU's layer forms no states. What it reads, and its final state, are compared as well, with
    what states within their limit may cause.

    Parameters
    ----------
    module
        A cell, a :class:`~pararnn.ParaRNN`, or any model that contains ParaRNN layers or mixers, as
        :class:`~pararnn.MinGRUStack` does: it is run once on ``x`` and each of them is checked on
        the input that it then receives.
    x
        Input of the module; for a cell, ``(B, T, d_in)``.
    config
        Solver settings to check, instead of the layer's own.
    h0
        Initial state for a cell or a ParaRNN.
    resets
        Bool mask for a cell, ``(B, T)``, or a ParaRNN: where a sequence starts again from zero.
    dt
        Time gaps, for a cell that takes them or a module that hands ``dt=…`` to such cells.

    Returns
    -------
    AgreementReport

    Raises
    ------
    TypeError
        If the module is no cell and contains no ParaRNN and no mixer, or does not take an argument
        that is given.
    ValueError
        If none of them ran on ``x``.
    """
    with torch.no_grad():
        calls = recorded_calls(module, x, config, h0, resets, dt)
        layers = tuple(_compare(call) for call in calls)
    return AgreementReport(all(a.passed for a in layers), layers)


@dataclass
class Call:
    """One cell and the sequence that a module runs it on."""

    name: str
    cell: nn.Module
    x: Tensor
    h0: Tensor | None
    resets: Tensor | None
    dt: Tensor | None
    solver: str
    config: NewtonConfig | None

    def solution(self) -> Solution:
        return solve(
            self.cell,
            self.x,
            self.config,
            method=self.solver,
            h0=self.h0,
            resets=self.resets,
            dt=self.dt,
        )


def recorded_calls(
    module: nn.Module,
    x: Tensor,
    config: NewtonConfig | None = None,
    h0: Tensor | None = None,
    resets: Tensor | None = None,
    dt: Tensor | None = None,
) -> list[Call]:
    """Every recurrent layer of a module and its input, found by running the module once."""
    if hasattr(module, "step") and hasattr(module, "state_shape"):
        return [Call("cell", module, x, h0, resets, dt, "auto", config)]
    found = [(name, m) for name, m in module.named_modules() if isinstance(m, ParaRNN | Mixer)]
    if not found:
        raise TypeError(
            f"module: got {type(module).__name__}, expected a cell, a ParaRNN, or a model that "
            "contains ParaRNN layers or mixers."
        )
    calls: list[Call] = []
    modes = [(m, m.training) for m in module.modules()]
    handles = [
        layer.register_forward_pre_hook(
            _recorder(calls, name, config)
            if isinstance(layer, ParaRNN)
            else _mixer_recorder(calls, name, config),
            with_kwargs=True,
        )
        for name, layer in found
    ]
    module.eval()
    given = {"dt": dt, "resets": resets}
    given = {name: value for name, value in given.items() if value is not None}
    try:
        if isinstance(module, ParaRNN):
            module(x, h0, **given)
        else:
            module(x, **given)
    finally:
        for handle in handles:
            handle.remove()
        for m, training in modes:
            m.training = training
    if not calls:
        raise ValueError(
            f"module: none of the recurrent layers of {type(module).__name__} ran on this input, "
            "so there is nothing to see."
        )
    return calls


def _recorder(calls: list[Call], name: str, config: NewtonConfig | None) -> Any:
    """A hook that notes what every cell of a ParaRNN is run on."""
    prefix = f"{name}." if name else ""

    def hook(rnn: ParaRNN, args: tuple, kwargs: dict) -> None:
        given = dict(zip(("x", "h0"), args, strict=False)) | kwargs
        if not isinstance(given["x"], Tensor):
            raise TypeError("x: verify_agreement takes padded tensors, got a PackedSequence.")
        more = (given.get(name) for name in ("h0", "resets", "dt"))
        inner, start, resets, dt = rnn.batched(given["x"], *more)
        settings = config or rnn.config
        for i, cell in enumerate(rnn.cells):
            state = None if start is None else start[i]
            gaps = dt if takes_gaps(cell) else None
            call = Call(
                f"{prefix}cells[{i}]", cell, inner, state, resets, gaps, rnn.solver, settings
            )
            calls.append(call)
            inner = call.solution().output

    return hook


def _mixer_recorder(calls: list[Call], name: str, config: NewtonConfig | None) -> Any:
    """A hook that notes what a mixer is run on."""

    def hook(mixer: Mixer, args: tuple, kwargs: dict) -> None:
        if kwargs.get("run") is not None:  # a step, or what a ParaRNN runs, which has its own hook
            return
        given = dict(zip(("x", "h0", "dt"), args, strict=False))
        given |= {SPELLINGS.get(key, key): value for key, value in kwargs.items()}
        x, resets = given["x"], given.get("resets")
        start, gaps = mixer.given(x, given.get("h0"), given.get("dt"))
        calls.append(Call(name, mixer, x, start, resets, gaps, "auto", config))

    return hook


def _compare(call: Call) -> LayerAgreement:
    cell: Any = call.cell
    problem = prepare(cell, call.x, call.h0, call.resets, dt=call.dt)
    solution = call.solution()
    reference = sequential_states(problem)
    exact = sequential_states(problem.in_float64())
    proof = certify(problem, solution.states)
    algebra = problem.recurrence.algebra("exact")
    finite = bool(exact.isfinite().all()) and solution.finite

    def off(wanted: Tensor) -> float:
        """How far the solution is from other states, relative to their trajectory."""
        size = trajectory(wanted, problem.h0.to(wanted.dtype), problem.resets, algebra)
        return _difference(solution.states, wanted.to(solution.states.dtype), size)

    error = off(reference)
    tolerance = _tolerance(problem, proof.amplification)
    if getattr(cell, "direct", False):
        error = max(error, tolerance * _unseen(problem, reference, tolerance))
    passed = solution.converged and finite and error <= tolerance
    apart = 0.0 if passed else _equations_apart(problem, reference)
    largest = float(reference.abs().max()) if reference.numel() else 0.0
    proven = proof.error_bound <= tolerance * largest
    return LayerAgreement(
        layer=call.name,
        cell=problem.recurrence.name,
        jac_structure=problem.recurrence.structure,
        dtype=str(problem.u.dtype).removeprefix("torch."),
        shape=tuple(solution.states.shape),
        method=solution.method,
        chunk_length=solution.chunk_length,
        iterations=solution.iterations,
        passes=solution.passes,
        converged=solution.converged,
        fallback=solution.fallback,
        residual=solution.residual,
        error=error,
        tolerance=tolerance,
        error_float64=off(exact),
        certified=proof.error_bound,
        amplification=proof.amplification,
        passed=passed,
        reason=_reason(problem, solution, finite, error, tolerance, apart, proof, proven),
        finite=finite,
        distance=_difference(solution.states, exact, torch.ones_like(exact)),
    )


def _unseen(problem: Problem, states: Tensor, tolerance: float) -> float:
    """How far a layer that forms no states is from the loop's ``states``: differences of what it reads
    and of its final state, as a part of those that states which are off by ``tolerance`` may cause."""
    if not states.numel():
        return 0.0
    cell: Any = problem.recurrence.cell  # type: ignore[attr-defined]
    read, final = cell.reads(problem.u, problem.start, resets=problem.resets, dt=problem.dt)
    with full_precision(states.device):
        q = cell.queries(problem.u).to(states.dtype)
        algebra = problem.recurrence.algebra("exact")
        size = trajectory(states, problem.h0.to(states.dtype), problem.resets, algebra)
        allowed = cell.reading(tolerance * size, q.abs())
        allowed = allowed.clamp_min(torch.finfo(states.dtype).tiny)
        want = cell.reading(states, q)
    gap = _difference(read, want, allowed)
    last = states[:, -1].to(final.dtype)
    return max(gap, _difference(final, last, size[:, -1]) / tolerance)


def _equations_apart(problem: Problem, states: Tensor) -> float:
    """How much the Spec and the hand-written recurrence differ in one step from the same state."""
    if problem.spec is None or not states.numel():
        return 0.0
    before = cut(torch.cat([problem.h0.unsqueeze(1), states[:, :-1]], 1), problem.resets)
    with full_precision(states.device):
        recurrence = problem.recurrence
        size = trajectory(states, problem.h0, problem.resets, recurrence.algebra("exact"))
        return _difference(recurrence.step(before, problem.inputs), states, size)


def _reason(
    problem: Problem,
    solution: Solution,
    finite: bool,
    error: float,
    tolerance: float,
    apart: float,
    proof: Any,
    proven: bool,
) -> str:
    passed = error <= tolerance
    rounding = 64 * torch.finfo(problem.h0.dtype).eps
    if apart > rounding:
        return (
            f"the Spec and the hand-written recurrence are different equations: they differ by "
            f"{apart:.1e} in one step from the same state, where rounding is below {rounding:.0e}"
        )
    if not finite and passed:
        return (
            "the two runs agree in which states are not finite; look for what overflows, or for a "
            "NaN in the input or the weights"
        )
    if finite and not solution.converged:
        return "the solve did not converge; leave max_iters unset to iterate until it does"
    if not passed and not math.isfinite(error):
        return "the two runs differ in which states are finite"
    if not passed:
        return (
            f"the difference exceeds its limit; rounding errors can grow by κ = "
            f"{proof.amplification:.1e} along this sequence"
        )
    if not proof.reason and not proven:
        return "within its limit; what is proven is more than that"
    return proof.reason or "within its limit, and proven"


def _difference(a: Tensor, b: Tensor, scale: Tensor) -> float:
    """Largest difference relative to ``scale``; equal infinities and two NaNs do not differ."""
    if a.numel() == 0:
        return 0.0
    a, b = a.double(), b.double()
    same = (a == b) | (a.isnan() & b.isnan())
    relative = (a - b).abs() / scale
    relative = torch.where(same, torch.zeros_like(relative), relative)
    return float(torch.where(relative.isnan(), torch.inf, relative).max())


def _tolerance(problem: Problem, amplification: float) -> float:
    """The contract's limit: the dtype's base, or eight roundings grown by ``κ``; and one output
    rounding for half precision."""
    state = problem.h0.dtype
    grown = 8 * torch.finfo(state).eps * amplification
    limit = max(BASE_TOLERANCE[state], 0.0 if math.isnan(grown) else grown)
    limit = min(limit, max(LOOSEST, BASE_TOLERANCE[state]))
    rounding = torch.finfo(problem.u.dtype).eps if problem.u.dtype != state else 0.0
    return limit + rounding
