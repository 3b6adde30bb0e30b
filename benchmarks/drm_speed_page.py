"""Makes the tables of the page on the DRM's performance from the results of `gpu_drm.py`.

    python benchmarks/drm_speed_page.py [RESULTS.json]

In place of a table of what was not measured there is a line that says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import report
from harness import RESULTS, Row, median
from report import Found, by, captured, done, ms, table

newest = partial(report.newest, "h200-drm")


def small(value: float | None) -> str:
    return "–" if value is None else f"{value:.0e}"


def problem(row: Row) -> list[str]:
    """What identifies a rollout."""
    return [f"`{row['variant']}`", row["weights"], str(row["dt"])]


def checks_table(found: Found) -> str:
    lines = []
    for row in found["checks"]:
        worst = max((e["of tolerance"] for e in row.get("errors", {}).values()), default=None)
        of = "–" if worst is None else f"{worst:.2f}"
        verdict = "pass" if row["ok"] else "**fail**"
        lines.append([f"`{row['variant']}`", row["preset"], f"`{row['path']}`", verdict, of])
    head = ["Variant", "semantics", "path", "result", "of tolerance"]
    return table("Checks of the DRM on the GPU", head, lines, left=4)


def train_table(found: Found) -> str:
    lines = []
    for row in done(found["train"]):
        ways = [way for way in ("eager", "graph") if way in row]
        lines.append([
            f"`{row['variant']}`", row["preset"], row["precision"], by(row["shape"]),
            f"{row['parameters'] / 1e6:.1f}", ms(median(row, "eager")),
            captured(row, "graph") if "graph" in ways else "–",
            f"{max(row[way]['tokens/s'] for way in ways):,}",
            f"{row.get('peak', 0) / 2**30:.2f}",
        ])  # fmt: skip
    head = ["Variant", "semantics", "precision", "B×T", "million parameters", "eager", "graph",
            "tokens/s", "GiB"]  # fmt: skip
    return table("Training calls of the DRM", head, lines, left=4)


def naturalize_table(found: Found) -> str:
    lines = [
        [f"{r['points']} × {r['vectors']}", r["precision"],
         captured(r, "forward"), captured(r, "both")]
        for r in done(found["naturalize"])
    ]  # fmt: skip
    head = ["metrics × velocities", "precision", "forward", "forward and backward"]
    return table("Times of naturalization", head, lines, left=2)


def memory_table(found: Found) -> str:
    lines = [
        [by(r["shape"]), r["backend"], captured(r, "forward"), captured(r, "both")]
        for r in done(found["memory"])
    ]
    head = ["B×T×d", "backend", "forward", "forward and backward"]
    return table("Times of the memory's scan", head, lines, left=2)


def prefix_table(found: Found) -> str:
    lines = [
        [by(r["shape"]), r["dtype"], r["backend"], captured(r, "forward"), captured(r, "both"),
         ms(median(r, "single")), small(r["error"])]
        for r in done(found["prefix"])
    ]  # fmt: skip
    head = ["B×L×d", "increments", "backend", "forward", "forward and backward",
            "the same, single calls", "error"]  # fmt: skip
    return table("Times of a block's sums", head, lines, left=3)


def gap_table(found: Found) -> str:
    rows = done(found["gap"])
    lengths = list(rows[0]["gap"]) if rows else []
    lines = [problem(r) + [f"{r['gap'][n]:.3f}" for n in lengths] for r in rows]
    head = ["Variant", "weights", "dt", *(f"L = {n}" for n in lengths)]
    return table("Distance of the block path from the recurrence", head, lines, left=3)


def rollout_table(found: Found) -> str:
    lines = []
    for row in done(found["rollout"]):
        loop = median(row, "loop")
        for window, one in row["windows"].items():
            lines.append([
                *problem(row), by(row["shape"]), f"{row['norm']:.1f}", str(window),
                str(one["corrections"]), str(one["looped"]), ms(loop), ms(median(one, "time")),
                f"{loop / median(one, 'time'):.1f}", small(one["error"]),
                small(one["error_estimate"]),
            ])  # fmt: skip
    head = ["Variant", "weights", "dt", "B×T", "largest norm", "window", "corrections",
            "windows in the loop", "loop", "parallel", "times as fast", "error",
            "estimated"]  # fmt: skip
    return table("The recurrence, solved in parallel", head, lines, left=4)


def gradient_table(found: Found) -> str:
    lines = []
    for row in done(found["gradient"]):
        loop, ours = median(row, "loop"), median(row, "parallel")
        lines.append([
            *problem(row), by(row["shape"]), str(sum(row["corrections"])),
            str(sum(row["backward"])), ms(loop), ms(ours), f"{loop / ours:.1f}",
            small(row["difference"]),
        ])  # fmt: skip
    head = ["Variant", "weights", "dt", "B×T", "corrections", "backward", "loop", "parallel",
            "times as fast", "difference"]  # fmt: skip
    return table("Forward and backward of the parallel path", head, lines, left=4)


def compile_table(found: Found) -> str:
    lines = [
        [f"`{r['variant']}`", r["precision"], by(r["shape"]), f"{r['seconds']:.0f} s",
         captured(r, "both"), f"{r['both']['tokens/s']:,}", small(r["difference"])]
        for r in done(found["compile"])
    ]  # fmt: skip
    head = ["Variant", "precision", "B×T", "first call", "call", "tokens/s", "difference"]
    return table("The DRM under torch.compile", head, lines, left=3)


def provenance(found: Found) -> str:
    """Where and how, and what has no numbers."""
    lost = [r["case"] for name in TABLES for r in found.get(name, []) if "case" in r]
    text = (
        f"{found['device']}, torch {found['torch']}, Triton {found['triton']}, CUDA "
        f"{found['cuda']}, {found['date']}; `{found['command']}`; {found['seconds']:.0f} s in all, "
        f"of revision `{found['revision']}`. Times in milliseconds.\n"
    )
    for row in found.get("trained", []):
        first, last = row["nats"]
        text += f"\nTrained weights of `{row['variant']}`: from {first} to {last} nats a byte.\n"
    if lost:
        cases = ", ".join(f"`{case}`" for case in lost).replace("'", "")
        text += f"\n{len(lost)} cases raised and have no numbers: {cases}.\n"
    return text


TABLES = {
    "checks": checks_table,
    "train": train_table,
    "naturalize": naturalize_table,
    "memory": memory_table,
    "prefix": prefix_table,
    "gap": gap_table,
    "rollout": rollout_table,
    "gradient": gradient_table,
    "compile": compile_table,
}


def outputs(found: Found) -> Iterator[tuple[Path, str]]:
    """Every file that is made, and its text."""
    yield RESULTS / "drm_speed_provenance.md", provenance(found)
    for name, make in TABLES.items():
        text = make(found) if done(found.get(name, [])) else "Not measured in this run.\n"
        yield RESULTS / f"drm_speed_{name}.md", text


if __name__ == "__main__":
    report.page(__doc__, outputs, newest)
