"""Chunks cover every step exactly once, in both directions and over any range."""

from __future__ import annotations

import pytest
import torch

from pararnn.solvers.partition import Partition

SHAPES = [(t, c) for t in (1, 2, 5, 6, 7, 12, 13) for c in (1, 2, 3, 5, 7, 13) if c <= t]


def walk(total, length, reverse, chunks=slice(None), first=0):
    """Walk with a counter as state, and return (visits of every step, starts seen, ends)."""
    part = Partition(total, length, reverse)
    lo, hi, _ = chunks.indices(part.count)
    seen = []
    starts = torch.arange(part.count)[lo:hi].double().reshape(1, -1) * 1000

    def advance(h, time, rows):
        steps = torch.arange(total)[time][rows]
        assert h.shape[1] == len(steps)
        owners = (h[0] // 1000).long()
        inside = h[0] - 1000 * owners
        for p, j, t in zip(owners.tolist(), inside.tolist(), steps.tolist(), strict=True):
            seen.append((p, int(j) + first, t))
        return h + 1

    ends = part.walk(advance, starts, chunks=chunks, first=first)
    return part, seen, ends


def expected(part, p, first=0):
    """Steps of chunk p in the order of the walk."""
    steps = list(range(part.total))
    if part.reverse:
        steps.reverse()
    return steps[p * part.length : (p + 1) * part.length][first:]


@pytest.mark.parametrize(("total", "length"), SHAPES)
@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
def test_every_step_once_and_in_order(total, length, reverse):
    part, seen, ends = walk(total, length, reverse)
    assert sorted(t for _, _, t in seen) == list(range(total))
    assert part.count * length >= total > (part.count - 1) * length
    for p in range(part.count):
        visited = [t for q, _, t in seen if q == p]
        assert visited == expected(part, p)
        assert float(ends[0, p]) == 1000 * p + len(visited)


@pytest.mark.parametrize(("total", "length"), SHAPES)
@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
def test_ranges_of_chunks(total, length, reverse):
    count = -(-total // length)
    for lo in range(count):
        for hi in range(lo + 1, count + 1):
            part, seen, ends = walk(total, length, reverse, slice(lo, hi))
            assert {p for p, _, _ in seen} == set(range(lo, hi))
            for p in range(lo, hi):
                assert [t for q, _, t in seen if q == p] == expected(part, p)
                assert float(ends[0, p - lo]) == 1000 * p + len(expected(part, p))


@pytest.mark.parametrize(("total", "length"), [(12, 5), (13, 4), (9, 3), (7, 7)])
@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
def test_the_last_steps_of_all_but_the_last_chunk(total, length, reverse):
    """What the warm-up walks: it may start inside the chunks."""
    count = -(-total // length)
    for first in range(length):
        part, seen, _ = walk(total, length, reverse, slice(0, count - 1), first)
        for p in range(count - 1):
            assert [t for q, _, t in seen if q == p] == expected(part, p, first)


def test_ordered_is_its_own_inverse():
    x = torch.randn(2, 5, 3)
    for reverse in (False, True):
        part = Partition(10, 2, reverse)
        assert torch.equal(part.ordered(part.ordered(x)), x)
