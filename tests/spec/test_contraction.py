# ruff: noqa: PT012 (a Spec is written in a block of several statements)
"""Sums over a state axis: what a Spec with them means, derives, prints and refuses."""

from __future__ import annotations

import math

import numpy as np
import pytest
import sympy
import torch

from pararnn.scan import Flat, Left
from pararnn.solvers.spec_recurrence import SpecRecurrence
from pararnn.spec import Spec, SpecError, maximum, oracle, tanh
from pararnn.spec.bounds import derivative_bounds


def reflection(name="Reflection"):
    """``H' = g H − b k (kᵀH) + b k vᵀ`` with a unit key, and the read-out ``Hᵀq``."""
    with Spec(name, axes=("heads", "K", "V"), parallel=("heads",)) as s:
        H = s.state("H")
        q, key = s.drives("q u_k", axes=("heads", "K"), inline=False)
        (v,) = s.drives("v", axes=("heads", "V"), inline=False)
        b, g = s.drives("b g", axes=("heads",), inline=False)
        n = s.contract("n", key * key, over="K")
        k = s.let("k", key / sympy.sqrt(maximum(n, 1e-24)))
        S = s.let("S", g * H)
        p = s.contract("p", k * S, over="K")
        s.next(H, S + b * k * (v - p))
        s.read("o", q * s.updated(H), over="K")
    return s


def bounded():
    """A nonlinear Spec that mixes both axes: its Jacobian is a dense matrix."""
    with Spec("Mixed", axes=("K", "V")) as s:
        H = s.state("H", bounds=(-1, 1))
        (k,) = s.drives("k", axes=("K",))
        (v,) = s.drives("v", axes=("V",))
        p = s.contract("p", k * H, over="K")
        r = s.contract("r", H * v, over="V")
        s.next(H, tanh(p + r + k * v))
    return s


def along_rows():
    """A linear Spec that mixes columns: no one matrix acts on each of them."""
    with Spec("Rows", axes=("K", "V")) as s:
        H = s.state("H")
        (k,) = s.drives("k", axes=("K",))
        m = s.contract("m", H, over="V")
        s.next(H, H + k * m)
    return s


SIZES = {"heads": 2, "K": 3, "V": 4}


def numbers(spec, sizes, batch=(), seed=0):
    rng = np.random.default_rng(seed)
    state = rng.uniform(-0.9, 0.9, (*batch, *spec.state_shape(sizes)))
    drives = tuple(rng.standard_normal((*batch, *shape)) for shape in spec.drive_shapes(sizes))
    return state, drives


def test_the_step_written_out():
    spec = reflection()
    state, (q, key, v, b, g) = numbers(spec, SIZES)
    found = oracle.step(spec, state, (q, key, v, b, g), ())
    for h in range(2):
        k = key[h] / np.linalg.norm(key[h])
        S = g[h] * state[h]
        want = S - b[h] * np.outer(k, k @ S) + b[h] * np.outer(k, v[h])
        np.testing.assert_allclose(found[h], want, rtol=0, atol=1e-14)
    many = oracle.step(spec, state, (q, key, v, b, g), (), "mpmath").astype(float)
    np.testing.assert_allclose(found, many, rtol=0, atol=1e-14)


def test_the_read_out_written_out():
    spec = reflection()
    state, drives = numbers(spec, SIZES)
    want = np.stack([state[h].T @ drives[0][h] for h in range(2)])
    np.testing.assert_allclose(oracle.read(spec, state, drives, ()), want, rtol=0, atol=1e-14)
    many = oracle.read(spec, state, drives, (), "mpmath").astype(float)
    np.testing.assert_allclose(many, want, rtol=0, atol=1e-14)


@pytest.mark.parametrize("make", [reflection, bounded])
def test_the_jacobian_is_proven(make):
    assert oracle.prove_jacobian(make(), {"heads": 2, "K": 2, "V": 3})


def test_class_and_operators():
    assert reflection().jac_structure == "linear"
    assert bounded().jac_structure == "dense"
    assert not reflection().channelwise
    assert reflection().factorization.columnwise
    assert not bounded().factorization.columnwise
    assert reflection().linear_class == "householder"
    assert along_rows().linear_class == "dense"
    assert bounded().linear_class is None


@pytest.mark.parametrize(
    ("make", "algebra"), [(reflection, Left), (bounded, Flat), (along_rows, Flat)]
)
def test_the_formed_operator_is_the_dense_jacobian(make, algebra):
    spec = make()
    state, drives = numbers(spec, SIZES, batch=(2,))
    dynamics = SpecRecurrence(spec, SIZES, (), torch.float64)
    u = torch.from_numpy(np.concatenate([d.reshape(2, -1) for d in drives], -1))
    h = torch.from_numpy(state)
    op = dynamics.operator_at(h, u, "exact")
    found = dynamics.algebra("exact")
    assert isinstance(found, algebra)
    for row in range(2):
        dense = oracle.dense_jacobian(spec, state[row], [d[row] for d in drives], ())
        width = math.prod(spec.state_shape(SIZES))
        columns = torch.eye(width, dtype=torch.float64).reshape(width, *spec.state_shape(SIZES))
        applied = found.apply(op[row], columns).flatten(1).mT
        np.testing.assert_allclose(applied.numpy(), dense, rtol=0, atol=1e-13)


@pytest.mark.parametrize("make", [reflection, bounded])
def test_gradients_of_drives_are_those_of_autograd(make):
    spec = make()
    state, drives = numbers(spec, SIZES, batch=(2,))
    dynamics = SpecRecurrence(spec, SIZES, (), torch.float64)
    u = torch.from_numpy(np.concatenate([d.reshape(2, -1) for d in drives], -1)).requires_grad_()
    h = torch.from_numpy(state).requires_grad_()
    cotangent = torch.randn(h.shape, generator=torch.Generator().manual_seed(1)).double()
    want = torch.autograd.grad(dynamics.step(h, u), (h, u), cotangent)
    values = dynamics.linearization(h.detach(), u.detach())
    u_bar, _ = dynamics.gradients(values, h.detach(), u.detach(), cotangent)
    h_bar = dynamics.transpose(values[: dynamics.n_state], cotangent)
    torch.testing.assert_close(h_bar, want[0], rtol=0, atol=1e-13)
    torch.testing.assert_close(u_bar, want[1], rtol=0, atol=1e-13)


def test_a_zero_key_writes_nothing_and_has_a_finite_gradient():
    spec = reflection()
    state, drives = numbers(spec, SIZES, batch=(1,))
    drives[1][:] = 0
    dynamics = SpecRecurrence(spec, SIZES, (), torch.float32)
    u = torch.from_numpy(np.concatenate([d.reshape(1, -1) for d in drives], -1)).float()
    u.requires_grad_()
    h = torch.from_numpy(state).float()
    following = dynamics.step(h, u)
    torch.testing.assert_close(following, torch.from_numpy(drives[4]).float()[..., None, None] * h)
    (gradient,) = torch.autograd.grad(following.sum(), u)
    assert gradient.isfinite().all()


def test_derivative_bounds_hold():
    spec = bounded()
    first, second = derivative_bounds(spec, (), SIZES)
    assert first.shape == second.shape == (3, 4)
    assert np.isinf(first).all()  # a sum with any drive as weight is bounded by nothing
    with Spec("Mean", axes=("K", "V")) as s:
        H = s.state("H", bounds=(-1, 1))
        (u,) = s.drives("u")
        m = s.contract("m", H / 8, over="K")
        s.next(H, tanh(m + u))
    first, second = derivative_bounds(s, (), SIZES)
    np.testing.assert_allclose(first, 3 / 8)
    assert (second > 0).all()
    assert np.isfinite(second).all()


def test_the_page():
    lines = {e.name: e.latex for e in reflection().latex()}
    assert lines["k"].startswith(r"k_t = \frac{u_{k,t}}{\sqrt{\max(u_{k,t}^\top u_{k,t}, ")
    assert lines["H"] == r"H_t = S_t + b_t k_t (v_t - S_t^\top k_t)^\top"
    assert lines["o"] == r"o_t = H_t^\top q_t"
    assert list(lines)[-1] == "o"
    assert reflection().jacobian_latex() == [
        r"\dot{S}_t = g_t\, \dot{H}_{t-1}",
        r"\dot{H}_t = \dot{S}_t - b_t k_t (\dot{S}_t^\top k_t)^\top",
    ]


def test_sums_over_either_axis_are_printed():
    assert [e.latex for e in bounded().latex()][-1].startswith(
        r"H_t = \tanh(H_{t-1}^\top (W_k x_t + b_k) + H_{t-1} (W_v x_t + b_v)"
    )


@pytest.mark.parametrize(
    ("write", "says"),
    [
        (lambda s, H, k, v: s.contract("p", v, over="K"), r"sum over 'K' .* axes \('V',\)"),
        (lambda s, H, k, v: s.contract("p", H, over="N"), "sum over 'N'"),
        (lambda s, H, k, v: s.read("o", k * s.updated(H), over="K"), "used before it is defined"),
        (lambda s, H, k, v: s.read("o", k * H, over="K"), "expected a sum of products of the new"),
        (lambda s, H, k, v: s.read("o", tanh(k) * v, over="K"), "expected a sum of products"),
    ],
)
def test_refusals(write, says):
    with pytest.raises(SpecError, match=says), Spec("S", axes=("K", "V")) as s:
        H = s.state("H")
        (k,) = s.drives("k", axes=("K",))
        (v,) = s.drives("v", axes=("V",))
        write(s, H, k, v)


def test_a_second_read_out_and_a_wrong_parallel_axis():
    with pytest.raises(SpecError, match="second read-out"), Spec("S", axes=("K", "V")) as s:
        H = s.state("H")
        (k,) = s.drives("k", axes=("K",))
        s.next(H, H + k)
        s.read("o", k * s.updated(H), over="K")
        s.read("y", k * s.updated(H), over="K")
    with pytest.raises(SpecError, match="parallel axes"):
        Spec("S", axes=("K", "V"), parallel=("heads",))


def test_the_read_out_is_part_of_the_fingerprint():
    def spec(reads):
        with Spec("S", axes=("K", "V")) as s:
            H = s.state("H")
            q, k = s.drives("q k", axes=("K",))
            s.next(H, H + k * q)
            if reads:
                s.read("o", q * s.updated(H), over="K")
        return s

    assert spec(True) == spec(True)
    assert spec(True) != spec(False)
    with pytest.raises(ValueError, match="no read-out"):
        spec(False).source("read")


def test_a_read_out_has_a_symbol_on_the_page():
    def shown(**given):
        with Spec("S", axes=("K", "V")) as s:
            H = s.state("H")
            (k,) = s.drives("k", axes=("K",))
            s.next(H, H / 2 + k)
            s.read("o_t", k * s.updated(H), over="K", **given)
        return s.readout.latex

    assert shown() == "o_t"
    assert shown(latex="y") == "y"
