"""The byte-level example runs, compares like with like, and learns."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

import pytest

from pararnn.drm import parameter_count

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def example():
    path = ROOT / "examples" / "drm_bytes.py"
    if not path.is_file():
        pytest.skip("the examples are not part of an installed package")
    spec = importlib.util.spec_from_file_location("drm_bytes", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_table(example, capsys):
    rows = example.main(
        ["--steps", "12", "--batch", "2", "--length", "40", "--windows", "3", "--seeds", "2"]
    )
    assert [r.name for r in rows] == list(example.NAMES)
    printed = capsys.readouterr().out
    for row in rows:
        assert 2.0 < row.nats < math.log(256), "better than knowing nothing"
        assert f"{row.name:16} {row.parameters:10,}" in printed


def test_control_is_as_large(example):
    sizes = {n: parameter_count(example.settings(n, 0)) for n in example.NAMES}
    assert abs(sizes["SSM_CONTROL"] / sizes["J"] - 1) < 1e-3


def test_validation_text_is_not_trained_on(example):
    train, held_out = example.text()
    assert len(train) + len(held_out) > 100_000
    assert 0 <= int(train.min()) <= int(train.max()) < 256
    assert len(held_out) >= 0.09 * len(train)
