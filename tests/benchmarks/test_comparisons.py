"""What the GPU scripts compare with: nothing that is wrong or not finite may pass."""

from __future__ import annotations

import importlib
import math
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
SCRIPTS = ("harness", "gpu_checks", "linear_checks")
EXACT = torch.tensor([[1.0, -2.0], [0.0, 4.0]], dtype=torch.float64)


@pytest.fixture(params=SCRIPTS)
def compared(request, monkeypatch):
    if not FOLDER.is_dir():
        pytest.skip("the benchmarks are not part of an installed package")
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module(request.param).compared


@pytest.fixture
def checks(monkeypatch):
    if not FOLDER.is_dir():
        pytest.skip("the benchmarks are not part of an installed package")
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("gpu_checks")


def spoiled(value, at=(1, 1)):
    other = EXACT.clone()
    other[at] = value
    return other


def test_what_is_right_passes(compared):
    found = compared(EXACT.float() + 0.5, EXACT, 0.5)
    assert found == {"error": 0.5, "of tolerance": 1.0}
    assert compared(EXACT, EXACT, torch.zeros_like(EXACT))["of tolerance"] == 0.0
    assert compared(EXACT[:0], EXACT[:0], 0.0) == {"error": 0.0, "of tolerance": 0.0}


@pytest.mark.parametrize("allowed", [0.1, torch.tensor([[9.0, 9.0], [9.0, 0.1]])])
def test_one_wrong_number_fails(compared, allowed):
    assert compared(spoiled(4.11), EXACT, allowed)["of tolerance"] > 1
    assert compared(spoiled(3.89), EXACT, allowed)["of tolerance"] > 1


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_fails(compared, value):
    """In the result, in the reference, in both and in what is allowed."""
    bad = spoiled(value)
    for got, exact, allowed in (
        (bad, EXACT, 1.0),
        (bad, EXACT, math.inf),
        (EXACT, bad, 1.0),
        (bad, bad, 1.0),
        (EXACT, EXACT, value),
        (EXACT, EXACT, bad),
    ):
        assert not compared(got, exact, allowed)["of tolerance"] <= 1


def test_another_shape_is_an_error(compared):
    with pytest.raises(ValueError, match=r"got shape \(2, 1\), expected \(2, 2\)"):
        compared(EXACT[:, :1], EXACT, 1.0)


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e-3])
@pytest.mark.parametrize("name", ["states", "final state", "grad drives", "grad A_z"])
def test_a_case_with_one_bad_number_is_not_ok(checks, monkeypatch, name, value):
    """A whole case, where the kernels' results are the exact ones but for one number."""
    case = checks.Case("ParaGRU[diag]", 2, 9, 3)

    class Report:
        iterations, fallback = 0, False

    def exact(cell, case, data, device):
        results = {k: v.clone() for k, v in checks.exact(cell, case, data).items()}
        return results, Report

    def off(*arguments):
        results, report = exact(*arguments)
        results[name].view(-1)[-1] += value
        return results, report

    monkeypatch.setattr(checks, "computed", exact)
    assert checks.check(case, "cpu")["ok"]
    monkeypatch.setattr(checks, "computed", off)
    row = checks.check(case, "cpu")
    assert not row["ok"]
    assert [n for n, e in row["errors"].items() if not e["of tolerance"] <= 1] == [name]


@pytest.mark.parametrize(("factor", "ok"), [(1.0, True), (1.05, False), (math.nan, False)])
def test_windows_of_a_giant_problem(checks, monkeypatch, factor, ok):
    """A small one here, solved eagerly; and one whose states are off."""
    cases = importlib.import_module("gpu_cases")
    pararnn = importlib.import_module("pararnn")
    solve = pararnn.solve

    class Solution:
        def __init__(self, states):
            self.states = states * factor

    monkeypatch.setattr(pararnn, "NewtonConfig", lambda **settings: None)
    monkeypatch.setattr(pararnn, "solve", lambda *a, **k: Solution(solve(*a, **k).states))
    row = cases.giant("cpu", 160, 2, 3)
    assert row["ok"] is ok
    assert {(e["what"], e["sequence"]) for e in row["errors"]} >= {
        ("states", 0),
        ("grad drives", 1),
    }
