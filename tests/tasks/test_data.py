"""The streams of the probe tasks: draw order, answers, tables."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Generator

from pararnn.tasks import TASKS
from pararnn.tasks.pendulum import GRAVITY, swing
from pararnn.tasks.words import (
    LATIN_SQUARE,
    S3_PERMUTATIONS,
    S5_PERMUTATIONS,
    composition_table,
)


def stream(seed=1):
    return Generator().manual_seed(seed)


def drawn(name, batch=5, length=23, seed=1, **options):
    return TASKS[name].draw(stream(seed), batch, length, **options)


every_task = pytest.mark.parametrize("name", TASKS)


# -- tables --------------------------------------------------------------------------------------


def test_table_of_s3():
    assert composition_table(S3_PERMUTATIONS).tolist() == [
        [0, 1, 2, 3, 4, 5],
        [1, 0, 4, 5, 2, 3],
        [2, 5, 0, 4, 3, 1],
        [3, 4, 5, 0, 1, 2],
        [4, 3, 1, 2, 5, 0],
        [5, 2, 3, 1, 0, 4],
    ]


def test_table_of_s5_composes_as_matrices_do():
    matrices = np.zeros((120, 5, 5), int)
    for i, p in enumerate(S5_PERMUTATIONS):
        matrices[i, p, range(5)] = 1
    table = composition_table(S5_PERMUTATIONS).numpy()
    assert S5_PERMUTATIONS[0] == (0, 1, 2, 3, 4)
    assert list(S5_PERMUTATIONS) == sorted(S5_PERMUTATIONS)
    for i, j in [(1, 2), (2, 1), (119, 42), (33, 33), (0, 5)]:
        np.testing.assert_array_equal(matrices[table[i, j]], matrices[i] @ matrices[j])
    assert table[1, 2] != table[2, 1]


def is_latin(square):
    return all(sorted(line) == list(range(6)) for line in [*square, *zip(*square, strict=True)])


def is_isotopic_to_a_group(square):
    """Reorder rows and columns so that 0 is neutral: what a group is isotopic to is then a group
    itself (Albert, Quasigroups I, 1943), so associative."""
    square = np.array(square)
    columns = np.empty(6, int)
    columns[square[0]] = np.arange(6)  # column c of the result is the one with c in row 0
    rows = np.empty(6, int)
    rows[square[:, columns[0]]] = np.arange(6)
    loop = square[np.ix_(rows, columns)]
    assert list(loop[0]) == list(loop[:, 0])
    return all(
        loop[loop[a, b], c] == loop[a, loop[b, c]]
        for a, b, c in itertools.product(range(6), repeat=3)
    )


def scrambled(square, seed):
    random = np.random.default_rng(seed)
    rows, columns, names = (random.permutation(6) for _ in range(3))
    return names[np.array(square)[np.ix_(rows, columns)]]


def test_the_latin_square_is_no_group_in_disguise():
    assert is_latin(LATIN_SQUARE)
    assert not is_isotopic_to_a_group(LATIN_SQUARE)
    z6 = [[(i + j) % 6 for j in range(6)] for i in range(6)]
    s3 = composition_table(S3_PERMUTATIONS).tolist()
    for seed in range(4):  # the check finds groups, however they are relabelled
        assert is_isotopic_to_a_group(scrambled(z6, seed))
        assert is_isotopic_to_a_group(scrambled(s3, seed))
        assert not is_isotopic_to_a_group(scrambled(LATIN_SQUARE, seed))


# -- answers against loops -----------------------------------------------------------------------


def test_parity_by_a_loop():
    batch = drawn("parity")
    for x, y in zip(batch.x.tolist(), batch.y.tolist(), strict=True):
        assert y == [sum(x[: t + 1]) % 2 for t in range(23)]


@pytest.mark.parametrize(("name", "perms"), [("S3", S3_PERMUTATIONS), ("S5", S5_PERMUTATIONS)])
def test_words_by_moving_things(name, perms):
    """The product applied to things on places, instead of looked up in a table."""
    batch = drawn(name)
    for x, y in zip(batch.x.tolist(), batch.y.tolist(), strict=True):
        total = tuple(range(len(perms[0])))
        for symbol, answer in zip(x, y, strict=True):
            total = tuple(perms[symbol][m] for m in total)
            assert perms[answer] == total


@pytest.mark.parametrize("length", [0, 1, 2, 3, 24, 25])
def test_hierarchical_words_by_a_loop(length):
    batch = drawn("S3-hier", length=length)
    table = composition_table(S3_PERMUTATIONS)
    for x, y in zip(batch.x.tolist(), batch.y.tolist(), strict=True):
        state = 0
        for t in range(length):
            if t % 2:
                state = table[LATIN_SQUARE[x[t - 1]][x[t]], state].item()
            assert y[t] == state


def test_hierarchical_words_first_row():
    batch = TASKS["S3-hier"].draw(stream(1), 128, 64)
    assert batch.x[0, :6].tolist() == [1, 5, 0, 2, 1, 1]
    assert batch.y[0, :6].tolist() == [0, 0, 0, 5, 5, 1]


def test_sessions_by_a_loop():
    batch = drawn("session-parity", batch=40, length=70)
    sessions = 0
    for x, dt, y in zip(batch.x.tolist(), batch.dt.tolist(), batch.y.tolist(), strict=True):
        state = 0
        for t, (bit, gap, answer) in enumerate(zip(x, dt, y, strict=True)):
            assert gap == 0 if t == 0 else 0.1 <= gap <= 1 or 50 <= gap <= 100
            sessions += gap > 1
            state = bit if gap > 1 else state ^ bit
            assert answer == state
    assert 0.03 < sessions / (40 * 69) < 0.07


def test_draw_order_of_sessions():
    """Bits, boundaries, gaps inside, gaps between."""
    g = stream()
    x = torch.randint(0, 2, (5, 23), generator=g)
    boundary = torch.rand(5, 23, generator=g) < 0.05
    within = torch.rand(5, 23, generator=g)
    across = torch.rand(5, 23, generator=g)
    batch = drawn("session-parity")
    assert torch.equal(batch.x, x)
    boundary[:, 0] = False
    want = torch.where(boundary, 50 + 50 * across, 0.1 + 0.9 * within)
    torch.testing.assert_close(batch.dt[:, 1:], want[:, 1:])
    timed = drawn("parity-timestamped")
    assert torch.equal(timed.x, x)
    assert torch.equal(timed.y, drawn("parity").y)
    torch.testing.assert_close(timed.dt, batch.dt, rtol=0, atol=0)


def test_recall():
    batch = drawn("MQAR", length=30, pairs=6)
    assert batch.asked.sum(1).tolist() == [6] * 5
    assert bool(batch.asked[:, 24:].all())
    seen_orders = set()
    for x, y in zip(batch.x.tolist(), batch.y.tolist(), strict=True):
        keys, values = x[:12:2], x[1:12:2]
        assert len(set(keys)) == 6
        assert all(k < 32 <= v for k, v in zip(keys, values, strict=True))
        memory = dict(zip(keys, values, strict=True))
        assert sorted(x[24:]) == sorted(keys)
        assert [memory[k] - 32 for k in x[24:]] == y[24:]
        seen_orders.add(tuple(keys.index(k) for k in x[24:]))
    assert len(seen_orders) > 1
    filler = drawn("MQAR", batch=50, length=64).x[:, 16:56]
    assert filler.unique().numel() == 64


@pytest.mark.parametrize(
    ("length", "pairs"), [(24, 8), (30, 6), (256, 16), (256, 32), (7, 2), (97, 1)]
)
def test_recall_does_not_contradict_itself(length, pairs):
    """A key that is asked for is written once, and stands nowhere between."""
    batch = drawn("MQAR", batch=40, length=length, pairs=pairs)
    for x, y in zip(batch.x.tolist(), batch.y.tolist(), strict=True):
        asked, between = x[length - pairs :], x[2 * pairs : length - pairs]
        assert not set(asked) & set(between)
        writings = [(a, b - 32) for a, b in itertools.pairwise(x[: length - pairs]) if a < 32 <= b]
        for key, value in zip(asked, y[length - pairs :], strict=True):
            assert [b for a, b in writings if a == key] == [value]


@pytest.mark.parametrize(("length", "pairs"), [(23, 8), (200, 33), (10, 0)])
def test_recall_that_cannot_be(length, pairs):
    with pytest.raises(ValueError, match="pairs"):
        drawn("MQAR", length=length, pairs=pairs)


def test_the_pendulum_keeps_its_energy_and_its_period():
    angle, speed = torch.tensor([0.9, -0.3]).double(), torch.tensor([0.4, 1.0]).double()

    def energy(a, s):
        return s**2 / 2 - GRAVITY * torch.cos(a)

    later = swing(angle, speed, torch.tensor([0.3, 0.05]).double())
    torch.testing.assert_close(energy(*later), energy(angle, speed), rtol=1e-7, atol=0)
    # a small swing has the period 2π √(L/g), up to the square of the angle over 16
    small = torch.tensor([1e-3]).double()
    for part, sign in ((0.5, -1), (1.0, 1)):
        a, _ = swing(small, 0 * small, part * 2 * math.pi / math.sqrt(GRAVITY) * torch.ones(1))
        torch.testing.assert_close(a, sign * small, rtol=1e-3, atol=0)


def test_the_pendulum_seen_through_noise():
    batch = drawn("pendulum", batch=200, length=12)
    assert batch.x.dtype == batch.y.dtype == batch.dt.dtype == torch.float32
    torch.testing.assert_close(batch.y.square().sum(-1), torch.ones(200, 12))
    noise = batch.x - batch.y
    assert float(noise.std()) == pytest.approx(0.05, rel=0.05)
    assert batch.dt[:, 0].count_nonzero() == 0
    assert 0.05 <= float(batch.dt[:, 1:].min()) < float(batch.dt[:, 1:].max()) <= 0.3


def test_the_pendulum_moves_by_its_time_gaps():
    """The first two angles tell the speed, and so where it is at the third."""
    batch = drawn("pendulum", batch=20, length=3)
    angle = torch.atan2(batch.y[..., 0], batch.y[..., 1]).double()
    first, second, third = angle.unbind(1)
    _, t1, t2 = batch.dt.double().unbind(1)
    low, high = torch.full_like(first, -3), torch.full_like(first, 3)
    for _ in range(40):  # bisection: the farther the faster
        speed = (low + high) / 2
        short = swing(first, speed, t1)[0] < second
        low, high = torch.where(short, speed, low), torch.where(short, high, speed)
    torch.testing.assert_close(swing(first, speed, t1 + t2)[0], third, rtol=0, atol=1e-5)


# -- every stream ------------------------------------------------------------------------------


@every_task
def test_streams_come_from_the_generator_alone(name):
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first, g = drawn(name, length=40), stream()
    again, following = (TASKS[name].draw(g, 5, 40) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), before)
    for a, b, c in zip(
        vars(first).values(), vars(again).values(), vars(following).values(), strict=True
    ):
        assert (a is None) == (b is None)
        if a is not None:
            assert torch.equal(a, b)
            assert (name == "MQAR" and a.dtype == torch.bool) or not torch.equal(a, c)


@every_task
def test_shapes_and_ranges(name):
    task, batch = TASKS[name], drawn(name, batch=3, length=31)
    assert (batch.dt is not None) == task.timed
    if task.symbols:
        assert batch.x.shape == batch.y.shape == (3, 31)
        assert batch.x.dtype == batch.y.dtype == torch.int64
        assert 0 <= batch.x.min() <= batch.x.max() < task.inputs
        assert 0 <= batch.y.min() <= batch.y.max() < task.outputs
    else:
        assert batch.x.shape == (3, 31, task.inputs)
        assert batch.y.shape == (3, 31, task.outputs)


@every_task
def test_chance(name):
    """What somebody scores who answers with one class, or with the noisy input."""
    task = TASKS[name]
    batch = drawn(name, batch=100, length=60)
    answers = batch.x
    if task.symbols:
        answers = torch.nn.functional.one_hot(torch.full_like(batch.y, 1), task.outputs).float()
    scores = task.right(answers, batch).abs()
    error = float(scores.std()) / len(scores) ** 0.5
    assert abs(float(scores.mean()) - task.chance) < 5 * error + 0.01 * task.chance


def test_only_asked_steps_count():
    task, batch = TASKS["MQAR"], drawn("MQAR", length=40)
    answers = torch.randn(5, 40, 32, generator=stream(7))
    right = torch.where(batch.asked[..., None], 100 * torch.eye(32)[batch.y], answers)
    assert task.right(right, batch).tolist() == [1.0] * 40
    assert float(task.loss(right, batch)) < 1e-6
    chosen = torch.stack([answers[b, t] for b, t in batch.asked.nonzero()])
    want = torch.nn.functional.cross_entropy(chosen, batch.y[batch.asked])
    torch.testing.assert_close(task.loss(answers, batch), want)
