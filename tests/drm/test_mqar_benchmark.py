"""The script of the recall table: what it runs, and what it writes."""

from __future__ import annotations

import copy
import importlib
import json
import sys
import time
from pathlib import Path

import pytest
import torch

from pararnn import ParaRNN
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
    made = script.Work(model, preset, (1, 2), 2, 1, "cpu", True)
    return made._replace(**changes)


def test_every_variant_is_run_or_equals_one_that_is(script, tmp_path, monkeypatch):
    planned = []
    monkeypatch.setattr(script, "finished", lambda work, jobs, until: planned.extend(work) or ())
    script.main(["--seeds", "2", "--out", str(tmp_path)])
    published = [w.model for w in planned if w.preset == "published"]
    aliases = script.aliases()
    assert sorted([*published, *(a for names in aliases.values() for a in names)]) == sorted(
        VARIANTS
    )
    assert aliases == {
        "A": ["B"],
        "D": ["E"],
        "J_DIRECT_CONTROL": ["J_DIRECT_CONTROL_MATCHED"],
    }
    assert {w.model for w in planned if w.preset is None} == set(script.CELLS)
    assert {w.model for w in planned if w.preset == "notes"} == set(script.FIRST)
    assert {(w.seeds, w.steps) for w in planned} == {((1, 2), 1000)}


@pytest.mark.parametrize("name", ["J", "J_NO_DIRECTION", "SSM_CONTROL"])
@pytest.mark.parametrize("preset", ["published", "notes"])
def test_together_as_alone(script, name, preset):
    """Trained at once, models end where the library's probe takes each of them."""
    models = [script.DRM(script.configuration(name, preset, s, smoke=True)) for s in (3, 8)]
    # Large steps, so that some gradients are clipped and some losses move.
    for model in models:
        with torch.no_grad():
            model.emitter.head.weight.mul_(20)
    alone = [
        recall_probe(copy.deepcopy(m), seed=s, steps=7, tests=2)
        for m, s in zip(models, (3, 8), strict=True)
    ]
    together = script.recall_together(models, (3, 8), 7, 2, "cpu")
    for one, other in zip(alone, together, strict=True):
        assert other["loss"] == pytest.approx(one.loss, rel=1e-5)
        assert other["accuracy"] == pytest.approx(one.accuracy, abs=1e-12)
    assert alone[0].loss != pytest.approx(alone[1].loss, rel=1e-3)


@pytest.mark.parametrize("name", ["ParaM2RNN", "DeltaMinGRU"])
def test_cells_together_as_alone(script, name):
    made = work(script, name, None)
    models = [script.built(made, seed) for seed in made.seeds]
    answer = copy.deepcopy(models[1])
    alone = recall_probe(answer, seed=2, steps=4, tests=1, answer=lambda x, step: answer(x))
    together = script.recall_together(models, made.seeds, 4, 1, "cpu")
    assert together[1]["loss"] == pytest.approx(alone.loss, rel=1e-5)


def test_states_of_the_matrix_memory(script):
    """The loop's states are those of the layer."""
    torch.manual_seed(1)
    memory = script.MatrixMemory(6, 3, 4)
    x = torch.randn(2, 9, 6)
    states = ParaRNN(memory.cell)(x)[0].unflatten(-1, (3, 4))
    read = torch.einsum("btk,btkv->btv", memory.query(x), states)
    torch.testing.assert_close(memory(x), memory.out(read))


def test_results_are_written_as_they_come(script, tmp_path):
    words = ["--smoke", "--steps=2", "--tests=1", "--seeds=2", "--jobs=2", "--budget=100"]
    models = ["--model=SSM_CONTROL", "--model=DeltaMinGRU"]
    target = script.main([*words, *models, f"--out={tmp_path}"])
    found = json.loads(target.read_text(encoding="utf-8"))
    assert [path.name for path in tmp_path.iterdir()] == [target.name]
    rows = {(r["model"], r["preset"], r["seed"]): r for r in found["rows"]}
    kinds = [("SSM_CONTROL", "published"), ("SSM_CONTROL", "notes"), ("DeltaMinGRU", None)]
    assert set(rows) == {(*kind, seed) for kind in kinds for seed in (1, 2)}
    assert found["planned"] == 6
    here = script.run(work(script, "DeltaMinGRU", None))[1]
    there = rows["DeltaMinGRU", None, 2]
    assert here["loss"] == pytest.approx(there["loss"], rel=1e-6)
    assert here["parameters"] == there["parameters"]


def test_an_error_is_a_result(script, monkeypatch):
    def broken(*arguments):
        raise ValueError("no luck")

    monkeypatch.setattr(script, "recall_together", broken)
    rows = script.run(work(script))
    assert [(r["model"], r["seed"]) for r in rows] == [("J", 1), ("J", 2)]
    assert all("no luck" in r["exception"] and "accuracy" not in r for r in rows)


def test_a_run_that_diverges_ends(script, monkeypatch):
    monkeypatch.setattr(script, "LR", float("inf"))
    with pytest.raises(ValueError, match="not finite"):
        script.recall_together([script.built(work(script), 1)], (1,), 3, 1, "cpu")


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


def test_unknown_models(script, capsys):
    with pytest.raises(SystemExit):
        script.main(["--model", "K"])
    assert "J_NO_METRIC" in capsys.readouterr().err
