"""The whole model: what it is made of, causality, streaming, equalities between variants."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from pararnn.drm import DRM, DRMConfig, DRMState, bound_state
from pararnn.drm.streams import stream

SIZES = {
    "vocab_size": 13,
    "d_state": 7,
    "d_token": 5,
    "hidden_size": 9,
    "n_directions": 4,
    "metric_rank": 3,
    "block_length": 4,
    "dt": 0.4,
    "state_radius": 2.0,
    "mixer_hidden": 6,
    "mixer_kernel": 3,
    "mixer_layers": 2,
    "memory_hidden": 5,
}
ALL = {"mixer": True, "token_residual": True, "memory": True}
NO_METRIC = {"metric": False, "naturalization_strength": 0.0}
MODELS = {
    "base": {},
    "all": ALL,
    "recurrent": {"path": "recurrent"},
    "recurrent, all": {**ALL, "path": "recurrent"},
    "parallel": {"path": "parallel", "parallel_window": 6},
    "parallel, all": {**ALL, "path": "parallel", "parallel_tolerance": 1e-14},
    "no metric": {**ALL, **NO_METRIC},
    "no naturalization": {**ALL, "naturalization_strength": 0.0},
    "direct": {**ALL, "transition": "direct"},
    "direct, no metric": {**ALL, "transition": "direct", **NO_METRIC},
    "none": {**ALL, "transition": "none", **NO_METRIC},
    "subspace": {**ALL, "naturalization_form": "subspace"},
    "orthonormal": {**ALL, "naturalization_form": "orthonormal"},
    "refined": {**ALL, "refinement_layers": 2},
    "risk": {**ALL, "risk": "enabled"},
    "bases": {**ALL, "direction_basis": 3, "metric_basis": 3},
    "dilated": {**ALL, "mixer_dilation_growth": 2},
    "whole": {**ALL, "block_length": 0},
}
every_model = pytest.mark.parametrize("name", MODELS)
both = pytest.mark.parametrize("published", [False, True], ids=["notes", "published"])


def model(published=False, **changes):
    config = DRMConfig(**{**SIZES, **changes})
    return DRM(config.published() if published else config)


def tokens(*shape, seed=0):
    return torch.randint(13, shape, generator=torch.Generator().manual_seed(seed))


@every_model
@both
def test_causal(name, published):
    """Exact: another end leaves the beginning its bits."""
    module, x = model(published, **MODELS[name]).eval(), tokens(2, 11)
    want = module(x).logits
    assert want.shape == (2, 11, 13)
    for t in range(11):
        other = x.clone()
        other[:, t:] = (other[:, t:] + tokens(2, 11 - t, seed=1) % 12 + 1) % 13
        found = module(other).logits
        assert torch.equal(found[:, :t], want[:, :t])
        assert not torch.equal(found[:, t], want[:, t])


@every_model
@both
def test_taken_up_between_blocks(name, published):
    module, x = model(published, **MODELS[name]).double().eval(), tokens(2, 11)
    whole = module(x)
    length = module.config.block_length
    if not length:
        pytest.skip("the whole sequence is one block")
    parts = [module(x[:, :length])]
    parts += [module(x[:, length:8], parts[-1].state)]
    parts += [module(x[:, 8:], parts[-1].state)]
    found = torch.cat([p.logits for p in parts], 1)
    torch.testing.assert_close(found, whole.logits, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(parts[-1].state.z, whole.state.z, rtol=1e-12, atol=1e-13)


@every_model
@both
def test_learns(name, published):
    """Every parameter gets a finite gradient, but those that nothing looks at."""
    module, x = model(published, **MODELS[name]), tokens(3, 11)
    logits = module(x[:, :-1], step=500).logits
    F.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten()).backward()
    unused = [".metric."] if name == "no naturalization" else []
    if not module.config.corrected:
        unused += ["mixer.", "residual.", "memory."]
    for what, p in module.named_parameters():
        if any(part in what for part in unused):
            assert p.grad is None
        else:
            assert p.grad is not None, what
            assert p.grad.isfinite().all(), what


def test_risk_reaches_the_mixer():
    module = model(**{**ALL, "risk": "enabled"})
    module(tokens(2, 5)).logits.sum().backward()
    assert module.dynamics.risk.outer.weight.grad.abs().max() > 0


@both
def test_composition(published):
    """The corrections in the order of the notes, from the parts themselves."""
    module = model(published, **ALL).double().eval()
    x = tokens(2, 6)
    found = module(x)
    e = module.embedding.table.weight[x]
    radius = 2.0 if published else None
    z, m, states = module.initializer.z0.expand(2, -1), torch.zeros(2, 7).double(), []
    for piece in (e[:, :4], e[:, 4:]):
        field, g = module.dynamics.direction(z), module.dynamics.metric(z)
        raw = field.velocity(module.dynamics.flow(z, piece))
        wide = g.dense() + 0.3 * torch.eye(7, dtype=torch.float64)
        v = 0.5 * raw + 0.5 * torch.linalg.solve(wide, raw.mT).mT
        steps = 0.4 * v
        if published:
            steps = bound_state(z[:, None] + steps, 2.0) - z[:, None]
        base = bound_state(z[:, None] + steps.cumsum(1), 2.0)
        mass = field.gates.sum(-1)[:, None].expand(-1, piece.shape[1])
        mixed = bound_state(module.mixer(base, z, steps, piece, mass), radius)
        moved = bound_state(mixed + 0.1 * piece @ module.residual.proj.weight.mT, radius)
        memories, last = module.memory(moved, z, piece, z if published else m)
        states.append(bound_state(moved + 0.1 * memories, radius))
        z, m = (states[-1] if published else base)[:, -1], last
    torch.testing.assert_close(found.states, torch.cat(states, 1))
    torch.testing.assert_close(found.state.z, z)
    assert (found.state.memory is None) == published
    torch.testing.assert_close(found.logits, module.emitter(torch.cat(states, 1)))


@pytest.mark.parametrize("path", ["recurrent", "parallel"])
@pytest.mark.parametrize("extra", [{}, {"refinement_layers": 1}])
def test_corrections_that_do_not_act(path, extra):
    """The published recurrent path: mixer, residual, memory and refinement are there, unused."""
    there = DRM(model(True, **ALL, **extra).config.changed(path=path)).double().eval()
    absent = model(True, path=path).double().eval()
    x = tokens(2, 11)
    found, want = there(x), absent(x)
    assert torch.equal(found.logits, want.logits)
    assert torch.equal(found.states, found.base)
    assert found.state.memory is None
    assert len(list(there.parameters())) > len(list(absent.parameters()))
    if not extra:
        acting = there.config.changed(recurrent_corrections=True, block_carry="base")
        assert not torch.equal(DRM(acting).double().eval()(x).logits, found.logits)
    found.logits.sum().backward()
    for part in (there.mixer, there.residual, there.memory, there.refinement):
        assert all(p.grad is None for p in part.parameters())


@pytest.mark.parametrize("corrections", [{}, ALL])
def test_blocks_of_one_token(corrections):
    """Base states of the recurrent path, bit for bit."""
    x = tokens(3, 9)
    block = model(**corrections, block_length=1)(x)
    recurrent = model(**corrections, path="recurrent")(x)
    assert torch.equal(block.base, recurrent.base)
    if not corrections:
        assert torch.equal(block.logits, recurrent.logits)


def trained(changes, dtype, published):
    """Logits before and during a few steps of an optimizer without weight decay."""
    torch.manual_seed(0)
    module = model(published, **{**ALL, **changes}).to(dtype)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, weight_decay=0.0)
    seen = []
    for step in range(4):
        x = tokens(3, 11, seed=step)
        logits = module(x[:, :-1], step=step).logits
        seen.append(logits.detach().clone())
        optimizer.zero_grad()
        F.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten()).backward()
        optimizer.step()
    return seen


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_naturalization_is_no_metric(dtype, published):
    """Bit for bit, and so through training: the metric acts through naturalization only."""
    without = trained(NO_METRIC, dtype, published)
    unused = trained({"naturalization_strength": 0.0}, dtype, published)
    for a, b in zip(without, unused, strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(without[-1], trained({}, dtype, published)[-1])


def test_recording_changes_nothing():
    for changes in (ALL, {**ALL, "naturalization_strength": 0.0}):
        module, x = model(**changes), tokens(2, 10)
        plain, traced = module(x), module(x, trace=True)
        assert torch.equal(plain.logits, traced.logits)
        assert traced.trace.steps.tolist() == [4, 4, 2]
        assert traced.trace.velocity.shape == (2, 10, 7)
        assert traced.trace.gates.shape == (2, 3, 4)
        assert traced.trace.diagonal.shape == (2, 3, 7)
        assert traced.trace.factor.shape == (2, 3, 7, 3)
        with pytest.raises(ValueError, match="call the model with trace=True"):
            plain.trace  # noqa: B018
    still = model(**MODELS["none"])(tokens(2, 10), trace=True).trace
    assert still.velocity is None
    assert still.gates is None


def test_shared_parts_start_alike():
    """Whatever else a model has, and whatever was drawn before."""
    every = model(**ALL, risk="enabled").state_dict()
    torch.manual_seed(99)
    for changes in ({}, NO_METRIC, {"transition": "direct"}, {"memory": True}):
        for what, value in model(**changes).state_dict().items():
            if what in every:
                assert torch.equal(value, every[what])
    other = model(seed=1).state_dict()
    assert not torch.equal(other["initializer.z0"], every["initializer.z0"])
    refined = model(refinement_layers=2)
    weights = [
        d.direction.trunk[0].weight
        for d in (refined.dynamics, *(layer.dynamics for layer in refined.refinement))
    ]
    assert len({w.sum().item() for w in weights}) == 3


def test_the_global_generator_is_left_alone():
    torch.manual_seed(5)
    want = torch.rand(3)
    torch.manual_seed(5)
    with stream(0, "metric"):
        torch.rand(7)
    model(**ALL)
    assert torch.equal(torch.rand(3), want)


def test_disabled_risk_is_unused():
    absent, disabled = model(**ALL), model(**ALL, risk="disabled")
    x = tokens(2, 9)
    assert torch.equal(absent(x).logits, disabled(x).logits)
    sizes = [sum(p.numel() for p in m.parameters()) for m in (absent, disabled)]
    assert sizes[1] - sizes[0] == (7 + 1) * 9 + 2 * (9 + 1) + 4


def test_strength_follows_the_step():
    module, x = model(naturalization_warmup=10), tokens(2, 9)
    full, none = model(), model(naturalization_strength=0.0)
    fifth = model(naturalization_strength=0.1)
    with pytest.raises(ValueError, match="step: got None in training"):
        module(x)
    assert torch.equal(module(x, step=0).logits, none(x).logits)
    assert torch.equal(module(x, step=2).logits, fifth(x).logits)
    assert torch.equal(module.eval()(x).logits, fifth(x).logits)  # the last training step
    copy = model(naturalization_warmup=10).eval()
    assert torch.equal(copy(x).logits, full(x).logits)  # never trained
    copy.load_state_dict(module.state_dict())
    assert torch.equal(copy(x).logits, fifth(x).logits)
    late = model(naturalization_warmup=10, evaluation_strength="maximum")
    late(x, step=2)
    assert torch.equal(late.eval()(x).logits, full(x).logits)


def test_empty():
    for changes in MODELS.values():
        module = model(**changes)
        for shape in ((2, 0), (0, 5), (0, 0)):
            assert module(tokens(*shape), trace=True).logits.shape == (*shape, 13)


@pytest.mark.parametrize("zero", [False, True], ids=["drawn", "no directions"])
def test_padding_and_zero_directions_in_half_precision(zero):
    """Corrections of a block that is filled up with zeros, and rows without a norm."""
    module = model(token_residual=True, bound_corrections=True, block_length=8).half()
    if zero:
        with torch.no_grad():
            for p in module.dynamics.direction.heads.parameters():
                p.zero_()
    logits = module(tokens(2, 13)).logits
    assert logits.isfinite().all()
    logits.float().logsumexp(-1).mean().backward()
    assert all(p.grad.isfinite().all() for p in module.parameters() if p.grad is not None)


def test_half_precision():
    module = model(**ALL).bfloat16()
    out = module(tokens(2, 9))
    assert out.logits.dtype == torch.bfloat16
    assert out.logits.isfinite().all()
    with torch.autocast("cpu", torch.bfloat16):
        assert model(**ALL)(tokens(2, 9)).logits.isfinite().all()


def test_errors():
    module = model(**ALL)
    with pytest.raises(TypeError, match="config: got dict, expected a DRMConfig"):
        DRM({})
    with pytest.raises(ValueError, match="tokens: got values from 13 to 13, expected 0 to 12"):
        module(torch.full((1, 2), 13))
    with pytest.raises(TypeError, match=r"tokens: got torch.float32"):
        module(torch.zeros(1, 2))
    with pytest.raises(ValueError, match=r"tokens: got shape \(3,\), expected \(B, T\)"):
        module(tokens(3))
    with pytest.raises(ValueError, match=r"state\.z: got shape \(1, 7\), expected \(2, 7\)"):
        module(tokens(2, 3), module.initial_state(1))
    with pytest.raises(TypeError, match="state: got Tensor, expected a DRMState"):
        module(tokens(2, 3), torch.zeros(2, 7))
    with pytest.raises(ValueError, match=r"state\.memory: got None, expected a tensor"):
        module(tokens(2, 3), DRMState(torch.zeros(2, 7)))
    with pytest.raises(ValueError, match="step: got -1"):
        module(tokens(2, 3), step=-1)


@pytest.mark.parametrize("own", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("other", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_state_of_another_dtype(own, other):
    """Both of its tensors are of the model's dtype, a memory in float32 at least."""
    module = model(**ALL).to(own)
    start = module.initial_state(2)
    wide = torch.promote_types(own, torch.float32)
    assert (start.z.dtype, start.memory.dtype) == (own, wide)
    x = tokens(2, 3)
    if other == own:
        assert torch.equal(module(x, start).logits, module(x).logits)
    else:
        with pytest.raises(TypeError, match=rf"state\.z: got {other}, expected {own} of a model"):
            module(x, DRMState(start.z.to(other), start.memory))
    if other != wide:
        with pytest.raises(TypeError, match=rf"state\.memory: got {other}, expected {wide} of a"):
            module(x, DRMState(start.z, start.memory.to(other)))


@pytest.mark.parametrize("path", ["block", "recurrent", "parallel"])
@pytest.mark.parametrize(
    ("changes", "dtype", "name"),
    [
        ({"state_radius": 1e-7}, torch.float16, "bound_state: radius: got 1e-07"),
        ({"state_radius": 1e5}, torch.float16, "bound_state: radius: got 100000.0"),
        ({"dt": 1e-7}, torch.float16, "dt: got 1e-07"),
        ({"dt": 1e5}, torch.float16, "dt: got 100000.0"),
        ({"metric_eps": 1e-7}, torch.float16, "metric_eps: got 1e-07"),
        ({"metric_eps": 1e5}, torch.float16, "metric_eps: got 100000.0"),
    ],
    ids=str,
)
def test_numbers_that_a_dtype_does_not_have(changes, dtype, name, path):
    module, x = model(**changes, path=path).to(dtype), tokens(2, 5)
    with pytest.raises(ValueError, match=f"{name}, expected a finite number > 0 that {dtype} has"):
        module(x)
    assert model(**changes, path=path)(x).logits.isfinite().all()


def test_no_attention():
    names = [n for n, _ in model(**ALL).named_modules()]
    assert not any(word in n for n in names for word in ("attn", "attention", "q_proj", "k_proj"))


def test_refinement():
    """Each layer at the previous position of what comes in."""
    module = model(**MODELS["refined"]).double().eval()
    g = torch.Generator().manual_seed(0)
    states, start, e = (
        torch.randn(shape, generator=g, dtype=torch.float64)
        for shape in ((2, 5, 7), (2, 7), (2, 5, 5))
    )
    for layer in module.refinement:
        found, d = layer(states, start, e, 0.4), layer.dynamics
        for t in range(5):
            before = start if t == 0 else states[:, t - 1]
            v = d.velocity(d.geometry(before), before, e[:, t : t + 1], 0.4)[:, 0]
            torch.testing.assert_close(found[:, t], states[:, t] + 0.1 * 0.4 * v)
