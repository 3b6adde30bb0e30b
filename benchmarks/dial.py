"""Draws the pictures of "How the solver works": `python benchmarks/dial.py`.

Nothing is measured here. The chunks are those of a small recurrence that this file solves itself,
and the costs are those of the cost model. The result is deterministic; a test compares it with
what is committed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from card_numerics import BOTTOM, COLOURS, HEIGHT, LEFT, RIGHT, ROOT, TOP, WIDTH, Plot, log10

BLUE, GREEN, _, ORANGE, _ = COLOURS


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
    for p in range(STEPS // LENGTH + 1):
        x, _ = plot.at(p * LENGTH, 0)
        plot.add(f'<path d="M{x:.1f} {TOP}V{HEIGHT - BOTTOM}" stroke="currentColor" '
                 f'opacity=".25"/>')  # fmt: skip
    for p in range(STEPS // LENGTH):
        x, _ = plot.at((p + 0.5) * LENGTH, 0)
        plot.text(x, HEIGHT - BOTTOM + 18, f"chunk {p + 1}", 'text-anchor="middle"')
    plot.text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, "time", 'text-anchor="middle"')
    plot.text(LEFT - 8, (TOP + HEIGHT - BOTTOM) / 2, "state", 'text-anchor="end"')
    true = [plot.at(*point) for point in walk(0.0, 0, STEPS)[0]]
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y in true)
    plot.add(f'<path d="M{path}" fill="none" stroke="currentColor" stroke-width="7" '
             f'opacity=".16"/>')  # fmt: skip
    return plot


def dashed(plot: Plot, points: Points, colour: str, more: str = "") -> None:
    path = "L".join("{:.1f} {:.1f}".format(*plot.at(*point)) for point in points)
    plot.add(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-dasharray="2 3" '
             f'stroke-width="1.6"{more}/>')  # fmt: skip


def dot(plot: Plot, x: float, y: float, colour: str) -> None:
    across, down = plot.at(x, y)
    plot.add(f'<circle cx="{across:.1f}" cy="{down:.1f}" r="4" fill="{colour}"/>')


def gap(plot: Plot, x: float, low: float, high: float, colour: str) -> None:
    (across, a), (_, b) = plot.at(x, low), plot.at(x, high)
    plot.add(f'<path d="M{across:.1f} {a:.1f}V{b:.1f}" stroke="{colour}" stroke-width="3"/>')


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
        dashed(second, points, BLUE, ' opacity=".75"')
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
    left, width = LEFT, (WIDTH - RIGHT - LEFT) / CELLS
    tops = [36 + 84 * i for i in range(len(STOPS))]
    plot.add(f'<path d="M20 {tops[0] + 9}V{tops[-1] + 9}" stroke="currentColor" opacity=".4" '
             f'stroke-width="2"/>')  # fmt: skip
    for top, (length, name, cost) in zip(tops, STOPS, strict=True):
        colour = GREEN if length == 6 else BLUE
        plot.add(f'<circle cx="20" cy="{top + 9}" r="6" fill="{colour}"/>')
        plot.text(left, top + 13, name, 'font-weight="600"')
        plot.text(left, top + 60, cost)
        y = top + 32
        for start in range(0, CELLS, length):
            x0, x1 = left + start * width, left + (start + length) * width
            inset = 5 if length > 1 else 4
            plot.add(f'<path d="M{x0 + inset:.1f} {y}H{x1 - 3:.1f}" stroke="{colour}" '
                     f'stroke-width="2"/>')  # fmt: skip
            plot.add(f'<path d="M{x1 - 6:.1f} {y - 3.5}L{x1 - 2:.1f} {y}L{x1 - 6:.1f} {y + 3.5}" '
                     f'fill="none" stroke="{colour}" stroke-width="2"/>')  # fmt: skip
            guessed = start or length == 1
            mark = ORANGE if guessed else "currentColor"
            plot.add(f'<circle cx="{x0 + 3:.1f}" cy="{y}" r="3" fill="{mark}"/>')
    return plot


# --------------------------------------------------------------------------------------
# What the cost model says
# --------------------------------------------------------------------------------------

TOTAL = 4096
SIZES = (64, 1024, 16384)


def modelled() -> Plot:
    from pararnn.solvers import cost

    device = cost.Machine(cost.machine("cpu").overhead, cost.machine("cpu").grain, 1)
    lengths = [2.0**i for i in range(6, 13)]
    plot = Plot(
        f"Modelled cost, T = {TOTAL}, loop = 1",
        "Modelled cost of a solve without corrections against the chunk length, relative to the "
        "loop, for states of 64, 1024 and 16384 numbers on one processor. Short chunks are many "
        "times cheaper for 64 numbers, about twice for 1024, and dearer or no cheaper for 16384.",
        (6, 12),
        (-2, 1),
    )
    plot.axes([], "chunk length L", 1)
    for length in lengths:
        x, y = plot.at(math.log2(length), -2)
        plot.add(f'<path d="M{x:.1f} {y:.1f}v4" stroke="currentColor" opacity=".6"/>')
        anchor = "middle" if length < TOTAL else "end"
        plot.text(
            x if length < TOTAL else WIDTH - 1, y + 18, f"{length:.0f}", f'text-anchor="{anchor}"'
        )
    plot.level(0, "")
    for colour, numbers in zip((GREEN, BLUE, ORANGE), SIZES, strict=True):
        loop = TOTAL * device.step(numbers)
        points = []
        for length in (2 ** (i / 4) for i in range(24, 49)):
            warmup = cost.WARMUP if length < TOTAL else 0
            solve = (length + warmup) * device.step(numbers * TOTAL / length)
            points.append((math.log2(length), log10(solve / loop)))
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


def main() -> None:
    for path, text in outputs():
        path.write_text(text, encoding="utf-8")
        print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
