"""What a run found: per cell and clause an outcome, its reason, and the measured numbers."""

from __future__ import annotations

import json
import platform
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import pararnn

from .clauses import BY_SLUG, CLAUSES

MARKS = {"passed": "pass", "failed": "FAIL", "skipped": "skip"}


@dataclass
class Report:
    """Collected while the suite runs; printed as a table and written as JSON."""

    settings: dict[str, Any] = field(default_factory=dict)
    results: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)

    def add(
        self, cell: str, slug: str, outcome: str, reason: str, measured: dict, seconds: float
    ) -> None:
        self.results[cell, slug] = {
            "cell": cell,
            "clause": BY_SLUG[slug].id,
            "name": slug,
            "outcome": outcome,
            "reason": reason,
            "seconds": round(seconds, 3),
            "measured": {k: v if v == v and abs(v) != float("inf") else str(v)
                         for k, v in measured.items()},
        }  # fmt: skip

    @property
    def cells(self) -> list[str]:
        return list(dict.fromkeys(cell for cell, _ in self.results))

    def table(self) -> list[str]:
        """One line a clause, one column a cell, and the reasons of skips below."""
        cells = self.cells
        width = max((len(c.title) for c in CLAUSES), default=0)
        columns = [max(len(cell), 4) for cell in cells]
        lines = [" " * (width + 8) + "  ".join(cells)]
        for clause in CLAUSES:
            if not any((cell, clause.slug) in self.results for cell in cells):
                continue
            marks = [
                MARKS[self.results[cell, clause.slug]["outcome"]].ljust(column)
                if (cell, clause.slug) in self.results
                else "-".ljust(column)
                for cell, column in zip(cells, columns, strict=True)
            ]
            lines.append(f"{clause.id:>4}  {clause.title:{width}}  {'  '.join(marks)}".rstrip())
        reasons: dict[tuple[str, str], list[str]] = {}
        for r in self.results.values():
            if r["outcome"] == "skipped":
                reasons.setdefault((r["clause"], r["reason"]), []).append(r["cell"])
        lines += [
            f"skip {clause} ({', '.join(skipped)}): {reason}"
            for (clause, reason), skipped in reasons.items()
        ]
        return lines

    def counts(self) -> dict[str, int]:
        outcomes = [r["outcome"] for r in self.results.values()]
        return {name: outcomes.count(name) for name in MARKS}

    def to_dict(self) -> dict[str, Any]:
        return {
            "machine": machine(),
            "settings": self.settings,
            "counts": self.counts(),
            "clauses": {c.id: {"name": c.slug, "statement": c.statement} for c in CLAUSES},
            "results": list(self.results.values()),
        }

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")


def machine() -> dict[str, Any]:
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "system": platform.platform(),
        "processor": platform.machine(),
        "threads": torch.get_num_threads(),
        "gpu": gpu,
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "pararnn": pararnn.__version__,
        "pararnn_from": str(Path(pararnn.__file__).parent),
    }
