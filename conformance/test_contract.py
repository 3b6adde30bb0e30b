"""One test a clause, over all cells under test. The clauses are data; the checks are functions."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pararnn.testing.checks import Check
from pararnn.testing.context import Context, NotApplicable

from .checks import load
from .clauses import BY_SLUG, CLAUSES, Clause
from .page import PAGE, rewritten

CHECKS = load()


def tied(clause: Clause, check: Check) -> Callable[[Context], None]:
    @pytest.mark.clause(clause.slug)
    def test(context: Context) -> None:
        try:
            check(context)
        except NotApplicable as reason:
            pytest.skip(str(reason))

    test.__doc__ = f"{clause.id}: {clause.statement}"
    return test


for _clause in CLAUSES:
    if _clause.slug in CHECKS:
        _name = f"test_{_clause.anchor}_{_clause.slug.replace('-', '_')}"
        globals()[_name] = tied(_clause, CHECKS[_clause.slug])


def test_no_clause_without_check() -> None:
    missing = [clause.id for clause in CLAUSES if clause.slug not in CHECKS]
    assert not missing, f"clauses without a check: {', '.join(missing)}"


def test_no_check_without_clause() -> None:
    extra = [slug for slug in CHECKS if slug not in BY_SLUG]
    assert not extra, f"checks without a clause: {', '.join(extra)}"


def test_clauses_are_numbered_once() -> None:
    assert [clause.number for clause in CLAUSES] == list(range(1, len(CLAUSES) + 1))
    assert len(BY_SLUG) == len(CLAUSES)


@pytest.mark.skipif(not PAGE.exists(), reason="the documentation is not part of this copy")
def test_page_lists_exactly_the_clauses() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == rewritten(page), "run: python -m conformance.page"
