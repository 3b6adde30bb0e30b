"""Runs the code in README.md and the documentation: every fence is accounted for.

How a fence is treated depends on its language and on attributes in its header line, which
mkdocs keeps (and the site shows a fence's reason for not being run)::

    ```python                               runs; one namespace a page
    ```python {data-raises="ValueError"}    runs and must raise; the output is 'ValueError: ...'
    ```python {data-skip="why"}             is compiled, not run
    ```text                                 right after a Python fence: its exact output
    ```text {data-ellipsis="why"}           the same, where '...' stands for what varies
    ```console {data-run="true"}            runs each '$ ' line and compares what it prints
    ```console {data-checked="tests/x.py"}  not run here; the named test checks it
    ```toml, yaml, json, bibtex             are parsed

Everything else needs `data-skip` with a reason. A fence without a language, in an unknown
language, with an unknown attribute, or one that is never closed, fails. Fences may be indented
(lists, tabs, admonitions); `--8<--` includes are expanded first, as mkdocs does.

`pytest docs README.md` runs it, through the hook in the top `conftest.py`.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from sybil import Document, Example, Region, Sybil

ROOT = Path(__file__).resolve().parent.parent

SHELL = ("console", "bash", "sh")
DATA = ("toml", "yaml", "json", "bibtex")
OTHER = ("text", "diff", "markdown", "html", "css", "javascript", "latex", "make", "cuda")
ATTRIBUTES = ("title", "hl_lines", "linenums", "data-skip", "data-raises", "data-ellipsis",
              "data-run", "data-checked")  # fmt: skip

FENCE = re.compile(r"(?P<indent>[ \t>]*)(?P<marks>`{3,}|~{3,})(?P<header>[^`\n]*)$")
LANGUAGE = re.compile(r"\s*\{?\s*\.?(?P<language>[\w+#-]+)(?=[\s{}]|$)")
PAIR = re.compile(r"""([\w-]+)=(?:"([^"]*)"|'([^']*)')""")
INCLUDE = re.compile(r"""(?P<indent>\s*)-{1,}8<-{1,}\s+(["'])(?P<target>.+?)\2\s*$""")


class SnippetError(Exception):
    """A page that cannot be read as a sequence of fences; the message says where and why."""


# --------------------------------------------------------------------------------------
# Reading: includes, then fences
# --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    text: str
    path: Path
    number: int  # in its own file, from 1

    @property
    def place(self) -> str:
        path = self.path.relative_to(ROOT) if self.path.is_relative_to(ROOT) else self.path
        return f"{path}:{self.number}"


def expand(path: Path, text: str | None = None, depth: int = 0) -> list[Line]:
    """The lines of a page, `--8<--` includes replaced by what they include."""
    if depth > 8:
        raise SnippetError(f"{path}: includes nest deeper than 8 files; is there a cycle?")
    text = path.read_text(encoding="utf-8") if text is None else text
    lines: list[Line] = []
    for number, content in enumerate(text.splitlines(), 1):
        line = Line(content, path, number)
        include = INCLUDE.match(content)
        if include:
            indent = include["indent"]
            for inner in included(include["target"], line, depth):
                lines.append(Line((indent + inner.text).rstrip(), inner.path, inner.number))
        elif re.match(r"\s*-+8<-+\s*$", content):
            raise SnippetError(f'{line.place}: write includes as --8<-- "path", one a line')
        elif "--8<-- [" not in content:  # a section's mark, which mkdocs drops
            lines.append(line)
    return lines


def included(target: str, line: Line, depth: int) -> list[Line]:
    name, _, part = target.partition(":")
    path = ROOT / name
    if not path.is_file():
        raise SnippetError(f"{line.place}: includes {name!r}, which is not a file in the project")
    text = path.read_text(encoding="utf-8")
    if not part:
        return expand(path, text, depth + 1)
    every = text.splitlines()
    if re.fullmatch(r"\d*(:\d*)?", part):
        first, _, last = part.partition(":")
        start, stop = int(first or 1) - 1, int(last or len(every))
    else:
        marks = [
            number
            for number, content in enumerate(every)
            if re.search(rf"--8<--\s+\[(start|end):\s*{re.escape(part)}\s*\]", content)
        ]
        if len(marks) != 2:
            raise SnippetError(f"{line.place}: {name!r} has no section {part!r}")
        start, stop = marks[0] + 1, marks[1]
    chosen = [content if start <= n < stop else "" for n, content in enumerate(every)]
    expanded = expand(path, "\n".join(chosen), depth + 1)
    return [inner for inner in expanded if inner.path != path or start < inner.number <= stop]


@dataclass
class Fence:
    opener: Line
    language: str
    attributes: dict[str, str]
    body: list[Line]
    first: int  # lines of the expanded page, from 0; the closing line included
    last: int
    problem: str = ""
    output: Fence | None = field(default=None, repr=False)

    @property
    def source(self) -> str:
        return textwrap.dedent("\n".join(line.text for line in self.body)) + "\n"


def fences(lines: list[Line]) -> list[Fence]:
    """Every fence of a page, nested indentation removed, outputs joined to their programs."""
    found: list[Fence] = []
    position = 0
    while position < len(lines):
        opening = FENCE.match(lines[position].text)
        if opening is None:
            position += 1
            continue
        close = re.compile(rf"[ \t]*{opening['marks'][0]}{{{len(opening['marks'])},}}[ \t]*$")
        end = position + 1
        while end < len(lines) and not close.match(lines[end].text):
            end += 1
        language, attributes, problem = parse_header(opening["header"])
        if end == len(lines):
            problem = "the fence is never closed"
        if ">" in opening["indent"]:
            problem = "a fence in a quotation is not supported; use an admonition"
        body = lines[position + 1 : end]
        fence = Fence(lines[position], language, attributes, body, position, end, problem)
        previous = found[-1] if found else None
        if (
            previous is not None
            and fence.language == "text"
            and previous.language == "python"
            and previous.output is None
            and "data-skip" not in fence.attributes
            and all(not line.text.strip() for line in lines[previous.last + 1 : position])
        ):
            previous.output = fence
            previous.problem = previous.problem or fence.problem
        else:
            found.append(fence)
        position = end + 1
    for fence in found:
        fence.problem = fence.problem or unaccounted(fence)
    return found


def parse_header(header: str) -> tuple[str, dict[str, str], str]:
    match = LANGUAGE.match(header)
    language = match["language"] if match else ""
    rest = header[match.end() :] if match else header
    attributes = {key: double or single for key, double, single in PAIR.findall(rest)}
    left = re.sub(r"[.#][\w-]+|[{}\s]", "", PAIR.sub("", rest))
    if not language:
        return "", attributes, "the fence names no language"
    if left:
        return language, attributes, f"the header {header.strip()!r} cannot be read at {left!r}"
    dashed = [key for key in attributes if "-" in key]
    if dashed and "{" not in header:
        return language, attributes, f'write the attributes in braces: {{{dashed[0]}="..."}}'
    return language, attributes, ""


def unaccounted(fence: Fence) -> str:
    """Why nothing says how this fence is checked, or an empty string."""
    for key, value in fence.attributes.items():
        if key not in ATTRIBUTES:
            return f"unknown attribute {key!r}; known are {', '.join(ATTRIBUTES)}"
        if key.startswith("data-") and not value.strip():
            return f"{key} is empty; give its reason or value"
    if fence.language not in ("python", *SHELL, *DATA, *OTHER):
        return f"unknown language {fence.language!r}"
    if "data-skip" in fence.attributes or fence.language in ("python", *DATA):
        return ""
    if fence.language in SHELL:
        if "data-run" in fence.attributes:
            return ""
        test = fence.attributes.get("data-checked")
        if test:
            return "" if (ROOT / test).exists() else f"data-checked names {test}: no such file"
        return (
            f"a {fence.language} fence is not run by itself: give data-run, data-checked or "
            "data-skip"
        )
    if fence.language == "text":
        return "a text fence that is not the output of the Python fence before it: give data-skip"
    return f"a {fence.language} fence is not checked by anything: give data-skip with a reason"


# --------------------------------------------------------------------------------------
# Running
# --------------------------------------------------------------------------------------


def evaluate(example: Example) -> str | None:
    """Runs one fence; returns what is wrong with it, or None."""
    __tracebackhide__ = True
    fence: Fence = example.parsed
    if fence.problem:
        return f"{fence.opener.place}: {fence.problem}"
    if "data-skip" in fence.attributes:
        if fence.language == "python":
            compiled(fence)
        pytest.skip(f"{fence.opener.place}: {fence.attributes['data-skip']}")
    if fence.language == "python":
        return run_python(fence, example.namespace)
    if fence.language in DATA:
        return parse_data(fence)
    if "data-run" in fence.attributes:
        return run_console(fence)
    return None  # data-checked: the test named there does the work


def compiled(fence: Fence) -> Any:
    place = fence.body[0] if fence.body else fence.opener
    padded = "\n" * (place.number - 1) + fence.source
    return compile(padded, str(place.path), "exec", dont_inherit=True)


def run_python(fence: Fence, namespace: dict[str, Any]) -> str | None:
    __tracebackhide__ = True
    namespace.setdefault("__name__", "__snippet__")
    expected_error = fence.attributes.get("data-raises")
    raised: Exception | None = None
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        try:
            exec(compiled(fence), namespace)
        except Exception as error:
            if type(error).__name__ != expected_error:
                raise
            raised = error
    got = printed.getvalue()
    if expected_error:
        if raised is None:
            return f"{fence.opener.place}: expected {expected_error}; nothing was raised"
        got += f"{expected_error}: {raised}\n"
    return compare(fence.output, got) if fence.output else None


def run_console(fence: Fence) -> str | None:
    environment = dict(os.environ, NO_COLOR="1", COLUMNS="80", TERM="dumb")
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    transcript = ""
    for command in re.findall(r"^\$ (.+)$", fence.source, re.MULTILINE):
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=ROOT,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        if done.returncode:
            return f"{fence.opener.place}: {command!r} exits with {done.returncode}:\n{done.stdout}"
        transcript += f"$ {command}\n{done.stdout}"
    if not transcript:
        return f"{fence.opener.place}: data-run, but no line starts with '$ '"
    return compare(fence, transcript)


def compare(expected: Fence, got: str) -> str | None:
    # Pages have no trailing spaces, and a page's blank line may stand for a line of spaces.
    want, have = (
        "\n".join(line.rstrip() for line in text.rstrip().splitlines())
        for text in (expected.source, got)
    )
    if "data-ellipsis" in expected.attributes:
        pattern = re.escape(want).replace(re.escape("..."), "[^\n]*?")
        same = re.fullmatch(pattern, have) is not None
    else:
        same = want == have
    if same:
        return None
    return (
        f"{expected.opener.place}: the output differs.\nexpected:\n"
        f"{textwrap.indent(want, '    ')}\ngot:\n{textwrap.indent(have, '    ')}"
    )


def parse_data(fence: Fence) -> str | None:
    try:
        if fence.language == "toml":
            tomllib.loads(fence.source)
        elif fence.language == "json":
            json.loads(fence.source)
        elif fence.language == "yaml":
            yaml.safe_load(fence.source)
        else:
            check_bibtex(fence.source)
    except (ValueError, yaml.YAMLError) as error:
        return f"{fence.opener.place}: not {fence.language}: {error}"
    return None


def check_bibtex(source: str) -> None:
    if not re.match(r"\s*@\w+\{[\w:.+/-]+,", source):
        raise ValueError("an entry starts with @kind{key,")
    if source.count("{") != source.count("}"):
        raise ValueError("the braces do not balance")


# --------------------------------------------------------------------------------------
# Sybil and pytest
# --------------------------------------------------------------------------------------


class Page(Document):
    """A Markdown page whose text has its includes expanded."""

    lines: list[Line]

    @classmethod
    def parse(cls, path: str, *parsers: Any, encoding: str = "utf-8") -> Page:
        lines = expand(Path(path))
        page = cls("".join(f"{line.text}\n" for line in lines), path)
        page.lines = lines
        for parser in parsers:
            for region in parser(page):
                page.add(region)
        return page


def regions(page: Page) -> Iterator[Region]:
    starts = [0]
    for line in page.lines:
        starts.append(starts[-1] + len(line.text) + 1)
    for fence in fences(page.lines):
        last = fence.output.last if fence.output else fence.last
        end = starts[min(last + 1, len(page.lines))]
        yield Region(starts[fence.first], end, fence, evaluate)


_collect = Sybil([regions], patterns=["*.md"], path=str(ROOT), document_types={".md": Page})
_collect_file = _collect.pytest()


def pytest_collect_file(file_path: Path, parent: Any) -> Any:
    """Collects the pages in docs and the Markdown files at the top; fragments run in their page."""
    docs = ROOT / "docs"
    if file_path.parent != ROOT and not file_path.is_relative_to(docs):
        return None
    if file_path.is_relative_to(docs / "_generated"):
        return None
    return _collect_file(file_path, parent)
