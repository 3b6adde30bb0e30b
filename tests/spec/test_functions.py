"""The table of functions: every row has a value in every kind of numbers, and one on tensors."""

from __future__ import annotations

import pytest

from pararnn.solvers.enclosure import BALLS
from pararnn.solvers.torch_backend import NAMESPACE
from pararnn.spec.backends import BACKENDS
from pararnn.spec.functions import PRIMITIVES, RESERVED


@pytest.mark.parametrize("row", PRIMITIVES.values(), ids=lambda p: p.name)
def test_every_column(row):
    functions = pytest.importorskip("pararnn.kernels.functions")
    places = {**BACKENDS, "torch": NAMESPACE, "enclosures": BALLS, "kernels": vars(functions)}
    assert not [place for place, names in places.items() if row.name not in names]
    assert row.name in RESERVED


@pytest.mark.parametrize("names", [*BACKENDS.values(), NAMESPACE], ids=[*BACKENDS, "torch"])
def test_no_name_of_a_program_is_free(names):
    """A symbol of a Spec may not be called as what its programs call."""
    assert not {name for name in names if name not in RESERVED}
