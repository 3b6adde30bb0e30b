"""Spectral measures, holonomy of frames, the metric pulled back from the emitted distribution."""

from __future__ import annotations

import math

import pytest
import torch
from torch.func import hessian

from pararnn.drm.config import DRMConfig
from pararnn.drm.diagnostics import (
    effective_rank,
    fisher_energy,
    fisher_metric,
    frame_holonomy,
    kernel_fraction,
    participation_ratio,
)
from pararnn.drm.emitter import LanguageEmitter
from pararnn.drm.model import DRM
from pararnn.drm.variants import TINY, variant

MEASURES = [effective_rank, participation_ratio]


def spectrum(*shape, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=g, dtype=torch.float64).mul(2).exp()


@pytest.mark.parametrize("measure", MEASURES)
def test_equal_eigenvalues_count(measure):
    for k in (1, 3, 7):
        values = torch.zeros(7, dtype=torch.float64)
        values[:k] = 0.3
        torch.testing.assert_close(measure(values).item(), float(k))


@pytest.mark.parametrize("measure", MEASURES)
def test_nothing_has_rank_zero(measure):
    values = torch.tensor([[0.0, 0.0], [0.0, 3.0], [torch.nan, 1.0]])
    found = measure(values)
    assert found[:2].tolist() == [0.0, 1.0]
    assert found[2].isnan()


def test_measures_are_the_formulas():
    values = spectrum(5, 9)
    p = values / values.sum(-1, keepdim=True)
    torch.testing.assert_close(effective_rank(values), torch.exp(-(p * p.log()).sum(-1)))
    torch.testing.assert_close(participation_ratio(values), 1 / p.square().sum(-1))


def test_participation_is_at_most_the_effective_rank():
    values = spectrum(200, 9)
    assert (participation_ratio(values) <= effective_rank(values)).all()
    assert (participation_ratio(values) >= 1).all()


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_scale_does_not_matter(measure, scale):
    values = spectrum(4, 6).float()
    torch.testing.assert_close(measure(values * scale), measure(values), rtol=1e-5, atol=0)


def test_kernel_fraction():
    values = torch.tensor([2.0, 1.0, 0.02, 0.0])
    assert kernel_fraction(values, 0.0) == 0.25
    assert kernel_fraction(values, 0.011) == 0.5
    assert kernel_fraction(values, 0.5) == 0.75
    with pytest.raises(ValueError, match="threshold"):
        kernel_fraction(values, 1.0)


@pytest.mark.parametrize("measure", [*MEASURES, lambda x: kernel_fraction(x, 0.1)])
def test_bad_eigenvalues(measure):
    with pytest.raises(ValueError, match="below 0"):
        measure(torch.tensor([1.0, -1e-9]))
    with pytest.raises(ValueError, match="shape"):
        measure(torch.zeros(3, 0))
    with pytest.raises(TypeError, match="floating"):
        measure(torch.tensor([1, 2]))


def emitter(vocab=4, d=6):
    torch.manual_seed(0)
    config = DRMConfig(d_state=d, hidden_size=11, vocab_size=vocab)
    return LanguageEmitter(config).double().eval()


def states(*shape, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_metric_is_the_hessian_of_the_divergence():
    """An independent way to it: second derivatives of KL(p(z) ‖ p(·)) at z."""
    emit, z = emitter(), states(3, 6)
    got = fisher_metric(emit, z)
    for i in range(3):
        log_p = emit(z[i]).log_softmax(-1).detach()

        def divergence(x, log_p=log_p):
            return (log_p.exp() * (log_p - emit(x).log_softmax(-1))).sum()

        torch.testing.assert_close(got[i], hessian(divergence)(z[i]), rtol=1e-9, atol=1e-11)


def test_energy_is_that_of_the_metric():
    emit, z, v = emitter(), states(3, 6), states(3, 6, seed=2)
    want = torch.einsum("bi,bij,bj->b", v, fisher_metric(emit, z), v)
    torch.testing.assert_close(fisher_energy(emit, z, v), want, rtol=1e-11, atol=1e-13)
    assert (want > 0).all()


def test_metric_is_degenerate_where_tokens_are_few():
    """Rank at most V - 1 = 3 of 6: here, other than in section 4, there is a kernel."""
    eigenvalues = torch.linalg.eigvalsh(fisher_metric(emitter(), states(5, 6)))
    assert (eigenvalues > -1e-15).all()
    assert ((eigenvalues > 1e-10 * eigenvalues[:, -1:]).sum(-1) == 3).all()
    assert (kernel_fraction(eigenvalues.clamp(min=0), 1e-10) == 0.5).all()


def test_energy_along_a_path_of_the_model():
    model = DRM(variant("J").config(**TINY)).double().eval()
    tokens = torch.randint(TINY["vocab_size"], (2, 9), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        out = model(tokens, trace=True)
        energy = fisher_energy(model.emitter, out.states, out.trace.velocity)
    assert energy.shape == (2, 9)
    assert (energy > 0).all()


def test_bad_shapes():
    with pytest.raises(ValueError, match="shape"):
        fisher_energy(emitter(), states(3, 6), states(6))
    with pytest.raises(ValueError, match="shape"):
        fisher_metric(emitter(), states(6))


# --------------------------------------------------------------------------------------
# Holonomy of frames
# --------------------------------------------------------------------------------------


def tangent_planes(colatitude, points):
    """Two tangent vectors of the unit sphere around a circle of latitude, neither of unit length."""
    phi = torch.arange(points, dtype=torch.float64) * (2 * math.pi / points)
    theta = torch.tensor(colatitude, dtype=torch.float64)
    south = torch.stack(
        [theta.cos() * phi.cos(), theta.cos() * phi.sin(), -theta.sin() + 0 * phi], -1
    )
    east = torch.stack([-phi.sin(), phi.cos(), 0 * phi], -1)
    return torch.stack([2 * south + 0.3 * east, east], -2)


@pytest.mark.parametrize("colatitude", [0.4, 1.1, math.pi / 2])
def test_holonomy_of_the_sphere(colatitude):
    """A tangent vector carried around a circle of latitude turns by the solid angle inside."""
    turn = frame_holonomy(tangent_planes(colatitude, 4000))
    solid = 2 * math.pi * (1 - math.cos(colatitude))
    torch.testing.assert_close(
        turn.trace() / 2, torch.tensor(math.cos(solid)).double(), rtol=0, atol=2e-6
    )
    torch.testing.assert_close(turn @ turn.mT, torch.eye(2).double(), rtol=0, atol=1e-11)


def test_holonomy_does_not_depend_on_the_frames():
    frames = states(2, 9, 3, 7, seed=4)
    mixed = states(2, 9, 3, 3, seed=5) @ frames
    turns = [frame_holonomy(f) for f in (frames, mixed)]
    angles = [torch.linalg.eigvals(t).angle().abs().sort(-1).values for t in turns]
    torch.testing.assert_close(*angles)
    assert (turns[0] - torch.eye(3)).norm() > 0.1


def test_planes_that_do_not_turn():
    fixed = states(3, 6)
    frames = states(8, 3, 3, seed=6) @ fixed
    torch.testing.assert_close(frame_holonomy(frames), torch.eye(3).double(), rtol=0, atol=1e-12)
    whole = states(8, 4, 4, seed=7)
    torch.testing.assert_close(frame_holonomy(whole), torch.eye(4).double(), rtol=0, atol=1e-12)


def test_back_and_forth_is_no_turn():
    path = states(5, 2, 6, seed=8)
    loop = torch.cat([path, path[1:-1].flip(0)])
    torch.testing.assert_close(frame_holonomy(loop), torch.eye(2).double(), rtol=0, atol=1e-11)


@pytest.mark.parametrize(
    ("frames", "message"),
    [
        (torch.zeros(3, 4), "expected"),
        (torch.randn(1, 2, 4), "K ≥ 2"),
        (torch.randn(3, 5, 4), "n ≤ d"),
        (torch.ones(3, 2, 4), "dependent"),
        (torch.eye(4).unflatten(0, (2, 2)), "orthogonal"),
    ],
)
def test_frames_without_a_holonomy(frames, message):
    with pytest.raises(ValueError, match=message):
        frame_holonomy(frames)
