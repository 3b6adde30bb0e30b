"""A certified error covers the rounding of whatever was evaluated, at any magnitude.

The oracle is the recurrence of the stored drives and parameters in 300 digits of mpmath.
"""

from __future__ import annotations

import importlib.util
import math
import random
import types
from pathlib import Path

import mpmath
import numpy as np
import pytest
import torch

from pararnn import (
    Cell,
    DeltaMinGRU,
    GivensMinGRU,
    MinGRU,
    MinLSTM,
    NewtonConfig,
    ParaCfC,
    ParaGRU,
    ParaLSTM,
    ParaM2RNN,
    ParaNLRU,
    ParaSLSTM,
    RotationMinGRU,
    SignedMinGRU,
    Spec,
    SpecError,
    solve,
    tanh,
)
from pararnn.scan.algebra import Right
from pararnn.solvers import certificate, enclosure
from pararnn.solvers.certificate import certify
from pararnn.solvers.methods.sequential import sequential_states
from pararnn.solvers.problem import prepare
from pararnn.spec import oracle, snap

DIGITS = 300

_spec = importlib.util.spec_from_file_location(
    "random_specs", Path(__file__).with_name("test_random_specs.py")
)
random_specs = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(random_specs)


def true_error(problem, states):
    """Largest ``|h_t − true h_t|``, of the drives and parameters as they are stored."""
    problem = problem.in_float64()
    spec, u = problem.spec, problem.inputs
    shapes = spec.drive_shapes(problem.recurrence.sizes)
    params = tuple(p.numpy() for p in problem.params)
    worst = mpmath.mpf(0)
    with mpmath.workdps(DIGITS):
        for b in range(u.shape[0]):
            h = problem.h0[b].numpy()
            for t in range(u.shape[1]):
                if problem.resets is not None and problem.resets[b, t]:
                    h = np.zeros(problem.h0[b].shape)
                parts = u[b, t].split([math.prod(s) for s in shapes])
                now = [p.reshape(s).numpy() for p, s in zip(parts, shapes, strict=True)]
                h = oracle.step(spec, h, now, params, "mpmath")
                h = np.broadcast_to(h, states[b, t].shape)
                pairs = zip(h.reshape(-1), states[b, t].double().reshape(-1).tolist(), strict=True)
                worst = max([worst, *(abs(x - mpmath.mpf(y)) for x, y in pairs)])
    return worst


def checked(problem, states):
    """The certificate, which must hold, or say why there is none."""
    proof = certify(problem, states)
    if math.isinf(proof.error_bound):
        assert proof.reason
    else:
        assert proof.reason == ""
        error = true_error(problem, states)
        assert error <= mpmath.mpf(proof.error_bound), (
            f"error {mpmath.nstr(error, 6)}, bound {proof.error_bound}"
        )
    return proof


def loop(problem):
    with torch.no_grad():
        return sequential_states(problem)


# -- what was found below the true error --------------------------------------------------------


def test_products_that_cancel():
    """u·p − q with |u| = 1e4: states near 0 are made of numbers that are not."""
    with Spec("Cancels") as s:
        h = s.state("h", bounds=(-1, 1))
        (u,) = s.drives("u")
        p, q = s.params("p q")
        w = s.map("w", structure="diagonal")
        s.next(h, tanh(u * p - q + w(h)))
    torch.manual_seed(0)
    cell = Cell(2, 4, spec=s).double()
    with torch.no_grad():
        cell.p.copy_(torch.rand(4) + 0.5)
        cell.q.copy_(1e4 * cell.p)
        cell.w.copy_(torch.full((4,), 0.9))
    drives = (1e4 + 0.1 * torch.randn(2, 30, 4)).double()
    problem = prepare(cell, None, None, None, drives=drives)
    proof = checked(problem, loop(problem))
    assert proof.error_bound < 1e-9


def test_a_start_that_cancels():
    """One large weight in ParaGRU, and a first step from h0 that cancels in the candidate."""
    torch.manual_seed(0)
    cell = ParaGRU(2, 3, max_recurrent_norm=None).double()
    with torch.no_grad():
        for name in ("A_z", "A_r", "A_n"):
            getattr(cell, name).mul_(0.3)
        cell.A_n[0] = 1e4
    h0 = torch.rand(2, 3, dtype=torch.float64) + 0.1
    drives = torch.randn(2, 1, 9, dtype=torch.float64)
    # r·a·h0 + u_n: its last digits are what is left
    gate = torch.sigmoid(cell.A_r * h0 + drives[:, 0, 3:6])
    drives[:, 0, 6:] = -(cell.A_n * gate * h0) + 0.1
    drives[:, 0, :3] = 40.0  # the update gate is open: what is left is the state
    problem = prepare(cell, None, h0, None, drives=drives.detach())
    proof = checked(problem, loop(problem))
    assert 1e-14 < proof.error_bound < 1e-8


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_large_start_that_cancels(dtype):
    torch.manual_seed(0)
    cell = SignedMinGRU(2, 4).to(dtype)
    h0 = 1e12 * torch.randn(2, 4, dtype=dtype)
    drives = torch.randn(2, 12, cell.in_proj.out_features, dtype=dtype)
    names = [d.name for d in cell.spec.drive_list]
    first = loop(prepare(cell, None, h0, None, drives=drives))[:, 0]
    # Let the candidate's drive cancel what the first step keeps of h0.
    for i in range(len(names)):
        other = drives.clone()
        other[:, 0, 4 * i : 4 * i + 4] -= first
        problem = prepare(cell, None, h0, None, drives=other)
        proof = checked(problem, loop(problem))
        assert math.isfinite(proof.error_bound)


@pytest.mark.parametrize(
    "make", [lambda: SignedMinGRU(2, 4), lambda: GivensMinGRU(2, 4, block_size=4)]
)
@pytest.mark.parametrize("count", [0, 1, 2])
def test_pinned_linear_solves(make, count):
    """The bound of a linear recurrence is its error; it may not be an ulp less."""
    for seed in range(4):
        torch.manual_seed(seed)
        cell = make().double()
        drives = torch.randn(2, 20, cell.in_proj.out_features, dtype=torch.float64)
        config = NewtonConfig(max_iters=count, chunk_length=4, on_divergence="ignore")
        states = solve(cell, None, config, method="shooting", drives=drives).states.detach()
        proof = checked(prepare(cell, None, None, None, drives=drives), states)
        assert math.isfinite(proof.error_bound)


# -- any cell, own Specs made at random, any magnitude ------------------------------------------

CELLS = {
    "gru_diag": lambda: ParaGRU(2, 3, max_recurrent_norm=None),
    "gru_head": lambda: ParaGRU(2, 4, mix="head", n_heads=2),
    "lstm": lambda: ParaLSTM(2, 3),
    "m2rnn": lambda: ParaM2RNN(2, 2, 3),
    "slstm": lambda: ParaSLSTM(2, 3),
    "nlru": lambda: ParaNLRU(2, 3),
    "cfc": lambda: ParaCfC(2, 3),
    "mingru": lambda: MinGRU(2, 3),
    "minlstm": lambda: MinLSTM(2, 3),
    "signed": lambda: SignedMinGRU(2, 3),
    "rotation": lambda: RotationMinGRU(2, 4, snap=None),
    "snapped": lambda: RotationMinGRU(2, 4),
    "givens": lambda: GivensMinGRU(2, 4, block_size=4),
    "delta": lambda: DeltaMinGRU(2, 4, n_heads=2, nh=2),
}
PROVABLE = {"nlru", "lstm", "gru_diag", "gru_head", "m2rnn", "cfc", "mingru", "minlstm", "signed",
            "rotation", "snapped", "givens", "delta"}  # fmt: skip


def magnitude(r):
    """Mostly 1, else up to 1e±30."""
    return 10.0 ** r.choice((0, 0, 0, 0, r.uniform(-2, 2), r.uniform(-8, 8), r.uniform(-30, 30)))


def drawn(cell, r, length):
    """A problem of random drives, start and resets, and a way to spoil its states."""
    dtype = r.choice((torch.float32, torch.float64))
    cell = cell.to(dtype)
    with torch.no_grad():
        for p in cell.parameters():
            p.mul_(magnitude(r))
            if r.random() < 0.3:
                p.view(-1)[r.randrange(p.numel())] *= magnitude(r)
    width = cell.in_proj.out_features
    drives = magnitude(r) * torch.randn(2, length, width, dtype=dtype)
    if r.random() < 0.4:
        drives[..., r.randrange(width)] *= magnitude(r)
    h0 = None
    if r.random() < 0.7:
        h0 = magnitude(r) * torch.randn(2, *cell.state_shape, dtype=dtype)
        if r.random() < 0.4:  # drives of the size of the start, so that some first steps cancel
            drives[:, 0] = r.choice((-1, 1)) * h0.flatten(1)[:, torch.arange(width) % h0[0].numel()]
    resets = torch.rand(2, length) < 0.2 if r.random() < 0.4 else None
    timed = {}
    if cell.spec.gap is not None:
        timed["dt"] = magnitude(r) * torch.rand(2, length, dtype=dtype)
    return prepare(cell, None, h0, resets, drives=drives, **timed)


def spoilt(problem, r):
    states = loop(problem)
    kind = r.choice(("loop", "loop", "noise", "pinned"))
    if kind == "noise":
        size = 10.0 ** r.uniform(-14, 2) * max(1e-300, float(states.abs().max()))
        states = states + size * torch.randn_like(states)
    if kind == "pinned":
        config = NewtonConfig(max_iters=r.choice((0, 1, 2)), on_divergence="ignore")
        timed = {} if problem.dt is None else {"dt": problem.dt}
        found = solve(problem.recurrence.cell, None, config, method="newton", drives=problem.u, h0=problem.start,
                      resets=problem.resets, **timed)  # fmt: skip
        states = found.states.detach()
    return states.to(problem.dtype)


SEEDS = [pytest.param(i, marks=pytest.mark.slow) if i >= 4 else i for i in range(40)]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", CELLS)
def test_cells(name, seed):
    r = random.Random(f"{name} {seed}")
    torch.manual_seed(seed)
    try:
        problem = drawn(CELLS[name](), r, r.choice((1, 3, 18, 19)))
    except ValueError as e:
        pytest.skip(f"refused: {e}")
    checked(problem, spoilt(problem, r))


@pytest.mark.parametrize("seed", [pytest.param(i, marks=pytest.mark.slow) if i >= 16 else i for i in range(200)])  # fmt: skip
def test_random_specs(seed):
    r = random.Random(seed)
    try:
        problem = drawn(random_specs.build(seed, seed % 2 == 1), r, r.choice((1, 4, 9, 17)))
    except (SpecError, ValueError) as e:
        pytest.skip(f"refused: {e}")
    checked(problem, spoilt(problem, r))


@pytest.mark.parametrize("name", sorted(PROVABLE))
def test_tame_loops_are_proven(name):
    """Rounding bounds are worth little if they are never small."""
    torch.manual_seed(0)
    for dtype, limit in ((torch.float64, 1e-12), (torch.float32, 1e-4)):
        cell = CELLS[name]().to(dtype)
        drives = torch.randn(2, 40, cell.in_proj.out_features, dtype=dtype)
        timed = {} if cell.spec.gap is None else {"dt": torch.rand(2, 40, dtype=dtype)}
        problem = prepare(cell, None, None, None, drives=drives, **timed)
        states = loop(problem)
        proof = checked(problem, states)
        if name == "givens":
            # Nothing is forgotten: κ is at most T √4. One step is 3 rounds, each 8 ulps of a sine and 3
            # roundings, of absolute values that a round makes √2 times as large.
            assert proof.amplification <= 80 * (1 + 1e-6)
            one = 3 * (8 + 3) * 2**1.5 * torch.finfo(torch.float64).eps
            limit = max(limit, 80 * one * float(states.abs().max()))
        assert proof.error_bound < limit


def test_the_state_inside_of_snap():
    """Its derivative is 1 by declaration, and the function jumps: nothing is proven."""
    with Spec("Jumps") as s:
        h = s.state("h", bounds=(-1, 1))
        (u,) = s.drives("u")
        s.next(h, snap(h / 2 + u, 64))
    cell = Cell(2, 3, spec=s).double()
    problem = prepare(cell, None, None, None, drives=torch.zeros(1, 4, 3, dtype=torch.float64))
    assert "snap" in certify(problem, loop(problem)).reason


def test_bounds_that_are_false():
    """Declared bounds are no premise: states outside of them are certified all the same."""

    def grows():
        with Spec("Grows") as s:
            h = s.state("h", bounds=(-0.1, 0.1))
            (u,) = s.drives("u")
            s.next(h, 1.5 * tanh(h) + u)
        return s

    with pytest.warns(Warning, match="got bounds"):
        s = grows()
    cell = Cell(2, 3, spec=s).double()
    torch.manual_seed(0)
    problem = prepare(cell, None, None, None, drives=torch.randn(2, 9, 3, dtype=torch.float64) + 2)
    states = loop(problem)
    assert float(states.abs().max()) > 1
    assert math.isfinite(checked(problem, states).error_bound)
    assert math.isfinite(checked(problem, states + 1e-6).error_bound)


def test_drives_that_are_not_finite():
    cell = CELLS["signed"]().double()
    for bad in (math.nan, math.inf):
        drives = torch.zeros(1, 5, cell.in_proj.out_features, dtype=torch.float64)
        drives[0, 2, 3] = bad
        problem = prepare(cell, None, None, None, drives=drives)
        proof = certify(problem, torch.zeros(1, 5, 3, dtype=torch.float64))
        assert math.isinf(proof.error_bound)
        assert proof.reason


# -- the parts -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CELLS)
def test_operators_are_the_jacobians(name):
    """The enclosure of the Jacobians holds what the solver forms, and is not much wider."""
    torch.manual_seed(0)
    cell = CELLS[name]().double()
    width = cell.in_proj.out_features + (cell.spec.gap is not None)
    u = torch.rand(1, 3, width, dtype=torch.float64)
    h = 0.5 * torch.randn(1, 3, *cell.state_shape, dtype=torch.float64)
    timed = {} if cell.spec.gap is None else {"dt": torch.rand(1, 3, dtype=torch.float64)}
    drives = u[..., : cell.in_proj.out_features]
    dynamics = prepare(cell, None, None, None, drives=drives, **timed).recurrence
    with torch.no_grad():
        ball, op = enclosure.jacobian(dynamics, h, u), dynamics.operator_at(h, u, "exact")
        assert ball.value.shape == op.shape == ball.radius.shape
        assert bool(((ball.value - op).abs() <= 2 * ball.radius).all())
        assert float(ball.radius.max()) < 1e-9


@pytest.mark.parametrize("name", sorted(enclosure.BALLS))
def test_functions_enclose(name):
    """Every elementwise function, on points from 1e-300 to 1e300 that may be off."""
    if name in ("head", "dense", "right", "contract", "ratio", "zero", "positive_slope"):
        pytest.skip("not elementwise, or tested with its cell")
    r, act = random.Random(name), enclosure.BALLS[name]
    exact = oracle.BACKENDS["mpmath"][name]
    two = name in ("maximum", "diagonal", "snap", "snap_angle")
    positive = name in ("log", "sqrt")
    for _ in range(300):
        points = []
        for _ in range(1 + two):
            x = r.choice((-1, 1)) * 10.0 ** r.uniform(*r.choice(((-300, 300), (-3, 3), (-1, 1))))
            x = abs(x) if positive else max(x, -0.99) if name == "log1p" else x
            x = math.copysign(min(abs(x), 700.0), x) if name in ("exp", "expm1") else x
            x = (
                math.copysign(min(abs(x), 1e40), x)
                if name in ("sin", "cos", "snap", "snap_angle")
                else x
            )
            points.append((x, abs(x) * r.choice((0.0, 1e-16, 1e-9, 1e-3))))
        balls = [
            enclosure.Ball(*(torch.tensor([v], dtype=torch.float64) for v in p)) for p in points
        ]
        image = act(*balls)
        with mpmath.workdps(700):
            for side in (-1, 0, 1):
                at = [np.array([mpmath.mpf(x) + side * mpmath.mpf(d)], object) for x, d in points]
                gap = abs(exact(*at)[0] - mpmath.mpf(float(image.value)))
                radius = float(torch.as_tensor(image.radius))
                assert math.isnan(radius) or gap <= mpmath.mpf(radius), (points, side)


@pytest.mark.parametrize("fault", ["constant", "start", "products"])
def test_faults_are_found(fault, monkeypatch):
    """A constant instead of a running bound, a start or products that are left out: each is seen by
    the cases above."""
    constant = 32 * 2.0**-52
    if fault == "constant":
        real = enclosure.step

        def step(dynamics, h, u):
            ball = real(dynamics, h, u)
            size = constant * max(1.0, float(ball.value.abs().max()))
            return enclosure.Ball(ball.value, torch.full_like(ball.value, size))

        monkeypatch.setattr(certificate.enclosure, "step", step)
        cases = [test_products_that_cancel, test_a_start_that_cancels]
    elif fault == "start":
        real = enclosure.step

        def step(dynamics, h, u):
            later = torch.cat([torch.zeros_like(h[:, :1]), h[:, 1:]], 1)
            return enclosure.Ball(real(dynamics, h, u).value, real(dynamics, later, u).radius)

        monkeypatch.setattr(certificate.enclosure, "step", step)
        cases = [test_a_start_that_cancels]
    else:
        real_mul = enclosure.Ball.__mul__

        def product(self, other):
            ball = real_mul(self, other)
            return enclosure.Ball(ball.value, torch.zeros_like(ball.value))

        monkeypatch.setattr(enclosure.Ball, "__mul__", product)
        cases = [test_a_start_that_cancels]
    for case in cases:
        with pytest.raises(AssertionError, match="bound"):
            case()


def test_whole_turns_are_enclosed():
    """At half turns, between multiples and far out, for whole orders; certain ones stay narrow."""
    exact = oracle.BACKENDS["mpmath"]["snap_angle"]
    r = random.Random(0)
    for _ in range(400):
        m = r.randrange(1, 65)
        x = (r.randrange(-200, 200) + r.choice((0.0, 0.5, r.uniform(-0.5, 0.5)))) * 2 * math.pi / m
        x *= r.choice((1.0, 1.0, 1e10, 1e18))
        image = enclosure.BALLS["snap_angle"](
            *(enclosure.Ball(torch.tensor([float(v)], dtype=torch.float64)) for v in (x, m))
        )
        radius = float(torch.as_tensor(image.radius))
        with mpmath.workdps(100):
            at = [np.array([mpmath.mpf(v)], object) for v in (x, m)]
            gap = abs(exact(*at)[0] - mpmath.mpf(float(image.value)))
        assert gap <= mpmath.mpf(radius), (x, m)
        position = x * m / (2 * math.pi)
        if abs(x) < 1e4 and abs(position - round(position)) < 0.49:
            assert radius < 1e-13


def test_bounds_of_rows_that_grow_by_matrices_of_their_own():
    """The first row doubles with every step, the second is forgotten."""
    op = torch.stack([2 * torch.eye(2), torch.zeros(2, 2)]).double().expand(1, 6, 2, 2, 2)
    forcing = torch.zeros(1, 1, 6, 2, 2, dtype=torch.float64)
    forcing[..., 0, 1] = 1
    (bound,) = certificate._euclidean(Right(by_row=True), op, forcing).flatten().tolist()
    assert 2**6 - 1 <= bound <= 1.5 * 2**6, "at most √2 of it for vectors of two numbers"


def test_a_number_as_a_state_is_where_the_states_are():
    """On any device; the one without numbers is everywhere."""
    one_slot = types.SimpleNamespace(several=False)
    found = enclosure._joined(one_slot, (0.5,), torch.zeros(2, 3, device="meta"))
    assert found.value.device.type == found.radius.device.type == "meta"
