"""The recall probe: its sequences, the published sizes, a run."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from pararnn.drm.model import DRM
from pararnn.drm.mqar import (
    FIRST_KEY,
    FIRST_VALUE,
    KEYS,
    MARK,
    SIZES,
    VALUES,
    VOCABULARY,
    recall_probe,
    recall_sequences,
)
from pararnn.drm.variants import TINY, variant


def draw(batch=50, seed=0, **kwargs):
    return recall_sequences(torch.Generator().manual_seed(seed), batch, **kwargs)


@pytest.mark.parametrize("pairs", [1, 3, 8, 32])
def test_answers_agree_with_the_shown_pairs(pairs):
    drawn = draw(length=5 * pairs - 1)
    assert drawn.x.shape == drawn.y.shape == drawn.asked.shape == (50, 5 * pairs - 1)
    assert torch.equal(drawn.x[:, 1:], drawn.y[:, :-1])
    orders = set()
    for x, y, asked in zip(drawn.x.tolist(), drawn.y.tolist(), drawn.asked, strict=True):
        shown = dict(zip(x[: 2 * pairs : 2], x[1 : 2 * pairs : 2], strict=True))
        assert len(shown) == pairs, "the keys of a sequence differ"
        assert all(FIRST_KEY <= k < FIRST_KEY + KEYS for k in shown)
        assert all(FIRST_VALUE <= v < FIRST_VALUE + VALUES for v in shown.values())
        at = asked.nonzero().flatten().tolist()
        assert sorted(x[t] for t in at) == sorted(shown)
        assert all(x[t - 1] == MARK for t in at)
        assert all(y[t] == shown[x[t]] for t in at)
        assert x.count(MARK) == pairs
        orders.add(tuple(list(shown).index(x[t]) for t in at))
    assert len(orders) > 1 or pairs == 1


def test_sequences_follow_the_seed():
    one, two, other = draw(), draw(), draw(seed=1)
    assert torch.equal(one.x, two.x)
    assert not torch.equal(one.x, other.x)


@pytest.mark.parametrize("length", [0, 38, 40, 5 * 33 - 1])
def test_bad_lengths(length):
    with pytest.raises(ValueError, match="39"):
        draw(length=length)


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("J", 701_216),
        ("J_NO_METRIC", 499_616),
        ("I", 669_280),
        ("SSM_CONTROL", 191_104),
        ("J_NO_DIRECTION", 491_392),
        ("J_DIRECT_CONTROL", 289_792),
    ],
)
def test_sizes_are_the_published_ones(name, published):
    with torch.device("meta"):
        model = DRM(variant(name).config(**SIZES))
    assert sum(p.numel() for p in model.parameters()) == published


class Looks(nn.Module):
    """Finds the queried key among the shown ones: right from the start."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(9.0))

    def forward(self, tokens, step):
        keys, values = tokens[:, 0:16:2], tokens[:, 1:16:2]
        found = (tokens.unsqueeze(-1) == keys.unsqueeze(1)).float()
        return self.scale * found @ nn.functional.one_hot(values, VOCABULARY).float()


def test_score_of_who_knows_the_answer():
    model = Looks()
    result = recall_probe(model, steps=2, tests=3, answer=model)
    assert result.accuracy == 1.0
    assert result.loss < 0.1
    assert result.parameters == 1


def test_score_of_who_guesses():
    model = nn.Linear(1, 1)

    def guess(tokens, step):
        values = torch.zeros(VOCABULARY)
        values[FIRST_VALUE : FIRST_VALUE + VALUES] = 20.0
        return values.expand(*tokens.shape, -1) + 0 * model.weight.sum()

    result = recall_probe(model, steps=1, tests=20, answer=guess)
    torch.testing.assert_close(result.loss, torch.tensor(64.0).log().item(), rtol=1e-5, atol=0)
    assert abs(result.accuracy - 1 / VALUES) < 0.01


@pytest.mark.parametrize("name", ["J", "SSM_CONTROL"])
def test_a_short_run(name):
    small = {**SIZES, "d_token": 8, "d_state": 8, "hidden_size": 16, "memory_hidden": 8}
    config = variant(name).config(**{**small, "mixer_hidden": 4}, seed=1)
    one, two = (recall_probe(DRM(config), steps=8, tests=2, batch=4) for _ in range(2))
    assert replace(one, seconds=0.0) == replace(two, seconds=0.0)
    assert 0 <= one.accuracy <= 1


def test_a_run_that_diverges_ends():
    class Broken(nn.Module):
        def __init__(self):
            super().__init__()
            self.bias = nn.Parameter(torch.zeros(VOCABULARY))

        def forward(self, tokens, step):
            return (self.bias / 0).expand(*tokens.shape, -1)

    model = Broken()
    with pytest.raises(ValueError, match="step 0"):
        recall_probe(model, steps=3, answer=model)
    assert not model.bias.isnan().any()


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"steps": -1}, ValueError, "steps: got -1, expected an integer ≥ 0"),
        ({"batch": 0}, ValueError, "batch: got 0"),
        ({"tests": 0}, ValueError, "tests: got 0"),
        ({"tests": 1.5}, TypeError, "tests: got 1.5"),
    ],
)
def test_bad_settings(settings, error, message):
    model = DRM(variant("J").config(**{**TINY, "vocab_size": VOCABULARY}))
    with pytest.raises(error, match=message):
        recall_probe(model, **{"steps": 1, "tests": 1, **settings})


def test_a_model_of_another_vocabulary():
    with pytest.raises(ValueError, match="got vocab_size=17, expected 128"):
        recall_probe(DRM(variant("J").config(**TINY)), steps=1, tests=1)
