"""Options of `pytest conformance`, the cells under test, and the report."""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import pararnn
from pararnn import drm
from pararnn.testing.context import Context, Subject, is_cell

from .clauses import BY_SLUG, DRM
from .report import Report

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
REPORT = pytest.StashKey[Report]()
SUBJECTS = pytest.StashKey[list[Subject]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("conformance", "pararnn's numerics contract")
    group.addoption("--cell", action="append", metavar="CELL", help=(
        "a registered form ('ParaGRU[diag]'), all forms of a cell (ParaGRU), module:factory of your "
        "own, or DRM; repeatable. Default: all registered cells and the DRM"))  # fmt: skip
    group.addoption("--device", default="cpu", help="device under test, e.g. cuda (default: cpu)")
    group.addoption("--dtype", action="append", choices=list(DTYPES), help=(
        "dtypes of the clauses that have a choice; repeatable (default: all)"))  # fmt: skip
    group.addoption("--seed", type=int, default=0, help="seed of all draws (default: 0)")
    group.addoption("--exhaustive", action="store_true", help="more seeds, sizes and settings")
    group.addoption("--report", type=Path, metavar="PATH", help="write a JSON report to PATH")


def subjects(text: str) -> list[Subject]:
    """The registered forms of a name, a factory by ``module:name``, or the DRM."""
    if text.upper() == DRM:
        return [Subject(DRM, lambda: drm.DRM(drm.DRMConfig()), DRM)]
    module_name, colon, attribute = text.partition(":")
    if not colon:
        try:
            entry = pararnn.get_cell(text)
        except KeyError as problem:
            near = difflib.get_close_matches(text.upper(), [DRM], n=1)
            hint = f"Did you mean {DRM}?" if near else f"Or {DRM}."
            raise pytest.UsageError(f"--cell: {problem.args[0]} {hint}") from None
        named = [name for name in pararnn.cell_names() if pararnn.get_cell(name).slug == entry.slug]
        return [Subject.registered(name) for name in ([text] if text in named else named)]
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        factory = getattr(importlib.import_module(module_name), attribute)
    except Exception as problem:
        raise pytest.UsageError(
            f"--cell {text}: {type(problem).__name__}: {problem}; expected module:factory, importable from here, where "
            "factory() returns a cell."
        ) from None
    if not callable(factory):
        raise pytest.UsageError(
            f"--cell {text}: got {type(factory).__name__}, expected a factory of a cell."
        )
    needed = [
        p.name
        for p in inspect.signature(factory).parameters.values()
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    if needed:
        raise pytest.UsageError(
            f"--cell {text}: got a factory that needs {', '.join(needed)}, expected one that can "
            "be called without arguments; wrap it, e.g. lambda: MyCell(d_in=5, d_h=6)."
        )
    made = factory()
    if not is_cell(made):
        raise pytest.UsageError(
            f"--cell {text}: got a factory of {type(made).__name__}, expected one of a cell: a module "
            "with step(h, x) and state_shape."
        )
    return [Subject(text, factory)]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "clause(slug): the clause of the contract that a test checks"
    )
    device = config.getoption("--device")
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as problem:
        raise pytest.UsageError(f"--device {device}: {str(problem).splitlines()[0]}") from None
    torch.set_num_threads(1)  # the tensors are tiny: threads would only wait for each other
    names = config.getoption("--cell") or [*pararnn.cell_names(), DRM]
    chosen = {s.name: s for name in names for s in subjects(name)}
    config.stash[SUBJECTS] = list(chosen.values())
    config.stash[REPORT] = Report(
        {
            "device": device,
            "dtypes": config.getoption("--dtype") or list(DTYPES),
            "seed": config.getoption("--seed"),
            "exhaustive": config.getoption("--exhaustive"),
        }
    )


def pytest_report_header(config: pytest.Config) -> str:
    where = Path(pararnn.__file__).parent
    settings = config.stash[REPORT].settings
    return (
        f"pararnn {pararnn.__version__} from {where}, torch {torch.__version__}\n"
        f"conformance: device {settings['device']}, seed {settings['seed']}"
        f"{', exhaustive' if settings['exhaustive'] else ''}"
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "tested" in metafunc.fixturenames:
        chosen = metafunc.config.stash[SUBJECTS]
        metafunc.parametrize("tested", chosen, ids=[s.name for s in chosen])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Clauses about cells are for cells, those about the DRM for the DRM."""
    items[:] = [item for item in items if _suits(item)]


def _suits(item: pytest.Item) -> bool:
    mark = item.get_closest_marker("clause")
    return mark is None or BY_SLUG[mark.args[0]].about == item.callspec.params["tested"].about


@pytest.fixture
def context(request: pytest.FixtureRequest, tested: Subject) -> Context:
    """The context of one clause (named by the test's mark) on one cell."""
    config = request.config
    slug = request.node.get_closest_marker("clause").args[0]
    settings = config.stash[REPORT].settings
    made = Context(
        tested,
        slug,
        device=torch.device(settings["device"]),
        dtypes=tuple(DTYPES[name] for name in settings["dtypes"]),
        seed=settings["seed"],
        exhaustive=settings["exhaustive"],
    )
    request.node.conformance = made
    return made


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Any:
    outcome = yield
    made: Context | None = getattr(item, "conformance", None)
    if made is not None and (call.when == "call" or outcome.failed):
        reason = ""
        if call.excinfo is not None:
            reason = str(call.excinfo.value).splitlines()[0] if str(call.excinfo.value) else ""
        item.config.stash[REPORT].add(
            made.subject.name, made.clause, outcome.outcome, reason, made.measured, call.duration
        )
    return outcome


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    report = config.stash[REPORT]
    if not report.results:
        return
    counts = report.counts()
    terminalreporter.section("conformance")
    for line in report.table():
        terminalreporter.write_line(line)
    summary = ", ".join(f"{n} {name}" for name, n in counts.items())
    terminalreporter.write_line(f"{len(BY_SLUG)} clauses, {len(report.cells)} cells: {summary}")
    path = config.getoption("--report")
    if path is not None:
        report.write(path)
        terminalreporter.write_line(f"report: {path}")
