"""Every mutant that survived has a reason, and the page is the one of these results."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

_path = Path(__file__).resolve().parents[2] / "tools" / "mutants.py"
_spec = importlib.util.spec_from_file_location("mutants_tool", _path)
tool = importlib.util.module_from_spec(_spec)


def test_every_survivor_has_a_reason(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "mutants_tool", tool)
    _spec.loader.exec_module(tool)
    rows = list(tool.loaded().values())
    assert tool.report(rows, 0) == 0, capsys.readouterr().out
    assert tool.PAGE.read_text() == tool.page(rows)
    left = next(r for r in rows if r["outcome"] == "survived")
    why = {i: said for i, said in tool.reasons().items() if i != left["id"]}
    for wrong in (why, why | {left["id"]: "because"}, tool.reasons() | {"none": "open: gone."}):
        monkeypatch.setattr(tool, "reasons", lambda wrong=wrong: wrong)
        assert tool.report(rows, 0) == 1
