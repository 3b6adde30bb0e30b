"""An operator called plainly, and where something looks into the call."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from pararnn import RotationMinGRU, SignedMinGRU, solve
from pararnn.solvers import operator as house


class Seen(TorchDispatchMode):
    """The operators of this package that are called inside."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "pararnn":
            self.names.append(func._opname)
        return func(*args, **(kwargs or {}))


@pytest.fixture(params=[SignedMinGRU, RotationMinGRU])
def problem(request):
    """A mixer whose gaps, initial state and parameters matter, and its leaves."""
    torch.manual_seed(3)
    cell = request.param(3, 6, decay="learnable", dtype=torch.float64)
    x = torch.randn(2, 9, 3, dtype=torch.float64, requires_grad=True)
    h0 = torch.randn(2, *cell.state_shape, dtype=torch.float64, requires_grad=True)
    dt = torch.rand(2, 9, dtype=torch.float64, requires_grad=True)
    resets = torch.rand(2, 9) < 0.2
    leaves = [x, h0, dt, *(p for n, p in cell.named_parameters() if n != "h0")]

    def run(**options):
        return solve(cell, x, h0=h0, dt=dt, resets=resets, **options).output

    return run, leaves


def gradients(run, leaves, **options):
    torch.manual_seed(5)
    y = run()
    return y, torch.autograd.grad(y, leaves, torch.randn_like(y), **options)


def test_gradients_are_those_of_the_loop(problem):
    run, leaves = problem
    y, found = gradients(run, leaves)
    z, want = gradients(lambda: run(method="sequential"), leaves)
    torch.testing.assert_close(y, z, rtol=1e-12, atol=1e-12)
    for a, b in zip(found, want, strict=True):
        assert bool(b.abs().max() > 0)
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


def test_a_mode_sees_the_operators_and_nothing_changes(problem):
    run, leaves = problem
    y, plain = gradients(run, leaves)
    with Seen() as seen:
        z, traced = gradients(run, leaves)
    assert seen.names == ["solve", "solve_backward"]
    assert torch.equal(y, z)
    for a, b in zip(plain, traced, strict=True):
        assert torch.equal(a, b)


def test_a_plain_call_does_without_the_dispatcher(problem, monkeypatch):
    run, leaves = problem
    _, want = gradients(run, leaves)

    def refused(*_):
        raise AssertionError("went through the dispatcher")

    for operator in (house.solve, house.solve_backward):
        monkeypatch.setattr(operator, "overload", refused)
    for a, b in zip(gradients(run, leaves)[1], want, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("mode", ["real", "fake"])
def test_a_traced_graph_holds_the_operators(mode):
    cell = SignedMinGRU(3, 6)

    def traced(x):
        return torch.autograd.grad(solve(cell, x).output.sum(), cell.in_proj.weight)[0]

    x = torch.randn(2, 9, 3)
    graph = make_fx(traced, tracing_mode=mode, _allow_non_fake_inputs=True)(x)
    names = [str(node.target) for node in graph.graph.nodes]
    assert [n for n in names if "pararnn" in n] == [
        "pararnn.solve.default",
        "pararnn.solve_backward.default",
    ]
    torch.testing.assert_close(graph(x), traced(x), rtol=0, atol=0)


def test_second_derivatives_are_the_same_both_ways(problem):
    run, leaves = problem

    def twice():
        _, first = gradients(run, leaves, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), leaves)

    plain = twice()
    with Seen() as seen:
        traced = twice()
    assert "solve" in seen.names
    for a, b in zip(plain, traced, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
        assert bool(a.abs().max() > 0)


def test_gradients_that_nobody_wants_are_none(problem):
    run, leaves = problem
    leaves[2].requires_grad_(False)
    y, found = gradients(run, [leaves[0], leaves[1]])
    assert y.requires_grad
    leaves[2].requires_grad_(True)
    for a, b in zip(found, gradients(run, leaves)[1], strict=False):
        assert torch.equal(a, b)


def test_checkpoints(problem):
    run, leaves = problem
    _, want = gradients(run, leaves)
    _, found = gradients(
        lambda: checkpoint(lambda _: run(), leaves[0], use_reentrant=False), leaves
    )
    for a, b in zip(found, want, strict=True):
        assert torch.equal(a, b)


def test_tensors_without_numbers_go_to_the_dispatcher(monkeypatch):

    for operator in (house.solve, house.solve_backward):
        monkeypatch.setattr(operator, "forward", None)
    fake = FakeTensorMode(allow_non_fake_inputs=True).from_tensor(torch.empty(2, 9, 3))
    for x in (torch.empty(2, 9, 3, device="meta"), fake):
        cell = SignedMinGRU(3, 6, device=x.device)
        y = solve(cell, x.requires_grad_()).output
        (bar,) = torch.autograd.grad(y, x, torch.empty_like(y))
        assert (y.shape, type(y), y.device, bar.shape) == ((2, 9, 6), type(x), x.device, x.shape)


def test_fake_cotangents_are_like_real_ones_without_a_start():
    torch.manual_seed(0)
    cell = SignedMinGRU(3, 6, dtype=torch.float64)
    drives = cell.drives(torch.randn(2, 9, 3, dtype=torch.float64)).detach()
    weights = [p.detach() for p in cell.recurrent_params()]
    sizes = [cell.sizes[a] for a in cell.spec.axes]
    call = house.Call(cell.spec.fingerprint, sizes, cell.state_dtype, [drives], None, None, None,
                      weights, *house.Settings("scan"))  # fmt: skip
    states, others, final = torch.ops.pararnn.solve(*call)
    grads = states, others, states, None, final, False
    bars, *real, weights = torch.ops.pararnn.solve_backward(*call, *grads)
    with FakeTensorMode(allow_non_fake_inputs=True):
        fakes, *fake, fake_weights = torch.ops.pararnn.solve_backward(*call, *grads)
    assert real[1].shape == (2, 6)
    pairs = zip([*bars, *real, *weights], [*fakes, *fake, *fake_weights], strict=True)
    for a, b in pairs:
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
