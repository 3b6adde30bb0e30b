"""Prefill and decode against the whole forward, and drawing of tokens."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from pararnn.drm.generation import generate, read, start_stream
from pararnn.drm.model import DRM
from pararnn.drm.variants import TINY, VARIANTS, variant

CUTS = [(11,), (1,) * 11, (4, 4, 3), (3, 5, 3), (5, 0, 6), (0, 1, 10)]
V = TINY["vocab_size"]
RECURRENT = {
    "path": "recurrent",
    "geometry_interval": 1,
    "refinement_layers": 0,
    "block_carry": "base",
}
NO_METRIC = {"metric": False, "naturalization_strength": 0.0}
BARE = {"mixer": False, "memory": False}  # nothing starts with a block


def build(name="J", published=False, **changes):
    config = variant(name).config(**TINY, seed=3)
    config = config.published().changed(naturalization_warmup=0) if published else config
    return DRM(config.changed(**changes)).double().eval()


def text(batch, length, seed=0):
    return torch.randint(V, (batch, length), generator=torch.Generator().manual_seed(seed))


def in_pieces(model, tokens, sizes):
    stream, out, at = None, [], 0
    for size in sizes:
        logits, stream = read(model, tokens[:, at : at + size], stream)
        out.append(logits)
        at += size
    return torch.cat(out, 1), stream


@pytest.mark.parametrize("sizes", CUTS, ids=str)
@pytest.mark.parametrize("published", [False, True], ids=["notes", "published"])
@pytest.mark.parametrize("name", VARIANTS)
def test_pieces_are_the_whole(name, published, sizes):
    model, tokens = build(name, published), text(2, 11)
    with torch.no_grad():
        want = model(tokens)
        got, stream = in_pieces(model, tokens, sizes)
    torch.testing.assert_close(got, want.logits, rtol=1e-11, atol=1e-12)
    assert stream.length == 11


@pytest.mark.parametrize("sizes", CUTS, ids=str)
@pytest.mark.parametrize(
    "changes",
    [
        RECURRENT,
        {**RECURRENT, "geometry_interval": 2},
        {**RECURRENT, **BARE, "geometry_interval": 6, "flow_steps": 4, "block_length": 5},
        {**RECURRENT, "path": "parallel", "truncation": 0},
        {**RECURRENT, "flow_steps": 2, "geometry_interval": 4},
        {**RECURRENT, "geometry_interval": 3},
        {**RECURRENT, "geometry_interval": 5, "flow_steps": 3, "block_length": 2},
        {**RECURRENT, "recurrent_corrections": False, "geometry_interval": 3},
        {"path": "parallel", "recurrent_corrections": False, "refinement_layers": 1},
        {"refinement_layers": 2, "block_carry": "final"},
        {"refinement_layers": 1, "block_length": 0, "memory_start": "block_state"},
        {"mixer_layers": 3, "mixer_dilation_growth": 2, "risk": "enabled", "block_length": 7},
        {"mixer_kernel": 1},
        {"block_length": 0},
        {**RECURRENT, "block_length": 0, "geometry_interval": 3},
        {"block_length": 1},
        {"block_length": 64},
    ],
    ids=str,
)
def test_pieces_are_the_whole_on_every_path(changes, sizes):
    model, tokens = build("J", **changes), text(2, 11)
    with torch.no_grad():
        got, _ = in_pieces(model, tokens, sizes)
        torch.testing.assert_close(got, model(tokens).logits, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_long_block_in_half_precision(dtype):
    """Token by token the sum of a block is as good as at once: it is kept in float32."""
    exact, tokens = build("J", **BARE, block_length=0, dt=0.3), text(2, 150)
    half = build("J", **BARE, block_length=0, dt=0.3).to(dtype)
    with torch.no_grad():
        want = exact(tokens).base
        decoded, stream = in_pieces(half, tokens, (1,) * 150)
        at_once = half(tokens)
    torch.testing.assert_close(decoded, at_once.logits, rtol=0, atol=4 * torch.finfo(dtype).eps)
    off = (stream.before.base.double() - want[:, -1]).abs().max()
    assert off < 1.5 * (at_once.base[:, -1].double() - want[:, -1]).abs().max() + 1e-6


def test_a_stream_can_be_used_twice():
    model, tokens = build(), text(2, 9)
    with torch.no_grad():
        _, stream = read(model, tokens[:, :6])
        first, _ = read(model, tokens[:, 6:], stream)
        second, _ = read(model, tokens[:, 6:], stream)
    assert torch.equal(first, second)


def numbers(value):
    """How many a stream holds, of each tensor in it."""
    if isinstance(value, torch.Tensor):
        return [value.numel()]
    if dataclasses.is_dataclass(value):
        value = [getattr(value, f.name) for f in dataclasses.fields(value)]
    return [n for item in value for n in numbers(item)] if isinstance(value, list | tuple) else []


def work(model, stream, count):
    """Multiplications of each of the next tokens, read one by one, and the sizes of the streams."""
    flops, sizes = [], []
    for t in range(count):
        with FlopCounterMode(display=False) as counter:
            _, stream = read(model, text(1, 1, seed=t), stream)
        flops.append(counter.get_total_flops())
        sizes.append(sum(numbers(stream)))
    return flops, sizes


FLAT = {"block_length": 0}
DECODERS = {
    "block": FLAT,
    "block, base alone": {**FLAT, **BARE},
    "block, refined": {**FLAT, "refinement_layers": 2},
    "block, published": {**FLAT, "block_carry": "final", "memory_start": "block_state"},
    "block, no base": {**FLAT, "transition": "none", **NO_METRIC},
    "recurrent": {**RECURRENT, **FLAT},
    "recurrent, base alone": {**RECURRENT, **FLAT, **BARE},
    "parallel": {**RECURRENT, **FLAT, "path": "parallel"},
}


@pytest.mark.parametrize("name", DECODERS)
def test_a_token_costs_the_same_after_any_prefix(name):
    """In a block that never ends: work and size after 20 tokens are those after 5 and after 70."""
    model = build("J", **DECODERS[name]).requires_grad_(False)
    found = []
    for prefix in (20, 5, 70):
        _, stream = read(model, text(1, prefix))
        found.append((sum(numbers(stream)), *work(model, stream, 3)))
    assert found[0] == found[1] == found[2]
    read_at_once, flops, sizes = found[0]
    assert read_at_once == sizes[0]
    assert len(set(flops)) == len(set(sizes)) == 1
    with FlopCounterMode(display=False) as counter:
        model(text(1, 20))
    assert flops[0] < counter.get_total_flops() / 10


@pytest.mark.parametrize("changes", [{}, RECURRENT, {"block_carry": "final"}], ids=str)
def test_work_of_a_token_is_periodic(changes):
    """Blocks of 4: no token costs more than the first of a block, which evaluates its geometry."""
    flops, sizes = work(build("J", **changes).requires_grad_(False), None, 16)
    assert flops[4:8] == flops[8:12] == flops[12:]
    assert sizes[4:8] == sizes[8:12] == sizes[12:]
    assert max(flops) == flops[0]
    if changes != RECURRENT:
        assert flops[1] == flops[2] == flops[3] < flops[0]


@pytest.mark.parametrize("changes", [{}, RECURRENT], ids=["block", "recurrent"])
def test_greedy_is_the_argmax_of_the_whole_forward(changes):
    model, prompt = build("J", **changes), text(2, 5)
    drawn = generate(model, prompt, 9, temperature=0)
    with torch.no_grad():
        logits = model(torch.cat([prompt, drawn], 1)).logits
    assert torch.equal(logits[:, 4:-1].argmax(-1), drawn)


def test_drawing_is_reproducible_and_leaves_the_model_alone():
    model, prompt = build().train(), text(3, 4)
    once = generate(model, prompt, 8, generator=torch.Generator().manual_seed(1))
    again = generate(model, prompt, 8, generator=torch.Generator().manual_seed(1))
    other = generate(model, prompt, 8, generator=torch.Generator().manual_seed(2))
    assert torch.equal(once, again)
    assert not torch.equal(once, other)
    assert once.shape == (3, 8)
    assert once.dtype == torch.int64
    assert model.training
    assert all(p.grad is None for p in model.parameters())


def test_frequencies_follow_the_distribution():
    model = build()
    prompt = text(1, 3).expand(4000, 3)
    with torch.no_grad():
        p = (model(prompt[:1]).logits[0, -1] / 0.5).softmax(-1)
    g = torch.Generator().manual_seed(0)
    drawn = generate(model, prompt, 1, temperature=0.5, generator=g)
    frequency = torch.bincount(drawn.flatten(), minlength=V) / 4000
    assert ((frequency - p).abs() < 5 * (p * (1 - p) / 4000).sqrt() + 1e-3).all()


def test_top_k():
    model, prompt = build(), text(1, 3).expand(500, 3)
    with torch.no_grad():
        best = model(prompt[:1]).logits[0, -1].topk(3).indices
    g = torch.Generator().manual_seed(0)
    drawn = generate(model, prompt, 1, temperature=5.0, top_k=3, generator=g)
    assert set(drawn.flatten().tolist()) == set(best.tolist())
    one = generate(model, prompt[:1], 6, top_k=1)
    assert torch.equal(one, generate(model, prompt[:1], 6, temperature=0))


@pytest.mark.parametrize("temperature", [1e-30, 1e-310])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_tiny_temperature_is_greedy(temperature, dtype):
    model, prompt = build().to(dtype), text(2, 3)
    drawn = generate(model, prompt, 5, temperature=temperature)
    assert torch.equal(drawn, generate(model, prompt, 5, temperature=0))


def test_nothing_to_draw():
    assert generate(build(), text(2, 3), 0).shape == (2, 0)


def test_reading_nothing():
    logits, stream = read(build(), text(2, 0))
    assert logits.shape == (2, 0, V)
    assert stream.length == 0


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"prompt": text(2, 0)}, "prompt"),
        ({"prompt": text(2, 3)[0]}, "prompt"),
        ({"length": -1}, "length"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"top_k": V + 1}, "top_k"),
    ],
)
def test_bad_requests(changes, match):
    arguments = {"prompt": text(2, 3), "length": 2, **changes}
    with pytest.raises(ValueError, match=match):
        generate(build(), **arguments)


def test_streams_and_tokens_that_do_not_fit():
    model = build()
    with pytest.raises(ValueError, match="rows"):
        read(model, text(3, 2), start_stream(model, 2))
    with pytest.raises(TypeError, match="integers"):
        read(model, text(2, 2).double())
    with pytest.raises(ValueError, match="shape"):
        read(model, text(2, 2)[0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("abc", 2), "prompt: got str, expected an integer tensor"),
        ((torch.zeros(1, 3), 2), "prompt: got torch.float32, expected integers"),
        ((text(1, 3), 2.0), "length: got 2.0"),
        ((text(1, 3), True), "length: got True"),
        ((text(1, 3), 2, "0"), "temperature: got '0'"),
        ((text(1, 3), 2, 1.0, 2.0), "top_k: got 2.0"),
    ],
)
def test_arguments_of_another_type(arguments, message):
    prompt, length, *rest = arguments
    with pytest.raises(TypeError, match=message):
        generate(build(), prompt, length, **dict(zip(("temperature", "top_k"), rest, strict=False)))


@pytest.mark.parametrize(
    "changes",
    [
        {"d_state": 8},
        {"memory": False},
        {"mixer_layers": 3},
        {"mixer": False},
        {"refinement_layers": 1},
    ],
    ids=str,
)
def test_streams_of_another_model(changes):
    _, stream = read(build(), text(2, 6))
    with pytest.raises(ValueError, match="stream: got that of a model of another width or"):
        read(build(**changes), text(2, 1), stream)
    if "mixer" not in changes and "mixer_layers" not in changes:
        with pytest.raises(ValueError, match="stream: got that of"):
            read(build(), text(2, 1), start_stream(build(**changes), 2))


def test_streams_of_another_type():
    with pytest.raises(TypeError, match="stream: got int, expected a Stream"):
        read(build(), text(1, 3), 3)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("when", [1, 3])
def test_logits_that_are_not_finite(value, temperature, when):
    """By the first token if a parameter is broken, later if a token that was drawn breaks them."""
    model, calls = build(), []
    if when == 1:
        with torch.no_grad():
            model.initializer.z0[2] = math.nan
    else:
        model.emitter.register_forward_hook(
            lambda module, args, out: calls.append(1) or (out if len(calls) < when else out * value)
        )
    with pytest.raises(
        ValueError, match=f"generate: got logits that are not finite by token {when - 1}"
    ):
        generate(model, text(2, 3), 5, temperature=temperature)
