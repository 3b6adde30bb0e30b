"""The engine on recurrences small enough to follow by hand."""

from __future__ import annotations

import pytest
import torch

from pararnn.scan import Diagonal
from pararnn.solvers.engine import Schedule, mismatch_of, run
from pararnn.solvers.partition import Partition
from pararnn.solvers.scale import sizes


class Toy:
    """``h ← f(h, u_t)`` on numbers, counting the steps that are walked."""

    def __init__(self, f, slope, u, length, reverse=False):
        self.f, self.slope, self.u = f, slope, u
        self.partition = Partition(u.shape[1], length, reverse)
        self.out = torch.full_like(u, torch.nan)
        self.walked = 0
        self.starts = []

    def cuts(self):
        return None

    def algebra(self, kind):
        return Diagonal() if kind == "exact" else None

    def correct(self, mismatch, starts):
        return None

    def project(self, starts):
        return starts

    def sizes(self, first):
        return sizes(self.out, first, self.partition, None, Diagonal())

    def walk(self, starts, *, write, kind="none", chunks=slice(None), first=0, keep=None):
        if write:
            self.starts.append(starts.clone())
        product = torch.ones_like(starts)
        lo, hi, _ = chunks.indices(self.partition.count)

        def advance(h, time, rows):
            u = self.u[:, time][:, rows]
            self.walked += u.shape[1]
            if kind == "exact":
                # No helper of the library: one factor for the chunks that are still active.
                steps = torch.arange(self.u.shape[1])[time][rows]
                order = steps // self.partition.length
                product[:, order - lo] *= self.slope(h, u)
            h = self.f(h, u)
            if write:
                target = self.out[:, time][:, rows]
                kept = torch.zeros(len(h), dtype=torch.bool) if keep is None else keep
                target.copy_(torch.where(kept.reshape(-1, 1, 1), target, h))
            return h

        ends = self.partition.walk(advance, starts, chunks=chunks, first=first)
        assert ends.shape[1] == hi - lo
        return ends, product if kind == "exact" else None


def plan(**changes):
    settings = {
        "tol": 1e-13,
        "warmup": 2,
        "first_kind": "exact",
        "later_kind": "exact",
        "max_iters": None,
        "cap": 16,
        "fallback": True,
    }
    return Schedule(**settings | changes)


def loop(f, u, h0):
    h, out = h0, []
    for t in range(u.shape[1]):
        h = f(h.unsqueeze(1), u[:, t : t + 1])[:, 0]
        out.append(h)
    return torch.stack(out, 1)


LINEAR = (lambda h, u: 0.9 * h + u, lambda h, u: torch.full_like(h, 0.9))
GROWING = (lambda h, u: 1.5 * h + u, lambda h, u: torch.full_like(h, 1.5))
BENT = (lambda h, u: torch.sin(3 * h) + u, lambda h, u: 3 * torch.cos(3 * h))


def draw(total=23, rows=2):
    g = torch.Generator().manual_seed(0)
    u = torch.randn(rows, total, 1, generator=g, dtype=torch.float64)
    return u, torch.randn(rows, 1, generator=g, dtype=torch.float64)


@pytest.mark.parametrize("length", [1, 2, 5, 22, 23])
@pytest.mark.parametrize("system", [LINEAR, GROWING], ids=["decaying", "growing"])
def test_linear_in_one_correction(length, system):
    u, h0 = draw()
    toy = Toy(*system, u, length)
    outcome = run(toy, h0, plan())
    assert outcome.converged
    assert not outcome.fallback
    assert outcome.iterations == (0 if length == 23 else 1)
    want = loop(system[0], u, h0)
    torch.testing.assert_close(toy.out, want, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("kind", ["exact", "none"])
@pytest.mark.parametrize("length", [2, 5, 7])
def test_k_corrections_make_k_plus_one_chunks_exact(kind, length):
    u, h0 = draw()
    want = loop(BENT[0], u, h0)
    count = -(-23 // length)
    for pin in range(count):
        toy = Toy(*BENT, u, length)
        outcome = run(
            toy, h0, plan(first_kind=kind, later_kind=kind, max_iters=pin, fallback=False)
        )
        assert outcome.iterations == pin
        done = min(23, (pin + 1) * length)
        torch.testing.assert_close(toy.out[:, :done], want[:, :done], rtol=0, atol=1e-9)
    assert outcome.history[-1] < 1e-9
    assert len(outcome.history) == count


def test_accepted_chunks_are_frozen():
    """A chunk whose start has been accepted, with all before it, starts there in every pass."""
    u, h0 = draw()
    toy = Toy(*BENT, u, 3)
    run(toy, h0, plan(first_kind="none", later_kind="none"))
    accepted = 0
    for before, after in zip(toy.starts, toy.starts[1:], strict=False):
        same = (before == after)[..., 0].cumprod(1).sum(1).min()
        assert int(same) >= accepted, "a frozen start moved"
        accepted = int(same)
    assert accepted >= toy.partition.count // 2


def test_fallback_walks_only_what_has_not_settled():
    u, h0 = draw(rows=3)
    u[1] = 0  # this row is settled at once
    h0[1] = 0
    toy = Toy(*BENT, u, 4)
    outcome = run(toy, h0, plan(first_kind="none", later_kind="none", cap=1))
    assert outcome.fallback
    assert outcome.converged
    torch.testing.assert_close(toy.out, loop(BENT[0], u, h0), rtol=0, atol=1e-12)
    assert outcome.passes < 1 + 2 + 1 + 1


def test_without_fallback_the_truth_is_told():
    u, h0 = draw()
    toy = Toy(*BENT, u, 4)
    kinds = {"first_kind": "none", "later_kind": "none"}
    outcome = run(toy, h0, plan(**kinds, cap=1, fallback=False))
    assert not outcome.converged
    assert outcome.history[-1] > 1e-13
    gap = (toy.out[:, 3:-1:4] - toy.starts[-1][:, 1:]).abs().max()
    assert float(gap) > 0


def test_a_lucky_guess_needs_no_correction():
    u, h0 = draw()
    h0.zero_()
    forgetful = (lambda h, u: 0 * h + u, lambda h, u: torch.zeros_like(h))
    toy = Toy(*forgetful, u, 4)
    outcome = run(toy, h0, plan())
    assert (outcome.iterations, outcome.history) == (0, [0.0])
    assert torch.equal(toy.out, u)


def test_mismatch():
    inf, nan = torch.inf, torch.nan
    ends = torch.tensor([[[1.0], [inf], [nan], [inf], [nan], [1.0], [100.0], [-inf]]])
    starts = torch.tensor([[[1.5], [inf], [nan], [1.0], [1.0], [inf], [101.0], [inf]]])
    difference, relative = mismatch_of(ends, starts, torch.ones_like(ends), 1)
    assert relative[0, :3].tolist() == [0.5, 0.0, 0.0]
    assert difference[0, 1:3].tolist() == [[0.0], [0.0]]
    assert bool((relative[0, 3:6] == inf).all())
    assert float(relative[0, 6]) == pytest.approx(0.01)
    assert float(relative[0, 7]) == inf
    small = ends[..., :1] * 1e-9
    _, relative = mismatch_of(small, starts[..., :1] * 1e-9, torch.full_like(small, 1e-9), 1)
    assert float(relative[0, 0]) == pytest.approx(0.5), "small systems are measured by their scale"


@pytest.mark.parametrize("system", [LINEAR, GROWING], ids=["decaying", "growing"])
def test_a_cheap_first_pass_and_an_exact_correction(system):
    """Where the first pass was not enough, the operators are made before the first correction; that
    pass counts, too."""
    u, h0 = draw(total=24)
    toy = Toy(*system, u, 6)
    outcome = run(toy, h0, plan(first_kind="none"))
    assert (outcome.converged, outcome.fallback, outcome.iterations) == (True, False, 1)
    # A guess of two of six steps, the first pass, the operators, and the pass after the correction.
    assert outcome.passes == pytest.approx(2 / 6 + 3)
    assert toy.walked == 3 * 2 + 3 * 24, "the last chunk needs no guess"
    torch.testing.assert_close(toy.out, loop(system[0], u, h0), rtol=1e-11, atol=1e-11)


def test_after_a_fallback_the_largest_mismatch_that_was_accepted_is_told():
    """Of a row without a mismatch and rows whose first chunk has one below the tolerance."""
    u, h0 = draw(rows=3)
    u[1] = 0
    h0[1] = 0
    toy = Toy(*LINEAR, u, 4)
    outcome = run(toy, h0, plan(first_kind="none", later_kind="none", cap=0, tol=0.6))
    assert outcome.fallback
    want = loop(LINEAR[0], u, h0)
    missed = (want[:, 3] - toy.starts[0][:, 1]).abs()  # of the guess where the second chunk starts
    within = missed / want[:, 3].abs()
    accepted = within.nan_to_num(0) < 0.6
    assert accepted.sum() >= 2
    least, most = (
        float(x[accepted].nan_to_num(0).max()) for x in (missed / want.abs().max(), within)
    )
    assert 0 < least <= outcome.history[-1] <= most * (1 + 1e-12)
