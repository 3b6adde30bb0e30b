"""What a solve leaves behind: no graph, and reports that can be kept, copied and pickled."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn

import pararnn
from pararnn import NewtonConfig, NewtonDivergenceError, NewtonWarning, ParaGRU, ParaRNN, solve

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class Own(nn.Module):
    """No Spec."""

    d_in, state_shape = 3, (4,)

    def __init__(self):
        super().__init__()
        self.inner = nn.GRUCell(3, 4)

    def step(self, h, x):
        return self.inner(x, h)


class Token:
    pass


class Marked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, token):
        ctx.token = token
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return g, None


@pytest.fixture(autouse=True)
def without_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def survives(step, x):
    token = Token()
    alive = weakref.ref(token)
    step(Marked.apply(x, token))
    del token
    return alive() is not None


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("make", [Own, lambda: ParaGRU(3, 4)], ids=["own", "gru"])
@pytest.mark.parametrize("method", ["auto", "sequential", "newton", "shooting"])
@pytest.mark.parametrize("length", [24, 23])
@pytest.mark.parametrize("order", [0, 1, 2])
def test_the_graph_dies_with_its_results(device, make, method, length, order):
    cell = make().to(device)
    x = torch.randn(2, length, 3, device=device, requires_grad=True)
    config = NewtonConfig(chunk_length=4) if method == "shooting" else None

    def step(x):
        y = solve(cell, x, config, method=method).states.sin().sum()
        if order:
            (g,) = torch.autograd.grad(y, x, create_graph=order == 2)
        if order == 2:
            g.square().sum().backward()

    step(x)
    assert not survives(step, x)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["ParaGRU", "MinGRU", "DeltaMinGRU"])
def test_reports_hold_no_graph(device, name):
    rnn = ParaRNN(getattr(pararnn, name)(4, 8).to(device), num_layers=1)
    x = torch.randn(2, 24, 4, device=device, requires_grad=True)
    assert not survives(lambda x: rnn(x), x)
    (report,) = rnn.last_solutions
    want = report.states
    for again in (pickle.loads(pickle.dumps(report)), copy.deepcopy(report), copy.copy(report)):
        assert not again.output.requires_grad
        assert not again.states.requires_grad
        assert torch.equal(again.states, want)
        assert torch.equal(again.final_state, report.final_state)
        assert again.residual_history == report.residual_history
        assert repr(again) == repr(report)


def test_detached_detaches():
    cell = ParaGRU(2, 3)
    s = solve(cell, torch.randn(2, 9, 2), method="newton")
    d = s.detached()
    assert s.states.requires_grad
    assert s.output.requires_grad
    assert s.final_state.requires_grad
    for value in (d.states, d.output, d.final_state):
        assert value.grad_fn is None
        assert not value.requires_grad
    assert torch.equal(d.states, s.states)
    assert copy.copy(s).output.requires_grad  # a shallow copy is the same


def test_states_that_were_not_computed_in_time():
    cell = pararnn.DeltaMinGRU(4, 8)
    rnn = ParaRNN(cell)
    rnn(torch.randn(2, 24, 4))
    (report,) = rnn.last_solutions
    later = report.parts[1]
    if not later.problem.params:
        later.problem.u.mul_(2)
    else:
        later.problem.params[0].mul_(2)
    with pytest.raises(RuntimeError, match="changed since this solve"):
        _ = report.states
    again = pickle.loads(pickle.dumps(report))
    with pytest.raises(RuntimeError, match="changed since this solve"):
        _ = again.states


def test_no_steps_keep_their_graph():
    """T = 0 has gradients, all zero, by every method."""
    for cell in (ParaGRU(3, 4), Own(), pararnn.MinGRU(3, 4)):
        for method in ("sequential", "auto", "newton", "shooting"):
            x = torch.randn(2, 0, 3, requires_grad=True)
            h0 = torch.ones(2, 4, requires_grad=True)
            s = solve(cell, x, method=method, h0=h0)
            assert s.states.requires_grad
            inputs = [x, h0, *cell.parameters()]
            grads = torch.autograd.grad(s.states.sum() + s.output.sum(), inputs)
            assert not any(g.any() for g in grads)


def test_what_did_not_converge_is_said():
    torch.manual_seed(0)
    cell, x = ParaGRU(3, 4, mix="head", n_heads=2), torch.randn(2, 60, 3)
    with torch.no_grad():
        for w in (cell.A_z, cell.A_r, cell.A_n):
            w.mul_(6)
    with pytest.warns(NewtonWarning, match="after 1 iterations"):
        s = solve(cell, x, NewtonConfig(max_iters=1), method="newton")
    assert not s.converged
    with pytest.raises(NewtonDivergenceError) as error:
        solve(cell, x, NewtonConfig(max_iters=1, on_divergence="raise"), method="newton")
    assert error.value.residual_history == s.residual_history
    s = solve(cell, x, NewtonConfig(max_iters=1, on_divergence="sequential"), method="newton")
    assert s.converged
    assert s.fallback


def test_own_modules_loop_where_derivatives_cost_more():
    """The choice is from sizes alone: ``auto`` calls the step as often as the loop does, or takes
    chunks where even its worst case is near the loop."""
    cell, calls = Own(), []
    step = cell.step
    cell.step = lambda h, x: calls.append(1) or step(h, x)
    x = torch.randn(4, 256, 3)
    s = solve(cell, x)
    assert s.method == "sequential"
    assert len(calls) == 256
    assert "no Spec" in s.reason
    assert "loop" in s.reason
    assert "no Spec" in str(pararnn.explain(cell, x))
    calls.clear()
    s = solve(cell, torch.randn(4, 4096, 3))
    assert s.method == "shooting"
    assert len(calls) < 4096 / 4
    calls.clear()
    assert solve(cell, x, method="newton").method == "newton"
    assert len(calls) < 256


def test_own_modules_that_do_not_forget():
    """At most four corrections, then the order of time."""

    class Chaos(nn.Module):
        d_in, state_shape = 2, (4,)

        def __init__(self):
            super().__init__()
            self.a = nn.Parameter(torch.tensor(1.9))

        def step(self, h, x):
            return 1 - self.a * h * h + 0.01 * torch.tanh(x.sum(-1, keepdim=True))

    torch.manual_seed(0)
    cell, x = Chaos().double(), torch.randn(2, 4096, 2, dtype=torch.float64)
    s = solve(cell, x)
    assert s.fallback
    assert s.iterations <= 4
    want = pararnn.sequential_apply(cell, x)
    residual = cell.step(s.states[:, :-1].flatten(0, 1), x[:, 1:].flatten(0, 1))
    assert float((residual - s.states[:, 1:].flatten(0, 1)).abs().max().detach()) < 1e-12
    assert torch.equal(s.states[:, :20], want[:, :20])


def test_numbers_of_the_cost_model_are_said():
    x = torch.randn(3, 40, 2)
    said = str(pararnn.explain(ParaGRU(2, 5), x))
    assert "40 steps × 15 numbers on cpu" in said, said


@pytest.mark.parametrize("warmup", [1, 5, 20])
def test_the_warm_up_is_as_asked(warmup):
    config = NewtonConfig(chunk_length=20, warmup=warmup, max_iters=0, on_divergence="ignore")
    s = solve(ParaGRU(3, 4), torch.randn(2, 100, 3), config)
    assert s.passes == pytest.approx(1 + warmup / 20)


def test_choices_for_modules_are_not_taken_for_one_another():
    """Sizes and settings do not say all of a module without a Spec: whether gradients are recorded
    counts too."""
    from pararnn.solvers import methods
    from pararnn.solvers.problem import prepare

    class Own(nn.Module):
        d_in, state_shape = 2, (2,)

        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.eye(2) / 4)

        def step(self, h, x):
            return torch.tanh(h @ self.w + x)

    x = torch.randn(1, 20000, 2)
    with torch.no_grad():
        alone = methods.choose(prepare(Own(), x))[1]
    recorded = methods.choose(prepare(Own(), x))[1]
    assert alone.chunks == 1 < recorded.chunks
