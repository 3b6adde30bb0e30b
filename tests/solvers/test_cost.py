"""The cost model returns something that can be run, whatever it is asked."""

from __future__ import annotations

import pytest

from pararnn.solvers.cost import chunk_length


@pytest.mark.parametrize("device", ["cpu", "cuda", "mps"])
@pytest.mark.parametrize("numbers", [0, 1, 64, 10**4, 10**6, 10**9])
def test_lengths_are_possible(device, numbers):
    for total in (0, 1, 2, 95, 96, 97, 500, 2048, 16384, 10**6):
        length, warmup = chunk_length(total, numbers, device)
        assert 1 <= length <= max(total, 1)
        assert warmup >= 1
        assert isinstance(length, int)


def test_what_it_prefers():
    """Wide work runs sequentially, narrow and long work in many chunks; short work in one."""
    assert chunk_length(2048, 10**9, "cpu")[0] == 2048
    narrow = chunk_length(16384, 64, "cpu")[0]
    assert narrow < 16384 // 16
    assert chunk_length(50, 64, "cpu")[0] == 50
    lengths = [chunk_length(16384, n, "cpu")[0] for n in (64, 512, 4096, 32768)]
    assert lengths == sorted(lengths)
    assert chunk_length(16384, 32768, "cuda")[0] <= lengths[-1]
