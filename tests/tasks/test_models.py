"""Every model that can be probed: it is what its name says, and it trains."""

from __future__ import annotations

import warnings

import pytest
import torch

from pararnn.tasks import MODELS, TASKS, Tagger

SIZES = {
    "signed+rotation": 92_614,
    "signed+givens": 94_694,
    "signed+delta2": 105_550,
    "signed+delta2-small": 83_376,
}
"""Trained numbers on S3-hier, as counted for the same models elsewhere."""


@pytest.mark.parametrize("name", MODELS)
def test_every_model_trains(name):
    model = MODELS[name]
    task = TASKS["session-parity" if model.decay else "S3"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # two rotations
        tagger = Tagger(task, model)
    batch = task.draw(torch.Generator().manual_seed(1), 3, 6)
    answers = tagger(batch.x, batch.dt)
    assert answers.shape == (3, 6, task.outputs)
    task.loss(answers, batch).backward()
    assert all(p.grad is not None and p.grad.any() for p in tagger.parameters())
    if model.mixer is not None:
        mixers = [type(block.mixer).__name__ for block in tagger.core.blocks]
        assert len(mixers) == tagger.n_layers == name.count("+") + 1


@pytest.mark.parametrize("name", SIZES)
def test_sizes(name):
    tagger = Tagger(TASKS["S3-hier"], MODELS[name])
    assert sum(p.numel() for p in tagger.parameters()) == SIZES[name]


def test_what_decays_sees_the_time():
    task = TASKS["session-parity"]
    batch = task.draw(torch.Generator().manual_seed(1), 3, 9)
    for name, sees, feature in (
        ("signed-decay", True, True),
        ("signed-decay-only", True, False),
        ("signed", True, True),
    ):
        tagger = Tagger(task, MODELS[name])
        changed = not torch.allclose(
            tagger(batch.x, batch.dt), tagger(batch.x, 2 * batch.dt), atol=1e-6
        )
        assert changed == sees
        assert isinstance(tagger.core.in_proj, torch.nn.Linear) == feature
        decays = [block.mixer.decay for block in tagger.core.blocks]
        assert decays == [(MODELS[name].decay and "learnable") or None]


def test_layers_on_demand():
    assert Tagger(TASKS["parity"], MODELS["signed"], 3).n_layers == 3
    assert Tagger(TASKS["S3"], MODELS["signed+givens"], 2).n_layers == 2
