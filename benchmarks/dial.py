"""Draws the pictures of "How the solver works": `python benchmarks/dial.py`.

Nothing is measured here. The chunks are those of a small recurrence that this file solves itself,
and the costs are those of the cost model. The result is deterministic; a test compares it with
what is committed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from harness import ROOT
from plots import BLUE, GREEN, INK, ORANGE, Plot
from report import written

# --------------------------------------------------------------------------------------
# One correction, on h' = (1 - z) h + z tanh(a h + u)
# --------------------------------------------------------------------------------------

STEPS, LENGTH, WARMUP = 48, 12, 5
Z, A = 0.13, 1.1
Points = list[tuple[float, float]]


def drive(t: int) -> float:
    return 0.9 * math.sin(0.29 * t + 0.4) + 0.5 * math.sin(0.83 * t)


def step(h: float, t: int) -> tuple[float, float]:
    """The next state, and the derivative of the step."""
    n = math.tanh(A * h + drive(t))
    return (1 - Z) * h + Z * n, 1 - Z + Z * A * (1 - n * n)


def walk(h: float, first: int, stop: int) -> tuple[Points, float]:
    """States at the times `first` to `stop`, and the product of the derivatives between."""
    points, product = [(float(first), h)], 1.0
    for t in range(first, stop):
        h, slope = step(h, t)
        product *= slope
        points.append((float(t + 1), h))
    return points, product


def chunks(starts: list[float]) -> tuple[list[Points], list[float]]:
    """Every chunk from its start, and the exact correction of the starts."""
    walks = [walk(s, p * LENGTH, (p + 1) * LENGTH) for p, s in enumerate(starts)]
    corrected = [starts[0]]
    for (points, product), old in zip(walks[:-1], starts[:-1], strict=True):
        corrected.append(points[-1][1] + product * (corrected[-1] - old))
    return [points for points, _ in walks], corrected


def panel(title: str, text: str) -> Plot:
    plot = Plot(title, text, (0, STEPS), (-1, 1))
    plot.up([])
    for p in range(STEPS // LENGTH + 1):
        plot.axes.axvline(p * LENGTH, color=INK, alpha=0.25, linewidth=1)
    plot.across([((p + 0.5) * LENGTH, f"chunk {p + 1}") for p in range(STEPS // LENGTH)], "time")
    plot.axes.tick_params("x", length=0)
    plot.axes.set_ylabel("state", rotation=0, horizontalalignment="right")
    plot.line(walk(0.0, 0, STEPS)[0], INK, dots=False, linewidth=7, alpha=0.16)
    return plot


def dashed(plot: Plot, points: Points, colour: str, alpha: float = 1.0) -> None:
    plot.line(points, colour, dots=False, linestyle=(0, (1.2, 1.9)), linewidth=1.6, alpha=alpha)


def dot(plot: Plot, x: float, y: float, colour: str) -> None:
    plot.line([(x, y)], colour, markersize=8)


def gap(plot: Plot, x: float, low: float, high: float, colour: str) -> None:
    plot.line([(x, low), (x, high)], colour, dots=False, linewidth=3)


def guess_and_correction() -> tuple[Plot, Plot]:
    begins = range(LENGTH, STEPS, LENGTH)
    warmups = [walk(0.0, t - WARMUP, t)[0] for t in begins]
    starts = [0.0, *(points[-1][1] for points in warmups)]
    before, corrected = chunks(starts)
    after, _ = chunks(corrected)

    first = panel(
        "Guess the starts, walk all chunks",
        "Four chunks of a sequence. Each but the first starts from a guess, found by a few warm-up "
        "steps from zero. The ends of the chunks do not meet the next starts.",
    )
    for points in warmups:
        dashed(first, points, ORANGE)
    for points in before:
        first.line(points, BLUE, dots=False)
    for (x, end), start in zip((points[-1] for points in before[:-1]), starts[1:], strict=True):
        gap(first, x, end, start, ORANGE)
        dot(first, x, start, ORANGE)
    first.legend([(BLUE, "walk"), (ORANGE, "warm-up, start, mismatch")])

    second = panel(
        "Correct all starts, walk again",
        "The same chunks after one correction of all starts. The ends now nearly meet the starts, "
        "and the walks lie on the true trajectory.",
    )
    for points in before[1:]:
        dashed(second, points, BLUE, 0.75)
    for points in after:
        second.line(points, GREEN, dots=False)
    for (x, end), start in zip((points[-1] for points in after[:-1]), corrected[1:], strict=True):
        gap(second, x, end, start, ORANGE)
        dot(second, x, start, GREEN)
    second.legend([(GREEN, "walk again"), (BLUE, "first walk")])
    return first, second


# --------------------------------------------------------------------------------------
# The dial
# --------------------------------------------------------------------------------------

CELLS = 24
STOPS = (
    (CELLS, "L = T: the loop", "1 chunk, no guess; T steps in a row"),
    (6, "between: shooting", "T/L chunks, T/L − 1 guesses; L steps in a row"),
    (1, "L = 1: Newton", "T chunks, T guesses; 1 step for all at once"),
)


def dial() -> Plot:
    plot = Plot(
        "The dial: chunk length L",
        "A dial with three stops. At the top one chunk as long as the sequence, the loop. In the "
        "middle several chunks with guessed starts, shooting. At the bottom chunks of one step, "
        "Newton's method.",
        (0, CELLS),
        (-1, 1),
    )
    plot.axes.set_axis_off()
    plot.axes.axvline(-2, 0.12, 1.05, color=INK, alpha=0.4, linewidth=2, clip_on=False)
    for middle, (length, name, cost) in zip((0.8, -0.05, -0.9), STOPS, strict=True):
        colour = GREEN if length == 6 else BLUE
        plot.line([(-2, middle + 0.19)], colour, markersize=12)
        plot.note((0, middle), name, (0, 14), "data", weight="bold")
        plot.note((0, middle), cost, (0, -20), "data")
        for start in range(0, CELLS, length):
            guessed = start or length == 1
            plot.axes.annotate(
                "",
                (start + length - 0.1, middle),
                (start + 0.3, middle),
                arrowprops={"arrowstyle": "->", "color": colour, "linewidth": 2, "mutation_scale": 8,
                            "shrinkA": 0, "shrinkB": 0},
            )  # fmt: skip
            plot.line([(start + 0.25, middle)], ORANGE if guessed else INK, markersize=6)
    return plot


# --------------------------------------------------------------------------------------
# What the cost model says
# --------------------------------------------------------------------------------------

TOTAL = 4096
SIZES = (64, 1024, 16384)


def modelled() -> Plot:
    from pararnn.solvers import cost

    device = replace(cost.machine("cpu"), processors=1)
    lengths = [2.0**i for i in range(6, 13)]
    plot = Plot(
        f"Modelled cost, T = {TOTAL}, loop = 1",
        "Modelled cost of a solve without corrections against the chunk length, relative to the "
        "loop, for states of 64, 1024 and 16384 numbers on one processor. Short chunks are many "
        "times cheaper for 64 numbers, about twice for 1024, and dearer or no cheaper for 16384.",
        (6, 12),
        (-2, 1),
        log=True,
    )
    plot.across([(math.log2(n), f"{n:.0f}") for n in lengths], "chunk length L")
    plot.level(1, "")
    for colour, numbers in zip((GREEN, BLUE, ORANGE), SIZES, strict=True):
        loop = TOTAL * device.step(numbers)
        points = []
        for length in (2 ** (i / 4) for i in range(24, 49)):
            warmup = cost.WARMUP if length < TOTAL else 0
            solve = (length + warmup) * device.step(numbers * TOTAL / length)
            points.append((math.log2(length), solve / loop))
        plot.line(points, colour, dots=False)
    plot.legend([(c, f"N = {n}") for c, n in zip((GREEN, BLUE, ORANGE), SIZES, strict=True)])
    return plot


def outputs() -> Iterator[tuple[Path, str]]:
    """Every file, with its content."""
    guess, correction = guess_and_correction()
    yield dial().write("dial")
    yield guess.write("dial_guess")
    yield correction.write("dial_correction")
    yield modelled().write("dial_cost")


if __name__ == "__main__":
    for path in written(outputs()):
        print(path.relative_to(ROOT))
