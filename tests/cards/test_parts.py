"""Cards of the parts of the DRM: same data, pages and catalog as those of the cells."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace

import pytest

import pararnn.cells.parts as parts_module
from pararnn import _clients, cli
from pararnn.cards import (
    card,
    card_markdown,
    card_text,
    clauses,
    find_part,
    part_names,
    write_fragments,
)
from pararnn.cells import (
    Formula,
    Part,
    Switch,
    Table,
    read_part,
    read_switches,
    register_parts,
)
from pararnn.cells.facts.load import bibliography
from pararnn.drm import DRM, DirectionField, DRMConfig
from pararnn.drm.cards import PARTS
from pararnn.drm.variants import VARIANTS

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("part", PARTS, ids=lambda p: p.name)
def test_a_card_is_complete(part):
    c = card(part.name)
    assert c.fidelity == ("notes-faithful",)
    assert c.sources[0].title == "Mathematical Notes"
    assert c.numerics
    assert c.symbols
    assert part.not_claimed
    assert [e.number for e in c.equations] == list(range(1, 1 + len(c.equations)))
    for deviation in c.deviations:
        assert deviation.what
        assert deviation.why
        assert deviation.effect
        if clauses.is_test(deviation.clause):
            assert (ROOT / deviation.clause).is_file()
        else:
            clauses.number(deviation.clause)


@pytest.mark.parametrize("part", PARTS, ids=lambda p: p.name)
def test_every_symbol_of_an_equation_is_explained(part):
    """Left-hand sides; what only the right-hand side has are weights and functions."""
    shown = " ".join(s.latex for s in part.symbols)
    for equation in card(part.name).equations:
        left = equation.latex.partition(" = ")[0]
        symbol = left.partition("_")[0].partition("(")[0]
        assert symbol in shown or equation.name in (
            "composition", "condition", "rank", "woodbury", "loss", "cross entropy", "p", "kappa",
        ), equation  # fmt: skip


def test_equations_of_the_memory():
    assert [e.text for e in card("SelectiveMemory").equations] == [
        "h_t = SiLU(W_in [z'_{t-1}; e_t] + b_in)",
        "f_t = σ(W_f h_t + b_f + β)",
        "w_t = σ(W_w h_t + b_w)",
        "c_t = tanh(W_c h_t + b_c)",
        "m_t = f_t ⊙ m_{t-1} + w_t ⊙ c_t",
        "z^{J}_t = z'_t + η_mem m_t",
        "(f_2, u_2) ∘ (f_1, u_1) = (f_2 ⊙ f_1, u_2 + f_2 ⊙ u_1)",
    ]


def test_equations_of_the_flow():
    texts = [e.text for e in card("DRMFlow").equations]
    assert "a_t = σ((W_a g_t + b_a + β)/τ)" in texts
    assert "v_{raw,t} = V_tᵀ κ_t" in texts
    assert "z_t = R tanh(q_t/max(R, √(q_tᵀ q_t)))" in texts


def test_a_recurrence_has_jacobian_and_code():
    (variant,) = card("SelectiveMemory").variants
    assert variant.structure == ("linear", "diag")
    assert "# (5)" in variant.source("step")
    page = card_markdown("SelectiveMemory")
    assert "## Jacobian class" in page
    assert "## Generated code" in page
    page = card_markdown("RelationalMetric")
    assert "Jacobian class" not in page
    assert "Generated code" not in page
    assert "One step of one sample" not in page


def test_found_by_name_class_and_module():
    tiny = DRMConfig(
        vocab_size=3, d_token=2, d_state=2, hidden_size=2, n_directions=1, metric_rank=1
    )
    assert card("DRM") == card("drm") == card(DRM) == card(DRM(tiny))
    assert card(DirectionField) == card("DirectionField") == card("DRMFlow")
    assert find_part("ParaGRU") is None
    assert find_part(3) is None
    assert part_names() == tuple(p.name for p in PARTS)


@pytest.mark.parametrize("name", part_names())
def test_text_has_what_is_not_claimed(name):
    text = card_text(name)
    assert "What is not claimed" in text
    assert "Checked by: " in text


def test_switches_of_the_model_are_on_its_page():
    page = card_markdown("DRM")
    assert "| `block_carry` | `'base'`: " in page
    assert "## Notes and published system" in page


def test_the_table_of_variants_is_the_data():
    text = (ROOT / "docs" / "_generated" / "drm.md").read_text(encoding="utf-8")
    table = text.partition("[start:variants]")[2].partition("[end:variants]")[0]
    rows = [line.split(" | ") for line in table.splitlines() if line.startswith("| `")]
    assert [row[0] for row in rows] == [f"| `{name}`" for name in VARIANTS]
    assert [row[-1] for row in rows] == [f"{v.parameters:,} |" for v in VARIANTS.values()]


def own_part(**changes):
    facts = {
        "name": "Toy", "title": "Toy", "slug": "toy", "family": "toys", "fidelity": ("library-original",),
        "summary": "", "sources": (), "modules": (Toy,), "equations": (Formula("y", "y_t = x_t"),), "update": "y",
        "path": "none", "not_claimed": ("anything",),
        "tables": (("sizes", Table("Sizes", ("Name", "d_h"), (("a < b", "`4`"),), prose=(0,))),),
    }  # fmt: skip
    return Part(**{**facts, **changes})


class Toy:
    pass


def test_a_model_of_another_package_brings_its_card(tmp_path, monkeypatch):
    """Its distribution names it as an entry point; nothing here knows it."""
    monkeypatch.setattr(parts_module, "_PARTS", dict(parts_module._PARTS))
    package = tmp_path / "toys"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "cards.py").write_text(
        "from tests_of_parts import own_part\n"
        "from pararnn.cells import register_parts\n"
        "register_parts(own_part())\n"
    )
    (package / "command.py").write_text(
        "def register(commands):\n"
        "    commands.add_parser('toy').set_defaults(run=lambda options: print('a toy') or 0)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(sys.modules, "tests_of_parts", sys.modules[__name__])
    entry = EntryPoint(name="toys", value="toys", group="pararnn.clients")
    monkeypatch.setattr(_clients, "entry_points", lambda group: [entry])
    assert part_names()[-1] == "Toy"
    assert find_part(Toy()).slug == "toy"
    assert "y_t = x_t" in card_text("Toy")
    pages = tmp_path / "pages"
    pages.mkdir()
    write_fragments(pages)
    table = (pages / "toy.md").read_text().partition("[start:sizes]")[2].partition("[end:sizes]")[0]
    assert "| a &lt; b | `4` |" in table
    assert cli.main(["toy"]) == 0


def test_a_table_takes_no_name_of_a_section(tmp_path, monkeypatch):
    monkeypatch.setattr(parts_module, "_PARTS", dict(parts_module._PARTS))
    register_parts(own_part(tables=(("equations", Table("Sizes", ("Name",), ())),)))
    with pytest.raises(ValueError, match="Toy: got a table 'equations', expected another name"):
        write_fragments(tmp_path)


def test_a_part_is_read_from_a_file_with_its_own_sources(tmp_path):
    toy = tmp_path / "toy.toml"
    toy.write_text(
        """
        name = "Toy"
        title = "Toy"
        family = "toys"
        fidelity = ["library-original"]
        summary = ""
        update = "y"
        path = "none"
        not_claimed = ["anything"]
        checked_by = "pytest tests/toy.py"
        switches = ["kept"]
        equations = [{ name = "y", latex = "y_t = x_t" }]
        sources = [
          { cite = "toy2026", equations = "eq. 1" },
          { cite = "cho2014learning", equations = "eq. 5" },
        ]
        """
    )
    with pytest.raises(ValueError, match="got cite = 'toy2026', expected one of beck"):
        read_part(toy, Toy, switches={"kept": Switch("kept", "a", "b", "c")})
    (tmp_path / "switches.toml").write_text('[kept]\nnotes = "a"\npublished = "b"\neffect = "c"\n')
    switches = read_switches(
        tmp_path / "switches.toml", SimpleNamespace(kept=1), SimpleNamespace(kept=2)
    )
    with pytest.raises(ValueError, match=r"switches\.toml: \[kept\] got no setting of this name"):
        read_switches(tmp_path / "switches.toml", SimpleNamespace(), SimpleNamespace(kept=2))
    own = tmp_path / "bibliography.toml"
    text = """
        [{key}]
        authors = "Toy"
        title = "Toys"
        venue = ""
        year = 2026
        arxiv = ""
        bibtex = "@misc{{toy}}"
        """
    own.write_text(text.format(key="cho2014learning"))
    with pytest.raises(ValueError, match="got 'cho2014learning', which cells cite; leave it out"):
        bibliography.__wrapped__(own)
    own.write_text(text.format(key="toy2026"))
    bibliography.cache_clear()
    part = read_part(toy, Toy, switches=switches)
    assert (part.slug, part.modules, part.checked_by) == ("toy", (Toy,), "pytest tests/toy.py")
    assert part.switches == (Switch("kept", "a", "b", "c", (1, 2)),)
    assert part.equations == (Formula("y", "y_t = x_t"),)
    assert [s.key for s in part.sources] == ["toy2026", "cho2014learning"]


def test_names_of_parts_are_unique(monkeypatch):
    monkeypatch.setattr(parts_module, "_PARTS", {})
    toy = own_part()
    register_parts(toy, toy)
    with pytest.raises(ValueError, match=r"got 'Other' \(toy\), expected a name and a slug"):
        register_parts(own_part(name="Other"))
    with pytest.raises(TypeError, match="got str, expected a Part"):
        register_parts("Toy")
