"""What cards say, against second sources: a table by hand, counted numbers, measured Jacobians; and
that a card shows what it is given and does nothing else with it."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import sympy
import torch

from pararnn import Spec, tanh
from pararnn.cards import card, card_markdown, card_text
from pararnn.cells import Cell, Deviation, Facts, Source, Symbol, cell_names, get_cell
from pararnn.solvers.torch_backend import NAMESPACE

FAITHFUL, CORE, RESEARCH = "paper-faithful", "paper-core", "research-variant"

LABELS = {
    # Danieli et al., eq. 3.1a with the diagonal maps of eq. 3.3; heads are not in the paper.
    "ParaGRU[diag]": {FAITHFUL},
    "ParaGRU[head]": {RESEARCH},
    # Danieli et al., eq. 3.1b.
    "ParaLSTM": {FAITHFUL},
    # De et al. have no tanh of the state (research); their block is left out (core).
    "ParaNLRU": {RESEARCH, CORE},
    # Beck et al.: dense recurrent matrices a head, not diagonal (research); without the block (core).
    "ParaSLSTM[sigmoid]": {RESEARCH, CORE},
    "ParaSLSTM[exp]": {RESEARCH, CORE},
    # Hasani et al. have networks for f, g and k.
    "ParaCfC[published]": {RESEARCH},
    "ParaCfC[consistent]": {RESEARCH},
    # Mishra et al.: another forget gate (research); without read-out, norm and gate (core).
    "ParaM2RNN": {RESEARCH, CORE},
    # Feng et al., appendix B. Time gaps are not in the paper.
    "MinGRU[plain]": {FAITHFUL},
    "MinGRU[decay]": {RESEARCH},
    "MinLSTM": {FAITHFUL},
    # Transitions with a sign, turns and rounds of turns are not in Feng et al.
    "SignedMinGRU[decoupled]": {RESEARCH},
    "SignedMinGRU[coupled]": {RESEARCH},
    "RotationMinGRU[snapped]": {RESEARCH},
    "RotationMinGRU[free]": {RESEARCH},
    "GivensMinGRU": {RESEARCH},
    # DeltaNet and DeltaProduct without convolution and norms, in another paper's architecture.
    "DeltaMinGRU[nh=1]": {RESEARCH, CORE},
    "DeltaMinGRU[nh=2]": {RESEARCH, CORE},
    "DeltaMinGRU[decay]": {RESEARCH, CORE},
}
"""Written by hand from the papers and the definitions of docs/fidelity.md, with the reason."""

JACOBIANS = {
    "ParaGRU[diag]": "diag", "ParaGRU[head]": "head", "ParaLSTM": "block2", "ParaNLRU": "diag",
    "ParaSLSTM[sigmoid]": "block4", "ParaSLSTM[exp]": "block4", "ParaCfC[published]": "diag",
    "ParaCfC[consistent]": "diag", "ParaM2RNN": "m2rnn",
}  # fmt: skip
"""By hand; all others are linear in their state."""


def rows(name):
    return {row.name: row for row in card(name.partition("[")[0]).rows}


def test_every_cell_is_in_the_table():
    assert set(LABELS) == set(cell_names())


@pytest.mark.parametrize("name", cell_names())
def test_labels_and_classes(name):
    row = rows(name)[name]
    assert set(row.fidelity) == LABELS[name]
    assert row.structure[0] == JACOBIANS.get(name, "linear")


def sizes_of(cell):
    """Values of the symbols of the cost table."""
    names = {"d_h": cell.sizes[cell.spec.axes[0]], **cell.sizes}
    return {sympy.Symbol(k, positive=True): v for k, v in names.items()}


@pytest.mark.parametrize("name", cell_names())
def test_costs_are_those_of_a_cell_that_is_counted(name):
    """State and dense Jacobian by the cell's shape, multiplications in maps by the weights' numbers:
    every one of a diagonal or head map meets one number of the state, every one of a right map one
    of each row."""
    cell = get_cell(name).factory()
    (found,) = [v for v in card(name).variants if v.name == name]
    cost = {c.quantity: int(c.size.subs(sizes_of(cell))) for c in found.costs}
    state = cell.init_state(1).numel()
    assert cost["state, numbers"] == state
    assert cost["dense Jacobian, numbers (never formed in a solve)"] == state**2
    if not any(st.map.structure == "contract" for st in linear_stages(cell.spec)):
        rows_of = cell.sizes.get("K", 1)
        used = [getattr(cell, st.map.name).numel() for st in linear_stages(cell.spec)]
        times = [rows_of if st.map.structure == "right" else 1 for st in linear_stages(cell.spec)]
        want = sum(n * k for n, k in zip(used, times, strict=True))
        assert cost["step: multiplications in recurrent maps"] == want
    kind = cell.jac_structure
    if kind in ("diag", "block2", "block4"):
        slots = cell.state_slots
        assert cost["chunk operator, numbers"] == slots**2 * cell.channels
        assert cost["chunk operator: multiplications to extend it by a step"] == (
            slots**3 * cell.channels
        )


def linear_stages(spec):
    return [st for st in spec.stages if hasattr(st, "map")]


@pytest.mark.parametrize(
    ("name", "want"),
    [
        ("ParaGRU[diag]", 3),  # σ, σ, tanh
        ("ParaLSTM", 5),  # σ of the argument and of its negative, tanh, σ, tanh of the memory
        ("MinGRU[plain]", 3),  # σ(u), σ(−u), g
        ("MinLSTM", 5),  # two softplus, σ(q), σ(−q), g
        ("ParaCfC[published]", 3),
        ("ParaCfC[consistent]", 3),  # softplus, expm1, tanh
        ("SignedMinGRU[coupled]", 3),
        ("ParaSLSTM[exp]", 6),  # tanh, σ, two maxima, two exp
        ("ParaSLSTM[sigmoid]", 7),  # and softplus
    ],
)
def test_function_values_are_counted_by_hand(name, want):
    cell = get_cell(name).factory()
    (found,) = [v for v in card(name).variants if v.name == name]
    cost = {c.quantity: c.size.subs(sizes_of(cell)) for c in found.costs}
    assert cost["step: function values"] == want * cell.channels


# What a deviation says of a cell, measured. A text that said the opposite would fail.


def deviation(name, *words):
    found = [
        d
        for d in get_cell(name).facts.deviations
        if all(w in d.what + d.effect + d.why for w in words)
    ]
    assert len(found) == 1, f"{name}: {words}"
    return found[0]


def test_deviations_say_what_the_cells_do():
    deviation("ParaGRU[diag]", "standard deviation 1/sqrt(d_h)")
    torch.manual_seed(0)
    assert abs(get_cell("ParaGRU[diag]").factory(3, 40_000).A_z.std() * 200 - 1) < 0.05
    deviation("ParaGRU[diag]", "clip")
    assert get_cell("ParaGRU[diag]").factory().max_recurrent_norm == 0.5
    deviation("MinGRU[plain]", "1/2 everywhere")
    assert get_cell("MinGRU[plain]").factory().init_state(1).eq(0.5).all()
    deviation("MinGRU[plain]", "derivative of g at 0 is 1")
    x = torch.zeros(1, requires_grad=True)
    assert torch.autograd.grad(NAMESPACE["positive"](x).sum(), x)[0] == 1
    deviation("ParaCfC[published]", "form='consistent' decays from the old state")
    h = torch.rand(1, 6)
    still = get_cell("ParaCfC[consistent]").factory().step(h, torch.randn(1, 5), dt=torch.zeros(1))
    assert torch.equal(still, h)
    deviation("ParaSLSTM[exp]", "zero state is empty")
    deviation("DeltaMinGRU[nh=1]", "Queries are not normalised", "1e-12")


@pytest.mark.parametrize("name", cell_names())
def test_symbols_have_the_shapes_of_the_cell(name):
    """Every parameter of the Spec whose name the card has, has the shape that the card says."""
    cell = get_cell(name).factory()
    text = " ".join(s.latex for s in get_cell(name).facts.symbols)
    assert "x_t" in text
    for m in cell.spec.map_list:
        letter = m.latex.partition("_")[0]
        assert re.search(rf"\b{letter}(_|\b)", text), f"{name}: no row for {m.latex}"


# -- a card shows, and does nothing else ---------------------------------------------------------

EVIL = "<script>alert(1)</script>"


def evil_cell():
    with Spec(f"{EVIL} `x` [a](javascript:b)") as s:
        h = s.state("h", bounds=(-1, 1), latex=f"h{EVIL}")
        (u,) = s.drives("u")
        w = s.map("w", structure="diagonal")
        s.next(h, tanh(w(h) + u))
    source = Source(
        f"k{EVIL}", EVIL, f"t{EVIL}`", f"v{EVIL}", 2020, f"1{EVIL})", f"e{EVIL}",
        f"@article{{x}}\n```\n{EVIL}\n\x1b[2J",
    )  # fmt: skip
    facts = Facts(
        title=f"T{EVIL}",
        slug="evil",
        family="own",
        fidelity=(RESEARCH,),
        summary=f"s\n\n{EVIL} mix='`{EVIL}' f(`{EVIL}) \x1b]0;x\x07",
        sources=(source,),
        symbols=(Symbol(f"x_{{{EVIL}}}", f"`{EVIL}", EVIL),),
        deviations=(Deviation(EVIL, EVIL, EVIL, f"tests/`{EVIL}"),),
        parallel_path=EVIL,
        numerics=EVIL,
        notes=(f"n\n# {EVIL}",),
    )
    return type("Own", (Cell,), {"spec": s, "facts": facts}), s


def outside_code(page: str) -> str:
    """Markdown without what is code, whose characters mean nothing."""
    page = re.sub(r"^(`{3,})\w*\n.*?^\1$", "", page, flags=re.M | re.S)
    return re.sub(r"(?<!\\)(`+)(?!`).*?(?<!`)\1(?!`)", "", page)


def test_nothing_given_is_markup():
    kind, spec = evil_cell()
    for subject in (spec, kind):
        page = card_markdown(subject)
        rest = outside_code(page)
        assert "<script" not in rest
        assert not re.search(r"(?<!\\)\]\(javascript", rest)
        assert "\x1b" not in page
        assert EVIL not in rest
        text = card_text(subject)
        assert all(c.isprintable() or c == "\n" for c in text)
        assert "script" in text, "it is shown"


def test_control_characters_in_any_fact_do_not_reach_a_terminal():
    kind, _ = evil_cell()
    for field in ("title", "summary", "parallel_path", "numerics"):
        changed = type("Own", (kind,), {"facts": replace(kind.facts, **{field: "a\x1b[31mb\x9bc"})})
        assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f]", card_text(changed))
