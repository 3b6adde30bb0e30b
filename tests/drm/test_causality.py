"""Prefix causality, exact: what comes later changes nothing before it (notes, section 12)."""

from __future__ import annotations

import pytest
import torch

from pararnn.drm.model import DRM
from pararnn.drm.variants import TINY, VARIANTS, variant

LENGTH = 14  # three whole blocks of 4 and a part of one
V = TINY["vocab_size"]
RECURRENT = {"path": "recurrent", "refinement_layers": 0, "block_carry": "base"}
PARALLEL = {**RECURRENT, "path": "parallel", "geometry_interval": 1, "truncation": 0}

OPTIONS = {
    "recurrent": RECURRENT,
    "recurrent, stale geometry": {**RECURRENT, "geometry_interval": 3, "flow_steps": 2},
    "parallel": {**PARALLEL, "parallel_window": 5},
    "parallel, looped": {**PARALLEL, "parallel_corrections": 3},
    "one block": {"block_length": 0},
    "blocks of 1": {"block_length": 1},
    "final states carried": {"block_carry": "final"},
    "memory from the block's state": {"memory_start": "block_state"},
    "increments bounded": {"bound_increments": True},
    "unbounded": {"bounded_state": False},
    "top-k gates": {"gate_top_k": 2, "gate_top_k_renormalize": True},
    "free directions": {"direction_basis": 0, "metric_basis": 0, "normalize_directions": False},
    "diagonal metric": {"metric_rank": 0},
    "full naturalization": {"naturalization_strength": 1.0},
    "in the span": {"naturalization_form": "subspace"},
    "orthonormal": {"naturalization_form": "orthonormal"},
    "risk": {"risk": "enabled"},
    "dilated mixer": {"mixer_layers": 3, "mixer_dilation_growth": 2},
    "refinement": {"refinement_layers": 2},
    "deep emitter": {"emitter_layers": 2, "emitter_form": "swiglu", "emitter_residual": True},
    "short radius": {"state_radius": 0.1, "block_carry": "final"},
}


def check(config):
    model = DRM(config).double().eval()
    g = torch.Generator().manual_seed(1)
    tokens = torch.randint(V, (2, LENGTH), generator=g)
    with torch.no_grad():
        whole = model(tokens)
        for cut in range(1, LENGTH):
            other = tokens.clone()
            other[:, cut:] = (other[:, cut:] + 1 + torch.arange(LENGTH - cut) % (V - 1)) % V
            assert (other[:, cut:] != tokens[:, cut:]).all()
            changed = model(other)
            for what in ("logits", "states", "base"):
                a, b = getattr(changed, what), getattr(whole, what)
                assert torch.equal(a[:, :cut], b[:, :cut]), (what, cut)
            # The change is seen where it is made, so that the check above means something.
            assert not torch.equal(changed.logits[:, cut], whole.logits[:, cut])


@pytest.mark.parametrize("published", [False, True], ids=["notes", "published"])
@pytest.mark.parametrize("name", VARIANTS)
def test_variants(name, published):
    config = variant(name).config(**TINY)
    check(config.published().changed(naturalization_warmup=0) if published else config)


@pytest.mark.parametrize("option", OPTIONS)
def test_options(option):
    check(variant("J").config(**{**TINY, **OPTIONS[option]}))


@pytest.mark.parametrize("path", [{}, RECURRENT, PARALLEL], ids=["block", "recurrent", "parallel"])
def test_gradients_are_causal(path):
    """Logits at ``t`` have the gradient 0 in later embeddings, and one in all before."""
    config = variant("J").config(**{**TINY, **path})
    model = DRM(config).double().eval()
    e = []
    model.embedding.register_forward_hook(lambda *args: e.append(args[2]) or None)
    tokens = torch.randint(V, (1, LENGTH), generator=torch.Generator().manual_seed(2))
    logits = model(tokens).logits
    for t in (0, 3, 4, 6, LENGTH - 1):
        (g,) = torch.autograd.grad(logits[:, t].sum(), e, retain_graph=True)
        assert not g[:, t + 1 :].any()
        assert g[:, : t + 1].abs().amax((0, 2)).gt(0).all()


@pytest.mark.parametrize("name", ["J", "J_NO_METRIC", "SSM_CONTROL"])
def test_rows_do_not_mix(name):
    model = DRM(variant(name).config(**TINY)).double().eval()
    tokens = torch.randint(V, (3, LENGTH), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        whole, alone = model(tokens).logits, model(tokens[1:2]).logits
    torch.testing.assert_close(whole[1:2], alone, rtol=1e-12, atol=1e-13)
