"""What the page shows: the author's order, time indices, the usual operators."""

from __future__ import annotations

import pytest
import sympy

from pararnn.cells.para_gru import gru_spec
from pararnn.cells.para_m2rnn import m2rnn_spec
from pararnn.spec import Spec, sigmoid, tanh
from pararnn.spec.derive.factorization import factorize


def lines(spec):
    return [e.latex for e in spec.latex()]


def test_gru_as_in_the_paper():
    assert lines(gru_spec("diag")) == [
        r"z_t = \sigma(a_z \odot h_{t-1} + W_z x_t + b_z)",
        r"r_t = \sigma(a_r \odot h_{t-1} + W_r x_t + b_r)",
        r"n_t = \tanh(a_n \odot (r_t \odot h_{t-1}) + W_n x_t + b_n)",
        r"h_t = (1 - z_t) \odot h_{t-1} + z_t \odot n_t",
    ]
    assert [e.name for e in gru_spec("diag").latex()] == ["z", "r", "n", "h"]


def test_heads_are_matrices():
    assert lines(gru_spec("head"))[2] == r"n_t = \tanh(A_n (r_t \odot h_{t-1}) + W_n x_t + b_n)"


def test_matrix_state():
    text = lines(m2rnn_spec())
    assert text[-2].endswith(r"\tanh(H_{t-1} W + k_t v_t^\top)")
    assert r"f_t" in text[-1]
    assert text[-1].startswith("H_t = ")


def authored(build):
    with Spec("S") as s:
        h = s.state("h", bounds=(-1, 1))
        u, z = s.drives("u z", inline=False)
        s.next(h, build(h, u, z))
    return lines(s)[-1].partition(" = ")[2]


@pytest.mark.parametrize(
    ("build", "want"),
    [
        (lambda h, u, z: u + h, r"u_t + h_{t-1}"),
        (lambda h, u, z: h + u, r"h_{t-1} + u_t"),
        (lambda h, u, z: z * h - u, r"z_t \odot h_{t-1} - u_t"),
        (lambda h, u, z: (1 - z) * h, r"(1 - z_t) \odot h_{t-1}"),
        (lambda h, u, z: h * (1 - z), r"h_{t-1} \odot (1 - z_t)"),
        (lambda h, u, z: -(h + u), r"-(h_{t-1} + u_t)"),
        (lambda h, u, z: h - (u - z), r"h_{t-1} - (u_t - z_t)"),
        (lambda h, u, z: h**2 + u, r"h_{t-1}^{2} + u_t"),
        (lambda h, u, z: 2 * h, r"2 h_{t-1}"),
        (lambda h, u, z: h + sympy.Integer(10) ** -24, r"h_{t-1} + 10^{-24}"),
        (lambda h, u, z: h + sympy.Float(10) ** -24, r"h_{t-1} + 10^{-24}"),
        (lambda h, u, z: h * (1 + u**2) ** -2, r"\frac{h_{t-1}}{(1 + u_t^{2})^{2}}"),
        (lambda h, u, z: tanh(sigmoid(u) * h), r"\tanh(\sigma(u_t) \odot h_{t-1})"),
    ],
)
def test_the_order_is_kept(build, want):
    assert authored(build) == want


def test_fractions_show_both_parts():
    text = authored(lambda h, u, z: h / (1 + u**2))
    assert r"\frac{h_{t-1}}{1 + u_t^{2}}" in text


def test_slots_with_names_of_their_own(zoo):
    text = lines(zoo["lstm"].spec)
    assert text[0] == r"f_t = \sigma(a_f \odot h_{t-1} + c_f \odot c_{t-1} + W_f x_t + b_f)"
    assert text[2] == r"c_t = f_t \odot c_{t-1} + (1 - f_t) \odot z_t"
    assert text[3] == r"o_t = \sigma(a_o \odot h_{t-1} + c_o \odot c_t + W_o x_t + b_o)"
    assert text[4] == r"h_t = o_t \odot \tanh(c_t)"


def test_jacobian_lines(specimen):
    text = specimen.spec.jacobian_latex()
    nodes = [st for st in specimen.spec.factorization.path if getattr(st, "node", False)]
    assert len(text) == len(specimen.spec.slots) + len(nodes)
    for line in text:
        left, _, right = line.partition(" = ")
        assert left.startswith(r"\dot{")
        assert right.strip(), line
        assert line.count("{") == line.count("}")
        assert line.count("(") == line.count(")")


def test_a_step_without_memory_has_zero_jacobian():
    with Spec("S") as s:
        h = s.state("h", bounds=(-1, 1))
        (u,) = s.drives("u")
        s.next(h, tanh(u))
    assert s.jacobian_latex() == [r"\dot{h}_t = 0"]
    assert s.jac_structure == "linear"


def test_greek_names_are_letters():
    with Spec("greek") as s:
        h = s.state("h")
        (mu_x,) = s.drives("mu_x", inline=False)
        (Lambda,) = s.params("Lambda")
        s.next(h, Lambda * h + mu_x)
    assert lines(s)[-1] == r"h_t = \Lambda \odot h_{t-1} + \mu_{x,t}"


def test_the_printed_jacobian_is_the_derived_one(specimen):
    """With new slot values put in, its coefficients are those that are proven and computed."""
    spec = specimen.spec
    updates = spec.factorization.outputs
    edges = factorize(spec, at=updates).edges

    def put_in(target):
        total = {}
        for source, coefficient in edges[target].items():
            inner = put_in(source) if source in updates else {source: sympy.Integer(1)}
            for s, c in inner.items():
                total[s] = total.get(s, 0) + coefficient * c
        return total

    for target, row in spec.factorization.edges.items():
        found = put_in(target)
        assert set(found) == set(row)
        assert all(sympy.expand(found[s] - c) == 0 for s, c in row.items())


def test_a_sum_starts_with_its_number():
    with Spec("ordered") as s:
        h = s.state("h")
        (u,) = s.drives("u", inline=False)
        z = s.let("z", sigmoid(u))
        s.next(h, (1 + z) * h * h / 2)
    assert "(1 + z_t)" in s.jacobian_latex()[-1]


def test_a_sum_that_is_subtracted_has_brackets():
    with Spec("Subtracted", axes=("K", "V")) as s:
        S, R = s.state("S"), s.state("R")
        (k,) = s.drives("k", axes=("K",))
        (v,) = s.drives("v")
        p = s.contract("p", k * S + R * k * k, over="K")
        s.next(S, R / 2 - p)
        s.next(R, R / 2 + v)
    (line,) = [text for text in s.jacobian_latex() if r"\dot{S}" in text.split("=")[0]]
    assert "- (" in line.replace(r"\left(", "(").replace(r"\bigl(", "("), line
