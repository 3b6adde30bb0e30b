"""The script of the recall table: what it runs, and what it writes."""

from __future__ import annotations

import importlib
import json
import sys
import time
from pathlib import Path

import pytest
import torch

from pararnn.drm import VARIANTS, recall_probe

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def script():
    """Imported by name, as the processes of its pool do."""
    folder = ROOT / "benchmarks"
    if not folder.is_dir():
        pytest.skip("the benchmarks are not part of an installed package")
    before = list(sys.path)
    sys.path.insert(0, str(folder))
    yield importlib.import_module("drm_mqar")
    sys.path[:] = before


def work(script, model="J", preset="published", **changes):
    made = script.Work(model, preset, 1, 2, 1, "cpu", True)
    return made._replace(**changes)


def test_every_variant_is_run_or_equals_one_that_is(script, tmp_path, monkeypatch):
    planned = []
    monkeypatch.setattr(script, "finished", lambda work, jobs, until: planned.extend(work) or ())
    script.main(["--seeds", "2", "--out", str(tmp_path)])
    published = [w.model for w in planned if w.preset == "published" and w.seed == 1]
    aliases = script.aliases()
    assert sorted([*published, *(a for names in aliases.values() for a in names)]) == sorted(
        VARIANTS
    )
    assert aliases == {
        "A": ["B"],
        "D": ["E"],
        "J_DIRECT_CONTROL": ["J_DIRECT_CONTROL_MATCHED"],
    }
    assert [w.seed for w in planned] == sorted(w.seed for w in planned)
    first = [(w.model, w.preset) for w in planned if w.seed == 1]
    assert first == [(w.model, w.preset) for w in planned if w.seed == 2]
    assert {(name, None) for name in script.CELLS} <= set(first)
    assert {w.steps for w in planned} == {1000}


def test_results_are_written_as_they_come(script, tmp_path):
    words = ["--smoke", "--steps=2", "--tests=1", "--seeds=1", "--jobs=2", "--budget=100"]
    models = ["--model=SSM_CONTROL", "--model=DeltaMinGRU"]
    target = script.main([*words, *models, f"--out={tmp_path}"])
    found = json.loads(target.read_text(encoding="utf-8"))
    assert [path.name for path in tmp_path.iterdir()] == [target.name]
    rows = {(r["model"], r["preset"]): r for r in found["rows"]}
    assert set(rows) == {
        ("SSM_CONTROL", "published"),
        ("SSM_CONTROL", "notes"),
        ("DeltaMinGRU", None),
    }
    assert found["planned"] == 3
    here = script.run(work(script, "DeltaMinGRU", None))
    there = rows["DeltaMinGRU", None]
    assert here["loss"] == pytest.approx(there["loss"], rel=1e-6)
    assert here["parameters"] == there["parameters"]


def test_an_error_is_a_result(script, monkeypatch):
    def broken(*arguments, **settings):
        raise ValueError("no luck")

    monkeypatch.setattr(script, "recall_probe", broken)
    row = script.run(work(script))
    assert row["model"] == "J"
    assert "no luck" in row["exception"]
    assert "accuracy" not in row


def test_nothing_is_waited_for_when_the_time_is_over(script):
    assert list(script.finished([work(script)], 1, time.perf_counter() - 1)) == []


@pytest.mark.parametrize("name", ["ParaM2RNN", "DeltaMinGRU"])
def test_cells_beside_the_drm(script, name):
    """They are causal, and every part of them takes part."""
    torch.manual_seed(0)
    model = script.Recurrent(name, 8)
    tokens = torch.randint(script.VOCABULARY, (2, 11))
    other = tokens.clone()
    other[:, 6:] = (tokens[:, 6:] + 1) % script.VOCABULARY
    one, two = model(tokens), model(other)
    assert one.shape == (2, 11, script.VOCABULARY)
    torch.testing.assert_close(one[:, :6], two[:, :6], rtol=1e-5, atol=1e-6)
    assert (one[:, 6:] - two[:, 6:]).abs().amax(-1).gt(1e-3).all()
    one.square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in model.parameters())
    assert recall_probe(model, answer=model, steps=1, tests=1, batch=2).steps == 1


def test_unknown_models(script, capsys):
    with pytest.raises(SystemExit):
        script.main(["--model", "K"])
    assert "J_NO_METRIC" in capsys.readouterr().err
