"""Names that an author may choose must not meet names that the printer makes."""

from __future__ import annotations

import keyword

import pytest
import torch

from pararnn.solvers.spec_recurrence import SpecRecurrence
from pararnn.spec import Spec, SpecError, sigmoid, tanh
from pararnn.spec.derive import PROGRAMS
from pararnn.spec.print import print_program


def gated(u_z, u_n, A, B, p):
    with Spec("S") as s:
        h = s.state("h", bounds=(-1, 1))
        first, second = s.drives([u_z, u_n])
        a, b = s.maps([A, B], structure="diagonal")
        (q,) = s.params([p])
        z = s.let("z", sigmoid(a(h) + first))
        n = s.let("n", tanh(b(z * h) * q + second * first))
        s.next(h, (1 - z) * h + z * n)
    return s


def by_hand(h, u_z, u_n, a, b, q):
    z = torch.sigmoid(a * h + u_z)
    return (1 - z) * h + z * torch.tanh(b * z * h * q + u_n * u_z)


CHOICES = [
    ("u_z", "u_n", "A_z", "A_n", "p"),
    ("x0", "x1", "x2", "x3", "x4"),
    ("c0", "c1", "c2", "c3", "c4"),
    ("c1", "x0", "c0", "x1", "c3"),
    ("h_next_bar", "h_bar", "h_dot", "z_bar", "n_bar"),
    ("a_dot_in", "a_dot", "A", "B", "b_dot_in"),
    ("b_dot_bar", "a_dot_in_bar", "A", "B", "b_dot"),
    ("_x0", "_x1", "_c0", "_c1", "_h_dot"),
    ("_h_next_bar", "_z_bar", "_a_dot_in", "B", "_a_dot_bar"),
]


@pytest.mark.parametrize("names", CHOICES, ids=" ".join)
def test_any_names_give_the_same_numbers(names):
    try:
        spec = gated(*names)
    except SpecError:
        return  # refusing a name is as good as keeping it apart
    torch.manual_seed(0)
    values = [torch.randn(5, dtype=torch.float64, requires_grad=True) for _ in range(6)]
    h, u_z, u_n, a, b, q = values
    want = by_hand(*values)
    dynamics = SpecRecurrence(spec, {"d": 5}, (a, b, q), torch.float64)
    u = torch.cat([u_z, u_n])
    with torch.no_grad():
        torch.testing.assert_close(dynamics.step(h, u), want)
        v = torch.randn(5, dtype=torch.float64)
    grads = torch.autograd.grad(want, values, v)
    with torch.no_grad():
        c = dynamics.coefficients(h, u)
        torch.testing.assert_close(dynamics.transpose(c, v), grads[0])
        torch.testing.assert_close(dynamics.tangent(c, v), grads[0])  # diagonal: equal
        lead = (1, 1, -1)
        following, op = dynamics.step_with_operator(h.expand(lead), u.expand(lead), "exact")
        torch.testing.assert_close(following[0, 0], want)
        torch.testing.assert_close((op[0, 0] * v), grads[0])
        torch.testing.assert_close(
            dynamics.operator_at(h.expand(lead), u.expand(lead), "exact"), op
        )
        at = h.expand(lead), u.expand(lead)
        u_bar, (a_bar, b_bar, q_bar) = dynamics.gradients(
            dynamics.linearization(*at), *at, v.expand(lead)
        )
        torch.testing.assert_close(u_bar[0, 0], torch.cat(grads[1:3]))
        torch.testing.assert_close((a_bar, b_bar, q_bar), grads[3:])


@pytest.mark.parametrize(
    "name",
    [
        *keyword.kwlist,
        *("square", "sqrt", "lerp", "addcmul", "ratio", "zero", "sigmoid", "tanh", "exp", "log"),
        *("sin", "cos", "softplus", "diagonal", "head", "dense", "right", "head_t", "dense_abs"),
    ],
)
def test_names_that_mean_something_are_refused(name):
    with pytest.raises(SpecError), Spec("S") as s:  # noqa: PT012
        s.state("h")
        s.drives([name])


@pytest.mark.parametrize("name", ["step", "gradients", "tangent", "lam", "Wx", "match", "print"])
def test_other_names_are_fine(name):
    with Spec("S") as s:
        h = s.state(name, bounds=(-1, 1))
        (u,) = s.drives("u")
        w = s.map("w", structure="diagonal")
        s.next(h, tanh(w(h) + u))
    for program in set(PROGRAMS) - {"read", "affine"}:
        compile(print_program(s, program), "x", "exec")
