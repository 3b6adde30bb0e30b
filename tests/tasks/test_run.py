"""Runs of the probe tasks: what is drawn and trained, which weights are kept, what comes out."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from torch import Generator, nn

from pararnn.tasks import (
    MODELS,
    PROTOCOLS,
    TASKS,
    WORDS,
    Evaluation,
    Protocol,
    Record,
    Result,
    Tagger,
    evaluate,
    probe,
)

SMALL = Protocol(
    steps=6,
    length=9,
    batch=16,
    width=8,
    every=2,
    check=Evaluation(2, 9, 2),
    validation=Evaluation(5, 12, 2),
    fitted=Evaluation(6, 12, 2),
    final=(Evaluation(3, 9, 2), Evaluation(4, 20, 1)),
)


def small(**changes):
    return dataclasses.replace(SMALL, **changes)


def test_seeds_of_the_word_problems():
    """Fixed, and different from the seeds of all training streams."""
    assert (WORDS.check.seed, WORDS.check.length, WORDS.check.batches) == (2, 64, 2)
    assert (WORDS.validation.seed, WORDS.validation.length) == (6, 128)
    assert (WORDS.fitted.seed, WORDS.fitted.length) == (5, 128)
    assert [(e.seed, e.length, e.batches) for e in WORDS.final] == [
        (3, 64, 4),
        (4, 256, 4),
        (4, 512, 4),
        (4, 1024, 4),
    ]
    for protocol in (WORDS, *PROTOCOLS.values()):
        for e in (protocol.check, protocol.validation, protocol.fitted, *protocol.final):
            assert e.seed % 10_000 != 1
        judging = {protocol.fitted.seed, *(e.seed for e in protocol.final)}
        assert not {protocol.check.seed, protocol.validation.seed} & judging
    assert set(PROTOCOLS) < set(TASKS)


@pytest.mark.parametrize("seed", [0, 3])
def test_a_run_by_hand(seed):
    """The same training written out: seeds, order of construction, loss, optimizer."""
    result = probe("S3", "GRU", seed=seed, protocol=SMALL)
    generator = Generator().manual_seed(1 + 10_000 * seed)
    torch.manual_seed(seed)
    embedding, gru = nn.Embedding(6, 8), nn.GRU(8, 8, batch_first=True)
    head = nn.Linear(8, 6)
    weights = [p for m in (embedding, gru, head) for p in m.parameters()]
    adam = torch.optim.Adam(weights, lr=3e-3)
    losses = []
    for _ in range(6):
        batch = TASKS["S3"].draw(generator, 16, 9)
        answers = head(gru(embedding(batch.x))[0])
        loss = nn.functional.cross_entropy(answers.transpose(1, 2), batch.y)
        adam.zero_grad()
        loss.backward()
        adam.step()
        losses.append(float(loss.detach()))
    assert [c.step for c in result.checks] == [2, 4, 6]
    torch.testing.assert_close([c.loss for c in result.checks], losses[1::2], rtol=1e-5, atol=0)
    assert result.parameters == sum(w.numel() for w in weights)
    for evaluation in SMALL.final:
        g, right = Generator().manual_seed(evaluation.seed), []
        for _ in range(evaluation.batches):
            batch = TASKS["S3"].draw(g, 16, evaluation.length)
            right.append(head(gru(embedding(batch.x))[0]).argmax(-1) == batch.y)
        assert result.scores[evaluation.label] == pytest.approx(
            float(torch.cat(right).double().mean()), abs=0.02
        )


def test_twice_the_same_and_nothing_left_behind():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = probe("parity", "GRU", protocol=SMALL)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(3)
    again = probe("parity", "GRU", protocol=SMALL)
    assert dataclasses.replace(again, seconds=first.seconds) == first
    assert probe("parity", "GRU", seed=1, protocol=SMALL).checks != first.checks


def test_early_stop_at_the_first_check_that_reaches_the_goal():
    whole = probe("parity", "GRU", protocol=small(goal=2.0))
    assert (whole.steps, whole.kept) == (6, 6)
    reached = probe("parity", "GRU", protocol=small(goal=whole.checks[1].score))
    scores = [c.score for c in reached.checks]
    assert scores == [c.score for c in whole.checks[: len(scores)]]
    assert scores[-1] >= whole.checks[1].score
    assert all(s < whole.checks[1].score for s in scores[:-1])
    assert reached.steps == reached.kept == reached.checks[-1].step < 6


def test_best_weights_are_kept_and_measured():
    """With so large a learning rate, the last weights are not the best ones."""
    result = probe("parity", "GRU", protocol=small(select="best", lr=1.0, steps=12))
    scores = [c.score for c in result.checks]
    assert result.steps == 12
    assert scores[-1] < max(scores)
    assert result.kept == result.checks[scores.index(max(scores))].step
    # stopped there, the same weights are judged, by batches that did not choose them
    there = probe("parity", "GRU", protocol=small(goal=2.0, lr=1.0, steps=result.kept))
    assert (result.fitted, result.scores) == (there.fitted, there.scores)
    resting = probe("parity", "GRU", protocol=small(select="best", lr=0.0))
    assert resting.kept == 2  # the first of equals


def test_squared_errors():
    # a budget that is no multiple of the checks' distance ends with a check
    result = probe("pendulum", "GRU", protocol=small(steps=3, select="best", fit=-0.5))
    assert [c.step for c in result.checks] == [2, 3]
    assert all(c.score < 0 for c in result.checks)
    assert 0.5 < result.fitted / -max(c.score for c in result.checks) < 2
    assert all(score > 0 for score in result.scores.values())
    assert result.fit == (result.fitted <= 0.5)


def test_an_evaluation_is_of_a_module_at_rest():
    model = nn.Sequential(nn.Embedding(2, 4), nn.Dropout(0.5), nn.Linear(4, 2))

    class Timeless(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, x, dt):
            assert not torch.is_grad_enabled()
            assert not self.training
            return self.inner(x)

    module = Timeless()
    first, again = (evaluate(module, TASKS["parity"], Evaluation(7, 10, 2)) for _ in range(2))
    assert first == again
    assert module.training


def test_a_result_is_data():
    seen = []
    result = probe("MQAR", "GRU", n_layers=2, protocol=small(length=30, final=(
        Evaluation(4, 60, 1, {"pairs": 16}),), check=Evaluation(2, 30, 1),
        fitted=Evaluation(7, 30, 1)), watch=seen.append)  # fmt: skip
    assert tuple(seen) == result.checks
    data = json.loads(json.dumps(result.to_dict()))
    assert list(data["scores"]) == ["60 pairs=16"]
    assert data["n_layers"] == 2
    assert data["protocol"]["steps"] == 6
    assert data["checks"][0]["step"] == 2
    assert Result.from_dict(data) == result
    assert str(result).startswith("MQAR GRU L=2 seed 0: @60 pairs=16 0.")


def test_the_time_feature():
    """Log of one plus the gap, as one more input."""
    torch.manual_seed(0)
    tagger = Tagger(TASKS["session-parity"], MODELS["GRU"], width=5)
    assert tagger.core.input_size == 6
    x, dt = torch.tensor([[1, 0, 1]]), torch.tensor([[0.0, 0.5, 60.0]])
    want, _ = tagger.core(torch.cat((tagger.embed(x), torch.log(1 + dt)[..., None]), -1))
    torch.testing.assert_close(tagger(x, dt), tagger.head(want))
    with pytest.raises(ValueError, match="has time gaps, got none"):
        tagger(x)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("parity2", "GRU"), "task: got 'parity2', expected one of parity, S3"),
        (("parity", "RNN"), "model: got 'RNN', expected one of GRU, log"),
        (("parity", "signed-decay"), "decays with time, but the task parity has no time gaps"),
        (("S3", "signed+givens", 3), "names 2 layers; leave it out"),
    ],
)
def test_runs_that_cannot_be(arguments, message):
    task, model, *layers = arguments
    with pytest.raises(ValueError, match=message):
        probe(task, model, n_layers=layers[0] if layers else None, protocol=SMALL)


class Stop(Exception):
    pass


def stopping(step, error):
    def watch(check):
        if check.step == step:
            raise error

    return watch


def events(folder):
    (path,) = folder.glob("*.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(("task", "select"), [("S3", "early"), ("pendulum", "best")])
@pytest.mark.parametrize("error", [KeyboardInterrupt, Stop])
def test_a_stopped_run_goes_on_to_the_same_result(tmp_path, task, select, error):
    """Bit for bit; with a learning rate at which the last weights are not the best ones."""
    protocol = small(steps=12, select=select, lr=0.3, goal=2.0)
    whole = probe(task, "signed", protocol=protocol)
    for step in (4, 10):
        with pytest.raises(error):
            probe(task, "signed", protocol=protocol, record=tmp_path, watch=stopping(step, error))
        *_, last = events(tmp_path)
        assert last["event"] == "stopped"
        assert last["kept"] == step
        assert last["note"].startswith("partial: no result")
        assert [e["step"] for e in events(tmp_path)[1:-1]] == list(range(2, step + 1, 2))
    before = torch.get_rng_state()
    found = probe(task, "signed", protocol=protocol, record=tmp_path)
    assert torch.equal(torch.get_rng_state(), before)
    assert dataclasses.replace(found, seconds=whole.seconds) == whole
    assert found.seconds > 0
    assert [e["event"] for e in events(tmp_path)] == ["run", *["check"] * 6, "result"]
    assert [p.suffix for p in tmp_path.iterdir()] == [".jsonl"]
    assert probe(task, "signed", protocol=protocol, record=tmp_path) == found  # runs no more


def test_a_run_that_was_killed_goes_on(tmp_path, monkeypatch):
    """Nothing could be written at the end: no line says that it was stopped."""
    whole = probe("parity", "GRU", protocol=SMALL)
    monkeypatch.setattr(Record, "stopped", lambda *_: None)
    with pytest.raises(Stop):
        probe("parity", "GRU", protocol=SMALL, record=tmp_path, watch=stopping(4, Stop))
    assert [e["event"] for e in events(tmp_path)] == ["run", "check", "check"]
    found = probe("parity", "GRU", protocol=SMALL, record=tmp_path)
    assert dataclasses.replace(found, seconds=whole.seconds) == whole


def test_a_run_that_is_stopped_before_its_first_check(tmp_path):
    def draw(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        probe(dataclasses.replace(TASKS["S3"], draw=draw), "GRU", protocol=SMALL, record=tmp_path)
    assert events(tmp_path)[-1]["kept"] == 0
    found = probe("S3", "GRU", protocol=SMALL, record=tmp_path)
    assert found.checks == probe("S3", "GRU", protocol=SMALL).checks


def test_a_record_is_of_one_run(tmp_path):
    with pytest.raises(Stop):
        probe("parity", "GRU", protocol=SMALL, record=tmp_path, watch=stopping(4, Stop))
    with pytest.raises(
        ValueError, match="of a run whose protocol differ, expected those of this run"
    ):
        probe("parity", "GRU", protocol=small(lr=1e-4), record=tmp_path)
    probe("parity", "GRU", protocol=small(lr=1e-4), seed=1, record=tmp_path)  # files of its own


@pytest.mark.parametrize(
    "wrong",
    [
        {"select": "last"},
        {"steps": 0},
        {"validation": Evaluation(6, 30, 1)},
        {"check": Evaluation(4, 30, 1)},
        {"fitted": Evaluation(2, 30, 1)},
        {"final": (Evaluation(9, 30, 1), Evaluation(5, 300, 1))},
        {"fitted": Evaluation(20_001, 30, 1)},
    ],
)
def test_protocols_that_cannot_be(wrong):
    name = next(iter(wrong))
    with pytest.raises(
        ValueError, match="got seed|with seed" if name in ("fitted", "final") else name
    ):
        small(**wrong)
