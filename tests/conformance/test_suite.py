"""`pytest conformance` as a person runs it: options, table, report, own cells."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))  # for `conformance`; behind an installed pararnn, if there is one

from conformance.conftest import subjects  # noqa: E402

BROKEN = """
import torch
from pararnn import Cell, Spec, tanh

with Spec("Elman") as elman:
    h = elman.state("h", bounds=(-1, 1))
    (u,) = elman.drives("u")
    w = elman.map("w", structure="diagonal")
    elman.next(h, tanh(w(h) + u))

class Right(Cell):
    spec = elman
    def recurrence(self, h, u, w):
        return torch.tanh(w * h + u)

class Wrong(Right):
    def recurrence(self, h, u, w):
        return torch.tanh(w * h - u)

def right():
    return Right(d_in=3, d_h=5)

def wrong():
    return Wrong(d_in=3, d_h=5)

def derived():
    return Cell(3, 5, spec=elman)

def needs(width):
    return Right(d_in=3, d_h=width)
"""


def conformance(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "own.py").write_text(BROKEN, encoding="utf-8")
    return subprocess.run(
        [sys.executable, "-m", "pytest", str(ROOT / "conformance"), "-q", *arguments],
        cwd=folder,
        env={**os.environ, "NO_COLOR": "1", "COLUMNS": "120"},
        text=True,
        capture_output=True,
        timeout=300,
    )


def test_own_cells_with_report(tmp_path: Path) -> None:
    """A right cell passes, a wrong one fails, a clause without a second source is skipped."""
    cells = ["--cell=own:right", "--cell=own:wrong", "--cell=own:derived"]
    done = conformance(tmp_path, *cells, "-k", "equation or constraint", "--report", "report.json")
    assert done.returncode == 1, done.stdout + done.stderr
    table = re.search(r"C1  The step is the equation +(\w+) +(\w+) +(\w+)", done.stdout)
    assert table is not None, done.stdout
    assert table.groups() == ("pass", "FAIL", "skip")
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert report["counts"] == {"passed": 1, "failed": 1, "skipped": 4}
    assert set(report["machine"]) >= {"system", "python", "torch", "pararnn", "gpu"}
    found = {(r["cell"], r["name"]): r for r in report["results"]}
    right, wrong = found["own:right", "equation"], found["own:wrong", "equation"]
    assert right["outcome"] == "passed"
    assert right["measured"]
    assert max(right["measured"].values()) < 1e-13
    assert "expected at most" in wrong["reason"]
    assert "second source" in found["own:derived", "equation"]["reason"]
    assert "no recurrent weight" in found["own:right", "constraint"]["reason"]


def test_wrong_device_is_explained(tmp_path: Path) -> None:
    done = conformance(tmp_path, "--device=nowhere")
    assert done.returncode == 4, done.stdout + done.stderr
    assert "--device nowhere" in done.stderr


@pytest.mark.parametrize(
    ("cell", "expected"),
    [
        ("ParaGUR", "expected one of ParaGRU"),
        ("DMR", r"Did you mean DRM\?"),
        ("own_cells:missing", "expected module:factory"),
        ("no_such_module:factory", "expected module:factory"),
        ("os:getcwd", "got a factory of str, expected one of a cell"),
        ("os:sep", "got str, expected a factory"),
        ("own_cells:needs", "needs width, expected one that can be called without"),
    ],
)
def test_wrong_cell_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cell: str, expected: str
) -> None:
    (tmp_path / "own_cells.py").write_text(BROKEN, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(pytest.UsageError, match=expected):
        subjects(cell)


@pytest.mark.parametrize(
    ("cell", "expected"),
    [
        ("MinGRU", ["MinGRU[plain]", "MinGRU[decay]"]),
        ("min_gru", ["MinGRU[plain]", "MinGRU[decay]"]),
        ("MinGRU[decay]", ["MinGRU[decay]"]),
        ("ParaLSTM", ["ParaLSTM"]),
        ("drm", ["DRM"]),
    ],
)
def test_a_bare_name_is_all_forms_of_a_cell(cell: str, expected: list[str]) -> None:
    assert [s.name for s in subjects(cell)] == expected


def test_a_form_that_is_named_twice_is_checked_once(tmp_path: Path) -> None:
    both = ["--cell=MinGRU", "--cell=MinGRU[decay]", "-k", "c34_", "--collect-only"]
    done = conformance(tmp_path, *both)
    assert done.stdout.count("MinGRU[decay]") == 1, done.stdout + done.stderr
    assert done.stdout.count("MinGRU[plain]") == 1


def test_the_drm_has_clauses_of_its_own(tmp_path: Path) -> None:
    """A cell's clauses are not for it, and its clauses are not for a cell."""
    both = ["--cell=DRM", "--cell=own:right", "-k", "equation or drm_span"]
    done = conformance(tmp_path, *both, "--report", "report.json")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    found = {(r["cell"], r["name"]): r["outcome"] for r in report["results"]}
    assert found == {("DRM", "drm-span"): "passed", ("own:right", "equation"): "passed"}


def test_dtype_that_was_not_asked_for_is_skipped(tmp_path: Path) -> None:
    done = conformance(
        tmp_path, "--cell=own:right", "--dtype=float32", "-k", "half_precision or causality"
    )
    assert done.returncode == 0, done.stdout
    assert "skip C24 (own:right): neither bfloat16 nor float16 was asked for" in done.stdout


def test_the_drm_in_small_letters() -> None:
    assert [s.about for s in (*subjects("drm"), *subjects("DRM"))] == ["DRM", "DRM"]
