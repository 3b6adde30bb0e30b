"""Every public name is documented: on the API page or, for cells, on their cards."""

from __future__ import annotations

import re
from pathlib import Path

import pararnn

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_every_public_name_is_documented():
    text = (DOCS / "api.md").read_text(encoding="utf-8")
    for card in (DOCS / "cells").glob("*.md"):
        text += card.read_text(encoding="utf-8")
    documented = set(re.findall(r"\b\w+\b", text))
    public = {name for name in pararnn.__all__ if not name.startswith("_")}
    assert sorted(public - documented) == []
