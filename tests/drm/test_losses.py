"""Every term of the loss against a direct formula; zero weights; energies."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from pararnn.drm.block import block_states
from pararnn.drm.config import DRMConfig
from pararnn.drm.losses import LossWeights, block_consistency, cross_entropy, drm_loss
from pararnn.drm.model import DRM
from pararnn.drm.recurrent import recurrent_states
from pararnn.drm.trace import Trace

B, T, D, N, R, V = 2, 7, 5, 4, 3, 6
STEPS = (3, 3, 1)
CONFIG = DRMConfig(dt=0.07)


@dataclass(frozen=True)
class Output:
    logits: torch.Tensor
    states: torch.Tensor
    trace: Trace
    blocks: None = None


def draw(steps=STEPS, seed=0, **missing):
    g = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=g, dtype=torch.float64)

    points = len(steps)
    trace = Trace(
        steps=torch.tensor(steps),
        velocity=normal(B, T, D),
        gates=torch.sigmoid(normal(B, points, N)),
        diagonal=normal(B, points, D).exp() + 0.1,
        factor=normal(B, points, D, R),
        risk=normal(B, points).exp(),
    )
    return Output(normal(B, T, V), normal(B, T, D), replace(trace, **missing))


TARGETS = torch.randint(V, (B, T), generator=torch.Generator().manual_seed(5))


def by_step(output, what):
    """The trace as the reader thinks of it: one geometry a step."""
    value = getattr(output.trace, what).detach().numpy()
    return np.repeat(value, output.trace.steps.numpy(), axis=1)


def energies(output):
    v = output.trace.velocity.detach().numpy()
    out = np.empty((B, T))
    for b in range(B):
        for t in range(T):
            u = by_step(output, "factor")[b, t]
            g = np.diag(by_step(output, "diagonal")[b, t]) + u @ u.T
            g += by_step(output, "risk")[b, t] * np.eye(D)
            out[b, t] = v[b, t] @ g @ v[b, t]
    return out


def bounds(output):
    d, u = by_step(output, "diagonal"), by_step(output, "factor")
    return (d.max(-1) + (u**2).sum((-2, -1))) / d.min(-1)


def formulas(o, w):
    gates, d, u = by_step(o, "gates"), by_step(o, "diagonal"), by_step(o, "factor")
    norm = np.sqrt((u**2).sum((-2, -1)))
    z, ell = o.states.detach().numpy(), o.logits.detach().numpy()
    length = np.linalg.norm(z, axis=-1)
    excess = gates.sum(-1).mean() / N - w.fraction
    if w.fraction_mode == "upper_bound":
        excess = max(excess, 0)
    return {
        "action": CONFIG.dt * energies(o).sum(1).mean(),
        "dim_sparsity": gates.sum(-1).mean(),
        "dim_entropy": (gates * np.log(gates) + (1 - gates) * np.log(1 - gates)).mean(),
        "dim_variance": max(w.dim_std - gates.sum(-1).std(), 0) ** 2,
        "active_fraction": excess**2,
        "metric_reg": (d**2).mean() + (u**2).mean(),
        "metric_diversity": -d.var(axis=1).mean(),
        "factor_floor": (np.maximum(w.factor_least - norm, 0) ** 2).mean(),
        "factor_target": (norm.mean() - w.factor_norm) ** 2,
        "condition": max(math.log(bounds(o).mean()) - math.log(w.condition_target), 0) ** 2,
        "recurrence": ((length[:, -1] - length[:, 0]) ** 2).mean(),
        "stability": (np.diff(ell, axis=1) ** 2).mean(),
        "risk": by_step(o, "risk").mean(),
    }


ACTIVE = {  # targets with which every clipped term is at work
    "dim_std": 3.0,
    "fraction": 0.2,
    "factor_least": 5.0,
    "factor_norm": 1.5,
    "condition_target": 2.0,
}


@pytest.mark.parametrize("steps", [STEPS, (7,), (1,) * 7], ids=str)
@pytest.mark.parametrize("mode", ["upper_bound", "target"])
@pytest.mark.parametrize("targets", [ACTIVE, {}], ids=["active", "default"])
def test_terms_are_the_formulas(steps, mode, targets):
    output = draw(steps)
    weights = LossWeights(fraction_mode=mode, **targets)
    terms = [n for n in weights.terms() if n != "block_consistency"]  # has a file of its own
    each = {n: 0.3 + 0.01 * i for i, n in enumerate(terms)}
    weights = replace(weights, **{**each, "metric_diversity": 0.01})
    loss = drm_loss(output, TARGETS, CONFIG, weights)
    want = formulas(output, weights)
    assert set(loss.terms) == {"ce", *want}
    for name, value in want.items():
        np.testing.assert_allclose(loss.terms[name], value, rtol=1e-12, atol=1e-14, err_msg=name)
    total = loss.terms["ce"] + sum(weights.terms()[n] * v for n, v in want.items())
    np.testing.assert_allclose(loss.total, total, rtol=1e-12)


def test_action_of_the_published_system_is_a_mean():
    output = draw()
    weights = LossWeights(action=1.0)
    got = drm_loss(output, TARGETS, CONFIG.changed(action_form="mean"), weights).terms["action"]
    np.testing.assert_allclose(got, energies(output).mean(), rtol=1e-12)
    notes = drm_loss(output, TARGETS, CONFIG, weights).terms["action"]
    np.testing.assert_allclose(notes, CONFIG.dt * T * got, rtol=1e-12)


@pytest.mark.parametrize("steps", [STEPS, (1,) * 7], ids=str)
def test_energy_without_parts(steps):
    v2 = draw(steps).trace.velocity.square()
    torch.testing.assert_close(draw(steps, diagonal=None, factor=None).trace.energy(), v2.sum(-1))
    empty = torch.zeros(B, len(steps), D, 0, dtype=torch.float64)
    plain = draw(steps, factor=empty, risk=None)
    d = torch.as_tensor(by_step(plain, "diagonal"))
    torch.testing.assert_close(plain.trace.energy(), (d * v2).sum(-1))
    weights = LossWeights(metric_reg=1.0)
    got = drm_loss(plain, TARGETS, CONFIG, weights).terms["metric_reg"]
    torch.testing.assert_close(got, d.square().mean())


def test_cross_entropy_is_not_shifted():
    output = draw()
    logits = output.logits.numpy()
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    want = -np.mean([log_p[b, t, TARGETS[b, t]] for b in range(B) for t in range(T)])
    np.testing.assert_allclose(cross_entropy(output.logits, TARGETS), want, rtol=1e-13)


def test_cross_entropy_of_half_precision_is_in_float32():
    logits = draw().logits.bfloat16()
    got = cross_entropy(logits, TARGETS)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, cross_entropy(logits.float(), TARGETS), rtol=0, atol=0)


BAD = {
    "velocity": math.inf,
    "gates": math.nan,
    "diagonal": math.inf,
    "factor": math.nan,
    "risk": math.inf,
}


def test_zero_weights_cannot_poison_the_loss():
    """0 · ∞ is NaN: a term of weight 0 is not computed at all."""
    good = draw()
    broken = {k: torch.full_like(getattr(good.trace, k), v) for k, v in BAD.items()}
    output = Output(good.logits, good.states, replace(good.trace, **broken))
    loss = drm_loss(output, TARGETS, CONFIG)
    assert list(loss.terms) == ["ce"]
    assert loss.total.isfinite()
    assert torch.equal(loss.total, cross_entropy(good.logits, TARGETS))


def test_zero_weights_give_no_gradient():
    """None, not 0: an optimizer with weight decay moves what has a zero gradient."""
    output = draw()
    leaves = {k: getattr(output.trace, k).requires_grad_() for k in BAD}
    output.logits.requires_grad_()
    drm_loss(output, TARGETS, CONFIG, LossWeights(dim_sparsity=0.1)).total.backward()
    assert output.logits.grad is not None
    assert {k for k, v in leaves.items() if v.grad is not None} == {"gates"}


def test_one_bad_term_among_zero_weights():
    """A weight of 0 keeps a NaN out, a weight above 0 shows it."""
    good = draw()
    output = Output(good.logits, good.states, replace(good.trace, risk=good.trace.risk * math.nan))
    assert drm_loss(output, TARGETS, CONFIG, LossWeights(metric_reg=1.0)).total.isfinite()
    assert drm_loss(output, TARGETS, CONFIG, LossWeights(risk=1.0)).total.isnan()


def test_gradients_are_finite_at_the_corners():
    """U = 0, equal gates, gates of 0 and 1: norms and deviations have no infinite slope there."""
    output = draw()
    trace = replace(
        output.trace,
        factor=torch.zeros_like(output.trace.factor).requires_grad_(),
        gates=torch.tensor([0.0, 1.0, 1.0, 0.0]).double().repeat(B, 3, 1).requires_grad_(),
    )
    weights = LossWeights(
        dim_entropy=1, dim_variance=1, factor_floor=1, factor_target=1, action=1, condition=1
    )
    loss = drm_loss(Output(output.logits, output.states, trace), TARGETS, CONFIG, weights)
    loss.total.backward()
    assert loss.total.isfinite()
    for leaf in (trace.factor, trace.gates):
        assert leaf.grad.isfinite().all()


@pytest.mark.parametrize(
    ("term", "missing"),
    [
        ("action", "velocity"),
        ("dim_entropy", "gates"),
        ("dim_variance", "gates"),
        ("risk", "risk"),
    ],
)
def test_a_term_that_the_model_lacks(term, missing):
    with pytest.raises(ValueError, match=f"{missing}.*0"):
        drm_loss(draw(**{missing: None}), TARGETS, CONFIG, LossWeights(**{term: 0.1}))


@pytest.mark.parametrize("term", ["metric_reg", "condition", "factor_floor", "factor_target"])
def test_a_term_without_metric(term):
    with pytest.raises(ValueError, match=r"diagonal.*0|factor.*0"):
        drm_loss(draw(diagonal=None, factor=None), TARGETS, CONFIG, LossWeights(**{term: 0.1}))


def test_diversity_needs_a_regulariser():
    """With more diversity than regularisation, scaling D up lowers the loss for ever."""
    with pytest.raises(ValueError, match="lower bound"):
        LossWeights(metric_diversity=0.2, metric_reg=0.1)
    weights = LossWeights(metric_diversity=0.1, metric_reg=0.1)
    good = draw()
    values = []
    for scale in (1.0, 1e3, 1e6):
        trace = replace(good.trace, diagonal=good.trace.diagonal * scale)
        values.append(drm_loss(Output(good.logits, good.states, trace), TARGETS, CONFIG, weights))
    ce = cross_entropy(good.logits, TARGETS)
    assert all(v.total >= ce for v in values)


@pytest.mark.parametrize(
    "bad",
    [
        {"action": -0.1},
        {"risk": math.nan},
        {"fraction_mode": "both"},
        {"condition_target": 0.5},
        {"recurrence": math.inf},
    ],
)
def test_bad_weights(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        LossWeights(**bad)


@pytest.mark.parametrize(
    ("targets", "error"),
    [(TARGETS[:, 1:], ValueError), (TARGETS.double(), TypeError), (TARGETS[:0], ValueError)],
)
def test_bad_targets(targets, error):
    logits = draw().logits
    with pytest.raises(error, match="cross_entropy"):
        cross_entropy(logits[: targets.shape[0]], targets)


def test_trace_checks_its_shapes():
    trace = draw().trace
    with pytest.raises(ValueError, match="gates"):
        replace(trace, gates=trace.gates[:, 1:])
    with pytest.raises(ValueError, match="factor"):
        replace(trace, factor=trace.diagonal)
    with pytest.raises(ValueError, match="both or neither"):
        replace(trace, factor=None)
    with pytest.raises(TypeError, match="int64"):
        replace(trace, steps=trace.steps.float())
    with pytest.raises(ValueError, match="velocities"):
        replace(trace, velocity=None).energy()


def test_block_consistency():
    torch.manual_seed(4)
    config = DRMConfig(d_state=6, d_token=5, hidden_size=7, n_directions=3, vocab_size=V)
    model = DRM(config.changed(metric_rank=2, block_length=0)).double()
    z, e = model.initial_state(B).z, model.embedding(TARGETS)
    base = block_states(model.dynamics, z, e, 0.5).states
    exact = recurrent_states(model.dynamics, z, e, 0.5).states.detach().requires_grad_()
    loss = block_consistency(base, exact)
    want = ((base - exact).detach().numpy() ** 2).mean()
    np.testing.assert_allclose(loss.detach(), want, rtol=1e-13)
    assert want > 0
    loss.backward()
    assert exact.grad is None
    assert model.dynamics.flow is not None
    assert any(p.grad is not None for p in model.dynamics.flow.parameters())
    assert block_consistency(base[:, :1], exact[:, :1]) < 1e-25, "one token is the recurrent step"
    with pytest.raises(ValueError, match="shape"):
        block_consistency(base, exact[:, :1])


def test_int32_targets_are_the_same():
    logits = draw().logits
    assert torch.equal(cross_entropy(logits, TARGETS.int()), cross_entropy(logits, TARGETS))


def test_positions_that_do_not_count():
    logits, targets = draw().logits, TARGETS.clone()
    targets[0, 2:] = -100
    kept = targets != -100
    rows, wanted = logits[kept].log_softmax(-1), targets[kept]
    expected = -rows[torch.arange(len(wanted)), wanted].mean()
    torch.testing.assert_close(cross_entropy(logits, targets), expected)


@pytest.mark.parametrize(
    ("value", "message"),
    [(V, f"got values from 0 to {V}, expected 0 to 5"), (-1, "got values from -1 to")],
)
def test_targets_out_of_the_vocabulary(value, message):
    targets = TARGETS.clone()
    targets[0, 0], targets[0, 1] = value, 0
    with pytest.raises(ValueError, match=message):
        cross_entropy(draw().logits, targets)


def test_no_target_counts():
    with pytest.raises(ValueError, match="got -100 everywhere"):
        cross_entropy(draw().logits, torch.full_like(TARGETS, -100))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((draw().logits, TARGETS, CONFIG), "output: got Tensor, expected what the model returned"),
        ((draw(), TARGETS, None), "config: got NoneType, expected a DRMConfig"),
        ((draw(), TARGETS, CONFIG, {"action": 1.0}), "weights: got dict, expected LossWeights"),
        ((draw(), TARGETS, CONFIG, {}), "weights: got dict"),
    ],
)
def test_arguments_of_another_type(arguments, message):
    with pytest.raises(TypeError, match=message):
        drm_loss(*arguments)


@pytest.mark.parametrize(
    ("weights", "error", "message"),
    [
        ({"action": "1"}, TypeError, "action: got '1'"),
        ({"action": True}, TypeError, "action: got True"),
        ({"fraction": math.nan}, ValueError, "fraction: got nan"),
        ({"fraction": 1.5}, ValueError, "fraction: got 1.5, expected a share"),
        ({"dim_std": math.nan}, ValueError, "dim_std: got nan"),
        ({"factor_norm": -1}, ValueError, "factor_norm: got -1"),
        ({"condition_target": 0.5}, ValueError, "condition_target: got 0.5"),
    ],
)
def test_weights_and_targets_are_numbers(weights, error, message):
    with pytest.raises(error, match=message):
        LossWeights(**weights)


@pytest.mark.parametrize("name", ["factor_floor", "factor_target"])
def test_no_factor_to_weigh(name):
    output = draw(factor=torch.empty(B, len(STEPS), D, 0, dtype=torch.float64))
    with pytest.raises(ValueError, match="with metric_rank=0"):
        drm_loss(output, TARGETS, CONFIG, LossWeights(**{name: 1.0}))


def test_several_flow_steps_have_no_trace_to_weigh():
    config = DRMConfig(path="recurrent", flow_steps=2)
    with pytest.raises(ValueError, match="action: got a weight with flow_steps=2"):
        drm_loss(draw(), TARGETS, config, LossWeights(action=1.0))
    drm_loss(draw(), TARGETS, config, LossWeights(recurrence=1.0, stability=1.0))
