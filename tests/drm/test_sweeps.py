"""Sweeps reach the states and gradients of the loop, and say what that took."""

from __future__ import annotations

import copy
import math
import re
import sys

import mpmath
import pytest
import torch

from pararnn.drm import DRMConfig, DRMDynamics, block_states, recurrent_states, sweep_states
from pararnn.drm.iteration import sweep
from pararnn.drm.metric import Metric
from pararnn.drm.naturalize import solve_metric
from pararnn.drm.steps import Slopes, Steps

SIZES = {"d_state": 7, "d_token": 5, "hidden_size": 9, "n_directions": 4, "metric_rank": 3}
KINDS = {
    "directions": {},
    "unbounded": {"bounded_state": False},
    "direct": {"transition": "direct"},
    "two steps": {"path": "recurrent", "flow_steps": 2},
    "subspace": {"naturalization_form": "subspace"},
    "strong": {"dt": 2.0},
}


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def dynamics(**changes):
    return DRMDynamics(DRMConfig(**{**SIZES, "dt": 0.1, "state_radius": 2.0, **changes})).double()


def problem():
    """First states inside the radius and at it, and tokens."""
    z = normal(3, 7) / 3
    z[1] *= 2 / torch.linalg.vector_norm(z[1])
    return z.requires_grad_(), normal(3, 33, 5, seed=1).requires_grad_()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("window", "cap"), [(0, 0), (8, 0), (8, 3), (1, 0), (50, 33)])
def test_states_and_gradients(kind, window, cap):
    module, (z, e) = dynamics(**KINDS[kind]), problem()
    want = recurrent_states(module, z, e, 0.4).states
    found = sweep_states(module, z, e, 0.4, window=window, max_corrections=cap)
    torch.testing.assert_close(found.states, want, rtol=1e-11, atol=2e-12)
    windows = -(-33 // (window or 33))
    assert len(found.corrections) == len(found.looped) == windows
    assert max(found.corrections) <= (cap or window or 33)
    assert found.converged == (cap != 3)
    assert found.backward == []
    weight, inputs = normal(3, 33, 7, seed=2), [z, e, *module.parameters()]
    slopes = torch.autograd.grad((want * weight).sum(), inputs, allow_unused=True)
    others = torch.autograd.grad((found.states * weight).sum(), inputs, allow_unused=True)
    for a, b in zip(slopes, others, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-10, atol=1e-11)
    assert len(found.backward) == windows
    assert (-1 in found.backward) == (cap == 3)


def dense(slopes):
    """Matrices of every step, ``(B, T, d, d)``."""
    return torch.diag_embed(slopes.diagonal) - slopes.y.unsqueeze(-1) * slopes.w.unsqueeze(-2)


def test_slopes_are_the_bounds_jacobian():
    steps = Steps(dynamics(), 0.4)
    z = torch.linspace(0.1, 3.0, 12).double().reshape(3, 4, 1) * normal(3, 4, 7)
    norms = torch.linalg.vector_norm(z, dim=-1)
    assert (norms < 2).any() and (norms > 2).any()  # noqa: PT018
    found = dense(steps.slopes(z))
    for i in range(3):
        for t in range(4):
            want = torch.autograd.functional.jacobian(steps.bounded, z[i, t])
            torch.testing.assert_close(found[i, t], want)


def test_corrections_are_carried_by_slopes_and_their_transposes():
    """Exact where the diagonal is one number, which the triangular system takes it for."""
    number = torch.sigmoid(normal(3, 11, 1, seed=4)).expand(-1, -1, 7)
    slopes = Slopes(number, normal(3, 11, 7, seed=5) / 2, normal(3, 11, 7, seed=6) / 2)
    b, matrices = normal(3, 11, 7, seed=7), dense(slopes)
    forward, x = [], torch.zeros(3, 7, dtype=torch.float64)
    for t in range(11):
        x = (matrices[:, t] @ x.unsqueeze(-1)).squeeze(-1) + b[:, t]
        forward.append(x)
    torch.testing.assert_close(slopes.carried(b), torch.stack(forward, 1))
    backward, x = [b[:, 10]], b[:, 10]
    for t in range(9, -1, -1):
        x = (matrices[:, t + 1].mT @ x.unsqueeze(-1)).squeeze(-1) + b[:, t]
        backward.append(x)
    torch.testing.assert_close(slopes.adjoint().carried(b.flip(1)), torch.stack(backward, 1))


def test_states_at_the_radius_converge():
    """All are clipped, so a change along a state is lost in the next step. Sweeps that took it for
    kept need about as many corrections as there are steps."""
    module = dynamics(transition="direct", d_state=40, state_radius=1.0, dt=0.3)
    with torch.no_grad():
        module.direct.second.bias.copy_(normal(40, seed=3))
        z, e = normal(2, 40), normal(2, 64, 5, seed=1)
        z = z / torch.linalg.vector_norm(z, dim=-1, keepdim=True)
        want = recurrent_states(module, z, e, 0.4)
        before = torch.cat([z.unsqueeze(1), want.states[:, :-1]], 1)
        clipped = torch.linalg.vector_norm(before + 0.3 * want.velocity, dim=-1) > 1
        assert clipped.all()
    z = z.requires_grad_()
    found = sweep_states(module, z, e, 0.4)
    assert found.corrections[0] < 20
    found.states.square().sum().backward()
    assert found.backward[0] < 20
    torch.testing.assert_close(found.states.detach(), want.states, rtol=1e-11, atol=1e-12)


def test_states_that_nothing_looks_at():
    """Cotangents of 0 settle at once, and cotangents settle whatever their size."""
    module, (z, e) = dynamics(), problem()
    found = sweep_states(module, z, e, 0.4)
    (1e-30 * found.states[0]).sum().backward()
    assert 1 < found.backward[0] < 15
    assert z.grad[0].abs().max() > 0
    assert not z.grad[1:].any()


def test_each_correction_makes_one_more_state_exact():
    module, (z, e) = dynamics(dt=2.0), problem()
    want = recurrent_states(module, z, e, 0.4).states
    loose = {"max_corrections": 0, "tol": 1.0}
    for length in range(1, 9):
        found = sweep_states(module, z, e[:, :length], 0.4, **loose, window=1).states
        torch.testing.assert_close(found, want[:, :length], rtol=1e-12, atol=1e-13)
    found = sweep_states(module, z, e, 0.4, max_corrections=3)
    assert found.looped == (True,)
    torch.testing.assert_close(found.states, want, rtol=1e-12, atol=1e-13)


def test_the_first_correction_is_the_block_path():
    """Without a bound, and with a tolerance that ends there."""
    module, (z, e) = dynamics(bounded_state=False), problem()
    found = sweep_states(module, z, e, 0.4, tol=1e3)
    assert found.corrections == (1,)
    torch.testing.assert_close(found.states, block_states(module, z, e, 0.4).states)


@pytest.mark.parametrize("kind", ["directions", "direct", "strong"])
@pytest.mark.parametrize("window", [0, 5, 16])
@pytest.mark.parametrize("tol", [1e-4, 1e-8])
def test_error_estimate(kind, window, tol):
    module, (z, e) = dynamics(**KINDS[kind]), problem()
    with torch.no_grad():
        want = recurrent_states(module, z, e, 0.4).states
        found = sweep_states(module, z, e, 0.4, window=window, tol=tol, estimate=True)
    error = float((found.states - want).abs().max())
    # What the bound grants rounding: twice 8 roundings of the radius a step, over 33 steps.
    rounding = 2 * 8 * 33 * 2.0 * 2.0**-53
    assert error <= found.error_estimate
    assert found.error_estimate <= 2.5 * error + rounding
    assert sweep_states(module, z, e, 0.4, tol=tol).error_estimate is None


def test_the_bound_sees_growth():
    """Dynamics that spread differences a millionfold: the estimate misses it, the bound does not."""
    module = dynamics(bounded_state=False, transition="direct", metric=False,
                      naturalization_strength=0.0)  # fmt: skip
    with torch.no_grad():
        module.direct.first.weight[:, :7].mul_(6.0)
        module.direct.second.weight.mul_(6.0)
        z, e = 1e-2 * normal(2, 7), 1e-2 * normal(2, 60, 5, seed=1)
        want = recurrent_states(module, z, e, 0.0).states
        found = sweep_states(module, z, e, 0.0, window=20, tol=1e-9, estimate=True)
    error = float((found.states - want).abs().max())
    assert error <= found.error_estimate <= 2.5 * error


def test_later_tokens_and_other_rows_change_no_bit():
    module, (z, e) = dynamics(dt=0.4), problem()
    e = 1e-2 * e.detach()
    options = {"window": 16, "max_corrections": 8, "tol": 1e-7}
    whole = sweep_states(module, z, e, 0.4, **options)
    for cut, value in ((1, 1.0), (9, 1.0), (9, torch.nan), (16, 1.0), (20, torch.nan)):
        other = e.clone()
        other[:, cut:] = 20 * value * normal(3, 33 - cut, 5, seed=9)
        other[2] = 20 * value * normal(33, 5, seed=10)
        found = sweep_states(module, z, other, 0.4, **options)
        assert found.corrections != whole.corrections
        assert torch.equal(found.states[:2, :cut], whole.states[:2, :cut])


def test_nan_stays_in_its_row():
    module, (z, e) = dynamics(), problem()
    want = sweep_states(module, z, e, 0.4, window=16).states
    broken = e.detach().clone()
    broken[1, 5] = torch.nan
    for cap in (0, 12):
        found = sweep_states(module, z, broken, 0.4, window=16, max_corrections=cap)
        assert found.states[1, 5:].isnan().all()
        assert torch.equal(found.states[[0, 2]], want[[0, 2]])
        torch.testing.assert_close(found.states[1, :5], want[1, :5], rtol=1e-12, atol=1e-12)
    assert not found.converged


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("window", [0, 8, 1])
def test_what_is_not_finite_is_not_called_converged(value, window):
    """Also where every window may take as many corrections as it has tokens."""
    module, (z, e) = dynamics(), problem()
    broken = e.detach().clone()
    broken[1, 5] = value
    found = sweep_states(module, z, broken, 0.4, window=window, estimate=True)
    assert not found.states.isfinite().all()
    assert not found.converged
    assert math.isnan(found.remainder)
    assert math.isnan(found.error_estimate)
    whole = sweep_states(module, z, e, 0.4, window=window, estimate=True)
    assert whole.converged
    assert whole.remainder + whole.error_estimate < 1e-11


def test_a_correction_that_overflows_does_not_settle():
    """A first correction beyond the largest number, where the states are finite: it is not settled
    until what the step makes of the states before has replaced it."""
    step, want, calls = Steps(dynamics(bounded_state=False), 0.4), normal(1, 3, 7), []

    def reach(values):
        """The states ``want``, with an infinite second one at first."""
        calls.append(values)
        reached = want.clone()
        if len(calls) == 1:
            reached[:, 1] = torch.inf
        return reached, step.slopes(torch.zeros_like(values))

    found = sweep(reach, torch.zeros_like(want), 1e-13, 1)
    assert not found.values[:, 1:].isfinite().any()
    assert found.settled[:, 0].all()
    assert not found.settled[:, 1:].any()
    calls.clear()
    found = sweep(reach, torch.zeros_like(want), 1e-13, 3)
    assert torch.equal(found.values, want)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("when", [1, 2])
def test_a_correction_after_one_that_is_not_finite_tells_no_rate(value, when):
    """A step that had no number at a guess, in dynamics that contract slowly: not settled at once."""
    steps, (z, e), calls = Steps(dynamics(dt=0.4), 0.4), problem(), []
    with torch.no_grad():
        want = recurrent_states(steps.dynamics, z, e, 0.4).states

        def reach(values):
            calls.append(1)
            reached = steps(torch.cat([z.unsqueeze(1), values[:, :-1]], 1), e)
            slopes, reached = steps.slopes(reached), steps.bounded(reached)
            if len(calls) == when:
                reached[0, 20] = value
            return reached, slopes

        found = sweep(reach, z.unsqueeze(1).expand(-1, 33, -1), 1e-13, 33)
    assert found.settled.all()
    torch.testing.assert_close(found.values, want, rtol=0, atol=1e-11)


def loop(module, z, e, strength):
    """The recurrence in float64, step by step."""
    wide = copy.deepcopy(module).double()
    with torch.no_grad():
        return recurrent_states(wide, z.double(), e.double(), strength, measure=False).states


@pytest.mark.parametrize(
    ("radius", "start"),
    [(8.0, 1e4), (8.0, 1e12), (8.0, 1e16), (1e-3, 0.02), (1e-6, 1.0), (8.0, 1e-3), (1e20, 1e15)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_errors_are_measured_against_the_states_themselves(radius, start, dtype):
    """Also where the start is far larger, and where all of them are small."""
    module = dynamics(state_radius=radius).to(dtype)
    z, e = (start * normal(3, 7)).to(dtype), normal(3, 33, 5, seed=1).to(dtype)
    found = sweep_states(module, z, e, 0.4, estimate=True)
    want = loop(module, z, e, 0.4)
    error = (found.states - want).abs()
    relative = float((error.amax(-1) / want.abs().amax(-1).cummax(1).values).max())
    assert found.converged
    assert relative < (1e-5 if dtype == torch.float32 else 1e-12)
    rounding = 33 * torch.finfo(dtype).eps
    assert relative < 10 * found.remainder + rounding
    assert float(error.max()) <= found.error_estimate


def test_a_metric_without_a_factor():
    """Where U is so large that 1 is lost beside it: no number, not a wrong one."""
    metric = Metric(normal(2, 7).abs() + 0.1, normal(2, 7, 1, seed=1).expand(-1, -1, 3))
    v = normal(2, 1, 7, seed=2)
    for size, known in ((1e3, True), (1e30, False)):
        large = Metric(metric.diagonal, size * metric.factor)
        found = solve_metric(large, v, 0.3)
        want = solved(large, v, 0.3)
        assert want.isfinite().all()
        if known:
            torch.testing.assert_close(found, want, rtol=0, atol=1e-7)
        else:
            assert found.isnan().all()


@pytest.mark.parametrize("start", [1e16, 1e18, 1e30, 1e100])
def test_starts_whose_metric_may_have_no_factor(start, monkeypatch):
    """Every row is the recurrence, whose metric is solved with 400 digits, or the loop has no number there
    and the sweeps say so and claim nothing."""
    module = dynamics(state_radius=8.0)
    z, e = start * normal(3, 7), normal(3, 9, 5, seed=1)
    with torch.no_grad():
        found = sweep_states(module, z, e, 0.4, estimate=True)
        with monkeypatch.context() as patched:
            patched.setattr(sys.modules["pararnn.drm.naturalize"], "solve_metric", solved)
            want = loop(module, z, e, 0.4)
    assert want.isfinite().all()
    lost = found.states.isnan()
    torch.testing.assert_close(found.states[~lost], want[~lost], rtol=0, atol=1e-9)
    assert torch.equal(lost, lost[:, :1, :1].expand_as(lost))  # whole rows, from the first step
    assert found.converged != bool(lost.any())
    assert math.isnan(found.remainder) == math.isnan(found.error_estimate) == bool(lost.any())


def solved(metric, v, damping=0.0, precision="safe"):
    """``(D + U Uᵀ + λ I)⁻¹ v`` with 400 digits, one state and vector at a time."""
    d = v.shape[-1]
    parts = zip(
        metric.diagonal.reshape(-1, d), metric.factor.reshape(-1, d, metric.factor.shape[-1]),
        v.reshape(-1, v.shape[-2], d), strict=True,
    )  # fmt: skip
    found = []
    with mpmath.workdps(400):
        for diagonal, factor, vectors in parts:
            u = mpmath.matrix(factor.tolist())
            whole = u * u.T
            for i, x in enumerate(diagonal.tolist()):
                whole[i, i] += mpmath.mpf(x) + mpmath.mpf(damping)
            for x in vectors.tolist():
                found.append([float(y) for y in mpmath.lu_solve(whole, mpmath.matrix(x))])
    return torch.tensor(found, dtype=torch.float64).reshape(v.shape)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_bound_holds_or_is_infinite(seed, dtype):
    """In dynamics that spread roundings until the states have nothing to do with each other, and in
    dynamics that spread them a little."""
    module = dynamics(dt=2.0, state_radius=8.0, hidden_size=24).to(dtype)
    with torch.no_grad():
        for p in module.parameters():
            p.mul_(1.5 + seed)
    z, e = normal(2, 7, seed=seed).to(dtype), normal(2, 80, 5, seed=seed + 9).to(dtype)
    found = sweep_states(module, z, e, 0.4, window=40, estimate=True)
    error = float((found.states - loop(module, z, e, 0.4)).abs().max())
    assert error <= found.error_estimate
    assert found.error_estimate < math.inf or error > 1e-7


@pytest.mark.parametrize("kind", ["directions", "direct"])
def test_single_and_half_precision(kind):
    module, (z, e) = dynamics(**KINDS[kind]).float(), problem()
    z, e = z.detach().float().requires_grad_(), e.detach().float().requires_grad_()
    want = recurrent_states(module, z, e, 0.4).states
    found = sweep_states(module, z, e, 0.4, window=16)
    assert found.converged
    torch.testing.assert_close(found.states, want, rtol=0, atol=1e-5)
    found.states.sum().backward()
    for cast in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=cast):
            half = module if cast else dynamics(**KINDS[kind]).bfloat16()
            kind_of = torch.float32 if cast else torch.bfloat16
            found = sweep_states(half, z.to(kind_of), e.to(kind_of), 0.4, window=16)
            loop = recurrent_states(half, z.to(kind_of), e.to(kind_of), 0.4).states
        found.states.float().sum().backward()
        assert found.states.dtype == kind_of
        assert float((found.states - loop).abs().max()) < 0.05


def test_parameters_of_a_functional_call():
    """Gradients are those at the parameters that the states were computed with."""
    module, (z, e) = dynamics(), problem()
    other = {name: (1.5 * p).detach().requires_grad_() for name, p in module.named_parameters()}

    class Whole(torch.nn.Module):
        def __init__(self, path):
            super().__init__()
            self.inner, self.path = module, path

        def forward(self):
            return self.path(self.inner, z, e, 0.4).states.sum()

    def slopes(path):
        swapped = {f"inner.{name}": p for name, p in other.items()}
        value = torch.func.functional_call(Whole(path), swapped, ())
        return torch.autograd.grad(value, list(other.values()))

    for a, b in zip(slopes(recurrent_states), slopes(sweep_states), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-9, atol=1e-10)


def test_no_second_derivative():
    module, (z, e) = dynamics(), problem()
    states = sweep_states(module, z, e, 0.4).states
    with pytest.raises(RuntimeError, match="got create_graph=True"):
        torch.autograd.grad(states.sum(), z, create_graph=True)


def test_no_transform_of_torch_func():
    module, (z, e) = dynamics(), problem()
    with pytest.raises(NotImplementedError, match="sweep_states: got tensors of a"):
        torch.func.grad(lambda x: sweep_states(module, x, e, 0.4).states.sum())(z)


def test_a_report_is_short():
    module, (z, e) = dynamics(), problem()
    assert "tensor" not in repr(sweep_states(module, z, e, 0.4))


def test_empty_and_errors():
    for shape in ((2, 0), (0, 3)):
        z = normal(shape[0], 7).requires_grad_()
        found = sweep_states(dynamics(), z, normal(*shape, 5), 0.4, estimate=True)
        assert found.states.shape == (*shape, 7)
        assert found.error_estimate == 0.0
        found.states.sum().backward()
        assert not z.grad.any()
    with pytest.raises(ValueError, match="geometry_interval: got 2"):
        sweep_states(dynamics(geometry_interval=2), normal(2, 7), normal(2, 3, 5), 0.4)
    with pytest.raises(ValueError, match="truncation: got 2"):
        sweep_states(dynamics(truncation=2), normal(2, 7), normal(2, 3, 5), 0.4)
    with pytest.raises(ValueError, match="dropout: got"):
        sweep_states(dynamics(dropout=0.2), normal(2, 7), normal(2, 3, 5), 0.4)


def test_the_reason_says_what_to_change():
    """None; windows that need more corrections; states that are lost to a metric without a factor."""
    config = DRMConfig(d_state=10, d_token=4, hidden_size=12, n_directions=5, metric_rank=3)
    e = normal(2, 12, 4, seed=3)

    def swept(z, max_corrections=0, **changes):
        dynamics = DRMDynamics(config.changed(**changes)).double()
        with torch.no_grad():
            return sweep_states(dynamics, z, e, 0.5, window=6, max_corrections=max_corrections)

    z = normal(2, 10)
    assert swept(z).reason is None
    few = swept(z, 1)
    assert not few.converged
    assert re.match(
        r"2 of 2 windows had not settled after 1 corrections .* raise parallel_", few.reason
    )
    lost = swept(1e25 * z, bounded_state=False, naturalization_form="orthonormal")
    assert not lost.converged
    assert (
        "not finite from token 0 on, the largest entry before being that of the start"
        in lost.reason
    )
    assert "metric without a factor in its precision; bound the state" in lost.reason
    with torch.no_grad():
        e[1, 7] = torch.nan
    assert re.search(
        r"not finite from token 7 on, the largest entry before being \d", swept(z).reason
    )
