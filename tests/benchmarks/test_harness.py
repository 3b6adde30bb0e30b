"""The harness: what a run says of itself, rows that raise, lines of JSON, and work in processes."""

from __future__ import annotations

import importlib
import json
import math
import time
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def script(monkeypatch):
    if not FOLDER.is_dir():
        pytest.skip("the benchmarks are not part of an installed package")
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("harness")


@pytest.fixture
def sessions(script):
    return importlib.import_module("sessions")


@pytest.mark.parametrize("value", [math.nan, math.inf, 1.0000001])
def test_a_row_passes_only_within_its_tolerance(script, value):
    def row(*parts):
        return script.checked(
            {}, lambda: {"errors": {str(i): {"of tolerance": p} for i, p in enumerate(parts)}}
        )

    assert row(0.0, 1.0)["ok"]
    assert not row(0.0, value)["ok"]
    assert not row()["ok"]  # nothing was compared


def test_a_check_that_raises_is_a_row_that_failed(script, capsys):
    def broken():
        raise RuntimeError("no luck")

    row = script.checked({"case": 1}, broken)
    assert (row["case"], row["ok"]) == (1, False)
    assert "no luck" in row["exception"]
    script.tell("one", row)
    assert "FAIL one: RuntimeError: no luck" in capsys.readouterr().out
    assert "no luck" in script.attempt({"cell": "A"}, broken)["exception"]
    assert script.attempt({"cell": "A"}, lambda: {"both": 1}) == {"cell": "A", "both": 1}


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({}, 0),
        ({"checks": [{"ok": True}, {"ok": False}]}, 1),
        ({"giant": {"ok": False}}, 1),
        ({"failures": {"scan": "Traceback"}}, 1),
        ({"scan": [{"exception": "no luck"}]}, 1),
        ({"layers": [{"library": "mingru-scans", "exception": "no luck"}]}, 0),
        ({"peers": [{"peer": "fla", "exception": "no luck"}]}, 0),
    ],
)
def test_exit_status(sessions, change, status, tmp_path):
    found = {"failures": {}, "skipped": [], "checks": [{"ok": True}], "giant": {"ok": True}}
    assert sessions.verdict(found | change, tmp_path) == status


def test_lines_of_json(script, tmp_path, capsys):
    path = tmp_path / "lines.jsonl"
    script.add_line(path, {"a": 1})
    script.add_line(path, {"b": [2.5, None]})
    text = path.read_text(encoding="utf-8")
    assert list(script.read_lines(text)) == [{"a": 1}, {"b": [2.5, None]}]
    with pytest.raises(ValueError, match="Expecting"):
        list(script.read_lines(text + '{"c": '))
    assert list(script.read_lines(text + '{"c": ', cut=True)) == [{"a": 1}, {"b": [2.5, None]}]
    script.emit({"a": 3})
    said = "noise\n" + capsys.readouterr().out
    assert list(script.read_lines(said, "ROW ")) == [{"a": 3}]


def test_a_record_says_where_and_how(script, monkeypatch):
    words = ["x.py", "--peer", "/tmp/p", "--out", "/tmp/o", "--revision", "abc", "--smoke"]
    monkeypatch.setattr("sys.argv", words)
    found = script.record("python x.py", "cpu", "abc", dtype="float32")
    assert found["command"] == "python x.py --peer DIR --smoke"
    assert (found["revision"], found["torch"], found["dtype"]) == (
        "abc",
        torch.__version__,
        "float32",
    )
    assert "CPU" in found["device"]
    json.dumps(found)


def test_calls_take_turns(script):
    order = []
    times = script.turns({n: lambda n=n: order.append(n) for n in "ab"}, 3)
    assert "".join(order) == "abababab"
    assert set(times) == {"a", "b"}
    order.clear()
    script.turns({n: lambda n=n: order.append(n) for n in "ab"}, 99, patience=0.0)
    assert len(order) == 2 * (1 + 3)


def test_work_in_processes(sessions):
    tasks = [(math.sqrt, 4.0), (math.sqrt, -1.0)]
    found = dict(sessions.pooled(tasks, 2, math.inf))
    assert found[4.0] == 2.0
    assert isinstance(found[-1.0], ValueError)


@pytest.mark.slow
def test_what_does_not_end_in_time_is_told(sessions):
    begin = time.perf_counter()
    found = list(sessions.pooled([(time.sleep, 300.0)], 1, 5.0))
    assert [(job, type(result)) for job, result in found] == [(300.0, TimeoutError)]
    assert time.perf_counter() - begin < 100


def test_sections_are_rows_of_cases(script, sessions):
    class One(sessions.Session):
        topic = script = "x"

    args = script.parser("About.", ("some",), 100).parse_args(["--smoke"])
    session = One(args)
    session.rows("some", [(1,), (0,)], lambda n: {"n": 1 / n})
    assert session.found["some"][0] == {"n": 1.0}
    assert session.found["some"][1]["case"] == "(0,)"
    assert "ZeroDivisionError" in session.found["some"][1]["exception"]
    assert session.left() == math.inf
    assert math.isnan(session.milliseconds(1))
    session.smoke, session.budget = False, 0
    session.rows("more", [(1,)], lambda n: {"n": n})
    assert session.found["more"] == []
    assert session.found["skipped"] == ["more (1,)"]
