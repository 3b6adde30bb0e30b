"""The equations on the cards against the modules: Specs evaluated in float64 by their oracle."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from pararnn.drm import DRM, DRMConfig, DRMDynamics, SelectiveMemory, bound_state
from pararnn.drm.block import block_states
from pararnn.drm.cards import PARTS, block, flow, memory, metric
from pararnn.drm.cards.switches import SWITCHES
from pararnn.drm.config import PUBLISHED
from pararnn.drm.naturalize import naturalize
from pararnn.spec import SpecError, oracle
from pararnn.spec.fragment import Fragment

SIZES = {
    "vocab_size": 13,
    "d_token": 5,
    "d_state": 7,
    "n_directions": 3,
    "metric_rank": 2,
    "hidden_size": 11,
    "memory_hidden": 9,
    "naturalization_strength": 0.7,
    "gate_logit_bias": -0.6,
    "gate_temperature": 1.3,
    "memory_forget_bias": 1.4,
    "state_radius": 2.5,
}


def config(**changes) -> DRMConfig:
    return DRMConfig(**{**SIZES, **changes})


def draws(*shape: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(*shape, dtype=torch.float64)


def equal(mine, theirs) -> None:
    mine = torch.as_tensor(np.array(mine)) if not isinstance(mine, Tensor) else mine
    torch.testing.assert_close(mine.reshape(theirs.shape), theirs, rtol=1e-12, atol=1e-13)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(5)
    with torch.no_grad():
        yield


def test_gates_coefficients_and_velocity():
    dynamics = DRMDynamics(config()).double()
    z, e = draws(4, 7), draws(4, 5)
    field, net = dynamics.direction, dynamics.flow
    found = field(z)
    features = F.gelu(F.linear(torch.cat([z, e], -1), net.first.weight, net.first.bias))
    lines = flow.VELOCITY.evaluate(
        V=found.vectors,
        u_a=field.gate_head(field.trunk(z)),
        u_c=net.second(features),
        beta=-0.6,
        tau=1.3,
    )
    coefficients = net(z, e.unsqueeze(1))
    equal(lines["a"], found.gates)
    equal(lines["c"], coefficients)
    equal(lines["v_raw"], found.velocity(coefficients))


def test_direct_transition():
    net = DRMDynamics(config(transition="direct")).double().direct
    z, e = draws(4, 7), draws(4, 5)
    features = F.gelu(F.linear(torch.cat([z, e], -1), net.first.weight, net.first.bias))
    equal(flow.DIRECT.evaluate(u_T=net.second(features))["T"], net(z, e.unsqueeze(1)))


@pytest.mark.parametrize("scale", [0.1, 1.0, 30.0])
def test_step_and_bound(scale):
    dynamics = DRMDynamics(config(dt=0.4)).double()
    z, e = draws(6, 7, scale=scale), draws(6, 5)
    v = dynamics.velocity(dynamics.geometry(z), z, e.unsqueeze(1), 0.7).squeeze(1)
    lines = flow.STEP.evaluate(z=z, v=v, dt=0.4, R=2.5)
    equal(lines["z"], dynamics.step(z, e))


def test_diagonal_of_the_metric():
    net = DRMDynamics(config(metric_eps=0.03)).double().metric
    z = draws(4, 7)
    lines = metric.DIAGONAL.evaluate(u_D=net.diagonal_head(net.trunk(z)), epsilon=0.03)
    equal(lines["D"], net(z).diagonal)


def test_blend_of_velocities():
    net = DRMDynamics(config()).double().metric
    z, v = draws(4, 7), draws(4, 7)
    g = net(z)
    damped = g.dense() + 0.3 * torch.eye(7, dtype=torch.float64)
    solved = torch.linalg.solve(damped, v)
    lines = metric.BLEND.evaluate(v_raw=v, v_hat=solved, s=0.7)
    equal(lines["v"], naturalize(g, v.unsqueeze(1), 0.7, 0.3).squeeze(1))


def test_a_block_is_one_number_a_direction():
    dynamics = DRMDynamics(config(dt=0.3)).double()
    z, e = draws(2, 7), draws(2, 9, 5)
    geometry, net = dynamics.geometry(z), dynamics.flow
    pairs = torch.cat([z.unsqueeze(1).expand(-1, 9, -1), e], -1)
    logits = net.second(F.gelu(F.linear(pairs, net.first.weight, net.first.bias)))
    ends = []
    for row in range(2):
        start, drives = np.zeros(3), (logits[row].numpy(),)
        gates = geometry.directions.gates[row].numpy()
        along = oracle.sequence(block.DISPLACEMENT, start, drives, (gates, 0.3))
        solved = torch.linalg.inv(
            geometry.metric.dense()[row] + 0.3 * torch.eye(7, dtype=torch.float64)
        )
        n = 0.3 * torch.eye(7, dtype=torch.float64) + 0.7 * solved
        moved = torch.as_tensor(along) @ geometry.directions.vectors[row] @ n.mT
        ends.append(bound_state(z[row] + moved, 2.5))
    equal(torch.stack(ends), block_states(dynamics, z, e, 0.7).states)


@pytest.mark.parametrize(("bound", "rank"), [(False, 3), (True, 7)])
def test_what_a_block_can_reach(bound, rank):
    """The span of the directions, unless increments are bounded, coordinate by coordinate."""
    dynamics = DRMDynamics(config(dt=1.0, bound_increments=bound)).double()
    increments = block_states(dynamics, draws(1, 7), draws(1, 40, 5), 0.7).increments[0]
    assert int(torch.linalg.matrix_rank(increments, rtol=1e-9)) == rank


def test_memory():
    net = SelectiveMemory(config(memory=True)).double()
    states, start, tokens, m = draws(2, 9, 7), draws(2, 7), draws(2, 9, 5), draws(2, 7)
    previous = torch.cat([start.unsqueeze(1), states[:, :-1]], 1)
    h = F.silu(net.in_proj(torch.cat([previous, tokens], -1)))
    drives = [gate(h).numpy() for gate in (net.forget, net.write, net.candidate)]
    mine = oracle.sequence(memory.RECURRENCE, m.numpy(), drives, (1.4,))
    equal(mine, net(states, start, tokens, m)[0])


def test_memory_is_added_to_the_state():
    model = DRM(config(memory=True, memory_scale=0.6, block_length=4)).double().eval()
    tokens = torch.randint(0, 13, (2, 4))
    out, e = model(tokens), model.embedding(tokens)
    start = model.initial_state(2)
    m, _ = model.memory(out.base, start.z, e, start.memory)
    equal(memory.READ.evaluate(z=out.base, m=m, eta_mem=0.6)["z_J"], out.states)


def test_a_fragment_says_what_it_lacks():
    with pytest.raises(TypeError, match=r"got values of v, expected R, dt, v, z"):
        flow.STEP.evaluate(v=np.zeros(3))
    with pytest.raises(SpecError, match="already used"), Fragment("twice") as s:
        s.given("v v")


def test_recurrences_are_linear_and_fragments_have_no_jacobian():
    assert block.DISPLACEMENT.jacobian_latex() == [r"\dot{p}_t = \dot{p}_{t-1}"]
    assert memory.RECURRENCE.jacobian_latex() == [r"\dot{m}_t = f_t \odot \dot{m}_{t-1}"]


# --------------------------------------------------------------------------------------
# Switches
# --------------------------------------------------------------------------------------


def test_switches_are_those_of_the_published_system():
    assert set(SWITCHES) == set(PUBLISHED)
    for name, switch in SWITCHES.items():
        ours, theirs = switch.values
        assert ours == getattr(DRMConfig(), name)
        assert theirs == PUBLISHED[name]
        assert ours != theirs


def test_every_switch_is_on_the_card_of_the_model_and_of_a_part():
    model, *parts = PARTS
    assert {s.name for s in model.switches} == set(SWITCHES)
    assert {s.name for p in parts for s in p.switches} == set(SWITCHES) - {"action_form"}
