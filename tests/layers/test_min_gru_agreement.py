"""What verify_agreement and explain say of blocks and stacks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pararnn import MinGRUBlock, MinGRUStack, explain, verify_agreement
from pararnn.cells import SignedMinGRU

DECAY = {"decay": "learnable", "decay_rate": 0.3}


def inputs():
    torch.manual_seed(0)
    gaps = torch.rand(2, 30)
    gaps[0, 3] = float("nan")  # counts as 0
    return torch.randn(2, 30, 5), gaps


def test_every_mixer_of_a_stack_is_checked():
    x, _ = inputs()
    stack = MinGRUStack(5, 8, 2, mixer=["signed", "givens"])
    report = verify_agreement(stack, x)
    assert report.passed
    assert [a.layer for a in report.layers] == ["blocks.0.mixer", "blocks.1.mixer"]
    assert [a.cell for a in report.layers] == ["SignedMinGRU", "GivensMinGRU[8, 3]"]
    assert stack.training


@pytest.mark.filterwarnings("ignore:dt")
def test_time_gaps_reach_the_mixers():
    x, gaps = inputs()
    stack = MinGRUStack(5, 8, 2, mixer="signed", mixer_kwargs=DECAY, decay_layers="last")
    assert verify_agreement(stack, x, dt=gaps).passed
    block = MinGRUBlock(5, mixer="log", mixer_kwargs=DECAY)
    assert verify_agreement(block, x, dt=gaps).passed


def test_a_mixer_in_a_model_of_ones_own():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.mixer = SignedMinGRU(5, 8)

        def forward(self, x):
            _, h = self.mixer(x[:, :10], return_state=True)
            return self.mixer(x[:, 10:], h_0=h)

    x, _ = inputs()
    model = Model()
    report = verify_agreement(model, x)
    assert report.passed
    assert [a.shape for a in report.layers] == [(2, 10, 8), (2, 20, 8)]


def test_a_wrong_mixer_is_found(monkeypatch):
    x, _ = inputs()
    stack = MinGRUStack(5, 8, 1, mixer="signed")
    right = SignedMinGRU.recurrence
    monkeypatch.setattr(SignedMinGRU, "recurrence", lambda self, h, *u: right(self, -h, *u))
    report = verify_agreement(stack, x)
    assert not report.passed
    assert report.layers[0].error > 1e-2


def test_paths_of_a_stack():
    x, _ = inputs()
    stack = MinGRUStack(5, 8, 2, mixer=["signed", "givens"])
    said = explain(stack, x)
    assert [layer.cell for layer in said.layers] == [
        block.mixer.spec.name for block in stack.blocks
    ]
    assert explain(stack.blocks[0], x).layers == said.layers[:1]
    with pytest.raises(TypeError, match="expected a cell, a ParaRNN, or a model"):
        explain(nn.Linear(5, 8), x)


@pytest.mark.parametrize("mixer", ["givens", "rotation", "delta", "signed"])
def test_the_limit_grows_with_kappa_where_states_have_no_bounds(mixer):
    """The limit is max(1e-5, 16 u κ), of which rotations need the second part."""
    torch.manual_seed(0)
    settings = {"snap": None} if mixer == "rotation" else {}
    stack = MinGRUStack(3, 16, 1, mixer=mixer, mixer_kwargs=settings)
    (layer,) = verify_agreement(stack, torch.randn(2, 520, 3)).layers
    assert layer.passed
    assert layer.tolerance == pytest.approx(
        min(1e-3, max(1e-5, 16 * 2.0**-24 * layer.amplification)), rel=1e-12
    )
    assert layer.distance <= layer.certified < 1e-3
    assert layer.reason == "within its limit, and proven"
    if mixer == "givens":
        assert 520 <= layer.amplification <= 520 * 8**0.5 + 1e-6


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4])
def test_the_distance_is_certified_at_any_size(scale):
    torch.manual_seed(0)
    cell = SignedMinGRU(3, 4, bias=False)
    (layer,) = verify_agreement(cell, torch.randn(2, 60, 3) * scale).layers
    assert 0 < layer.distance <= layer.certified
