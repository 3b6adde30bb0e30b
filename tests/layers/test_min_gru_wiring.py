"""MinGRUBlock and MinGRUStack around a mixer that is easy to see through: wiring and arguments."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional

from pararnn import MinGRUBlock, MinGRUStack
from pararnn.layers import min_gru, mixers
from pararnn.layers.mixers import MixerEntry

CLOSE = {"rtol": 0, "atol": 1e-12}


class Fading(nn.Module):
    """``h ← γ h / 2 + W x``, ``y = 3 h`` with ``W`` a Linear: what a block asks of a mixer."""

    def __init__(self, d_in, d_h, bias=True, decay=None, decay_rate=1.0, log1p_delta=False,
                 learnable_h0=False, rate=1, device=None, dtype=None):  # fmt: skip
        super().__init__()
        self.w = nn.Linear(d_in, d_h, bias=bias, device=device, dtype=dtype)
        self.decay, self.rate, self.learnable_h0 = decay, decay_rate, learnable_h0
        self.start = torch.arange(float(d_h), dtype=dtype)

    def init_state(self, *batch):
        return self.start.expand(*batch, -1)

    def stream(self, x, h=None, dt=None):
        assert (dt is not None) == (self.decay is not None)
        h = self.init_state(len(x)) if h is None else h.reshape(len(x), -1)
        fade = 0.5 if dt is None else 0.5 * torch.exp(-self.rate * dt.reshape(-1, 1))
        h = fade * h + self.w(x)
        return 3 * h, h

    def forward(self, x, h=None, dt=None, *, resets=None, return_state=False):
        assert resets is None
        h = self.init_state(len(x)) if h is None else h.reshape(len(x), -1)
        out = torch.empty_like(x)
        for t in range(x.shape[1]):
            out[:, t], h = self.stream(x[:, t], h, None if dt is None else dt[:, t])
        return (out, h.unsqueeze(1)) if return_state else out


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch):
    entries = {
        "log": MixerEntry(Fading, learnable_h0=True),
        "signed": MixerEntry(Fading, learnable_h0=True),
        "rotation": MixerEntry(Fading, learns_start=True, grid="rate"),
        "delta": MixerEntry(Fading),
    }
    monkeypatch.setattr(min_gru, "takes_gaps", lambda mixer: mixer.decay is not None)
    for module in (mixers, min_gru):
        monkeypatch.setattr(module, "MIXERS", entries)


def sizes(batch=3, length=7, width=4, seed=0):
    torch.manual_seed(seed)
    return torch.randn(batch, length, width, dtype=torch.float64)


def norm(x, layer):
    """Layer normalisation, written out."""
    centred = x - x.mean(-1, keepdim=True)
    return centred / torch.sqrt(centred.square().mean(-1, keepdim=True) + 1e-5) * layer.weight + (
        layer.bias
    )


def block_by_hand(block, x, start=None):
    y, state = block.mixer(norm(x, block.norm1), start, return_state=True)
    x = x + y
    if block.mlp is not None:
        first, _, _, second = block.mlp
        inner = first(norm(x, block.norm2))
        x = x + second(inner * 0.5 * (1 + torch.erf(inner / 2**0.5)))
    return x, state


def shaken(module):
    """Norms that are not the identity, so that a swapped one is seen."""
    with torch.no_grad():
        for p in module.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return module


# -- the block -----------------------------------------------------------------------------------


@pytest.mark.parametrize("expansion", [4, 1, 0])
def test_a_block_by_hand(expansion):
    x = sizes()
    block = shaken(MinGRUBlock(4, expansion, dtype=torch.float64))
    start = torch.randn(3, 1, 4, dtype=torch.float64)
    for h in (None, start):
        out, state = block(x, h)
        want, last = block_by_hand(block, x, h)
        torch.testing.assert_close(out, want, **CLOSE)
        torch.testing.assert_close(state, last, **CLOSE)
    assert (block.mlp is None) == (block.norm2 is None) == (expansion == 0)
    if expansion:
        assert block.mlp[0].weight.shape == (4 * expansion, 4)


def test_a_block_step_by_step():
    x = sizes()
    block = shaken(MinGRUBlock(4, dtype=torch.float64))
    whole, last = block(x)
    h, steps = None, []
    for x_t in x.unbind(1):
        y, h = block.step(x_t, h)
        steps.append(y)
    assert h.shape == (3, 4)
    torch.testing.assert_close(torch.stack(steps, 1), whole, **CLOSE)
    torch.testing.assert_close(h.unsqueeze(1), last, **CLOSE)
    grads = torch.autograd.grad(steps[-1].sum(), list(block.parameters()))
    want = torch.autograd.grad(whole[:, -1].sum(), list(block.parameters()))
    torch.testing.assert_close(grads, want, **CLOSE)
    start = block.init_state(3)
    assert start.shape == (3, 1, 4)
    torch.testing.assert_close(block(x, start)[0], whole, **CLOSE)


def test_dropout_after_the_mixer_and_inside_the_mlp():
    block = MinGRUBlock(4, dropout=0.5, dtype=torch.float64)
    assert [m.p for m in block.modules() if isinstance(m, nn.Dropout)] == [0.5, 0.5]
    x = sizes()
    still = block.eval()(x)[0]
    torch.testing.assert_close(still, block(x)[0])
    block.train()
    torch.manual_seed(0)
    first = block(x)[0]
    assert not torch.equal(first, block(x)[0])
    for m in block.mlp:
        if isinstance(m, nn.Dropout):
            m.p = 0.0
    a, b = block(x)[0], block(x)[0]
    assert not torch.equal(a, b)  # what is left comes after the mixer
    with torch.no_grad():
        block.mlp[3].weight.zero_()
        block.mlp[3].bias.zero_()
    added = block(x)[0] - x
    y = block.mixer(block.norm1(x))
    dropped = added.abs() < 1e-12
    assert 0.2 < dropped.double().mean() < 0.8
    torch.testing.assert_close(added[~dropped], 2 * y[~dropped])
    stepped = block.step(x[:, 0])[0] - x[:, 0]  # a step in training drops as well
    rest = stepped.abs() > 1e-12
    torch.testing.assert_close(stepped[rest], 2 * y[:, 0][rest])
    assert not rest.all()


# -- the stack -----------------------------------------------------------------------------------


@pytest.mark.parametrize("input_size", [4, 5])
def test_a_stack_by_hand(input_size):
    x = sizes(width=input_size)
    stack = shaken(MinGRUStack(input_size, 4, 3, dtype=torch.float64))
    assert isinstance(stack.in_proj, nn.Identity if input_size == 4 else nn.Linear)
    starts = [torch.randn(3, 1, 4, dtype=torch.float64), None, torch.randn(3, 4).double()]
    for state in (None, starts, tuple(starts)):
        out, following = stack(x, state)
        want, finals = stack.in_proj(x), []
        for block, h in zip(stack.blocks, state or [None] * 3, strict=True):
            want, last = block_by_hand(block, want, h)
            finals.append(last)
        torch.testing.assert_close(out, norm(want, stack.norm_out), **CLOSE)
        torch.testing.assert_close(following, finals, **CLOSE)


def test_a_stack_in_pieces_and_steps():
    x = sizes(length=9, width=5)
    stack = shaken(MinGRUStack(5, 4, 2, dtype=torch.float64))
    whole, last = stack(x)
    state, pieces = stack.init_state(), []
    for piece in x.split((4, 1, 4), 1):
        y, state = stack(piece, state)
        y_none, state = stack(piece[:, :0], state)  # an empty chunk keeps the carry
        assert y_none.shape == (3, 0, 4)
        pieces.append(y)
    torch.testing.assert_close(torch.cat(pieces, 1), whole, **CLOSE)
    torch.testing.assert_close(state, last, **CLOSE)
    state, pieces = stack.init_state(3), []
    for x_t in x[:, :6].unbind(1):
        y, state = stack.step(x_t, state)
        pieces.append(y)
    y, state = stack(x[:, 6:], state)  # from streaming to chunks without a thought
    torch.testing.assert_close(torch.cat((torch.stack(pieces, 1), y), 1), whole, **CLOSE)
    torch.testing.assert_close(state, last, **CLOSE)


def test_starts():
    stack = MinGRUStack(4, 4, 2)
    assert stack.init_state() == [None, None]
    assert [s.shape for s in stack.init_state(3)] == [(3, 1, 4)] * 2


# -- mixers and their arguments ------------------------------------------------------------------


def arguments(stack, name):
    return [getattr(block.mixer, name) for block in stack.blocks]


def test_arguments_of_one_mixer_are_flat():
    stack = MinGRUStack(4, 4, 2, mixer="signed", mixer_kwargs={"bias": False})
    assert [block.mixer.w.bias for block in stack.blocks] == [None, None]


def test_arguments_of_a_list_are_keyed():
    keyed = {"signed": {"decay": "fixed", "decay_rate": 2.0}, "log": {}}
    stack = MinGRUStack(4, 4, 3, mixer=["signed", "log", "signed"], mixer_kwargs=keyed)
    assert arguments(stack, "decay") == ["fixed", None, "fixed"]
    assert arguments(stack, "rate") == [2.0, 1.0, 2.0]
    assert keyed == {"signed": {"decay": "fixed", "decay_rate": 2.0}, "log": {}}
    assert arguments(MinGRUStack(4, 4, 2, mixer=["log", "delta"]), "decay") == [None, None]


@pytest.mark.parametrize(
    "mixer", ["signed", ["signed", "signed", "log"], ["log", "signed", "signed"]]
)
def test_decay_in_the_last_block_only(mixer):
    settings = {"decay": "learnable", "decay_rate": 0.5, "log1p_delta": True, "bias": False}
    keyed = settings if mixer == "signed" else {"signed": settings, "log": settings}
    stack = MinGRUStack(4, 4, 3, mixer=mixer, mixer_kwargs=keyed, decay_layers="last")
    assert arguments(stack, "decay") == [None, None, "learnable"]
    assert arguments(stack, "rate") == [1.0, 1.0, 0.5]
    assert [block.mixer.w.bias for block in stack.blocks] == [None] * 3


def test_time_gaps_go_to_the_blocks_with_decay():
    x, dt = sizes(), torch.rand(3, 7, dtype=torch.float64)
    stack = MinGRUStack(
        4, 4, 2, mixer=["signed", "log"], mixer_kwargs={"log": {"decay": "fixed"}},
        dtype=torch.float64,
    )  # fmt: skip
    whole, last = stack(x, delta_t=dt)
    assert not torch.allclose(whole, stack(x, delta_t=2 * dt)[0])
    state, steps = None, []
    for t in range(7):
        y, state = stack.step(x[:, t], state, dt[:, t])
        steps.append(y)
    torch.testing.assert_close(torch.stack(steps, 1), whole, **CLOSE)
    torch.testing.assert_close([s.unsqueeze(1) for s in state], last, **CLOSE)
    plain = MinGRUStack(4, 4, 2, dtype=torch.float64)
    for call in (lambda: plain(x, delta_t=dt), lambda: plain.step(x[:, 0], delta_t=dt[:, 0])):
        with pytest.raises(ValueError, match="no block has decay"):
            call()


def test_learnable_starts():
    assert arguments(MinGRUStack(4, 4, 2, learnable_h0=True), "learnable_h0") == [True, True]
    mixed = MinGRUStack(4, 4, 3, learnable_h0=True, mixer=["signed", "rotation", "delta"])
    assert arguments(mixed, "learnable_h0") == [True, False, False]
    assert not MinGRUBlock(4, learnable_h0=True, mixer="rotation").mixer.learnable_h0
    for make in (MinGRUBlock, lambda d, **kw: MinGRUStack(d, d, 1, **kw)):
        with pytest.raises(ValueError, match="starts from a fixed state"):
            make(4, learnable_h0=True, mixer="delta")


@pytest.mark.parametrize(
    ("mixer", "settings", "warned"),
    [
        ("rotation", None, True),
        ("rotation", {"rate": 2}, True),
        ("rotation", {"rate": None}, False),
        (["rotation", "signed", "rotation"], None, True),
        (["rotation", "signed", "rotation"], {"rotation": {"rate": None}}, False),
        (["signed", "rotation", "signed"], None, False),
        ("signed", None, False),
    ],
)
def test_one_warning_of_several_rotations(mixer, settings, warned):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        stack = MinGRUStack(4, 4, 3, mixer=mixer, mixer_kwargs=settings)
        stack(torch.randn(1, 2, 4))
    assert len(seen) == warned
    if warned:
        assert seen[0].category is UserWarning
        assert seen[0].filename == __file__


def test_device_and_dtype_reach_everything():
    for module in (
        MinGRUBlock(4, device="meta", dtype=torch.float64),
        MinGRUStack(5, 4, 2, device="meta", dtype=torch.float64),
    ):
        assert {(p.device.type, p.dtype) for p in module.parameters()} == {("meta", torch.float64)}


# -- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mixer": "lgo"}, "mixer: got 'lgo', expected one of 'log'"),
        ({"mixer": ["log", "lgo"]}, "mixer: got 'lgo'"),
        ({"mixer": ["log"]}, "a list of 1 names for 2 layers"),
        ({"mixer": ("log", "log")}, "expected a name or a list"),
        ({"mixer": None}, "expected a name or a list"),
        ({"mixer": ["log", None]}, "mixer: got None"),
        ({"mixer_kwargs": {"log": {"bias": False}}}, "keyed by mixer only if mixer is a list"),
        ({"mixer_kwargs": [1]}, "expected None or a dict"),
        ({"mixer": ["log", "signed"], "mixer_kwargs": {"bias": False}}, "got the key 'bias'"),
        ({"mixer": ["log", "log"], "mixer_kwargs": {"signed": {}}}, "got the key 'signed'"),
        ({"mixer": ["log", "log"], "mixer_kwargs": {"log": 3}}, r"mixer_kwargs\['log'\]: got 3"),
        ({"mixer": ["log", "log"], "mixer_kwargs": {"log": {"log": {}}}}, "a mixer, expected"),
        ({"decay_layers": "first"}, "expected 'all' or 'last'"),
        ({"dropout": 1.0}, "dropout"),
        ({"dropout": float("nan")}, "dropout"),
        ({"mlp_expansion": -1}, "mlp_expansion"),
        ({"d_model": 0}, "d_model"),
        ({"input_size": 0}, "input_size"),
        ({"n_layers": 0}, "n_layers"),
    ],
)
def test_stacks_that_cannot_be(settings, message):
    with pytest.raises(ValueError, match=message):
        MinGRUStack(**{"input_size": 5, "d_model": 4, "n_layers": 2, **settings})


@pytest.mark.parametrize("name", ["d_model", "n_layers", "mlp_expansion"])
def test_sizes_are_integers(name):
    with pytest.raises(TypeError, match=name):
        MinGRUStack(**{"input_size": 5, "d_model": 4, "n_layers": 2, name: 2.0})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mlp_expansion": False}, "mlp_expansion: got False"),
        ({"mlp_expansion": 0.0}, "mlp_expansion: got 0.0"),
        ({"dropout": "0.1"}, "dropout: got '0.1', expected a probability"),
        ({"dropout": True}, "dropout: got True"),
        ({"learnable_h0": "no"}, "learnable_h0: got 'no' .*, expected True or False"),
        ({"dtype": torch.int32}, "dtype: got torch.int32, expected a floating-point"),
    ],
)
def test_arguments_of_other_types(settings, message):
    with pytest.raises(TypeError, match=message):
        MinGRUStack(5, 4, 2, **settings)
    with pytest.raises(TypeError, match=message):
        MinGRUBlock(4, **settings)


@pytest.mark.parametrize(
    ("batch", "error"), [(-1, ValueError), (2.0, TypeError), (True, TypeError)]
)
def test_batches_are_counted(batch, error):
    with pytest.raises(error, match="batch: got"):
        MinGRUStack(5, 4, 2).init_state(batch)


@pytest.mark.parametrize("mixer", [["log"], None, 3, "lgo"])
def test_blocks_take_one_mixer(mixer):
    with pytest.raises(ValueError, match="mixer"):
        MinGRUBlock(4, mixer=mixer)


def test_states_that_do_not_fit():
    x = sizes(width=5)
    stack = MinGRUStack(5, 4, 2, dtype=torch.float64)
    state = stack(x)[1]
    for method, data in ((stack, x), (stack.step, x[:, 0])):
        for wrong in (state[:1], [*state, state[0]], []):
            with pytest.raises(ValueError, match="expected 2, one a block"):
                method(data, wrong)
        with pytest.raises(TypeError, match="expected a list with one state a block"):
            method(data, torch.stack(state))
        with pytest.raises(TypeError, match="expected a list with one state a block"):
            method(data, dict(enumerate(state)))


def test_inputs_that_do_not_fit():
    stack, block = MinGRUStack(5, 4, 1), MinGRUBlock(4)
    for call, width in ((stack, 5), (block, 4)):
        for wrong in ((3, width), (3, 2, 7), (2, 3, 2, width), (width,)):
            with pytest.raises(ValueError, match=rf"x: got shape .*, expected \(B, T, {width}\)"):
                call(torch.zeros(wrong))
        for wrong in ((3, 2, width), (3, 7), (width,)):
            with pytest.raises(ValueError, match=rf"x: got shape .*, expected \(B, {width}\)"):
                call.step(torch.zeros(wrong))
        with pytest.raises(TypeError, match="floating-point"):
            call(torch.zeros(1, 1, width, dtype=torch.int64))
        with pytest.raises(TypeError, match=r"x: got dtype torch.float64, expected torch.float32"):
            call(torch.zeros(1, 1, width, dtype=torch.float64))
        with pytest.raises(ValueError, match="x: got device meta, expected cpu"):
            call.step(torch.zeros(1, width, device="meta"))


def test_gradients_flow_to_every_parameter():
    stack = MinGRUStack(5, 4, 2, dtype=torch.float64)
    out, _ = stack(sizes(width=5))
    functional.mse_loss(out, torch.randn_like(out)).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in stack.parameters())


@pytest.mark.parametrize(
    ("mixer", "settings"),
    [
        ("log", None),
        (["signed", "log"], {"signed": {"decay": "fixed"}}),
        ("signed", {"decay": None}),
    ],
)
def test_the_last_block_alone_needs_a_decay(mixer, settings):
    with pytest.raises(ValueError, match="decay_layers: got 'last', expected 'all'"):
        MinGRUStack(3, 8, 2, mixer=mixer, mixer_kwargs=settings, decay_layers="last")
