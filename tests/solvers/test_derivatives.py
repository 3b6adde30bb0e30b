"""First and second derivatives of the built-in cells, and what is refused beyond them."""

from __future__ import annotations

import pytest
import torch

from pararnn import NewtonConfig, ParaGRU, ParaM2RNN, sequential_apply, solve

CELLS = {
    "diag": lambda: ParaGRU(2, 3, max_recurrent_norm=None),
    "bounded": lambda: ParaGRU(2, 3),
    "head": lambda: ParaGRU(2, 4, mix="head", n_heads=2),
    "limited": lambda: ParaGRU(2, 4, mix="head", n_heads=2, max_recurrent_norm=0.8),
    "matrix": lambda: ParaM2RNN(2, 2, 3),
}
cells = pytest.mark.parametrize("make", CELLS.values(), ids=CELLS)
CHUNKS = NewtonConfig(chunk_length=3, warmup=1)


def build(make):
    torch.manual_seed(0)
    cell = make().double()
    if getattr(cell, "mix", "") == "diag" and cell.max_recurrent_norm:
        with torch.no_grad():  # inside the box, where the bound is the identity
            for a in (cell.A_z, cell.A_r, cell.A_n):
                a.clamp_(-0.45, 0.45)
    return cell


@cells
def test_gradcheck_and_gradgradcheck(make):
    cell = build(make)
    x = torch.randn(2, 5, 2, dtype=torch.float64, requires_grad=True)
    h0 = (0.5 * torch.randn(2, *cell.state_shape, dtype=torch.float64)).requires_grad_()
    resets = torch.zeros(2, 5, dtype=torch.bool)
    resets[1, 2] = True

    # Fast mode checks random projections; every entry is compared in test_own_cells.
    def run(x, h0, *_):
        s = solve(cell, x, CHUNKS, method="shooting", h0=h0, resets=resets)
        return s.states, s.final_state

    inputs = (x, h0, *cell.parameters())
    assert torch.autograd.gradcheck(run, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(run, inputs, fast_mode=True)


@cells
@pytest.mark.parametrize("method", ["newton", "shooting"])
def test_third_order_raises(make, method):
    """Not implemented: an error, however the derivative is asked for, never a wrong number."""
    cell = build(make)
    x = torch.randn(1, 5, 2, dtype=torch.float64, requires_grad=True)
    config = CHUNKS if method == "shooting" else None
    y = solve(cell, x, config, method=method).states
    (g,) = torch.autograd.grad(y.pow(3).sum(), x, create_graph=True)
    (gg,) = torch.autograd.grad(g.pow(2).sum(), x, create_graph=True)
    loss = gg.pow(2).sum()
    with pytest.raises(RuntimeError):
        torch.autograd.grad(loss, x, retain_graph=True)
    with pytest.raises(RuntimeError):
        torch.autograd.grad(loss, list(cell.parameters()), retain_graph=True, allow_unused=True)
    with pytest.raises(RuntimeError):
        loss.backward()


@cells
@pytest.mark.parametrize("kind", ["expanded", "transposed", "sliced", "zero"])
def test_incoming_gradients_of_any_layout(make, kind):
    cell = build(make)
    x = torch.randn(2, 20, 2, dtype=torch.float64, requires_grad=True)
    shape = (2, 20, *cell.state_shape)
    g = {
        "expanded": torch.randn(1, 1, *cell.state_shape, dtype=torch.float64).expand(shape),
        "transposed": torch.randn(20, 2, *cell.state_shape, dtype=torch.float64).transpose(0, 1),
        "sliced": torch.randn(2, 40, *cell.state_shape, dtype=torch.float64)[:, ::2],
        "zero": torch.zeros(1, dtype=torch.float64).expand(shape),
    }[kind]
    inputs = [x, *cell.parameters()]
    for method in ("newton", "shooting"):
        config = CHUNKS if method == "shooting" else None
        got = torch.autograd.grad(solve(cell, x, config, method=method).states, inputs, g)
        want = torch.autograd.grad(sequential_apply(cell, x), inputs, g.contiguous())
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)


@cells
@pytest.mark.parametrize("kind", ["expanded", "transposed", "strided"])
def test_inputs_of_any_layout(make, kind):
    cell = build(make)
    x = {
        "expanded": torch.randn(1, 1, 2, dtype=torch.float64).expand(3, 20, 2),
        "transposed": torch.randn(2, 20, 3, dtype=torch.float64).permute(2, 1, 0),
        "strided": torch.randn(6, 40, 4, dtype=torch.float64)[::2, ::2, 1::2],
    }[kind]
    h0 = torch.randn(1, *cell.state_shape, dtype=torch.float64).expand(3, *cell.state_shape)
    drives = cell.drives(x.contiguous()).detach()
    wide = torch.stack([drives, drives], -1)[..., 0]
    want = sequential_apply(cell, x.contiguous(), h0=h0.contiguous())
    for method in ("newton", "shooting"):
        config = CHUNKS if method == "shooting" else None
        got = solve(cell, x, config, method=method, h0=h0).states
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-12)
        got = solve(cell, None, config, method=method, h0=h0, drives=wide).states
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-12)


@cells
@pytest.mark.parametrize("length", [0, 1, 2])
def test_short_sequences(make, length):
    cell = build(make)
    for batch in (0, 1, 3):
        x = torch.randn(batch, length, 2, dtype=torch.float64, requires_grad=True)
        h0 = torch.randn(batch, *cell.state_shape, dtype=torch.float64, requires_grad=True)
        resets = torch.zeros(batch, length, dtype=torch.bool)
        for method in ("sequential", "newton", "shooting", "auto"):
            s = solve(cell, x, method=method, h0=h0, resets=resets)
            assert s.states.shape == (batch, length, *cell.state_shape)
            assert s.final_state.shape == h0.shape
            if length == 0:
                assert torch.equal(s.final_state, h0)
            loss = s.states.sum() + 2 * s.final_state.sum()
            inputs = [x, h0, *cell.parameters()]
            got = torch.autograd.grad(loss, inputs, allow_unused=True)
            loop = sequential_apply(cell, x, h0=h0)
            last = loop[:, -1] if length else h0
            loss = loop.sum() + 2 * last.sum()
            want = torch.autograd.grad(loss, inputs, allow_unused=True)
            for a, b, t in zip(got, want, inputs, strict=True):
                a, b = (torch.zeros_like(t) if g is None else g for g in (a, b))
                torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@cells
def test_only_the_last_step_counts(make):
    cell = build(make)
    x = torch.randn(2, 30, 2, dtype=torch.float64, requires_grad=True)
    s = solve(cell, x, CHUNKS, method="shooting")
    got = torch.autograd.grad(s.final_state.sum(), [x, *cell.parameters()])
    want = torch.autograd.grad(sequential_apply(cell, x)[:, -1].sum(), [x, *cell.parameters()])
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)


def test_tiny_gradients_are_relative():
    """The adjoint's tolerance scales with the incoming gradient of each row."""
    for make in CELLS.values():
        cell = build(make)
        x = torch.randn(2, 40, 2, dtype=torch.float64, requires_grad=True)
        g = torch.randn(2, 40, *cell.state_shape, dtype=torch.float64)
        g[0] *= 1e-200
        g[1] *= 1e100
        got = torch.autograd.grad(solve(cell, x, CHUNKS, method="shooting").states, x, g)[0]
        want = torch.autograd.grad(sequential_apply(cell, x), x, g)[0]
        for i in range(2):
            scale = want[i].abs().max()
            torch.testing.assert_close(got[i] / scale, want[i] / scale, rtol=1e-9, atol=1e-10)


@cells
def test_a_nan_gradient_stays_in_its_row(make):
    cell = build(make)
    x = torch.randn(3, 40, 2, dtype=torch.float64, requires_grad=True)
    g = torch.randn(3, 40, *cell.state_shape, dtype=torch.float64)
    clean = torch.autograd.grad(solve(cell, x, CHUNKS, method="shooting").states, x, g)[0]
    g[1, 25].fill_(torch.nan)
    got = torch.autograd.grad(solve(cell, x, CHUNKS, method="shooting").states, x, g)[0]
    torch.testing.assert_close(got[[0, 2]], clean[[0, 2]], rtol=1e-12, atol=1e-14)
    assert torch.equal(got[1, 26:], clean[1, 26:]) or torch.allclose(got[1, 26:], clean[1, 26:])
    assert bool(got[1, :26].isnan().any(-1).all())


def test_backward_twice_and_retained():
    cell = build(CELLS["head"])
    x = torch.randn(2, 12, 2, dtype=torch.float64, requires_grad=True)
    y = solve(cell, x, CHUNKS, method="shooting").states
    a = torch.autograd.grad(y.sum(), x, retain_graph=True)[0]
    b = torch.autograd.grad(y.sum(), x)[0]
    assert torch.equal(a, b)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y.sum(), x)


def test_changes_in_place_are_noticed():
    cell = build(CELLS["diag"])
    x = torch.randn(2, 12, 2, dtype=torch.float64, requires_grad=True)
    y = solve(cell, x, method="newton").states
    with torch.no_grad():
        cell.A_z.mul_(2)
    with pytest.raises(RuntimeError, match="inplace"):
        y.sum().backward()
    y = solve(cell, x, method="newton").states
    y.mul_(2)
    with pytest.raises(RuntimeError, match="inplace"):
        y.sum().backward()


def test_resets_changed_in_place():
    """The mask is an input like others: changing it later must not change gradients silently."""
    cell = build(CELLS["diag"])
    x = torch.randn(2, 12, 2, dtype=torch.float64, requires_grad=True)
    resets = torch.rand(2, 12) < 0.4
    y = solve(cell, x, method="newton", resets=resets).states
    want = torch.autograd.grad(y.sum(), x, retain_graph=True)[0]
    resets.fill_(False)
    try:
        got = torch.autograd.grad(y.sum(), x)[0]
    except RuntimeError:
        return
    assert torch.equal(got, want)


def test_checkpointing():
    from torch.utils.checkpoint import checkpoint

    for make in CELLS.values():
        cell = build(make)
        x = torch.randn(2, 12, 2, dtype=torch.float64, requires_grad=True)
        run = lambda x, cell=cell: solve(cell, x, CHUNKS, method="shooting").states  # noqa: E731
        want = torch.autograd.grad(run(x).pow(2).sum(), [x, *cell.parameters()])
        got = checkpoint(run, x, use_reentrant=False).pow(2).sum()
        assert all(
            torch.equal(a, b)
            for a, b in zip(torch.autograd.grad(got, [x, *cell.parameters()]), want, strict=True)
        )


def test_function_transforms_are_refused_not_wrong():
    cell = ParaGRU(2, 3)
    x = torch.randn(4, 2, 7, 2)
    for transformed in (
        lambda: torch.func.vmap(lambda x: solve(cell, x, method="newton").states)(x),
        lambda: torch.func.grad(lambda x: solve(cell, x, method="newton").states.sum())(x[0]),
        lambda: torch.func.jvp(lambda x: solve(cell, x, method="newton").states, (x[0],), (x[0],)),
    ):
        with pytest.raises(ValueError, match=r"under torch.func .*; use method='sequential'"):
            transformed()


@cells
def test_pieces_in_a_chain(make):
    """Truncated pieces that pass on the final state differentiate as the whole does."""
    cell = build(make)
    x = torch.randn(2, 21, 2, dtype=torch.float64, requires_grad=True)
    state, parts = None, []
    for piece in x.split(8, 1):
        s = solve(cell, piece, method="newton", h0=state)
        state = s.final_state
        parts.append(s.states)
    inputs = [x, *cell.parameters()]
    weight = torch.randn(2, 21, *cell.state_shape, dtype=torch.float64)
    got = torch.autograd.grad((torch.cat(parts, 1) * weight).sum(), inputs)
    want = torch.autograd.grad((sequential_apply(cell, x) * weight).sum(), inputs)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)


@cells
def test_gradients_of_given_drives(make):
    cell = build(make)
    width = cell.in_proj.out_features
    for u in (
        torch.randn(2, 20, width, dtype=torch.float64),
        torch.randn(2, 1, width, dtype=torch.float64).expand(2, 20, width),
        torch.randn(20, 2, width, dtype=torch.float64).transpose(0, 1),
    ):
        u = u.requires_grad_()
        found = solve(cell, None, CHUNKS, method="shooting", drives=u).states
        loop = solve(cell, None, method="sequential", drives=u).states
        weight = torch.randn_like(loop)
        got = torch.autograd.grad((found * weight).sum(), u)[0]
        want = torch.autograd.grad((loop * weight).sum(), u)[0]
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)


@cells
@pytest.mark.parametrize("numbers", [1, 60, 10**9])
def test_rows_may_be_taken_apart(make, numbers, monkeypatch):
    """The backward pass treats some rows at a time; how many must not show."""
    from pararnn.solvers import adjoint

    monkeypatch.setattr(adjoint, "GROUP", numbers)
    cell = build(make)
    x = torch.randn(5, 13, 2, dtype=torch.float64, requires_grad=True)
    h0 = torch.randn(5, *cell.state_shape, dtype=torch.float64, requires_grad=True)
    resets = torch.rand(5, 13) < 0.2
    inputs = [x, h0, *cell.parameters()]
    found = solve(cell, x, CHUNKS, method="shooting", h0=h0, resets=resets).states
    loop = sequential_apply(cell, x, h0=h0, resets=resets)
    weight = torch.randn_like(loop)
    got = torch.autograd.grad((found * weight).sum(), inputs)
    want = torch.autograd.grad((loop * weight).sum(), inputs)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)


def test_parametrized_weights():
    from torch.nn.utils import parametrizations

    torch.manual_seed(0)
    cell = ParaGRU(2, 4, mix="head", n_heads=2).double()
    parametrizations.orthogonal(cell, "A_n")
    parametrizations.weight_norm(cell.in_proj)
    x = torch.randn(2, 15, 2, dtype=torch.float64, requires_grad=True)
    inputs = [x, *cell.parameters()]
    found = solve(cell, x, CHUNKS, method="shooting").states
    got = torch.autograd.grad(found.pow(2).sum(), inputs)
    want = torch.autograd.grad(sequential_apply(cell, x).pow(2).sum(), inputs)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)
