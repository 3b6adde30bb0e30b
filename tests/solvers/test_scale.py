"""Small trajectories are measured by themselves; and what the engine does is what it says."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pararnn import NewtonConfig, ParaGRU, ParaLSTM, ParaM2RNN, solve
from pararnn.scan import Dense, Diagonal, Flat, Left, Right
from pararnn.solvers import adjoint, engine
from pararnn.solvers.partition import Partition
from pararnn.solvers.scale import sizes, spread, trajectory


def slow(name, dtype):
    """A cell with long memory, driven by nothing but its input."""
    torch.manual_seed(0)
    cell = {
        "diag": lambda: ParaGRU(3, 4),
        "head": lambda: ParaGRU(3, 4, mix="head", n_heads=2),
        "lstm": lambda: ParaLSTM(3, 4),
        "matrix": lambda: ParaM2RNN(3, 2, 3),
    }[name]()
    with torch.no_grad():
        bias = cell.in_proj.bias
        bias.zero_()
        if name in ("diag", "head"):
            bias[:4] = -4
        else:
            bias[-1 if name == "matrix" else slice(0, 4)] = 4
    return cell.to(dtype)


def true(cell, u, h0=None, resets=None):
    """The loop over the hand-written step in float64, on the same drives."""
    wide = copy.deepcopy(cell).double()
    h = torch.zeros(len(u), *cell.state_shape, dtype=torch.float64) if h0 is None else h0.double()
    states = []
    for t, u_t in enumerate(u.double().unbind(1)):
        if resets is not None:
            h = torch.where(resets[:, t].reshape(-1, *(1,) * (h.ndim - 1)), 0, h)
        h = wide.step(h, drives=u_t)
        states.append(h)
    return torch.stack(states, 1)


def off(found, wanted):
    """Largest difference, relative to the largest state of the lane."""
    return float(((found.double() - wanted).abs() / wanted.abs().amax(1, keepdim=True)).max())


def drives(cell, scale, dtype, total=300, rows=2):
    g = torch.Generator().manual_seed(1)
    x = torch.randn(rows, total, 3, generator=g, dtype=torch.float64).to(dtype)
    return cell.drives(x * scale).detach()


WAYS = {
    "chunks": {"config": NewtonConfig(chunk_length=50)},
    "newton": {"method": "newton"},
    "Picard": {"config": NewtonConfig(chunk_length=50, jacobian="none")},
}


@pytest.mark.parametrize("name", ["diag", "head", "lstm", "matrix"])
@pytest.mark.parametrize(
    ("dtype", "scale"),
    [(torch.float32, s) for s in (1.0, 1e-3, 1e-6, 1e-8, 1e-30)]
    + [(torch.float64, s) for s in (1e-6, 1e-13, 1e-250)],
    ids=str,
)
def test_small_states(name, dtype, scale):
    cell = slow(name, dtype)
    u = drives(cell, scale**0.5 if name == "matrix" else scale, dtype)
    wanted = true(cell, u)
    for way, options in WAYS.items():
        found = solve(cell, drives=u, **options)
        assert found.converged, way
        assert found.residual < 1e-6, way
        assert off(found.states, wanted) < (1e-4 if dtype == torch.float32 else 1e-12), way


@pytest.mark.parametrize("way", WAYS)
def test_lanes_and_rows_of_any_size(way):
    """Lanes beside each other differ by factors of 1e9, rows by 1e12."""
    cell = slow("diag", torch.float32)
    u = drives(cell, 1.0, torch.float32, rows=3).unflatten(2, (3, 4))
    u[:, :, 2] *= torch.tensor([1.0, 1e-3, 1e-6, 1e-9])  # the candidate's drive, by lane
    u[:, :, 2] *= torch.tensor([1.0, 1e-6, 1e-12]).reshape(3, 1, 1)
    u = u.flatten(2)
    found = solve(cell, drives=u, **WAYS[way])
    assert off(found.states, true(cell, u)) < 1e-4


@pytest.mark.parametrize("way", WAYS)
def test_smallest_numbers_end(way):
    cell = slow("diag", torch.float32)
    u = drives(cell, 1e-40, torch.float32)
    found = solve(cell, drives=u, **WAYS[way])
    gap = (found.states.double() - true(cell, u)).abs().max()
    assert found.converged
    assert float(gap) < 200 * 1.5e-45  # units of the smallest number


@pytest.mark.parametrize("way", WAYS)
def test_a_reset_begins_a_trajectory(way):
    """Small states after a reset are as right as those of a sequence of their own."""
    cell = slow("diag", torch.float32)
    u = drives(cell, 1.0, torch.float32).unflatten(2, (3, 4))
    u[:, 120:, 2] *= 1e-7
    u[:, :120, 0] += 12  # what is large forgets at once, so that it needs no correction
    u, resets = u.flatten(2), torch.zeros(2, 300, dtype=torch.bool)
    resets[:, 120] = True
    found = solve(cell, drives=u, resets=resets, **WAYS[way])
    wanted = true(cell, u, resets=resets)
    assert float(wanted[:, 120:].abs().max()) < 1e-6
    assert off(found.states[:, 120:], wanted[:, 120:]) < 1e-4


@pytest.mark.parametrize("way", WAYS)
def test_a_large_start_is_forgotten(way):
    """States of ordinary size behind a start of 1e8 are right to their own size."""
    cell = slow("diag", torch.float32)
    with torch.no_grad():
        cell.A_z.fill_(0)
        cell.in_proj.bias[:4] = -1
    u = drives(cell, 1.0, torch.float32)
    h0 = torch.full((2, 4), 1e8)
    found = solve(cell, drives=u, h0=h0, **WAYS[way])
    wanted = true(cell, u, h0=h0)
    tail = wanted.abs().amax((0, 2)) < 2
    assert int(tail.sum()) > 50
    assert off(found.states[:, tail], wanted[:, tail]) < 1e-3


# -- the adjoint -----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1.0, 1e-9, 1e-25])
@pytest.mark.parametrize("which", ["one head", "all"])
def test_small_cotangents(which, size, monkeypatch):
    """The adjoint runs in several chunks. The head with small cotangents has a long memory; the other
    one, whose cotangents are large, has none, so that it needs no correction."""
    torch.manual_seed(0)
    cell = ParaGRU(3, 4, mix="head", n_heads=2)
    with torch.no_grad():
        cell.in_proj.bias[:2], cell.in_proj.bias[2:4] = -4, 8
    u = drives(cell, 1.0, torch.float32, total=200).requires_grad_()
    h0 = torch.zeros(2, 4, requires_grad=True)
    counts = []
    original = adjoint.run

    def run(*args):
        counts.append(args[0].partition.count)
        return original(*args)

    monkeypatch.setattr(adjoint, "run", run)
    monkeypatch.setattr(adjoint, "chunk_length", lambda *_: (20, 5))
    g = torch.randn(2, 200, 4, generator=torch.Generator().manual_seed(2))
    g = g * (torch.tensor([size, size, 1.0, 1.0]) if which == "one head" else size)
    states = solve(cell, drives=u, h0=h0, config=NewtonConfig(chunk_length=50)).states
    bars = torch.autograd.grad(states, [u, h0], g)
    assert counts == [10]
    wide, uw = copy.deepcopy(cell).double(), u.detach().double().requires_grad_()
    hw = torch.zeros(2, 4, dtype=torch.float64, requires_grad=True)
    h, out = hw, []
    for u_t in uw.unbind(1):
        h = wide.step(h, drives=u_t)
        out.append(h)
    right = torch.autograd.grad(torch.stack(out, 1), [uw, hw], g.double())
    for a, b in zip(bars, right, strict=True):
        for lanes in (slice(0, 2), slice(2, 4)):
            got, want = (v.unflatten(-1, (-1, 4))[..., lanes] for v in (a.double(), b))
            if float(want.abs().max()) > 1e-37:
                assert float((got - want).abs().max() / want.abs().max()) < 1e-4


# -- sizes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("length", [1, 3, 7, 20, 57])
@pytest.mark.parametrize("mask", [False, True])
def test_sizes_look_back_and_not_past_a_reset(reverse, length, mask):
    g = torch.Generator().manual_seed(length)
    total = 150
    x = torch.randn(2, total, 3, generator=g) * torch.logspace(0, -9, total)[:, None]
    first = torch.randn(2, 3, generator=g)
    resets = torch.rand(2, total, generator=g) < 0.05 if mask else None
    part = Partition(total, length, reverse)
    found = sizes(x, first, part, resets, Diagonal(), cap=torch.inf, seen=10**9)
    order = range(total - 1, -1, -1) if reverse else range(total)
    running, want = first.abs(), []
    for i, t in enumerate(order):
        if resets is not None:
            running = torch.where(resets[:, t, None], 0, running)
        running = torch.maximum(running, x[:, t].abs())
        if (i + 1) % length == 0 or i == total - 1:
            want.append(running)
    want = torch.stack(want, 1)
    assert bool((found <= want).all())
    if mask or length > 1:  # long rows of single steps are looked at in groups
        assert torch.equal(found, want)
    few = sizes(x, first, part, resets, Diagonal())
    assert bool((few <= want).all())
    assert float(few.max()) <= 1
    spoiled = x.clone()
    spoiled[:, order[total // 2]] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    assert bool(sizes(spoiled, first, part, resets, Diagonal()).isfinite().all())


def test_lanes_that_mix_share_a_size():
    x = torch.tensor([[[1.0, 2.0], [3.0, 4.0]]])[:, None]  # a matrix state
    assert spread(x, Right(), 2)[0, 0].tolist() == [[2, 2], [4, 4]]
    assert spread(x, Left(), 2)[0, 0].tolist() == [[3, 4], [3, 4]]
    assert spread(x, Flat((2, 2)), 2)[0, 0].tolist() == [[4, 4], [4, 4]]
    assert spread(x, None, 2)[0, 0].tolist() == [[4, 4], [4, 4]]
    heads = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]])
    assert spread(heads, Dense(heads=2), 1)[0, 0].tolist() == [2, 2, 4, 4]
    assert torch.equal(spread(heads, Diagonal(), 1), heads)


def test_the_size_of_a_trajectory():
    x = torch.zeros(1, 40, 1)
    x[0, 3], x[0, 17], x[0, 30] = 1.0, -4.0, 2.0
    size = trajectory(x, torch.zeros(1, 1), None, Diagonal())
    assert size[0, :, 0].tolist() == [1.0] * 16 + [4.0] * 24
    resets = torch.zeros(1, 40, dtype=torch.bool)
    resets[0, 32] = True
    tail = trajectory(x, torch.zeros(1, 1), resets, Diagonal())[0, 32:, 0]
    assert float(tail.max()) < 1e-30


# -- what the engine does --------------------------------------------------------------------------


def test_the_rest_begins_behind_what_agrees():
    """Chunk p is walked if the end before it does not meet its start; the first one never is."""
    walked = []

    class Counting:
        partition = Partition(8, 2)

        def walk(self, starts, *, write, chunks, keep):
            walked.append((chunks.start, keep.tolist(), starts.flatten().tolist()))
            return starts + 10, None

    starts = torch.arange(8.0).reshape(2, 4, 1)
    ends = 100 + starts
    agreed = torch.tensor([[True, True, False, False], [True, True, True, True]])
    out, share = engine._sequential_rest(Counting(), starts, ends, agreed, 1)
    assert walked == [(3, [False, True], [102.0, 7.0])]
    assert share == 1 / 4
    assert out.flatten().tolist() == [100, 101, 102, 112, 104, 105, 106, 107]
    walked.clear()
    engine._sequential_rest(Counting(), starts, ends, torch.zeros_like(agreed), 1)
    assert [p for p, *_ in walked] == [1, 2, 3]


@pytest.mark.parametrize("chunk", [1, 4])
def test_a_pinned_solve_ignores_its_tolerance(chunk):
    """All corrections are made for all chunks: nothing freezes that is within a loose tolerance."""
    torch.manual_seed(0)
    cell, x = ParaGRU(3, 4, max_recurrent_norm=None).double(), torch.randn(2, 40, 3).double()
    with torch.no_grad():
        for w in (cell.A_z, cell.A_r, cell.A_n):
            w.mul_(3)
    found = [
        solve(
            cell, x, NewtonConfig(max_iters=3, tol=tol, chunk_length=chunk, on_divergence="ignore")
        ).states
        for tol in (0.5, 1e-13)
    ]
    assert torch.equal(*found)


class Operations(TorchDispatchMode):
    """Counts what PyTorch runs."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "make", [lambda: ParaGRU(3, 4), lambda: ParaLSTM(3, 4), lambda: ParaM2RNN(3, 2, 3)]
)
def test_auto_runs_in_parallel(make):
    """4096 steps take operations for a few chunk lengths, not for 4096 steps, and no step of the
    hand-written loop."""
    torch.manual_seed(0)
    cell, x = make(), torch.randn(1, 4096, 3)
    looped = []
    recurrence = cell.recurrence
    cell.recurrence = lambda *args: looped.append(1) or recurrence(*args)
    with torch.no_grad(), Operations() as parallel:
        found = solve(cell, x)
    assert (found.method, found.path) == ("shooting", "eager")
    assert found.chunks > 16
    assert not looped
    with torch.no_grad(), Operations() as loop:
        solve(cell, x[:, :256], method="sequential")
    assert len(looped) == 256
    assert parallel.count < 16 * loop.count / 4
