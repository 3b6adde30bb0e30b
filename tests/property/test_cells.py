"""Every registered cell by every way to solve, against loops that share no code with the library."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pararnn.testing.cases import (
    DEVICE,
    Case,
    check_gradients,
    check_states,
    drawn,
    loop,
)
from pararnn.testing.strategies import cases, examples, spoiled_cases

pytestmark = pytest.mark.filterwarnings("ignore::pararnn.NewtonWarning")


@settings(max_examples=examples(60))
@given(cases())
def test_states(case):
    problem = drawn(case)
    with torch.no_grad():
        answer, found = loop(problem), problem.solve()
        check_states(problem, answer, found.states, found.final_state)


@settings(max_examples=examples(50))
@given(spoiled_cases())
def test_what_is_not_finite_stays_where_it_is(case):
    """Before a bad value, after a reset behind it and in other rows the states are right."""
    problem = drawn(case)
    with torch.no_grad():
        answer, found = loop(problem), problem.solve()
        check_states(problem, answer, found.states, found.final_state)
    bad = [v for *_, v in case.spoiled]
    if all(math.isnan(v) for v in bad):
        gone = answer.states.isnan().all(0)
        shown = found.states.detach().cpu()
        assert not shown[gone].isfinite().any(), "a NaN has vanished"
    if found.converged:
        whole = found.states.isfinite().all() and found.final_state.isfinite().all()
        assert whole, "the report says converged of states that are not finite"


def gradients(problem, **changes):
    """The loss's weights, and its gradients by the library."""
    g = torch.Generator().manual_seed(problem.case.seed)
    leaves = problem.leaves()
    for leaf in leaves.values():
        leaf.requires_grad_()
    found = problem.solve(**changes)
    bar = torch.randn(found.states.shape, generator=g) * 10.0**problem.case.cotangents
    bar = bar.to(found.states.dtype).to(DEVICE)
    first = torch.autograd.grad(
        (found.states * bar).sum(), list(leaves.values()), allow_unused=True, materialize_grads=True
    )
    return bar, dict(zip(leaves, first, strict=True))


@settings(max_examples=examples(40))
@given(cases(dtypes=("float64", "float32"), tame=True), st.sampled_from((0, -12, 6)))
def test_gradients(case, cotangents):
    problem = drawn(dataclasses.replace(case, cotangents=cotangents))
    assume(case.length > 0 and case.batch > 0)
    bar, found = gradients(problem)
    check_gradients(problem, loop(problem, gradients=True), found, bar)


def same_bits(a, b):
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


@settings(max_examples=examples(40))
@given(cases(), st.integers(0, 30), st.sampled_from((1.0, 1e4, 1e30, math.nan, math.inf)))
def test_causality(case, cut, value):
    """Whatever comes from a step on, the states before it keep their bits."""
    problem = drawn(case)
    assume(case.length > 0)
    cut %= case.length
    later = problem.drives.clone()
    later[:, cut:] = later[:, cut:].flip(-1) + value
    with torch.no_grad():
        before = problem.solve().states[:, :cut]
        after = problem.solve(drives=later).states[:, :cut]
    assert same_bits(before, after)


@settings(max_examples=examples(40))
@given(cases(), st.sampled_from((1.0, 1e4, 1e30, math.nan, math.inf)))
def test_rows_are_independent(case, value):
    """Whatever is in other rows, a row keeps its bits."""
    case = dataclasses.replace(case, batch=3)
    problem = drawn(case)
    other = problem.drives.clone()
    other[1:] = other[1:].flip(-1) * value
    with torch.no_grad():
        alone, beside = problem.solve(), problem.solve(drives=other)
    assert same_bits(alone.states[0], beside.states[0])
    assert same_bits(alone.final_state[0], beside.final_state[0])


@settings(max_examples=examples(40))
@given(cases(), st.integers(0, 30), st.sampled_from((None, math.nan, math.inf)))
def test_a_reset_is_a_fresh_sequence(case, at, before):
    """After a reset the states are those of the rest, run by itself, whatever was before."""
    assume(case.length > 0 and case.batch)
    at %= case.length
    case = dataclasses.replace(case, resets=tuple((row, at) for row in range(case.batch)), h0=None)
    problem = drawn(case)
    if before is not None and at:
        problem.drives[:, at - 1] = before
    cell = problem.cell
    h0 = torch.zeros(case.batch, *cell.state_shape, dtype=cell.state_dtype, device=DEVICE)
    rest = dataclasses.replace(case, length=case.length - at)
    dt = None if problem.dt is None else problem.dt[:, at:]
    fresh = dataclasses.replace(
        problem, case=rest, drives=problem.drives[:, at:], h0=h0, resets=None, dt=dt
    )
    with torch.no_grad():
        found, alone, answer = problem.solve(), fresh.solve(), loop(fresh)
        check_states(fresh, answer, found.states[:, at:], found.final_state)
        check_states(fresh, answer, alone.states, alone.final_state)
        if case.method == "sequential":
            assert same_bits(found.states[:, at:], alone.states)


def test_most_numbers_are_judged():
    """The tolerance is finite for nearly all that an ordinary case computes."""
    case = Case("ParaLSTM", dtype="float32", drives=((-4.0, 0), (0.0, -6)))
    problem = drawn(case)
    with torch.no_grad():
        found = problem.solve()
        assert check_states(problem, loop(problem), found.states, found.final_state) == 1.0
