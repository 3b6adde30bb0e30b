"""The log-space scan: digits, range, and derivatives."""

from __future__ import annotations

import math

import mpmath
import pytest
import torch
from torch.nn.functional import logsigmoid

from pararnn.scan import log as module
from pararnn.scan import parallel_scan_log, reference

F64, INF = torch.float64, math.inf
directions = pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])


@pytest.fixture(params=["linear", "recentred"])
def path(request, monkeypatch):
    """Both ways of computing: in linear space, and relative to maxima."""
    if request.param == "recentred":
        monkeypatch.setattr(module, "_stays", lambda *_: False)
        monkeypatch.setattr(module, "LARGEST", -1.0)  # no state is left in linear space
    return request.param


def draw(length, batch=2, width=3, seed=0, zeros=True):
    g = torch.Generator().manual_seed(seed)
    c = -3 * torch.rand(batch, length, width, generator=g, dtype=F64)
    v = 5 * torch.randn(batch, length + 1, width, generator=g, dtype=F64)
    if zeros:
        c[torch.rand(c.shape, generator=g) < 0.1] = -INF
        v[torch.rand(v.shape, generator=g) < 0.1] = -INF
    return c, v, torch.rand(batch, length, generator=g) < 0.1


def ulps(got, want):
    """Distance from the rounded reference, in units in the last place of it."""
    rounded = want.to(got.dtype)
    size = rounded.abs()
    ulp = torch.nextafter(size, torch.full_like(size, INF)) - size
    far = (got.double() - rounded.double()).abs() / ulp.double()
    return float(torch.where(got == rounded, 0.0, far).max())


@directions
@pytest.mark.parametrize("length", [0, 1, 2, 33, 101, 400])
def test_states(length, reverse, path):
    c, v, resets = draw(length)
    for mask in (None, resets):
        options = {"reverse": reverse, "resets": mask}
        want = reference.log(c, v, **options)
        torch.testing.assert_close(parallel_scan_log(c, v, **options), want, rtol=1e-12, atol=0)
        got, state = parallel_scan_log(c, v[:, 1:], v[:, 0].exp(), return_state=True, **options)
        torch.testing.assert_close(got, want, rtol=1e-12, atol=0)
        last = want[:, 0 if reverse else -1] if length else v[:, 0].exp()
        torch.testing.assert_close(state, last, rtol=1e-12, atol=0)


def gates(name, length):
    """Logarithms of coefficients that have hurt somewhere."""
    g = torch.Generator().manual_seed(1)
    shape = (1, length, 4)
    u, n = torch.rand(shape, generator=g), torch.randn(shape, generator=g)
    return {
        "usual": lambda: logsigmoid(-n),
        "near 1": lambda: torch.full(shape, -1e-6),
        "nearer 1": lambda: -1e-7 * u,
        "near 0": lambda: -100 * u,
        "huge gaps": lambda: torch.where(u < 0.01, -1e10 * n.abs(), -1e-3 * n.abs()),
        "zeros": lambda: torch.where(u < 0.01, -INF, -1e-3 * n.abs()),
        "growth and decay": lambda: 20 * (u - 0.5),
        "long growth": lambda: (
            30 * torch.sin(torch.arange(length) / 50.0)[None, :, None].expand(shape)
        ),
    }[name]()


GATES = (
    "usual",
    "near 1",
    "nearer 1",
    "near 0",
    "huge gaps",
    "zeros",
    "growth and decay",
    "long growth",
)


@pytest.mark.parametrize("name", GATES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_no_digit_is_lost_with_length(name, dtype, path):
    g = torch.Generator().manual_seed(2)
    for length in (1, 1000, 10000):
        c = gates(name, length).to(dtype)
        v = (2 * torch.randn(1, length + 1, 4, generator=g)).to(dtype)
        got, want = parallel_scan_log(c, v), reference.log(c, v)
        assert got.dtype == dtype
        assert ulps(got, want) <= 1


def test_a_hundred_thousand_steps():
    """The bar itself: 1e-5 in float32. What is measured is the rounding of the result."""
    g = torch.Generator().manual_seed(3)
    for name in ("near 1", "huge gaps"):
        c = gates(name, 100_000)[..., :1]
        v = torch.randn(1, 100_001, 1, generator=g)
        got, want = parallel_scan_log(c, v), reference.log(c, v)
        assert float(((got - want).abs() / want).max()) < 1e-7


def test_against_mpmath():
    g = torch.Generator().manual_seed(4)
    c = 4 * torch.rand(1, 200, 1, generator=g, dtype=F64) - 2.5
    v = 300 * torch.randn(1, 201, 1, generator=g, dtype=F64)
    got = parallel_scan_log(c, v)
    with mpmath.workdps(50):
        h = mpmath.exp(v[0, 0, 0].item())
        for t in range(200):
            h = mpmath.exp(c[0, t, 0].item()) * h + mpmath.exp(v[0, t + 1, 0].item())
            if 1e-300 < h < 1e300:
                assert abs(got[0, t, 0].item() / h - 1) < 1e-12


def test_range():
    """Too large on the way, representable at the end; and the reverse."""
    c = torch.tensor([0.0, -1000.0, 1000.0, -1000.0]).reshape(1, -1, 1)
    v = torch.tensor([1000.0, -INF, -INF, -INF, -INF]).reshape(1, -1, 1)
    assert parallel_scan_log(c, v).flatten().tolist() == [INF, 1.0, INF, 1.0]
    assert parallel_scan_log(c[:, :2], v[:, :3]).flatten().tolist() == [INF, 1.0]
    assert parallel_scan_log(-c, -v.abs()).flatten().tolist() == [0.0, 1.0, 0.0, 1.0]


def test_infinite_states_stay_infinite():
    c = torch.full((1, 40, 1), -1.0)
    for position in (0, 3):
        v = torch.zeros(1, 41, 1)
        v[0, position] = INF
        want = reference.log(c, v)
        assert bool(want[:, position:].isinf().all())
        torch.testing.assert_close(parallel_scan_log(c, v).double(), want)
    h0 = torch.full((1, 1), INF)
    assert bool(parallel_scan_log(c, v[:, 4:5].expand(1, 40, 1), h0).isinf().all())


def test_zero_states_stay_zero(path):
    c = torch.full((1, 50, 2), -0.5)
    v = torch.full((1, 51, 2), -INF)
    assert torch.equal(parallel_scan_log(c, v), torch.zeros(1, 50, 2))
    grown = parallel_scan_log(torch.full((1, 50, 2), 400.0), v[:, 1:], torch.zeros(1, 2))
    assert torch.equal(grown, torch.zeros(1, 50, 2))
    v[:, 30] = -2000.0  # nothing that the dtype can represent
    v[:, 40] = 0.0
    got = parallel_scan_log(c, v)
    assert torch.equal(got[:, :39], torch.zeros(1, 39, 2))
    torch.testing.assert_close(got[0, 39:, 0].log(), -0.5 * torch.arange(11.0))


def derivatives(c, v, function):
    inputs = [x.clone().requires_grad_() for x in (c, v)]
    first = torch.autograd.grad(function(*inputs).sin().sum(), inputs, create_graph=True)
    second = torch.autograd.grad(sum(f.square().sum() for f in first), inputs)
    return [*first, *second]


@directions
def test_derivatives(reverse, path):
    c, v, resets = draw(80, zeros=False)

    def linear(c, v):
        return reference.linear(
            c.exp(), v[:, 1:].exp(), v[:, 0].exp(), resets=resets, reverse=reverse
        )

    def scan(c, v):
        return parallel_scan_log(c, v, resets=resets, reverse=reverse)

    v = v / 3
    for got, want in zip(derivatives(c, v, scan), derivatives(c, v, linear), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)


def test_gradcheck(path):
    c, v, _ = draw(3, batch=1, width=2)
    h0 = torch.rand(1, 2, dtype=F64)
    c, v = c.clamp_min(-5).requires_grad_(), v.clamp_min(-8).div(4).requires_grad_()
    h0.requires_grad_()
    assert torch.autograd.gradcheck(parallel_scan_log, (c, v), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(parallel_scan_log, (c, v))
    assert torch.autograd.gradcheck(parallel_scan_log, (c, v[:, 1:], h0))


def test_gradient_at_zeros_of_all_kinds(path):
    """Values and coefficients of exactly 0: their logarithms have the derivative 0, no NaN."""
    c, v, _ = draw(60)
    for g in derivatives(c, v, parallel_scan_log):
        assert bool(g.isfinite().all())
    c, v = c.requires_grad_(), v.requires_grad_()
    d_c, d_v = torch.autograd.grad(parallel_scan_log(c, v).sum(), (c, v))
    assert bool((d_c[c == -INF] == 0).all())
    assert bool((d_v[v == -INF] == 0).all())


@pytest.mark.parametrize("value", [-INF, -1000.0, 0.0])
def test_gradient_at_a_zero_initial_state(value, path):
    """``∂h_t/∂h_0`` is the product of the coefficients, also at 0."""
    g = torch.Generator().manual_seed(0)
    c = -torch.rand(2, 40, 3, generator=g, dtype=F64)
    v = torch.full((2, 40, 3), value, dtype=F64)
    h0 = torch.zeros(2, 3, dtype=F64, requires_grad=True)
    states = parallel_scan_log(c, v, h0)
    for t in (0, 7, 39):
        (got,) = torch.autograd.grad(states[:, t].sum(), h0, retain_graph=True)
        torch.testing.assert_close(got, c[:, : t + 1].sum(1).exp(), rtol=1e-12, atol=0)


def test_strides_batches_and_dtypes():
    c, v, _ = draw(70)
    want = parallel_scan_log(c, v)
    swapped = c.transpose(0, 2).contiguous().transpose(0, 2)
    wide = torch.full((2, 142, 3), torch.nan, dtype=F64)
    wide[:, ::2] = v
    assert torch.equal(parallel_scan_log(swapped, wide[:, ::2]), want)
    assert parallel_scan_log(c[:0], v[:0]).shape == (0, 70, 3)
    assert parallel_scan_log(c.half(), v.float()).dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(parallel_scan_log(c, v), want)


def test_a_nan_stays_in_its_row_and_after_its_step(path):
    c, v, _ = draw(90, zeros=False)
    v[0, 41, 1] = torch.nan
    bad = parallel_scan_log(c, v).isnan()
    assert not bad[1].any()
    assert not bad[0, :40].any()
    assert bool(bad[0, 40:, 1].all())
    assert not bad[0, :, [0, 2]].any()


def test_errors():
    c, v, _ = draw(6)
    with pytest.raises(
        ValueError, match=r"log_values: got shape \(2, 6, 3\), expected \(2, 7, 3\)"
    ):
        parallel_scan_log(c, v[:, 1:])
    with pytest.raises(
        ValueError, match=r"log_values: got shape \(2, 7, 3\), expected \(2, 6, 3\)"
    ):
        parallel_scan_log(c, v, torch.ones(2, 3))
    with pytest.raises(ValueError, match="h0: got shape"):
        parallel_scan_log(c, v[:, 1:], torch.ones(1, 3))
    with pytest.raises(ValueError, match="log_coeffs: got shape"):
        parallel_scan_log(c[0], v)
    with pytest.raises(TypeError, match="resets"):
        parallel_scan_log(c, v, resets=torch.zeros(2, 6))


def test_states_that_grow_from_zero_and_a_tiny_value():
    """exp(-300), then 200 more in the logarithm with every step; nothing is scaled away."""
    c = torch.full((1, 4, 1), 200.0, dtype=F64)
    v = torch.full((1, 4, 1), -300.0, dtype=F64)
    found = parallel_scan_log(c, v, torch.zeros(1, 1, dtype=F64))
    want = [mpmath.exp(-300)]
    for _ in range(3):
        want.append(mpmath.exp(200) * want[-1] + mpmath.exp(-300))
    want = torch.tensor([float(x) for x in want], dtype=F64)
    torch.testing.assert_close(found[0, :, 0], want, rtol=1e-12, atol=0)


def test_the_final_state_of_no_steps_is_the_start():
    c, v, _ = draw(1)
    states, end = parallel_scan_log(c[:, :0], v[:, :1], return_state=True)
    assert states.shape == (2, 0, 3)
    torch.testing.assert_close(end, v[:, 0].exp(), rtol=1e-15, atol=0)
