"""Consistency of blocks with the recurrence, against a loop over tokens written out."""

from __future__ import annotations

import pytest
import torch

from pararnn.drm import (
    DRM,
    Blocks,
    DRMConfig,
    LossWeights,
    block_consistency,
    cross_entropy,
    drm_loss,
)

CONFIG = DRMConfig(
    vocab_size=13,
    d_token=5,
    d_state=7,
    hidden_size=9,
    n_directions=4,
    metric_rank=3,
    dt=0.6,
    state_radius=2.0,
    block_length=4,
    mixer_hidden=6,
    memory_hidden=5,
)
TEXT = torch.randint(13, (2, 15), generator=torch.Generator().manual_seed(0))
TOKENS, TARGETS = TEXT[:, :-1], TEXT[:, 1:]  # three blocks of 4, and 2 tokens
ALL = {"mixer": True, "token_residual": True, "memory": True}
MODELS = {
    "base": {},
    "all": ALL,
    "final": {**ALL, "block_carry": "final"},
    "direct": {"transition": "direct"},
    "one block": {"block_length": 0},
    "short": {"block_length": 64},
    "bounded increments": {"bound_increments": True},
}


def build(**changes):
    return DRM(CONFIG.changed(**changes)).double()


def bound(q, radius=2.0):
    norm = float(q.detach().square().sum()) ** 0.5
    return radius * torch.tanh(q * min(1.0, radius / norm) / radius)


def by_hand(model, out, s, every=1, length=0):
    """Mean over rows, tokens and coordinates, from the parts of the model, densely."""
    dynamics, block = model.dynamics, model.config.block_length or 14
    e, gaps = model.embedding.table.weight[TOKENS], []
    carried = out.states if model.config.block_carry == "final" else out.base
    for row in range(2):
        for t in range(14):
            if t % block == 0:
                z = model.initializer.z0 if t == 0 else carried[row, t - 1]
            g = dynamics.metric(z).dense() + 0.3 * torch.eye(7, dtype=torch.float64)
            if dynamics.direct is None:
                field = dynamics.direction(z)
                raw = (field.gates * dynamics.flow(z, e[row, t][None])[0]) @ field.vectors
            else:
                raw = dynamics.direct(z, e[row, t][None])[0]
            z = bound(z + 0.6 * ((1 - s) * raw + s * torch.linalg.solve(g, raw)))
            if (t // block) % every == 0 and t % block < (length or block):
                gaps.append(out.base[row, t] - z.detach())
    return torch.stack(gaps).square().mean()


@pytest.mark.parametrize("sampled", [(1, 0), (2, 0), (1, 3), (3, 2), (9, 1), (1, 99)], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_by_hand(name, sampled):
    every, length = sampled
    model = build(**MODELS[name], naturalization_warmup=10)
    out = model(TOKENS, step=6, trace=True)
    weights = LossWeights(block_consistency=0.7, consistency_every=every, consistency_length=length)
    loss = drm_loss(out, TARGETS, model.config, weights)
    want = by_hand(model, out, 0.3, every, length)
    torch.testing.assert_close(loss.terms["block_consistency"], want, rtol=1e-10, atol=1e-28)
    ce = cross_entropy(out.logits, TARGETS)
    torch.testing.assert_close(loss.total, ce + 0.7 * want)
    if length != 1:
        assert float(want.detach()) > 1e-9


def test_one_token_a_block_is_the_recurrence():
    model = build(block_length=1)
    out = model(TOKENS, trace=True)
    loss = drm_loss(out, TARGETS, model.config, LossWeights(block_consistency=1.0))
    assert loss.terms["block_consistency"] < 1e-30


def test_gradients_are_those_of_the_block_states():
    """The recurrence is a constant: the same as by hand, and no more."""
    model = build(**ALL, block_carry="final")
    out = model(TOKENS, trace=True)
    weights = LossWeights(block_consistency=1.0, consistency_every=2)
    term = drm_loss(out, TARGETS, model.config, weights).terms["block_consistency"]
    names = [n for n, p in model.named_parameters() if not n.startswith("emitter")]
    live = [p for n, p in model.named_parameters() if n in names]
    found = torch.autograd.grad(term, live, retain_graph=True)
    want = torch.autograd.grad(by_hand(model, out, 0.5, every=2), live)
    for name, a, b in zip(names, found, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-18, msg=name)
    base, exact = out.blocks.sampled(every=2)
    assert base.requires_grad
    assert not exact.requires_grad


def test_no_weight_no_recurrence(monkeypatch):
    model = build()
    out = model(TOKENS, trace=True)

    def ran(*given):
        raise RuntimeError("ran")

    monkeypatch.setattr(Blocks, "sampled", ran)
    drm_loss(out, TARGETS, model.config, LossWeights(action=0.1, consistency_every=3))
    with pytest.raises(RuntimeError, match="ran"):
        drm_loss(out, TARGETS, model.config, LossWeights(block_consistency=1e-9))


def test_samples_cost_less():
    """Of 14 tokens in blocks of 4: the recurrence is run on those that are asked for, a step a token."""
    model, seen = build(), []
    out = model(TOKENS, trace=True)
    step = model.dynamics.step
    model.dynamics.step = lambda z, *rest: seen.append(z.shape[1]) or step(z, *rest)
    for every, length, want in ((1, 0, [4] * 4), (2, 0, [2] * 4), (3, 2, [2] * 2), (4, 1, [1])):
        seen.clear()
        base, exact = out.blocks.sampled(every, length)
        assert seen == want
        assert base.shape == exact.shape
    seen.clear()
    model(TOKENS[:, :3], trace=True).blocks.sampled()  # shorter than a block
    assert seen == [1] * 3


@pytest.mark.parametrize(
    "changes",
    [
        {"path": "recurrent"},
        {"path": "parallel"},
        {"transition": "none", "metric": False, "naturalization_strength": 0.0},
    ],
)
def test_nothing_to_compare(changes):
    model = build(**changes)
    out = model(TOKENS, trace=True)
    with pytest.raises(ValueError, match=r"weight for block_consistency .*set the weight to 0"):
        drm_loss(out, TARGETS, model.config, LossWeights(block_consistency=1.0))


def test_nothing_recorded():
    model = build()
    with pytest.raises(ValueError, match="trace=True"):
        drm_loss(model(TOKENS), TARGETS, model.config, LossWeights(block_consistency=1.0))


@pytest.mark.parametrize(
    ("weights", "error", "message"),
    [
        ({"block_consistency": -1.0}, ValueError, "block_consistency: got -1.0"),
        ({"consistency_every": 0}, ValueError, "consistency_every: got 0"),
        ({"consistency_every": 2.0}, TypeError, r"consistency_every: got 2\.0"),
        ({"consistency_length": -1}, ValueError, "consistency_length: got -1"),
        ({"consistency_length": True}, TypeError, "consistency_length: got True"),
    ],
)
def test_ranges(weights, error, message):
    with pytest.raises(error, match=message):
        LossWeights(**weights)


def test_half_precision_is_averaged_in_float32():
    base, exact = (torch.randn(2, 9, 7, generator=torch.Generator().manual_seed(i)) for i in (0, 1))
    base, exact = base.bfloat16(), exact.bfloat16()
    found = block_consistency(base, exact)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, (base - exact).float().square().mean())


def test_ranges_of_a_sample():
    blocks = build()(TOKENS, trace=True).blocks
    with pytest.raises(ValueError, match="every: got 0"):
        blocks.sampled(0)
    with pytest.raises(ValueError, match="length: got -1"):
        blocks.sampled(1, -1)
