"""Every printed program against the hand-written equation and autograd through it."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import sympy
import torch

from pararnn.solvers.methods.scan import scannable
from pararnn.solvers.spec_recurrence import SpecRecurrence
from pararnn.solvers.torch_backend import compiled
from pararnn.spec import Spec, oracle, sigmoid, tanh
from pararnn.spec.derive import PROGRAMS
from pararnn.spec.print import print_program

CLOSE = {"rtol": 1e-11, "atol": 1e-12}


def dynamics_of(specimen, params, dtype=torch.float64):
    return SpecRecurrence(specimen.spec, specimen.sizes, params, dtype)


def packed(drives, lead):
    return torch.cat([u.reshape(*lead, -1) for u in drives], -1)


def dense_jacobian(specimen, state, drives, params):
    """∂vec(h')/∂vec(h) of one sample by autograd through the hand-written equation."""
    full = torch.autograd.functional.jacobian(lambda h: specimen.step(h, drives, params), state)
    return full.reshape(state.numel(), state.numel())


def test_jacobian_class(specimen):
    assert specimen.spec.jac_structure == specimen.jac_structure


def test_step_in_torch(specimen):
    state, drives, params = specimen.inputs(2, 3)
    got = dynamics_of(specimen, params).step(state, packed(drives, (2, 3)))
    torch.testing.assert_close(got, specimen.step(state, drives, params), **CLOSE)


def test_step_in_numpy(specimen):
    state, drives, params = specimen.inputs(5)
    got = oracle.step(
        specimen.spec, state.numpy(), [u.numpy() for u in drives], [p.numpy() for p in params]
    )
    np.testing.assert_allclose(got, specimen.step(state, drives, params).numpy(), 1e-11, 1e-12)


@pytest.mark.parametrize("seed", [0, 1])
def test_tangent_transpose_and_operator(specimen, seed):
    state, drives, params = specimen.inputs(seed=seed)
    dense = dense_jacobian(specimen, state, drives, params)
    v = torch.randn_like(state)
    dynamics = dynamics_of(specimen, params)
    u = packed(drives, ())
    c = dynamics.coefficients(state, u)
    flat = v.reshape(-1)
    torch.testing.assert_close(dynamics.tangent(c, v).reshape(-1), dense @ flat, **CLOSE)
    torch.testing.assert_close(dynamics.transpose(c, v).reshape(-1), dense.T @ flat, **CLOSE)
    arrays = ([d.numpy() for d in drives], [p.numpy() for p in params])
    got = oracle.jvp(specimen.spec, state.numpy(), *arrays, v.numpy())
    np.testing.assert_allclose(got.reshape(-1), (dense @ flat).numpy(), 1e-11, 1e-12)
    got = oracle.vjp(specimen.spec, state.numpy(), *arrays, v.numpy())
    np.testing.assert_allclose(got.reshape(-1), (dense.T @ flat).numpy(), 1e-11, 1e-12)
    got = oracle.factorized_jacobian(specimen.spec, state.numpy(), *arrays)
    np.testing.assert_allclose(got, dense.numpy(), 1e-11, 1e-12)
    algebra = dynamics.algebra("exact")
    if algebra is None:  # several matrix slots: products only
        return
    lead = (1, 1)  # operators want leading dimensions (batch, time)
    op = dynamics.operator_at(state.expand(*lead, *state.shape), u.expand(*lead, -1), "exact")
    acted = algebra.apply(op, v.expand(*lead, *v.shape))
    torch.testing.assert_close(acted.reshape(-1), dense @ flat, **CLOSE)
    acted = algebra.apply(algebra.transpose(op), v.expand(*lead, *v.shape))
    torch.testing.assert_close(acted.reshape(-1), dense.T @ flat, **CLOSE)


def test_operator_goes_with_the_step(specimen):
    state, drives, params = specimen.inputs(2, 3)
    dynamics, u = dynamics_of(specimen, params), packed(drives, (2, 3))
    if dynamics.algebra("exact") is None:
        pytest.skip("no operators are formed for several matrix slots")
    following, op = dynamics.step_with_operator(state, u, "exact")
    assert torch.equal(following, dynamics.step(state, u)), "the extra outputs changed the step"
    assert op.shape[:2] == (2, 3)
    torch.testing.assert_close(op, dynamics.operator_at(state, u, "exact"), **CLOSE)


def test_step_jacobian_program_is_bitwise_the_step(specimen):
    if not specimen.spec.channelwise:
        with pytest.raises(ValueError, match="channelwise"):
            print_program(specimen.spec, "step_jacobian")
        return
    for dtype in (torch.float64, torch.float32):
        state, drives, params = specimen.inputs(64, scale=3.0)
        dynamics = dynamics_of(specimen, tuple(p.to(dtype) for p in params), dtype)
        if not params:
            continue
        slots = dynamics._slots(state.to(dtype))
        inputs = (*slots, *dynamics._drives(packed(drives, (64,)).to(dtype)), *dynamics.params)
        n = len(specimen.spec.slots)
        alone = compiled(specimen.spec, "step")(*inputs)
        both = compiled(specimen.spec, "step_jacobian")(*inputs)
        assert all(torch.equal(a, b) for a, b in zip(alone, both[:n], strict=True))
        assert len(both) == n + n * n


def test_inputs_are_not_overwritten(specimen):
    state, drives, params = specimen.inputs(3)
    u, v = packed(drives, (3,)), torch.randn_like(state)
    kept = [t.clone() for t in (state, u, v, *params)]
    dynamics = dynamics_of(specimen, params)
    dynamics.step(state, u)
    c = dynamics.coefficients(state, u)
    kept_c = [x.clone() for x in c]
    dynamics.tangent(c, v), dynamics.transpose(c, v)
    dynamics.gradients(dynamics.linearization(state, u), state, u, v)
    if dynamics.algebra("exact") is not None:
        dynamics.step_with_operator(state, u, "exact")
    for before, after in zip(kept, (state, u, v, *params), strict=True):
        assert torch.equal(before, after)
    for before, after in zip(kept_c, c, strict=True):
        assert torch.equal(before, after)


def test_gradients_of_one_step(specimen):
    state, drives, params = specimen.inputs(2, 3)
    leaves = [t.clone().requires_grad_() for t in (*drives, *params)]
    out = specimen.step(state, tuple(leaves[: len(drives)]), tuple(leaves[len(drives) :]))
    cotangent = torch.randn_like(state)
    want = torch.autograd.grad(out, leaves, cotangent.expand_as(out), allow_unused=True)
    want = [torch.zeros_like(t) if g is None else g for t, g in zip(leaves, want, strict=True)]
    dynamics, u = dynamics_of(specimen, params), packed(drives, (2, 3))
    found = dynamics.linearization(state, u)
    u_bar, grads = dynamics.gradients(found, state, u, cotangent)
    torch.testing.assert_close(u_bar, packed(want[: len(drives)], (2, 3)), **CLOSE)
    for got, expected in zip(grads, want[len(drives) :], strict=True):
        got = torch.zeros_like(expected) if got is None else got
        torch.testing.assert_close(got, expected, **CLOSE)
    into = torch.full_like(u, torch.nan)
    dynamics.gradients(found, state, u, cotangent, into)
    torch.testing.assert_close(into, u_bar, rtol=0, atol=0)


def test_quasi_operator_of_a_dense_map_is_the_diagonal(zoo):
    for name in ("gru_head", "gru_dense"):
        specimen = zoo[name]
        state, drives, params = specimen.inputs(1, 1)
        dynamics = dynamics_of(specimen, params)
        c = dynamics.coefficients(state, packed(drives, (1, 1)))
        op = dynamics.operator(c, "quasi", state)
        # Exactly the Jacobian of the cell whose maps are replaced by their diagonals.
        diagonals = tuple(
            torch.cat([torch.diag(m) for m in p.reshape(-1, *p.shape[-2:])]) for p in params
        )
        assert op.shape == state.shape
        program = compiled(specimen.spec, "channel_jacobian")
        torch.testing.assert_close(program(*c, *diagonals)[0], op)


def test_row_averaged_operator_of_a_matrix_state(zoo):
    """Equal rows make the average exact."""
    specimen = zoo["matrix"]
    state, drives, params = specimen.inputs(1, 1)
    state = state[..., :1, :].expand_as(state)
    k = drives[0][..., :1].expand_as(drives[0])
    drives = (k, *drives[1:])
    params = (params[0], params[1][:1].expand_as(params[1]), params[2][:1].expand_as(params[2]))
    dynamics, u = dynamics_of(specimen, params), packed(drives, (1, 1))
    c, v = dynamics.coefficients(state, u), torch.randn_like(state)
    algebra = dynamics.algebra("quasi")
    got = algebra.apply(dynamics.operator(c, "quasi", state), v)
    torch.testing.assert_close(got, dynamics.tangent(c, v), **CLOSE)


def test_majorant_bounds_the_tangent(specimen):
    for seed in range(3):
        state, drives, params = specimen.inputs(4, seed=seed)
        dynamics = dynamics_of(specimen, params)
        c = dynamics.coefficients(state, packed(drives, (4,)))
        v = torch.randn_like(state)
        bound = dynamics.majorant(c, v.abs())
        assert bool((dynamics.tangent(c, v).abs() <= bound * (1 + 1e-12) + 1e-15).all())


def test_one_minus_z_is_not_reordered(zoo):
    """A gate next to 1: ``1 - z`` must keep its digits, which a subtraction would lose."""
    import mpmath

    specimen = zoo["gru_diag"]
    u_z = torch.full((1, 4), 36.0, dtype=torch.float64)
    h = torch.full((1, 4), 0.7, dtype=torch.float64)
    zero = torch.zeros_like(u_z)
    params = (torch.zeros(4, dtype=torch.float64),) * 3
    got = dynamics_of(specimen, params).operator_at(
        h[None], packed((u_z, zero, zero), (1,))[None], "exact"
    )
    with mpmath.workdps(50):
        want = float(1 - 1 / (1 + mpmath.exp(-36)))
    assert want > 0
    torch.testing.assert_close(got, torch.full_like(got, want), rtol=1e-15, atol=0)


def test_saturated_gates_keep_the_state(zoo):
    specimen = zoo["gru_diag"]
    h = torch.tensor([[0.3, -0.7, 1.0, 1e-30]], dtype=torch.float64)
    u = torch.zeros(1, 12, dtype=torch.float64)
    u[:, :4] = -800.0  # z = 0 exactly
    params = (torch.zeros(4, dtype=torch.float64),) * 3
    assert torch.equal(dynamics_of(specimen, params).step(h, u), h)


def test_half_powers_are_usable_by_autograd():
    """In-place calls must not overwrite what autograd needs."""
    with Spec("roots") as s:
        h = s.state("h", bounds=(-1, 1))
        (u,) = s.drives("u")
        A = s.map("A", structure="diagonal")
        s.next(h, tanh(sympy.sqrt(1 + A(h) ** 2 + u**2) - 1))
    h, u, a = (torch.randn(3, dtype=torch.float64, requires_grad=True) for _ in range(3))
    program = compiled(s, "step")

    def by_hand(h, u, a):
        return torch.tanh(torch.sqrt(1 + (a * h) ** 2 + u**2) - 1)

    torch.testing.assert_close(program(h, u, a)[0], by_hand(h, u, a))
    got = torch.autograd.grad(program(h, u, a)[0].sum(), [h, u, a])
    want = torch.autograd.grad(by_hand(h, u, a).sum(), [h, u, a])
    torch.testing.assert_close(got, want)
    with Spec("roots2") as s:
        h_ = s.state("h", bounds=(-1, 1))
        (u_,) = s.drives("u")
        s.next(h_, tanh(sympy.sqrt(1 + h_**2 + u_**2)))
    got = torch.autograd.grad(compiled(s, "step")(h, u)[0].sum(), [h, u])
    want = torch.autograd.grad(torch.tanh(torch.sqrt(1 + h**2 + u**2)).sum(), [h, u])
    torch.testing.assert_close(got, want)


def test_constants_as_arguments():
    with Spec("constants") as s:
        h = s.state("h", bounds=(-1, 1))
        (u,) = s.drives("u")
        s.next(h, tanh(sigmoid(sympy.Integer(1)) * h + u) / sympy.Integer(3))
    state, u = np.array([0.2, -0.4]), np.array([0.3, 0.1])
    want = np.tanh(state / (1 + np.exp(-1.0)) + u) / 3
    np.testing.assert_allclose(oracle.step(s, state, (u,), ()), want, rtol=1e-14)
    got = compiled(s, "step")(torch.tensor(state), torch.tensor(u))[0]
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-14)


PRINT_ALL = """
from pararnn.cells.para_gru import gru_spec
from pararnn.cells.para_m2rnn import m2rnn_spec
from pararnn.spec.derive import PROGRAMS
from pararnn.spec.print import DIALECTS, print_program
for s in (gru_spec("diag"), gru_spec("head"), m2rnn_spec()):
    print(s.fingerprint, [e.latex for e in s.latex()], s.jacobian_latex())
    for p in PROGRAMS:
        for d in DIALECTS:
            try:
                print(print_program(s, p, d))
            except ValueError as e:
                print(e)
"""


@pytest.mark.slow
def test_printing_is_the_same_in_every_process():
    texts = set()
    for seed in ("0", "1", "4242"):
        env = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", PRINT_ALL], capture_output=True, text=True, check=True, env=env
        )
        texts.add(done.stdout)
    assert len(texts) == 1
    assert "def gradients" in texts.pop()


def test_printing_twice_gives_equal_text(specimen):
    for program in PROGRAMS:
        if program in ("step_jacobian", "adjoint") and not specimen.spec.channelwise:
            continue
        if program == "affine" and not scannable(specimen.spec):
            continue
        if program == "read" and specimen.spec.readout is None:
            continue
        assert print_program(specimen.spec, program) == print_program(specimen.spec, program)


def test_affine_is_the_step_from_zero_and_its_operator(specimen):
    if not scannable(specimen.spec):
        with pytest.raises(ValueError, match="linear in its state"):
            print_program(specimen.spec, "affine")
        return
    state, drives, params = specimen.inputs(2, 5)
    dynamics, u = dynamics_of(specimen, params), packed(drives, (2, 5))
    coefficients, b = dynamics.affine(u)
    torch.testing.assert_close(b, specimen.step(0 * state, drives, params), **CLOSE)
    moved = dynamics.tangent(coefficients, state) + b
    torch.testing.assert_close(moved, specimen.step(state, drives, params), **CLOSE)


def test_unknown_program_and_dialect(zoo):
    spec = zoo["gru_diag"].spec
    with pytest.raises(ValueError, match=r"'stepp'.*'step'"):
        print_program(spec, "stepp")
    with pytest.raises(ValueError, match="dialect 'c'"):
        print_program(spec, "step", "c")


def test_of_several_slots_none_is_written_in_place():
    """The last statement makes the first slot: a target for one slot would lose the other."""
    with Spec("S") as s:
        h, c = s.state("h"), s.state("c", bounds=(-1, 1))
        (u,) = s.drives("u")
        z = s.let("z", sigmoid(u + c))
        s.next(c, tanh(c + u))
        s.next(h, (1 - z) * h + z * u)
    assert "h_next = addcmul(" in s.source("step"), "a statement that could write to a target"
    assert "_out" not in s.source("step")


def test_only_one_minus_a_square_is_a_slope_of_tanh():
    """The printed text, run on exact numbers, against SymPy's value of the expression."""
    from pararnn.spec.print import DIALECTS

    x, g, b = sympy.symbols("x g b", real=True)
    at = {x: 3, g: 5, b: 7}
    known = {
        "tanh_backward": lambda g, y: g * (1 - y * y),
        "addcmul": lambda a, b, c: a + b * c,
        "addcmul_": lambda a, b, c: a + b * c,
        "lerp": lambda a, b, w: a + w * (b - a),
        "fma": lambda a, b, c: a * b + c,
        "square": lambda a: a * a,
    }
    for dialect, printer in DIALECTS.items():
        for expr in (g * (1 - x**2), g * (1 - x**3), g * x + b + x, g * x + b * x + g):
            depth = {x: 2, g: 1, b: 0}
            text = (made := printer(depth))(made.change(expr))
            values = {s.name: v for s, v in at.items()}
            assert eval(text, known, values) == expr.subs(at), (dialect, text)
    made = DIALECTS["torch"]({})
    assert "tanh_backward" in made(made.change(g * (1 - x**2)))


def test_cotangents_of_a_slot_that_nothing_reads():
    """The transposed product in every program that has it, against the dense Jacobian."""
    from pararnn import Cell, sequential_apply, solve

    with Spec("unread") as s:
        h, y = s.state("h"), s.state("y")
        (u,) = s.drives("u")
        new = s.let("new", tanh(h / 2 + u))
        s.next(h, new)
        s.next(y, new + u)
    g = np.random.default_rng(0)
    state, drive, v = g.standard_normal((2, 4)), g.standard_normal(4), g.standard_normal((2, 4))
    dense = oracle.dense_jacobian(s, state, [drive], [])
    got = oracle.vjp(s, state, [drive], [], v)
    np.testing.assert_allclose(got.reshape(-1), dense.T @ v.reshape(-1), 1e-12, 1e-12)

    class Unread(Cell):
        def __init__(self):
            super().__init__(3, spec=s, sizes={"d": 4})

    cell = Unread().double()
    x = torch.randn(2, 7, 3, dtype=torch.float64, requires_grad=True)
    (want,) = torch.autograd.grad(sequential_apply(cell, x).square().sum(), x)
    (bar,) = torch.autograd.grad(solve(cell, x, method="newton").states.square().sum(), x)
    torch.testing.assert_close(bar, want, rtol=1e-9, atol=1e-9)
