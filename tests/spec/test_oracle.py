"""The oracle in three kinds of number, and the proof of the factorized Jacobian."""

from __future__ import annotations

import copy

import mpmath
import numpy as np
import pytest
import sympy
import torch

from pararnn.spec import oracle

SMALL = {
    "gru_diag": {"d": 2},
    "gru_head": {"d": 4, "heads": 2},
    "gru_dense": {"d": 2},
    "matrix": {"K": 2, "V": 2},
    "lstm": {"d": 2},
    "lstm_dense": {"d": 2},
    "everything": {"d": 1},
    "rotation": {"d": 2},
    "linear_right": {"K": 1, "V": 2},
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow) if n == "everything" else n for n in SMALL],
)
def test_proof(zoo, name):
    assert oracle.prove_jacobian(zoo[name].spec, SMALL[name]) is True


@pytest.mark.parametrize("change", ["factor", "sign", "swap", "drop"])
def test_proof_fails_on_a_wrong_factorization(zoo, change):
    spec = copy.copy(zoo["gru_diag"].spec)
    factorization = spec.factorization
    edges = {t: dict(e) for t, e in factorization.edges.items()}
    target = spec.slots[0].next_symbol
    sources = [s for t, s in factorization.state_edges if t == target]
    if change == "factor":
        edges[target][sources[0]] *= 2
    elif change == "sign":
        edges[target][sources[1]] *= -1
    elif change == "swap":
        a, b = sources[0], sources[1]
        edges[target][a], edges[target][b] = edges[target][b], edges[target][a]
    else:
        del edges[target][sources[-1]]
    broken = type(factorization)(spec, factorization.linear, edges)
    spec.__dict__["factorization"] = broken
    oracle._program.cache_clear()
    try:
        with pytest.raises(AssertionError, match=r"entry \(\d, \d\)"):
            oracle.prove_jacobian(spec, {"d": 2})
    finally:
        oracle._program.cache_clear()


def test_fifty_digits(zoo):
    """h' of one channel against the equation in mpmath, to the last digits."""
    specimen = zoo["gru_diag"]
    state, drives, params = specimen.inputs()
    with mpmath.workdps(50):
        got = oracle.step(
            specimen.spec,
            state.numpy(),
            [u.numpy() for u in drives],
            [p.numpy() for p in params],
            "mpmath",
        )
        for i in range(4):
            h, *u = (mpmath.mpf(float(t[i])) for t in (state, *drives))
            a = [mpmath.mpf(float(p[i])) for p in params]
            z = 1 / (1 + mpmath.exp(-(a[0] * h + u[0])))
            r = 1 / (1 + mpmath.exp(-(a[1] * h + u[1])))
            n = mpmath.tanh(a[2] * r * h + u[2])
            want = (1 - z) * h + z * n
            assert abs(got[i] - want) < mpmath.mpf(10) ** -48
            assert isinstance(got[i], mpmath.mpf)


@pytest.mark.parametrize("name", ["gru_head", "lstm", "everything", "matrix"])
def test_products_in_mpmath(zoo, name):
    """JVP, VJP and the dense Jacobian by differences agree to far more than double precision."""
    specimen = zoo[name]
    state, drives, params = specimen.inputs()
    arrays = (state.numpy(), [u.numpy() for u in drives], [p.numpy() for p in params])
    v = np.random.default_rng(0).normal(size=state.shape)
    with mpmath.workdps(50):
        dense = oracle.dense_jacobian(specimen.spec, *arrays, backend="mpmath")
        exact = np.array([mpmath.mpf(float(x)) for x in v.reshape(-1)], dtype=object)
        for program, matrix in ((oracle.jvp, dense), (oracle.vjp, dense.T)):
            got = program(specimen.spec, *arrays, v, backend="mpmath").reshape(-1)
            worst = max(abs(x) for x in got - matrix @ exact)
            assert worst < mpmath.mpf(10) ** -40


def test_dense_jacobian_in_float64(specimen):
    state, drives, params = specimen.inputs()
    want = torch.autograd.functional.jacobian(lambda h: specimen.step(h, drives, params), state)
    got = oracle.dense_jacobian(
        specimen.spec, state.numpy(), [u.numpy() for u in drives], [p.numpy() for p in params]
    )
    assert got.dtype == np.float64
    np.testing.assert_allclose(got, want.reshape(state.numel(), -1).numpy(), 1e-10, 1e-13)


def test_symbolic_step_is_the_equation(zoo):
    state, drives, params = oracle.symbolic_inputs(zoo["linear_dense"].spec, {"d": 2})
    out = oracle.step(zoo["linear_dense"].spec, state, drives, params, "sympy")
    (A,), (u,) = params, drives
    for i in range(2):
        want = A[i, 0] * state[0] + A[i, 1] * state[1] + u[i]
        assert sympy.expand(out[i] - want) == 0


def test_sequence_is_the_loop(specimen):
    state, drives, params = specimen.inputs()
    g = torch.Generator().manual_seed(3)
    drives = tuple(torch.randn((5, *u.shape), generator=g, dtype=torch.float64) for u in drives)
    got = oracle.sequence(
        specimen.spec, state.numpy(), [u.numpy() for u in drives], [p.numpy() for p in params]
    )
    h = state
    for t in range(5):
        h = specimen.step(h, tuple(u[t] for u in drives), params)
        np.testing.assert_allclose(got[t], h.numpy(), 1e-10, 1e-12)


def test_batches(specimen):
    """Leading dimensions go through, and samples do not mix."""
    state, drives, params = specimen.inputs(2, 3)
    arrays = [p.numpy() for p in params]
    v = np.random.default_rng(1).normal(size=state.shape)
    whole = oracle.jvp(specimen.spec, state.numpy(), [u.numpy() for u in drives], arrays, v)
    for i in np.ndindex(2, 3):
        one = oracle.jvp(
            specimen.spec, state[i].numpy(), [u[i].numpy() for u in drives], arrays, v[i]
        )
        np.testing.assert_allclose(whole[i], one, 1e-13, 1e-15)


def test_a_sequence_refuses_another_number_of_drives(zoo):
    specimen = zoo["gru_diag"]
    state, drives, params = specimen.inputs()
    u = [np.stack([d.numpy()] * 3, d.ndim - 1) for d in drives]
    arrays = [p.numpy() for p in params]
    assert oracle.sequence(specimen.spec, state.numpy(), u, arrays).shape == (3, *state.shape)
    with pytest.raises(ValueError, match="zip"):
        oracle.sequence(specimen.spec, state.numpy(), [*u, u[0]], arrays)
