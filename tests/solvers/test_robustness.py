"""Unfriendly inputs: not finite, far outside, badly shaped, half precision, autocast."""

from __future__ import annotations

import warnings

import pytest
import torch

from pararnn import NewtonConfig, ParaGRU, ParaM2RNN, newton_apply, sequential_apply, solve

CELLS = {
    "diag": lambda: ParaGRU(3, 4),
    "head": lambda: ParaGRU(3, 4, mix="head", n_heads=2),
    "matrix": lambda: ParaM2RNN(3, 2, 2),
}
cells = pytest.mark.parametrize("make", CELLS.values(), ids=CELLS)
MODES = {
    "newton": ("newton", None),
    "chunks": ("shooting", NewtonConfig(chunk_length=8)),
    "auto": ("auto", None),
}
modes = pytest.mark.parametrize("mode", MODES.values(), ids=MODES)


def build(make):
    torch.manual_seed(0)
    return make()


@cells
@modes
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_in_its_row_and_after_its_step(make, mode, value):
    method, config = mode
    cell, x = build(make), torch.randn(3, 40, 3)
    clean = solve(cell, x, config, method=method).states
    spoilt = x.clone()
    spoilt[1, 25, 1] = value
    got = solve(cell, spoilt, config, method=method).states
    want = sequential_apply(cell, spoilt)
    assert torch.equal(got[[0, 2]], clean[[0, 2]])
    assert torch.equal(got[1, :25], clean[1, :25])
    torch.testing.assert_close(got, want, rtol=2e-6, atol=2e-6, equal_nan=True)


@cells
@modes
def test_later_inputs_do_not_change_earlier_states(make, mode):
    method, config = mode
    cell, x = build(make), torch.randn(2, 40, 3)
    other = x.clone()
    other[:, 29:] = 5 * torch.randn(2, 11, 3)
    a, b = (solve(cell, v, config, method=method).states for v in (x, other))
    assert torch.equal(a[:, :29], b[:, :29])
    assert not torch.equal(a[:, 29:], b[:, 29:])


@cells
@modes
def test_starts_far_outside_the_box(make, mode):
    method, config = mode
    cell, x = build(make), torch.randn(4, 60, 3)
    sizes = torch.tensor([0.5, 3.0, 1e3, 1e30]).reshape(4, *(1,) * len(cell.state_shape))
    h0 = sizes * torch.randn(4, *cell.state_shape)
    got = solve(cell, x, config, method=method, h0=h0)
    want = sequential_apply(cell, x, h0=h0)
    assert got.converged
    torch.testing.assert_close(got.states, want, rtol=3e-5, atol=3e-6)


@cells
@modes
def test_resets_start_from_zero(make, mode):
    """A reset sequence is the two pieces, each solved from zero."""
    method, config = mode
    cell, x = build(make), torch.randn(1, 40, 3)
    for at in (0, 1, 7, 8, 9, 16, 39):
        resets = torch.zeros(1, 40, dtype=torch.bool)
        resets[0, at] = True
        got = solve(
            cell, x, config, method=method, resets=resets, h0=torch.ones(1, *cell.state_shape)
        )
        first = sequential_apply(cell, x[:, :at], h0=torch.ones(1, *cell.state_shape))
        second = sequential_apply(cell, x[:, at:])
        torch.testing.assert_close(got.states, torch.cat([first, second], 1), rtol=0, atol=3e-6)
    everywhere = torch.ones(1, 40, dtype=torch.bool)
    got = solve(cell, x, config, method=method, resets=everywhere).states
    flat = cell.step(cell.init_state(40), x[0])
    torch.testing.assert_close(got[0], flat, rtol=0, atol=3e-6)


@cells
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_one_output_rounding_away(make, dtype):
    """States and accumulation are float32 inside: the same drives in float32, then rounded."""
    cell = build(make).to(dtype)
    x = (2 * torch.randn(2, 60, 3)).to(dtype)
    drives = cell.drives(x)
    wide = build(make)
    wide.load_state_dict({k: v.float() for k, v in cell.state_dict().items()})
    want = solve(wide, None, drives=drives.float(), method="sequential").states.to(dtype)
    ulp = torch.finfo(dtype).eps
    for method, config in MODES.values():
        got = solve(cell, x, config, method=method).states
        assert got.dtype == dtype
        assert (
            float(((got.float() - want.float()).abs() / want.float().abs().clamp_min(0.1)).max())
            <= ulp
        )


@cells
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_gradients(make, dtype):
    cell = build(make).to(dtype)
    x = torch.randn(2, 40, 3).to(dtype).requires_grad_()
    inputs = [x, *cell.parameters()]
    s = solve(cell, x, NewtonConfig(chunk_length=8), method="shooting")
    got = torch.autograd.grad(s.states.float().pow(2).sum(), inputs)
    want = torch.autograd.grad(sequential_apply(cell, x).float().pow(2).sum(), inputs)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == dtype
        assert float((a.float() - b.float()).norm() / b.float().norm()) < 4 * torch.finfo(dtype).eps


@cells
def test_float16_overflow_is_what_the_loop_gives(make):
    cell = build(make).half()
    x = (torch.randn(2, 40, 3) * 3e4).half()
    assert bool(cell.drives(x).isinf().any())
    for method, config in MODES.values():
        got = solve(cell, x, config, method=method).states
        torch.testing.assert_close(
            got, sequential_apply(cell, x), rtol=1e-3, atol=1e-3, equal_nan=True
        )


@cells
def test_autocast(make):
    """Drives may be half; the recurrence keeps its float32 states and converges."""
    cell, x = build(make), torch.randn(2, 60, 3)
    with torch.autocast("cpu", torch.bfloat16):
        drives = cell.drives(x)
        loop = sequential_apply(cell, x)
        found = {m: solve(cell, x, c, method=m) for m, c in MODES.values()}
    assert drives.dtype == torch.bfloat16
    want = solve(cell, None, drives=drives.float(), method="sequential").states
    torch.testing.assert_close(loop.float(), want, rtol=0, atol=5e-3)
    for method, s in found.items():
        assert s.final_state.dtype == torch.float32
        assert not s.fallback, method
        torch.testing.assert_close(s.final_state, want[:, -1], rtol=0, atol=3e-6)


@cells
def test_autocast_gradients(make):
    cell, x = build(make), torch.randn(2, 30, 3, requires_grad=True)
    inputs = [x, *cell.parameters()]
    with torch.autocast("cpu", torch.bfloat16):
        loss = solve(cell, x, NewtonConfig(chunk_length=8), method="shooting").states.float().sum()
        wanted = sequential_apply(cell, x).float().sum()
    got, want = torch.autograd.grad(loss, inputs), torch.autograd.grad(wanted, inputs)
    for a, b in zip(got, want, strict=True):
        assert float((a - b).norm() / b.norm()) < 2e-2


WRONG = {
    "two dimensions": (lambda x, h: {"x": x[0]}, ValueError, "unsqueeze"),
    "four dimensions": (lambda x, h: {"x": x[None]}, ValueError, "expected"),
    "width": (lambda x, h: {"x": x[..., :2]}, ValueError, "expected"),
    "integers": (lambda x, h: {"x": x.long()}, TypeError, "floating"),
    "double": (lambda x, h: {"x": x.double()}, TypeError, "float32"),
    "half": (lambda x, h: {"x": x.half()}, TypeError, "float32"),
    "a list": (lambda x, h: {"x": x.tolist()}, TypeError, "Tensor"),
    "complex": (lambda x, h: {"x": x.to(torch.complex64)}, TypeError, "floating"),
    "nothing": (lambda x, h: {"x": None}, TypeError, "exactly one"),
    "both": (lambda x, h: {"x": x, "drives": x}, TypeError, "exactly one"),
    "drives of another width": (lambda x, h: {"x": None, "drives": x}, ValueError, "drives"),
    "h0 without batch": (lambda x, h: {"x": x, "h0": h[0]}, ValueError, "h0"),
    "h0 of one row": (lambda x, h: {"x": x, "h0": h[:1]}, ValueError, "expand"),
    "h0 of another width": (lambda x, h: {"x": x, "h0": h[..., :1]}, ValueError, "h0"),
    "h0 of integers": (lambda x, h: {"x": x, "h0": h.long()}, TypeError, "h0"),
    "h0 in double": (lambda x, h: {"x": x, "h0": h.double()}, TypeError, "h0"),
    "float resets": (lambda x, h: {"x": x, "resets": x[..., 0]}, ValueError, "bool"),
    "resets of a row": (lambda x, h: {"x": x, "resets": x[:1, :, 0] > 0}, ValueError, "resets"),
    "resets of a step": (lambda x, h: {"x": x, "resets": x[:, :1, 0] > 0}, ValueError, "resets"),
    "resets with features": (lambda x, h: {"x": x, "resets": x > 0}, ValueError, "resets"),
    "resets as a list": (
        lambda x, h: {"x": x, "resets": (x[..., 0] > 0).tolist()},
        (TypeError, ValueError),
        "resets",
    ),
    "meta h0": (lambda x, h: {"x": x, "h0": h.to("meta")}, ValueError, "device"),
    "meta x": (lambda x, h: {"x": x.to("meta")}, ValueError, "device"),
}


@cells
@pytest.mark.parametrize(("change", "error", "match"), WRONG.values(), ids=WRONG)
def test_wrong_arguments_are_refused(make, change, error, match):
    cell, x = build(make), torch.randn(2, 6, 3)
    arguments = change(x, cell.init_state(2))
    x = arguments.pop("x")
    for method in ("sequential", "newton", "shooting", "auto"):
        with pytest.raises(error, match=match):
            solve(cell, x, method=method, **arguments)


def test_drives_of_another_dtype_are_not_converted_silently():
    cell = ParaGRU(3, 4)
    with pytest.raises(TypeError, match="drives"):
        solve(cell, None, drives=torch.randn(2, 5, 12, dtype=torch.float64))


def test_a_misplaced_config_is_named():
    cell, x = ParaGRU(3, 4), torch.randn(1, 5, 3)
    with pytest.raises((TypeError, AttributeError)):
        solve(cell, x, "newton")
    with pytest.raises((TypeError, AttributeError)):
        newton_apply(cell, x, 3)


def test_no_warnings_when_all_is_well():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for make in CELLS.values():
            cell, x = build(make), torch.randn(2, 50, 3, requires_grad=True)
            for method, config in MODES.values():
                solve(cell, x, config, method=method).states.sum().backward()


def test_threads():
    """Solves in several threads do not disturb each other."""
    from concurrent.futures import ThreadPoolExecutor

    cell, x = build(CELLS["head"]), torch.randn(2, 40, 3)
    want = newton_apply(cell, x)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: newton_apply(cell, x), range(8)))
    assert all(torch.equal(f, want) for f in found)
