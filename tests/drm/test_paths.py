"""Both paths against loops written from the notes, and what each claims."""

from __future__ import annotations

import pytest
import torch

from pararnn import solve
from pararnn.drm import (
    DRMConfig,
    DRMDynamics,
    block_states,
    bound_state,
    recurrent_states,
)

SIZES = {
    "d_state": 7,
    "d_token": 5,
    "hidden_size": 9,
    "n_directions": 4,
    "metric_rank": 3,
    "dt": 0.7,
    "state_radius": 2.0,
}
KINDS = {
    "directions": {},
    "bases": {"direction_basis": 3, "metric_basis": 2},
    "subspace": {"naturalization_form": "subspace"},
    "no metric": {"metric": False, "naturalization_strength": 0.0},
    "direct": {"transition": "direct"},
    "unbounded": {"bounded_state": False},
    "risk": {"risk": "enabled"},
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def dynamics(**changes):
    return DRMDynamics(DRMConfig(**{**SIZES, **changes})).double()


def bnd(z, radius):
    if radius is None:
        return z
    norm = max(float(z.detach().square().sum()) ** 0.5, 1e-8)
    return radius * torch.tanh(z * min(1.0, radius / norm) / radius)


def velocity(module, at, z, e, s):
    """Applied velocity of one state and token, densely; geometry at ``at``."""
    c = module.config
    g = None if module.metric is None else module.metric(at).dense()
    eye = torch.eye(c.d_state, dtype=torch.float64)
    if module.direct is not None:
        raw = module.direct(z, e[None])[0]
    else:
        field = module.direction(at)
        kappa = field.gates * module.flow(z, e[None])[0]
        raw = sum(k * v for k, v in zip(kappa, field.vectors, strict=True))
        if c.naturalization_form == "subspace":
            rows = field.vectors
            gram = rows @ g @ rows.T + c.naturalization_damping * torch.eye(4, dtype=torch.float64)
            return (1 - s) * raw + s * rows.T @ torch.linalg.solve(gram, kappa)
    if g is None:
        return raw
    return (1 - s) * raw + s * torch.linalg.solve(g + c.naturalization_damping * eye, raw)


@every_kind
def test_recurrent(kind):
    module, z, e = dynamics(**KINDS[kind]), normal(2, 7), normal(2, 6, 5, seed=1)
    found = recurrent_states(module, z, e, 0.4)
    for i in range(2):
        state = z[i]
        for t in range(6):
            v = velocity(module, state, state, e[i, t], 0.4)
            before, state = state, bnd(state + 0.7 * v, module.radius)
            torch.testing.assert_close(found.states[i, t], state)
            torch.testing.assert_close(found.velocity[i, t], v)
            torch.testing.assert_close(found.increments[i, t], state - before)
    assert found.counts == (1,) * 6


@every_kind
@pytest.mark.parametrize("increments", [False, True])
def test_block(kind, increments):
    module = dynamics(**KINDS[kind], bound_increments=increments)
    z, e = normal(2, 7), normal(2, 6, 5, seed=1)
    found = block_states(module, z, e, 0.4)
    for i in range(2):
        total = torch.zeros(7, dtype=torch.float64)
        for t in range(6):
            delta = 0.7 * velocity(module, z[i], z[i], e[i, t], 0.4)
            if increments:
                delta = bnd(z[i] + delta, module.radius) - z[i]
            total = total + delta
            torch.testing.assert_close(found.states[i, t], bnd(z[i] + total, module.radius))
            torch.testing.assert_close(found.increments[i, t], delta)
            torch.testing.assert_close(found.velocity[i, t], delta / 0.7)
    assert found.counts == (6,)


@every_kind
def test_blocks_of_one_token_are_the_recurrence(kind):
    """Bit for bit, in float32."""
    module = dynamics(**KINDS[kind]).float()
    z, e = normal(3, 7).float(), normal(3, 11, 5, seed=1).float()
    want = recurrent_states(module, z, e, 0.4).states
    for t in range(11):
        z = block_states(module, z, e[:, t : t + 1], 0.4).states[:, -1]
        assert torch.equal(z, want[:, t])


def test_step_is_the_recurrence():
    module = dynamics(path="recurrent", flow_steps=2)
    z, e = normal(3, 7), normal(3, 5, 5, seed=1)
    want = recurrent_states(module, z, e, 0.5)
    for t in range(5):
        z = module.step(z, e[:, t])
        assert torch.equal(z, want.states[:, t])
    assert want.counts == (0, 1) * 5


def test_solved_in_parallel():
    """The recurrence is an own cell of the solver."""
    module = dynamics()
    z, e = normal(2, 7), normal(2, 23, 5, seed=1)
    want = recurrent_states(module, z, e, module.config.naturalization_strength).states
    found = solve(module, e, h0=z)
    assert found.converged
    torch.testing.assert_close(found.states, want, rtol=1e-10, atol=1e-12)


def test_a_block_does_not_know_its_order():
    module, z, e = dynamics(), normal(2, 7), normal(2, 6, 5, seed=1)
    order = torch.tensor([4, 0, 5, 2, 1, 3])
    straight, mixed = (block_states(module, z, x, 0.4).states[:, -1] for x in (e, e[:, order]))
    torch.testing.assert_close(straight, mixed, rtol=1e-14, atol=1e-15)
    straight, mixed = (recurrent_states(module, z, x, 0.4).states[:, -1] for x in (e, e[:, order]))
    assert (straight - mixed).abs().max().item() > 1e-4


def test_a_basis_confines_the_raw_path():
    """Directions from a basis of 3: without bound and metric all states lie in a space of 3."""
    module = dynamics(
        direction_basis=3, metric=False, naturalization_strength=0.0, bounded_state=False
    )
    z = normal(4, 7)
    moved = recurrent_states(module, z, normal(4, 9, 5, seed=1), 0.0).states - z[:, None]
    assert torch.linalg.matrix_rank(moved.reshape(-1, 7), rtol=1e-9) == 3


@every_kind
@pytest.mark.parametrize("path", [block_states, recurrent_states])
def test_causal(kind, path):
    module, z, e = dynamics(**KINDS[kind]), normal(2, 7), normal(2, 8, 5, seed=1)
    want = path(module, z, e, 0.4).states
    for t in range(8):
        other = e.clone()
        other[:, t:] = normal(2, 8 - t, 5, seed=9)
        found = path(module, z, other, 0.4).states
        assert torch.equal(found[:, :t], want[:, :t])
        assert not torch.equal(found[:, t], want[:, t])


def test_interval():
    """Geometry of every third flow step; coefficients of every one."""
    module = dynamics(path="recurrent", geometry_interval=3)
    z, e = normal(1, 7), normal(1, 8, 5, seed=1)
    found = recurrent_states(module, z, e, 0.4)
    assert found.counts == (3, 3, 2)
    state = at = z[0]
    for t in range(8):
        if t % 3 == 0:
            at = state
        state = bnd(state + 0.7 * velocity(module, at, state, e[0, t], 0.4), 2.0)
        torch.testing.assert_close(found.states[0, t], state)


def test_truncation():
    module = dynamics(path="recurrent", truncation=4)
    z, e = normal(2, 7).requires_grad_(), normal(2, 8, 5, seed=1)
    whole = recurrent_states(module.eval(), z, e, 0.4).states
    cut = recurrent_states(module.train(), z, e, 0.4).states
    assert torch.equal(whole, cut)
    assert torch.autograd.grad(cut[:, 3].sum(), z, retain_graph=True)[0].abs().max() > 0
    assert not torch.autograd.grad(cut[:, 4:].sum(), z)[0].any()
    assert torch.autograd.grad(whole[:, 7].sum(), z)[0].abs().max() > 0


@pytest.mark.parametrize("path", [block_states, recurrent_states])
@pytest.mark.parametrize("kind", ["directions", "subspace", "direct"])
def test_gradients(path, kind):
    module = dynamics(**KINDS[kind])
    inputs = (normal(2, 7).requires_grad_(), normal(2, 3, 5, seed=1).requires_grad_())
    assert torch.autograd.gradcheck(lambda z, e: path(module, z, e, 0.4).states, inputs)


@pytest.mark.parametrize("path", [block_states, recurrent_states])
def test_empty(path):
    module = dynamics()
    assert path(module, normal(2, 7), normal(2, 0, 5), 0.4).states.shape == (2, 0, 7)
    assert path(module, normal(0, 7), normal(0, 3, 5), 0.4).states.shape == (0, 3, 7)


def test_bound():
    z = 3 * normal(50, 7)
    z[0] = 0.0
    found = bound_state(z, 2.0)
    for i in range(50):
        torch.testing.assert_close(found[i], bnd(z[i], 2.0))
    assert (torch.linalg.vector_norm(found, dim=-1) <= 2.0).all()
    assert bound_state(z, None) is z
    assert float((bound_state(found, 2.0) - found).abs().max()) > 1e-2  # no projection
    inside = torch.zeros(2, 7, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(bound_state(inside, 2.0).sum(), inside)
    assert torch.equal(slope, torch.ones_like(slope))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("radius", [0.25, 8.0, 49.0])
def test_slope_of_the_bound_at_zero(dtype, radius):
    """The identity; a floor of the norm that is 0 in half precision would make it NaN."""
    z = torch.zeros(2, 4, dtype=dtype, requires_grad=True)
    (slope,) = torch.autograd.grad(bound_state(z, radius).sum(), z)
    torch.testing.assert_close(slope, torch.ones_like(slope), rtol=1e-2, atol=0)


@pytest.mark.parametrize("radius", [-1.0, 0.0, torch.nan, torch.inf, torch.tensor(-1.0)])
def test_radius_is_above_zero(radius):
    with pytest.raises(ValueError, match=r"radius: got .*, expected a finite number > 0"):
        bound_state(normal(2, 4), radius)


def test_bounded_increments_overshoot():
    """Zero velocities move a state of large norm, by bounding alone: 64 increments add up past the
    origin, where the recurrence only shrinks. The sum that is bounded once does neither."""
    still = {"d_state": 12, "state_radius": 8.0}
    z = normal(1, 12)
    z = 8 * z / torch.linalg.vector_norm(z)
    e = normal(1, 64, 5, seed=1)
    ends = {}
    for increments in (False, True):
        module = dynamics(**still, transition="direct", bound_increments=increments)
        torch.nn.init.zeros_(module.direct.second.weight)
        torch.nn.init.zeros_(module.direct.second.bias)
        run = block_states(module, z, e, 0.4)
        ends[increments] = (z + run.increments.sum(1))[0]
    torch.testing.assert_close(ends[False], z[0])
    assert float(ends[True] @ z[0]) < 0
    shrunk = recurrent_states(module, z, e, 0.4).states[0, -1]
    assert float(shrunk @ z[0]) > 0
