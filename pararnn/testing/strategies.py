"""What Hypothesis draws: registered cells, shapes, dtypes, magnitudes, resets, values that are not
finite, and settings of the solver; own Specs are drawn by :mod:`.random_specs`."""

from __future__ import annotations

import dataclasses
import math
import os
from typing import TYPE_CHECKING, Any

import pararnn

from .cases import DTYPES, Case
from .extra import extra

if TYPE_CHECKING:
    from hypothesis import strategies as st
else:
    st = extra("hypothesis.strategies")

DEAR = 3
"""Cells with as many state axes, or heads, have loops over single numbers: smaller ones are drawn."""


def examples(number: int) -> int:
    """How many examples a property gets: ``PARARNN_EXAMPLES`` per cent of ``number``."""
    return max(1, number * int(os.environ.get("PARARNN_EXAMPLES", "100")) // 100)


lengths = st.sampled_from((17, 0, 1, 2, 5, 13, 24, 31))
small_lengths = st.sampled_from((9, 1, 2, 5, 11))
powers = st.sampled_from((0, 0, 0, -1, -3, -6, -12, -30, 1, 3, 12, 30))
offsets = st.sampled_from((0.0, 0.0, -4.0, 4.0, -30.0, 30.0))
values = st.sampled_from((math.nan, math.inf, -math.inf))
indices = st.integers(0, 40)
drives = st.lists(st.tuples(offsets, powers), min_size=1, max_size=3).map(tuple)
tame_drives = st.lists(
    st.tuples(st.sampled_from((0.0, -4.0, 4.0)), st.sampled_from((0, 0, -1, -6, 1))),
    min_size=1,
    max_size=3,
).map(tuple)
resets = st.lists(st.tuples(indices, indices), max_size=3).map(tuple)
spoiled = st.lists(st.tuples(indices, indices, indices, values), min_size=1, max_size=2).map(tuple)


@st.composite
def settings(draw: st.DrawFn, pinned: bool = False) -> dict[str, Any]:
    """Method, chunk length, warm-up and iterations."""
    method = draw(st.sampled_from(("shooting", "auto", "newton", "sequential")))
    found: dict[str, Any] = {"method": method}
    found["chunk_length"] = draw(st.sampled_from((4, 1, 2, 3, 7, 64, None)))
    found["warmup"] = draw(st.sampled_from((1, None, 3)))
    if pinned:
        found["max_iters"] = draw(st.integers(0, 4))
    return found


@st.composite
def cases(draw: st.DrawFn, dtypes: tuple[str, ...] = tuple(DTYPES), pinned: bool = False,
          tame: bool = False, cells: tuple[str, ...] | None = None) -> Case:  # fmt: skip
    """A registered cell and a problem of it; a ``tame`` one is not chaotic and does not overflow."""
    name = draw(st.sampled_from(cells or pararnn.cell_names()))
    spec = pararnn.get_cell(name).factory().spec
    dear = len(spec.axes) > 1 or any(m.structure == "head" for m in spec.map_list)
    return Case(
        cell=name,
        width=draw(st.sampled_from((1, 2) if dear else (3, 1, 2, 5))),
        batch=draw(st.sampled_from((2, 1, 3, 0))),
        length=draw(small_lengths if dear else lengths),
        dtype=draw(st.sampled_from(dtypes)),
        seed=draw(st.integers(0, 999)),
        drives=draw(tame_drives if tame else drives),
        weights=0 if tame else draw(st.sampled_from((0, 0, 0, -3, 1, 6))),
        h0=draw(st.none() | (st.sampled_from((0, -1, -6)) if tame else powers)),
        resets=draw(resets),
        **draw(settings(pinned)),
    )


def spoiled_cases(**options: Any) -> st.SearchStrategy[Case]:
    """Cases whose drives have one or two values that are not finite."""
    return st.builds(lambda c, s: dataclasses.replace(c, spoiled=s), cases(**options), spoiled)
