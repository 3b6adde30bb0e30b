"""DeltaMinGRU: the delta rule written out again, and the layer around it."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch

import pararnn
from pararnn import DeltaMinGRU, ParaRNN, Spec
from pararnn.cells.cell import Cell

WIDE = torch.float64
FORMS = [
    {},
    {"nh": 2, "d_k": 3, "d_v": 5},
    {"nh": 3, "n_heads": 1, "d_k": 5, "d_v": 2, "bias": False},
    {"decay": "learnable", "decay_rate": 0.3},
    {"nh": 2, "decay": "fixed", "log1p_delta": True, "chunk_size": 5},
]


def build(seed=0, d_in=6, d_h=8, **settings):
    torch.manual_seed(seed)
    return DeltaMinGRU(d_in, d_h, **settings).to(WIDE)


def inputs(layer, batch=2, length=37, seed=1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, length, layer.d_in, generator=generator, dtype=WIDE)
    gaps = torch.rand(batch, length, generator=generator, dtype=WIDE) * 3 if layer.decay else None
    h0 = torch.randn(batch, 1, layer.flat_width, generator=generator, dtype=WIDE)
    return x, gaps, h0


def written_out(layer, x, gaps=None, h0=None, resets=None):
    """The layer, token by token and head by head, from its weights."""
    heads, rows, columns, nh = layer.n_heads, layer.d_k, layer.d_v, layer.nh
    weight, bias = layer.in_proj.weight, layer.in_proj.bias
    outputs, finals = [], []
    for b in range(x.shape[0]):
        state = torch.zeros(heads, rows, columns, dtype=x.dtype)
        if h0 is not None:
            state = h0[b].reshape(heads, rows, columns)
        states = list(state)
        steps = []
        for t in range(x.shape[1]):
            u = weight @ x[b, t] + (0 if bias is None else bias)
            q, keys, values, logits = u.split(
                (heads * rows, nh * heads * rows, nh * heads * columns, nh * heads)
            )
            read = []
            for n in range(heads):
                S = states[n]
                if resets is not None and resets[b, t]:
                    S = torch.zeros_like(S)
                if gaps is not None:
                    gap = torch.log1p(gaps[b, t]) if layer.log1p_delta else gaps[b, t]
                    rate = layer.decay_rate
                    if layer.decay == "learnable":
                        rate = torch.log(1 + torch.exp(layer.rho[n]))
                    S = torch.exp(-rate * gap) * S
                for j in range(nh):
                    at = j * heads + n
                    k = keys[at * rows : (at + 1) * rows]
                    k = k / k.square().sum().sqrt()
                    v = values[at * columns : (at + 1) * columns]
                    beta = 2 / (1 + torch.exp(-logits[at]))
                    S = S - beta * torch.outer(k, k @ S) + beta * torch.outer(k, v)
                states[n] = S
                read.append(q[n * rows : (n + 1) * rows] @ S)
            y = layer.out_proj.weight @ torch.cat(read)
            steps.append(y if layer.out_proj.bias is None else y + layer.out_proj.bias)
        outputs.append(torch.stack(steps))
        finals.append(torch.stack(states).reshape(1, -1))
    return torch.stack(outputs), torch.stack(finals)


@pytest.mark.parametrize("settings", FORMS)
def test_a_sequence_and_its_gradients(settings):
    layer = build(**settings)
    x, gaps, h0 = inputs(layer)
    leaves = [x.requires_grad_(), h0.requires_grad_(), *layer.parameters()]
    if gaps is not None:
        leaves.append(gaps.requires_grad_())
    want_y, want_h = written_out(layer, x, gaps, h0)
    y, h = layer(x, h0, gaps, return_state=True)
    torch.testing.assert_close(y, want_y, rtol=0, atol=1e-12)
    torch.testing.assert_close(h, want_h, rtol=0, atol=1e-12)
    weights, last = torch.randn_like(y), torch.randn_like(h)
    losses = [(a * weights).sum() + (b * last).sum() for a, b in ((y, h), (want_y, want_h))]
    for got, want in zip(*(torch.autograd.grad(v, leaves) for v in losses), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("settings", FORMS)
def test_one_step_after_the_other(settings):
    layer = build(**settings)
    x, gaps, h0 = inputs(layer, length=9)
    want_y, want_h = layer(x, h0, gaps, return_state=True)
    h, outputs = h0[:, 0], []
    for t in range(9):
        gap = None if gaps is None else gaps[:, t]
        y, following = layer.stream(x[:, t], h, gap)
        state = layer.step(layer.unflat(h), x[:, t], dt=gap)
        assert torch.equal(layer.flat(state), following)
        torch.testing.assert_close(layer.output(state, x[:, t]), y, rtol=0, atol=1e-13)
        outputs.append(y)
        h = following
    torch.testing.assert_close(torch.stack(outputs, 1), want_y, rtol=0, atol=1e-12)
    torch.testing.assert_close(h, want_h[:, 0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("settings", FORMS)
@pytest.mark.parametrize("method", ["auto", "sequential", "newton", "shooting"])
def test_in_a_layer_by_every_method(settings, method):
    layer = build(**settings)
    x, gaps, h0 = inputs(layer, length=23)
    resets = torch.zeros(2, 23, dtype=torch.bool)
    resets[0, [0, 7]] = resets[1, 22] = True
    want_y, want_h = written_out(layer, x, gaps, h0, resets)
    around = ParaRNN(layer, solver=method)
    y, h_n = around(x, layer.unflat(h0).transpose(0, 1), resets=resets, dt=gaps)
    torch.testing.assert_close(y, want_y, rtol=0, atol=1e-12)
    torch.testing.assert_close(layer.flat(h_n[0]), want_h[:, 0], rtol=0, atol=1e-12)
    (solution,) = around.last_solutions
    assert solution.method == ("scan" if method == "auto" else solution.method)
    torch.testing.assert_close(
        layer.output(solution.states, x), want_y, rtol=0, atol=1e-12
    )  # with auto, states are solved for now
    shown = pararnn.explain(around, x).layers[0].method
    assert shown == solution.method


def test_stacked_layers_chain_by_the_output():
    stack = ParaRNN(build(d_in=8), num_layers=2).to(WIDE)
    x = torch.randn(2, 5, 8, dtype=WIDE)
    y, h_n = stack(x)
    assert y.shape == (2, 5, 8)
    assert h_n.shape == (2, 2, 4, 2, 2)
    state = stack.init_state(2)
    for t in range(5):
        step, state = stack.step(x[:, t], state)
    torch.testing.assert_close(step, y[:, -1], rtol=0, atol=1e-12)
    torch.testing.assert_close(state, h_n, rtol=0, atol=1e-12)


@pytest.mark.parametrize("chunk_size", [1, 2, 7, 64, 1000])
def test_the_chunk_size_changes_nothing(chunk_size):
    layer = build(nh=2, chunk_size=chunk_size)
    x, _, h0 = inputs(layer, length=131)
    want, _ = written_out(layer, x, None, h0)
    torch.testing.assert_close(layer(x, h0), want, rtol=0, atol=1e-11)


@pytest.mark.parametrize(("batch", "length"), [(0, 3), (2, 0), (1, 1), (0, 0)])
def test_empty_and_single(batch, length):
    layer = build(nh=2, decay="learnable")
    x, gaps, h0 = inputs(layer, batch, length)
    y, h = layer(x.requires_grad_(), h0, gaps, return_state=True)
    assert y.shape == (batch, length, 8)
    assert h.shape == (batch, 1, layer.flat_width)
    if length == 0:
        assert torch.equal(h, h0)
    (y.sum() + h.sum()).backward()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize(
    ("settings", "count"),
    [({}, 16_900), ({"nh": 2}, 25_480), ({"n_heads": 1, "d_k": 8, "d_v": 8, "nh": 2}, 3_306)],
)
def test_number_of_parameters(settings, count):
    assert sum(p.numel() for p in DeltaMinGRU(64, 64, **settings).parameters()) == count


def test_every_head_starts_as_a_linear_of_its_own():
    torch.manual_seed(0)
    layer = DeltaMinGRU(400, 300, n_heads=4, d_k=50, d_v=70, nh=2)
    bound = 400**-0.5
    for p in (layer.in_proj.weight, layer.in_proj.bias):
        assert float(p.abs().max()) <= bound
        assert float(p.std()) == pytest.approx(bound / math.sqrt(3), rel=0.03)
    assert float(layer.out_proj.weight.abs().max()) <= 280**-0.5
    before = layer.out_proj.weight.clone()
    layer.reset_parameters()
    assert not torch.equal(before, layer.out_proj.weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_rounds_what_goes_in_and_out(dtype):
    narrow = build(nh=2, decay="learnable").to(dtype)
    x, gaps, h0 = (t.to(dtype) for t in inputs(narrow, length=200))
    y, h = narrow(x, h0, gaps, return_state=True)
    assert y.dtype == dtype
    assert h.dtype == torch.float32
    # The same drives in float32, and the read-out rounded once before the projection.
    wide = copy.deepcopy(narrow).float()
    u = narrow.drives(x).float()
    read, final = {}, None
    wide.out_proj.register_forward_hook(lambda module, given, out: read.update(given=given[0]))
    _, final = wide.through(u, wide.unflat(h0[:, 0].float()), dt=gaps.float())
    want = narrow.out_proj(read["given"].to(dtype))
    torch.testing.assert_close(y, want, rtol=2**-6, atol=1e-2)
    torch.testing.assert_close(h[:, 0], wide.flat(final), rtol=1e-4, atol=1e-4)


def test_autocast_computes_states_in_float32():
    layer = build(nh=2).float()
    x = inputs(layer)[0].float()
    want, final = layer(x, return_state=True)
    with torch.autocast("cpu", torch.bfloat16):
        y, h = layer(x, return_state=True)
        y_t, h_t = layer.stream(x[:, 0])
    assert y.dtype == y_t.dtype == torch.bfloat16
    assert h.dtype == h_t.dtype == torch.float32
    # Keys, values and step sizes are not rounded; the output projection is.
    torch.testing.assert_close(h, final)
    assert float((y.float() - want).abs().max()) <= 3 * 2**-8 * float(want.abs().max())


def test_a_key_of_zero_writes_nothing():
    layer = build().float()
    with torch.no_grad():
        layer.in_proj.weight[8:16] = 0
        layer.in_proj.bias[8:16] = 0
    x = inputs(layer)[0].float().requires_grad_()
    h0 = torch.randn(2, 1, layer.flat_width)
    y, h = layer(x, h0, return_state=True)
    assert torch.equal(h, h0)
    y.sum().backward()
    assert x.grad.isfinite().all()
    assert layer.in_proj.weight.grad.isfinite().all()


def test_what_later_tokens_are_changes_nothing_before():
    layer = build(nh=2, chunk_size=8)
    x, _, _ = inputs(layer)
    for value in (100.0, torch.nan, torch.inf):
        other = x.clone()
        other[:, 20:] = value
        assert torch.equal(layer(other)[:, :20], layer(x)[:, :20])


@pytest.mark.parametrize(
    ("settings", "error", "says"),
    [
        ({"n_heads": 0}, ValueError, "n_heads: got 0"),
        ({"n_heads": 3}, ValueError, "n_heads: got 3 heads for d_h=8"),
        ({"nh": 0}, ValueError, "nh: got 0"),
        ({"nh": 1.0}, TypeError, "nh: got 1.0"),
        ({"chunk_size": 0}, ValueError, "chunk_size: got 0"),
        ({"chunk_size": -2}, ValueError, "chunk_size: got -2"),
        ({"d_k": 0}, ValueError, "d_k: got 0"),
        ({"d_v": -1}, ValueError, "d_v: got -1"),
        ({"decay": "exp"}, ValueError, "decay: got 'exp'"),
        ({"decay": "fixed", "decay_rate": 0}, ValueError, "decay_rate: got 0"),
        ({"decay": "fixed", "decay_rate": math.nan}, ValueError, "decay_rate: got nan"),
        ({"hidden_size": 9}, ValueError, "d_h=8 and hidden_size=9"),
    ],
)
def test_wrong_arguments(settings, error, says):
    with pytest.raises(error, match=says):
        DeltaMinGRU(6, 8, **settings)


def test_a_divisor_is_not_needed_where_rows_are_given():
    layer = DeltaMinGRU(6, 8, n_heads=3, d_k=5)
    assert (layer.d_v, layer.d_h, layer.flat_width) == (5, 8, 75)


@pytest.mark.parametrize("shape", [(2, 15), (2, 1, 17), (1, 1, 16), (1, 16), (2, 2, 4, 2), (3, 16)])
def test_wrong_states(shape):
    layer = build()
    x = inputs(layer)[0]
    with pytest.raises(ValueError, match=r"h0: got shape .* expected \(2, 1, 16\)"):
        layer(x, torch.zeros(shape, dtype=WIDE))
    with pytest.raises(ValueError, match="h: got shape"):
        layer.stream(x[:, 0], torch.zeros(shape, dtype=WIDE))


def test_gaps_with_and_without_a_decay():
    x, gaps, _ = inputs(build(decay="fixed"))
    with pytest.raises(ValueError, match="dt: got none"):
        build(decay="fixed")(x)
    with pytest.raises(ValueError, match="without decay"):
        build()(x, None, gaps)


def test_huge_rates_leave_only_what_is_written_now():
    layer = build(decay="fixed", decay_rate=1e6)
    x, gaps, h0 = inputs(layer)
    y = layer(x, h0, gaps + 1)
    flat = x.reshape(-1, 1, layer.d_in)
    alone = layer(flat, None, torch.zeros(len(flat), 1, dtype=WIDE))
    torch.testing.assert_close(y, alone.reshape(y.shape), rtol=0, atol=1e-14)


def test_copies_and_rebuilt():
    layer = build(nh=2, d_v=3, decay="learnable", chunk_size=7)
    x, gaps, _ = inputs(layer)
    want = layer(x, None, gaps)
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(twin(x, None, gaps), want)
    fresh = layer.rebuilt(d_in=8)
    assert fresh.hyperparameters() == layer.hyperparameters() | {"d_in": 8}
    same = layer.rebuilt()
    same.load_state_dict(layer.state_dict())
    assert torch.equal(same(x, None, gaps), want)


def test_the_class_of_its_jacobian():
    layer = build(nh=2)
    assert layer.jac_structure == "linear"
    assert layer.spec.linear_class == "householder"


# -- read-outs of cells in general -------------------------------------------------------------


def reading_spec(gap):
    with Spec("Reader", axes=("K", "V")) as s:
        H = s.state("H")
        q, k = s.drives("q k", axes=("K",))
        (v,) = s.drives("v", axes=("V",))
        a = s.let("a", pararnn.exp(-s.time_gap("dt")) if gap else pararnn.sigmoid(v))
        s.next(H, a * H + k * v)
        s.read("o", q * s.updated(H), over="K")
    return s


@pytest.mark.parametrize("gap", [False, True])
def test_an_own_spec_with_a_read_out(gap):
    torch.manual_seed(0)
    cell = Cell(3, spec=reading_spec(gap), sizes={"K": 2, "V": 5}).to(WIDE)
    assert cell.d_h == 5
    x = torch.randn(2, 7, 3, dtype=WIDE)
    more = {"dt": torch.rand(2, 7, dtype=WIDE)} if gap else {}
    layer = ParaRNN(cell)
    assert layer.hidden_size == 5
    y, _ = layer(x, **more)
    u = cell.drives(x)
    q, k, v = u.split((2, 2, 5), -1)
    H = torch.zeros(2, 2, 5, dtype=WIDE)
    state = layer.init_state(2)
    for t in range(7):
        keep = torch.exp(-more["dt"][:, t])[:, None, None] if gap else v[:, t].sigmoid()[:, None]
        H = keep * H + k[:, t, :, None] * v[:, t, None]
        want = (q[:, t, None] @ H).squeeze(1)
        torch.testing.assert_close(y[:, t], want, rtol=0, atol=1e-13)
        step, state = layer.step(x[:, t], state, **{n: d[:, t] for n, d in more.items()})
        torch.testing.assert_close(step, want, rtol=0, atol=1e-13)


@pytest.mark.parametrize("size", [1e25, 1e37, 1e-25])
@pytest.mark.parametrize("way", ["sequential", "newton", "shooting", "layer", "step"])
def test_keys_whose_squares_leave_the_range(way, size):
    """A key is divided by its norm, whatever its size; one below 1e-12 by that."""
    generator = torch.Generator().manual_seed(0)
    cell = DeltaMinGRU(4, 8, n_heads=2)
    drives = torch.randn(2, 40, cell.drives(torch.zeros(1, 1, 4)).shape[-1], generator=generator)
    keys = slice(8, 16)
    leaf = drives.clone()
    leaf[..., keys] *= size
    wide = leaf.double().requires_grad_()
    leaf.requires_grad_()
    u = wide[..., keys].unflatten(-1, (2, 4))
    k = u / u.norm(dim=-1, keepdim=True).clamp_min(1e-12)
    h, states = torch.zeros(2, 2, 4, 4, dtype=torch.float64), []
    for t in range(40):
        key, v = k[:, t].unsqueeze(-1), wide[:, t, 16:24].unflatten(-1, (2, 1, 4))
        h = h + 2 * wide[:, t, 24:26, None, None].sigmoid() * key * (v - key.mT @ h)
        states.append(h)
    want = torch.stack(states, 1)
    if way == "layer":
        got = cell.reads(leaf)[0]
        want = (wide[..., :8].unflatten(-1, (2, 1, 4)) @ want).squeeze(-2)
    elif way == "step":
        state, states = torch.zeros(2, 2, 4, 4), []
        for t in range(40):
            state = cell.recurrence(state, *cell.split(leaf[:, t]))
            states.append(state)
        got = torch.stack(states, 1)
    else:
        got = pararnn.solve(cell, drives=leaf, method=way).states
    (slope,) = torch.autograd.grad(got.sum(), leaf)
    (right,) = torch.autograd.grad(want.sum(), wide)
    torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-5 * float(want.abs().max()))
    for part in (keys, slice(16, None)):
        most = float(right[..., part].abs().max())
        torch.testing.assert_close(
            slope[..., part].double(), right[..., part], rtol=0, atol=2e-5 * most
        )


@pytest.mark.parametrize("length", [0, 1, 9])
def test_a_scan_that_reads_is_one_chunk(length):
    cell, x = DeltaMinGRU(3, 4, n_heads=2), torch.randn(2, length, 3)
    (said,) = pararnn.explain(cell, x).layers
    assert (said.method, said.chunk_length, said.chunks) == ("scan", length, min(length, 1))
