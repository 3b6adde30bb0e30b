"""Own Specs made at random, against an interpreter of the expressions as they were written.

Certificates: a bound that is given is at least the error of the states, whatever they are.
"""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from pararnn import Cell, NewtonConfig, Spec, SpecError, tanh
from pararnn.testing.cases import (
    STATE,
    Answer,
    Case,
    check_gradients,
    check_states,
    drawn,
    loop,
    spread,
)
from pararnn.testing.random_specs import interpret, invent
from pararnn.testing.rounding import Rounding
from pararnn.testing.strategies import cases, examples, powers, resets
from pararnn.testing.strategies import settings as solver_settings

pytestmark = [
    pytest.mark.filterwarnings("ignore::pararnn.NewtonWarning"),
    pytest.mark.filterwarnings("ignore::pararnn.SpecWarning"),
]


@st.composite
def spec_cells(draw):
    """A cell of a random Spec."""
    random = draw(st.randoms(use_true_random=False))
    try:
        spec, sizes = invent(random, draw(st.booleans()))
        return Cell(2, spec=spec, sizes=sizes)
    except SpecError:
        assume(False)


@st.composite
def spec_cases(draw, tame=False):
    """What goes with such a cell."""
    return Case(
        "own Spec",
        batch=draw(st.sampled_from((2, 1))),
        length=draw(st.sampled_from((9, 1, 2, 13))),
        dtype=draw(st.sampled_from(("float64", "float32"))),
        seed=draw(st.integers(0, 999)),
        drives=((0.0, 0 if tame else draw(powers)), (0.0, 0)),
        h0=draw(st.sampled_from((None, 0, -6))),
        resets=draw(resets),
        **draw(solver_settings()),
    )


def spec_loop(problem, replicas=3, gradients=False):
    """As :func:`pararnn.testing.cases.loop`, by the interpreter."""
    cell, case = problem.cell, problem.case
    spec = cell.spec
    rounding = Rounding(STATE[problem.dtype], replicas)
    leaves = {k: rounding.copies(v).requires_grad_(gradients) for k, v in problem.leaves().items()}
    h = leaves.get("h0", rounding.copies(cell.init_state(case.batch)))
    maps = [leaves[m.name].unsqueeze(1) for m in spec.map_list]
    params = [leaves[p.name].unsqueeze(1) for p in spec.param_list]
    shapes = spec.drive_shapes(cell.sizes)
    given_ = [s for d, s in zip(spec.drive_list, shapes, strict=True) if d is not spec.gap]
    axis, states = -len(spec.axes) - 1, []
    for t in range(case.length):
        if problem.resets is not None:
            mask = problem.resets[:, t].reshape(1, -1, *(1,) * (h.ndim - 2))
            h = torch.where(mask, torch.zeros_like(h), h)
        parts = leaves["drives"][:, :, t].split([math.prod(s) for s in given_], -1)
        drives = [
            p.unflatten(-1, s) if s else p.squeeze(-1) for p, s in zip(parts, given_, strict=True)
        ]
        if spec.gap is not None:
            drives.insert(spec.drive_list.index(spec.gap), leaves["dt"][:, :, t])
        slots = [h] if cell.state_slots == 1 else list(h.unbind(axis))
        out = interpret(spec, cell.sizes, slots, drives, maps, params, rounding)
        h = out[0] if len(out) == 1 else torch.stack(out, axis)
        states.append(h)
    return Answer(torch.stack(states, 2), leaves)


def refused(error):
    """Corrections that a Jacobian class does not have are an error that says so."""
    return "not formed" in str(error)


@settings(max_examples=examples(50))
@given(spec_cells(), spec_cases())
def test_states(cell, case):
    problem = drawn(case, cell)
    with torch.no_grad():
        found = problem.solve()
        check_states(problem, spec_loop(problem), found.states, found.final_state)


@settings(max_examples=examples(30))
@given(spec_cells(), spec_cases(tame=True))
def test_gradients(cell, case):
    problem = drawn(case, cell)
    leaves = problem.leaves()
    for leaf in leaves.values():
        leaf.requires_grad_()
    states = problem.solve().states
    bar = torch.randn(states.shape, generator=torch.Generator().manual_seed(case.seed)).to(states)
    found = torch.autograd.grad(
        (states * bar).sum(), list(leaves.values()), allow_unused=True, materialize_grads=True
    )
    answer = spec_loop(problem, gradients=True)
    check_gradients(problem, answer, dict(zip(leaves, found, strict=True)), bar)


# -- reports and certificates ----------------------------------------------------------------------


def measured(problem, answer, states):
    """The largest error of states, less what the float64 loop itself may be off by."""
    exact = answer.states[0]
    error = (states.double().cpu() - exact).abs()
    return float((error - 8 * spread(answer.states)).max()) if error.numel() else 0.0


@settings(max_examples=examples(40))
@given(cases(dtypes=("float64", "float32"), pinned=True))
def test_a_certified_bound_is_above_the_error(case):
    """Whatever was run, and however far it got."""
    problem = drawn(dataclasses.replace(case, width=2))
    config = dataclasses.replace(case.config, certify=True)
    with torch.no_grad():
        found = problem.solve(config=config)
        exact = loop(dataclasses.replace(problem, case=dataclasses.replace(case, dtype="float64")))
    bound = found.error_bound
    assert not math.isnan(bound)
    if math.isfinite(bound):
        error = measured(problem, exact, found.states)
        assert error <= bound, f"error {error:.3g}, certified {bound:.3g}"


@settings(max_examples=examples(40))
@given(cases(dtypes=("float64", "float32"), pinned=True, tame=True))
def test_a_pinned_solve_that_says_converged_is_right(case):
    problem = drawn(case)
    with torch.no_grad():
        found = problem.solve()
        if found.converged:
            check_states(problem, loop(problem), found.states, found.final_state)


with Spec("Cancelling") as CANCELLING:
    _h = CANCELLING.state("h", bounds=(-1, 1))
    _u, _q = CANCELLING.drives("u q")
    (_p,) = CANCELLING.params("p")
    _w = CANCELLING.map("w", structure="diagonal")
    CANCELLING.next(_h, tanh(_u * _p - _q + _w(_h)))


@settings(max_examples=examples(30))
@given(st.integers(0, 999), st.sampled_from((0, 2, 4, 6)), st.sampled_from((1, 5, 30)))
@example(0, 4, 30)  # row 2
def test_a_certificate_survives_cancellation(seed, power, length):
    """States of size 1 from terms of size ``10^power`` that cancel; the truth in 50 digits."""
    import mpmath

    g = torch.Generator().manual_seed(seed)
    cell = Cell(1, 1, spec=CANCELLING).double()
    u = torch.randn(length, generator=g, dtype=torch.float64) * 10.0**power
    with torch.no_grad():
        cell.w.fill_(0.5)
        cell.p.copy_(1 + torch.rand(1, generator=g, dtype=torch.float64))
        q = u * cell.p + torch.randn(length, generator=g, dtype=torch.float64)
    drives = torch.stack([u, q], -1)[None]
    from pararnn import solve

    with torch.no_grad():
        found = solve(cell, drives=drives, config=NewtonConfig(certify=True))
    with mpmath.workdps(50):
        h, worst = mpmath.mpf(0), mpmath.mpf(0)
        for t in range(length):
            terms = mpmath.mpf(float(u[t])) * mpmath.mpf(float(cell.p))
            h = mpmath.tanh(terms - mpmath.mpf(float(q[t])) + mpmath.mpf(0.5) * h)
            worst = max(worst, abs(h - mpmath.mpf(float(found.states[0, t]))))
    assert worst <= found.error_bound, f"error {float(worst):.3g} > {found.error_bound:.3g}"
