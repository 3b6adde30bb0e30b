"""`pararnn.testing` as a person uses it: a class of one's own, pytest, and an installed wheel."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

import pararnn
from pararnn import Cell, Spec, tanh
from pararnn.testing import Conformance, NotApplicable, Violation
from pararnn.testing.checks import checks, load
from pararnn.testing.conformance import SOLVER

ROOT = Path(__file__).resolve().parents[1]

OWN = """
import torch
import pararnn
from pararnn import Cell, Spec, tanh
from pararnn.testing import Conformance

with Spec("Elman") as elman:
    h = elman.state("h", bounds=(-1, 1))
    (u,) = elman.drives("u")
    w = elman.map("w", structure="diagonal")
    elman.next(h, tanh(w(h) + u))

class Right(Cell):
    spec = elman
    def recurrence(self, h, u, w):
        return torch.tanh(w * h + u)

class Wrong(Right):
    def recurrence(self, h, u, w):
        return torch.tanh(w * h - u)

class TestRight(Conformance):
    clauses = ("equation", "structure", "agreement", "resets", "constraint")
    def make(self):
        return Right(3, 5)

class TestWrong(TestRight):
    def make(self):
        return Wrong(3, 5)

class TestSolver(TestRight):
    clauses = ("causality", "resets", "residual")
    def solve(self, cell, x, *, h0=None, resets=None, **options):
        return pararnn.shooting_apply(cell, x, h0=h0, resets=resets)

class TestForgetful(TestSolver):
    def solve(self, cell, x, *, h0=None, resets=None, **options):
        return pararnn.shooting_apply(cell, x, h0=h0)
"""

EXPECTED = {
    "TestRight": {"equation": "PASSED", "structure": "PASSED", "agreement": "PASSED",
                  "resets": "PASSED", "constraint": "SKIPPED"},
    # Parallel it is its Spec, in a loop its recurrence.
    "TestWrong": {"equation": "FAILED", "structure": "PASSED", "agreement": "FAILED",
                  "resets": "FAILED", "constraint": "SKIPPED"},
    "TestSolver": {"causality": "PASSED", "resets": "PASSED", "residual": "SKIPPED"},
    "TestForgetful": {"causality": "PASSED", "resets": "FAILED", "residual": "SKIPPED"},
}  # fmt: skip


class Mine(Conformance):
    def make(self):
        return pararnn.ParaGRU(3, 4)


class Forgetful(Mine):
    def solve(self, cell, x, *, h0=None, resets=None, **options):
        return pararnn.shooting_apply(cell, x, h0=h0)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the wheel holds."""
    builder = pytest.importorskip("hatchling.builders.wheel")
    folder = tmp_path_factory.mktemp("wheel")
    (wheel,) = builder.WheelBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"])
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def test_pytest_alone_runs_it_from_a_wheel(installed: Path, tmp_path: Path) -> None:
    """One test a clause; right cells and solvers pass, wrong ones fail with the clause's name."""
    (tmp_path / "test_own.py").write_text(OWN, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-P", "-m", "pytest", "-v", "-rfs", "-p", "no:cacheprovider", "."],
        cwd=tmp_path,
        env={**os.environ, "NO_COLOR": "1", "COLUMNS": "200", "PYTHONPATH": str(installed)},
        text=True,
        capture_output=True,
        timeout=300,
    )
    lines = re.findall(r"::(\w+)::test_clause\[([\w-]+)\] (\w+)", done.stdout)
    found: dict[str, dict[str, str]] = {}
    for name, clause, outcome in lines:
        found.setdefault(name, {})[clause] = outcome
    assert found == EXPECTED, done.stdout + done.stderr
    assert re.search(r"Violation: clause equation: .*expected at most", done.stdout)
    assert re.search(
        r"Violation: clause resets: auto, float64: got .*expected at most", done.stdout
    )
    assert "clause constraint: the cell bounds no recurrent weight" in done.stdout
    assert "solve gives states without a report" in done.stdout


def test_a_wheel_loads_neither_pytest_nor_a_client(installed: Path, tmp_path: Path) -> None:
    code = (
        "import sys, pararnn, pararnn.testing, pararnn.testing.cases\n"
        "from pararnn.testing.checks import load; load()\n"
        "pararnn.testing.Conformance\n"
        "print(pararnn.__file__, *sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=tmp_path, text=True, capture_output=True,
        env={**os.environ, "PYTHONPATH": str(installed)}, check=True,
    )  # fmt: skip
    home, *modules = done.stdout.split()
    assert home.startswith(str(installed))
    unwanted = {"pytest", "hypothesis", "conformance", "pararnn.drm", "pararnn.tasks", "triton"}
    assert not unwanted & set(modules)


def test_the_order_is_that_of_the_modules() -> None:
    """Whatever was imported first: workers of a test run must agree."""
    code = "import pararnn.testing.checks.{} as c; from pararnn.testing.checks import load; print(*load())"
    orders = {
        subprocess.run([sys.executable, "-c", code.format(first)], cwd=ROOT, text=True,
                       capture_output=True, check=True).stdout
        for first in ("equations", "memory")
    }  # fmt: skip
    assert orders == {" ".join(load()) + "\n"}
    assert set(load()) == set(checks)


def test_all_clauses_are_for_a_cell_and_some_for_a_solver() -> None:
    assert Mine().names() == tuple(load())
    assert Forgetful().names() == SOLVER
    assert set(SOLVER) < set(load())


def test_a_check_without_pytest() -> None:
    measured = Mine().check("causality")
    assert measured
    assert set(measured.values()) == {0.0}
    with pytest.raises(Violation, match=r"clause resets: .*got .*expected at most"):
        Forgetful().check("resets")
    with pytest.raises(NotApplicable, match="takes no time gaps"):
        Mine().check("time-gap")


def test_a_check_leaves_the_threads_as_they_were() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        Mine().check("structure")
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_settings_count() -> None:
    """Dtypes, seed and exhaustive are those of the class."""

    class Narrow(Mine):
        dtypes = (torch.float64,)

    with pytest.raises(NotApplicable, match="neither bfloat16 nor float16"):
        Narrow().check("half-precision")
    other = type("Other", (Mine,), {"seed": 1})()
    assert Mine().check("jacobian") != other.check("jacobian")
    assert 4 * calls(exhaustive=False) == calls(exhaustive=True)  # rounds


def calls(exhaustive: bool) -> int:
    """How often the clause on layouts asks for a solve."""
    seen: list[int] = []

    class Watching(Forgetful):
        dtypes = (torch.float64,)

        def solve(self, cell, x, **options):
            seen.append(1)
            return super().solve(cell, x, **options)

    made = Watching()
    type(made).exhaustive = exhaustive
    made.check("invariances")
    return len(seen)


def test_no_length_needs_a_start() -> None:
    """States alone of no step: the final state is the start."""
    Forgetful().check("shapes")


def test_a_module_without_a_spec() -> None:
    class Plain(torch.nn.Module):
        d_in, state_shape = 3, (4,)

        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(0.1 * torch.randn(4, 7))

        def step(self, h, x):
            return torch.tanh(torch.cat([h, x], -1) @ self.weight.T)

    class Own(Conformance):
        def make(self):
            return Plain()

    Own().check("causality")
    with pytest.raises(NotApplicable, match="no Spec"):
        Own().check("equation")


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"clauses": ("reset",)}, ValueError, "got 'reset', expected .*did you mean 'resets'"),
        ({"clauses": ("zzz",)}, ValueError, "got 'zzz', expected .*one of equation, "),
        ({"make": lambda self: 3}, TypeError, "Own.make: got int, expected a cell"),
        ({"make": Conformance.make}, NotImplementedError, "Own: got no make"),
    ],
)
def test_wrong_use_is_explained(given, error, message) -> None:
    own = type("Own", (Mine,), given)()
    with pytest.raises(error, match=message):
        own.check(own.names()[0])


@pytest.mark.parametrize(
    ("missing", "use"),
    [
        ("hypothesis", "import pararnn.testing.strategies"),
        ("pytest", "Mine().test_clause('time-gap')"),
    ],
)
def test_a_missing_extra_is_explained(missing: str, use: str) -> None:
    code = f"""
import sys
import pararnn
from pararnn.testing import Conformance

class Missing:
    def find_spec(self, name, *more):
        if name.partition(".")[0] == {missing!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

class Mine(Conformance):
    def make(self):
        return pararnn.ParaGRU(3, 4)

sys.meta_path.insert(0, Missing())
{use}
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True)
    last = done.stderr.strip().splitlines()[-1]
    assert re.fullmatch(
        rf"ModuleNotFoundError: pararnn\.testing: got no module '{missing}.*', expected the extra 'test': "
        r"pip install 'pararnn\[test\]'",
        last,
    ), done.stderr


def test_a_broken_cell_fails() -> None:
    with Spec("Elman") as spec:
        h = spec.state("h", bounds=(-1, 1))
        (u,) = spec.drives("u")
        w = spec.map("w", structure="diagonal")
        spec.next(h, tanh(w(h) + u))

    class Broken(Cell):
        def recurrence(self, h, u, w):
            return torch.tanh(w * h - u)

    class Own(Conformance):
        def make(self):
            return Broken(3, 5, spec=spec)

    with pytest.raises(Violation, match="clause equation"):
        Own().check("equation")
