"""Every public name is documented: on the API page or, for cells, on their cards."""

from __future__ import annotations

import re
from pathlib import Path

import pararnn
from pararnn import drm

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_every_public_name_is_documented():
    text = (DOCS / "api.md").read_text(encoding="utf-8")
    for card in (DOCS / "cells").glob("*.md"):
        text += card.read_text(encoding="utf-8")
    documented = set(re.findall(r"\b\w+\b", text))
    public = {name for name in pararnn.__all__ if not name.startswith("_")}
    assert sorted(public - documented) == []


def test_every_cell_is_on_the_api_page_and_in_the_readme():
    api = (DOCS / "api.md").read_text(encoding="utf-8")
    readme = (DOCS.parent / "README.md").read_text(encoding="utf-8")
    for entry in map(pararnn.get_cell, pararnn.cell_names()):
        name = entry.kind.__name__
        assert f"[{name}](cells/{entry.slug}.md)" in api
        assert re.search(rf"^\| `{name}[(`]", readme, re.MULTILINE), name


def test_every_public_name_of_the_drm_has_its_place():
    pages = [*(DOCS / "cells").glob("drm*.md"), *DOCS.glob("drm*.md")]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    placed = re.findall(r"^::: pararnn\.drm\.(?:\w+\.)?(\w+)$", text, re.MULTILINE)
    assert len(placed) == len(set(placed))
    constants = {name for name in drm.__all__ if name.isupper() and name != "DRM"}
    assert sorted(set(drm.__all__) - constants - set(placed)) == []
    assert all(f"`{name}`" in text or f"drm.{name}`" in text for name in constants)
