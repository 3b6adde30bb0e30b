"""Every variant trains; its parts are those of the switch matrix; what should agree agrees."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pararnn.drm.losses import LossWeights, cross_entropy, drm_loss
from pararnn.drm.model import DRM
from pararnn.drm.variants import AUXILIARY, TINY, VARIANTS, variant

V = TINY["vocab_size"]


def build(name, dtype=torch.float64, **changes):
    return DRM(variant(name).config(**TINY, **{"seed": 5, **changes})).to(dtype)


def batch(length=14, seed=0):
    text = torch.randint(V, (3, length + 1), generator=torch.Generator().manual_seed(seed))
    return text[:, :-1], text[:, 1:]


def trained(model, weights=None, steps=5):
    """Logits after some steps of AdamW, on new data each."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    for step in range(steps):
        tokens, targets = batch(seed=step)
        optimizer.zero_grad()
        output = model(tokens, step=step, trace=True)
        drm_loss(output, targets, model.config, weights).total.backward()
        optimizer.step()
    with torch.no_grad():
        return model.eval()(batch(seed=99)[0]).logits


@pytest.mark.parametrize("published", [False, True], ids=["notes", "published"])
@pytest.mark.parametrize("name", VARIANTS)
def test_loss_and_gradients_are_finite(name, published):
    row, model = variant(name), build(name, torch.float32)
    config = model.config.published() if published else model.config
    model = DRM(config)
    tokens, targets = batch()
    output = model(tokens, step=200, trace=True)
    loss = drm_loss(output, targets, config, row.losses)
    loss.total.backward()
    assert loss.total.isfinite()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    assert grads
    assert all(g.isfinite().all() for g in grads)
    assert all(p.grad is not None for p in model.embedding.parameters())


@pytest.mark.parametrize("name", VARIANTS)
def test_a_step_along_the_gradient_lowers_the_loss(name):
    model, (tokens, targets) = build(name), batch()

    def loss():
        return cross_entropy(model(tokens, step=500).logits, targets)

    before = loss()
    before.backward()
    square = 0.0
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                square += p.grad.square().sum()
                p -= 1e-6 * p.grad
    torch.testing.assert_close(before - loss(), 1e-6 * square, rtol=1e-2, atol=0)


# Parts of the switch matrix: directions, direct transition, metric, memory, residual, risk, refinement
PARTS = {
    "A": "1010010",
    "B": "1010010",
    "C": "1010010",
    "D": "1010110",
    "E": "1010110",
    "F": "1010110",
    "G": "1010111",
    "H": "1010100",
    "I": "1010100",
    "J": "1011100",
    "J_DILATED": "1011100",
    "J_NO_METRIC": "1001100",
    "J_NO_NATURALIZATION": "1011100",
    "J_NO_DIRECTION": "0111100",
    "J_DIRECT_CONTROL": "0101100",
    "J_DIRECT_CONTROL_MATCHED": "0101100",
    "J_METRIC_SUBSPACE": "1011100",
    "J_METRIC_ORTHONORMAL_DIRECTION": "1011100",
    "SSM_CONTROL": "0001100",
}
CLASSES = (
    "DirectionField",
    "DirectStateTransition",
    "RelationalMetric",
    "SelectiveMemory",
    "TokenStateResidual",
    "RiskField",
    "DRMRefinementLayer",
)


@pytest.mark.parametrize("name", VARIANTS)
def test_parts_of_the_switch_matrix(name):
    found = {type(m).__name__ for m in build(name).modules()}
    assert "".join(str(int(c in found)) for c in CLASSES) == PARTS[name]
    assert ("DRMFlow" in found) == ("DirectionField" in found)
    assert {"CausalLocalMixer", "LanguageEmitter"} <= found


@pytest.mark.parametrize("name", VARIANTS)
def test_no_attention(name):
    for path, module in build(name).named_modules():
        assert not isinstance(module, nn.MultiheadAttention)
        assert "attention" not in type(module).__name__.lower()
        assert not {"q_proj", "k_proj", "v_proj"} & set(path.split("."))


def parts(model):
    """Parameters by part: embedding, dynamics.metric, ..."""
    found = {}
    for name, value in model.named_parameters():
        head = name.split(".")
        part = ".".join(head[:2]) if head[0] == "dynamics" else head[0]
        found.setdefault(part, {})[name] = value
    return found


def shapes(parameters):
    return {name: value.shape for name, value in parameters.items()}


@pytest.mark.parametrize("name", VARIANTS)
def test_shared_parts_start_alike(name):
    """Same seed and sizes: same numbers, whatever else a variant has."""
    one, two = parts(build("J")), parts(build(name))
    shared = [p for p in one if p in two and shapes(one[p]) == shapes(two[p])]
    assert {"embedding", "initializer", "emitter"} <= set(shared)
    for part in shared:
        for key, value in one[part].items():
            assert torch.equal(two[part][key], value), key


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("carry", ["base", "final"])
def test_no_naturalization_is_no_metric(dtype, carry):
    """Bit for bit: the metric reaches the logits through naturalization only."""
    kwargs = {"dtype": dtype, "block_carry": carry}
    one, two = build("J_NO_NATURALIZATION", **kwargs), build("J_NO_METRIC", **kwargs)
    tokens, _ = batch()
    a, b = one(tokens, step=3), two(tokens, step=3)
    assert torch.equal(a.logits, b.logits)
    assert torch.equal(a.states, b.states)


def test_no_naturalization_stays_no_metric_in_training():
    one, two = build("J_NO_NATURALIZATION"), build("J_NO_METRIC")
    start = {n: p.clone() for n, p in one.named_parameters()}
    assert torch.equal(trained(one), trained(two))
    moved = {n for n, p in one.named_parameters() if not torch.equal(p, start[n])}
    metric = {n for n in start if n not in dict(two.named_parameters())}
    assert metric
    assert moved == set(start) - metric, "weight decay moves what has a gradient, and only that"


def test_naturalization_makes_a_difference():
    assert not torch.equal(build("J")(batch()[0]).logits, build("J_NO_METRIC")(batch()[0]).logits)


def test_disabled_risk_changes_nothing():
    one, two = build("B"), build("B", risk="absent")
    assert torch.equal(trained(one), trained(two))


def test_auxiliary_losses_change_training_only():
    one, two = build("A"), build("B")
    tokens, _ = batch()
    assert torch.equal(one(tokens).logits, two(tokens).logits)
    assert not torch.equal(trained(one, AUXILIARY), trained(two))


@pytest.mark.parametrize("name", ["B", "H", *(n for n in VARIANTS if n[0] in "JS")])
def test_trained_by_cross_entropy_alone(name):
    assert variant(name).losses == LossWeights()
