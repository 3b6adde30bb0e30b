"""Who reads the sequence knows the answer: one oracle a probe task, without the task's own code.

An oracle is given what a model is given, ``(x, dt, asked)`` of one sequence as lists, and says the
answer at every step that is asked.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np

Numbers = list[int]
Oracle = Callable[[Numbers, "list[float] | None", list[bool]], Numbers]

S3 = ((0, 1, 2), (1, 0, 2), (0, 2, 1), (2, 1, 0), (1, 2, 0), (2, 0, 1))
S5 = tuple(itertools.permutations(range(5)))
PAIRS = ("345012", "423150", "234501", "012345", "150423", "501234")
NOISE, GRAVITY = 0.05, 9.81


def parity(x, dt, asked):
    return [sum(x[: t + 1]) % 2 for t in range(len(x))]


def sessions(x, dt, asked):
    """A gap of more than 1 begins a session."""
    starts = [max((s for s in range(t + 1) if dt[s] > 1), default=0) for t in range(len(x))]
    return [sum(x[s : t + 1]) % 2 for t, s in enumerate(starts)]


def moved(names, permutations):
    """Things on places, moved by one permutation after the other; which one are they all?"""
    total, said = tuple(range(len(permutations[0]))), []
    for name in names:
        total = tuple(permutations[name][m] for m in total)
        said.append(permutations.index(total))
    return said


def s3(x, dt, asked):
    return moved(x, S3)


def s5(x, dt, asked):
    return moved(x, S5)


def pairs(x, dt, asked):
    """Every second symbol ends a pair, which names a permutation."""
    said = moved([int(PAIRS[a][b]) for a, b in zip(x[::2], x[1::2], strict=False)], S3)
    return [0, *(said[(t - 1) // 2] for t in range(1, len(x)))][: len(x)]


def recalled(x, dt, asked):
    """Every key that is followed by a value is a writing, wherever it is; the last one counts."""
    memory, said = {}, []
    for t, symbol in enumerate(x):
        if asked[t]:
            said.append(memory.get(symbol, -1))
        elif t and x[t - 1] < 32 <= symbol:
            memory[x[t - 1]] = symbol - 32
    return said


def recalled_first(x, dt, asked):
    """As :func:`recalled`, but the first writing counts."""
    writings = [i for i in range(len(x) - 1) if not asked[i + 1] and x[i] < 32 <= x[i + 1]]
    memory = {x[i]: x[i + 1] - 32 for i in reversed(writings)}
    return [memory.get(symbol, -1) for t, symbol in enumerate(x) if asked[t]]


def text(x, dt, asked):
    """Keys are 2 to 33, values 34 to 97; a key before it is asked for came with its value."""
    memory, said = {}, []
    for t, token in enumerate(x):
        if asked[t]:
            said.append(memory.get(token, -1))
        elif t and 2 <= x[t - 1] < 34 <= token:
            memory[x[t - 1]] = token
    return said


ORACLES: dict[str, tuple[Oracle, ...]] = {
    "parity": (parity,),
    "parity-timestamped": (parity,),
    "session-parity": (sessions,),
    "S3": (s3,),
    "S3-hier": (pairs,),
    "S5": (s5,),
    "MQAR": (recalled, recalled_first),
    "MQAR-text": (text,),
}
"""Of the tasks whose answers are symbols."""


def pendulum(x: np.ndarray, dt: np.ndarray, substeps: int) -> np.ndarray:
    """Sines and cosines ``(B, T, 2)`` of the swing that is nearest to the noisy ones: angle and speed
    at the start by least squares, over more and more steps."""
    start = np.stack([np.arctan2(*x[:, :4].mean(1).T), np.zeros(len(x))], 1)
    length, small = min(8, x.shape[1]), 1e-6
    while True:
        for _ in range(5):
            beside = np.concatenate(
                [start, start + np.array([small, 0]), start + np.array([0, small])]
            )
            swings = swung(beside, np.tile(dt[:, :length], (3, 1)), substeps)
            seen, *others = np.split(swings, 3)
            slopes = [(other - seen) / small for other in others]
            j = np.stack(slopes, -1).reshape(len(x), -1, 2)
            gap = (x[:, :length] - seen).reshape(len(x), -1, 1)
            normal = np.swapaxes(j, 1, 2) @ j + 1e-12 * np.eye(2)
            start = start + np.linalg.solve(normal, np.swapaxes(j, 1, 2) @ gap)[..., 0]
        if length == x.shape[1]:
            return swung(start, dt, substeps)
        length = min(2 * length, x.shape[1])


def swung(start: np.ndarray, dt: np.ndarray, substeps: int) -> np.ndarray:
    """The swing from angle and speed ``(B, 2)``, by the leapfrog of fourth order (Yoshida)."""
    angle, speed = start.T.copy()
    w = 1 / (2 - 2 ** (1 / 3))
    shares = (w, 1 - 2 * w, w)
    found = []
    for gap in dt.T:
        for share in substeps * shares:
            h = share * gap / substeps
            angle = angle + h / 2 * speed
            speed = speed - h * GRAVITY * np.sin(angle)
            angle = angle + h / 2 * speed
        found.append(np.stack([np.sin(angle), np.cos(angle)], -1))
    return np.stack(found, 1)
