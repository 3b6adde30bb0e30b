"""Makes the tables of the page of DRM results from `drm_mqar.py` and `examples/drm_bytes.py`.

    python benchmarks/drm_page.py

They come from the newest committed results of each.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from pathlib import Path

import report
from harness import ROOT, Row
from report import Found, done, spread, table

REFERENCE = "J"


def newest(topic: str, device: str = "h200") -> Path:
    return report.newest(f"{device}-drm-{topic}")


def grouped(rows: list[Row], *keys: str) -> dict[tuple[object, ...], list[Row]]:
    """Rows that have numbers, by some of their fields, in the order of their seeds."""
    return report.grouped(sorted(done(rows), key=lambda r: r["seed"]), *keys)


def mean_of(rows: list[Row], key: str) -> float:
    return statistics.mean(r[key] for r in rows)


def paired(rows: list[Row], others: list[Row], key: str) -> list[float]:
    """Differences on the seeds that both have."""
    by_seed = {r["seed"]: r[key] for r in others}
    return [r[key] - by_seed[r["seed"]] for r in rows if r["seed"] in by_seed]


def mqar_table(found: Found) -> str:
    groups = grouped(found["rows"], "model", "preset")
    lines = []
    for (model, preset), rows in sorted(groups.items(), key=lambda g: -mean_of(g[1], "accuracy")):
        aliases = found["aliases"].get(model, []) if preset else []
        reference = groups.get((REFERENCE, preset), [])
        gain = [100 * d for d in paired(rows, reference, "accuracy")]
        lines.append(
            [
                ", ".join(f"`{name}`" for name in (model, *aliases)),
                preset or "–",
                f"{rows[0]['parameters']:,}",
                str(len(rows)),
                spread([r["loss"] for r in rows], 3),
                spread([100 * r["accuracy"] for r in rows], 1),
                "–" if model == REFERENCE or not gain else spread(gain, 1),
            ]
        )
    return table(
        "Recall by model",
        ["Model", "semantics", "parameters", "seeds", "loss, nats", "accuracy, %",
         "accuracy − J, points"],
        lines,
        left=2,
    )  # fmt: skip


def mqar_provenance(found: Found) -> str:
    failed = sum("exception" in r for r in found["rows"])
    return (
        f"{found['device']}, torch {found['torch']}, {found['dtype']}, {found['date']}; revision "
        f"{found['revision']}; `{found['command']}`: {len(found['rows'])} of {found['planned']} runs "
        f"in {found['seconds']:.0f} s, {found['jobs']} at a time, {failed} failed.\n"
    )


def bytes_table(found: Found) -> str:
    groups = grouped(found["runs"], "name")
    lines = []
    for (name,), rows in sorted(groups.items(), key=lambda group: mean_of(group[1], "nats")):
        nats = [r["nats"] for r in rows]
        gain = paired(rows, groups.get((REFERENCE,), []), "nats")
        lines.append(
            [
                f"`{name}`",
                f"{rows[0]['parameters']:,}",
                str(len(rows)),
                spread(nats, 4),
                f"{mean_of(rows, 'nats') / math.log(2):.4f}",
                "–" if name == REFERENCE or not gain else spread(gain, 4),
                f"{mean_of(rows, 'tokens_a_second'):,.0f}",
            ]
        )
    return table(
        "Language modelling on bytes",
        ["Variant", "parameters", "seeds", "nats a byte", "bits a byte", "nats − J", "tokens/s"],
        lines,
    )


def bytes_provenance(found: Found) -> str:
    p, text = found["preset"], found["text"]
    return (
        f"{found['device']}, torch {found['torch']}, {found['dtype']}; `{found['command']}`, "
        f"{found['jobs']} runs at a time: {p['steps']} steps of {p['batch']} windows of {p['length']} "
        f"bytes, AdamW with a learning rate of {p['lr']:g}; text: {text['bytes']:,} bytes of Python "
        f"{found['python']}'s {text['name']}, the last tenth for {p['windows']} windows of "
        f"validation.\n"
    )


def outputs() -> Iterator[tuple[Path, str]]:
    """Every file that follows from the results, with its content."""
    recall = {"table": mqar_table, "provenance": mqar_provenance}
    text = {"table": bytes_table, "provenance": bytes_provenance}
    for topic, device, prefix, makers in (
        ("mqar", "h200", "drm_mqar", recall),
        ("mqar", "cpu", "drm_mqar_cpu", {"provenance": mqar_provenance}),
        ("bytes", "h200", "drm_bytes", text),
    ):
        yield from report.fragments(prefix, report.load(newest(topic, device)), makers)


if __name__ == "__main__":
    for path in report.written(outputs()):
        print(path.relative_to(ROOT))
