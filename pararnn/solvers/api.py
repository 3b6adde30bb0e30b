"""The public solving functions."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor, nn

from . import methods
from .config import NewtonConfig, Solution
from .methods.sequential import sequential_states
from .problem import Problem, prepare


def solve(
    cell: nn.Module,
    x: Tensor | None = None,
    config: NewtonConfig | None = None,
    *,
    method: str = "auto",
    h0: Tensor | None = None,
    resets: Tensor | None = None,
    drives: Tensor | None = None,
    dt: Tensor | None = None,
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
        Initial state ``(B, *state_shape)``; the cell's ``init_state(B)`` if not given, which for
        most is zero.
    resets
        Bool mask ``(B, T)``: where True, the step starts from the zero state.
    dt
        Time since the step before, ``(B, T)``: needed by a cell whose Spec has a time gap, and
        refused by any other. A negative one, or NaN, is an error on the CPU and not checked
        elsewhere.

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
    return solve_problem(prepare(cell, x, h0, resets, drives, dt, config=config, method=method))


def solve_layer(
    cell: nn.Module,
    x: Tensor,
    config: NewtonConfig | None = None,
    *,
    unrounded: bool = False,
    **options: Any,
) -> Solution:
    """As :func:`solve`, for a layer, which passes on the output and the final state: a method may
    leave out the states in between, which are then solved for when they are read. ``unrounded``
    leaves the states in the dtype in which they are carried."""
    problem = prepare(cell, x, config=config, layer=True, **options)
    if unrounded and problem.spec is not None:
        problem = dataclasses.replace(problem, u=problem.u.to(problem.dtype))
    return solve_problem(problem)


def solve_problem(problem: Problem) -> Solution:
    """Solve what was prepared."""
    config = problem.config
    if problem.method not in methods.ASKED:
        raise ValueError(f"method: got {problem.method!r}, expected one of {methods.ASKED}.")
    if config.certify and (problem.traced or problem.transformed):
        raise ValueError(
            "certify: got True inside torch.compile, torch.export or torch.func, or for meta tensors, "
            "where there are no numbers to prove a bound of; certify a solve outside."
        )
    method, choice = methods.choose(problem)
    solution = method.run(problem, choice)
    if config.certify:
        from .certificate import certify

        bound = certify(problem, solution.states.detach()).error_bound
        solution = dataclasses.replace(solution, error_bound=bound)
    return solution


def sequential_apply(
    cell: nn.Module,
    x: Tensor,
    *,
    h0: Tensor | None = None,
    resets: Tensor | None = None,
    dt: Tensor | None = None,
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
        Initial state ``(B, *state_shape)``; that of ``cell.init_state`` if not given.
    resets
        Bool mask ``(B, T)``: where True, the step starts from the zero state.
    dt
        Time gaps ``(B, T)``, for a cell whose Spec has them.

    Returns
    -------
    Tensor
        States ``(B, T, *state_shape)``, in the dtype of ``x``.

    Raises
    ------
    TypeError, ValueError
        If a shape, dtype or device does not fit.
    """
    problem = prepare(cell, x, h0, resets, dt=dt)
    return sequential_states(problem).to(problem.u.dtype)


def newton_apply(
    cell: nn.Module,
    x: Tensor,
    config: NewtonConfig | None = None,
    *,
    h0: Tensor | None = None,
    resets: Tensor | None = None,
    dt: Tensor | None = None,
) -> Tensor:
    """States by Newton's method over single steps, Algorithm 1 of Danieli et al. (2510.21450).

    The guess is ``f(0, x_t)``; every iteration solves the linearized recurrence. Unpinned, it
    iterates until the tolerance is met; ``NewtonConfig(max_iters=3)`` makes exactly the paper's
    three iterations and warns if they were not enough. Arguments and errors as for :func:`solve`.
    """
    return solve(cell, x, config, method="newton", h0=h0, resets=resets, dt=dt).states


def shooting_apply(
    cell: nn.Module,
    x: Tensor,
    config: NewtonConfig | None = None,
    *,
    h0: Tensor | None = None,
    resets: Tensor | None = None,
    dt: Tensor | None = None,
) -> Tensor:
    """States by multiple shooting over chunks. Arguments and errors as for :func:`solve`."""
    return solve(cell, x, config, method="shooting", h0=h0, resets=resets, dt=dt).states


def newton_m2rnn_factorized(
    cell: nn.Module,
    x: Tensor,
    config: NewtonConfig | None = None,
    *,
    h0: Tensor | None = None,
    resets: Tensor | None = None,
    dt: Tensor | None = None,
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
    return newton_apply(cell, x, config, h0=h0, resets=resets, dt=dt)
