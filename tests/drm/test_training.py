"""Training in several processes, and over several updates."""

from __future__ import annotations

import pytest
import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from pararnn.drm.losses import drm_loss
from pararnn.drm.model import DRM
from pararnn.drm.variants import CONTROLS, TINY, VARIANTS, variant

V = TINY["vocab_size"]
PATHS = ("block", "recurrent", "parallel")
NO_RECURRENCE = ("SSM_CONTROL",)  # and G in the semantics of the notes


@pytest.fixture(scope="module")
def group():
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def text(length=9, seed=0):
    whole = torch.randint(V, (2, length + 1), generator=torch.Generator().manual_seed(seed))
    return whole[:, :-1], whole[:, 1:]


def build(name, path="block", published=False, **changes):
    row = variant(name)
    sizes = {key: value for key, value in TINY.items() if key not in row.kept}
    config = row.config(**{**sizes, "seed": 5, **changes})
    config = config.published() if published else config
    return DRM(config.changed(path=path))


def updated(model, losses, wrapped, steps, trace):
    """Parameters after some updates, whose gradients are averaged over one process if wrapped."""
    called = DistributedDataParallel(model) if wrapped else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    for step in steps:
        tokens, targets = text(seed=step)
        optimizer.zero_grad()
        out = called(tokens, step=step, trace=trace)
        drm_loss(out, targets, model.config, losses if trace else None).total.backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def kinds():
    for name in (*VARIANTS, *CONTROLS):
        for path in PATHS:
            for published in (False, True):
                refined = name == "G" and not published
                if path == "block" or not (refined or name in NO_RECURRENCE):
                    yield pytest.param(name, path, published, id=f"{name}-{path}-{published}")


@pytest.mark.parametrize(("name", "path", "published"), list(kinds()))
def test_a_process_waits_for_no_gradient_that_never_comes(group, name, path, published):
    """Two updates, bit for bit those without processes. The warm-up begins at step 1."""
    for trace in (False, True):
        losses = variant(name).losses
        want, found = (
            updated(build(name, path, published), losses, wrapped, (1, 2), trace)
            for wrapped in (False, True)
        )
        for a, b in zip(want, found, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("name", "path", "published", "parts"),
    [
        ("A", "block", False, {"risk"}),
        ("J", "block", False, set()),
        ("J", "block", True, set()),
        ("J", "parallel", True, {"mixer", "residual", "memory"}),
        ("G", "recurrent", True, {"risk", "mixer", "residual", "refinement"}),
        ("J_NO_NATURALIZATION", "block", False, {"metric"}),
        ("J_NO_NATURALIZATION", "recurrent", True, {"metric", "mixer", "residual", "memory"}),
    ],
)
def test_what_is_unused_is_frozen_and_nothing_else(name, path, published, parts):
    for p, known in build(name, path, published).named_parameters():
        assert known.requires_grad != bool(parts & set(p.split("."))), p


def test_every_metric_that_nothing_uses_is_frozen():
    model = build("G", naturalization_strength=0.0, risk="enabled")
    for name, p in model.named_parameters():
        assert p.requires_grad == (".metric." not in name), name


def test_going_on_from_a_state_after_an_update():
    """With the state detached; with its graph, the second update is PyTorch's error."""
    model, (tokens, targets) = build("J"), text(8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def update(state, part):
        optimizer.zero_grad()
        out = model(tokens[:, part], state)
        drm_loss(out, targets[:, part], model.config).total.backward()
        optimizer.step()
        return out.state

    first, second = slice(0, 4), slice(4, 8)
    after = update(None, first)
    with pytest.raises(RuntimeError, match=r"second time|inplace operation"):
        update(after, second)
    apart = after.detached()
    assert torch.equal(apart.z, after.z)
    assert torch.equal(apart.memory, after.memory)
    assert not apart.z.requires_grad
    assert not apart.memory.requires_grad
    update(apart, second)
    # No gradient of the first state's: it is not a start of the second piece.
    assert model.initializer.z0.grad is None


def test_what_gets_a_gradient_in_some_steps_only(group):
    """Step 0 of a warm-up, a state that is given, a risk that nothing looks at."""
    state = build("J").initial_state(2).detached()
    cases = (
        (build("J", published=True), {"step": 0}),
        (build("J"), {"state": state}),
        (build("J", mixer=False, risk="enabled"), {}),
    )
    for model, arguments in cases:
        for search in (False, True):
            wrapped = DistributedDataParallel(model, find_unused_parameters=search)

            def backward(wrapped=wrapped, model=model, arguments=arguments):
                tokens, targets = text()
                out = wrapped(tokens, **arguments)
                drm_loss(out, targets, model.config).total.backward()

            backward()
            if search:
                backward()
            else:
                with pytest.raises(RuntimeError, match="finished reduction in the prior iteration"):
                    backward()
