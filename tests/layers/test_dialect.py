"""One dialect: names, their other spellings, the order of arguments, and resets, in every layer."""

from __future__ import annotations

import inspect
import itertools

import pytest
import torch
from torch import nn

from pararnn import (
    Cell,
    MinGRU,
    MinGRUBlock,
    MinGRUStack,
    ParaGRU,
    ParaRNN,
    SignedMinGRU,
    verify_agreement,
)
from pararnn.layers import MIXERS

WIDE = torch.float64
SETTINGS = {"givens": {"block_size": 4}, "delta": {"n_heads": 2, "chunk_size": 4}}
DECAY = {"decay": "fixed", "decay_rate": 0.3}
every_layer = pytest.mark.parametrize("name", ["mixer", "block", "stack"])
every_mixer = pytest.mark.parametrize("mixer", MIXERS)


def settings(mixer, decay=True):
    return SETTINGS.get(mixer, {}) | (DECAY if decay else {})


def alone(mixer, decay=True):
    torch.manual_seed(0)
    return MIXERS[mixer].cell(5, 8, dtype=WIDE, **settings(mixer, decay))


def block(mixer, decay=True):
    torch.manual_seed(0)
    return MinGRUBlock(8, mixer=mixer, mixer_kwargs=settings(mixer, decay), dtype=WIDE)


def stack(mixer="signed", decay=True):
    torch.manual_seed(0)
    kwargs = settings(mixer, decay)
    return MinGRUStack(5, 8, 2, mixer=mixer, mixer_kwargs=kwargs, mlp_expansion=1, dtype=WIDE)


def built(name, mixer, decay=True):
    """A layer and its input, time gaps if it has a decay."""
    layer = {"mixer": alone, "block": block, "stack": stack}[name](mixer, decay)
    x, gaps = inputs(8 if name == "block" else 5)
    return layer, x, gaps if decay else None


def rnn(mixer, decay=True):
    return ParaRNN(alone(mixer, decay))


def inputs(width=5, batch=3, length=23):
    g = torch.Generator().manual_seed(1)
    x = torch.randn(batch, length, width, generator=g, dtype=WIDE)
    return x, 2 * torch.rand(batch, length, generator=g, dtype=WIDE)


def start(layer, batch=3):
    """A state that no sequence starts from and every mixer takes."""
    g = torch.Generator().manual_seed(2)
    like = layer.init_state(batch)

    def drawn(h):
        return torch.rand(h.shape, generator=g, dtype=WIDE) + 0.1

    return [drawn(h) for h in like] if isinstance(like, list) else drawn(like)


# -- names -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", [ParaRNN, MinGRU, MinGRUBlock, MinGRUStack])
def test_the_names_are_the_same_everywhere(layer):
    assert list(inspect.signature(layer.forward).parameters)[1:3] == ["x", "h0"]
    assert {"x", "h0", "dt", "resets"} <= set(inspect.signature(layer.forward).parameters)
    step = layer.stream if issubclass(layer, Cell) else layer.step
    assert list(inspect.signature(step).parameters)[1:3] == ["x", "h"]
    assert "dt" in inspect.signature(step).parameters


def test_a_step_by_names_is_the_same_call_for_cells_and_layers():
    torch.manual_seed(0)
    cell = ParaGRU(5, 4)
    x, h = torch.randn(3, 5), torch.randn(3, 4)
    y, following = ParaRNN(cell).step(x=x, h=h[None])
    assert torch.equal(y, cell.step(x=x, h=h))
    assert torch.equal(following[0], y)


CALLS = {
    "mixer": (lambda: alone("log"), "forward", {"h_0": "h0", "delta_t": "dt"}),
    "stream": (lambda: alone("log"), "stream", {"x_t": "x", "h_prev": "h", "delta_t": "dt"}),
    "block": (lambda: block("log"), "forward", {"h_0": "h0", "delta_t": "dt"}),
    "block.step": (lambda: block("log"), "step", {"x_t": "x", "h_prev": "h", "delta_t": "dt"}),
    "stack": (lambda: stack("log"), "forward", {"state": "h0", "delta_t": "dt"}),
    "stack.step": (lambda: stack("log"), "step", {"x_t": "x", "state": "h", "delta_t": "dt"}),
    "ParaRNN.step": (lambda: rnn("log"), "step", {"state": "h"}),
}


@pytest.mark.parametrize("call", CALLS)
def test_other_spellings(call):
    make, method, spellings = CALLS[call]
    layer = make()
    x, gaps = inputs(8 if isinstance(layer, MinGRUBlock) else 5)
    sequence = method == "forward"
    given = {"x": x if sequence else x[:, 0], "dt": gaps if sequence else gaps[:, 0]}
    given["h0" if sequence else "h"] = start(layer)
    run = getattr(layer, method)
    want = run(**given)
    old = {new: other for other, new in spellings.items()}
    torch.testing.assert_close(
        run(**{old.get(name, name): value for name, value in given.items()}), want, rtol=0, atol=0
    )
    assert set(spellings) <= set(inspect.signature(run).parameters)
    for other, new in spellings.items():
        assert f"``{other}``" in run.__doc__
        with pytest.raises(TypeError, match=f"^{new}: got it twice, also as {other}; leave one"):
            run(**given, **{other: given[new]})
    first = given.pop("x")
    if "x_t" in spellings:
        with pytest.raises(TypeError, match=r"^x: got it twice, also as x_t"):
            run(first, x_t=first, **given)
    with pytest.raises(TypeError, match="unexpected keyword argument 'h_1'"):
        run(first, h_1=None, **given)


def test_exported_by_other_spellings():
    layer, (x, gaps) = alone("log"), inputs()
    program = torch.export.export(layer, (x,), {"delta_t": gaps})
    assert torch.equal(program.module()(x, delta_t=gaps), layer(x, dt=gaps))


# -- order -----------------------------------------------------------------------------------------


@every_mixer
def test_the_state_first_is_an_error_of_a_layer(mixer):
    x, gaps = inputs()
    now = gaps[:, 0]
    cell = alone(mixer)
    for h in (start(cell), cell.flat(start(cell)), cell.flat(start(cell)).unsqueeze(1)):
        with pytest.raises(
            TypeError, match=r"^stream: got the state first, expected stream\(x, h\)"
        ):
            cell.stream(h, x[:, 0], now)
    around = block(mixer)
    with pytest.raises(TypeError, match=r"^step: got the state first, expected step\(x, h\)"):
        around.step(start(around), inputs(8)[0][:, 0], now)
    layer = stack(mixer)
    with pytest.raises(TypeError, match=r"^step: got the state first, expected step\(x, h\)"):
        layer.step(start(layer), x[:, 0], now)
    layer = rnn(mixer)
    with pytest.raises(TypeError, match=r"^step: got the state first, expected step\(x, h\)"):
        layer.step(start(layer), x[:, 0], dt=now)


@pytest.mark.parametrize("width", [4, 5])
def test_the_state_first_is_an_error_of_a_pararnn_at_any_width(width):
    layer = ParaRNN(ParaGRU(width, 4), num_layers=2)
    with pytest.raises(TypeError, match="step: got the state first"):
        layer.step(torch.zeros(2, 3, 4), torch.zeros(3, width))


def test_the_input_first_is_an_error_of_a_cell():
    with pytest.raises(ValueError, match=r"^h: got shape \(3, 5\).* check the order, step\(h, x\)"):
        ParaGRU(5, 4).step(torch.zeros(3, 5), torch.zeros(3, 4))


# -- resets ----------------------------------------------------------------------------------------


def marked(batch=3, length=23):
    marks = torch.zeros(batch, length, dtype=torch.bool)
    marks[0, 9] = marks[1, 0] = marks[1, 14] = marks[1, 15] = marks[2, 22] = True
    return marks


def run(layer, x, h0, dt, resets=None):
    """Output and states of any of them, states as a list."""
    more = {"return_state": True} if isinstance(layer, Cell) else {}
    y, state = layer(x, h0, dt, resets=resets, **more)
    return y, state if isinstance(state, list) else [state]


def separately(layer, x, h0, dt, marks):
    """Every stretch between resets as a sequence of its own, those after a reset from zeros."""
    rows, finals = [], []
    several = isinstance(h0, list)
    for b in range(len(x)):
        cuts = [0, *[t for t in range(1, x.shape[1]) if marks[b, t]], x.shape[1]]
        parts, one = [], slice(b, b + 1)
        for first, last in itertools.pairwise(cuts):
            fresh = first > 0 or bool(marks[b, 0])
            given = [torch.where(torch.tensor(fresh), 0, h[one]) for h in (h0 if several else [h0])]
            gaps = None if dt is None else dt[one, first:last]
            y, state = run(layer, x[one, first:last], given if several else given[0], gaps)
            parts.append(y)
        rows.append(torch.cat(parts, 1))
        finals.append(state)
    return torch.cat(rows), [torch.cat(s) for s in zip(*finals, strict=True)]


@every_mixer
@pytest.mark.parametrize("decay", [False, True])
@every_layer
def test_a_reset_is_a_fresh_sequence(name, mixer, decay):
    (layer, x, dt), marks = built(name, mixer, decay), marked()
    h0 = start(layer)
    y, state = run(layer, x, h0, dt, marks)
    want, final = separately(layer, x, h0, dt, marks)
    torch.testing.assert_close(y, want, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(state, final, rtol=1e-12, atol=1e-13)
    none, _ = run(layer, x, h0, dt, torch.zeros_like(marks))
    assert torch.equal(none, run(layer, x, h0, dt)[0])
    assert not torch.allclose(y[0, 9], none[0, 9])


@every_mixer
@every_layer
def test_nothing_crosses_a_reset(name, mixer):
    layer, x, dt = built(name, mixer)
    marks = torch.zeros(3, 23, dtype=torch.bool)
    marks[1, 9] = True
    x.requires_grad_()
    clean, state = run(layer, x, None, dt, marks)
    loss = clean[1, 9:].sum() + sum((h[1] ** 2).sum() for h in state)
    (gradient,) = torch.autograd.grad(loss, x)
    assert bool((gradient[1, :9] == 0).all())
    assert bool((gradient[1, 9:] != 0).any(-1).all())
    x = x.detach()
    for poison in (float("nan"), float("inf")):
        given = x.clone()
        given[1, 4] = poison
        given.requires_grad_()
        y, state = run(layer, given, None, dt, marks)
        assert torch.equal(y[1, 9:], clean[1, 9:])
        assert not bool(y[1, 4:9].isfinite().any())
        (gradient,) = torch.autograd.grad(y[1, 9:].square().sum(), given)
        assert bool(gradient[1, 9:].isfinite().all())
        # PyTorch's own norms, of blocks and of delta's keys, have NaN as the derivative of one.
        if name == "mixer" and mixer != "delta":
            assert bool((gradient[1, :9] == 0).all())


@every_mixer
@every_layer
def test_a_reset_at_the_first_step_is_the_zero_state(name, mixer):
    """Not the start of a sequence, which is 1/2 or learned for some."""
    layer, x, dt = built(name, mixer)
    h0 = start(layer)
    zero = [0 * h for h in h0] if isinstance(h0, list) else 0 * h0
    marks = torch.zeros(3, 23, dtype=torch.bool)
    marks[:, 0] = True
    want = run(layer, x, zero, dt)
    for given in (h0, None):
        torch.testing.assert_close(run(layer, x, given, dt, marks), want, rtol=0, atol=0)


@every_mixer
def test_a_mixer_resets_as_it_does_in_a_pararnn(mixer):
    cell, (x, gaps), marks = alone(mixer), inputs(), marked()
    y, state = cell(x, None, gaps, resets=marks, return_state=True)
    output, h_n = ParaRNN(cell)(x, dt=gaps, resets=marks)
    assert torch.equal(y, output)
    assert torch.equal(state[:, 0], cell.flat(h_n[0]))


@every_layer
def test_resets_that_are_none(name):
    layer, x, dt = built(name, "signed")
    for wrong in (marked()[:1], marked().t(), marked().double(), marked().long()):
        with pytest.raises(ValueError, match=r"^resets: got .*, expected torch\.bool of shape"):
            run(layer, x, None, dt, wrong)
    with pytest.raises(TypeError, match=r"^resets: got list"):
        run(layer, x, None, dt, marked().tolist())


# -- what is checked is what ran -------------------------------------------------------------------


class Model(nn.Module):
    """Calls its mixer by any names."""

    def __init__(self, given):
        super().__init__()
        self.mixer, self.given = SignedMinGRU(5, 8, dtype=WIDE, **DECAY), given

    def forward(self, x):
        return self.mixer(x, **self.given)


def test_agreement_is_checked_on_what_a_mixer_was_given():
    from pararnn.layers.agreement import recorded_calls

    (x, gaps), marks = inputs(), marked()
    h = torch.rand(3, 1, 8, dtype=WIDE)
    for given in (
        {"h0": h, "dt": gaps, "resets": marks},
        {"h_0": h, "delta_t": gaps, "resets": marks},
    ):
        model = Model(given)
        (call,) = recorded_calls(model, x)
        assert torch.equal(call.solution().output, model(x))
        assert verify_agreement(model, x).passed
    assert verify_agreement(stack(), x, dt=gaps, resets=marks).passed
    (call, _) = recorded_calls(stack(), x, dt=gaps, resets=marks)
    assert torch.equal(call.resets, marks)


def test_a_mixer_in_a_pararnn_is_one_layer():
    report = verify_agreement(rnn("signed"), inputs()[0], dt=inputs()[1])
    assert [layer.layer for layer in report.layers] == ["cells[0]"]
    assert report.passed
