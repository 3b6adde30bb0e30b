"""Time gaps through the solving functions, the layer and the agreement report."""

import pytest
import torch
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence, pad_packed_sequence

import pararnn
from pararnn import Cell, NewtonConfig, ParaGRU, ParaRNN, Spec, softplus, tanh
from pararnn.solvers.problem import prepare
from pararnn.solvers.spec_recurrence import pack

with Spec("Timed") as timed:
    h = timed.state("h", bounds=(-1, 1))
    u_f, u_k = timed.drives("u_f u_k")
    w = timed.map("w", structure="diagonal")
    dt_ = timed.time_gap("dt")
    a = timed.let("a", pararnn.exp(-(softplus(u_f) * dt_)))
    timed.next(h, a * h + (1 - a) * tanh(w(h) + u_k))


class Timed(Cell):
    spec = timed

    def recurrence(self, h, u_f, u_k, dt, w):
        a = torch.exp(-torch.nn.functional.softplus(u_f) * dt[..., None])
        return a * h + (1 - a) * torch.tanh(w * h + u_k)


def problem(batch=2, length=19, dtype=torch.float64, d_in=3):
    torch.manual_seed(0)
    cell = Timed(d_in, 4, dtype=dtype)
    x = torch.randn(batch, length, d_in, dtype=dtype)
    return cell, x, torch.rand(batch, length, dtype=dtype) * 3


METHODS = ("sequential", "newton", "shooting")


def settings(method):
    return NewtonConfig(chunk_length=4) if method == "shooting" else NewtonConfig()


def test_projection_has_no_part_of_it():
    cell, x, _ = problem()
    assert cell.in_proj.out_features == 8
    u = cell.drives(x)
    assert u.shape == (2, 19, 8)
    assert [tuple(p.shape) for p in cell.split(u)] == [(2, 19, 4)] * 2
    packed = pack(u, torch.zeros(2, 19, dtype=u.dtype))
    assert [tuple(p.shape) for p in cell.split(packed)] == [(2, 19, 4)] * 2 + [(2, 19)]


@pytest.mark.parametrize("method", METHODS)
def test_states_are_those_of_a_loop(method):
    cell, x, dt = problem(length=67)
    h0 = torch.rand(2, 4, dtype=x.dtype)
    resets = torch.rand(2, 67) < 0.1
    state, loop = h0, []
    for t in range(67):
        state = torch.where(resets[:, t, None], torch.zeros_like(state), state)
        state = cell.step(state, x[:, t], dt=dt[:, t])
        loop.append(state)
    states = pararnn.solve(
        cell, x, settings(method), method=method, dt=dt, h0=h0, resets=resets
    ).states
    torch.testing.assert_close(states, torch.stack(loop, 1), rtol=1e-11, atol=1e-11)
    derived = Cell(3, 4, spec=timed, dtype=x.dtype)
    derived.load_state_dict(cell.state_dict())
    torch.testing.assert_close(
        derived.step(h0, x[:, 0], dt=dt[:, 0]), cell.step(h0, x[:, 0], dt=dt[:, 0])
    )


@pytest.mark.parametrize("method", METHODS)
def test_derivatives(method):
    cell, x, dt = problem(length=7)
    resets = torch.rand(2, 7) < 0.2

    def states(x, dt, h0):
        return pararnn.solve(
            cell, x, settings(method), method=method, dt=dt, h0=h0, resets=resets
        ).states

    inputs = [t.requires_grad_() for t in (x, dt + 0.1, torch.rand(2, 4, dtype=x.dtype))]
    assert torch.autograd.gradcheck(states, inputs)
    assert torch.autograd.gradgradcheck(states, inputs)


def test_named_solvers_take_it():
    cell, x, dt = problem()
    expected = pararnn.sequential_apply(cell, x, dt=dt)
    torch.testing.assert_close(pararnn.newton_apply(cell, x, dt=dt), expected)
    torch.testing.assert_close(pararnn.shooting_apply(cell, x, dt=dt), expected)
    given = pararnn.solve(cell, drives=cell.drives(x), dt=dt).states
    torch.testing.assert_close(given, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gaps_of_narrow_cells_may_be_float32(dtype):
    cell, x, dt = problem(dtype=dtype)
    fine = torch.full((2, 19), 1.001)
    task = prepare(cell, x, None, None, dt=fine)
    assert task.u.dtype == dtype
    assert task.inputs.dtype == torch.float32
    solution = pararnn.solve(cell, x, dt=fine)
    assert solution.states.dtype == dtype
    wide = Timed(3, 4)
    wide.load_state_dict({k: v.float() for k, v in cell.state_dict().items()})
    expected = pararnn.solve(wide, drives=cell.drives(x).float(), dt=fine).final_state
    torch.testing.assert_close(solution.final_state, expected)
    pararnn.solve(cell, x, dt=dt.to(dtype))


def test_autocast():
    cell, x, dt = problem(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rough = pararnn.solve(cell, x, dt=dt).states
    assert rough.dtype == torch.bfloat16
    torch.testing.assert_close(
        rough.float(), pararnn.solve(cell, x, dt=dt).states, rtol=0.05, atol=0.05
    )


def test_missing_and_unwanted_gaps_are_errors():
    cell, x, dt = problem()
    for call in (
        lambda: pararnn.solve(cell, x),
        lambda: pararnn.sequential_apply(cell, x),
        lambda: cell.step(cell.init_state(2), x[:, 0]),
        lambda: ParaRNN(cell)(x),
        lambda: ParaRNN(cell).step(x[:, 0]),
        lambda: pararnn.verify_agreement(cell, x),
    ):
        with pytest.raises(TypeError, match="dt: Timed takes time gaps, got none; give dt="):
            call()
    gru = ParaGRU(3, 4, dtype=x.dtype)
    for call in (
        lambda: pararnn.solve(gru, x, dt=dt),
        lambda: gru.step(gru.init_state(2), x[:, 0], dt=dt[:, 0]),
        lambda: ParaRNN(gru)(x, dt=dt),
    ):
        with pytest.raises(TypeError, match=r"dt: got time gaps, expected none.* leave dt out"):
            call()

    class Opaque(torch.nn.Module):
        state_shape, d_in = (3,), 3

        def step(self, h, x):
            return torch.tanh(h + x)

    with pytest.raises(TypeError, match="which has no Spec; leave dt out"):
        pararnn.solve(Opaque(), x, dt=dt)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda dt: dt[:1], ValueError, r"got shape \(1, 19\), expected \(2, 19\)"),
        (lambda dt: dt[..., None], ValueError, "nothing is broadcast"),
        (lambda dt: dt.float(), TypeError, "expected torch.float64; convert"),
        (lambda dt: dt.long(), TypeError, "expected a floating-point dtype"),
        (lambda dt: dt.tolist(), TypeError, "expected a torch.Tensor"),
        (lambda dt: dt.to("meta"), ValueError, "got device meta"),
        (lambda dt: dt - 2, ValueError, "got a time gap of -.* sort the sequence by time"),
    ],
)
def test_wrong_gaps_are_errors(change, error, message):
    cell, x, dt = problem()
    with pytest.raises(error, match=message):
        pararnn.solve(cell, x, dt=change(dt))


@pytest.mark.parametrize("method", ["auto", "sequential", "newton", "shooting"])
def test_a_gap_that_is_no_number_is_an_error(method):
    cell, x, dt = problem()
    dt[0, 9] = torch.nan
    with pytest.raises(ValueError, match="dt: got a time gap of nan, expected none that is NaN or"):
        pararnn.solve(cell, x, dt=dt, method=method)
    with pytest.raises(ValueError, match="dt: got a time gap of nan, expected none that is NaN or"):
        cell.step(cell.init_state(len(x)), x[:, 9], dt=dt[:, 9])


def test_layer():
    cell, x, dt = problem(d_in=4)
    rnn = ParaRNN(cell, num_layers=2)
    output, h_n = rnn(x, dt=dt)
    inner = x
    for c in rnn.cells:
        inner = pararnn.sequential_apply(c, inner, dt=dt)
    torch.testing.assert_close(output, inner)
    state = None
    for t in range(x.shape[1]):
        y, state = rnn.step(x[:, t], state, dt=dt[:, t])
        torch.testing.assert_close(y, output[:, t])
    torch.testing.assert_close(state, h_n)
    single, _ = rnn(x[0], dt=dt[0])
    torch.testing.assert_close(single, output[0])
    time_first = ParaRNN(list(rnn.cells), batch_first=False)
    torch.testing.assert_close(
        time_first(x.transpose(0, 1), dt=dt.transpose(0, 1))[0].transpose(0, 1), output
    )


def test_only_the_layers_that_take_gaps_get_them():
    cell, x, dt = problem(d_in=4)
    gru = ParaGRU(4, 4, dtype=x.dtype)
    output, _ = ParaRNN([gru, cell])(x, dt=dt)
    inner = pararnn.sequential_apply(gru, x)
    torch.testing.assert_close(output, pararnn.sequential_apply(cell, inner, dt=dt))


def test_packed_sequences():
    cell, x, dt = problem(batch=3)
    lengths = torch.tensor([5, 19, 11])
    rnn = ParaRNN(cell)
    packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    gaps = pack_sequence([dt[i, :n] for i, n in enumerate(lengths)], enforce_sorted=False)
    output, h_n = rnn(packed, dt=gaps)
    padded, _ = pad_packed_sequence(output, batch_first=True)
    for i, n in enumerate(lengths):
        alone, last = rnn(x[i : i + 1, :n], dt=dt[i : i + 1, :n])
        torch.testing.assert_close(padded[i : i + 1, :n], alone)
        torch.testing.assert_close(h_n[:, i : i + 1], last)
    with pytest.raises(TypeError, match="expected a PackedSequence of the lengths of x"):
        rnn(packed, dt=dt)
    with pytest.raises(TypeError, match="dt: got PackedSequence, expected a tensor shaped like x"):
        rnn(x, dt=gaps)


def test_agreement():
    cell, x, dt = problem(length=211)
    assert pararnn.verify_agreement(cell, x, dt=dt).passed
    rnn = ParaRNN([cell, ParaGRU(4, 4, dtype=x.dtype)])
    report = pararnn.verify_agreement(rnn, x, dt=dt)
    assert report.passed
    assert len(report.layers) == 2
    assert report.layers[0].certified < 1e-9
    for change in (lambda t: t[0], lambda t: t.transpose(0, 1)):
        other = ParaRNN(list(rnn.cells), batch_first=False)
        assert pararnn.verify_agreement(other, change(x), dt=change(dt)).passed

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = rnn

        def forward(self, x, dt):
            return self.rnn(x, dt=dt)[0]

    assert pararnn.verify_agreement(Model(), x, dt=dt).passed
