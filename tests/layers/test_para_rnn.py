"""ParaRNN: what a ``torch.nn.GRU`` user expects."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import (
    PackedSequence,
    pack_padded_sequence,
    pack_sequence,
    pad_packed_sequence,
)

from pararnn import (
    Cell,
    DeltaMinGRU,
    MinGRU,
    NewtonConfig,
    ParaGRU,
    ParaLSTM,
    ParaM2RNN,
    ParaRNN,
    SignedMinGRU,
    sequential_apply,
)
from pararnn.cells.mixer import Mixer

LAYERS = {
    "diag": lambda **kw: ParaRNN(ParaGRU(3, 4), **kw),
    "head": lambda **kw: ParaRNN(ParaGRU(3, 4, mix="head", n_heads=2), **kw),
    "matrix": lambda **kw: ParaRNN(ParaM2RNN(3, 2, 2), **kw),
}
layers = pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
CLOSE = {"rtol": 0, "atol": 3e-6}


def stacked(rnn, x, h0=None):
    """The layers one after the other, looping over steps."""
    finals = []
    for i, cell in enumerate(rnn.cells):
        states = sequential_apply(cell, x, h0=None if h0 is None else h0[i])
        finals.append(states[:, -1])
        if getattr(cell, "state_slots", 1) > 1:
            states = states[:, :, -1]
        x = states.flatten(2)
    return x, torch.stack(finals)


@pytest.mark.parametrize("make", [ParaGRU, SignedMinGRU, MinGRU, DeltaMinGRU])
def test_autocast_rounds_outputs(make):
    """By steps, too; a mixer in a layer and by itself. States are not rounded."""
    torch.manual_seed(0)
    cell = make(3, 4, n_heads=1) if make is DeltaMinGRU else make(3, 4)
    rnn, x = ParaRNN(cell), torch.randn(2, 6, 3)
    want, final = rnn(x)
    with torch.autocast("cpu", torch.bfloat16):
        output, h_n = rnn(x)
        state, steps = rnn.init_state(2), []
        for x_t in x.unbind(1):
            y, state = rnn.step(x_t, state)
            steps.append(y)
        if isinstance(cell, Mixer):
            assert torch.equal(cell(x), output)
    assert (want.dtype, output.dtype, steps[-1].dtype) == (torch.float32, *[torch.bfloat16] * 2)
    assert (final.dtype, h_n.dtype, state.dtype) == (torch.float32,) * 3
    torch.testing.assert_close(output.float(), want, rtol=0.02, atol=0.02)
    torch.testing.assert_close(torch.stack(steps, 1), output, rtol=0.02, atol=0.02)


@layers
@pytest.mark.parametrize("depth", [1, 3])
def test_forward(make, depth):
    torch.manual_seed(0)
    rnn = make(num_layers=depth)
    x = torch.randn(2, 20, 3)
    output, h_n = rnn(x)
    want, finals = stacked(rnn, x)
    assert output.shape == (2, 20, rnn.hidden_size)
    assert h_n.shape == (depth, 2, *rnn.cells[0].state_shape)
    torch.testing.assert_close(output, want, **CLOSE)
    torch.testing.assert_close(h_n, finals, **CLOSE)
    assert len(rnn.last_solutions) == depth
    assert not rnn.last_solutions[0].states.requires_grad
    assert len({id(c) for c in rnn.cells}) == depth
    assert rnn.num_layers == depth
    assert rnn.input_size == 3


@layers
def test_a_start_and_pieces(make):
    torch.manual_seed(0)
    rnn = make(num_layers=2)
    x = torch.randn(2, 20, 3)
    h0 = 0.5 * torch.randn(2, 2, *rnn.cells[0].state_shape)
    whole, last = rnn(x, h0)
    torch.testing.assert_close(whole, stacked(rnn, x, h0)[0], **CLOSE)
    state, parts = h0, []
    for piece in x.split((7, 1, 12), 1):
        y, state = rnn(piece, state)
        parts.append(y)
    torch.testing.assert_close(torch.cat(parts, 1), whole, **CLOSE)
    torch.testing.assert_close(state, last, **CLOSE)


@layers
def test_streaming(make):
    torch.manual_seed(0)
    rnn = make(num_layers=2)
    x = torch.randn(2, 15, 3)
    whole, last = rnn(x)
    for state in (None, rnn.init_state(2)):
        steps = []
        for t in range(15):
            y, state = rnn.step(x[:, t], state)
            steps.append(y)
        torch.testing.assert_close(torch.stack(steps, 1), whole, **CLOSE)
        torch.testing.assert_close(state, last, **CLOSE)


@layers
def test_time_first(make):
    torch.manual_seed(0)
    rnn = make(num_layers=2)
    other = copy.deepcopy(rnn)
    other.batch_first = False
    x = torch.randn(2, 15, 3)
    h0 = torch.randn(2, 2, *rnn.cells[0].state_shape)
    resets = torch.rand(2, 15) < 0.2
    a, h_a = rnn(x, h0, resets=resets)
    b, h_b = other(x.transpose(0, 1), h0, resets=resets.T)
    torch.testing.assert_close(a, b.transpose(0, 1), rtol=0, atol=1e-6)
    torch.testing.assert_close(h_a, h_b, rtol=0, atol=1e-6)


@layers
def test_one_sequence(make):
    torch.manual_seed(0)
    for batch_first in (True, False):
        rnn = make(num_layers=2, batch_first=batch_first)
        x = torch.randn(15, 3)
        h0 = torch.randn(2, *rnn.cells[0].state_shape)
        resets = torch.rand(15) < 0.2
        y, h_n = rnn(x, h0, resets=resets)
        assert y.shape == (15, rnn.hidden_size)
        assert h_n.shape == h0.shape
        dim = 0 if batch_first else 1
        z, h_m = rnn(x.unsqueeze(dim), h0.unsqueeze(1), resets=resets.unsqueeze(dim))
        torch.testing.assert_close(y, z.squeeze(dim), rtol=0, atol=1e-6)
        torch.testing.assert_close(h_n, h_m.squeeze(1), rtol=0, atol=1e-6)


def test_dropout_is_between_layers_and_in_training_only():
    torch.manual_seed(0)
    x = torch.randn(4, 30, 3)
    single = ParaRNN(ParaGRU(3, 8), dropout=0.9)
    assert torch.equal(single(x)[0], single(x)[0]), "one layer has nothing between"
    deep = ParaRNN(ParaGRU(3, 8), num_layers=2, dropout=0.9)
    assert not torch.equal(deep(x)[0], deep(x)[0])
    deep.eval()
    assert torch.equal(deep(x)[0], deep(x)[0])
    torch.testing.assert_close(deep(x)[0], stacked(deep, x)[0], **CLOSE)
    deep.train()
    seen = []
    deep.cells[1].in_proj.register_forward_pre_hook(lambda m, a: seen.append(a[0]))
    deep(x)
    dropped = float((seen[0] == 0).float().mean())
    assert 0.85 < dropped < 0.95
    assert float((deep(x)[0] == 0).float().mean()) < 0.3, "no dropout after the last layer"


@pytest.mark.parametrize("enforce_sorted", [True, False])
@layers
def test_packed_sequences(make, enforce_sorted):
    torch.manual_seed(0)
    rnn = make(num_layers=2)
    lengths = [7, 5, 5, 2, 1] if enforce_sorted else [5, 1, 7, 2, 5]
    rows = [torch.randn(n, 3) for n in lengths]
    h0 = torch.randn(2, 5, *rnn.cells[0].state_shape)
    packed = pack_sequence(rows, enforce_sorted=enforce_sorted)
    output, h_n = rnn(packed, h0)
    assert isinstance(output, PackedSequence)
    padded, got = pad_packed_sequence(output, batch_first=True)
    assert got.tolist() == lengths
    for i, row in enumerate(rows):
        y, h = rnn(row, h0[:, i])
        torch.testing.assert_close(padded[i, : lengths[i]], y, **CLOSE)
        torch.testing.assert_close(h_n[:, i], h, **CLOSE)
        assert not padded[i, lengths[i] :].any()


@pytest.mark.parametrize("enforce_sorted", [True, False])
def test_packed_keeps_order(enforce_sorted):
    """The data of the output belong, row by row, to the data of the input, as with nn.GRU."""
    torch.manual_seed(0)
    rnn, gru = ParaRNN(ParaGRU(3, 4)), nn.GRU(3, 4, batch_first=True)
    lengths = torch.randint(1, 4, (60,))
    if enforce_sorted:
        lengths = lengths.sort(descending=True)[0]
    x = torch.randn(60, 3, 3)
    packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=enforce_sorted)
    output, _ = rnn(packed)
    reference, _ = gru(packed)
    assert torch.equal(output.batch_sizes, reference.batch_sizes)
    for name in ("sorted_indices", "unsorted_indices"):
        a, b = getattr(output, name), getattr(reference, name)
        assert (a is None and b is None) or torch.equal(a, b)
    whole = rnn(x)[0]
    order = packed.sorted_indices if not enforce_sorted else torch.arange(60)
    rows = torch.cat([whole[order[:n], t] for t, n in enumerate(packed.batch_sizes.tolist())])
    torch.testing.assert_close(output.data, rows, rtol=0, atol=1e-6)


def test_packed_gradients():
    torch.manual_seed(0)
    rnn = ParaRNN(ParaGRU(3, 4)).double()
    rows = [torch.randn(n, 3, dtype=torch.float64, requires_grad=True) for n in (2, 6, 4)]
    output, h_n = rnn(pack_sequence(rows, enforce_sorted=False))
    got = torch.autograd.grad(output.data.sum() + 2 * h_n.sum(), rows)
    for row, g in zip(rows, got, strict=True):
        y, h = rnn(row)
        torch.testing.assert_close(g, torch.autograd.grad(y.sum() + 2 * h.sum(), row)[0])


def test_packed_with_resets_is_refused():
    rnn = ParaRNN(ParaGRU(3, 4))
    packed = pack_sequence([torch.randn(4, 3), torch.randn(2, 3)])
    with pytest.raises((TypeError, ValueError), match="resets"):
        rnn(packed, resets=torch.ones(2, 4, dtype=torch.bool))


@layers
def test_resets(make):
    torch.manual_seed(0)
    rnn = make(num_layers=2)
    x = torch.randn(1, 12, 3)
    resets = torch.zeros(1, 12, dtype=torch.bool)
    resets[0, 5] = True
    y, h = rnn(x, resets=resets)
    first, _ = rnn(x[:, :5])
    second, last = rnn(x[:, 5:])
    torch.testing.assert_close(y, torch.cat([first, second], 1), **CLOSE)
    torch.testing.assert_close(h, last, **CLOSE)


def test_a_list_of_cells(zoo):
    torch.manual_seed(0)
    lstm = Cell(4, spec=zoo["lstm"].spec, sizes={"d": 5})
    with pytest.raises(ValueError, match="different shapes"):
        ParaRNN([ParaGRU(3, 4), lstm])
    x = torch.randn(2, 9, 3)
    same = ParaRNN([ParaGRU(3, 4), ParaGRU(4, 4, mix="head", n_heads=2)])
    assert (same.num_layers, same.input_size, same.hidden_size) == (2, 3, 4)
    torch.testing.assert_close(same(x)[0], stacked(same, x)[0], **CLOSE)


def test_a_layer_that_ran_can_be_saved():
    rnn = ParaRNN(ParaGRU(3, 4))
    x = torch.randn(2, 9, 3)
    want = rnn(x)[0]
    again = pickle.loads(pickle.dumps(rnn))
    torch.testing.assert_close(again(x)[0], want)


def test_outputs_outlive_the_buffer_of_states():
    """With ``out`` every step writes to the same memory."""
    torch.manual_seed(0)
    rnn = ParaRNN(ParaGRU(3, 4), num_layers=2)
    x = torch.randn(2, 5, 3)
    with torch.no_grad():
        state, outputs = rnn.init_state(2), []
        for t in range(5):
            y, state = rnn.step(x[:, t], state, out=state)
            outputs.append(y)
        torch.testing.assert_close(torch.stack(outputs, 1), rnn(x)[0], **CLOSE)


def test_several_slots_pass_on_the_last(zoo):
    torch.manual_seed(0)
    rnn = ParaRNN(Cell(3, spec=zoo["lstm"].spec, sizes={"d": 4}), num_layers=2)
    x = torch.randn(2, 9, 3)
    y, h_n = rnn(x)
    assert y.shape == (2, 9, 4)
    assert h_n.shape == (2, 2, 2, 4)
    torch.testing.assert_close(y, stacked(rnn, x)[0], **CLOSE)
    torch.testing.assert_close(y[:, -1], h_n[-1, :, -1])
    state = None
    for t in range(9):
        z, state = rnn.step(x[:, t], state)
        torch.testing.assert_close(z, y[:, t], **CLOSE)


class Plain(nn.Module):
    """No Spec, no init_state: only what the docstring asks for."""

    def __init__(self, d_in=3, d_h=3):
        super().__init__()
        self.inner, self.d_in, self.state_shape = nn.GRUCell(d_in, d_h), d_in, (d_h,)

    def reset_parameters(self):
        self.inner.reset_parameters()

    def step(self, h, x):
        return self.inner(x, h)


def test_any_module_as_cell():
    torch.manual_seed(0)
    rnn = ParaRNN(Plain(), num_layers=2)
    assert not torch.equal(rnn.cells[0].inner.weight_hh, rnn.cells[1].inner.weight_hh)
    x = torch.randn(2, 9, 3)
    y, h = rnn(x)
    torch.testing.assert_close(y, stacked(rnn, x)[0], **CLOSE)
    state = None
    for t in range(9):
        z, state = rnn.step(x[:, t], state)
    torch.testing.assert_close(z, y[:, -1], **CLOSE)
    torch.testing.assert_close(state, h, **CLOSE)
    with pytest.raises(ValueError, match="list of cells"):
        ParaRNN(Plain(3, 5), num_layers=2)


@layers
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes(make, dtype):
    rnn = make(num_layers=2).to(dtype)
    x = torch.randn(2, 9, 3, dtype=dtype)
    y, h = rnn(x)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert (y.dtype, h.dtype) == (dtype, wide)
    again, _ = rnn(x, h)
    assert again.dtype == dtype
    z, state = rnn.step(x[:, 0], h)
    assert (z.dtype, state.dtype) == (dtype, wide)


@layers
def test_lengths_and_batches_at_the_edge(make):
    rnn = make(num_layers=2)
    for batch in (0, 1):
        for length in (0, 1):
            y, h = rnn(torch.randn(batch, length, 3))
            assert y.shape == (batch, length, rnn.hidden_size)
            assert h.shape == (2, batch, *rnn.cells[0].state_shape)
            h0 = torch.randn(2, batch, *rnn.cells[0].state_shape)
            _, h = rnn(torch.randn(batch, length, 3), h0)
            if length == 0:
                assert torch.equal(h, h0)


@layers
def test_gradients(make):
    torch.manual_seed(0)
    rnn = make(num_layers=2, solver="newton").double()
    x = torch.randn(2, 12, 3, dtype=torch.float64, requires_grad=True)
    h0 = torch.randn(2, 2, *rnn.cells[0].state_shape, dtype=torch.float64, requires_grad=True)
    inputs = [x, h0, *rnn.parameters()]
    y, h = rnn(x, h0)
    got = torch.autograd.grad(y.pow(2).sum() + 3 * h.pow(3).sum(), inputs)
    y, h = stacked(rnn, x, h0)
    want = torch.autograd.grad(y.pow(2).sum() + 3 * h.pow(3).sum(), inputs)
    torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-10)


def test_writing_into_the_results_is_safe():
    rnn = ParaRNN(ParaGRU(3, 4), num_layers=2)
    with torch.no_grad():
        y, h = rnn(torch.randn(2, 9, 3))
        kept = y.clone()
        h.zero_()
        assert torch.equal(y, kept)


def test_configuration_reaches_the_solver():
    x = torch.randn(2, 40, 3)
    rnn = ParaRNN(ParaGRU(3, 4), solver="shooting", config=NewtonConfig(chunk_length=8))
    rnn(x)
    assert (rnn.last_solutions[0].method, rnn.last_solutions[0].chunks) == ("shooting", 5)
    rnn = ParaRNN(ParaGRU(3, 4), solver="newton")
    rnn(x)
    assert rnn.last_solutions[0].method == "newton"
    assert "newton" in repr(rnn)


@pytest.mark.parametrize(
    ("build", "error", "match"),
    [
        (lambda: ParaRNN(ParaGRU(3, 4), solver="magic"), ValueError, "'magic'"),
        (lambda: ParaRNN(ParaGRU(3, 4), num_layers=0), ValueError, "num_layers"),
        (lambda: ParaRNN(ParaGRU(3, 4), dropout=1.0), ValueError, "dropout"),
        (lambda: ParaRNN(ParaGRU(3, 4), dropout=-0.1), ValueError, "dropout"),
        (lambda: ParaRNN([]), TypeError, "cell"),
        (lambda: ParaRNN([ParaGRU(3, 4), "gru"]), TypeError, "cell"),
        (lambda: ParaRNN([ParaGRU(3, 4), ParaGRU(5, 4)]), ValueError, "d_in=5, expected 4"),
        (lambda: ParaRNN([ParaGRU(3, 3)] * 2, num_layers=3), ValueError, "num_layers"),
        (lambda: ParaRNN(ParaGRU), TypeError, "cell"),
    ],
)
def test_bad_layers(build, error, match):
    with pytest.raises(error, match=match):
        build()


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda rnn, x, h: rnn(x[..., :2]), ValueError),
        (lambda rnn, x, h: rnn(x[None]), ValueError),
        (lambda rnn, x, h: rnn(x.tolist()), (TypeError, ValueError)),
        (lambda rnn, x, h: rnn(x.double()), TypeError),
        (lambda rnn, x, h: rnn(x, h[:1]), ValueError),
        (lambda rnn, x, h: rnn(x, h[:, :1]), ValueError),
        (lambda rnn, x, h: rnn(x, h[0]), ValueError),
        (lambda rnn, x, h: rnn(x, h[..., :2]), ValueError),
        (lambda rnn, x, h: rnn(x[0], h), ValueError),
        (lambda rnn, x, h: rnn(x, resets=torch.zeros(5, 2, dtype=torch.bool)), ValueError),
        (lambda rnn, x, h: rnn.step(x), ValueError),
        (lambda rnn, x, h: rnn.step(x[:, 0], h[:1]), ValueError),
        (lambda rnn, x, h: rnn.step(x[:, 0], h[:, :1]), ValueError),
    ],
)
def test_bad_inputs(call, error):
    rnn = ParaRNN(ParaGRU(3, 4), num_layers=2)
    with pytest.raises(error, match="got"):
        call(rnn, torch.randn(2, 5, 3), torch.zeros(2, 2, 4))


def test_state_dict_and_copies():
    torch.manual_seed(0)
    a, b = ParaRNN(ParaGRU(3, 4), num_layers=2), ParaRNN(ParaGRU(3, 4), num_layers=2)
    x = torch.randn(2, 9, 3)
    a(x)
    b.load_state_dict(a.state_dict())
    assert torch.equal(a(x)[0], b(x)[0])
    assert torch.equal(copy.deepcopy(a)(x)[0], a(x)[0])
    assert set(a.state_dict()) == {
        f"cells.{i}.{n}"
        for i in (0, 1)
        for n in ("in_proj.weight", "in_proj.bias", "A_z", "A_r", "A_n")
    }


def test_it_learns():
    """A tiny task, to see that everything is connected: remember the first input."""
    torch.manual_seed(0)
    rnn, head = ParaRNN(ParaGRU(2, 8, mix="head", n_heads=2)), nn.Linear(8, 1)
    optimizer = torch.optim.Adam([*rnn.parameters(), *head.parameters()], lr=0.02)
    x = torch.randn(64, 6, 2)
    target = x[:, 0, :1]
    for _ in range(120):
        optimizer.zero_grad()
        loss = (head(rnn(x)[0][:, -1]) - target).pow(2).mean()
        loss.backward()
        optimizer.step()
    assert float(loss) < 0.15


def test_steps_drop_nothing_in_evaluation():
    """Dropout between layers is for training, in a step as in a sequence."""
    torch.manual_seed(0)
    rnn = ParaRNN(ParaGRU(3, 4), num_layers=3, dropout=0.9)
    x, zeros = torch.randn(2, 5, 3), []
    for training in (False, True):
        rnn.train(training)
        whole, _ = rnn(x)
        state, steps = None, []
        for x_t in x.unbind(1):
            y, state = rnn.step(x_t, state)
            steps.append(y)
        gap = (torch.stack(steps, 1) - whole).abs().max()
        zeros.append(float(gap.detach()))
    assert zeros[0] < 1e-6 < 1e-2 < zeros[1]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_states_of_several_slots_are_not_unpacked(depth):
    """``out, (h, c) = …`` would take layers for slots."""
    rnn = ParaRNN(ParaLSTM(3, 4), num_layers=depth)
    for found in (rnn(torch.randn(2, 5, 3)), rnn(torch.randn(5, 3)), rnn.step(torch.randn(2, 3))):
        _, h_n = found
        with pytest.raises(TypeError, match=r"expected 'out, h_n = rnn\(x\)'"):
            _h, _c = h_n
        assert type(h_n[0]) is type(h_n + 1) is type(h_n.detach()) is torch.Tensor
        assert h_n.shape[0] == depth
        again = copy.deepcopy(h_n.detach()), pickle.loads(pickle.dumps(h_n.detach()))
        assert all(torch.equal(a, h_n) for a in again)
    assert type(pickle.loads(pickle.dumps(rnn(torch.randn(2, 5, 3))[1].detach()))) is torch.Tensor
    with torch.no_grad():
        _, h_n = rnn(torch.randn(2, 5, 3))
        assert type(pickle.loads(pickle.dumps(h_n))) is torch.Tensor
    rnn(torch.randn(2, 5, 3), h_n)[0].sum().backward()
    _, plain = ParaRNN(ParaGRU(3, 4), num_layers=2)(torch.randn(2, 5, 3))
    assert len(list(plain)) == 2


@pytest.mark.parametrize("make", [ParaGRU, ParaLSTM, MinGRU])
@pytest.mark.parametrize("batch_first", [True, False])
def test_lengths_are_those_of_a_packed_sequence(make, batch_first):
    torch.manual_seed(0)
    rnn = ParaRNN(make(3, 4), num_layers=2, batch_first=batch_first).double()
    lengths = torch.tensor([3, 7, 1, 0])
    x = torch.randn(4, 7, 3, dtype=torch.float64)
    x[torch.arange(7) >= lengths[:, None]] = float("nan")
    given = x if batch_first else x.transpose(0, 1)
    given.requires_grad_()
    output, h_n = rnn(given, lengths=lengths)
    (gradient,) = torch.autograd.grad(output.sum() + h_n.sum(), given)
    assert gradient.isfinite().all()
    output = output if batch_first else output.transpose(0, 1)
    packed = pack_padded_sequence(x[:3], lengths[:3], batch_first=True, enforce_sorted=False)
    wanted, finals = rnn(packed)
    wanted, _ = pad_packed_sequence(wanted, batch_first=True)
    near = {"rtol": 0, "atol": 1e-14}  # of another batch size
    torch.testing.assert_close(output[:3], wanted, **near)
    torch.testing.assert_close(h_n[:, :3], finals, check_dtype=True, **near)
    start = torch.stack([c.init_state(1)[0] for c in rnn.cells])
    assert torch.equal(h_n[:, 3], start)
    single, last = rnn(x[0], lengths=torch.tensor(3))
    torch.testing.assert_close(single, output[0], **near)
    torch.testing.assert_close(last, h_n[:, 0], **near)


@pytest.mark.parametrize(
    ("lengths", "kind"),
    [
        ([1, 2], TypeError),
        (torch.tensor([1.0, 2.0]), TypeError),
        (torch.tensor([1, 2, 3]), ValueError),
        (torch.tensor([1, 6]), ValueError),
        (torch.tensor([-1, 2]), ValueError),
    ],
)
def test_wrong_lengths(lengths, kind):
    with pytest.raises(kind, match=r"lengths: got .* expected"):
        ParaRNN(ParaGRU(3, 4))(torch.randn(2, 5, 3), lengths=lengths)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("dropout", "0.1"),
        ("dropout", True),
        ("dropout", 1.0),
        ("batch_first", 1),
        ("num_layers", True),
        ("num_layers", 0),
        ("num_layers", 1.5),
        ("solver", "fast"),
        ("solver", []),
        ("config", {}),
    ],
)
def test_wrong_arguments_are_named(argument, value):
    with pytest.raises((TypeError, ValueError), match=f"{argument}: got .*expected"):
        ParaRNN(ParaGRU(3, 4), **{argument: value})


@pytest.mark.parametrize("make", [ParaGRU, MinGRU, DeltaMinGRU])
def test_final_states_of_packed_sequences_are_not_rounded(make):
    torch.manual_seed(0)
    more = {"n_heads": 2} if make is DeltaMinGRU else {}
    rnn = ParaRNN(make(3, 4, **more)).bfloat16()
    x, lengths = torch.randn(3, 9, 3, dtype=torch.bfloat16), torch.tensor([4, 9, 6])
    packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    output, h_n = rnn(packed)
    assert (output.data.dtype, h_n.dtype) == (torch.bfloat16, torch.float32)
    assert not torch.equal(h_n, h_n.bfloat16().float())
    for row, n in enumerate(lengths.tolist()):
        _, alone = rnn(x[row : row + 1, :n])
        torch.testing.assert_close(h_n[:, row], alone[:, 0], rtol=1e-5, atol=1e-5)


def test_a_list_of_cells_has_only_modules():
    class Plain:
        state_shape = (4,)

        def step(self, h, x):
            return h

    with pytest.raises(TypeError, match="expected a cell, or a non-empty list of cells"):
        ParaRNN([ParaGRU(3, 4), Plain()])
