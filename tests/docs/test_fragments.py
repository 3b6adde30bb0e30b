"""Generated documentation that differs from what is committed is noticed and can be rewritten."""

from __future__ import annotations

import sys
import types

import fragments
import pytest


@pytest.fixture
def generated(tmp_path, monkeypatch):
    """A generator that writes one file, and an empty folder for committed ones."""
    module = types.ModuleType("a_generator")
    module.__spec__ = types.SimpleNamespace(name="a_generator")

    def write(directory):
        (directory / "cells").mkdir()
        (directory / "cells" / "a.md").write_text("new\n", encoding="utf-8")

    module.write = write
    monkeypatch.setitem(sys.modules, "a_generator", module)
    monkeypatch.setattr(fragments, "GENERATORS", ("a_generator:write",))
    monkeypatch.setattr(fragments, "GENERATED", tmp_path)
    monkeypatch.setattr(sys, "argv", ["fragments.py"])
    return tmp_path


def test_drift_is_shown_and_mended(generated):
    (generated / "cells").mkdir()
    (generated / "cells" / "a.md").write_text("old\n", encoding="utf-8")
    (generated / "gone.md").write_text("left over\n", encoding="utf-8")
    differences = fragments.drift()
    assert len(differences) == 2
    assert "-old" in differences[0]
    assert "+new" in differences[0]
    assert fragments.main() == 0
    assert fragments.drift() == []
    assert not (generated / "gone.md").exists()
