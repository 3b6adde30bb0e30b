"""Mixers under ``torch.func``: derivatives, maps, and both inside each other. And compiled to C++."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vmap

from pararnn import (
    DeltaMinGRU,
    GivensMinGRU,
    MinGRU,
    MinLSTM,
    ParaGRU,
    ParaRNN,
    RotationMinGRU,
    SignedMinGRU,
    solve,
)
from pararnn.solvers import sequential_apply

F64 = torch.float64
KINDS = {
    "MinGRU": lambda **kw: MinGRU(3, 4, learnable_h0=True, **kw),
    "MinLSTM": lambda **kw: MinLSTM(3, 4, **kw),
    "SignedMinGRU": lambda **kw: SignedMinGRU(3, 4, learnable_h0=True, **kw),
    "RotationMinGRU": lambda **kw: RotationMinGRU(3, 4, **kw),
    "free": lambda **kw: RotationMinGRU(3, 4, snap=None, **kw),
    "GivensMinGRU": lambda **kw: GivensMinGRU(3, 8, block_size=4, **kw),
    "DeltaMinGRU": lambda **kw: DeltaMinGRU(3, 4, n_heads=2, nh=2, **kw),
}
kinds = pytest.mark.parametrize("kind", KINDS)
decays = pytest.mark.parametrize("decay", [None, "learnable"])


class Case:
    """A mixer, an input, and its loss by the layer and by a loop over the hand-written step."""

    def __init__(self, kind, decay, length=9):
        torch.manual_seed(3)
        self.mixer = KINDS[kind](decay=decay, dtype=F64)
        with torch.no_grad():
            for p in self.mixer.parameters():
                p.add_(0.3 * torch.randn_like(p))
        self.x = torch.randn(2, length, 3, dtype=F64)
        self.gaps = None if decay is None else torch.rand(2, length, dtype=F64)
        self.weights = torch.randn(2, length, self.mixer.d_h, dtype=F64)

    def loss(self, x):
        return self.layer_loss(dict(self.mixer.named_parameters()), x)

    def layer_loss(self, parameters, x):
        y = functional_call(self.mixer, parameters, (x, None, self.gaps))
        return (y.sin() * self.weights).sum()

    def loop_loss(self, x):
        states = sequential_apply(self.mixer, x, dt=self.gaps)
        return (self.mixer.output(states, x).sin() * self.weights).sum()

    def parameters(self):
        return {name: p.detach() for name, p in self.mixer.named_parameters()}


def close(got, want):
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-10)


def by_autograd(function, *inputs):
    inputs = [x.detach().requires_grad_() for x in inputs]
    return torch.autograd.grad(function(*inputs), inputs)


@decays
@kinds
def test_gradients(kind, decay):
    case = Case(kind, decay)
    (want,) = by_autograd(case.loop_loss, case.x)
    assert want.abs().min() > 0
    close(grad(case.loss)(case.x), want)
    names = list(case.parameters())
    found = grad(case.layer_loss)(case.parameters(), case.x)
    wanted = torch.autograd.grad(case.loop_loss(case.x), list(case.mixer.parameters()))
    for name, value in zip(names, wanted, strict=True):
        close(found[name], value)
    flat = jacrev(lambda x: case.mixer(x, None, case.gaps))(case.x)
    close(jacfwd(lambda x: case.mixer(x, None, case.gaps))(case.x), flat)


@decays
@kinds
def test_tangents(kind, decay):
    case = Case(kind, decay)
    move = torch.randn_like(case.x)
    (slope,) = by_autograd(case.loop_loss, case.x)
    value, tangent = jvp(case.loss, (case.x,), (move,))
    close(value, case.loop_loss(case.x))
    close(tangent, (slope * move).sum())
    with torch.no_grad():
        close(jvp(case.loss, (case.x,), (move,))[1], (slope * move).sum())
    with torch.autograd.forward_ad.dual_level():
        dual = case.loss(torch.autograd.forward_ad.make_dual(case.x, move))
        close(torch.autograd.forward_ad.unpack_dual(dual).tangent, (slope * move).sum())


@decays
@kinds
def test_second_derivatives(kind, decay):
    case = Case(kind, decay, length=4)
    want = torch.autograd.functional.hessian(case.loop_loss, case.x)
    close(hessian(case.loss)(case.x), want)
    close(jacrev(grad(case.loss))(case.x), want)


@decays
@kinds
def test_maps(kind, decay):
    """Over inputs, over parameters, of gradients, and gradients of maps."""
    case = Case(kind, decay)
    xs = torch.stack([case.x, -2 * case.x, case.x.flip(1)])
    want = torch.stack([by_autograd(case.loop_loss, x)[0] for x in xs])
    close(vmap(case.loss)(xs), torch.stack([case.loop_loss(x) for x in xs]))
    close(vmap(grad(case.loss))(xs), want)
    close(grad(lambda xs: vmap(case.loss)(xs).sum())(xs), want)
    leaf = xs.clone().requires_grad_()
    close(torch.autograd.grad(vmap(case.loss)(leaf).sum(), leaf)[0], want)

    ensemble = {n: torch.stack([p, 0.5 * p, p - 0.1]) for n, p in case.parameters().items()}
    found = vmap(grad(case.layer_loss))(ensemble, xs)
    for i, x in enumerate(xs):
        member = {n: p[i] for n, p in ensemble.items()}
        case.mixer.load_state_dict(member)
        wanted = torch.autograd.grad(case.loop_loss(x), list(case.mixer.parameters()))
        for name, value in zip(member, wanted, strict=True):
            close(found[name][i], value)


@kinds
def test_resets(kind):
    case = Case(kind, "fixed")
    resets = torch.zeros(2, 9, dtype=torch.bool)
    resets[0, 3], resets[1, 0], resets[1, 8] = True, True, True

    def loss(x, method):
        states = solve(case.mixer, x, dt=case.gaps, resets=resets, method=method).states
        return states.sin().square().sum()

    (want,) = by_autograd(lambda x: loss(x, "sequential"), case.x)
    close(grad(lambda x: loss(x, "auto"))(case.x), want)


@kinds
def test_one_step(kind):
    case = Case(kind, "learnable")
    h = case.mixer.flat(case.mixer.init_state(2)).detach() + 0.1

    def step(h, x):
        return case.mixer.stream(x, h, case.gaps[:, 0])[0].sin().sum()

    for got, want in zip(
        grad(step, (0, 1))(h, case.x[:, 0]), by_autograd(step, h, case.x[:, 0]), strict=True
    ):
        close(got, want)


def test_what_is_not_linear_is_looped_over():
    """Correct, if slower than the solver, which the transforms cannot see into."""
    torch.manual_seed(0)
    rnn = ParaRNN(ParaGRU(3, 4, dtype=F64))
    x = torch.randn(2, 9, 3, dtype=F64)

    def loss(x):
        return rnn(x)[0].sin().sum()

    (want,) = by_autograd(loss, x)
    close(grad(loss)(x), want)
    close(vmap(grad(loss))(torch.stack([x, x]))[1], want)
    reasons = []

    def seen(x):
        reasons.append(solve(rnn.cells[0], x).reason)
        return x.sum()

    grad(seen)(x)
    assert "loop over the hand-written step" in reasons[0]


@kinds
def test_exported_for_any_batch_and_length(kind):
    case = Case(kind, "learnable")
    sizes = {0: torch.export.Dim("B", min=2, max=64), 1: torch.export.Dim("T", min=2, max=4096)}
    shapes = (sizes, None, sizes)
    program = torch.export.export(case.mixer, (case.x, None, case.gaps), dynamic_shapes=shapes)
    for batch, length in ((2, 9), (5, 40), (3, 2)):
        x = torch.randn(batch, length, 3, dtype=F64)
        gaps = torch.rand(batch, length, dtype=F64)
        close(program.module()(x, None, gaps), case.mixer(x, None, gaps))


@pytest.mark.slow
@pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++"))), reason="no C++ compiler")
@decays
@kinds
def test_compiled_by_inductor(kind, decay):
    """The same numbers, and one graph. A compiler of C++ makes the kernels around the scan."""
    torch.compiler.reset()
    case = Case(kind, decay)
    compiled = torch.compile(case.mixer, fullgraph=True)
    found = []
    for layer in (compiled, case.mixer):
        x = case.x.clone().requires_grad_()
        y = layer(x, None, case.gaps)
        leaves = [x, *case.mixer.parameters()]
        found.append((y, *torch.autograd.grad((y.sin() * case.weights).sum(), leaves)))
    for got, want in zip(*found, strict=True):
        close(got, want)
