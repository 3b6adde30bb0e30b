"""The byte-level example runs, compares like with like, and learns."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path

import pytest
import torch

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


def test_record(example, tmp_path):
    """What is written suffices to make the table again; a run depends on its seed alone."""
    out = tmp_path / "table.json"
    words = ["--steps", "2", "--batch", "2", "--length", "33", "--windows", "3", "--seeds", "2"]
    rows = example.main([*words, "--out", str(out)])
    found = json.loads(out.read_text(encoding="utf-8"))
    assert example.table([example.Run(**r) for r in found["runs"]]) == rows
    assert found["preset"]["length"] == 33
    assert found["text"]["bytes"] == len(example.written("reference"))
    assert found["command"].startswith("python examples/drm_bytes.py --steps 2")
    again = example.run((1, "SSM_CONTROL"), example.Preset(**found["preset"]), "cpu")
    assert again.nats == next(
        r["nats"] for r in found["runs"] if (r["seed"], r["name"]) == (1, "SSM_CONTROL")
    )


def test_windows_of_the_validation(example):
    """The mean over all windows, in batches of any size; windows do not overlap."""
    preset = example.PRESETS["small"]._replace(length=21, windows=7, batch=3, steps=0)
    _, held_out = example.text()
    model = example.train(example.settings("J", 0, preset.sizes), held_out, preset)
    whole = example.validate(model, held_out[: 7 * 21 + 1], preset._replace(batch=7))
    split = example.validate(model, held_out[: 7 * 21 + 1], preset)
    assert split == pytest.approx(whole, rel=1e-6)
    x, y = held_out[: 7 * 21].view(7, 21), held_out[1 : 7 * 21 + 1].view(7, 21)
    ce = torch.nn.functional.cross_entropy(model(x).logits.flatten(0, 1), y.flatten())
    assert whole == pytest.approx(ce.item(), rel=1e-6)


@pytest.mark.parametrize("preset", ["small", "large"])
def test_control_is_as_large(example, preset):
    given = example.PRESETS[preset].sizes
    sizes = {n: parameter_count(example.settings(n, 0, given)) for n in example.NAMES}
    assert abs(sizes["SSM_CONTROL"] / sizes["J"] - 1) < 1e-3


@pytest.mark.parametrize("kind", ["reference", "library"])
def test_validation_text_is_not_trained_on(example, kind):
    train, held_out = example.text(kind)
    assert len(train) + len(held_out) > 100_000
    assert 0 <= int(train.min()) <= int(train.max()) < 256
    assert len(held_out) >= 0.09 * len(train)
