"""The probe grid gives the numbers of single runs, goes on after a kill, and fits its page."""

from __future__ import annotations

import dataclasses
import importlib
import json

import pytest
import torch

from pararnn.tasks import MODELS, Evaluation, Protocol, probe

SMALL = Protocol(
    steps=6,
    length=9,
    batch=16,
    width=16,
    every=2,
    check=Evaluation(2, 9, 2),
    validation=Evaluation(5, 12, 2),
    fitted=Evaluation(6, 12, 2),
    final=(Evaluation(3, 9, 2), Evaluation(4, 20, 1)),
)
ROWS = """
[[row]]
id = "one"
section = "ladder"
task = "S3"
model = "signed"
seeds = 2
select = "best"

[[row]]
id = "two"
section = "time"
task = "session-parity"
model = "signed-decay"
seeds = [3]
"""


@pytest.fixture
def script(monkeypatch, request):
    root = request.config.rootpath
    monkeypatch.syspath_prepend(str(root / "benchmarks"))
    module = importlib.import_module("probe_runs")
    monkeypatch.setattr(module, "PUBLISHED", SMALL)
    return module


@pytest.fixture
def runner(script):
    """What hands the rows out."""
    return importlib.import_module("probe_grid")


@pytest.mark.parametrize("select", ["early", "best"])
@pytest.mark.parametrize(
    ("task", "model", "layers"),
    [("S3", "signed", None), ("S3-hier", "signed+givens", None), ("parity", "GRU", 2),
     ("session-parity", "signed-decay", None)],
)  # fmt: skip
def test_a_row_gives_the_numbers_of_single_runs(script, select, task, model, layers):
    """Bit for bit: the same weights, batches, checks and scores, also from streams in a file."""
    row = script.Row("r", "s", task, model, (0, 4), layers, select=select)
    found: list[dict] = []
    script.train([row], torch.device("cpu"), None, True, found.append)
    assert [f["seed"] for f in found] == [0, 4]
    for f in found:
        one = probe(
            task, MODELS[model], seed=f["seed"], n_layers=layers,
            protocol=dataclasses.replace(SMALL, select=select),
        )  # fmt: skip
        assert f["scores"] == one.scores
        assert (f["steps"], f["kept"], f["fitted"], f["fit"]) == (
            one.steps, one.kept, one.fitted, one.fit
        )  # fmt: skip
        assert f["parameters"] == one.parameters
        assert f["checks"] == [[c.step, round(c.loss, 6), round(c.score, 6)] for c in one.checks]


def test_rows_together_give_the_numbers_of_rows_alone(script):
    """Rows that end at different steps, each with seeds of its own."""
    rows = [
        script.Row("a", "s", "S3", "signed", (0, 4), select="best"),
        script.Row("b", "s", "parity", "GRU", (1,), 2, steps=3),
        script.Row("c", "s", "session-parity", "signed-decay", (2,), steps=9),
    ]
    found: list[dict] = []
    parts: list[float] = []
    script.train(rows, torch.device("cpu"), None, True, found.append, parts.append, together=True)
    alone: list[dict] = []
    for row in rows:
        script.train([row], torch.device("cpu"), None, True, alone.append)
    assert [f["id"] for f in found] == ["b", "a", "a", "c"]
    assert parts == sorted(parts)
    assert parts[-1] == 1.0
    varies = {"seconds", "together"}
    for one in alone:
        (same,) = [f for f in found if (f["id"], f["seed"]) == (one["id"], one["seed"])]
        assert {k: v for k, v in same.items() if k not in varies} == {
            k: v for k, v in one.items() if k not in varies
        }


def test_a_run_that_is_late_is_measured_and_not_finished(script, runner, tmp_path):
    """As a run with so many steps, but it will be run again."""
    row = script.Row("r", "s", "S3", "signed", (0,), select="best")
    late: list[dict] = []
    script.train([row], torch.device("cpu"), None, True, late.append, until=0.0)
    short: list[dict] = []
    script.train([dataclasses.replace(row, steps=2)], torch.device("cpu"), None, True, short.append)
    assert late[0]["cut"]
    assert late[0]["steps"] == 2
    assert late[0]["scores"] == short[0]["scores"]
    out = tmp_path / "out.jsonl"
    out.write_text("".join(json.dumps(f) + "\n" for f in late), encoding="utf-8")
    assert runner.finished(out) == set()
    out.write_text("".join(json.dumps(f) + "\n" for f in short), encoding="utf-8")
    assert runner.finished(out) == {("r", 0)}


def test_jobs(script, runner):
    """Every seed of every row once, at most so many together, and more important ones first."""
    rows = script.grid()
    jobs = runner.bundled(rows, 16)
    pairs = [(r.id, s) for job in jobs for r in job.rows for s in r.seeds]
    assert sorted(pairs) == sorted((r.id, s) for r in rows for s in r.seeds)
    assert max(job.seeds for job in jobs) <= 16
    priorities = [r.priority for job in jobs for r in job.rows]
    assert priorities == sorted(priorities)


def test_streams_in_files(script, tmp_path):
    """A stream that another row needs for longer begins with the same batches."""
    row = script.Row("r", "s", "session-parity", "signed", (5,))
    longer = dataclasses.replace(row, id="l", steps=9)
    (item,) = script.wanted([row, longer])
    assert item.steps == 9
    script.draw(item, tmp_path)
    here = script.loaded(row, 5, row.protocol(), None)
    there = script.loaded(row, 5, row.protocol(), tmp_path)
    assert here.keys() == there.keys() == {"x", "y", "dt"}
    for key, value in here.items():
        assert torch.equal(value, there[key])


def test_batches_are_remembered_as_they_are_drawn(script):
    task = script.TASKS["S3"]
    again = script.remembered(task, torch.device("cpu"))
    for _ in range(2):
        plain, kept = (torch.Generator().manual_seed(5) for _ in range(2))
        for length in (4, 7, 4):
            a, b = task.draw(plain, 3, length), again.draw(kept, 3, length)
            assert torch.equal(a.x, b.x)
            assert torch.equal(a.y, b.y)


@pytest.mark.slow
def test_a_run_goes_on_where_it_was(script, runner, tmp_path, monkeypatch):
    """Also after a line that was cut off."""
    rows, out = tmp_path / "rows.toml", tmp_path / "out.jsonl"
    rows.write_text(ROWS, encoding="utf-8")
    command = ["--grid", str(rows), "--out", str(out), "--steps", "1"]
    runner.main(command)
    lines = out.read_text(encoding="utf-8").splitlines()
    assert [(e["id"], e["seed"]) for e in map(json.loads, lines)] == [
        ("one", 0),
        ("one", 1),
        ("two", 3),
    ]
    out.write_text("\n".join([lines[0], lines[2], lines[1][:40]]), encoding="utf-8")
    args = runner.options([*command])
    assert [(r.id, r.seeds) for r in runner.planned(args)] == [("one", (1,))]
    runner.main(command)
    after = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert sorted((e["id"], e["seed"]) for e in after) == [("one", 0), ("one", 1), ("two", 3)]
    first, new = json.loads(lines[1]), next(e for e in after if (e["id"], e["seed"]) == ("one", 1))
    assert new["scores"] == first["scores"]


def test_every_row_can_be_built(script):
    for row in {(r.task, r.model, r.layers): r for r in script.grid()}.values():
        model = script.built(script.TASKS[row.task], row.model, row.layers, 16)
        assert sum(p.numel() for p in model.parameters()) > 0


def test_unknown_names_are_errors(script, tmp_path):
    bad = tmp_path / "bad.toml"
    bad.write_text(ROWS.replace('"signed"', '"sigend"'), encoding="utf-8")
    with pytest.raises(ValueError, match="sigend"):
        script.grid(bad)
    bad.write_text(ROWS.replace('"two"', '"one"'), encoding="utf-8")
    with pytest.raises(ValueError, match="two rows"):
        script.grid(bad)
