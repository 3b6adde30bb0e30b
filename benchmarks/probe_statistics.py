"""Tests of the page of probes: whether rates, or means, of two samples differ."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence


def fisher(a: int, of_a: int, b: int, of_b: int) -> float:
    """Fisher's exact test, two-sided: the probability, if both rates are one, of a table that is no
    likelier than this one."""
    hits, every = a + b, of_a + of_b

    def likely(k: int) -> int:
        return math.comb(of_a, k) * math.comb(of_b, hits - k)

    low, high = max(0, hits - of_b), min(of_a, hits)
    return sum(likely(k) for k in range(low, high + 1) if likely(k) <= likely(a)) / math.comb(
        every, hits
    )


def student(t: float, df: int) -> float:
    """Probability that Student's t is at least so far from 0, by its closed form for whole df."""
    angle = math.atan(abs(t) / math.sqrt(df))
    cos = math.cos(angle)
    if df % 2:
        total, term = angle, math.sin(angle) * cos
        for k in range(1, df // 2 + 1):
            total += term
            term *= cos * cos * 2 * k / (2 * k + 1)
        return 1 - 2 / math.pi * total
    total, term = 0.0, math.sin(angle)
    for k in range(1, df // 2 + 1):
        total += term
        term *= cos * cos * (2 * k - 1) / (2 * k)
    return 1 - total


def different(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Probability of means that lie so far apart, if both are samples of one normal distribution
    (Student's test with pooled variance)."""
    n, m = len(ours), len(theirs)
    gap = statistics.fmean(ours) - statistics.fmean(theirs)
    squares = sum((x - statistics.fmean(s)) ** 2 for s in (ours, theirs) for x in s)
    if n + m < 3 or squares == 0:
        return 1.0 if abs(gap) < 1e-12 else 0.0
    error = math.sqrt(squares / (n + m - 2) * (1 / n + 1 / m))
    return student(gap / error, n + m - 2)
