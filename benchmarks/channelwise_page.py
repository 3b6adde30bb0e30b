"""Makes the tables and plots of the performance page from the results of `gpu_channelwise.py`.

python benchmarks/channelwise_page.py [RESULTS.json]
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import report
from harness import Row, median
from plots import BLUE, GREEN, ORANGE, YELLOW, Plot
from report import Found, by, checks_table, ms, of_floor, pick, provenance, table, times, tiny

GRU, LSTM = "ParaGRU[diag]", "ParaLSTM"
newest = partial(report.newest, "channelwise")

# -- tables ----------------------------------------------------------------------------------------


def again(row: Row) -> str:
    """Which chunks were walked again: after a correction, or in the order of time."""
    return "in order" if row["fallback"] else "some" if row["iterations"] else "no"


def main_table(rows: list[Row], other: bool = False) -> str:
    """Times beside the floor; ``other`` cells are named, and have no time of both passes."""
    head = ["B×T×D", "dtype", "chunks", "again", "forward", "of floor", "backward", "of floor"]
    lines = []
    for r in rows:
        line = [by(r["shape"]), r["dtype"], str(r["chunks"]), again(r)]
        for part in ("forward", "backward"):
            line += [ms(median(r, part)), times(of_floor(r, part))]
        lines.append([f"`{r['cell']}`", r["dtype"], line[0], *line[2:]] if other
                     else [*line, ms(median(r, "both"))])  # fmt: skip
    if other:
        return table("Times of the other cells", ["Cell", "dtype", head[0], *head[2:]], lines, 3)
    return table("Times of the recurrence", [*head, "both"], lines, 2)


def peer_table(found: Found) -> str:
    """Ratios to pararnn-torch and cuDNN, forward and backward together."""
    lines = []
    others = {(r["cell"], tuple(r["shape"])): r for r in found.get("peer", {}).get("rows", [])}
    cudnn = {(r["cell"], tuple(r["shape"])): r for r in found.get("cudnn", [])}
    for cell, name, short in ((GRU, "ParaGRU", "GRU"), (LSTM, "ParaLSTM", "LSTM")):
        for r in pick(found["main"], cell=cell, dtype="float32"):
            shape = tuple(r["shape"])
            row = [f"`{name}`", by(r["shape"]), ms(median(r, "both"))]
            peer = others.get((name, shape), {})
            for other, part in (
                (peer, "both"),
                (peer, "both, its defaults"),
                (cudnn.get((short, shape), {}), "both"),
            ):
                row += ["–", "–"]
                if part in other:
                    ratio = median(other, part) / median(r, "both")
                    row[-2:] = [ms(median(other, part)), times(ratio)]
            lines.append(row)
    head = ["Cell", "B×T×D", "pararnn", "pararnn-torch, checks off", "ratio", "its defaults", "ratio",
            "cuDNN", "ratio"]  # fmt: skip
    return table("Times beside other implementations", head, lines, 2)


def layer_table(found: Found) -> str:
    lines = []
    for r in found["layer"]:
        gemm, layer = median(r, "gemm"), median(r, "layer")
        lines.append([by(r["shape"]), r["precision"], ms(gemm), ms(layer), times(layer / gemm)])
    head = ["B×T×D", "precision", "matrix products", "layer", "ratio"]
    return table("Whole layers beside their matrix products", head, lines, 2)


def choices(row: Row, part: str) -> tuple[str, float]:
    """The best fixed number of chunks, and what auto takes relative to it."""
    fixed = {k: v[part]["median"] for k, v in row["times"].items() if k != "auto"}
    best = min(fixed, key=lambda k: fixed[k])
    return best, row["times"]["auto"][part]["median"] / fixed[best]


def auto_table(found: Found) -> str:
    lines = []
    for r in found["sweep"]:
        line = [f"`{r['cell']}`", r["dtype"], by(r["shape"]), str(r["chunks"])]
        for part in ("forward", "both"):
            best, ratio = choices(r, part)
            line += [best, f"{ratio:.2f}"]
        lines.append(line)
    head = ["Cell", "dtype", "B×T×D", "chunks", "best, forward", "auto / best", "best, both",
            "auto / best"]  # fmt: skip
    return table("What auto chooses beside the best fixed choice", head, lines, 3)


def newton_table(found: Found) -> str:
    lines = [
        [
            f"{r['bias']:g}",
            f"{r['norm']:g}",
            tiny(r["residual"]),
            f"{r['iterations']} + loop" if r["fallback"] else str(r["iterations"]),
            tiny(r["error"]),
            tiny(r["error of one chunk"]),
            ms(median(r, "auto")),
            f"{median(r, 'auto') / median(r, 'one'):.2f}",
        ]
        for r in found["newton"]
    ]
    head = ["Gate bias", "Norm", "first mismatch", "corrections", "error", "error, one chunk", "time",
            "of one chunk"]  # fmt: skip
    return table("Corrections over the recurrent norm", head, lines, 2)


def memory_table(found: Found) -> str:
    lines = []
    for r in found["memory"]:
        sizes = (r["peak"], r["needed"], r["peak"] - r["needed"], r["one boundary"])
        mib = [f"{size / 2**20:.1f}" for size in sizes]
        lines.append([f"`{r['cell']}`", by(r["shape"]), str(r["chunks"]), *mib])
    head = ["Cell", "B×T×D", "chunks", "peak, MiB", "outputs and saved states", "the rest",
            "one number a lane and chunk"]  # fmt: skip
    return table("Peak memory", head, lines, 2)


def overhead_table(found: Found) -> str:
    lines = [[name, f"{value:.1f}"] for name, value in found["overhead"].items()]
    return table("Overheads", ["What", "microseconds"], lines)


def verdict(found: Found) -> str:
    """When several chunks win, in sentences that follow from the numbers."""
    gru = pick(found["sweep"], cell=GRU, dtype="float32")
    lines = []
    for part, name in (("forward", "Forward"), ("both", "Forward and backward")):
        gains = []
        for r in same_tokens(gru):
            if "1" in r["times"]:
                fixed = {
                    k: v[part]["median"] for k, v in r["times"].items() if k not in ("1", "auto")
                }
                gains.append((r["shape"][1], r["times"]["1"][part]["median"] / min(fixed.values())))
        wins = [(T, gain) for T, gain in gains if gain > 1.05]
        if wins:
            lines.append(
                f"- {name}, ParaGRU in float32, 32,768 tokens of 1024 channels: several chunks are "
                f"more than 5 % faster than one from T = {wins[0][0]} on, and {times(wins[-1][1])} "
                f"as fast at T = {wins[-1][0]}. Up to T = {max([T for T, g in gains if g <= 1.05], default=0)} "
                "one chunk is as fast, within 5 %, or faster."
            )
    for _, bias, rows in by_bias(found["newton"]):
        free = [r["norm"] for r in rows if r["iterations"] == 0 and not r["fallback"]]
        lost = [r["norm"] for r in rows if r["fallback"]]
        slower = [r["norm"] for r in rows if median(r, "auto") > median(r, "one")]
        gains = [median(r, "one") / median(r, "auto") for r in rows if r["norm"] not in slower]
        text = f"- {by(rows[0]['shape'])}, gate bias {bias:g}: "
        text += f"no correction up to norm {max(free):g}" if free else "a correction at every norm"
        text += f"; chunks left for the loop from norm {min(lost):g} on" if lost else ""
        if slower:
            text += f"; several chunks are slower than one at norm {', '.join(f'{n:g}' for n in slower)}"
        if gains:
            text += f"; else they are {times(min(gains))} to {times(max(gains))} as fast"
        lines.append(text + ".")
    ratios = [choices(r, part)[1] for r in found["sweep"] for part in ("forward", "both")]
    within = sum(r <= 1.05 for r in ratios)
    lines.append(
        f"- `auto` is within 5 % of the best fixed number of chunks in {within} of {len(ratios)} "
        f"measurements ({len(found['sweep'])} problems); the largest excess is "
        f"{100 * (max(ratios) - 1):.0f} %."
    )
    return "\n".join(lines) + "\n"


def same_tokens(rows: list[Row]) -> list[Row]:
    """The shapes with equally many tokens, by length."""
    same = [r for r in rows if r["shape"][0] * r["shape"][1] == 32768 and r["shape"][2] == 1024]
    return sorted(same, key=lambda r: r["shape"][1])


# -- plots -----------------------------------------------------------------------------------------


def short(number: int) -> str:
    return f"{number // 1024}k" if number >= 1024 and number % 1024 == 0 else str(number)


def time_plot(rows: list[Row]) -> Plot:
    """Time over T with B·T fixed: one chunk, auto, and the floor; forward and backward."""
    logs = [math.log2(r["shape"][1]) for r in rows]
    plot = Plot(
        "Time in ms, B·T = 32768, D = 1024",
        "Time of forward and backward against the sequence length, at the same number of tokens. "
        "One chunk takes longer in proportion to the length once the batch no longer fills the "
        "GPU; auto stays within a small multiple of the floor.",
        (logs[0], logs[-1]),
        (-1, 2),
        log=True,
    )
    ticks = [(x, short(r["shape"][1])) for x, r in zip(logs, rows, strict=True)][::2]
    plot.across(ticks, "sequence length T")
    plot.level(rows[0]["floor"]["both"], "floor: a copy of the same bytes")
    for colour, name in ((ORANGE, "1"), (BLUE, "auto")):
        points = [
            (x, r["times"][name]["both"]["median"])
            for x, r in zip(logs, rows, strict=True)
            if name in r["times"]
        ]
        plot.line(points, colour)
    plot.legend([(ORANGE, "one chunk"), (BLUE, "auto")])
    return plot


def floor_plot(rows: list[Row]) -> Plot:
    """Fraction of the bandwidth floor, as bars."""
    shown = {dtype: pick(rows, dtype=dtype) for dtype in ("float32", "bfloat16")}
    names = [by(r["shape"]) for r in shown["float32"]]
    parts = [100 / of_floor(r, "both") for r in shown["float32"]]
    plot = Plot(
        "Fraction of the bandwidth floor",
        "Floor divided by time, forward and backward together, of ParaGRU in float32 and bfloat16: "
        + "; ".join(f"{name} {part:.0f} %" for name, part in zip(names, parts, strict=True)),
        (-0.5, len(names) - 0.5),
        (0, 1),
    )
    plot.up([(p / 100, f"{p} %") for p in (0, 25, 50, 75, 100)])
    for shift, colour, dtype in ((-0.19, BLUE, "float32"), (0.19, GREEN, "bfloat16")):
        heights = [1 / of_floor(r, "both") for r in shown[dtype]]
        plot.axes.bar([i + shift for i in range(len(heights))], heights, 0.33, color=colour)
    sizes = [tuple(map(short, r["shape"])) for r in shown["float32"]]
    plot.across([(i, f"{B}×{T}\n×{D}") for i, (B, T, D) in enumerate(sizes)], "")
    plot.axes.tick_params("x", labelsize=11, length=0)
    plot.legend([(BLUE, "float32"), (GREEN, "bfloat16")])
    return plot


def by_bias(rows: list[Row]) -> list[tuple[str, float, list[Row]]]:
    biases = sorted({r["bias"] for r in rows}, reverse=True)
    return [
        (colour, bias, pick(rows, bias=bias))
        for colour, bias in zip((GREEN, BLUE, ORANGE), biases, strict=False)
    ]


def norm_plot(title: str, text: str, rows: list[Row], y: tuple[float, float], log: bool) -> Plot:
    """A panel over the recurrent norm, with a colour for each bias of the gate."""
    norms = sorted({r["norm"] for r in rows})
    plot = Plot(title, text, (-2, math.log2(norms[-1])), y, log)
    ticks = [(math.log2(n), f"{n:g}") for n in norms if math.log2(n) == int(math.log2(n))]
    plot.across(ticks, "largest recurrent weight")
    plot.legend([(c, f"bias {b:g}") for c, b, _ in by_bias(rows)])
    return plot


def iterations_plot(rows: list[Row]) -> Plot:
    cap = 3
    plot = norm_plot(
        "Corrections over the recurrent norm",
        "Newton corrections of the chunk starts until the tolerance is met, against the largest "
        "recurrent weight, for three biases of the update gate; the top line means that some "
        "chunks were run in a loop.",
        rows,
        (0, cap),
        False,
    )
    plot.up([(0, "0"), (1, "1"), (2, "2"), (cap, "loop")])
    for i, (colour, _, part) in enumerate(by_bias(rows)):
        shift = 0.05 * (i - 1)  # lines that coincide stay visible
        counts = [cap if r["fallback"] else r["iterations"] for r in part]
        norms = [math.log2(r["norm"]) for r in part]
        plot.line(zip(norms, (c + shift for c in counts), strict=True), colour)
    return plot


def newton_plot(rows: list[Row]) -> Plot:
    plot = norm_plot(
        "Forward time, one chunk = 1",
        "Time of the forward pass with several chunks, relative to one chunk, against the largest "
        "recurrent weight, for three biases of the update gate.",
        rows,
        (-2, 1),
        True,
    )
    plot.level(1, "one chunk")
    for colour, _, part in by_bias(rows):
        ratios = ((math.log2(r["norm"]), median(r, "auto") / median(r, "one")) for r in part)
        plot.line(ratios, colour)
    return plot


def auto_plot(rows: list[Row]) -> Plot:
    """Time over the number of chunks for some shapes; rings are what auto takes."""
    by_shape = {tuple(r["shape"]): r for r in rows}
    wanted = ((64, 512, 1024), (8, 4096, 1024), (1, 32768, 1024), (1, 131072, 256))
    colours = (GREEN, BLUE, ORANGE, YELLOW)
    shown = [(c, by_shape[s]) for c, s in zip(colours, wanted, strict=True) if s in by_shape]
    plot = Plot(
        "Time in ms over the number of chunks",
        "Time of forward and backward against the number of chunks for several shapes. Wide "
        "batches want one chunk, narrow ones many; rings mark what auto chooses.",
        (0, 9),
        (-1, 2),
        log=True,
    )
    plot.across([(i, str(2**i)) for i in range(0, 10, 2)], "chunks")
    for i, (colour, row) in enumerate(shown):
        points = sorted(
            (math.log2(int(k)), v["both"]["median"]) for k, v in row["times"].items() if k != "auto"
        )
        plot.line(points, colour)
        chosen = (math.log2(row["chunks"]), row["times"]["auto"]["both"]["median"])
        plot.line([chosen], colour, markersize=12, markerfacecolor="none", markeredgewidth=2)
        # The upper right is empty: many chunks are never that slow.
        plot.note((1, 1), "×".join(map(short, row["shape"])), (-86, -12 - 17 * i),
                  up="axes fraction")  # fmt: skip
        plot.note((1, 1), "━━", (-108, -12 - 17 * i), up="axes fraction", color=colour)
    plot.note((0, 1), "rings: what auto chooses", (0, 9), up="axes fraction")
    return plot


# -- everything ------------------------------------------------------------------------------------


def outputs(found: Found) -> Iterator[tuple[Path, str]]:
    """Every file that follows from the results, with its content."""
    gru = pick(found["sweep"], cell=GRU, dtype="float32")
    makers = {
        "provenance": lambda f: provenance(f) + "\n",
        "verdict": verdict,
        "gru": lambda f: main_table(pick(f["main"], cell=GRU)),
        "lstm": lambda f: main_table(pick(f["main"], cell=LSTM)),
        "peers": peer_table,
        "others": lambda f: main_table(f["others"], other=True),
        "layer": layer_table,
        "auto": auto_table,
        "newton": newton_table,
        "memory": memory_table,
        "overhead": overhead_table,
        "checks": lambda f: checks_table(
            f["checks"], "cell", "Checks against the float64 loop", "Cell"
        ),
    }
    yield from report.fragments("channelwise", found, makers)
    yield time_plot(same_tokens(gru)).write("channelwise_time")
    yield floor_plot(pick(found["main"], cell=GRU)).write("channelwise_floor")
    yield iterations_plot(found["newton"]).write("channelwise_iterations")
    yield newton_plot(found["newton"]).write("channelwise_newton")
    yield auto_plot(gru).write("channelwise_auto")


if __name__ == "__main__":
    report.page(__doc__, outputs, newest)
