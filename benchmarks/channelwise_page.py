"""Makes the tables and plots of the performance page from the results of `gpu_channelwise.py`.

    python benchmarks/channelwise_page.py [RESULTS.json]

The default is the newest committed result. The output is deterministic; a test compares it with what
is committed.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from card_numerics import BOTTOM, COLOURS, HEIGHT, LEFT, RIGHT, ROOT, TOP, WIDTH, Plot, log10

RESULTS = ROOT / "benchmarks" / "results"
BLUE, GREEN, YELLOW, ORANGE, _ = COLOURS
GRU, LSTM = "ParaGRU[diag]", "ParaLSTM"
Row = dict[str, Any]
Found = dict[str, Any]


def newest() -> Path:
    results = sorted(RESULTS.glob("*-channelwise.json"))
    if not results:
        raise SystemExit("no results of benchmarks/gpu_channelwise.py in benchmarks/results")
    return results[-1]


# -- tables ----------------------------------------------------------------------------------------


def by(shape: list[int]) -> str:
    return "×".join(map(str, shape))


def ms(value: float) -> str:
    """Three significant digits, without an exponent."""
    return f"{value:.{max(0, 2 - math.floor(math.log10(value)))}f}" if value > 0 else "0"


def times(value: float) -> str:
    return f"{value:.2f}×" if value < 10 else f"{value:.0f}×"


def tiny(value: float) -> str:
    return f"{value:.0e}".replace("e-0", "e-") if value else "0"


def table(label: str, head: list[str], rows: list[list[str]], left: int = 1) -> str:
    """A Markdown table in a box that scrolls; columns after the first ``left`` are numbers."""
    line = ["---"] * left + ["---:"] * (len(head) - left)
    lines = [f"| {' | '.join(row)} |" for row in (head, line, *rows)]
    box = f'<div class="table-box" tabindex="0" role="region" aria-label="{label}" markdown>'
    return "\n".join([box, "", *lines, "", "</div>", ""])


def median(row: Row, part: str) -> float:
    return row[part]["median"]


def of_floor(row: Row, part: str) -> float:
    return median(row, part) / row["floor"][part]


def pick(rows: list[Row], **wanted: Any) -> list[Row]:
    return [r for r in rows if all(r[k] == v for k, v in wanted.items())]


def again(row: Row) -> str:
    """Which chunks were walked again: after a correction, or in the order of time."""
    return "in order" if row["fallback"] else "some" if row["iterations"] else "no"


def main_table(rows: list[Row]) -> str:
    return table(
        "Times of the recurrence",
        ["B×T×D", "dtype", "chunks", "again", "forward", "of floor", "backward", "of floor", "both"],
        [
            [
                by(r["shape"]),
                r["dtype"],
                str(r["chunks"]),
                again(r),
                *(x for p in ("forward", "backward") for x in (ms(median(r, p)), times(of_floor(r, p)))),
                ms(median(r, "both")),
            ]
            for r in rows
        ],
        left=2,
    )  # fmt: skip


def peer_table(found: Found) -> str:
    """Ratios to pararnn-torch and cuDNN, forward and backward together."""
    lines = []
    others = {(r["cell"], tuple(r["shape"])): r for r in found.get("peer", {}).get("rows", [])}
    cudnn = {(r["cell"], tuple(r["shape"])): r for r in found.get("cudnn", [])}
    for cell, name, short in ((GRU, "ParaGRU", "GRU"), (LSTM, "ParaLSTM", "LSTM")):
        for r in pick(found["main"], cell=cell, dtype="float32"):
            shape = tuple(r["shape"])
            row = [f"`{name}`", by(r["shape"]), ms(median(r, "both"))]
            peer = others.get((name, shape))
            for other, part in (
                (peer, "both"),
                (peer, "both, its defaults"),
                (cudnn.get((short, shape)), "both"),
            ):
                if other and part in other:
                    ratio = median(other, part) / median(r, "both")
                    row += [ms(median(other, part)), times(ratio)]
                else:
                    row += ["–", "–"]
            lines.append(row)
    return table(
        "Times beside other implementations",
        [
            "Cell",
            "B×T×D",
            "pararnn",
            "pararnn-torch, checks off",
            "ratio",
            "its defaults",
            "ratio",
            "cuDNN",
            "ratio",
        ],
        lines,
        left=2,
    )


def layer_table(rows: list[Row]) -> str:
    return table(
        "Whole layers beside their matrix products",
        ["B×T×D", "precision", "matrix products", "layer", "ratio"],
        [
            [
                by(r["shape"]),
                r["precision"],
                ms(median(r, "gemm")),
                ms(median(r, "layer")),
                times(median(r, "layer") / median(r, "gemm")),
            ]
            for r in rows
        ],
        left=2,
    )


def choices(row: Row, part: str) -> tuple[str, float]:
    """The best fixed number of chunks, and what auto takes relative to it."""
    fixed = {k: v[part]["median"] for k, v in row["times"].items() if k != "auto"}
    best = min(fixed, key=lambda k: fixed[k])
    return best, row["times"]["auto"][part]["median"] / fixed[best]


def auto_table(rows: list[Row]) -> str:
    lines = []
    for r in rows:
        line = [f"`{r['cell']}`", r["dtype"], by(r["shape"]), str(r["chunks"])]
        for part in ("forward", "both"):
            best, ratio = choices(r, part)
            line += [best, f"{ratio:.2f}"]
        lines.append(line)
    return table(
        "What auto chooses beside the best fixed choice",
        ["Cell", "dtype", "B×T×D", "chunks", "best, forward", "auto / best", "best, both",
         "auto / best"],
        lines,
        left=3,
    )  # fmt: skip


def newton_table(rows: list[Row]) -> str:
    return table(
        "Corrections over the recurrent norm",
        ["Gate bias", "Norm", "first mismatch", "corrections", "error", "error, one chunk",
         "time", "of one chunk"],
        [
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
            for r in rows
        ],
        left=2,
    )  # fmt: skip


def memory_table(rows: list[Row]) -> str:
    def mib(value: float) -> str:
        return f"{value / 2**20:.1f}"

    return table(
        "Peak memory",
        ["Cell", "B×T×D", "chunks", "peak, MiB", "outputs and saved states", "the rest",
         "one number a lane and chunk"],
        [
            [
                f"`{r['cell']}`",
                by(r["shape"]),
                str(r["chunks"]),
                mib(r["peak"]),
                mib(r["needed"]),
                mib(r["peak"] - r["needed"]),
                mib(r["one boundary"]),
            ]
            for r in rows
        ],
        left=2,
    )  # fmt: skip


def overhead_table(found: Row) -> str:
    rows = [[name, f"{value:.1f}"] for name, value in found.items()]
    return table("Overheads", ["What", "microseconds"], rows)


def checks_table(found: Found) -> str:
    """How the checks went, by cell: cases, and the largest part of a tolerance that was used."""
    lines = []
    cells = list(dict.fromkeys(r["cell"] for r in found["checks"]))
    for cell in sorted(cells):
        rows = pick(found["checks"], cell=cell)
        good = [r for r in rows if r["ok"]]
        used = max(e["of tolerance"] for r in good for e in r["errors"].values()) if good else 0
        dtypes = ", ".join(sorted({r["dtype"] for r in rows}))
        lines.append([f"`{cell}`", dtypes, f"{len(good)} of {len(rows)}", f"{used:.2f}"])
    return table(
        "Checks against the float64 loop",
        ["Cell", "dtypes", "cases that pass", "most of a tolerance used"],
        lines,
        left=2,
    )


def provenance(found: Found) -> str:
    ways = ", ".join(f"{k} {v / 1e12:.2f}" for k, v in found["copy"]["ways"].items())
    checks = found["checks"]
    return (
        f"{found['device']}, torch {found['torch']}, Triton {found['triton']}, {found['date']}; "
        f"revision {found['revision']}; `{found['command']}`, {found['seconds']:.0f} s for all of this page. Copying 1 GiB, in "
        f"TB/s read and written: {ways}; the floor counts with {found['copy']['best']}. "
        f"{sum(r['ok'] for r in checks)} of {len(checks)} checked cases pass.\n"
    )


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


def linear(plot: Plot, ticks: list[tuple[float, str]], across: list[tuple[float, str]],
           label: str) -> None:  # fmt: skip
    """Axes of a plot whose vertical scale is not a logarithm."""
    for value, name in ticks:
        _, y = plot.at(plot.x[0], value)
        plot.add(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="currentColor" opacity=".15"/>')
        plot.text(LEFT - 6, y + 4, name, 'text-anchor="end"')
    marks(plot, across, label)


def marks(plot: Plot, across: list[tuple[float, str]], label: str) -> None:
    for value, name in across:
        x, _ = plot.at(value, plot.powers[0])
        y = HEIGHT - BOTTOM
        plot.add(f'<path d="M{x:.1f} {y}v4" stroke="currentColor" opacity=".6"/>')
        plot.text(x, y + 18, name, 'text-anchor="middle"')
    plot.text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, label, 'text-anchor="middle"')


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
    )
    plot.axes([], "", 1)
    marks(plot, [(x, short(r["shape"][1])) for x, r in zip(logs, rows, strict=True)][::2],
          "sequence length T")  # fmt: skip
    plot.level(log10(rows[0]["floor"]["both"]), "floor: a copy of the same bytes")
    for colour, name in ((ORANGE, "1"), (BLUE, "auto")):
        points = [
            (x, log10(r["times"][name]["both"]["median"]))
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
    plot = Plot(
        "Fraction of the bandwidth floor",
        "Floor divided by time, forward and backward together, of ParaGRU in float32 and bfloat16: "
        + "; ".join(
            f"{name} {100 / of_floor(r, 'both'):.0f} %"
            for name, r in zip(names, shown["float32"], strict=True)
        ),
        (0, len(names)),
        (0, 1),
    )
    ticks = [(p / 100, f"{p} %") for p in (0, 25, 50, 75, 100)]
    linear(plot, ticks, [], "")
    bottom = HEIGHT - BOTTOM
    for i, name in enumerate(names):
        for j, (colour, dtype) in enumerate(((BLUE, "float32"), (GREEN, "bfloat16"))):
            if i >= len(shown[dtype]):
                continue
            left, top = plot.at(i + 0.14 + 0.37 * j, 1 / of_floor(shown[dtype][i], "both"))
            right, _ = plot.at(i + 0.47 + 0.37 * j, 0)
            plot.add(f'<rect x="{left:.1f}" y="{top:.1f}" width="{right - left:.1f}" '
                     f'height="{bottom - top:.1f}" fill="{colour}"/>')  # fmt: skip
        x, _ = plot.at(i + 0.5, 0)
        batch, total, width = name.split("×")
        first = f"{batch}×{short(int(total))}"
        plot.text(x, bottom + 17, first, 'text-anchor="middle" font-size="11.5"')
        plot.text(x, bottom + 32, f"×{short(int(width))}", 'text-anchor="middle" font-size="11.5"')
    plot.legend([(BLUE, "float32"), (GREEN, "bfloat16")])
    return plot


def norm_axis(rows: list[Row]) -> list[tuple[float, str]]:
    norms = sorted({r["norm"] for r in rows})
    return [(math.log2(n), f"{n:g}") for n in norms if math.log2(n) == int(math.log2(n))]


def by_bias(rows: list[Row]) -> list[tuple[str, float, list[Row]]]:
    biases = sorted({r["bias"] for r in rows}, reverse=True)
    return [
        (colour, bias, pick(rows, bias=bias))
        for colour, bias in zip((GREEN, BLUE, ORANGE), biases, strict=False)
    ]


def iterations_plot(rows: list[Row]) -> Plot:
    cap = 3
    plot = Plot(
        "Corrections over the recurrent norm",
        "Newton corrections of the chunk starts until the tolerance is met, against the largest "
        "recurrent weight, for three biases of the update gate; the top line means that some "
        "chunks were run in a loop.",
        (-2, math.log2(max(r["norm"] for r in rows))),
        (0, cap),
    )
    ticks = [(0.0, "0"), (1.0, "1"), (2.0, "2"), (3.0, "loop")]
    linear(plot, ticks, norm_axis(rows), "largest recurrent weight")
    for i, (colour, _, part) in enumerate(by_bias(rows)):
        shift = 0.05 * (i - 1)  # lines that coincide stay visible
        points = [
            (math.log2(r["norm"]), (cap if r["fallback"] else r["iterations"]) + shift)
            for r in part
        ]
        plot.line(points, colour)
    plot.legend([(c, f"bias {b:g}") for c, b, _ in by_bias(rows)])
    return plot


def newton_time_plot(rows: list[Row]) -> Plot:
    plot = Plot(
        "Forward time, one chunk = 1",
        "Time of the forward pass with several chunks, relative to one chunk, against the largest "
        "recurrent weight, for three biases of the update gate.",
        (-2, math.log2(max(r["norm"] for r in rows))),
        (-2, 1),
    )
    plot.axes([], "", 1)
    marks(plot, norm_axis(rows), "largest recurrent weight")
    plot.level(0, "one chunk")
    for colour, _, part in by_bias(rows):
        points = [(math.log2(r["norm"]), log10(median(r, "auto") / median(r, "one"))) for r in part]
        plot.line(points, colour)
    plot.legend([(c, f"bias {b:g}") for c, b, _ in by_bias(rows)])
    return plot


def auto_plot(rows: list[Row]) -> Plot:
    """Time over the number of chunks for some shapes; rings are what auto takes."""
    shown = [
        next(r for r in rows if tuple(r["shape"]) == shape)
        for shape in ((64, 512, 1024), (8, 4096, 1024), (1, 32768, 1024), (1, 131072, 256))
        if any(tuple(r["shape"]) == shape for r in rows)
    ]
    plot = Plot(
        "Time in ms over the number of chunks",
        "Time of forward and backward against the number of chunks for several shapes. Wide "
        "batches want one chunk, narrow ones many; rings mark what auto chooses.",
        (0, 9),
        (-1, 2),
    )
    plot.axes([], "", 1)
    marks(plot, [(float(i), str(2**i)) for i in range(0, 10, 2)], "chunks")
    colours = (GREEN, BLUE, ORANGE, YELLOW)
    for i, (colour, row) in enumerate(zip(colours, shown, strict=False)):
        points = sorted(
            (math.log2(int(k)), log10(v["both"]["median"]))
            for k, v in row["times"].items()
            if k != "auto"
        )
        plot.line(points, colour)
        x, y = plot.at(math.log2(row["chunks"]), log10(row["times"]["auto"]["both"]["median"]))
        plot.add(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="6" fill="none" stroke="{colour}" '
                 f'stroke-width="2"/>')  # fmt: skip
        at = TOP + 14 + 17 * i  # the upper right is empty: many chunks are never that slow
        plot.add(f'<path d="M{WIDTH - 116} {at - 4}h14" stroke="{colour}" stroke-width="3"/>')
        plot.text(WIDTH - 97, at, "×".join(short(n) for n in row["shape"]))
    plot.text(LEFT, 32, "rings: what auto chooses")
    return plot


# -- everything ------------------------------------------------------------------------------------


def outputs(found: Found) -> Iterator[tuple[Path, str]]:
    """Every file that follows from the results, with its content."""

    def named(name: str, text: str) -> tuple[Path, str]:
        return RESULTS / f"channelwise_{name}.md", text

    yield named("provenance", provenance(found))
    yield named("verdict", verdict(found))
    yield named("gru", main_table(pick(found["main"], cell=GRU)))
    yield named("lstm", main_table(pick(found["main"], cell=LSTM)))
    yield named("peers", peer_table(found))
    if "others" in found:
        yield named("others", others_table(found["others"]))
    yield named("layer", layer_table(found["layer"]))
    yield named("auto", auto_table(found["sweep"]))
    yield named("newton", newton_table(found["newton"]))
    yield named("memory", memory_table(found["memory"]))
    yield named("overhead", overhead_table(found["overhead"]))
    yield named("checks", checks_table(found))
    gru = pick(found["sweep"], cell=GRU, dtype="float32")
    yield time_plot(same_tokens(gru)).write("channelwise_time")
    yield floor_plot(pick(found["main"], cell=GRU)).write("channelwise_floor")
    yield iterations_plot(found["newton"]).write("channelwise_iterations")
    yield newton_time_plot(found["newton"]).write("channelwise_newton")
    yield auto_plot(gru).write("channelwise_auto")


def others_table(rows: list[Row]) -> str:
    return table(
        "Times of the other cells",
        ["Cell", "dtype", "B×T×D", "chunks", "again", "forward", "of floor", "backward", "of floor"],
        [
            [
                f"`{r['cell']}`",
                r["dtype"],
                by(r["shape"]),
                str(r["chunks"]),
                again(r),
                *(x for p in ("forward", "backward") for x in (ms(median(r, p)), times(of_floor(r, p)))),
            ]
            for r in rows
        ],
        left=3,
    )  # fmt: skip


def main() -> None:
    source = Path(sys.argv[1]) if len(sys.argv) > 1 else newest()
    for path, text in outputs(json.loads(source.read_text(encoding="utf-8"))):
        path.write_text(text, encoding="utf-8")
        print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
