"""The conformance suite can fail: every mutant is killed, and by the clauses that it names."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))  # for `conformance`; behind an installed pararnn, if there is one

from conformance.clauses import CLAUSES  # noqa: E402
from conformance.mutants import Mutant, mutants  # noqa: E402

MUTANTS = list(mutants())
IDS = [f"{m.name}, {m.cell}" for m in MUTANTS]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("mutant", MUTANTS, ids=IDS)
def test_killed(mutant: Mutant) -> None:
    """By the first clause that it names."""
    clause = mutant.killers[0]
    assert mutant.verdict(clause), f"clause {clause!r} does not notice: {mutant.what}"


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=IDS)
def test_killed_by_all(mutant: Mutant) -> None:
    """By every other clause that it names."""
    missed = [clause for clause in mutant.killers[1:] if not mutant.verdict(clause)]
    assert not missed, f"clauses {', '.join(missed)} do not notice: {mutant.what}"


def test_every_clause_kills() -> None:
    """No clause is there for show: each is the killer of a mutant (but for what needs a GPU)."""
    killers = {slug for mutant in MUTANTS for slug in mutant.killers}
    idle = {clause.slug for clause in CLAUSES} - killers - {"backends"}
    assert not idle, f"clauses without a mutant: {', '.join(sorted(idle))}"
