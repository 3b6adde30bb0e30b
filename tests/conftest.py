"""Specs of every kind, each with the same equation written by hand in plain torch: the oracle."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

# Triton reads this when it is imported, which any test module may do.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@dataclass(frozen=True)
class Specimen:
    """A Spec, sizes to try it with, and ``equation(slots, *drives, *maps, *params) -> slots``."""

    name: str
    spec: Any
    sizes: dict[str, int]
    equation: Callable[..., tuple[Tensor, ...]]
    jac_structure: str

    def inputs(self, *lead: int, seed: int = 0, scale: float = 0.7) -> tuple:
        """State, tuple of drives, tuple of parameters: random float64 tensors."""
        g = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            return scale * torch.randn(shape, generator=g, dtype=torch.float64)

        state = torch.tanh(draw(*lead, *self.spec.state_shape(self.sizes)))
        drives = tuple(draw(*lead, *s) for s in self.spec.drive_shapes(self.sizes))
        params = tuple(draw(*s) for s in self.spec.parameter_shapes(self.sizes).values())
        return state, drives, params

    def step(self, state: Tensor, drives: tuple, params: tuple) -> Tensor:
        """The hand-written step on a state tensor with any leading dimensions."""
        n = len(self.spec.slots)
        axis = -len(self.spec.axes) - 1
        slots = (state,) if n == 1 else state.unbind(axis)
        out = self.equation(*slots, *drives, *params)
        return out[0] if n == 1 else torch.stack(out, axis)


def _heads(a: Tensor, h: Tensor) -> Tensor:
    return torch.cat(
        [h[..., i * a.shape[-1] : (i + 1) * a.shape[-1]] @ m.T for i, m in enumerate(a)], -1
    )


def _gru(mix: Callable[[Tensor, Tensor], Tensor]) -> Callable:
    def equation(h, u_z, u_r, u_n, a_z, a_r, a_n):
        z = torch.sigmoid(mix(a_z, h) + u_z)
        r = torch.sigmoid(mix(a_r, h) + u_r)
        n = torch.tanh(mix(a_n, r * h) + u_n)
        return ((1 - z) * h + z * n,)

    return equation


def _lstm(mix: Callable[[Tensor, Tensor], Tensor]) -> Callable:
    def equation(c, h, u_f, u_z, u_o, a_f, a_z, a_o, c_f, c_o):
        f = torch.sigmoid(mix(a_f, h) + c_f * c + u_f)
        z = torch.tanh(mix(a_z, h) + u_z)
        new = f * c + (1 - f) * z
        o = torch.sigmoid(a_o * h + c_o * new + u_o)
        return new, o * torch.tanh(new)

    return equation


def _lstm_spec(name: str, structure: str) -> Any:
    """Danieli et al., arXiv:2510.21450, eq. 3.1b, with peepholes on the old and the new state."""
    from pararnn.spec import Spec, sigmoid, tanh

    with Spec(name) as s:
        c = s.state("c", bounds=(-1, 1))
        h = s.state("h", bounds=(-1, 1))
        u_f, u_z, u_o = s.drives("u_f u_z u_o")
        a_f, a_z = s.maps("a_f a_z", structure=structure)
        a_o = s.map("a_o", structure="diagonal")
        c_f, c_o = s.params("c_f c_o")
        f = s.let("f", sigmoid(a_f(h) + c_f * c + u_f))
        z = s.let("z", tanh(a_z(h) + u_z))
        s.next(c, f * c + (1 - f) * z)
        o = s.let("o", sigmoid(a_o(h) + c_o * s.updated(c) + u_o))
        s.next(h, o * tanh(s.updated(c)))
    return s


def _build() -> dict[str, Specimen]:
    import sympy

    from pararnn.spec import (
        Spec,
        cos,
        exp,
        log,
        log1p,
        positive,
        sigmoid,
        sin,
        snap,
        softplus,
        tanh,
    )

    out: dict[str, Specimen] = {}

    def add(spec: Any, sizes: dict, equation: Callable, jac_structure: str) -> None:
        out[spec.name] = Specimen(spec.name, spec, sizes, equation, jac_structure)

    for name, structure, mix, jac in (
        ("gru_diag", "diagonal", torch.mul, "diag"),
        ("gru_head", "head", _heads, "head"),
        ("gru_dense", "dense", lambda a, h: h @ a.T, "dense"),
    ):
        with Spec(name) as s:
            h = s.state("h", bounds=(-1, 1))
            u_z, u_r, u_n = s.drives("u_z u_r u_n")
            A_z, A_r, A_n = s.maps("A_z A_r A_n", structure=structure)
            z = s.let("z", sigmoid(A_z(h) + u_z))
            r = s.let("r", sigmoid(A_r(h) + u_r))
            n = s.let("n", tanh(A_n(r * h) + u_n))
            s.next(h, (1 - z) * h + z * n)
        add(s, {"d": 4, "heads": 2}, _gru(mix), jac)

    with Spec("matrix", axes=("K", "V")) as s:
        H = s.state("H", bounds=(-1, 1))
        (k,) = s.drives("k", axes=("K",), inline=False)
        (v,) = s.drives("v", axes=("V",), inline=False)
        (u_f,) = s.drives("u_f", axes=())
        W = s.map("W", structure="right")
        D = s.map("D", structure="diagonal")
        (g,) = s.params("g", axes=("K",))
        f = s.let("f", sigmoid(u_f))
        Z = s.let("Z", tanh(W(H) + D(H) + g * k * v))
        s.next(H, f * H + (1 - f) * Z)

    def matrix(H, k, v, u_f, W, D, g):
        f = torch.sigmoid(u_f)[..., None, None]
        Z = torch.tanh(H @ W + D * H + (g * k)[..., :, None] * v[..., None, :])
        return (f * H + (1 - f) * Z,)

    add(s, {"K": 2, "V": 3}, matrix, "m2rnn")

    with Spec("matrix_two", axes=("K", "V")) as s:
        H = s.state("H", bounds=(-1, 1))
        M = s.state("M", bounds=(-1, 1))
        (k,) = s.drives("k", axes=("K",))
        (v,) = s.drives("v", axes=("V",))
        W = s.map("W", structure="right")
        s.next(M, tanh(W(H) + M / 2 + k * v))
        s.next(H, (H + s.updated(M)) / 2)

    def matrix_two(H, M, k, v, W):
        new = torch.tanh(H @ W + M / 2 + k[..., :, None] * v[..., None, :])
        return (H + new) / 2, new

    add(s, {"K": 2, "V": 3}, matrix_two, "m2rnn")

    with Spec("matrix_block", axes=("K", "V")) as s:
        H = s.state("H", bounds=(-1, 1))
        M = s.state("M", bounds=(-1, 1))
        (k,) = s.drives("k", axes=("K",))
        (u,) = s.drives("u")
        A, B = s.maps("A B", structure="diagonal")
        s.next(H, tanh(A(H) + M * u))
        s.next(M, sigmoid(k) * M + (1 - sigmoid(k)) * tanh(B(s.updated(H)) / 3))

    def matrix_block(H, M, k, u, A, B):
        new = torch.tanh(A * H + M * u)
        f = torch.sigmoid(k)[..., None]
        return new, f * M + (1 - f) * torch.tanh(B * new / 3)

    add(s, {"K": 2, "V": 3}, matrix_block, "block2")

    add(_lstm_spec("lstm", "diagonal"), {"d": 3}, _lstm(torch.mul), "block2")
    add(_lstm_spec("lstm_head", "head"), {"d": 4, "heads": 2}, _lstm(_heads), "head")
    add(_lstm_spec("lstm_dense", "dense"), {"d": 3}, _lstm(lambda a, h: h @ a.T), "dense")

    with Spec("everything") as s:
        h = s.state("h", bounds=(-1, 1))
        u_s, u_n = s.drives("u_s u_n")
        A, B = s.maps("A B", structure="diagonal")
        g, w = s.params("g w")
        half = sympy.Rational(1, 2)
        s_ = s.let("s", softplus(g * h + u_s))
        e = s.let("e", exp(-s_) - 3)
        n = s.let("n", sin(B(e * h)) * cos(u_n * h))
        q = s.let("q", sympy.sqrt(2 + n**2) / (1 + s_) + log(2 + h * w * h * w))
        p = s.let("p", (1 + s_) ** (-3 * half) * sigmoid(A(h)) - 0.25 * h**3)
        s.next(h, tanh(p / q - h / 7))

    def everything(h, u_s, u_n, A, B, g, w):
        s_ = torch.nn.functional.softplus(g * h + u_s)
        n = torch.sin(B * ((torch.exp(-s_) - 3) * h)) * torch.cos(u_n * h)
        q = torch.sqrt(2 + n**2) / (1 + s_) + torch.log(2 + (h * w) ** 2)
        p = torch.sigmoid(A * h) / (1 + s_) ** 1.5 - h**3 / 4
        return (torch.tanh(p / q - h / 7),)

    add(s, {"d": 3}, everything, "diag")

    with Spec("rotation") as s:
        a = s.state("a")
        b = s.state("b")
        theta, u = s.drives("theta u")
        s.next(a, cos(theta) * a - sin(theta) * b + u)
        s.next(b, sin(theta) * a + cos(theta) * b)

    def rotation(a, b, theta, u):
        return (
            torch.cos(theta) * a - torch.sin(theta) * b + u,
            torch.sin(theta) * a + torch.cos(theta) * b,
        )

    add(s, {"d": 3}, rotation, "linear")

    with Spec("nodes") as s:
        a, b = s.state("a"), s.state("b")
        u, v = s.drives("u v")
        A, B = s.maps("A B", structure="diagonal")
        g = s.let("g", sin(A(a) + u) * b, node=True)
        k = s.let("k", g * a + cos(v) * b, node=True)
        n = s.let("n", u * v, node=True)
        s.next(a, tanh(g * k) + n)
        s.next(b, B(k * g) / 3 + n * a)

    def nodes(a, b, u, v, A, B):
        g = torch.sin(A * a + u) * b
        k = g * a + torch.cos(v) * b
        return torch.tanh(g * k) + u * v, B * (k * g) / 3 + u * v * a

    add(s, {"d": 3}, nodes, "block2")

    with Spec("grid", output="all") as s:
        a, b = s.state("a"), s.state("b")
        u, v = s.drives("u v")
        A = s.map("A", structure="diagonal")
        theta = s.let("theta", snap(u + v, 6))
        p = s.let("p", positive(A(a) - v))
        s.next(a, log1p(p) * cos(theta) + b)
        s.next(b, positive(u) * a - snap(v, 5) * b)

    def straight(x, m):
        step = 2 * math.pi / m
        return x + (torch.round(x / step) * step - x).detach()

    def grid(a, b, u, v, A):
        def g(x):
            return torch.where(x >= 0, x + 0.5, torch.sigmoid(x))

        new = torch.log(1 + g(A * a - v)) * torch.cos(straight(u + v, 6)) + b
        return new, g(u) * a - straight(v, 5) * b

    add(s, {"d": 3}, grid, "block2")

    for structure, sizes, mix in (
        ("diagonal", {"d": 3}, torch.mul),
        ("head", {"d": 4, "heads": 2}, _heads),
        ("dense", {"d": 3}, lambda a, h: h @ a.T),
        ("right", {"K": 2, "V": 3}, lambda a, h: h @ a),
    ):
        axes = ("K", "V") if structure == "right" else ("d",)
        with Spec(f"linear_{structure}", axes=axes) as s:
            h = s.state("h")
            (u,) = s.drives("u")
            A = s.map("A", structure=structure)
            s.next(h, A(h) + u)
        add(s, sizes, lambda h, u, A, mix=mix: (mix(A, h) + u,), "linear")
    return out


NAMES = (
    "gru_diag",
    "gru_head",
    "gru_dense",
    "matrix",
    "matrix_two",
    "matrix_block",
    "lstm",
    "lstm_head",
    "lstm_dense",
    "everything",
    "rotation",
    "nodes",
    "grid",
    "linear_diagonal",
    "linear_head",
    "linear_dense",
    "linear_right",
)


@pytest.fixture(scope="session")
def zoo() -> dict[str, Specimen]:
    """All specimens by name."""
    return _build()


@pytest.fixture(params=NAMES)
def specimen(request: pytest.FixtureRequest, zoo: dict[str, Specimen]) -> Specimen:
    """One specimen after the other."""
    return zoo[request.param]
