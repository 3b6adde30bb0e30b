"""The fused scans and the fused linear cells, against float64 loops and the hand-written steps."""

from __future__ import annotations

import functools

import pytest
import torch

from pararnn import NewtonConfig, sequential_apply, solve
from pararnn.kernels.plan import plan
from pararnn.scan import (
    linear_scan,
    matrix_affine_scan,
    matrix_scan,
    parallel_scan_log,
    prefix_sum,
    reference,
)
from pararnn.solvers.methods import fused
from pararnn.solvers.scans import scan_spec

B, T = 2, 13


def drawn(kit, *shape, dtype=torch.float64):
    return torch.randn(shape, dtype=torch.float64).to(dtype).to(kit.DEVICE)


@pytest.fixture
def chunks(monkeypatch):
    """Sets the length of chunks, which is the cost model's otherwise."""
    plain = fused.plan

    def cut(length, warmup=2):
        monkeypatch.setattr(
            fused,
            "plan",
            lambda *sizes, **more: plain(*sizes, **more | {"length": length, "warmup": warmup}),
        )

    return cut


def coefficients(kit, *rest, dtype=torch.float64):
    """Any sign, with exact zeros and ones, and some that grow."""
    a = drawn(kit, B, T, *rest, dtype=dtype)
    a[0, 3] = 0
    a[1, 5], a[1, 6] = 1, -1
    return a


SCANS = {
    "linear": (linear_scan, lambda kit: (coefficients(kit, 5), drawn(kit, B, T, 5), drawn(kit, B, 5))),
    "many axes": (linear_scan, lambda kit: (coefficients(kit, 2, 3), drawn(kit, B, T, 2, 3), None)),
    "planes": (matrix_scan, lambda kit: (
        coefficients(kit, 3, 2, 2), drawn(kit, B, T, 3, 2), drawn(kit, B, 3, 2))),
    "blocks": (matrix_affine_scan, lambda kit: (
        coefficients(kit, 2, 3, 3) / 2, drawn(kit, B, T, 2, 3, 2), drawn(kit, B, 2, 3, 2))),
    "log": (parallel_scan_log, lambda kit: (
        -drawn(kit, B, T, 5).abs(), drawn(kit, B, T, 5), drawn(kit, B, 5).abs())),
}  # fmt: skip
LOOPS = {
    linear_scan: reference.linear,
    matrix_scan: reference.matrix,
    matrix_affine_scan: reference.matrix,
    parallel_scan_log: reference.log,
}


def compare(found, wanted, tolerance):
    for got, want in zip(found, wanted, strict=True):
        assert got.shape == want.shape
        assert float((got.double() - want).abs().max()) <= tolerance * max(1, want.abs().max())


@pytest.mark.parametrize("length", [pytest.param(T, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param(name, options, marks=[pytest.mark.slow] * (i % 2))
        for i, (name, options) in enumerate(
            (name, options) for name in SCANS for options in ("reverse and resets", "plain")
        )
    ],
)
def test_states_and_gradients(kit, name, options, length, chunks):
    chunks(length)
    torch.manual_seed(len(name) + length)
    scan, make = SCANS[name]
    given = [None if v is None else v.requires_grad_() for v in make(kit)]
    more = {}
    if options != "plain":
        more = {"reverse": True, "resets": torch.rand(B, T, device=kit.DEVICE) < 0.2}
    leaves = [v for v in given if v is not None]
    states, final = scan(*given, backend="fused", return_state=True, **more)
    weight, end = torch.randn_like(states), torch.randn_like(final)
    bars = torch.autograd.grad((states * weight).sum() + (final * end).sum(), leaves)
    want = LOOPS[scan](*given, **more)
    last = want[:, 0] if more else want[:, -1]
    right = torch.autograd.grad((want * weight).sum() + (last * end).sum(), leaves)
    compare([states, final, *bars], [want, last, *right], 1e-12)


def test_second_derivatives(kit):
    a, b, h0 = drawn(kit, 1, 4, 2), drawn(kit, 1, 4, 2), drawn(kit, 1, 2)
    leaves = [v.requires_grad_() for v in (a, b, h0)]
    assert torch.autograd.gradgradcheck(lambda *v: linear_scan(*v, backend="fused"), leaves)


def test_composed_coefficients(kit, chunks):
    chunks(4)
    a, b, h0 = coefficients(kit, 3), drawn(kit, B, T, 3), drawn(kit, B, 3)
    whole, forced = linear_scan(a, b, backend="fused", coefficients=True)
    compare([whole * h0.unsqueeze(1) + forced], [reference.linear(a, b, h0)], 1e-12)


@pytest.mark.parametrize("planes", [False, True])
def test_products_that_overflow(kit, chunks, planes):
    """Where the product of a chunk is infinite and the states are not, the chunk is walked."""
    chunks(3, warmup=0)
    # 1e-37 at step 1 grows to 1e23 at step 5; the products of steps 3 to 5 are 1e40.
    steps = torch.tensor([1e20, 1e20, 1e20, 1e10, 1e10, 1e20, 1e-20, 1e-10, 0.5])
    a = steps[None, :, None].repeat(1, 1, 2).to(kit.DEVICE)
    b = torch.zeros(1, 9, 2, device=kit.DEVICE)
    b[0, 1] = torch.tensor([1e-37, 3e-37])
    b[0, 7:] = torch.tensor([1.0, -2.0])
    scan, loop = linear_scan, reference.linear
    if planes:
        turn = torch.tensor([[0.6, -0.8], [0.8, 0.6]], device=kit.DEVICE)
        a, b = a[..., None, None] * turn, torch.stack([b, b.flip(2)], -1)
        scan, loop = matrix_scan, reference.matrix
    found, wanted = scan(a, b, backend="fused"), loop(a, b)
    assert 1e22 < float(wanted.abs().max()) < 1e25
    size = wanted.flatten(2).abs().amax(2).view(1, 9, *[1] * (wanted.ndim - 2))
    assert float(((found.double() - wanted).abs() / (size + 1e-30)).max()) < 1e-5


@pytest.mark.parametrize("length", [T, 4])
def test_prefix_sums(kit, chunks, length):
    """One kernel; what a start holds is kept through all chunks."""
    chunks(length)
    b, h0 = drawn(kit, B, T, 5), 3 * drawn(kit, B, 5)
    bar = drawn(kit, B, T, 5)
    leaves = [b.requires_grad_(), h0.requires_grad_()]
    found = prefix_sum(b, h0, backend="fused")
    compare([found], [h0.unsqueeze(1) + b.cumsum(1)], 1e-14)
    bars = torch.autograd.grad(found, leaves, bar, create_graph=True)
    back = bar.flip(1).cumsum(1).flip(1)
    compare(bars, [back, back[:, 0]], 1e-14)
    narrow = prefix_sum(b.detach().bfloat16(), h0.detach().float(), backend="fused")
    assert narrow.dtype == torch.float32
    exact = h0.unsqueeze(1) + b.bfloat16().double().cumsum(1)
    size = h0.abs().float().unsqueeze(1) + b.bfloat16().float().abs().cumsum(1)
    units = 2.0**-24 * 2 * torch.arange(2, T + 2, device=b.device).view(1, -1, 1)
    assert bool(((narrow.double() - exact).abs() <= units * size).all())


@pytest.mark.parametrize("batch", [1, 2, 16])
@pytest.mark.parametrize("backward", [False, True])
def test_a_block_is_one_launch(batch, backward):
    """64 tokens of the published width are one chunk on a GPU of 132 processors."""
    spec = scan_spec("1")
    assert plan(spec, batch, 64, 1536, 4, 132, backward=backward).chunks(64) == 1


@pytest.mark.parametrize("increments", [False, True])
def test_the_block_path_of_the_drm(kit, monkeypatch, increments):
    """States and gradients with the kernel are those without; causal, bit for bit."""
    from pararnn.drm import DRMConfig, DRMDynamics, block

    sizes = {"d_state": 7, "d_token": 5, "hidden_size": 9, "n_directions": 4, "metric_rank": 2}
    config = DRMConfig(**sizes, dt=0.6, state_radius=2.0, bound_increments=increments)
    dynamics = DRMDynamics(config).double().to(kit.DEVICE)
    z, e = drawn(kit, B, 7), drawn(kit, B, T, 5)
    leaves = [z.requires_grad_(), e.requires_grad_(), *dynamics.parameters()]

    def run(tokens, backend):
        one = functools.partial(prefix_sum, backend=backend)
        monkeypatch.setattr(block, "prefix_sum", one)
        return block.block_states(dynamics, z, tokens, 0.4).states

    found = []
    for backend in ("fused", "eager"):
        states = run(e, backend)
        bars = torch.autograd.grad(states.sin().sum(), leaves, materialize_grads=True)
        found.append([states, *bars])
    compare(*found, 1e-12)
    other = e.detach().clone()
    other[:, 8:] = torch.nan
    assert torch.equal(run(other, "fused")[:, :8], run(e, "fused")[:, :8])


@pytest.mark.parametrize("name", ["linear", "planes"])
def test_results_have_no_units(kit, chunks, name):
    """Inputs and cotangents that are halved thirty times give results that are."""
    chunks(4)
    scan, draw = SCANS[name]
    a, b, h0 = (x.float() for x in draw(kit))
    bar = drawn(kit, *b.shape, dtype=torch.float32)

    def run(scale):
        leaves = [x.clone().requires_grad_() for x in (a, b * scale, h0 * scale)]
        states = scan(*leaves, backend="fused")
        return states, *torch.autograd.grad(states, leaves, bar * scale)

    for plain, small, power in zip(run(1.0), run(0.5**30), (1, 2, 1, 1), strict=True):
        torch.testing.assert_close(small, plain * 0.5 ** (30 * power), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_narrow_dtypes(kit, dtype, chunks):
    chunks(4)
    a, b = coefficients(kit, 3, dtype=dtype), drawn(kit, B, T, 3, dtype=dtype)
    states, final = linear_scan(a, b, backend="fused", return_state=True)
    assert states.dtype == dtype
    assert final.dtype == torch.float32
    want = reference.linear(a.double(), b.double())
    units = 1.0 if dtype == torch.bfloat16 and kit.DEVICE == "cpu" else 0.51
    allowed = units * torch.finfo(dtype).eps * want.abs() + 3e-6 * want.abs().max()
    assert bool(((states.double() - want).abs() <= allowed).all())


def test_logarithms_keep_their_digits(kit, chunks):
    """Coefficients so near 1 that float32 cannot hold them."""
    chunks(100)
    length = 400
    log_a = torch.full((1, length, 2), -1e-9, device=kit.DEVICE)
    log_b = torch.full((1, length, 2), -20.0, device=kit.DEVICE)
    start = torch.ones(1, 2, device=kit.DEVICE)
    got = parallel_scan_log(log_a, log_b, start, backend="fused")[0, -1]
    want = reference.log(log_a.double(), log_b.double(), start.double())[0, -1]
    assert float(((got.double() - want) / want).abs().max()) <= 2**-24


@pytest.mark.parametrize(("batch", "length"), [(0, 5), (2, 0)])
def test_nothing_to_do(kit, batch, length):
    a = torch.zeros(batch, length, 3, device=kit.DEVICE, requires_grad=True)
    h0 = torch.ones(batch, 3, device=kit.DEVICE, requires_grad=True)
    states, final = linear_scan(a, a, h0, backend="fused", return_state=True)
    assert states.shape == a.shape
    assert torch.equal(final, h0)
    (bar,) = torch.autograd.grad(final.sum(), h0)
    assert torch.equal(bar, torch.ones_like(h0))


def test_refusals_say_why(kit):
    a = torch.zeros(1, 2, 1, 9, 9, device=kit.DEVICE)
    b = torch.zeros(1, 2, 1, 9, 1, device=kit.DEVICE)
    with pytest.raises(RuntimeError, match="at most 8 rows, not 9"):
        matrix_affine_scan(a, b, backend="fused")
    x = torch.zeros(1, 2, 3, device=kit.DEVICE)
    with pytest.raises(RuntimeError, match="transforms the eager scan only"):
        torch.func.jvp(lambda x: linear_scan(x, x, backend="fused"), (x,), (x,))


def cells():
    from pararnn import GivensMinGRU, MinGRU, MinLSTM, RotationMinGRU, SignedMinGRU

    return {
        "log": lambda: MinGRU(3, 5, learnable_h0=True),
        "signed": lambda: SignedMinGRU(3, 5, decay="learnable"),
        "lstm": lambda: MinLSTM(3, 5),
        "rotation": lambda: RotationMinGRU(3, 6, decay="fixed", log1p_delta=True),
        "givens": lambda: GivensMinGRU(3, 8, block_size=4, rounds=3),
    }


@pytest.mark.parametrize("length", [pytest.param(T, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize("name", ["log", "signed", "lstm", "rotation", "givens"])
def test_linear_cells(kit, name, length):
    torch.manual_seed(3)
    cell = cells()[name]().double().to(kit.DEVICE)
    x = drawn(kit, B, T, 3).requires_grad_()
    dt = (
        torch.rand(B, T, dtype=torch.float64, device=kit.DEVICE)
        if cell.spec.gap is not None
        else None
    )
    found = solve(cell, x, NewtonConfig(backend="fused", chunk_length=length), dt=dt)
    assert found.path == "fused"
    want = sequential_apply(cell, x, h0=cell.init_state(B), dt=dt)
    weight = torch.randn_like(want)
    leaves = [x, *(p for p in cell.parameters() if p.requires_grad)]
    bars = torch.autograd.grad((found.states * weight).sum(), leaves)
    right = torch.autograd.grad((want * weight).sum(), leaves)
    compare([found.states, found.final_state, *bars], [want, want[:, -1], *right], 1e-12)
    assert torch.equal(found.output, found.states.flatten(2))


@pytest.mark.parametrize("name", ["linear", "planes", "blocks"])
def test_infinity_goes_on(kit, chunks, name):
    chunks(3)
    scan, given = SCANS[name]
    a, b, h0 = given(kit)
    b[1, 2] = float("inf")
    wanted = LOOPS[scan](a, b, h0)
    wanted = wanted[0] if isinstance(wanted, tuple) else wanted
    found = scan(a, b, h0, backend="fused")
    assert torch.equal(found.isfinite(), wanted.isfinite())


def test_a_bad_number_leaves_the_bits_of_other_rows(kit, chunks):
    """Lanes of several rows share a program, which repairs those that need it. Numbers cancel here,
    so that the start of a chunk is off by more than the tolerance, relative to itself."""
    chunks(3)
    turn = torch.full((2, 40, 7), torch.pi / 6, dtype=torch.float64, device=kit.DEVICE)
    c, s = turn.cos(), turn.sin()
    a = torch.stack([torch.stack([c, -s], -1), torch.stack([s, c], -1)], -2)
    b = drawn(kit, 2, 40, 7, 2) * 1e-17
    h0 = torch.ones(2, 7, 2, dtype=torch.float64, device=kit.DEVICE)
    h0[..., 1] = 0
    clean = matrix_scan(a, b, h0, backend="fused")
    b[1, 2] = float("nan")
    found = matrix_scan(a, b, h0, backend="fused")
    assert torch.equal(found[0], clean[0])
    assert torch.equal(found[1, :2], clean[1, :2])
    assert bool(found[1, 2:].isnan().all())
