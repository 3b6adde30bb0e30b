"""The own cell of the guide, from `examples/elman.py`: same recurrence, parallel training."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pararnn import ParaRNN, sequential_apply, solve, verify_agreement
from pararnn.cards import card_text

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def elman():
    path = ROOT / "examples" / "elman.py"
    spec = importlib.util.spec_from_file_location("elman", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_guide_has_the_example(elman):
    guide = (ROOT / "docs" / "add_a_cell.md").read_text(encoding="utf-8")
    example = (ROOT / "examples" / "elman.py").read_text(encoding="utf-8")
    for name in ("spec", "cell"):
        _, _, part = example.partition(f"# --8<-- [start:{name}]\n")
        assert part.partition(f"# --8<-- [end:{name}]")[0].strip() in guide


def test_the_definition_takes_ten_lines(elman):
    example = (ROOT / "examples" / "elman.py").read_text(encoding="utf-8")
    lines = 0
    for name in ("spec", "cell"):
        _, _, part = example.partition(f"# --8<-- [start:{name}]\n")
        lines += sum(bool(s.strip()) for s in part.partition("# --8<--")[0].splitlines())
    assert lines <= 10


def test_card(elman):
    text = card_text(elman.Elman)
    assert "h_t = tanh(w ⊙ h_{t-1} + W x_t + b)  (1)" in text
    assert "(1 - h_t²) ⊙ (w ⊙" in text


def test_trains_in_parallel(elman):
    torch.manual_seed(0)
    rnn = ParaRNN(elman.factory())
    x = torch.randn(3, 150, 5)
    output, _ = rnn(x)
    output.square().mean().backward()
    parallel = [p.grad.clone() for p in rnn.parameters()]
    rnn.zero_grad()
    sequential_apply(rnn.cells[0], x).square().mean().backward()
    for mine, loop in zip(parallel, (p.grad for p in rnn.parameters()), strict=True):
        torch.testing.assert_close(mine, loop, rtol=1e-4, atol=1e-6)
    assert solve(rnn.cells[0], x).method == "shooting"
    assert verify_agreement(rnn, x).passed


def test_conformance_runs_on_it():
    """What the guide shows of it is what it prints."""
    if not (ROOT / "conformance" / "test_contract.py").exists():
        pytest.skip("there is no conformance suite here")
    guide = (ROOT / "docs" / "add_a_cell.md").read_text(encoding="utf-8")
    given = "$ pytest conformance --cell examples.elman:factory\n"
    shown = guide.partition(given)[2].partition("\n```")[0].splitlines()
    command = [sys.executable, "-m", "pytest", "conformance", "-q", *given.split()[3:]]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert {line for line in shown if line != "..."} - {"", *done.stdout.splitlines()} == set()
