"""Stacks of every mixer: step by step, in chunks and whole; gradients; compiled, exported, mapped."""

from __future__ import annotations

import copy
import inspect
import warnings

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

from pararnn import MinGRUBlock, MinGRUStack
from pararnn.layers import MIXERS

SETTINGS = {"givens": {"block_size": 4}, "delta": {"n_heads": 2, "chunk_size": 4}}
FREE = {"rotation": {"snap": None}}  # where small changes must have small effects
DECAYS = {
    "none": {},
    "fixed": {"decay": "fixed", "decay_rate": 0.7},
    "learnable": {"decay": "learnable", "decay_rate": 0.3, "log1p_delta": True},
}
every_mixer = pytest.mark.parametrize("mixer", MIXERS)
every_decay = pytest.mark.parametrize("decay", DECAYS)
EXACT = {"rtol": 1e-11, "atol": 1e-12}


def make(mixer, decay="none", n_layers=2, input_size=5, dtype=torch.float64, free=False, **kwargs):
    torch.manual_seed(0)
    settings = SETTINGS.get(mixer, {}) | DECAYS[decay] | (FREE.get(mixer, {}) if free else {})
    stack = MinGRUStack(
        input_size, 8, n_layers, mixer=mixer, mixer_kwargs=settings, dtype=dtype, **kwargs
    )
    with torch.no_grad():
        for p in stack.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return stack


def inputs(decay="none", batch=3, length=11, width=5, dtype=torch.float64):
    """Input, and time gaps as keyword arguments."""
    g = torch.Generator().manual_seed(1)
    x = torch.randn(batch, length, width, generator=g, dtype=dtype)
    gaps = 3 * torch.rand(batch, length, generator=g, dtype=dtype)
    gaps[:, 1::4] = 0
    return x, {} if decay == "none" else {"delta_t": gaps}


def cut(timed, *index):
    return {key: value[index] for key, value in timed.items()}


def streamed(stack, x, state, timed):
    outputs = []
    for t in range(x.shape[1]):
        y, state = stack.step(x[:, t], state, **cut(timed, slice(None), t))
        outputs.append(y)
    return torch.stack(outputs, 1), state


def positive_states(stack, batch=3):
    """States that no mixer starts from, and that every mixer takes."""
    g = torch.Generator().manual_seed(2)
    return [
        torch.rand(s.shape, generator=g, dtype=torch.float64).to(s.dtype) + 0.1
        for s in stack.init_state(batch)
    ]


@pytest.fixture(autouse=True)
def quiet(recwarn):
    """Two blocks with rotations warn; that is tested elsewhere."""


# -- whole, in chunks, step by step ----------------------------------------------------------------


@every_mixer
@every_decay
@pytest.mark.parametrize("carried", [False, True])
def test_streaming_and_chunks(mixer, decay, carried):
    stack, (x, timed) = make(mixer, decay), inputs(decay)
    start = positive_states(stack) if carried else None
    whole, last = stack(x, start, **timed)
    assert [s.shape[:2] for s in last] == [(3, 1)] * 2
    steps, final = streamed(stack, x, start, timed)
    torch.testing.assert_close(steps, whole, **EXACT)
    torch.testing.assert_close([h.unsqueeze(1) for h in final], last, **EXACT)
    for sizes in ((1, 0, 6, 4), (0, 5, 0, 6), (10, 1)):
        state, parts, first = start, [], 0
        for size in sizes:
            piece = slice(first, first + size)
            y, state = stack(x[:, piece], state, **cut(timed, slice(None), piece))
            assert y.shape == (3, size, 8)
            parts.append(y)
            first += size
        torch.testing.assert_close(torch.cat(parts, 1), whole, **EXACT)
        torch.testing.assert_close(state, last, **EXACT)


@every_mixer
def test_a_start_given_is_the_start_taken(mixer):
    stack, (x, _) = make(mixer, learnable_h0=MIXERS[mixer].learnable_h0), inputs()
    default, _ = stack(x)
    given, _ = stack(x, stack.init_state(3))
    torch.testing.assert_close(given, default, rtol=0, atol=0)
    other, _ = stack(x, positive_states(stack))
    assert not torch.allclose(other, default)
    empty, state = stack(x[:, :0])  # an empty first chunk: the carry is the start
    assert empty.shape == (3, 0, 8)
    torch.testing.assert_close(state, stack.init_state(3), rtol=0, atol=0)


@every_mixer
@every_decay
def test_gradients_of_steps_are_those_of_the_whole(mixer, decay):
    stack, (x, timed) = make(mixer, decay, learnable_h0=MIXERS[mixer].learnable_h0), inputs(decay)
    x.requires_grad_()
    start = [s.requires_grad_() for s in positive_states(stack)]
    weight = torch.randn(3, 11, 8, generator=torch.Generator().manual_seed(3)).double()

    def gradients(run, start):
        y, state = run(stack, x, start, timed)
        loss = (weight * y).sum() + sum((h.flatten() ** 3).sum() for h in state)
        leaves = [x, *(start or ()), *timed.values(), *stack.parameters()]
        return torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)

    for gap in timed.values():
        gap.requires_grad_()
    for state in (start, None):
        whole = gradients(lambda s, x, h, t: s(x, h, **t), state)
        steps = gradients(streamed, state)
        torch.testing.assert_close(steps, whole, rtol=1e-9, atol=1e-11)
    parameters = dict(stack.named_parameters())
    of_parameters = dict(zip(parameters, whole[-len(parameters) :], strict=True))
    silent = [name for name, g in of_parameters.items() if not g.any()]
    assert silent == []


@every_mixer
@every_decay
def test_numbers_of_gradients(mixer, decay):
    stack, (x, timed) = make(mixer, decay, 1, 8, free=True), inputs(decay, 2, 5, 8)
    block = stack.blocks[0]
    x.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x, *gaps: block(x, None, *gaps), (x, *timed.values()), fast_mode=True
    )


@every_mixer
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_carries_wide_states(mixer, dtype):
    """Cutting a sequence does not round: each block gives the same bits."""
    block = MinGRUBlock(8, mixer=mixer, mixer_kwargs=SETTINGS.get(mixer), dtype=dtype)
    x = torch.randn(3, 12, 8).to(dtype)
    whole, last = block(x)
    assert whole.dtype == dtype
    assert last.dtype == torch.float32
    first, state = block(x[:, :5])
    second, final = block(x[:, 5:], state)
    torch.testing.assert_close(final, last, rtol=1e-5, atol=1e-5)
    cutting = (torch.cat((first, second), 1).double() - whole.double()).abs().max()
    assert cutting <= 2 * torch.finfo(dtype).eps * whole.abs().max()


# -- strict states -------------------------------------------------------------------------------


@every_mixer
def test_states_of_another_shape_are_refused(mixer):
    stack, (x, _) = make(mixer), inputs()
    good = [h.detach() for h in stack(x)[1]]
    width = good[0].shape[-1]
    wrong = [(1, 1, width), (4, 1, width), (3, 2, width), (3, 1, 1), (3, 1, width + 1), (width,),
             (1, 3, width), (3, width, 1), (1, width), ()]  # fmt: skip
    for shape in wrong:
        bad = [good[0], torch.ones(shape, dtype=torch.float64)]
        for call, data in ((stack, x), (stack, x[:, :0]), (stack.step, x[:, 0])):
            with pytest.raises(ValueError, match="got shape"):
                call(data, bad)
    for bad, error in (
        (good[1].long(), TypeError),
        (good[1].float(), TypeError),
        (good[1].half(), TypeError),
        (good[1].to("meta"), ValueError),
        (good[1].tolist(), TypeError),
        (0.5, TypeError),
    ):
        for call, data in ((stack, x), (stack.step, x[:, 0])):
            with pytest.raises(error):
                call(data, [good[0], bad])


@every_mixer
@pytest.mark.parametrize("decay", ["fixed", "learnable"])
def test_time_gaps_of_another_shape_are_refused(mixer, decay):
    stack, (x, timed) = make(mixer, decay), inputs(decay)
    gaps = timed["delta_t"]
    torch.testing.assert_close(stack(x, delta_t=gaps[..., None])[0], stack(x, delta_t=gaps)[0])
    step = stack.step(x[:, 0], delta_t=gaps[:, 0])[0]
    torch.testing.assert_close(stack.step(x[:, 0], delta_t=gaps[:, :1])[0], step)
    for bad in (gaps[:1], gaps[:, :1], gaps[0], gaps.T, gaps[..., None, None], gaps.mean()):
        with pytest.raises(ValueError, match="dt: got shape"):
            stack(x, delta_t=bad)
    for bad in (gaps, gaps[:1, 0], gaps[:, 0].mean(), gaps[0]):
        with pytest.raises(ValueError, match="dt: got shape"):
            stack.step(x[:, 0], delta_t=bad)
    with pytest.raises(TypeError, match="dt"):
        stack(x, delta_t=gaps.long())
    for call, data in ((stack, x), (stack.step, x[:, 0])):
        with pytest.raises(ValueError, match="dt: got none"):
            call(data)


@every_mixer
def test_empty_batches_and_sequences(mixer):
    stack, (x, timed) = make(mixer, "learnable"), inputs("learnable")
    for batch, length in ((0, 11), (0, 0), (3, 0), (0, 1)):
        part = (slice(0, batch), slice(0, length))
        y, state = stack(x[part], **cut(timed, *part))
        assert y.shape == (batch, length, 8)
        assert [h.shape[:2] for h in state] == [(batch, 1)] * 2
        y.sum().backward()
    y, state = stack.step(x[:0, 0], **cut(timed, slice(0, 0), 0))
    assert y.shape == (0, 8)
    assert state[0].shape[0] == 0


# -- compiled, exported, mapped, autocast ----------------------------------------------------------


@pytest.fixture
def compiler():
    """A compiler that has not reached its limit of versions of one function in other tests."""
    torch.compiler.reset()


@every_mixer
@pytest.mark.parametrize("decay", ["none", "learnable"])
def test_compiled_without_breaks(mixer, decay, compiler):
    stack = make(mixer, decay, n_layers=1, dtype=torch.float32)
    x, timed = inputs(decay, length=5, dtype=torch.float32)
    state = [h.detach() for h in stack(x, **timed)[1]]
    compiled = torch.compile(
        lambda x, h, **timed: stack(x, h, **timed), fullgraph=True, backend="aot_eager"
    )
    y, last = compiled(x, state, **timed)
    want, final = stack(x, state, **timed)
    torch.testing.assert_close(y, want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(last, final, rtol=1e-5, atol=1e-5)
    got = torch.autograd.grad(y.square().sum(), list(stack.parameters()), allow_unused=True)
    expected = torch.autograd.grad(want.square().sum(), list(stack.parameters()), allow_unused=True)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@every_mixer
def test_compiled_steps(mixer, compiler):
    stack = make(mixer, "fixed", n_layers=1, dtype=torch.float32)
    x, timed = inputs("fixed", length=3, dtype=torch.float32)
    step = torch.compile(stack.step, fullgraph=True, backend="aot_eager")
    want, _ = stack(x, **timed)
    state = [s.squeeze(1) for s in stack.init_state(3)]
    for t in range(3):
        y, state = step(x[:, t], state, **cut(timed, slice(None), t))
        torch.testing.assert_close(y, want[:, t], rtol=1e-5, atol=1e-5)


class Whole(nn.Module):
    def __init__(self, stack):
        super().__init__()
        self.stack = stack

    def forward(self, x, state, delta_t):
        return self.stack(x, state, delta_t)


@every_mixer
def test_exported(mixer):
    stack, (x, timed) = make(mixer, "learnable", n_layers=1), inputs("learnable", length=5)
    state = [s.detach() for s in stack(x, **timed)[1]]
    program = torch.export.export(Whole(stack), (x, state, timed["delta_t"]))
    got = program.module()(x, state, timed["delta_t"])
    torch.testing.assert_close(got, stack(x, state, **timed), **EXACT)


@every_mixer
def test_mapped(mixer):
    """An ensemble of stacks, by vmap over their parameters and inputs."""
    stacks = [make(mixer, n_layers=1) for _ in range(2)]
    with torch.no_grad():
        for p in stacks[1].parameters():
            p.mul_(1.1)
    names = dict(stacks[0].named_parameters())
    params = {
        name: torch.stack([dict(s.named_parameters())[name] for s in stacks]) for name in names
    }
    x = torch.stack([inputs(batch=2)[0], inputs(batch=2)[0].flip(1)])
    skeleton = copy.deepcopy(stacks[0])
    got = vmap(lambda p, x: functional_call(skeleton, p, (x,))[0])(params, x)
    want = torch.stack([stack(x_i)[0] for stack, x_i in zip(stacks, x, strict=True)])
    torch.testing.assert_close(got, want, **EXACT)


@every_mixer
def test_gradients_of_every_sample(mixer):
    """``vmap`` of ``grad``, over samples, against one backward pass a sample."""
    stack, (x, timed) = make(mixer, "learnable", n_layers=2), inputs("learnable", length=6)
    params = {name: p.detach() for name, p in stack.named_parameters()}

    def loss(p, x, gaps):
        return functional_call(stack, p, (x[None], None, gaps[None]))[0].square().sum()

    found = vmap(grad(loss), (None, 0, 0))(params, x, timed["delta_t"])
    for i in range(len(x)):
        part = stack(x[i : i + 1], delta_t=timed["delta_t"][i : i + 1])[0].square().sum()
        want = torch.autograd.grad(part, list(stack.parameters()))
        for name, value in zip(params, want, strict=True):
            torch.testing.assert_close(found[name][i], value, rtol=1e-9, atol=1e-10)


@every_mixer
def test_forward_mode(mixer):
    """Tangents of input, state and gaps, by ``torch.func`` and by dual numbers."""
    stack = make(mixer, "learnable", n_layers=1, free=True)
    x, timed = inputs("learnable", length=6)
    given = (x, stack.init_state(3)[0].detach().clone(), timed["delta_t"] + 0.1)
    moves = [torch.randn_like(v, generator=torch.Generator().manual_seed(7)) for v in given]

    def run(x, h, gaps):
        return stack(x, [h], gaps)[0]

    ahead, behind = (
        run(*(v + s * m for v, m in zip(given, moves, strict=True))) for s in (1e-6, -1e-6)
    )
    want = (ahead - behind) / 2e-6
    _, got = torch.func.jvp(run, given, tuple(moves))
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-7)
    with torch.autograd.forward_ad.dual_level():
        duals = [
            torch.autograd.forward_ad.make_dual(v, m) for v, m in zip(given, moves, strict=True)
        ]
        got = torch.autograd.forward_ad.unpack_dual(run(*duals)).tangent
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-7)
    jacobian = torch.func.jacfwd(lambda x: run(x, *given[1:]))(x)
    _, of_x = torch.func.jvp(lambda x: run(x, *given[1:]), (x,), (moves[0],))
    torch.testing.assert_close(torch.tensordot(jacobian, moves[0], 3), of_x, **EXACT)


@every_mixer
@pytest.mark.parametrize("decay", ["none", "learnable"])
def test_autocast(mixer, decay):
    """Only products are rounded to bfloat16; states stay in float32."""
    stack, (x, timed) = (
        make(mixer, decay, dtype=torch.float32, free=True),
        inputs(decay, dtype=torch.float32),
    )
    want, _ = stack(x, **timed)
    with torch.autocast("cpu", torch.bfloat16):
        y, state = stack(x, **timed)
        stepped, _ = streamed(stack, x, None, timed)
    assert all(h.dtype == torch.float32 for h in state)
    torch.testing.assert_close(y.float(), want, rtol=0, atol=0.15)
    torch.testing.assert_close(stepped.float(), y.float(), rtol=0, atol=0.05)
    y.float().square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in stack.parameters())


@every_mixer
def test_saved_and_loaded(mixer):
    stack, (x, timed) = make(mixer, "fixed"), inputs("fixed")
    other = MinGRUStack(
        5, 8, 2, mixer=mixer, mixer_kwargs=SETTINGS.get(mixer, {}) | DECAYS["fixed"],
        dtype=torch.float64,
    )  # fmt: skip
    other.load_state_dict(stack.state_dict())
    torch.testing.assert_close(other(x, **timed), stack(x, **timed), rtol=0, atol=0)
    torch.testing.assert_close(copy.deepcopy(stack)(x, **timed), stack(x, **timed), rtol=0, atol=0)


def test_rotations_warn_once():
    for settings, warned in ((None, 1), ({"snap": None}, 0)):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            MinGRUStack(5, 8, 3, mixer="rotation", mixer_kwargs=settings)(torch.zeros(1, 2, 5))
        assert len(seen) == warned


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"mixer_kwargs": {"snap": None}},
            "mixer_kwargs: got 'snap', expected arguments of MinGRU: bias, learnable_h0, decay, ",
        ),
        ({"mixer_kwargs": {"device": "cpu"}}, "mixer_kwargs: got 'device'"),
        ({"mixer_kwargs": {"hidden_size": 4}}, "mixer_kwargs: got 'hidden_size'"),
        ({"mixer_kwargs": {"bias": 1}}, "bias: got 1"),
        ({"mixer_kwargs": {"decay": "fixed", "log1p_delta": 1}}, "log1p_delta: got 1"),
        ({"mixer": "signed", "mixer_kwargs": {"coupled": "no"}}, "coupled: got 'no'"),
    ],
)
def test_arguments_that_the_mixer_does_not_take(settings, message):
    with pytest.raises(TypeError, match=message):
        MinGRUStack(5, 4, 2, **settings)
    with pytest.raises(TypeError, match=message):
        MinGRUBlock(4, **settings)


def test_mixers_that_can_learn_their_start():
    x = torch.randn(2, 6, 4)
    for mixer in ("log", "signed", "rotation", "givens", "lstm"):
        given = {"snap": None} if mixer == "rotation" else {}
        stack = MinGRUStack(4, 8, 1, mixer=mixer, learnable_h0=True, mixer_kwargs=given)
        assert stack(x)[0].shape == (2, 6, 8), mixer
    with pytest.raises(ValueError, match="learnable_h0"):
        MinGRUStack(4, 8, 1, mixer="delta", learnable_h0=True)


@pytest.mark.parametrize("mixer", MIXERS)
def test_a_start_is_learned_by_all_that_can(mixer):
    """A mixer takes ``learnable_h0`` if its class does; the block has a parameter for it then."""
    takes = "learnable_h0" in inspect.signature(MIXERS[mixer].cell.__init__).parameters
    assert MIXERS[mixer].learnable_h0 == takes
    if takes:
        plain, learned = (MinGRUBlock(4, mixer=mixer, learnable_h0=on) for on in (False, True))
        assert len(list(learned.parameters())) == len(list(plain.parameters())) + 1
