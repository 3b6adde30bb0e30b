"""The page of probes shows what the committed results say."""

from __future__ import annotations

import importlib
import json
import math

import pytest


@pytest.fixture
def page(monkeypatch, request):
    monkeypatch.syspath_prepend(str(request.config.rootpath / "benchmarks"))
    return importlib.import_module("probe_page")


def test_tables_and_figures_follow_from_the_results(page, request):
    root = request.config.rootpath
    prose = (root / "docs" / "probes.md").read_text(encoding="utf-8")
    for path, text in page.outputs():
        name = path.relative_to(root).as_posix()
        assert f'"{name}"' in prose, f"the page of probes does not include {name}"
        assert path.read_text(encoding="utf-8") == text, (
            f"{name} is out of date; run: python benchmarks/probe_page.py"
        )


def test_results_are_those_of_the_grid(page):
    """Every row that ran is in the grid, with its task, model and seeds."""
    found = json.loads(page.newest().read_text(encoding="utf-8"))
    rows = {row["id"]: row for row in page.grid()}
    for name, run in found["runs"].items():
        row, seeds = rows[name], [r["seed"] for r in run["seeds"]]
        assert (run["task"], run["model"]) == (row["task"], row["model"]), name
        assert run["protocol"]["steps"] == row.get("steps", run["protocol"]["steps"]), name
        assert run["protocol"]["select"] == row.get("select", run["protocol"]["select"]), name
        assert seeds == sorted(set(seeds)), name
        assert set(seeds) <= set(range(row["seeds"])), name
        if (published := row.get("published")) and "cut" not in run["seeds"][0]:
            known = [len(v) for k, v in published.items() if k == "seeds" or k.startswith("at_")]
            least = max([3, *known, *published.get("fits", [])[1:]])
            assert len(seeds) >= least, f"{name}: not all published seeds"


def test_published_means_are_those_of_the_published_seeds(page):
    """Where the publication has both, to its rounding."""
    checked = 0
    for row in page.grid():
        for length in page.LENGTHS:
            mean, seeds = page.published_at(row.get("published", {}), length)
            if mean is not None and seeds:
                checked += 1
                assert len(seeds) <= row["seeds"], row["id"]
                assert math.fsum(seeds) / len(seeds) == pytest.approx(mean, abs=0.0016), (
                    row["id"], length,
                )  # fmt: skip
    assert checked > 60


def test_fisher(page):
    """The probabilities that the publication gives, and one by hand."""
    for counts, p in {
        (8, 12, 1, 12): 0.009, (0, 12, 8, 12): 0.0013, (6, 12, 8, 12): 0.68,
        (6, 6, 4, 12): 0.013, (8, 12, 4, 12): 0.22,
    }.items():  # fmt: skip
        assert page.fisher(*counts) == pytest.approx(p, rel=0.05)
        assert page.fisher(*counts) == pytest.approx(page.fisher(*counts[2:], *counts[:2]))
    assert page.fisher(3, 3, 0, 3) == pytest.approx(2 / 20)
    assert page.fisher(0, 3, 0, 5) == 1


@pytest.mark.parametrize(
    ("t", "df"),
    [(12.7062, 1), (4.3027, 2), (3.1824, 3), (2.7764, 4), (2.5706, 5), (2.2281, 10), (2.0739, 22)],
)
def test_student(page, t, df):
    """The usual table at 5 %."""
    student = importlib.import_module("probe_statistics").student
    assert student(t, df) == pytest.approx(0.05, abs=1e-5)
    assert student(-t, df) == student(t, df)


def test_verdicts(page):
    def run(*scores, select="best"):
        seeds = [{"scores": {"64": 1.0, "1024": s}, "best": s, "fit": s > 0.99} for s in scores]
        return {"protocol": {"select": select, "validation": {"length": 128}}, "seeds": seeds}

    theirs = {"mean": [1.0, "", "", 0.5], "at_1024": [0.49, 0.50, 0.51]}
    assert page.verdict(run(0.49, 0.51, 0.52), theirs) == "reproduced"
    assert page.verdict(run(0.79, 0.81, 0.82), theirs).startswith(
        "**differs**: higher at 1024; p ="
    )
    assert page.verdict(run(0.19, 0.21, 0.22), theirs).startswith("**differs**: lower at 1024; p =")
    assert page.verdict(run(0.2, 0.9, 0.7), theirs).startswith("consistent, p ≥ 0.")
    assert page.verdict(run(0.51, 0.51, 0.51), theirs | {"at_1024": [0.5] * 3}) == "reproduced"
    assert page.verdict(run(*[1.0] * 8), {"fits": [0, 8]}).startswith("**differs**: fits; p =")
    assert page.verdict(run(*[1.0] * 8), {"fits": [7, 8]}) == "consistent, p ≥ 1"
    assert page.verdict(run(*[1.0] * 8), {"fits": [8, 8]}) == "reproduced"
