"""A certificate is a proof: what it claims must hold, for good states, bad ones and cruel nets."""

from __future__ import annotations

import math

import pytest
import torch

from pararnn import (
    Cell,
    DeltaMinGRU,
    GivensMinGRU,
    NewtonConfig,
    ParaGRU,
    ParaM2RNN,
    RotationMinGRU,
    SignedMinGRU,
    Spec,
    sigmoid,
    solve,
    tanh,
)
from pararnn.solvers.certificate import certify
from pararnn.solvers.methods.sequential import sequential_states
from pararnn.solvers.problem import prepare

CELLS = {
    "diag": lambda: ParaGRU(2, 4, max_recurrent_norm=None),
    "head": lambda: ParaGRU(2, 4, mix="head", n_heads=2),
    "matrix": lambda: ParaM2RNN(2, 2, 3),
}


def build(make, gain, length=24, batch=2):
    torch.manual_seed(0)
    cell = make().double()
    with torch.no_grad():
        for name in ("A_z", "A_r", "A_n", "W"):
            if hasattr(cell, name):
                getattr(cell, name).mul_(gain)
    return cell, torch.randn(batch, length, 2, dtype=torch.float64)


@pytest.mark.parametrize("make", CELLS.values(), ids=CELLS)
@pytest.mark.parametrize("gain", [1.0, 3.0, 8.0])
@pytest.mark.parametrize("where", ["inside", "outside", "resets"])
def test_claims_hold(make, gain, where):
    """States are spoilt by noise of every size; whenever a bound is given, it is one."""
    cell, x = build(make, gain)
    h0 = (
        2.5 * torch.randn(2, *cell.state_shape, dtype=torch.float64) if where == "outside" else None
    )
    resets = torch.rand(2, 24) < 0.15 if where == "resets" else None
    task = prepare(cell, x, h0, resets)
    with torch.no_grad():
        truth = sequential_states(task)
    g = torch.Generator().manual_seed(1)
    proven = 0
    for size in (0.0, 1e-11, 1e-7, 1e-4, 1e-2):
        noise = torch.randn(truth.shape, generator=g, dtype=torch.float64).clamp(-1, 1)
        for spoilt in (truth + size * noise, truth + size * (noise > 0.9)):
            proof = certify(task, spoilt)
            error = float((spoilt - truth).abs().max())
            if math.isfinite(proof.error_bound):
                proven += 1
                assert error <= proof.error_bound * (1 + 1e-9) + 1e-13 * proof.amplification
                assert proof.error_bound <= 2 * proof.correction
                assert proof.reason == ""
            else:
                assert proof.reason
    if gain <= 1:
        assert proven >= 4, "a calm net must have proofs for small errors"


def test_the_bound_is_of_the_size_of_the_error():
    cell, x = build(CELLS["diag"], 1.0)
    task = prepare(cell, x, None, None)
    with torch.no_grad():
        truth = sequential_states(task)
    for size in (1e-10, 1e-7, 1e-5):
        bound = certify(task, truth + size).error_bound
        assert size <= bound <= 10 * size


def test_amplification_bounds_the_inverse(zoo):
    """κ ≥ ‖(DF)⁻¹‖∞, from the dense block-bidiagonal matrix."""
    for name in ("gru_diag", "gru_head", "lstm", "matrix"):
        specimen = zoo[name]
        torch.manual_seed(0)
        cell = Cell(2, spec=specimen.spec, sizes=specimen.sizes).double()
        x = torch.randn(1, 21, 2, dtype=torch.float64)
        resets = torch.zeros(1, 21, dtype=torch.bool)
        resets[0, 9] = True
        for mask in (None, resets):
            task = prepare(cell, x, None, mask)
            with torch.no_grad():
                states = sequential_states(task)
            n = states[0, 0].numel()
            whole = torch.eye(21 * n, dtype=torch.float64)
            for t in range(1, 21):
                if mask is not None and mask[0, t]:
                    continue
                jac = torch.autograd.functional.jacobian(
                    lambda h, t=t, cell=cell, x=x: cell.step(h, x[:, t]), states[:, t - 1]
                ).reshape(n, n)
                whole[t * n : (t + 1) * n, (t - 1) * n : t * n] = -jac
            norm = float(torch.linalg.inv(whole).abs().sum(1).max())
            kappa = certify(task, states).amplification
            assert norm <= kappa * (1 + 1e-9)
            assert kappa <= 50 * norm


def test_never_for_wrong_states():
    """A chaotic net with states from another start: no proof may survive."""
    cell, x = build(CELLS["head"], 6.0)
    task = prepare(cell, x, None, None)
    with torch.no_grad():
        truth = sequential_states(task)
        other = sequential_states(prepare(cell, x, torch.ones(2, 4, dtype=torch.float64), None))
    assert float((truth - other).abs().max()) > 0.1
    bound = certify(task, other).error_bound
    assert bound >= float((truth - other).abs().max())


@pytest.mark.parametrize("bounds", [(0, 1), (-1, 0), (0.2, 1)])
def test_boxes_that_touch_or_avoid_zero(bounds):
    lo, hi = bounds
    with Spec("S") as s:
        h = s.state("h", bounds=bounds)
        (u,) = s.drives("u")
        A = s.map("A", structure="diagonal")
        s.next(h, lo + (hi - lo) * sigmoid(A(h) + u))
    torch.manual_seed(0)
    cell = Cell(2, 3, spec=s).double()
    x = torch.randn(2, 30, 2, dtype=torch.float64)
    found = solve(cell, x, NewtonConfig(chunk_length=5, certify=True), method="shooting")
    task = prepare(cell, x, None, None)
    with torch.no_grad():
        truth = sequential_states(task)
    assert 0 < found.error_bound < 1e-11
    for size in (1e-9, 1e-5, 1e-3):
        proof = certify(task, truth + size)
        assert proof.error_bound >= size
        assert math.isfinite(proof.error_bound)


def test_no_false_proof_with_a_drive_inside_a_map():
    """M must not vanish: the curvature is there even if the operand has no bounds."""
    with Spec("S") as s:
        h = s.state("h", bounds=(-1, 1))
        (u,) = s.drives("u")
        A = s.map("A", structure="dense")
        s.next(h, tanh(A(h + u)) ** 3)
    torch.manual_seed(0)
    cell = Cell(2, 3, spec=s).double()
    with torch.no_grad():
        cell.A.mul_(3)
    x = torch.randn(2, 30, 2, dtype=torch.float64)
    proof = certify(prepare(cell, x, None, None), solve(cell, x).states)
    assert proof.curvature != 0


def test_two_matrix_slots_do_not_crash(zoo):
    specimen = zoo["matrix_two"]
    torch.manual_seed(0)
    cell = Cell(2, spec=specimen.spec, sizes=specimen.sizes).double()
    x = torch.randn(2, 12, 2, dtype=torch.float64)
    s = solve(cell, x, NewtonConfig(certify=True))
    assert s.error_bound is not None
    assert s.error_bound > 0


def test_states_that_are_not_finite():
    cell, x = build(CELLS["diag"], 1.0)
    states = solve(cell, x).states.detach().clone()
    for bad in (math.nan, math.inf):
        states[0, 3, 0] = bad
        proof = certify(prepare(cell, x, None, None), states)
        assert proof.error_bound == math.inf
        assert "finite" in proof.reason


def test_empty_sequences():
    cell = CELLS["diag"]().double()
    for batch, length in ((0, 5), (2, 0)):
        x = torch.randn(batch, length, 2, dtype=torch.float64)
        assert solve(cell, x, NewtonConfig(certify=True)).error_bound == 0


def test_float32_states_are_covered():
    torch.manual_seed(0)
    cell = ParaGRU(2, 4)
    x = torch.randn(2, 50, 2)
    s = solve(cell, x, NewtonConfig(certify=True), method="newton")
    wide = ParaGRU(2, 4).double()
    wide.load_state_dict(cell.state_dict())
    drives = cell.drives(x).double().detach()
    with torch.no_grad():
        truth = solve(wide, None, drives=drives, method="sequential").states
    error = float((s.states.double() - truth).abs().max())
    assert 0 < error <= s.error_bound < 1e-5


LINEAR = {
    "signed": lambda: SignedMinGRU(2, 4),
    "decay": lambda: SignedMinGRU(2, 4, decay="learnable"),
    "rotation": lambda: RotationMinGRU(2, 6, snap=None),
    "givens": lambda: GivensMinGRU(2, 8, block_size=4),
    "delta": lambda: DeltaMinGRU(2, 6, n_heads=2, nh=2),
}


@pytest.mark.parametrize("make", LINEAR.values(), ids=LINEAR)
def test_what_is_linear_needs_no_bounds(make):
    """The curvature is 0, so states however wrong are certified, and κ bounds the dense inverse."""
    torch.manual_seed(0)
    cell = make().double()
    x = 2 * torch.randn(1, 75, 2, dtype=torch.float64)
    dt = torch.rand(1, 75, dtype=torch.float64) if cell.spec.gap is not None else None
    resets = torch.zeros(1, 75, dtype=torch.bool)
    resets[0, 6] = True
    task = prepare(cell, x, None, resets, dt=dt)
    with torch.no_grad():
        truth = sequential_states(task)
    noise = torch.randn(truth.shape, dtype=torch.float64)
    for size in (0.0, 1e-7, 10.0):
        spoilt = truth + size * noise
        proof = certify(task, spoilt)
        error = float((spoilt - truth).abs().max())
        assert proof.curvature == 0.0
        assert proof.reason == ""
        # The correction of a linear recurrence is the error.
        assert error <= proof.error_bound <= error * (1 + 1e-9) + 1e-10
    n = truth[0, 0].numel()
    zero = torch.zeros(1, *cell.state_shape, dtype=torch.float64)

    def step(t, h):
        gaps = None if dt is None else dt[:, t]
        return cell.step(h.view_as(zero), x[:, t], dt=gaps).flatten()

    inverse = torch.zeros(n, 0, dtype=torch.float64)  # Σ_i |J_t ⋯ J_{i+1}|, column by column
    kappa = 0.0
    for t in range(75):
        jacobian = torch.autograd.functional.jacobian(lambda h, t=t: step(t, h), zero.flatten())
        jacobian = torch.zeros_like(jacobian) if resets[0, t] else jacobian
        inverse = torch.cat([jacobian @ inverse, torch.eye(n, dtype=torch.float64)], 1)
        kappa = max(kappa, float(inverse.abs().sum(1).max()))
    assert kappa * (1 - 1e-9) <= proof.amplification <= 5 * kappa


def test_kappa_needs_no_bounds_of_slots():
    """A Spec that is not linear and declares no box has κ, and no proof."""
    with Spec("Boundless") as s:
        h = s.state("h")
        (u,) = s.drives("u")
        (w,) = s.params("w")
        s.next(h, h + tanh(w * h) + u)
    torch.manual_seed(0)
    cell = Cell(2, 3, spec=s).double()
    task = prepare(cell, torch.randn(2, 20, 2, dtype=torch.float64), None, None)
    proof = certify(task, sequential_states(task).detach())
    assert proof.amplification == pytest.approx(20, rel=1e-12)  # w = 0: a plain sum
    assert math.isinf(proof.error_bound)
    assert "declares no bounds" in proof.reason
