"""Makes the tables on what a call costs from the results of `gpu_overhead.py`.

python benchmarks/overhead_page.py [RESULTS.json]
"""

from __future__ import annotations

from functools import partial

import report
from harness import median
from report import Found, by, captured, done, ms, table

newest = partial(report.newest, "h200-overhead")


def small_table(found: Found) -> str:
    lines = [
        [
            f"`{r['cell']}`",
            r["library"],
            by(r["shape"]),
            ms(median(r, "forward")),
            ms(median(r, "both")),
        ]
        for r in done(found["small"])
    ]
    head = ["Cell", "library", "B×T×D", "forward", "forward and backward"]
    return table("Calls of a small layer, wall-clock milliseconds", head, lines, 3)


def decode_table(found: Found) -> str:
    lines = [
        [
            f"`{r['cell']}`",
            r["library"],
            by(r["shape"]),
            ms(median(r, "step")),
            captured(r, "captured"),
        ]
        for r in done(found["decode"])
    ]
    head = ["Cell", "library", "layers×B×D", "step", "in a graph"]
    return table("Decode steps, wall-clock milliseconds", head, lines, 3)


def first_table(found: Found) -> str:
    parts = ("import", "forward", "backward", "forward, again", "backward, again")
    lines = [[f"`{r['cell']}`", *(f"{r[p]:.3f}" for p in parts)] for r in done(found["first"])]
    return table("First calls with an empty cache, seconds", ["Cell", *parts], lines)


def frames_table(found: Found) -> str:
    parts = ("to launch", "own", "files", "depth", "all")
    lines = [
        [f"`{r['cell']}`", r["pass"], *("–" if r[p] is None else f"{r[p]:,}" for p in parts)]
        for r in done(found["frames"])
    ]
    head = ["Cell", "pass", "functions to the launch", "pararnn's", "in files", "depth", "all"]
    return table("Python functions that a call enters", head, lines, 2)


def provenance(found: Found) -> str:
    return (
        f"{found['device']}, torch {found['torch']}, Triton {found['triton']}, {found['date']}; "
        f"revision {found['revision']}; `{found['command']}`.\n"
    )


MAKERS = {
    "provenance": provenance,
    "small": small_table,
    "decode": decode_table,
    "first": first_table,
    "frames": frames_table,
}
outputs = partial(report.fragments, "overhead", makers=MAKERS)


if __name__ == "__main__":
    report.page(__doc__, outputs, newest)
