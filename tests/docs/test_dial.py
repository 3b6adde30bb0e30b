"""The drawings of the solver's page follow from the script that draws them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_drawings_are_what_the_script_draws(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    spec = importlib.util.spec_from_file_location("dial", ROOT / "benchmarks" / "dial.py")
    dial = importlib.util.module_from_spec(spec)
    sys.modules["dial"] = dial
    spec.loader.exec_module(dial)
    for target, text in dial.outputs():
        assert target.read_text(encoding="utf-8") == text, (
            f"{target.name} is out of date; run: python benchmarks/dial.py"
        )
