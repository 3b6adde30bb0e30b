"""``torch.compile``, ``torch.export``, ``torch.func`` and meta tensors: each works, or says why not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import pararnn
from pararnn import (
    NewtonConfig,
    NewtonDivergenceError,
    ParaGRU,
    ParaLSTM,
    ParaM2RNN,
    ParaRNN,
    solve,
)


class Own(nn.Module):
    d_in, state_shape = 3, (4,)

    def __init__(self):
        super().__init__()
        self.inner = nn.GRUCell(3, 4)

    def step(self, h, x):
        return self.inner(x, h)


MODULES = {
    "gru": lambda: ParaRNN(ParaGRU(3, 4), 2),
    "head": lambda: ParaRNN(ParaGRU(3, 4, mix="head", n_heads=2)),
    "lstm, newton": lambda: ParaRNN(ParaLSTM(3, 4), solver="newton"),
    "matrix": lambda: ParaRNN(ParaM2RNN(3, 2, 3), solver="shooting"),
    "sequential": lambda: ParaRNN(ParaGRU(3, 4), solver="sequential"),
}


def compare(compiled, module, lengths):
    for length in lengths:
        x = torch.randn(2, length, 3, requires_grad=True)
        inputs = [x, *module.parameters()]
        got, want = compiled(x), module(x)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=2e-6)
        grads = [torch.autograd.grad(y.sin().sum(), inputs) for y, _ in (got, want)]
        torch.testing.assert_close(*grads, rtol=1e-4, atol=2e-5)


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)
@pytest.mark.parametrize("dynamic", [None, True])
def test_compiled_as_one_graph_at_any_length(make, dynamic):
    torch.manual_seed(0)
    module = make()
    compiled = torch.compile(module, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    compare(compiled, module, (20, 33, 47))


@pytest.mark.parametrize(
    "run",
    [
        lambda cell, x: solve(cell, x).states,
        lambda cell, x: solve(cell, x, method="sequential").states,
        pararnn.newton_apply,
        pararnn.shooting_apply,
        pararnn.sequential_apply,
    ],
    ids=["solve", "sequential", "newton_apply", "shooting_apply", "sequential_apply"],
)
@pytest.mark.parametrize("kind", [ParaGRU, ParaLSTM, pararnn.MinGRU, pararnn.DeltaMinGRU])
def test_states_compile_as_one_graph(run, kind):
    torch.manual_seed(0)
    cell, x = kind(4, 8), torch.randn(2, 9, 4)
    compiled = torch.compile(lambda x: run(cell, x), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), run(cell, x), rtol=1e-5, atol=1e-6)


def test_own_modules_compile_as_a_loop():
    module = ParaRNN(Own())
    compare(torch.compile(module, fullgraph=True, backend="aot_eager"), module, (5,))
    asked = torch.compile(ParaRNN(Own(), solver="shooting"), backend="aot_eager")
    with pytest.raises(ValueError, match=r"no Spec.*method='sequential'"):
        asked(torch.randn(2, 5, 3))


@pytest.mark.parametrize("length", [64, 512])
def test_exported_with_any_length(length):
    torch.manual_seed(0)
    module = ParaRNN(ParaGRU(3, 4), 2)
    time = torch.export.Dim("T", min=2, max=4096)
    program = torch.export.export(module, (torch.randn(2, length, 3),), dynamic_shapes=({1: time},))
    assert len(program.graph.nodes) < 100
    compare(program.module(), module, (5, 100, 700))


def test_a_compiled_solve_is_not_silently_wrong():
    cell = ParaGRU(3, 4)
    with torch.no_grad():
        for p in cell.recurrent_params():
            p.mul_(30)
    config = NewtonConfig(chunk_length=2, max_iters=0, warmup=1, on_divergence="raise")
    compiled = torch.compile(ParaRNN(cell, config=config), backend="aot_eager")
    with pytest.raises(NewtonDivergenceError):
        compiled(torch.randn(2, 40, 3))


@pytest.mark.parametrize("method", ["newton", "shooting"])
def test_transforms(method):
    cell, x = ParaGRU(3, 4), torch.randn(5, 2, 9, 3)
    with pytest.raises(ValueError, match=r"torch.func.*method='sequential'"):
        torch.vmap(lambda x: solve(cell, x, method=method).output)(x)
    with pytest.raises(ValueError, match=r"torch.func.*method='sequential'"):
        torch.func.grad(lambda x: solve(cell, x, method=method).output.sum())(x[0])
    got = torch.func.grad(lambda x: solve(cell, x).output.sum())(x[0])
    leaf = x[0].clone().requires_grad_()
    (want,) = torch.autograd.grad(solve(cell, leaf, method=method).output.sum(), leaf)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", ["auto", "sequential", "newton", "shooting"])
def test_meta_tensors_have_shapes(method):
    for cell in (ParaGRU(4, 8), ParaLSTM(4, 8), pararnn.MinGRU(4, 8), pararnn.DeltaMinGRU(4, 8)):
        here = solve(cell, torch.randn(2, 9, 4), method=method)
        away = solve(cell.to("meta"), torch.empty(2, 9, 4, device="meta"), method=method)
        assert away.states.shape == here.states.shape
        assert away.states.is_meta
        assert away.output.shape == here.output.shape
        assert away.final_state.shape == here.final_state.shape
    x = torch.empty(2, 9, 3, device="meta")
    if method in ("newton", "shooting"):
        with pytest.raises(ValueError, match="no Spec"):
            solve(Own().to("meta"), x, method=method)
        with pytest.raises(RuntimeError, match="no report"):
            _ = solve(ParaGRU(3, 4, device="meta"), x, method=method).converged
    else:
        assert solve(Own().to("meta"), x, method=method).states.shape == (2, 9, 4)
    with pytest.raises(ValueError, match="certify"):
        solve(ParaGRU(3, 4, device="meta"), x, NewtonConfig(certify=True), method=method)


def test_no_certificate_inside_of_transforms():
    cell, x, config = ParaGRU(3, 4), torch.randn(2, 9, 3), NewtonConfig(certify=True)
    with pytest.raises(ValueError, match="certify: got True inside"):
        torch.func.grad(lambda x: solve(cell, x, config).output.sum())(x)
