"""What all pages of benchmarks share: numbers as text, tables in Markdown, and the pieces of a page.

A page's script has `outputs`, which gives every file that follows from the committed results with its
content. The output is deterministic; tests compare it with what is committed.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from harness import RESULTS, ROOT, Row, median

Found = dict[str, Any]
Outputs = Iterable[tuple[Path, str]]

# -- numbers ---------------------------------------------------------------------------------------


def by(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape))


def ms(value: float) -> str:
    """Three significant digits, without an exponent."""
    return f"{value:.{max(0, 2 - math.floor(math.log10(value)))}f}" if value > 0 else "0"


def times(value: float) -> str:
    return f"{value:.2f}×" if value < 10 else f"{value:.0f}×"


def tiny(value: float) -> str:
    return f"{value:.0e}".replace("e-0", "e-") if value else "0"


def spread(values: Sequence[float], digits: int) -> str:
    """Mean and sample deviation."""
    mean = f"{statistics.mean(values):.{digits}f}"
    return mean if len(values) < 2 else f"{mean} ± {statistics.stdev(values):.{digits}f}"


def captured(row: Row, part: str) -> str:
    """A time, with a star if it is not that of a captured graph."""
    return ms(median(row, part)) + ("*" if row[part].get("how") == "events" else "")


def of_floor(row: Row, part: str) -> float:
    return median(row, part) / row["floor"][part]


# -- rows ------------------------------------------------------------------------------------------


def pick(rows: Iterable[Row], **wanted: Any) -> list[Row]:
    return [r for r in rows if all(r[k] == v for k, v in wanted.items())]


def done(rows: Iterable[Row], **wanted: Any) -> list[Row]:
    """Rows that have numbers."""
    return [r for r in pick(rows, **wanted) if "exception" not in r]


def grouped(rows: Iterable[Row], *keys: str) -> dict[tuple[Any, ...], list[Row]]:
    """Rows by some of their fields."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    return groups


# -- Markdown --------------------------------------------------------------------------------------


def lines(head: Sequence[str], rows: Iterable[Sequence[str]], left: int | None = 1) -> list[str]:
    """A Markdown table; columns after the first ``left`` are numbers, with None there are none."""
    count = len(head) if left is None else left
    line = ["---"] * count + ["---:"] * (len(head) - count)
    return [f"| {' | '.join(row)} |" for row in (head, line, *rows)]


def table(
    label: str, head: Sequence[str], rows: Iterable[Sequence[str]], left: int | None = 1
) -> str:
    """The same in a box that scrolls."""
    box = f'<div class="table-box" tabindex="0" role="region" aria-label="{label}" markdown>'
    return "\n".join([box, "", *lines(head, rows, left), "", "</div>", ""])


def checks_table(rows: list[Row], key: str, label: str, head: str) -> str:
    """How checks went, by what was checked: cases, and the largest part of a tolerance that was
    used."""
    found = []
    for (what,), part in sorted(grouped(rows, key).items()):
        good = [r for r in part if r["ok"]]
        used = max((e["of tolerance"] for r in good for e in r["errors"].values()), default=0)
        dtypes = ", ".join(sorted({r["dtype"] for r in part}))
        found.append([f"`{what}`", dtypes, f"{len(good)} of {len(part)}", f"{used:.2f}"])
    return table(label, [head, "dtypes", "cases that pass", "most of a tolerance used"], found, 2)


def provenance(found: Found) -> str:
    """Where and how a run on a GPU was measured."""
    ways = ", ".join(f"{k} {v / 1e12:.2f}" for k, v in found["copy"]["ways"].items())
    checks = found["checks"]
    return (
        f"{found['device']}, torch {found['torch']}, Triton {found['triton']}, {found['date']}; "
        f"revision {found['revision']}; `{found['command']}`, {found['seconds']:.0f} s for all of "
        f"this page. Copying 1 GiB, in TB/s read and written: {ways}; the floor counts with "
        f"{found['copy']['best']}. {sum(r['ok'] for r in checks)} of {len(checks)} checked cases pass."
    )


# -- files -----------------------------------------------------------------------------------------


def newest(kind: str, where: Path = RESULTS) -> Path:
    """The newest committed results of that kind, as `h200-channelwise`."""
    results = sorted(where.glob(f"*-{kind}.json"))
    if not results:
        raise SystemExit(f"got no *-{kind}.json in {where}, expected results; run the benchmark.")
    return results[-1]


def load(path: Path) -> Found:
    found: Found = json.loads(path.read_text(encoding="utf-8"))
    return found


def fragments(prefix: str, found: Found, makers: dict[str, Callable[[Found], str]]) -> Outputs:
    """Pieces of a page: a file for each name."""
    for name, make in makers.items():
        yield RESULTS / f"{prefix}_{name}.md", make(found)


def written(outputs: Outputs) -> Iterator[Path]:
    """Write them all."""
    for path, text in outputs:
        path.write_text(text, encoding="utf-8")
        yield path


def page(
    about: str | None, outputs: Callable[[Found], Outputs], default: Callable[[], Path]
) -> None:
    """The command of a page: results to read, by default the newest, and files to write."""
    parser = argparse.ArgumentParser(description=(about or "").splitlines()[0])
    parser.add_argument("results", type=Path, nargs="?", help="default: the newest committed ones")
    source = parser.parse_args().results or default()
    for path in written(outputs(load(source))):
        print(path.relative_to(ROOT))
