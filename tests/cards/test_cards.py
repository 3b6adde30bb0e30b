"""Cards: what is derived from a Spec, how it is printed, and that it is the same every time."""

from __future__ import annotations

import re

import pytest

from pararnn import Cell, Spec, cell_names, get_cell, sigmoid, tanh
from pararnn.cards import card, card_markdown, card_text, clauses, part_names
from pararnn.cards.fragments import cards, write_fragments
from pararnn.cards.plain import plain, terms
from pararnn.cards.typeset import formula, prose, shape

with Spec("Peephole") as PEEPHOLE:
    c, h = PEEPHOLE.state("c"), PEEPHOLE.state("h", bounds=(-1, 1))
    u_f, u_o = PEEPHOLE.drives("u_f u_o")
    A_f, A_o = PEEPHOLE.maps("A_f A_o", structure="dense")
    (p,) = PEEPHOLE.params("p")
    f = PEEPHOLE.let("f", sigmoid(A_f(h) + p * c + u_f))
    PEEPHOLE.next(c, f * c + (1 - f) * u_f)
    PEEPHOLE.next(h, tanh(PEEPHOLE.updated(c)) * sigmoid(A_o(h) + u_o))


def texts(name: str) -> list[str]:
    return [e.text for v in card(name).variants for e in v.equations]


# --------------------------------------------------------------------------------------
# The equations, as the sources print them
# --------------------------------------------------------------------------------------


def test_equations_of_para_gru():
    diag, head = card("ParaGRU").variants
    assert [e.latex for e in diag.equations] == [
        r"z_t = \sigma(a_z \odot h_{t-1} + W_z x_t + b_z)",
        r"r_t = \sigma(a_r \odot h_{t-1} + W_r x_t + b_r)",
        r"n_t = \tanh(a_n \odot (r_t \odot h_{t-1}) + W_n x_t + b_n)",
        r"h_t = (1 - z_t) \odot h_{t-1} + z_t \odot n_t",
    ]
    assert head.equations[2].text == "n_t = tanh(A_n (r_t ⊙ h_{t-1}) + W_n x_t + b_n)"
    assert [e.number for e in head.equations] == [5, 6, 7, 8]
    assert diag.equations[0].anchor == "eq-para-gru-1"
    assert (diag.option, head.option) == ("mix='diag'", "mix='head'")


def test_equations_of_para_m2rnn():
    assert texts("ParaM2RNN") == [
        "k_t = W_k x_t + b_k",
        "v_t = W_v x_t + b_v",
        "f_t = σ(w_fᵀ x_t + b_f)",
        "Z_t = tanh(H_{t-1} W + k_t v_tᵀ)",
        "H_t = f_t H_{t-1} + (1 - f_t) Z_t",
    ]


def test_one_variant_by_its_name_and_by_a_cell():
    both, one = card("ParaGRU"), card("ParaGRU[head]")
    assert one.variants == (both.variants[1],)
    assert one.fidelity == ("research-variant",)
    cell = get_cell("ParaGRU[head]").factory(width=8, n_heads=4)
    assert card(cell) == one
    assert card_text(cell) == card_text("ParaGRU[head]")


# --------------------------------------------------------------------------------------
# Printing
# --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("latex", "text"),
    [
        (r"\dot{h}_{t-1}", "h\u0307_{t-1}"),
        (r"n_t^{2}", "n_t²"),
        (r"(1 - Z_t^{\odot 2})", "(1 - Z_t²)"),
        (r"\frac{3 d_h^{2}}{n_{\mathrm{heads}}}", "3 d_h²/n_heads"),
        (r"\frac{a + b}{c}", "(a + b)/c"),
        (r"\operatorname{softplus}(x_t)", "softplus(x_t)"),
        (r"(1 - f_t)\, Z_t", "(1 - f_t) Z_t"),
        (r"\sqrt{1 - r^{2}}", "√(1 - r²)"),
        (r"x^{-1}", "x⁻¹"),
        (r"\ell_t = 8 \Lambda + 10^{-24}", "ℓ_t = 8 Λ + 10⁻²⁴"),
    ],
)
def test_latex_as_text(latex, text):
    assert plain(latex) == text


def test_sums_break_outside_brackets_only():
    assert terms("a = b + (c + d) - e") == ["a = b", "+ (c + d)", "- e"]


@pytest.mark.parametrize(
    ("text", "markdown"),
    [
        ("W_* is dense", r"\(W_{\ast}\) is dense"),
        ("mix='head' uses", "`mix='head'` uses"),
        ("guess f(0, x_t).", "guess `f(0, x_t)`."),
        ("stay in [-1, 1] if", r"stay in \([-1, 1]\) if"),
        ("1/sqrt(d_h)", "`1/sqrt(d_h)`"),
        ("read-out H^T q, no", r"read-out \(H^\top q\), no"),
        ("exp(-exp(A_log) softplus(x))", "`exp(-exp(A_log) softplus(x))`"),
        ("a*b | <c>", r"a\*b \| &lt;c>"),
    ],
)
def test_prose_of_facts(text, markdown):
    assert prose(text) == markdown


def test_symbols_and_shapes():
    assert formula("W_*, b_*") == r"\(W_{\ast}, b_{\ast}\)"
    assert shape("(d_h, d_in), (d_h,)") == "`(d_h, d_in)`, `(d_h,)`"


@pytest.mark.parametrize(
    "name", [*sorted({name.partition("[")[0] for name in cell_names()}), *part_names()]
)
@pytest.mark.parametrize("width", [80, 100])
def test_text_fits_its_width(name, width):
    free = re.compile(r"[=@{}_]|^[A-Za-z*,_ ]+\(")  # equations, code, BibTeX and shapes stay whole
    long = [line for line in card_text(name, width).splitlines() if len(line) > width]
    assert [line for line in long if not free.search(line)] == []


# --------------------------------------------------------------------------------------
# Facts
# --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", cell_names())
def test_facts_are_complete(name):
    c = card(name)
    assert c.sources
    assert c.symbols
    assert c.numerics
    assert all(s.arxiv and s.equations and s.bibtex for s in c.sources)
    for deviation in c.deviations:
        clauses.number(deviation.clause)
        assert deviation.what
        assert deviation.why
        assert deviation.effect
    if set(c.variants[0].fidelity) & {"paper-core", "research-variant"}:
        assert c.deviations


def test_paper_faithful_stands_alone():
    for c in cards():
        for v in c.variants:
            assert v.fidelity == ("paper-faithful",) or "paper-faithful" not in v.fidelity


def test_clauses_are_those_of_the_contract():
    contract = pytest.importorskip("conformance.clauses")
    assert {c.slug: c.number for c in contract.CLAUSES} == clauses.NUMBERS
    assert all(c.anchor == clauses.anchor(c.slug) for c in contract.CLAUSES)


def test_unknown_clause():
    with pytest.raises(ValueError, match="got clause 'speed', expected one of"):
        clauses.number("speed")


# --------------------------------------------------------------------------------------
# A cell of one's own
# --------------------------------------------------------------------------------------


def test_card_of_a_spec():
    c = card(PEEPHOLE)
    (variant,) = c.variants
    assert c.slug == "peephole"
    assert c.fidelity == ()
    assert variant.spec.jac_structure == "dense"
    assert [s.latex for s in c.symbols[:4]] == ["x_t", "c_t", "h_t", "f_t"]
    assert {s.latex: s.shape for s in c.symbols}["A_f"] == "(d_h, d_h)"
    sizes = {line.quantity: plain(line.latex) for line in variant.costs}
    assert sizes["state, numbers"] == "2 d_h"
    assert sizes["step: multiplications in recurrent maps"] == "2 d_h²"
    assert sizes["chunk operator, numbers"] == "4 d_h"
    text = card_text(PEEPHOLE)
    assert "no fidelity label" in text
    assert "No invariant interval" in text
    assert "Citation" not in text
    page = card_markdown(PEEPHOLE)
    assert page.startswith("# Peephole\n")
    assert r"\tag{3}" in page


def test_card_of_a_class_and_of_an_instance():
    class Own(Cell):
        spec = PEEPHOLE

    assert card(Own) == card(Own(d_in=2, d_h=3)) == card(PEEPHOLE)


def test_what_has_no_card():
    with pytest.raises(TypeError, match="got Linear, expected a registered name"):
        card(__import__("torch").nn.Linear(1, 1))
    with pytest.raises(KeyError, match="expected one of"):
        card("Nothing")


def test_generated_code_carries_equation_numbers():
    (variant,) = card("ParaM2RNN").variants
    lines = variant.source("step").splitlines()
    assert [line.rpartition("# ")[2] for line in lines if "# " in line] == ["(3)", "(4)", "(5)"]
    compile(variant.source("step"), "step", "exec")


# --------------------------------------------------------------------------------------
# Fragments
# --------------------------------------------------------------------------------------


def test_fragments_are_deterministic(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
        write_fragments(folder)
    files = sorted(path.relative_to(first) for path in first.rglob("*.md"))
    assert [str(f) for f in files] == sorted([*(f"{c.slug}.md" for c in cards()), "catalog.md"])
    assert all((first / f).read_bytes() == (second / f).read_bytes() for f in files)


def test_catalog_has_a_row_a_variant(tmp_path):
    write_fragments(tmp_path)
    rows = (tmp_path / "catalog.md").read_text(encoding="utf-8").count("<tr data-family=")
    assert rows == len(cell_names()) + len(part_names())


def test_every_formula_is_valid(tmp_path):
    docs_hook = pytest.importorskip("docs_hook")
    if docs_hook.missing():
        pytest.skip(docs_hook.missing())
    page = "".join(card_markdown(s) for s in ("ParaGRU", "ParaM2RNN", PEEPHOLE, *part_names()))
    page = re.sub(r"```.*?```", "", page, flags=re.DOTALL)
    found = [(tex, False) for tex in re.findall(r"\\\((.+?)\\\)", page)]
    found += [(tex, True) for tex in re.findall(r"\\\[\s(.+?)\\\]", page, re.DOTALL)]
    assert len(found) > 50
    wrong = [
        (tex, answer["error"])
        for (tex, _), answer in zip(found, docs_hook.render(found), strict=True)
        if "error" in answer
    ]
    assert wrong == []
