"""Training in several processes, and over several updates."""

from __future__ import annotations

import pytest
import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from pararnn.drm.config import DRMConfig
from pararnn.drm.generation import read
from pararnn.drm.losses import LossWeights, cross_entropy, drm_loss
from pararnn.drm.model import DRM, DRMState
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


def second_updates(**changes):
    """A model, and a function that trains it with a piece of a text, from a state."""
    model = build("J", **changes)
    tokens, targets = text(8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def update(state, part, retain=False):
        optimizer.zero_grad()
        out = model(tokens[:, part], state)
        drm_loss(out, targets[:, part], model.config).total.backward(retain_graph=retain)
        optimizer.step()
        return out.state

    return model, update


FIRST, SECOND = slice(0, 4), slice(4, 8)


@pytest.mark.parametrize("retain", [False, True])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"path": "recurrent"},
        {"path": "parallel"},
        {"block_carry": "final"},
        {"memory": False},
        {"memory_start": "block_state"},
        {"mixer": False, "token_residual": False, "memory": False},
        {"naturalization_strength": 0.0},
    ],
    ids=str,
)
def test_an_update_goes_no_further_back_than_the_one_before(changes, retain):
    """One sentence with the way out, whether the graph is gone or its parameters are others by now."""
    model, update = second_updates(**changes)
    after = update(None, FIRST, retain)
    with pytest.raises(RuntimeError, match=r"go on from its detach\(\)"):
        update(after, SECOND)
    apart = after.detach()
    assert torch.equal(apart.z, after.z)
    assert not apart.z.requires_grad
    if model.carries_memory:
        assert torch.equal(apart.memory, after.memory)
        assert not apart.memory.requires_grad
    update(apart, SECOND)
    # The first state is not a start of the second piece.
    assert not model.initializer.z0.grad.any()


@pytest.mark.parametrize("path", PATHS)
def test_pieces_may_share_one_backward_pass(path):
    """Summed losses of two pieces have the gradients of the whole text; a retained graph has them twice."""
    tokens, targets = text(8)

    def gradients(pieces, times=1):
        model, state, total = build("J", path).double(), None, 0.0
        for part in pieces:
            out = model(tokens[:, part], state)
            total = total + drm_loss(out, targets[:, part], model.config).total / len(pieces)
            state = out.state
        for again in reversed(range(times)):
            total.backward(retain_graph=bool(again))
        return [p.grad for p in model.parameters() if p.requires_grad]

    whole, apart = gradients([slice(0, 8)]), gradients([FIRST, SECOND])
    twice = gradients([FIRST, SECOND], 2)
    # The parallel path sweeps to a tolerance, and here over other windows.
    rtol = 1e-9 if path == "parallel" else 1e-11
    for a, b, c in zip(whole, apart, twice, strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=1e-13)
        torch.testing.assert_close(2 * b, c, rtol=rtol, atol=1e-13)


STARTED = ("given state", "step 0", "risk that nothing reads", "all three")


def started():
    for kind in kinds():
        name, path, _ = kind.values
        cases = STARTED if name == "J" and path != "recurrent" else STARTED[3:]
        for case in cases:
            yield pytest.param(*kind.values, case, id=f"{kind.id}-{case}")


@pytest.mark.parametrize(("name", "path", "published", "case"), list(started()))
def test_what_a_call_does_not_use_has_a_gradient_of_zeros(group, name, path, published, case):
    """Two updates under plain processes, bit for bit those without, and none of them moves what is idle."""
    changes = {}
    if case in STARTED[2:] and (not published or path == "block"):
        changes = {"mixer": False, "risk": "enabled"}

    def updated(wrapped, trace):
        model = build(name, path, published, **changes)
        if model.initializer.z0.requires_grad:
            torch.nn.init.normal_(model.initializer.z0, generator=torch.Generator().manual_seed(1))
        called = DistributedDataParallel(model) if wrapped else model
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        state = model.initial_state(2).detach() if case in ("given state", "all three") else None
        idle = []
        for seed in (0, 1):
            step = 0 if case in ("step 0", "all three") else 1
            tokens, targets = text(seed=seed)
            optimizer.zero_grad()
            out = called(tokens, state, step=step, trace=trace)
            drm_loss(
                out, targets, model.config, variant(name).losses if trace else None
            ).total.backward()
            optimizer.step()
        for n, p in model.named_parameters():
            assert (p.grad is not None) == p.requires_grad, n
            idle += [n] if p.requires_grad and torch.equal(p, before[n]) else []
        return idle, [p.detach() for p in model.parameters()]

    for trace in (False, True):
        (idle, want), (_, found) = (updated(wrapped, trace) for wrapped in (False, True))
        for a, b in zip(want, found, strict=True):
            assert torch.equal(a, b)
        if not trace:
            config = build(name, path, published, **changes).config
            parts = {"initializer"} if case in ("given state", "all three") else set()
            if case in ("step 0", "all three") and config.naturalization_warmup:
                parts.add("metric")
            if config.risk == "enabled" and (not config.mixer or not config.corrected):
                parts.add("risk")
            for n in idle:
                assert parts & set(n.split(".")), n
            for part in parts:
                assert any(part in n.split(".") for n in idle), part


def trained_alone():
    for name in ("A", "G", "J", "J_METRIC_SUBSPACE", "SSM_CONTROL"):
        for term in LossWeights().terms():
            if name != "SSM_CONTROL" or term in ("recurrence", "stability"):
                yield pytest.param(name, term, id=f"{name}-{term}")


@pytest.mark.parametrize(("name", "term"), list(trained_alone()))
def test_every_term_trains_in_processes(group, name, term):
    """Two updates of each loss alone, in step 0 of a warm-up and from a given state; bit for bit."""
    weights = weighted(term)
    changes = {"risk": "enabled", "mixer": False} if term == "risk" else {}
    warm = {} if name == "SSM_CONTROL" else {"naturalization_warmup": 5}
    found = []
    for wrapped in (False, True):
        model = build(name, **changes, **warm)
        called = DistributedDataParallel(model) if wrapped else model
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
        for state in (None, model.initial_state(2).detach()):
            tokens, targets = text()
            optimizer.zero_grad()
            out = called(tokens, state, step=0, trace=True)
            drm_loss(out, targets, model.config, weights).total.backward()
            optimizer.step()
        found.append([p.detach() for p in model.parameters()])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


def test_a_parameter_that_is_not_finite_and_idle_spoils_nothing():
    model = build("J")
    with torch.no_grad():
        model.initializer.z0.fill_(torch.inf)
    tokens, targets = text()
    out = model(tokens, build("J").initial_state(2).detach())
    drm_loss(out, targets, model.config).total.backward()
    assert out.logits.isfinite().all()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.requires_grad)
    assert not model.initializer.z0.grad.any()


def test_transforms_pass_the_end_of_a_call():
    """vmap, forward and reverse mode with a given state, against numbers of the plain call."""
    model = build("J").double()
    tokens, _ = text()
    z = torch.randn(3, 2, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    memory = torch.zeros_like(z)

    def logits(z, memory):
        return model(tokens, DRMState(z, memory)).logits.square().sum()

    plain = torch.stack([logits(a, b) for a, b in zip(z, memory, strict=True)])
    torch.testing.assert_close(torch.func.vmap(logits)(z, memory), plain)
    leaf = z[0].clone().requires_grad_()
    (want,) = torch.autograd.grad(logits(leaf, memory[0]), leaf)
    torch.testing.assert_close(torch.func.grad(logits)(z[0], memory[0]), want)
    push = torch.ones_like(z[0])
    _, slope = torch.func.jvp(lambda z: logits(z, memory[0]), (z[0],), (push,))
    torch.testing.assert_close(slope, want.sum())


METRIC_TERMS = ("metric_reg", "metric_diversity", "factor_floor", "factor_target", "condition")


def weighted(term):
    more = {"metric_diversity": {"metric_reg": 1.0}, "condition": {"condition_target": 1.0}}
    return LossWeights(**{term: 0.5, **more.get(term, {})})


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("term", METRIC_TERMS)
def test_a_term_of_a_metric_that_nothing_uses_and_trains(term, path):
    """It would push states about. With a metric that is unfrozen it trains that; without gradients it is measured."""
    model, (tokens, targets) = build("J_NO_NATURALIZATION", path), text()

    def loss():
        return drm_loss(model(tokens, trace=True), targets, model.config, weighted(term))

    with pytest.raises(
        ValueError, match=rf"(metric_reg|{term}): got .* where the metric is frozen"
    ):
        loss()
    with torch.no_grad():
        assert loss().terms[term].isfinite()
    model.dynamics.metric.requires_grad_(True)
    loss().total.backward()
    grads = [p.grad for p in model.dynamics.metric.parameters()]
    assert all(g is not None for g in grads)
    if not term.startswith("factor_floor"):  # 0 where the norm is above the floor
        assert any(bool(g.any()) for g in grads)


def test_a_frozen_metric_that_is_used_can_be_measured():
    """Its terms move states to where it is, say, well conditioned."""
    model, (tokens, targets) = build("J"), text()
    model.dynamics.metric.requires_grad_(False)
    out = model(tokens, trace=True)
    drm_loss(out, targets, model.config, weighted("metric_reg")).total.backward()


def test_a_term_that_depends_on_nothing_that_is_trained():
    """The geometry of a single block, at a given state, of a part that is frozen."""
    model, (tokens, targets) = build("J", block_length=16), text()
    model.dynamics.direction.requires_grad_(False)
    out = model(tokens, model.initial_state(2).detach(), trace=True)
    with pytest.raises(
        ValueError, match="dim_sparsity: got a weight for a term that depends on no"
    ):
        drm_loss(out, targets, model.config, LossWeights(dim_sparsity=0.1))
    drm_loss(out, targets, model.config, LossWeights(action=0.1)).total.backward()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("cut", [3, 4, 6])
def test_reading_on_after_an_update(path, cut):
    """As from a state, at any token: within a block, at its end, and with what a block keeps."""
    model = build("J", path, risk="enabled")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens, targets = text(8)

    def update(stream, part):
        optimizer.zero_grad()
        logits, after = read(model, tokens[:, part], stream)
        cross_entropy(logits, targets[:, part]).backward()
        optimizer.step()
        return after

    after = update(None, slice(0, cut))
    with pytest.raises(RuntimeError, match=r"go on from its detach\(\)"):
        update(after, slice(cut, 8))
    apart = after.detach()
    assert torch.equal(apart.reached, after.reached)
    update(apart, slice(cut, 8))
    assert model.initializer.z0.grad is None or not model.initializer.z0.grad.any()


def test_a_compiled_call_gives_idle_parameters_zeros():
    """And the numbers of the call that is not compiled."""
    sizes = {"vocab_size": 5, "d_token": 3, "d_state": 4, "hidden_size": 4, "n_directions": 2}
    model = DRM(DRMConfig(**sizes, metric_rank=1, naturalization_warmup=3, block_length=4))
    tokens = torch.arange(8).remainder(5).reshape(2, 4)
    state = model.initial_state(2).detach()
    found = []
    for called in (torch.compile(model, fullgraph=True, backend="aot_eager"), model):
        model.zero_grad()
        logits = called(tokens, state, step=0).logits
        logits.square().sum().backward()
        found.append([logits, *(p.grad for p in model.parameters())])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)
    assert not model.initializer.z0.grad.any()
    assert not any(p.grad.any() for p in model.dynamics.metric.parameters())
