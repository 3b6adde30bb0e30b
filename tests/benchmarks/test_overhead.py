"""What a call costs: functions are counted up to the launch, and the tables show what was found."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def script(monkeypatch):
    if not FOLDER.is_dir():
        pytest.skip("the benchmarks are not part of an installed package")
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("gpu_overhead")


def run():
    """Enters 3 functions, starts a kernel 2 deep, and enters 1 more."""
    one()
    two()
    one()


def one():
    return 1


def two():
    start()


def start():
    return one()


def test_functions_are_counted_up_to_the_launch(script, monkeypatch):
    monkeypatch.setattr(script, "source", lambda: str(Path(__file__).parent))
    # This file stands for the library and for Triton.
    monkeypatch.setattr(script, "launches", lambda path, name: name == "start")
    found = script.Counted(run)
    assert (found.before, found.depth, found.all, found.own) == (3, 3, 6, 0)
    assert sys.getprofile() is None
    monkeypatch.setattr(script, "launches", lambda path, name: False)
    assert script.Counted(run).row() == {
        "to launch": None, "own": None, "files": None, "depth": None, "all": 6,
    }  # fmt: skip


def test_own_functions_are_those_of_the_library(script):
    import torch

    module = script.layer("ParaGRU", 4, "cpu")
    x = torch.randn(1, 3, 4)
    found = script.Counted(lambda: module(x))
    assert 0 < found.own < found.before == found.all
    assert all(path.startswith(found.library) for path in found.files)


def test_a_call_that_raises_ends_the_profile(script):
    with pytest.raises(ZeroDivisionError):
        script.Counted(lambda: 1 / 0)
    assert sys.getprofile() is None


def test_launches(script):
    assert script.launches("/x/triton/runtime/jit.py", "run")
    assert script.launches("/x/triton/runtime/interpreter.py", "__call__")
    assert not script.launches("/x/triton/runtime/jit.py", "__getitem__")
    assert not script.launches("/x/torch/jit.py", "run")


def test_tables(script):
    page = importlib.import_module("overhead_page")
    time = {"median": 0.41, "how": "wall"}
    found = {
        "small": [{"cell": "ParaGRU", "library": "pararnn", "shape": [8, 128, 64], "forward": time, "both": time}],
        "decode": [{"cell": "GRU", "library": "cuDNN", "shape": [4, 8, 1024], "step": time,
                    "captured": time | {"how": "events"}}],
        "first": [{"cell": "ParaGRU", "import": 0.1, "forward": 4.0, "backward": 4.5,
                   "forward, again": 0.0004, "backward, again": 0.001}],
        "frames": [{"cell": "ParaGRU", "pass": "forward", "to launch": 170, "own": 94, "files": 13,
                    "depth": 20, "all": 1200},
                   {"cell": "ParaGRU", "pass": "backward", "exception": "no luck"}],
    }  # fmt: skip
    for name, line in {
        "small": "| `ParaGRU` | pararnn | 8×128×64 | 0.410 | 0.410 |",
        "decode": "| `GRU` | cuDNN | 4×8×1024 | 0.410 | 0.410* |",
        "first": "| `ParaGRU` | 0.100 | 4.000 | 4.500 | 0.000 | 0.001 |",
        "frames": "| `ParaGRU` | forward | 170 | 94 | 13 | 20 | 1,200 |",
    }.items():
        assert line in page.MAKERS[name](found).splitlines()
    assert "no luck" not in page.frames_table(found)


@pytest.mark.slow
def test_smoke(script, tmp_path, monkeypatch):
    words = [
        "--smoke",
        "--out",
        str(tmp_path),
        "--only",
        "small",
        "--only",
        "decode",
        "--only",
        "first",
    ]
    monkeypatch.setattr(sys, "argv", ["gpu_overhead.py", *words])
    assert script.main() == 0
