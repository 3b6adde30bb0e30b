"""The tables of the DRM's performance follow from the committed results."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TIME = {"median": 2.0, "how": "graph"}
WHERE = {"variant": "J", "weights": "trained", "dt": 0.08, "shape": [2, 512]}
ROWS = {
    "train": {"variant": "J", "preset": "published", "precision": "bfloat16", "shape": [16, 512],
              "parameters": 126_080_896, "eager": TIME | {"tokens/s": 4096}, "peak": 2**30},
    "prefix": {"shape": [16, 64, 1536], "dtype": "float32", "backend": "auto", "forward": TIME,
               "both": TIME, "single": TIME, "error": 3e-7},
    "gap": WHERE | {"gap": {"4": 0.0125, "512": 0.5}},
    "rollout": WHERE
    | {
        "norm": 3.24,
        "loop": {"median": 40.0},
        "windows": {
            "16": {"corrections": 9, "looped": 1, "time": {"median": 10.0}, "error": 3e-7,
                   "error_estimate": None},
        },
    },
    "gradient": WHERE
    | {"loop": {"median": 30.0}, "parallel": {"median": 20.0}, "corrections": [2, 3],
       "backward": [4], "difference": 2e-6},
    "compile": {"variant": "J", "shape": [16, 512], "precision": "bfloat16", "seconds": 12.3,
                "difference": 1e-4, "both": TIME | {"tokens/s": 4096}},
}  # fmt: skip


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield importlib.import_module("drm_speed_page")
    sys.modules.pop("drm_speed_page", None)


def test_tables_follow_from_the_results(script):
    found = json.loads(script.newest().read_text(encoding="utf-8"))
    page = (ROOT / "docs" / "drm_performance.md").read_text(encoding="utf-8")
    for target, text in script.outputs(found):
        assert target.read_text(encoding="utf-8") == text, (
            f"{target.name} is out of date; run: python benchmarks/drm_speed_page.py"
        )
        assert f'"benchmarks/results/{target.name}"' in page


@pytest.mark.parametrize(
    ("section", "line"),
    [
        ("train", "| `J` | published | bfloat16 | 16×512 | 126.1 | 2.00 | – | 4,096 | 1.00 |"),
        ("prefix", "| 16×64×1536 | float32 | auto | 2.00 | 2.00 | 2.00 | 3e-07 |"),
        ("gap", "| `J` | trained | 0.08 | 0.013 | 0.500 |"),
        (
            "rollout",
            "| `J` | trained | 0.08 | 2×512 | 3.2 | 16 | 9 | 1 | 40.0 | 10.0 | 4.0 | 3e-07 | – |",
        ),
        ("gradient", "| `J` | trained | 0.08 | 2×512 | 5 | 4 | 30.0 | 20.0 | 1.5 | 2e-06 |"),
        ("compile", "| `J` | bfloat16 | 16×512 | 12 s | 2.00 | 4,096 | 1e-04 |"),
    ],
)
def test_lines(script, section, line):
    assert line in script.TABLES[section]({section: [ROWS[section]]}).splitlines()


def test_what_was_not_measured_is_said(script):
    found = json.loads(script.newest().read_text(encoding="utf-8"))
    found["trained"] = [{"variant": "J", "nats": [5.5, 2.5]}]
    found["gap"] = [{"case": "('J', 0.1)", "exception": "Traceback"}]
    made = {target.stem: text for target, text in script.outputs(found)}
    assert made["drm_speed_gap"] == "Not measured in this run.\n"
    assert "`(J, 0.1)`" in made["drm_speed_provenance"]
    assert "`J`: from 5.5 to 2.5 nats a byte" in made["drm_speed_provenance"]
