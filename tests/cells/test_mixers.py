"""What all mixers share: calls on sequences, states, time gaps, starts, compilers."""

from __future__ import annotations

import copy
import itertools
import warnings

import pytest
import torch
from torch import nn

import pararnn
from pararnn import GivensMinGRU, MinGRU, MinLSTM, ParaRNN, RotationMinGRU, SignedMinGRU

KINDS = {
    "MinGRU": lambda **kw: MinGRU(3, 8, **kw),
    "MinLSTM": lambda **kw: MinLSTM(3, 8, **kw),
    "SignedMinGRU": lambda **kw: SignedMinGRU(3, 8, **kw),
    "coupled": lambda **kw: SignedMinGRU(3, 8, coupled=True, **kw),
    "RotationMinGRU": lambda **kw: RotationMinGRU(3, 8, **kw),
    "free": lambda **kw: RotationMinGRU(3, 8, snap=None, **kw),
    "GivensMinGRU": lambda **kw: GivensMinGRU(3, 8, block_size=4, **kw),
}
DECAYS = {
    "no decay": {},
    "fixed": {"decay": "fixed", "decay_rate": 0.3},
    "learnable": {"decay": "learnable", "decay_rate": 0.3, "log1p_delta": True},
}


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture(params=DECAYS)
def decay(request):
    return request.param


def built(kind, decay="no decay", seed=0, **kw):
    torch.manual_seed(seed)
    kw = {"dtype": torch.float64} | kw
    return KINDS[kind](**DECAYS[decay], **kw)


def inputs(layer, batch=2, length=41, seed=1):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, length, layer.d_in, generator=g, dtype=torch.float64)
    gaps = 2 * torch.rand(batch, length, generator=g, dtype=torch.float64)
    dtype = layer.in_proj.weight.dtype
    return x.to(dtype), gaps.to(dtype) if layer.spec.gap is not None else None


def by_steps(layer, x, h=None, gaps=None):
    """The hand-written step in a loop, on flat states."""
    state = layer.init_state(x.shape[0]) if h is None else layer.unflat(h.reshape(x.shape[0], -1))
    out = []
    for t in range(x.shape[1]):
        state = layer.step(state, x[:, t], dt=None if gaps is None else gaps[:, t])
        out.append(layer.flat(state))
    return torch.stack(out, 1)


# -- sequences ---------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 2, 33, 97])
def test_a_sequence_is_its_steps(kind, decay, length):
    layer = built(kind, decay)
    x, gaps = inputs(layer, length=length)
    h = torch.rand(2, 1, 8, dtype=torch.float64)
    for start in (None, h):
        torch.testing.assert_close(
            layer(x, start, gaps), by_steps(layer, x, start, gaps), rtol=1e-12, atol=1e-13
        )


def test_gradients_are_those_of_the_loop(kind, decay):
    layer = built(kind, decay)
    x, gaps = inputs(layer, length=53)
    given = [x.requires_grad_(), torch.rand(2, 8, dtype=torch.float64, requires_grad=True)]
    given += [] if gaps is None else [gaps.requires_grad_()]
    weights = torch.randn(2, 53, 8, dtype=torch.float64)
    for leaves, start in ((given, given[1]), ([*given[:1], *given[2:]], None)):
        targets = [*leaves, *layer.parameters()]
        got, want = (
            torch.autograd.grad(
                (run(x, start, gaps) * weights).sum(), targets, materialize_grads=True
            )
            for run in (layer, lambda *a: by_steps(layer, *a))
        )
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11)


def test_pieces_give_the_whole(kind, decay):
    layer = built(kind, decay)
    x, gaps = inputs(layer, length=80)
    whole, last = layer(x, None, gaps, return_state=True)
    state, parts = None, []
    for cut in (slice(0, 1), slice(1, 40), slice(40, 40), slice(40, 80)):
        y, state = layer(
            x[:, cut], state, None if gaps is None else gaps[:, cut], return_state=True
        )
        parts.append(y)
        assert state.shape == (2, 1, 8)
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(state, last, rtol=1e-12, atol=1e-13)
    assert torch.equal(last[:, 0], whole[:, -1])


def test_streaming(kind, decay):
    layer = built(kind, decay)
    x, gaps = inputs(layer)
    whole, state = layer(x, None, gaps), None
    for t in range(x.shape[1]):
        gap = None if gaps is None else gaps[:, t : t + 1] if t % 2 else gaps[:, t]
        state = state if t % 3 else None if state is None else state.unsqueeze(1)
        y, state = layer.stream(x[:, t], state, gap)
        assert state.shape == (2, 8)
        torch.testing.assert_close(y, whole[:, t], rtol=1e-11, atol=1e-12)
    loss = y.sum()
    assert loss.requires_grad, "a step can be trained through"


def test_in_a_layer_it_starts_where_it_does_alone(kind):
    layer = built(kind)
    x, _ = inputs(layer)
    out, final = ParaRNN(layer)(x)
    y, last = layer(x, return_state=True)
    assert torch.equal(out, y)
    assert torch.equal(layer.flat(final[0]), last[:, 0])
    stacked = ParaRNN(layer, num_layers=2)
    assert stacked(x)[0].shape == (2, 41, 8)


def test_resets_start_from_zero(kind, decay):
    layer = built(kind, decay)
    x, gaps = inputs(layer, length=70)
    resets = torch.zeros(2, 70, dtype=torch.bool)
    resets[0, 33], resets[1, 0], resets[1, 61] = True, True, True
    states = pararnn.solve(layer, x, dt=gaps, resets=resets).states
    for row, first in ((0, 33), (1, 0), (1, 61)):
        zero = torch.zeros(1, 8, dtype=torch.float64)
        rest = None if gaps is None else gaps[row : row + 1, first:]
        alone = by_steps(layer, x[row : row + 1, first:], zero, rest)
        upto = 61 - first if (row, first) == (1, 0) else None
        got = layer.flat(states[row : row + 1, first:])
        torch.testing.assert_close(got[:, :upto], alone[:, :upto], rtol=1e-11, atol=1e-12)


def test_one_scan_is_what_runs(kind):
    layer = built(kind)
    solution = pararnn.solve(layer, inputs(layer)[0])
    assert (solution.method, solution.path) == ("scan", "eager")
    assert solution.converged
    assert solution.iterations == 0
    assert "one exact scan" in solution.reason
    assert "scan" in str(pararnn.explain(layer, inputs(layer)[0]))
    chunks = pararnn.NewtonConfig(chunk_length=7)
    assert pararnn.solve(layer, inputs(layer)[0], chunks).method == "shooting"
    assert pararnn.solve(layer, inputs(layer)[0], method="sequential").method == "sequential"


@pytest.mark.parametrize("batch", [0, 1])
@pytest.mark.parametrize("length", [0, 5])
def test_empty(kind, decay, batch, length):
    layer = built(kind, decay)
    x, gaps = inputs(layer, batch, length)
    y, state = layer(x, None, gaps, return_state=True)
    assert y.shape == (batch, length, 8)
    assert state.shape == (batch, 1, 8)
    y.sum().backward()
    if length == 0:
        assert torch.equal(layer.unflat(state[:, 0]), layer.init_state(batch))


def test_strides_do_not_matter(kind, decay):
    layer = built(kind, decay)
    x, gaps = inputs(layer, batch=3)
    want = layer(x, None, gaps)
    odd = torch.empty(41, 3, 3, 2, dtype=torch.float64)[..., 0].permute(2, 0, 1).copy_(x)
    assert not odd.is_contiguous()
    turned = None if gaps is None else gaps.t().contiguous().t()
    torch.testing.assert_close(layer(odd, None, turned), want, rtol=1e-12, atol=1e-13)


# -- starts and shapes -------------------------------------------------------------------------


def test_states_of_other_shapes_are_errors(kind):
    layer = built(kind)
    x, _ = inputs(layer, batch=3, length=4)
    for shape in ((1, 1, 8), (3, 8, 1), (3, 2, 4), (1, 8), (3, 1, 9), (3, 1, 1, 8), (8,)):
        if shape == (3, *layer.state_shape):
            continue  # as init_state gives it
        with pytest.raises(ValueError, match=r"h0: got shape .* expected \(3, 1, 8\) or \(3, 8\)"):
            layer(x, torch.ones(shape, dtype=torch.float64))
    with pytest.raises(ValueError, match="h: got shape"):
        layer.stream(x[:, 0], torch.ones(1, 8, dtype=torch.float64))
    with pytest.raises(TypeError, match=r"h0: got dtype torch\.float32"):
        layer(x, torch.ones(3, 8))
    with pytest.raises(TypeError, match="h0"):
        layer(x, torch.ones(3, 8, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"x: got shape \(3, 3\)"):
        layer(x[:, 0])
    with pytest.raises(ValueError, match=r"x: got shape \(3, 4, 3\)"):
        layer.stream(x)


def test_a_given_state_can_be_trained(kind):
    layer = built(kind)
    x, _ = inputs(layer, length=3)
    h = torch.rand(2, 1, 8, dtype=torch.float64, requires_grad=True)
    layer(x, h).sum().backward()
    assert h.grad is not None
    assert bool((h.grad != 0).any())


def test_parameters_are_drawn_as_those_of_single_heads(kind):
    """Every head as a Linear of its own: bounds 1/√d_in for weights and biases."""
    layer = built(kind, "learnable", dtype=torch.float32)
    fresh = layer.rebuilt(d_in=400)
    assert 0.99 / 20 < fresh.in_proj.weight.abs().max() <= 1 / 20
    assert 0.5 / 20 < fresh.in_proj.bias.abs().max() <= 1 / 20
    torch.testing.assert_close(nn.functional.softplus(fresh.rho), torch.full_like(fresh.rho, 0.3))
    again = copy.deepcopy(layer)
    again.reset_parameters()
    assert not torch.equal(again.in_proj.weight, layer.in_proj.weight)


def test_rebuilt_and_saved(kind, decay):
    layer = built(kind, decay)
    other = layer.rebuilt()
    assert other.hyperparameters() == layer.hyperparameters()
    other.load_state_dict(layer.state_dict())
    x, gaps = inputs(layer)
    assert torch.equal(other(x, None, gaps), layer(x, None, gaps))
    assert not any("rate" in k or k.endswith(".m") for k in layer.state_dict())


def test_both_names_of_the_widths(kind):
    cls = type(built(kind))
    extra = {"block_size": 4} if kind == "GivensMinGRU" else {}
    layer = cls(input_size=3, hidden_size=8, **extra)
    assert (layer.input_size, layer.hidden_size, layer.flat_width) == (3, 8, 8)
    with pytest.raises(TypeError, match="got neither d_h nor hidden_size"):
        cls(3, **extra)
    with pytest.raises(ValueError, match="one size"):
        cls(3, 8, hidden_size=16, **extra)
    assert cls(3, 8, bias=False, **extra).in_proj.bias is None


# -- time gaps ---------------------------------------------------------------------------------


def test_decay_needs_gaps_and_no_decay_refuses_them(kind):
    x = torch.randn(2, 5, 3, dtype=torch.float64)
    gaps = torch.rand(2, 5, dtype=torch.float64)
    with pytest.raises(ValueError, match="dt: got time gaps, expected none"):
        built(kind)(x, None, gaps)
    with pytest.raises(ValueError, match="dt: got none, expected time gaps"):
        built(kind, "fixed")(x)
    layer = built(kind, "fixed")
    for wrong in (gaps[0], gaps[..., None, None], gaps[:, :4], gaps.t(), gaps[:1]):
        with pytest.raises(ValueError, match="dt: got shape"):
            layer(x, None, wrong)
    with pytest.raises(TypeError, match="dt"):
        layer(x, None, gaps.long())
    assert torch.equal(layer(x, None, gaps[..., None]), layer(x, None, gaps))


@pytest.mark.parametrize("bad", ["Fixed", True, 1, "none"])
def test_unknown_decay(kind, bad):
    with pytest.raises(ValueError, match="decay: got"):
        KINDS[kind](decay=bad)


@pytest.mark.parametrize("rate", [0, -1.0, float("nan"), float("inf"), 1e300, 1e-46, "1", True])
def test_rates_that_are_none(kind, rate):
    for decay in ("fixed", "learnable"):
        with pytest.raises(ValueError, match="decay_rate: got"):
            KINDS[kind](decay=decay, decay_rate=rate)


@pytest.mark.parametrize("rate", [1e-6, 0.05, 3.0, 800.0])
def test_a_learned_rate_starts_where_it_is_told(rate):
    layer = MinGRU(3, 4, decay="learnable", decay_rate=rate, dtype=torch.float64)
    want = torch.full((4,), rate, dtype=torch.float64)
    got = nn.functional.softplus(layer.rho, threshold=40)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=0)


def test_rates_are_a_channel_a_plane_a_block():
    shapes = {k: tuple(built(k, "learnable").rho.shape) for k in KINDS}
    assert shapes == {
        "MinGRU": (8,),
        "MinLSTM": (8,),
        "SignedMinGRU": (8,),
        "coupled": (8,),
        "RotationMinGRU": (4,),
        "free": (4,),
        "GivensMinGRU": (2,),
    }


def test_one_warning_an_instance(kind):
    layer = built(kind, "learnable")
    x, gaps = inputs(layer, length=6)
    for bad in (float("nan"), float("inf"), -float("inf"), -1.0):
        broken = gaps.clone()
        broken[1, 3] = bad
        good = gaps.clone()
        good[1, 3] = 1e10 if bad == float("inf") else 0.0
        fresh = copy.deepcopy(layer)
        with pytest.warns(UserWarning, match="dt: got 1 gaps"):
            y = fresh(x, None, broken)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert torch.equal(fresh(x, None, broken), y)
            assert torch.equal(layer(x, None, good), y)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer(x, None, torch.tensor([0.0, 1e-30, 1e30] * 4, dtype=torch.float64).reshape(2, 6))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_any_gap_in_any_dtype(kind, dtype):
    layer = built(kind, "learnable").to(dtype)
    x = torch.randn(1, 8, 3).to(dtype)
    gaps = torch.tensor([[0, 1e-30, 1e-3, 1, 1e4, 1e10, 3e38, float("inf")]])
    gaps = gaps.to(torch.float64 if dtype == torch.float64 else torch.float32).requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        y = layer(x, None, gaps)
    assert y.dtype == dtype
    assert bool(y.isfinite().all())
    for g in torch.autograd.grad(y.float().square().sum(), [gaps, *layer.parameters()]):
        assert bool(g.isfinite().all())


# -- constants and dtypes ----------------------------------------------------------------------


def test_constants_are_not_rounded_with_the_rest():
    layer = MinGRU(3, 4, decay="fixed", decay_rate=0.3)
    half = layer.to(torch.bfloat16)
    assert half.rate.dtype == torch.float32
    assert half.rate.item() == torch.tensor(0.3).item()
    assert half.double().rate.item() == 0.3
    free = RotationMinGRU(3, 12, snap=(1001, 3)).half()
    assert free.m.tolist() == [1001, 3] * 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_rounds_the_output_only(kind, decay, dtype):
    layer = built(kind, decay, dtype=torch.float32).to(dtype)
    x, gaps = inputs(layer, length=64)
    gaps = None if gaps is None else gaps.float()
    y, state = layer(x, None, gaps, return_state=True)
    assert (y.dtype, state.dtype) == (dtype, torch.float32)
    u = layer.drives(x).float()
    wide = copy.deepcopy(layer).float()
    want = layer.flat(pararnn.solve(wide, drives=u, dt=gaps).states)
    scale = torch.finfo(dtype).eps * want.abs().clamp_min(torch.finfo(dtype).tiny)
    assert bool(((y.float() - want).abs() <= 0.6 * scale).all())
    torch.testing.assert_close(state[:, 0], want[:, -1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("length", [64, 10_000])
def test_float32_is_right_at_any_length(kind, length):
    layer = built(kind, dtype=torch.float32)
    x, _ = inputs(layer, batch=1, length=length)
    want = layer.double()(x.double())
    got = layer.float()(x)
    relative = float((got - want).abs().max() / want.abs().max())
    assert relative < (1e-6 if kind in ("MinGRU", "MinLSTM", "coupled") else 1e-4)


# -- transforms --------------------------------------------------------------------------------


def traced(kind, decay):
    layer = built(kind, decay, dtype=torch.float32)
    x, gaps = inputs(layer)
    return layer, (x, None, gaps)


COMPILED = list(
    itertools.product(("MinGRU", "RotationMinGRU", "GivensMinGRU"), ("no decay", "learnable"))
)


@pytest.mark.parametrize(("kind", "decay"), COMPILED)
def test_compiled_without_a_break(kind, decay):
    layer, args = traced(kind, decay)
    torch.compiler.reset()
    run = torch.compile(layer, fullgraph=True, backend="aot_eager")
    want = layer(*args)
    got = run(*args)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
    weights = torch.randn_like(want)
    parameters = list(layer.parameters())
    expected = torch.autograd.grad((want * weights).sum(), parameters)
    for a, b in zip(torch.autograd.grad((got * weights).sum(), parameters), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_exported(kind, decay):
    layer, args = traced(kind, decay)
    program = torch.export.export(layer, args)
    assert torch.equal(program.module()(*args), layer(*args))


def test_mapped(kind, decay):
    layer, (x, _, gaps) = traced(kind, decay)
    many = torch.stack([x, 2 * x, -x])
    several = None if gaps is None else torch.stack([gaps, gaps / 2, 0 * gaps])
    h = torch.rand(2, 1, 8)
    got = torch.vmap(layer, in_dims=(0, None, None if gaps is None else 0))(many, h, several)
    for i in range(3):
        want = layer(many[i], h, None if several is None else several[i])
        torch.testing.assert_close(got[i], want, rtol=1e-5, atol=1e-6)


def test_mapped_over_parameters():
    layers = [built("SignedMinGRU", "learnable", seed=s, dtype=torch.float32) for s in range(3)]
    params, buffers = torch.func.stack_module_state(layers)
    x, gaps = inputs(layers[0])

    def run(p, b):
        return torch.func.functional_call(layers[0], (p, b), (x, None, gaps))

    got = torch.vmap(run)(params, buffers)
    for layer, y in zip(layers, got, strict=True):
        torch.testing.assert_close(y, layer(x, None, gaps), rtol=1e-5, atol=1e-6)


def test_autocast(kind, decay):
    """The output is that of a wide run, rounded."""
    layer, (x, _, gaps) = traced(kind, decay)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x, None, gaps)
        streamed, _ = layer.stream(x[:, 0], None, None if gaps is None else gaps[:, 0])
        u = layer.drives(x)
        assert layer.drives(x.bfloat16()).dtype == u.dtype
    assert y.dtype == streamed.dtype == torch.bfloat16
    assert u.dtype == torch.float32
    want = layer(x, None, gaps)
    assert bool(((y.float() - want).abs() <= 0.6 * 2**-7 * want.abs() + 1e-30).all())
    y.float().sum().backward()
    assert all(bool(p.grad.isfinite().all()) for p in layer.parameters())


def test_second_derivatives(kind, decay):
    if kind == "RotationMinGRU":
        pytest.skip("differences do not see a straight-through estimator")
    layer = built(kind, decay)
    x, gaps = inputs(layer, batch=1, length=4)
    given = [x.requires_grad_(), *([] if gaps is None else [gaps.requires_grad_()])]

    def run(x, gaps=None):
        return layer(x, None, gaps)

    assert torch.autograd.gradgradcheck(run, given)


def test_a_stream_starts_from_init_state(kind):
    """As it is given: not flat, for several slots."""
    for decay in ("no decay", "fixed"):
        layer = built(kind, decay)
        x = torch.randn(2, 4, 3, dtype=torch.float64)
        gaps = None if layer.spec.gap is None else torch.rand(2, 4, dtype=torch.float64)
        now = None if gaps is None else gaps[:, 0]
        start = torch.rand_like(layer.init_state(2))
        for given, same in ((layer.init_state(2), None), (start, layer.flat(start))):
            for a, b in zip(
                layer.stream(x[:, 0], given, now), layer.stream(x[:, 0], same, now), strict=True
            ):
                assert torch.equal(a, b)
            assert torch.equal(layer(x, given, gaps), layer(x, same, gaps))


def test_nothing_of_a_decay_without_one(kind):
    for name, value in (("decay_rate", 1.0), ("decay_rate", 0.05), ("log1p_delta", True)):
        with pytest.raises(ValueError, match=f"{name}: got {value}, expected none without a decay"):
            KINDS[kind](**{name: value})
    KINDS[kind](log1p_delta=False, decay_rate=None)
    assert KINDS[kind](decay="fixed").decay_rate == 1.0
    again = KINDS[kind]().rebuilt()
    assert again.hyperparameters() == KINDS[kind]().hyperparameters()


def test_misuse_names_what_is_meant(kind):
    with pytest.raises(TypeError, match=r"dtype: got 'float32', expected a torch\.dtype"):
        KINDS[kind](dtype="float32")
    with pytest.raises(TypeError, match=r"^\w+(LSTM|GRU): got an argument 'foo' that it does not"):
        KINDS[kind](foo=1)
    layer = built(kind)
    with pytest.raises(ValueError, match="batch: got -1"):
        layer.init_state(-1)
    for wrong in (2.5, True, "2"):
        with pytest.raises(TypeError, match="batch: got"):
            layer.init_state(wrong)
    assert layer.init_state(0).shape == (0, *layer.state_shape)
    assert layer.init_state().shape == layer.state_shape
