"""Makes the tables and plots of the cards from `benchmarks/results/card_numerics.json`.

    python benchmarks/card_page.py

`card_numerics.py` measures what is there.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from pathlib import Path

import report
from harness import RESULTS, Row
from plots import BLUE, COLOURS, ORANGE, Plot
from report import Found, pick, table

DATA = RESULTS / "card_numerics.json"
ITERATIONS = 8

# -- tables ----------------------------------------------------------------------------------------

COLUMNS = ("Newton", "error", "error, \\(K = 3\\)", "Shooting", "error", "error, loop")


def number(value: float) -> str:
    return f"{value:.1g}" if value >= 0.01 else f"{value:.0e}".replace("e-0", "e-")


def count(entry: list) -> str:
    iterations, fallback, _ = entry
    return f"{iterations}\u00a0+\u00a0loop" if fallback else str(iterations)


def cells(row: Row) -> list[str]:
    three = "not finite" if row["three"] is None else number(row["three"])
    return [
        count(row["newton"]),
        number(row["newton"][2]),
        three if (row["three"] or 1) <= 1e-5 else f"**{three}**",
        count(row["shooting"]),
        number(row["shooting"][2]),
        number(row["loop"]),
    ]


ENTRIES = "8 × 512 × 64 (sequences, steps, \\(d_h\\))"
ENTRY = "The norm is the largest entry of "
DRAWN = "drawn evenly from ± the norm. "
CARDS: dict[str, tuple[str, dict[str, str], str, str]] = {
    "para_gru": (
        "ParaGRU",
        {"`mix`": "`{mix}`", "Norm": "{norm:g}"},
        ENTRIES,
        f"{ENTRY}the recurrent vectors (`diag`, drawn evenly from ± the norm), or the spectral norm "
        "of every head's matrix (`head`, 4 heads). From norm 3 on this random network is sensitive "
        "to rounding: the float32 loop itself is that far from the float64 one.",
    ),
    "para_lstm": (
        "ParaLSTM",
        {"Norm": "{norm:g}"},
        ENTRIES,
        f"{ENTRY}the recurrent vectors and peepholes, {DRAWN}Both slots count as states.",
    ),
    "para_nlru": (
        "ParaNLRU",
        {"Norm": "{norm:g}", "Gate bias": "{bias:g}"},
        ENTRIES,
        f"{ENTRY}\\(w\\), {DRAWN}The gate bias is that of the logit of \\(r_t\\): the lower it is, "
        "the slower the decay. \\(\\Lambda\\) has its initial value. The plots are for gate bias 0.",
    ),
    "para_slstm": (
        "ParaSLSTM",
        {"`forget`": "`{forget}`", "Norm": "{norm:g}", "Forget bias": "{bias:g}"},
        ENTRIES,
        f"{ENTRY}the recurrent vectors, {DRAWN}The forget bias is that of the forget gate. Errors "
        "are those of the output \\(h\\), not of the other three slots.",
    ),
    "para_cfc": (
        "ParaCfC",
        {"`form`": "`{form}`", "Norm": "{norm:g}", "Mean gap": "{gap:g}"},
        ENTRIES,
        f"{ENTRY}the recurrent vectors, {DRAWN}Gaps are drawn from an exponential distribution with "
        "this mean. From norm 2 on this random network is sensitive to rounding, and at norm 4 "
        "chaotic: the float32 loop itself is that far from the float64 one.",
    ),
    "para_m2rnn": (
        "ParaM2RNN",
        {"\\(K \\times V\\)": "\\({k} \\times {v}\\)", "\\(\\lVert W \\rVert\\)": "{norm:g}",
         "Forget bias": "{bias:g}"},
        "4 sequences of 512 steps",
        "\\(W\\) is a multiple of a random orthogonal matrix, so the initial value, the identity, "
        "has the norm 1. The forget bias is that of the logit of \\(f_t\\). The plots are for "
        "\\(K = V = 16\\) and forget bias 0.",
    ),
}  # fmt: skip
"""By card: the cell, how its columns show a row's setting, the shape of its problems, what they are."""


def card_table(found: Found, slug: str) -> str:
    cell, settings, shape, about = CARDS[slug]
    rows = [[*(form.format(**r) for form in settings.values()), *cells(r)] for r in found[slug]]
    shown = table(f"Iterations and errors of {cell}", [*settings, *COLUMNS], rows, None)
    provenance = (
        f"Measured with `python benchmarks/card_numerics.py` on {found['date']} ({found['machine']}): "
        f"{shape}, normal inputs of width 32. *Newton* and *Shooting* count corrections in "
        "float32; each error is the largest difference of any state from the float64 loop. The "
        "residuals in the plot are those of float64. Shooting has chunks of 64 steps. Bold: above "
        "1e-5. *16 + loop*: the cap of 16 iterations was reached, and the loop did the rest."
    )
    return "\n\n".join([shown.rstrip("\n"), provenance, about]) + "\n"


# -- plots -----------------------------------------------------------------------------------------


def residual_plot(rows: list[Row], what: str) -> Plot:
    """Residual against iteration, one line a norm."""
    norms = [f"{r['norm']:g}" for r in rows]
    lost = rows[-1]["residuals"][-1] > 1e-3
    plot = Plot(
        "Residual of Newton's method, float64",
        f"Residual after every Newton iteration for {what} of {', '.join(norms)}; "
        "it falls quadratically for small ones and "
        f"{'not at all for the largest' if lost else 'may rise at first for large ones'}.",
        (0, ITERATIONS),
        (-16, 2),
        log=True,
        every=3,
    )
    plot.across([(i, str(i)) for i in range(ITERATIONS + 1)], "iterations")
    plot.upright(3, "K = 3")
    plot.level(1e-6, "tolerance")
    for colour, row in zip(COLOURS, rows, strict=True):
        residuals = row["residuals"]
        # Below 1e-15 there is only rounding; the line ends with the first value there.
        stop = next((i for i, r in enumerate(residuals) if r < 1e-15), len(residuals) - 1)
        plot.line(enumerate(residuals[: stop + 1]), colour)
    plot.legend(list(zip(COLOURS, norms, strict=True)))
    return plot


def error_plot(rows: list[Row], what: str, axis: str, ticks: tuple[float, ...]) -> Plot:
    """Error against norm: with three iterations, and with as many as it takes."""
    limit = crossing([(r["norm"], r["three"]) for r in rows])
    plot = Plot(
        "Error of the states, float32",
        f"Largest error against {what}: with three iterations it passes 1e-5 at {limit:.1f}; "
        "with as many as it takes it stays at rounding level.",
        (0, rows[-1]["norm"]),
        (-8, 1),
        log=True,
        every=2,
    )
    plot.axes.axvspan(limit, rows[-1]["norm"], color=ORANGE, alpha=0.1, linewidth=0)
    plot.across([(t, f"{t:g}") for t in ticks], axis)
    plot.level(1e-5, "")
    plot.note((1, 0), f"K = 3 is not enough from {limit:.1f} on", (-6, 8), up="axes fraction",
              horizontalalignment="right")  # fmt: skip
    plot.line([(r["norm"], r["three"]) for r in rows], ORANGE)
    plot.line([(r["norm"], r["newton"][2]) for r in rows], BLUE)
    plot.legend([(ORANGE, "K = 3"), (BLUE, "until converged")])
    return plot


def crossing(points: list[tuple[float, float]], limit: float = 1e-5) -> float:
    """Where the error passes the limit, on a straight line between logarithms."""
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        if y0 <= limit < y1:
            part = math.log(limit / max(y0, 1e-30)) / math.log(y1 / max(y0, 1e-30))
            return x0 + part * (x1 - x0)
    return points[-1][0]


# -- everything ------------------------------------------------------------------------------------

NORMS, ENTRY_AXIS = "the recurrent norm", "largest recurrent entry"
WIDE, NARROW = (0, 0.5, 1, 2, 3, 4), (0, 0.5, 1, 1.5, 2)
PLOTS = {
    "para_gru": ({"mix": "diag"}, (0.5, 1.0, 1.5, 2.0, 3.0), "recurrent norms", NORMS, ENTRY_AXIS, WIDE),
    "para_lstm": ({}, (0.5, 1.0, 1.5, 2.0, 3.0), "recurrent norms", NORMS, ENTRY_AXIS, WIDE),
    "para_nlru": ({"bias": 0}, (0.25, 0.5, 0.75, 1.0, 2.0), "norms of w", "the norm of w",
                  "largest entry of w", NARROW),
    "para_cfc": ({"form": "consistent", "gap": 1}, (0.5, 1.0, 2.0, 3.0, 4.0), "recurrent norms", NORMS,
                 ENTRY_AXIS, WIDE),
    "para_m2rnn": ({"bias": 0, "k": 16, "v": 16}, (0.5, 1.0, 1.25, 1.5, 2.0), "norms of W",
                   "the norm of W", "norm of W", NARROW),
}  # fmt: skip
"""By card: which rows, the norms whose residuals are shown, and what the axes are called."""


def outputs(found: Found) -> Iterator[tuple[Path, str]]:
    """Every file that follows from the measurements, with its content."""
    for slug in CARDS:
        yield RESULTS / f"{slug}_numerics.md", card_table(found, slug)
    for slug, (wanted, norms, lines, what, axis, ticks) in PLOTS.items():
        rows = {r["norm"]: r for r in pick(found[slug], **wanted)}
        yield residual_plot([rows[n] for n in norms], lines).write(f"{slug}_residuals")
        yield error_plot(list(rows.values()), what, axis, ticks).write(f"{slug}_errors")


if __name__ == "__main__":
    report.page(__doc__, outputs, lambda: DATA)
