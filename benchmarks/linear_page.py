"""Makes the tables of the page on the linear family from the results of `gpu_linear.py`.

python benchmarks/linear_page.py [RESULTS.json]
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import report
from harness import Row, median
from report import Found, by, captured, checks_table, done, ms, of_floor, pick, table, times, tiny

# Multiples of the floor that the scan is to stay below, forward and both: shape by shape.
FLOORS: dict[tuple[int, ...], tuple[float, ...]] = {
    (64, 512, 1024): (1.25, 1.35),
    (8, 2048, 1024): (1.6, 1.8),
    (1, 131072, 256): (1.7, 2.0),
}
# How many times as fast as mingru-scans a layer is to be.
RATIOS = {"MinGRU": 4, "SignedMinGRU": 4, "RotationMinGRU": 5, "GivensMinGRU": 5}
OURS, THEIRS = "pararnn", "mingru-scans"
PARTS = ("forward", "both")
newest = partial(report.newest, "linear")


def same(shape: list[int] | tuple[int, ...]) -> tuple[int, ...]:
    return tuple(shape)


def scan_table(found: Found) -> str:
    return table(
        "Times of the affine scan",
        ["B×T×D", "dtype", "coefficients", "forward", "of floor", "forward and backward",
         "of floor", "error"],
        [
            [
                by(r["shape"]),
                r["dtype"],
                r["coefficients"],
                *(x for p in PARTS for x in (captured(r, p), times(of_floor(r, p)))),
                tiny(r["error"]),
            ]
            for r in done(found["scan"])
        ],
        left=3,
    )  # fmt: skip


def peer_rows(found: Found) -> Iterator[tuple[Row, Row | None]]:
    """Every row of a peer, and ours for the same problem."""
    for row in found.get("peers", []):
        ours = done(found["scan"], coefficients="sigmoid", dtype=row["dtype"])
        yield row, next((r for r in ours if same(r["shape"]) == same(row["shape"])), None)


def peer_table(found: Found) -> str:
    lines = []
    for shape in dict.fromkeys(same(r["shape"]) for r in found["scan"]):
        for ours in done(found["scan"], coefficients="sigmoid", dtype="float32"):
            if same(ours["shape"]) == shape:
                cells = [x for p in PARTS for x in (captured(ours, p), "")]
                lines.append([by(ours["shape"]), OURS, "(B, T, D)", *cells, tiny(ours["error"])])
        for row, mine in peer_rows(found):
            if same(row["shape"]) != shape:
                continue
            cells = ["–", "", "–", "", ""]
            if "exception" not in row:
                cells = []
                for part in PARTS:
                    ratio = times(median(row, part) / median(mine, part)) if mine else ""
                    cells += [captured(row, part), ratio]
                cells.append(tiny(row["error"]))
            lines.append([by(row["shape"]), row["peer"], row.get("layout", "–"), *cells])
    return table(
        "Times of scans beside other implementations",
        ["B×T×D", "library", "layout", "forward", "of pararnn", "forward and backward",
         "of pararnn", "error"],
        lines,
        left=3,
    )  # fmt: skip


def delta_table(found: Found) -> str:
    lines = []
    for row in sorted(found["delta"], key=lambda r: (same(r["shape"]), r["library"] != OURS)):
        line = [by(row["shape"]), row["library"], row["dtype"]]
        if "exception" in row:
            lines.append([*line, "–", "", "–", "", ""])
            continue
        for part in PARTS:
            line += [captured(row, part), times(median(row, part) / row["floor"][part])]
        lines.append([*line, tiny(row["error"])])
    return table(
        "Times of the delta rule",
        ["batch × time × heads × rows", "library", "dtype", "forward", "of floor",
         "forward and backward", "of floor", "error"],
        lines,
        left=3,
    )  # fmt: skip


def first(rows: list[Row]) -> Row | None:
    return rows[0] if rows else None


def pairs(found: Found) -> Iterator[tuple[Row, Row | None, Row | None]]:
    """Our layer, theirs, and the layer's matrix products alone."""
    for row in done(found["layers"], library=OURS):
        key = {"mixer": row["mixer"], "precision": row["precision"]}
        theirs = first(done(found["layers"], library=THEIRS, **key))
        yield row, theirs, first(pick(found.get("gemm", []), **key))


def ways(found: Found, ours: Row) -> Iterator[tuple[str, Row]]:
    """A layer that runs the whole batch at once, and in groups that the backward pass computes
    anew."""
    yield "whole batch", ours
    key = {"mixer": ours["mixer"], "precision": ours["precision"]}
    for row in sorted(done(found["groups"], **key), key=lambda r: -r["samples"]):
        yield f"groups of {row['samples']}", row


def faster(row: Row, theirs: Row) -> float:
    """How many times as fast as mingru-scans a layer is, forward and backward together."""
    return median(theirs, "both") / median(row, "both")


def layer_table(found: Found) -> str:
    lines = []
    for ours, theirs, gemm in pairs(found):
        line = [f"`{ours['mixer']}`", ours["precision"]]
        line.append(captured(gemm, "both") if gemm else "–")
        line.append(captured(ours, "both"))
        if theirs:
            line += [captured(theirs, "both"), times(faster(ours, theirs))]
        else:
            line += ["–", ""]
        line.append(ms(median(ours, "eager")))
        line.append(ms(median(theirs, "eager")) if theirs else "–")
        lines.append(line)
    return table(
        "Times of whole layers",
        ["Mixer", "precision", "matrix products", OURS, THEIRS, "ratio", "pararnn, no graph",
         "mingru-scans, no graph"],
        lines,
        left=2,
    )  # fmt: skip


def memory_table(found: Found) -> str:
    lines = []
    for ours, theirs, _ in pairs(found):
        listed = list(ways(found, ours))
        if theirs:
            listed.append((THEIRS, theirs))
        for way, row in listed if "peak" in ours else ():
            line = [f"`{row['mixer']}`", row["precision"], way, f"{row['peak'] / 2**20:.0f}"]
            line.append(f"{row['peak'] / theirs['peak']:.2f}" if theirs else "")
            line += [captured(row, "both"), times(faster(row, theirs)) if theirs else ""]
            lines.append(line)
    return table(
        "Peak memory of layers",
        ["Mixer", "precision", "how", "peak, MiB", "of mingru-scans", "time",
         "as fast as mingru-scans"],
        lines,
        left=3,
    )  # fmt: skip


def goals(found: Found) -> Iterator[tuple[str, str, str, bool]]:
    """What is to be reached: goal, bound, measured, whether it is."""
    fp32 = done(found["scan"], coefficients="sigmoid", dtype="float32")
    for row in fp32:
        for part, bound in zip(PARTS, FLOORS.get(same(row["shape"]), ()), strict=False):
            name = "forward" if part == "forward" else "forward and backward"
            got = of_floor(row, part)
            goal = f"scan {by(row['shape'])}, {name}, of its floor"
            yield goal, f"≤ {bound:g}×", times(got), got <= bound
    for layout, name in (("(B, T, D)", "in this layout"), ("", "in its own layout")):
        for ours in fp32:
            rivals = [
                r
                for r, mine in peer_rows(found)
                if mine is ours and "exception" not in r and r["layout"].startswith(layout)
            ]
            for part in PARTS if rivals else ():
                best = min(rivals, key=lambda r: median(r, part))
                got = median(best, part) / median(ours, part)
                goal = f"scan {by(ours['shape'])}, {part}, against the best peer {name}"
                yield goal, "≥ 1×", f"{times(got)} ({best['peer']})", got >= 1
    for ours, theirs, _ in pairs(found):
        if not theirs or ours["mixer"] not in RATIOS:
            continue
        name, bound = f"{ours['mixer']}, {ours['precision']}", RATIOS[ours["mixer"]]
        got = faster(ours, theirs)
        yield f"{name}, as fast as mingru-scans", f"≥ {bound}×", times(got), got >= bound
        for way, row in ways(found, ours) if "peak" in ours else ():
            share, got = row["peak"] / theirs["peak"], faster(row, theirs)
            if ours["precision"] == "float32":
                goal = f"{ours['mixer']}, {way}, peak memory of mingru-scans"
                yield goal, "≤ 0.5", f"{share:.2f}", share <= 0.5
            else:
                goal = f"{name}, {way}, speed and peak memory of one configuration"
                reached = got >= bound and share <= 0.5
                yield goal, f"≥ {bound}×, ≤ 0.5", f"{times(got)}, {share:.2f}", reached


def goal_table(found: Found) -> str:
    rows = [
        [goal, bound, got, "yes" if reached else "no"] for goal, bound, got, reached in goals(found)
    ]
    return table("Goals", ["Goal", "bound", "measured", "reached"], rows)


def provenance(found: Found) -> str:
    peers = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    return report.provenance(found) + (f" Other libraries: {peers}.\n" if peers else "\n")


MAKERS = {
    "provenance": provenance,
    "goals": goal_table,
    "scan": scan_table,
    "peers": peer_table,
    "delta": delta_table,
    "layers": layer_table,
    "memory": memory_table,
    "checks": lambda f: checks_table(f["checks"], "what", "Checks against float64 loops", "What"),
}
outputs = partial(report.fragments, "linear", makers=MAKERS)


if __name__ == "__main__":
    report.page(__doc__, outputs, newest)
