"""The files of facts: read late, checked key by key, all of them used; and the cells' register."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import pararnn
from pararnn import Cell, Spec, tanh
from pararnn.cells import Facts, MinGRU, ParaGRU, Part, get_cell
from pararnn.cells.facts import load
from pararnn.cells.facts.load import FOLDER, bibliography, shared
from pararnn.cells.registry import CELLS, CellEntry, _registered
from pararnn.drm import cards
from pararnn.testing import context
from pararnn.testing.checks import equations

HOME = Path(cards.__file__).parent
COMMON = {"bibliography", "shared"}
GOOD = """\
title = "Own"
family = "own"
fidelity = ["research-variant"]
summary = \"""
Two
 lines.\"""
notes = ["first", { use = "zero_reset" }]
symbols = [
  "input",
  { latex = 'h_t', shape = "(B, d_h)", meaning = "state" },
]

[[sources]]
cite = "cho2014learning"
equations = "eq. 5"

[[deviations]]
use = "decay"
what = "A decay"
"""


def facts(folder: Path, text: str) -> Facts:
    path = folder / "own.toml"
    path.write_text(text, encoding="utf-8")
    return load.load(path, Facts, shared(), slug="own")


def test_a_file_is_the_record_that_it_spells(tmp_path):
    got = facts(tmp_path, GOOD)
    assert (got.title, got.slug, got.summary) == ("Own", "own", "Two lines.")
    assert got.notes == (
        "first",
        "A reset restarts from the zero state, not from the default start of 1/2.",
    )
    assert [s.latex for s in got.symbols] == ["x_t", "h_t"]
    (source,) = got.sources
    assert (source.key, source.year, source.equations) == ("cho2014learning", 2014, "eq. 5")
    assert source.bibtex.startswith("@inproceedings{cho2014learning,\n  title")
    (deviation,) = got.deviations
    assert (deviation.what, deviation.clause) == ("A decay", "time-gap")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('family = "own"\n', "", "own.toml: got no 'family'; write it."),
        ("family", "familly", "own.toml: got a key 'familly', expected title, family, "),
        ("title", "slug", "own.toml: got a key 'slug', expected title, "),
        ('"own"', "3", "own.toml: family: got 3, expected a text."),
        ('["research-variant"]', '"paper"', "own.toml: fidelity: got 'paper', expected a list."),
        ('"research-variant"', '"exact"', "own.toml: Own: got fidelity ('exact',), expected one"),
        ('"first"', "1", "own.toml: notes[0]: got 1, expected a text."),
        (
            "zero_reset",
            "reset",
            "own.toml: notes[1]: got use = 'reset', expected one of one_scan, ",
        ),
        ('  "input"', "  7", "own.toml: symbols[0]: got 7, expected a table or the name of a"),
        (
            '"input"',
            '"inputs"',
            "own.toml: symbols[0]: got use = 'inputs', expected one of input, ",
        ),
        (
            ", shape =",
            ", shap =",
            "own.toml: symbols[1]: got a key 'shap', expected latex, shape, ",
        ),
        ("cho2014learning", "cho", "own.toml: sources[0]: got cite = 'cho', expected one of beck"),
        (
            '"eq. 5"',
            '"eq. 5"\nyear = "2014"',
            "own.toml: sources[0]: year: got '2014', expected a w",
        ),
        ('equations = "eq. 5"\n', "", "own.toml: sources[0]: got no 'equations'; write it."),
        ("what = ", "what: ", "own.toml: got what is not TOML: "),
    ],
)
def test_what_is_wrong_is_said_with_file_and_key(tmp_path, old, new, message):
    assert old in GOOD
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        facts(tmp_path, GOOD.replace(old, new, 1))


def test_a_missing_file_is_named():
    with pytest.raises(ValueError, match=r"para_none\.toml: got no file, expected the facts"):
        load.of_cell("para_none")


def test_nothing_is_changed_of_a_spec(tmp_path):
    path = tmp_path / "part.toml"
    path.write_text('equations = [{ use = "step", latex = "x" }]', encoding="utf-8")
    named = {"equations": {"step": cards.flow.STEP}}
    given = {f: () for f in Part.__dataclass_fields__ if f != "equations"}
    with pytest.raises(ValueError, match=r"equations\[0\]: got keys beside use = 'step'"):
        load.load(path, Part, named, **given)


def test_every_cell_has_a_file_and_every_file_a_cell():
    assert {path.stem for path in FOLDER.glob("*.toml")} == COMMON | {
        e.slug for e in CELLS.values()
    }
    assert {p.stem for p in HOME.glob("*.toml")} == {"bibliography", "switches"} | {
        p.slug for p in cards.PARTS
    }


def test_everything_shared_is_used():
    files = [path for path in FOLDER.glob("*.toml") if path.stem != "bibliography"]
    for home in (FOLDER, HOME):
        text = "\n".join(path.read_text(encoding="utf-8") for path in home.glob("*.toml"))
        for key in load.read(home / "bibliography.toml"):
            assert f'cite = "{key}"' in text, key
    own = [path.read_text(encoding="utf-8") for path in files if path.stem != "shared"]
    for field, rows in shared().items():
        for name in rows if field != "cite" else ():
            users = sum(f'use = "{name}"' in t or f'  "{name}",\n' in t for t in own)
            assert users > 1, f"{field}.{name}: {users} files use it"


def test_bibtex_is_filed_under_its_own_key():
    for key, row in bibliography(HOME / "bibliography.toml")["cite"].items():
        assert re.match(r"@\w+\{(\w+),", row["bibtex"].strip())[1] == key
        assert f"{{{row['year']}}}" in row["bibtex"]
        assert not row["arxiv"] or row["arxiv"] in row["bibtex"]


def test_facts_are_read_when_they_are_asked_for():
    program = (
        "import sys; from pararnn import ParaGRU; ParaGRU(2, 3);"
        "print('pararnn.cells.facts.load' in sys.modules); ParaGRU.facts;"
        "print('pararnn.cells.facts.load' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["False", "True"]


# -- the register --------------------------------------------------------------------------------

with Spec("Own") as OWN:
    h = OWN.state("h")
    (u,) = OWN.drives("u")
    OWN.next(h, tanh(h + u))


class Derived(Cell):
    spec = OWN


class Written(Derived):
    def recurrence(self, h, u):
        return torch.tanh(h + u)


def test_no_cell_is_registered_without_a_step_by_hand():
    with pytest.raises(TypeError, match=r"^Derived\[x\]: got no recurrence, expected the step"):
        CellEntry(Derived, "x")
    assert CellEntry(Written).name == "Written"


def test_no_cell_is_registered_twice():
    with pytest.raises(ValueError, match="got two cells 'Written'; give one of them another"):
        _registered(CellEntry(Written), CellEntry(Written, settings={"bias": False}))


def test_registered_cells_are_exported():
    for entry in CELLS.values():
        assert getattr(pararnn, entry.kind.__name__) is entry.kind


def test_no_registered_cell_is_without_the_equation_of_its_source(monkeypatch):
    ctx = context.Context(context.Subject.registered("ParaGRU[diag]"), "equation")
    equations.equation(ctx)
    monkeypatch.delitem(equations.EQUATIONS, "ParaGRU[diag]")
    with pytest.raises(context.Violation, match=r"got no equation of ParaGRU\[diag\], expected"):
        equations.equation(ctx)


def test_facts_of_classes():
    assert Cell.facts is None
    assert Written.facts is None
    assert ParaGRU.facts is ParaGRU(2, 3).facts is get_cell("ParaGRU[head]").facts
    assert type("Mine", (MinGRU,), {}).facts is MinGRU.facts
    own = load.of_cell("para_lstm")
    assert type("Mine", (ParaGRU,), {"facts": own}).facts is own


def test_settings_of_a_variant_can_be_changed():
    entry = get_cell("GivensMinGRU")
    assert entry.factory().d_h == 8
    assert entry.factory(3, 2, block_size=6).d_h == 12
    assert get_cell("ParaM2RNN").factory(v_dim=7).state_shape == (3, 7)
    assert get_cell("DeltaMinGRU[nh=2]").factory(width=5).state_shape == (2, 5, 6)


def test_entries_can_be_kept_in_a_set():
    assert len(set(CELLS.values())) == len(CELLS)
