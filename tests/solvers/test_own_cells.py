"""Cells of any Spec: parallel equals the loop over the equation, gradients included."""

from __future__ import annotations

import pytest
import torch

from pararnn import Cell, NewtonConfig, Spec, SpecError, sequential_apply, sigmoid, solve, tanh

MODES = {
    "newton": ("newton", None),
    "chunks": ("shooting", NewtonConfig(chunk_length=7)),
    "chunks, poor guess": ("shooting", NewtonConfig(chunk_length=5, warmup=1)),
    "auto": ("auto", None),
}
modes = pytest.mark.parametrize(
    "mode",
    [
        pytest.param(mode, id=name, marks=pytest.mark.slow if name == "chunks" else ())
        for name, mode in MODES.items()
    ],
)


def build(specimen, seed=0, d_in=2):
    torch.manual_seed(seed)
    cell = Cell(d_in, spec=specimen.spec, sizes=specimen.sizes).double()
    with torch.no_grad():
        for p in cell.parameters():
            p.copy_(0.6 * torch.randn_like(p))
    return cell


def reference(specimen, cell, x, h0, resets=None):
    """The loop over the hand-written equation, differentiable; nothing of the library but the
    packed projection."""
    u = torch.nn.functional.linear(x, cell.in_proj.weight, cell.in_proj.bias)
    shapes = specimen.spec.drive_shapes(specimen.sizes)
    widths = [torch.Size(s).numel() for s in shapes]
    parts = [p.reshape(*u.shape[:2], *s) for p, s in zip(u.split(widths, -1), shapes, strict=True)]
    params = [getattr(cell, n) for n in specimen.spec.parameter_shapes(specimen.sizes)]
    h, out = h0, []
    for t in range(x.shape[1]):
        if resets is not None:
            h = h * (~resets[:, t]).double().reshape(-1, *(1,) * (h.ndim - 1))
        h = specimen.step(h, tuple(p[:, t] for p in parts), tuple(params))
        out.append(h)
    return torch.stack(out, 1)


@modes
@pytest.mark.parametrize("with_resets", [False, True], ids=["", "resets"])
def test_states_and_gradients(specimen, mode, with_resets):
    method, config = mode
    cell = build(specimen)
    torch.manual_seed(1)
    x = torch.randn(3, 31, 2, dtype=torch.float64, requires_grad=True)
    h0 = (0.5 * torch.randn(3, *cell.state_shape, dtype=torch.float64)).requires_grad_()
    resets = None
    if with_resets:  # the first step, two in a row, at and around boundaries of chunks, the last
        resets = torch.zeros(3, 31, dtype=torch.bool)
        resets[0, 0] = resets[0, 30] = resets[1, 7] = resets[1, 8] = True
        resets[1, 20] = resets[2, 5] = resets[2, 6] = resets[2, 14] = True
    want = reference(specimen, cell, x, h0, resets)
    loop = sequential_apply(cell, x, h0=h0, resets=resets)
    torch.testing.assert_close(loop, want, rtol=1e-10, atol=1e-11)
    s = solve(cell, x, config, method=method, h0=h0, resets=resets)
    assert s.converged
    torch.testing.assert_close(s.states, want, rtol=1e-9, atol=1e-10)
    inputs = [x, h0, *cell.parameters()]
    weight = torch.randn_like(want)

    def gradients(states, final):
        loss = (states * weight).sum() + (final**2).sum()
        found = torch.autograd.grad(loss, inputs, allow_unused=True)
        return [torch.zeros_like(t) if g is None else g for t, g in zip(inputs, found, strict=True)]

    got, wanted = gradients(s.states, s.final_state), gradients(want, want[:, -1])
    torch.testing.assert_close(got, wanted, rtol=1e-7, atol=1e-9)


def test_second_derivatives(specimen):
    """Gradient of a function of the gradient, against the loop; resets and chunks included."""
    cell = build(specimen)
    torch.manual_seed(2)
    x = torch.randn(2, 9, 2, dtype=torch.float64, requires_grad=True)
    h0 = (0.5 * torch.randn(2, *cell.state_shape, dtype=torch.float64)).requires_grad_()
    resets = torch.zeros(2, 9, dtype=torch.bool)
    resets[0, 4] = True
    inputs = [x, h0, *cell.parameters()]
    weight = torch.randn(2, 9, *cell.state_shape, dtype=torch.float64)

    def second(states):
        found = torch.autograd.grad(
            (states * weight + states**2).sum(), inputs, create_graph=True, allow_unused=True
        )
        found = [g for g in found if g is not None]
        loss = sum(((i + 1) * g**2).sum() for i, g in enumerate(found))
        again = torch.autograd.grad(loss, inputs, allow_unused=True)
        return [torch.zeros_like(t) if g is None else g for t, g in zip(inputs, again, strict=True)]

    config = NewtonConfig(chunk_length=4)
    got = second(solve(cell, x, config, method="shooting", h0=h0, resets=resets).states)
    want = second(reference(specimen, cell, x, h0, resets))
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", ["lstm", "lstm_head", "matrix_two"])
def test_several_slots_stream(zoo, name):
    """Steps one by one, and pieces that continue from the final state, equal the whole."""
    cell = build(zoo[name])
    x = torch.randn(2, 20, 2, dtype=torch.float64)
    whole = solve(cell, x, NewtonConfig(chunk_length=6), method="shooting").states
    h, steps = cell.init_state(2), []
    for t in range(20):
        h = cell.step(h, x[:, t])
        steps.append(h)
    torch.testing.assert_close(torch.stack(steps, 1), whole, rtol=0, atol=1e-12)
    state, pieces = None, []
    for part in x.split(7, 1):
        s = solve(cell, part, method="newton", h0=state)
        state = s.final_state
        pieces.append(s.states)
    torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=0, atol=1e-12)


def test_only_what_needs_a_gradient(specimen):
    """x alone, h0 alone, parameters alone, nothing."""
    cell = build(specimen)
    x = torch.randn(2, 12, 2, dtype=torch.float64)
    h0 = 0.5 * torch.randn(2, *cell.state_shape, dtype=torch.float64)
    for needed in ("x", "h0", "parameters", "nothing"):
        x.requires_grad_(needed == "x"), h0.requires_grad_(needed == "h0")
        cell.requires_grad_(needed == "parameters")
        inputs = {"x": [x], "h0": [h0], "parameters": list(cell.parameters()), "nothing": []}[
            needed
        ]
        got = solve(cell, x, method="newton", h0=h0).states
        want = reference(specimen, cell, x, h0)
        assert got.requires_grad == bool(inputs)
        if inputs:
            got = torch.autograd.grad(got.pow(2).sum(), inputs, allow_unused=True)
            want = torch.autograd.grad(want.pow(2).sum(), inputs, allow_unused=True)
            for a, b, t in zip(got, want, inputs, strict=True):
                a, b = (torch.zeros_like(t) if g is None else g for g in (a, b))
                torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9)


def min_gru():
    with Spec("MinGRU") as s:
        h = s.state("h")
        u_z, u_n = s.drives("u_z u_n")
        z = s.let("z", sigmoid(u_z))
        s.next(h, (1 - z) * h + z * u_n)
    return s


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@modes
def test_a_spec_without_recurrent_parameters(dtype, mode):
    method, config = mode
    torch.manual_seed(0)
    cell = Cell(3, 4, spec=min_gru()).to(dtype)
    x = torch.randn(2, 33, 3, dtype=dtype, requires_grad=True)
    s = solve(cell, x, config, method=method)
    h, states = torch.zeros(2, 4, dtype=torch.float64), []
    u = cell.drives(x).double()
    for t in range(33):
        z = torch.sigmoid(u[:, t, :4])
        h = (1 - z) * h + z * u[:, t, 4:]
        states.append(h)
    want = torch.stack(states, 1)
    limit = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 2e-2}[dtype]
    assert s.states.dtype == dtype
    torch.testing.assert_close(s.states.double(), want, rtol=limit, atol=limit)
    got = torch.autograd.grad(s.states.double().sum(), x)[0]
    want = torch.autograd.grad(want.sum(), x)[0]
    torch.testing.assert_close(got, want, rtol=10 * limit, atol=10 * limit)


@modes
def test_a_step_without_memory(mode):
    with Spec("Plain") as s:
        h = s.state("h", bounds=(-1, 1))
        (u,) = s.drives("u")
        s.next(h, tanh(u))
    method, config = mode
    cell = Cell(3, 4, spec=s).double()
    x = torch.randn(2, 20, 3, dtype=torch.float64, requires_grad=True)
    got = solve(cell, x, config, method=method).states
    want = torch.tanh(cell.drives(x))
    torch.testing.assert_close(got, want)
    inputs = [x, *cell.parameters()]
    a, b = (torch.autograd.grad(y.pow(2).sum(), inputs, create_graph=True) for y in (got, want))
    torch.testing.assert_close(a, b)
    a, b = (torch.autograd.grad(sum(g.pow(2).sum() for g in v), inputs) for v in (a, b))
    torch.testing.assert_close(a, b)


@modes
def test_a_spec_without_drives(mode):
    with Spec("Closed") as s:
        h = s.state("h", bounds=(-1, 1))
        A = s.map("A", structure="diagonal")
        s.next(h, tanh(A(h)))
    method, config = mode
    with pytest.warns(UserWarning, match="zero-element"):
        cell = Cell(3, 4, spec=s).double()
    h0 = torch.randn(2, 4, dtype=torch.float64)
    x = torch.zeros(2, 20, 3, dtype=torch.float64)
    h, states = h0, []
    for _ in range(20):
        h = torch.tanh(cell.A * h)
        states.append(h)
    got = solve(cell, x, config, method=method, h0=h0).states
    torch.testing.assert_close(got, torch.stack(states, 1), rtol=0, atol=1e-13)


@modes
@pytest.mark.parametrize("kind", ["update", "map of a row", "map of a scalar"])
def test_expressions_that_do_not_vary_along_all_axes(mode, kind):
    """They are spread over the state, or refused with a sentence; never of another shape."""
    try:
        if kind == "map of a scalar":
            with Spec("S") as s:
                h = s.state("h", bounds=(-1, 1))
                (f,) = s.drives("f", axes=())
                A = s.map("A", structure="dense")
                s.next(h, tanh(A(h) + A(f)))
            sizes = {"d": 3}
        else:
            with Spec("S", axes=("K", "V")) as s:
                H = s.state("H", bounds=(-1, 1))
                (k,) = s.drives("k", axes=("K",))
                W = s.map("W", structure="right")
                s.next(H, tanh(k) if kind == "update" else tanh(W(H) + W(k)))
            sizes = {"K": 2, "V": 3}
        cell = Cell(2, spec=s, sizes=sizes).double()
    except SpecError:
        return
    method, config = mode
    x = torch.randn(2, 16, 2, dtype=torch.float64, requires_grad=True)
    h, states = torch.zeros(2, *cell.state_shape, dtype=torch.float64), []
    for t in range(16):
        u = cell.drives(x[:, t])
        if kind == "map of a scalar":
            h = torch.tanh(h @ cell.A.T + u * cell.A.sum(1))
        elif kind == "update":
            h = torch.tanh(u)[..., None].expand(2, 2, 3)
        else:
            h = torch.tanh(h @ cell.W + u[..., None] * cell.W.sum(0))
        states.append(h)
    want = torch.stack(states, 1)
    assert sequential_apply(cell, x).shape == want.shape
    got = solve(cell, x, config, method=method).states
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    a, b = (torch.autograd.grad(y.pow(2).sum(), x)[0] for y in (got, want))
    torch.testing.assert_close(a, b)


def test_jacobian_kinds(specimen):
    """Every kind that is formed gives the same states; the others are refused by name."""
    cell = build(specimen)
    x = 0.3 * torch.randn(2, 30, 2, dtype=torch.float64)  # more, and "nodes" overflows
    want = sequential_apply(cell, x)
    assert bool(want.isfinite().all())
    for kind in ("auto", "exact", "quasi", "none"):
        config = NewtonConfig(chunk_length=6, jacobian=kind, warmup=2, iteration_cap=40)
        try:
            s = solve(cell, x, config, method="shooting")
        except ValueError as e:
            assert "not formed" in str(e)  # noqa: PT017
            assert kind in ("exact", "quasi")
            continue
        assert s.converged
        torch.testing.assert_close(s.states, want, rtol=1e-9, atol=1e-10)
    for kind in ("auto", "exact"):
        config = NewtonConfig(jacobian=kind)
        s = solve(cell, x, config, method="newton")
        torch.testing.assert_close(s.states, want, rtol=1e-9, atol=1e-10)


@modes
def test_coefficients_of_parameters_alone_in_a_matrix_state(mode):
    with Spec("S", axes=("K", "V")) as s:
        H = s.state("H")
        (k,) = s.drives("k", axes=("K",))
        (p,) = s.params("p", axes=("K", "V"))
        W = s.map("W", structure="right")
        s.next(H, p * H / 2 + tanh(W(H) + k) / 10)
    torch.manual_seed(0)
    cell = Cell(2, spec=s, sizes={"K": 2, "V": 3}).double()
    method, config = mode
    x = torch.randn(2, 16, 2, dtype=torch.float64, requires_grad=True)
    h, states = torch.zeros(2, 2, 3, dtype=torch.float64), []
    for u in cell.drives(x).unbind(1):
        h = cell.p * h / 2 + torch.tanh(h @ cell.W + u[..., None]) / 10
        states.append(h)
    want = torch.stack(states, 1)
    got = solve(cell, x, config, method=method).states
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    a, b = (torch.autograd.grad(y.pow(2).sum(), x)[0] for y in (got, want))
    torch.testing.assert_close(a, b)
