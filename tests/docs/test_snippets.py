"""The snippet runner finds every fence, runs what it says it runs, and fails the rest."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

pytest.importorskip("sybil", reason="the snippet runner needs sybil")

import snippets


def fences(tmp_path: Path, text: str) -> list[snippets.Fence]:
    page = tmp_path / "page.md"
    page.write_text(textwrap.dedent(text), encoding="utf-8")
    return snippets.fences(snippets.expand(page))


def outcome(tmp_path: Path, text: str) -> list[str | None]:
    page = tmp_path / "page.md"
    page.write_text(textwrap.dedent(text), encoding="utf-8")
    document = snippets.Page.parse(str(page), snippets.regions)
    return [snippets.evaluate(example) for example in document.examples()]


def only_problem(tmp_path: Path, text: str) -> str:
    (fence,) = fences(tmp_path, text)
    return fence.problem


def test_finds_fences_wherever_they_stand(tmp_path):
    found = fences(
        tmp_path,
        """
        ```python title="a file" hl_lines="1"
        a = 1
        ```

        === "Tab"

            ```python {title="nested" .wide}
            b = 2
            ```

        - item

          ~~~python
          c = 3
          ~~~

        ``` { .python data-skip="needs a GPU" }
        d = 4
        ```

        ````markdown {data-skip="shows a fence"}
        ```python
        e = 5
        ```
        ````
        """,
    )
    assert [fence.source for fence in found[:4]] == ["a = 1\n", "b = 2\n", "c = 3\n", "d = 4\n"]
    assert [fence.language for fence in found] == ["python"] * 4 + ["markdown"]
    assert [fence.problem for fence in found] == [""] * 5
    assert found[0].attributes == {"title": "a file", "hl_lines": "1"}
    assert found[3].attributes == {"data-skip": "needs a GPU"}


@pytest.mark.parametrize(
    ("fence", "message"),
    [
        ("```\nx\n```", "names no language"),
        ("```pyhton\nx\n```", "unknown language 'pyhton'"),
        ("```python\nx", "never closed"),
        ("> ```python\n> x\n> ```", "quotation"),
        ("```python {data-skip=''}\nx\n```", "data-skip is empty"),
        ("```python {data-skpi='why'}\nx\n```", "unknown attribute 'data-skpi'"),
        ("```python data-skip='why'\nx\n```", "in braces"),
        ("```python no run\nx\n```", "cannot be read"),
        ("```console\n$ make\n```", "data-run, data-checked or data-skip"),
        ("```bash {data-checked='tests/nothing.py'}\nmake\n```", "no such file"),
        ("```text\nx\n```", "not the output"),
        ("```diff\nx\n```", "not checked by anything"),
    ],
)
def test_a_fence_nobody_accounts_for_fails(tmp_path, fence, message):
    assert message in only_problem(tmp_path, fence)


def test_output_is_compared_exactly(tmp_path):
    page = "```python\nprint('a')\n```\n\n```text\n{}\n```\n"
    assert outcome(tmp_path, page.format("a")) == [None]
    (message,) = outcome(tmp_path, page.format("b"))
    assert message is not None
    assert "expected:\n    b\ngot:\n    a" in message


def test_ellipsis_only_where_it_is_asked_for(tmp_path):
    page = "```python\nprint('took 3 ms, ok')\n```\n\n```text{}\ntook ... ms, ok\n```\n"
    (message,) = outcome(tmp_path, page.format(""))
    assert message is not None
    assert outcome(tmp_path, page.format(" {data-ellipsis='the time varies'}")) == [None]


def test_text_apart_from_its_program_is_not_its_output(tmp_path):
    python, text = fences(tmp_path, "```python\nprint(1)\n```\n\nwords\n\n```text\n1\n```\n")
    assert python.output is None
    assert "not the output" in text.problem


def test_one_namespace_a_page(tmp_path):
    page = "```python\na = 1\n```\n\n```python\nprint(a + 1)\n```\n```text\n2\n```\n"
    assert outcome(tmp_path, page) == [None, None]


def test_errors_are_shown_and_required(tmp_path):
    page = "```python {data-raises='ValueError'}\nint('x')\n```\n```text\n{}\n```\n"
    message = "ValueError: invalid literal for int() with base 10: 'x'"
    assert outcome(tmp_path, page.replace("{}", message)) == [None]
    (wrong,) = outcome(tmp_path, page.replace("int('x')", "pass"))
    assert "nothing was raised" in wrong
    with pytest.raises(ZeroDivisionError):
        outcome(tmp_path, "```python\n1 / 0\n```\n")


def test_tracebacks_point_into_the_page(tmp_path):
    with pytest.raises(ZeroDivisionError) as caught:
        outcome(tmp_path, "words\n\n```python\nx = 0\n1 / x\n```\n")
    assert caught.traceback[-1].lineno + 1 == 5
    assert Path(caught.traceback[-1].path).name == "page.md"


def test_skipped_python_is_still_compiled(tmp_path):
    with pytest.raises(SyntaxError):
        outcome(tmp_path, "```python {data-skip='why'}\na = = 1\n```\n")
    with pytest.raises(pytest.skip.Exception, match="needs a GPU"):
        outcome(tmp_path, "```python {data-skip='needs a GPU'}\na = 1\n```\n")


def test_console_runs_its_commands(tmp_path):
    page = "```console {data-run='true'}\n$ echo one\none\n$ echo two\n{}\n```\n"
    assert outcome(tmp_path, page.replace("{}", "two")) == [None]
    (message,) = outcome(tmp_path, page.replace("{}", "three"))
    assert "the output differs" in message
    (failed,) = outcome(tmp_path, "```console {data-run='true'}\n$ exit 3\n```\n")
    assert "exits with 3" in failed
    (empty,) = outcome(tmp_path, "```console {data-run='true'}\nls\n```\n")
    assert "no line starts with" in empty


@pytest.mark.parametrize(
    ("language", "good", "bad"),
    [
        ("json", "[1]", "[1"),
        ("toml", "a = 1", "a = "),
        ("yaml", "a: 1", "a: [1"),
        ("bibtex", "@article{key,\n title={A}\n}", "@article{key,\n title={A\n}"),
    ],
)
def test_data_is_parsed(tmp_path, language, good, bad):
    assert outcome(tmp_path, f"```{language}\n{good}\n```\n") == [None]
    (message,) = outcome(tmp_path, f"```{language}\n{bad}\n```\n")
    assert f"not {language}" in message


def test_includes_are_expanded(tmp_path, monkeypatch):
    monkeypatch.setattr(snippets, "ROOT", tmp_path)
    (tmp_path / "part.md").write_text("```python\na = 1\n```\n", encoding="utf-8")
    (tmp_path / "program.py").write_text(
        "# --8<-- [start:tail]\nb = a + 1\n# --8<-- [end:tail]\nraise SystemExit\n",
        encoding="utf-8",
    )
    page = (
        '--8<-- "part.md"\n\n=== "Tab"\n\n    ```python\n    --8<-- "program.py:tail"\n'
        '    --8<-- "program.py:2:2"\n    ```\n\n```python\nprint(b)\n```\n```text\n2\n```\n'
    )
    found = fences(tmp_path, page)
    assert [fence.source for fence in found] == ["a = 1\n", "b = a + 1\nb = a + 1\n", "print(b)\n"]
    assert found[0].opener.place == "part.md:1"
    assert [line.place for line in found[1].body] == ["program.py:2", "program.py:2"]
    assert outcome(tmp_path, page) == [None, None, None]


@pytest.mark.parametrize(
    ("include", "message"),
    [
        ('--8<-- "nowhere.md"', "not a file"),
        ("--8<--\nx.md\n--8<--", "one a line"),
        ('--8<-- "page.md"', "cycle"),
        ('--8<-- "page.md:part"', "no section"),
    ],
)
def test_includes_that_cannot_be_followed(tmp_path, monkeypatch, include, message):
    monkeypatch.setattr(snippets, "ROOT", tmp_path)
    with pytest.raises(snippets.SnippetError, match=message):
        fences(tmp_path, include)
