"""Makes the tables and figures of the page of probes from the committed results.

    python benchmarks/probe_page.py
    python benchmarks/probe_page.py --collect FILE.jsonl ...

(`probe_grid.py --device cpu --steps 100 --only parity-signed ...` gives the lines of the comparison
with a CPU.)

The second takes new lines of `probe_grid.py` into the results first. All else comes from the newest
committed results and from `probe_grid.toml`; it is deterministic, and a test compares it with what
is committed.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tomllib
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import report
from harness import RESULTS, ROOT, Row, read_lines
from plots import COLOURS, Plot
from probe_statistics import different, fisher
from report import Found, table

newest = partial(report.newest, "h200-probes")

LENGTHS = (64, 256, 512, 1024)
SURE = 0.01  # level of the tests
FIT = 0.99  # accuracy at length 128
CLOSE = 0.02  # means of accuracies that are as near as this are called equal
KEPT = (
    "seed", "n_layers", "parameters", "steps", "kept", "scores", "fitted", "fit", "best", "finite",
    "rate", "captured", "seconds", "together", "cut",
)  # fmt: skip
SHARED = ("device", "torch", "triton", "python", "revision", "workers", "date")


# --------------------------------------------------------------------------------------
# Results
# --------------------------------------------------------------------------------------


def grid() -> list[Row]:
    return tomllib.loads((ROOT / "benchmarks" / "probe_grid.toml").read_text(encoding="utf-8"))[
        "row"
    ]


def collect(files: Sequence[Path]) -> Path:
    """New lines, taken into the results: by row and seed, of two the one that was not cut short, or
    the later one."""
    old = sorted(RESULTS.glob("*-h200-probes.json"))
    new: Found = {"runs": {}, "cpu": {}}
    found: Found = json.loads(old[-1].read_text(encoding="utf-8")) if old else new
    for run in (r for f in files for r in read_lines(f.read_text(encoding="utf-8"))):
        if not run["captured"]:  # from a CPU, to compare with
            found["cpu"][run["id"]] = run["checks"][0]
            continue
        row = found["runs"].setdefault(run["id"], {})
        row |= {"task": run["task"], "model": run["model"], "protocol": run["protocol"]}
        if run["seed"] == 0:
            row["first"] = run["checks"][0]
        seeds = {r["seed"]: r for r in row.get("seeds", [])}
        if "cut" in run and "cut" not in seeds.get(run["seed"], run):
            continue
        seeds[run["seed"]] = {key: run[key] for key in (*KEPT, *SHARED) if key in run}
        row["seeds"] = [seeds[s] for s in sorted(seeds)]
    date = max(r["date"] for row in found["runs"].values() for r in row["seeds"])
    target = RESULTS / f"{date}-h200-probes.json"
    target.write_text(written(found), encoding="utf-8")
    return target


def written(found: Found) -> str:
    """JSON with a line for every run of a seed."""
    lines = []
    for name, row in found["runs"].items():
        head = json.dumps({k: v for k, v in row.items() if k != "seeds"})[1:-1]
        runs = ",\n   ".join(json.dumps(r) for r in row["seeds"])
        lines.append(f'  {json.dumps(name)}: {{{head}, "seeds": [\n   {runs}]}}')
    cpu = json.dumps(found["cpu"])
    return '{"runs": {\n' + ",\n".join(lines) + '},\n "cpu": ' + cpu + "}\n"


# --------------------------------------------------------------------------------------
# Comparing with what is published
# --------------------------------------------------------------------------------------


def at(runs: Sequence[Row], length: int) -> list[float]:
    """Accuracies of the seeds at a length, where they were measured."""
    return [r["scores"][str(length)] for r in runs if str(length) in r["scores"]]


def fitted(run: Row) -> int:
    """Seeds that fit as the publication counts: by the best check at length 128, on the batches that
    chose the weights. Where none was there, on batches of its own."""
    protocol = run["protocol"]
    if protocol["select"] != "best" or protocol["validation"]["length"] != 128:
        return sum(r["fit"] for r in run["seeds"])
    return sum(r["best"] >= FIT for r in run["seeds"])


def published_at(published: Row, length: int) -> tuple[float | None, list[float]]:
    """Mean and single seeds, as far as they are published."""
    column = LENGTHS.index(length)
    mean = published.get("mean", [])
    value = mean[column] if column < len(mean) and mean[column] != "" else None
    seeds = published.get(f"at_{length}") or [
        s[column] for s in published.get("seeds", []) if column < len(s)
    ]
    return value, seeds


def verdict(run: Row, published: Row) -> str:
    """`reproduced`: all means are within ``CLOSE``. `differs`: a test says so. `consistent`: neither,
    the seeds vary too much to say."""
    far, ways, ps = False, [], []
    for length in LENGTHS:
        mean, seeds = published_at(published, length)
        ours = at(run["seeds"], length)
        if mean is None or not ours:
            continue
        gap = statistics.fmean(ours) - mean
        # Without single seeds, theirs are taken to spread as ours do.
        theirs = seeds or [x - gap for x in ours]
        if abs(gap) > CLOSE:
            p = different(ours, theirs)
            far = True
            ps.append(p)
            if p < SURE:
                ways.append(f"{'higher' if gap > 0 else 'lower'} at {length}")
    if "fits" in published:
        hits, of = published["fits"]
        p = fisher(fitted(run), len(run["seeds"]), hits, of)
        if hits * len(run["seeds"]) != fitted(run) * of:
            ps.append(p)
            far = far or "mean" not in published
        if p < SURE:
            ways.append("fits")
    if ways:
        return f"**differs**: {', '.join(ways)}; p = {min(ps):.1g}"
    return f"consistent, p ≥ {min(ps):.2g}" if far else "reproduced"


# --------------------------------------------------------------------------------------
# Tables
# --------------------------------------------------------------------------------------


def number(value: float) -> str:
    return f"{value:.3f}"


def mean(values: Sequence[float]) -> str:
    return number(statistics.fmean(values)) if values else "–"


def spread(values: Sequence[float]) -> str:
    if not values:
        return "–"
    return f"{number(min(values))} to {number(max(values))}" if len(values) > 1 else "–"


def fits(run: Row) -> str:
    return f"{fitted(run)}/{len(run['seeds'])}"


def rows_of(found: Found, *sections: str) -> Iterator[tuple[Row, Row, list[Row]]]:
    """Rows of the grid that have results, with them, and with their seeds."""
    for row in grid():
        if row["section"] in sections and row["id"] in found["runs"]:
            run = found["runs"][row["id"]]
            yield row, run, run["seeds"]


def comparison(found: Found, label: str, lengths: Sequence[int], *sections: str) -> str:
    """Ours and, after a stroke, the published mean."""
    lines = []
    last = lengths[-1]
    for row, run, runs in rows_of(found, *sections):
        published = row.get("published", {})
        cells = []
        for length in lengths:
            theirs, _ = published_at(published, length)
            cells.append(f"{mean(at(runs, length))} / {'–' if theirs is None else number(theirs)}")
        theirs = published.get("fits")
        shown = f"{fits(run)} / {'/'.join(map(str, theirs)) if theirs else '–'}"
        lines.append(
            [
                row["task"],
                row["name"],
                f"`{row['model']}`",
                str(runs[0]["n_layers"]),
                str(len(runs)),
                *cells,
                spread(at(runs, last)),
                shown,
                verdict(run, published) if published else "new",
            ]
        )
    head = ["Task", "there", "here", "layers", "seeds", *(f"@{n}" for n in lengths)]
    return table(label, [*head, f"seeds @{last}", "fits", "verdict"], lines, left=3)


def time_table(found: Found) -> str:
    lines = []
    for row, run, runs in rows_of(found, "time"):
        published = row.get("published", {})
        cells = []
        for length in (64, 256):
            theirs, _ = published_at(published, length)
            cells.append(f"{mean(at(runs, length))} / {'–' if theirs is None else number(theirs)}")
        rates = [r["rate"] for r in runs if "rate" in r]
        rate = f"{statistics.fmean(rates):.4f}" if rates else "–"
        known = published.get("rate")
        lines.append(
            [
                row["task"],
                row["name"],
                f"`{row['model']}`",
                str(len(runs)),
                *cells,
                f"{statistics.fmean(r['steps'] for r in runs):.0f}",
                f"{rate} / {f'{known:.4f}' if known else '–'}",
                verdict(run, published) if published else "new",
            ]
        )
    head = ["Task", "there", "here", "seeds", "@64", "@256", "steps", "rate λ", "verdict"]
    return table("Time gaps", head, lines, left=3)


def spent(runs: Sequence[Row]) -> str:
    """Steps of the optimizer; fewer where the time was over."""
    least, most = min(r["steps"] for r in runs), max(r["steps"] for r in runs)
    return f"{most:,}" if least == most else f"{least:,} to {most:,}"


def new_table(found: Found, label: str, *sections: str) -> str:
    """Rows without a published number, by task and accuracy at the greatest length."""
    order = list(dict.fromkeys(r["task"] for r in grid()))
    chosen = [(row, runs) for row, _, runs in rows_of(found, *sections) if not row.get("published")]
    chosen.sort(key=lambda c: (order.index(c[0]["task"]), -statistics.fmean(at(c[1], 1024))))
    lines = [
        [
            row["task"],
            f"`{row['model']}`",
            str(runs[0]["n_layers"]),
            f"{runs[0]['parameters']:,}",
            str(len(runs)),
            spent(runs),
            *(mean(at(runs, n)) for n in LENGTHS),
            spread(at(runs, 1024)),
            f"{sum(r['fit'] for r in runs)}/{len(runs)}",
        ]
        for row, runs in chosen
    ]
    head = ["Task", "model", "layers", "parameters", "seeds", "steps"]
    return table(label, [*head, *(f"@{n}" for n in LENGTHS), "seeds @1024", "fits"], lines, left=2)


def recall_table(found: Found) -> str:
    labels = ["256 pairs=16", "256 pairs=32"]
    chosen = sorted(
        rows_of(found, "MQAR"), key=lambda c: -statistics.fmean(r["fitted"] for r in c[2])
    )
    lines = [
        [
            f"`{row['model']}`",
            str(runs[0]["n_layers"]),
            f"{runs[0]['parameters']:,}",
            str(len(runs)),
            spent(runs),
            mean([r["fitted"] for r in runs]),
            *(mean([r["scores"][label] for r in runs]) for label in labels),
            f"{sum(r['fit'] for r in runs)}/{len(runs)}",
        ]
        for row, _, runs in chosen
    ]
    if not lines:
        return "Not run yet.\n"
    head = ["Model", "layers", "parameters", "seeds", "steps", "length 64, 8 pairs",
            "256, 16 pairs", "256, 32 pairs", "fits"]  # fmt: skip
    return table("Recall", head, lines)


TESTS = (
    ("hier-signed+givens", "hier-rotation-continuous", 0.009),
    ("hier-signed+givens", "hier-givens-1-round", 0.0013),
    ("hier-signed+givens", "hier-givens-2-rounds", 0.68),
    ("hier-signed+delta2", "hier-signed+delta2-small", 0.013),
    ("hier-signed+givens", "hier-signed+delta2-small", 0.22),
)
"""Pairs of rows whose fits the publication compares, with its p."""


def tests_table(found: Found) -> str:
    by_id = {row["id"]: row for row in grid()}
    lines = []
    for one, other, theirs in TESTS:
        if not {one, other} <= found["runs"].keys():
            continue
        counts = [
            (fitted(run), len(run["seeds"]))
            for run in (found["runs"][name] for name in (one, other))
        ]
        p = fisher(*counts[0], *counts[1])
        shown = [
            f"{by_id[name]['name']}, {c[0]}/{c[1]}"
            for name, c in zip((one, other), counts, strict=True)
        ]
        lines.append([*shown, f"{p:.2g}", f"{theirs:.2g}"])
    head = ["Row", "other row", "p here", "p there"]
    return table("Fisher's exact tests", head, lines, left=2)


def cpu_table(found: Found) -> str:
    """First checks of runs with seed 0, on the GPU and on a CPU."""
    lines = []
    for name, (step, loss, score) in found["cpu"].items():
        run = found["runs"][name]
        _, ours, reached = run["first"]
        lines.append(
            [
                run["task"],
                f"`{run['model']}`",
                str(step),
                f"{loss:.6f}",
                f"{ours:.6f}",
                f"{score:.4f}",
                f"{reached:.4f}",
            ]
        )
    head = ["Task", "model", "step", "loss, CPU", "loss, GPU", "score, CPU", "score, GPU"]
    return table("The same runs on a CPU", head, lines, left=2)


def provenance(found: Found) -> str:
    runs = [r for row in found["runs"].values() for r in row["seeds"]]
    kinds = sorted({(r["device"], r["torch"], r["triton"]) for r in runs})
    where = "; ".join(f"{d}, torch {t}, Triton {v}" for d, t, v in kinds)
    revisions = ", ".join(sorted({r["revision"] for r in runs}))
    wrong = sum(not r["finite"] for r in runs)
    return (
        f"{where}, float32 (no TF32); {max(r['date'] for r in runs)}; revision {revisions}; "
        f"`python benchmarks/probe_grid.py --device cuda`: {len(runs)} runs of "
        f"{len(found['runs'])} rows, {sum(r['captured'] for r in runs)} of them as CUDA graphs, up "
        f"to {max(r['workers'] for r in runs)} jobs at a time; {wrong} runs ended with numbers that "
        "are not finite.\n"
    )


def verdicts(found: Found) -> str:
    seen = [
        verdict(found["runs"][row["id"]], row["published"]).split(" ")[0].strip("*:,")
        for row in grid()
        if row.get("published") and row["id"] in found["runs"]
    ]
    total = sum(bool(row.get("published")) for row in grid())
    return (
        f"Of {total} published rows {len(seen)} were run, each with at least its published number of "
        f"seeds. {seen.count('reproduced')} are reproduced, {seen.count('consistent')} are consistent "
        f"with the published ones, {seen.count('differs')} differ.\n"
    )


# --------------------------------------------------------------------------------------
# Figures
# --------------------------------------------------------------------------------------

FIGURES: dict[str, tuple[str, float, list[tuple[str, str]]]] = {
    "probes_s3": (
        "S3: accuracy over length",
        1 / 6,
        [
            ("S3-gru", "GRU"),
            ("S3-rotation", "rotation"),
            ("S3-delta2", "delta2"),
            ("S3-signed", "signed"),
            ("S3-log", "log"),
        ],
    ),
    "probes_hier": (
        "S3-hier: accuracy over length",
        1 / 6,
        [
            ("hier-signed+givens", "+givens"),
            ("hier-signed+delta2", "+delta2"),
            ("hier-signed-2", "+signed"),
            ("hier-signed+rotation", "+rotation"),
            ("hier-gru", "GRU"),
        ],
    ),
    "probes_nonlinear": (
        "S3, nonlinear cells and attention",
        1 / 6,
        [
            ("S3-para-gru-free", "diagonal"),
            ("S3-para-gru-head", "heads"),
            ("S3-para-m2rnn", "M2RNN"),
            ("S3-block-GRU", "GRU"),
            ("S3-attention", "attention"),
        ],
    ),
}  # fmt: skip


def accuracy_plot(found: Found, title: str, chance: float, lines: list[tuple[str, str]]) -> Plot:
    shown = [(i, label) for i, label in lines if i in found["runs"]]
    said = "; ".join(
        f"{label} {' '.join(mean(at(found['runs'][i]['seeds'], n)) for n in LENGTHS)}"
        for i, label in shown
    )
    logs = [math.log2(n) for n in LENGTHS]
    plot = Plot(
        title,
        f"{title}, means of the seeds at 64, 256, 512 and 1024: {said}.",
        (logs[0], logs[-1]),
        (0, 1),
    )
    plot.up([(p / 4, f"{p / 4:g}") for p in range(5)])
    plot.across([(x, str(n)) for x, n in zip(logs, LENGTHS, strict=True)], "length, trained at 64")
    plot.level(chance, "chance")
    for colour, (i, _) in zip(COLOURS, shown, strict=False):
        runs = found["runs"][i]["seeds"]
        for r in runs:
            scores = (r["scores"][str(n)] for n in LENGTHS)
            plot.line(zip(logs, scores, strict=True), colour, False, alpha=0.3, linewidth=1)
        means = (statistics.fmean(at(runs, n)) for n in LENGTHS)
        plot.line(zip(logs, means, strict=True), colour)
    plot.legend([(c, label) for c, (_, label) in zip(COLOURS, shown, strict=False)], rows=2)
    return plot


# --------------------------------------------------------------------------------------


def outputs() -> Iterator[tuple[Path, str]]:
    """Every file that follows from the results, with its content."""
    found = report.load(newest())
    makers = {
        "provenance": provenance,
        "verdicts": verdicts,
        "cpu": cpu_table,
        "ladder": lambda f: comparison(f, "The ladder", LENGTHS, "ladder"),
        "depth": lambda f: comparison(f, "Two layers", LENGTHS, "depth"),
        "incumbents": lambda f: comparison(f, "The delta rule", LENGTHS, "incumbents"),
        "hier": lambda f: comparison(f, "S3-hier", LENGTHS, "hier"),
        "ablation": lambda f: comparison(f, "Ablations", LENGTHS, "ablation"),
        "tests": tests_table,
        "time": time_table,
        "new": lambda f: new_table(f, "New rows", "new"),
        "s5": lambda f: new_table(f, "S5", "S5"),
        "mqar": recall_table,
    }
    yield from report.fragments("probes", found, makers)
    for name, (title, chance, lines) in FIGURES.items():
        yield accuracy_plot(found, title, chance, lines).write(name)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--collect", type=Path, nargs="+", default=[], help="lines of probe_grid.py"
    )
    args = parser.parse_args(arguments)
    if args.collect:
        print(collect(args.collect).relative_to(ROOT))
    for path in report.written(outputs()):
        print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
