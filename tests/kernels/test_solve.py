"""``solve`` with ``backend='fused'`` against the eager path, and the operators below it."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

import pararnn
from pararnn import (
    NewtonConfig,
    ParaGRU,
    ParaLSTM,
    ParaM2RNN,
    ParaRNN,
    Spec,
    explain,
    sequential_apply,
    solve,
)
from pararnn.kernels import channelwise, missing, source
from pararnn.kernels.support import installed
from pararnn.spec import tanh

CELLS = ("ParaGRU[diag]", "ParaLSTM", "ParaSLSTM[sigmoid]", "ParaCfC[published]", "ParaNLRU")
ONE = NewtonConfig(backend="fused")
TWO = NewtonConfig(backend="fused", chunk_length=3, warmup=1)


@dataclasses.dataclass
class Problem:
    cell: nn.Module
    u: torch.Tensor
    given: dict

    def leaves(self):
        """Everything with a gradient: drives, time gaps, start, recurrent parameters."""
        live = [v for v in self.given.values() if v.requires_grad]
        return [self.u, *live, *(p for n, p in self.cell.named_parameters() if "in_proj" not in n)]

    def solve(self, config, **kwargs):
        return solve(self.cell, drives=self.u, config=config, **self.given, **kwargs)

    def eager(self):
        return self.solve(NewtonConfig(backend="eager"), method="sequential")


def made(name, width):
    """A cell of a variant that is the default of its class."""
    return getattr(pararnn, name.split("[")[0])(2, width)


def problem(kit, name="ParaLSTM", B=2, T=5, D=3, resets=True, dtype=torch.float64, seed=0):
    torch.manual_seed(seed)
    cell = made(name, D).to(kit.DEVICE, dtype)
    state = torch.float64 if dtype == torch.float64 else torch.float32

    def draw(*shape):
        return torch.randn(shape, dtype=torch.float64).to(kit.DEVICE, dtype)

    u = draw(B, T, cell.in_proj.out_features).requires_grad_()
    given = {}
    if cell.spec.gap is not None:
        given["dt"] = (1 + draw(B, T).tanh()).requires_grad_()
    with torch.no_grad():
        now = {"dt": torch.ones(B, dtype=dtype, device=kit.DEVICE)} if given else {}
        h0 = torch.zeros(B, *cell.state_shape, dtype=state, device=kit.DEVICE)
        h0 = cell.step(h0, drives=draw(B, u.shape[2]), **now)
    given["h0"] = h0.requires_grad_()
    if resets:
        given["resets"] = torch.rand(B, T, device=kit.DEVICE) < 0.3
    return Problem(cell, u, given)


# -- values and derivatives --------------------------------------------------------------------


def scalar(solution, seed=3):
    """A loss that reaches states, output and final state."""
    g = torch.Generator().manual_seed(seed)
    total = 0
    for t in (solution.states, solution.output, solution.final_state):
        weight = torch.randn(t.shape, generator=g, dtype=torch.float64).to(t.device)
        total = total + (weight * t.double() + t.double() ** 2 / 2).sum()
    return total


@pytest.mark.parametrize(
    ("name", "config"),
    [(name, ONE) for name in CELLS]
    + [pytest.param(n, TWO, marks=[pytest.mark.slow] * (n not in CELLS[1::2])) for n in CELLS],
    ids=lambda v: v if isinstance(v, str) else ("chunks" if v is TWO else "one chunk"),
)
def test_states_and_gradients_are_those_of_the_loop(kit, name, config):
    p = problem(kit, name)
    want, got = p.eager(), p.solve(config)
    assert (got.path, want.path) == ("fused", "eager")
    assert got.chunks == (1 if config is ONE else 2)
    for a, b in ((got.states, want.states), (got.output, want.output)):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(got.final_state, want.final_state, rtol=1e-11, atol=1e-11)
    assert got.states.shape == want.states.shape
    gradients = [torch.autograd.grad(scalar(s), p.leaves()) for s in (got, want)]
    for a, b in zip(*gradients, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "name",
    ["ParaGRU[diag]", "ParaLSTM", pytest.param("ParaCfC[published]", marks=pytest.mark.slow)],
)
def test_second_derivatives(kit, name):
    p = problem(kit, name, T=4)
    found = []
    for solution in (p.solve(TWO), p.eager()):
        first = torch.autograd.grad(scalar(solution), p.leaves(), create_graph=True)
        size = sum((g**2).sum() for g in first)
        found.append(torch.autograd.grad(size, p.leaves()))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ParaGRU[diag]", "ParaLSTM"])
def test_gradcheck_and_gradgradcheck(kit, name):
    p = problem(kit, name, B=1, T=3, D=2, resets=False)

    def states(u, h0):
        s = solve(p.cell, drives=u, h0=h0, config=dataclasses.replace(TWO, chunk_length=2))
        return s.states, s.final_state

    inputs = (p.u, p.given["h0"])
    assert torch.autograd.gradcheck(states, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(states, inputs, fast_mode=True)


@pytest.mark.parametrize("needed", ["none", "u", "params", "h0", "dt"])
def test_only_what_is_needed(kit, needed):
    p = problem(kit, "ParaCfC[published]")
    want = torch.autograd.grad(p.eager().states.sum(), p.leaves())
    named = {"u": p.u, "h0": p.given["h0"], "dt": p.given["dt"]}
    params = [q for n, q in p.cell.named_parameters() if "in_proj" not in n]
    for t in p.cell.parameters():
        t.requires_grad_(False)
    for t in named.values():
        t.requires_grad_(False)
    wanted = params if needed == "params" else [named[needed]] if needed in named else []
    for t in wanted:
        t.requires_grad_()
    states = p.solve(TWO).states
    assert states.requires_grad == bool(wanted)
    if wanted:
        right = dict(zip(map(id, [p.u, p.given["dt"], p.given["h0"], *params]), want, strict=True))
        for t, g in zip(wanted, torch.autograd.grad(states.sum(), wanted), strict=True):
            torch.testing.assert_close(g, right[id(t)], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "which",
    ["final", "others", *(pytest.param(w, marks=pytest.mark.slow) for w in ("last", "detached"))],
)
def test_cotangents_of_parts(kit, which):
    """Only some outputs are used; expanded and strided cotangents arrive."""
    p = problem(kit)

    def loss(s):
        if which == "final":
            return s.final_state.sum()
        if which == "others":
            return s.states[:, :, 0].sum()
        return (
            s.output[:, ::2].sum() if which == "last" else s.states.detach().sum() + 0 * p.u.sum()
        )

    leaves = p.leaves()
    found = [
        torch.autograd.grad(loss(s), leaves, allow_unused=True, materialize_grads=True)
        for s in (p.solve(TWO), p.eager())
    ]
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["ParaGRU[diag]", "ParaLSTM", "ParaSLSTM[exp]"])
def test_strided_parameters(kit, name):
    """Every other number of a longer vector, as a fused optimizer may keep them: forward, backward
    and a single step read the same numbers as the loop."""
    p = problem(kit, name)
    for m in p.cell.spec.map_list:
        long = torch.randn(2 * p.cell.channels, dtype=torch.float64, device=kit.DEVICE) / 3
        setattr(p.cell, m.name, torch.nn.Parameter(long[::2]))
        assert getattr(p.cell, m.name).stride() == (2,)
    leaves, found = p.leaves(), []
    for solution in (p.eager(), p.solve(NewtonConfig(backend="fused", chunk_length=2))):
        loss = solution.states.square().sum() + solution.final_state.sum()
        found.append((solution.states, *torch.autograd.grad(loss, leaves)))
    for want, got in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)
    with torch.no_grad():
        x, h = torch.randn(2, 2, dtype=torch.float64, device=kit.DEVICE), p.given["h0"]
        got = pararnn.decode(p.cell, x, h, backend="fused")
        torch.testing.assert_close(got, p.cell.step(h, x), rtol=1e-9, atol=1e-12)


def test_strided_start(kit):
    p = problem(kit, resets=False)
    h0 = p.given["h0"].detach().mT.contiguous().mT
    assert not h0.is_contiguous()
    got = solve(p.cell, drives=p.u, h0=h0, config=TWO).states
    torch.testing.assert_close(got, p.eager().states, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bfloat16,
        *(pytest.param(d, marks=pytest.mark.slow) for d in (torch.float32, torch.float16)),
    ],
    ids=str,
)
def test_lower_precision(kit, dtype):
    p = problem(kit, dtype=dtype)
    want, got = p.eager(), p.solve(TWO)
    assert got.states.dtype == dtype
    assert got.final_state.dtype == torch.float32
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(got.states, want.states, rtol=2 * eps, atol=1e-5)
    torch.testing.assert_close(got.final_state, want.final_state, rtol=1e-5, atol=1e-5)
    gradients = [torch.autograd.grad(s.states.double().sum(), p.leaves()) for s in (got, want)]
    for a, b in zip(*gradients, strict=True):
        assert a.dtype == b.dtype
        size = float(b.double().abs().max().clamp_min(1))
        assert float((a.double() - b.double()).abs().max()) <= max(8 * eps, 1e-4) * size


def test_a_layer(kit):
    """Two layers and a batch-second layout, with states passed on, streaming, and the report."""
    torch.manual_seed(0)
    layer = ParaRNN(ParaLSTM(3, 4), num_layers=2, batch_first=False, config=TWO).to(kit.DEVICE)
    layer = layer.double()
    x = torch.randn(4, 2, 3, dtype=torch.float64, device=kit.DEVICE, requires_grad=True)
    y, h = layer(x)
    assert [s.path for s in layer.last_solutions] == ["fused", "fused"]
    gradients = torch.autograd.grad(y.sum() + h.sum(), [x, *layer.parameters()])
    state, steps = None, []
    for x_t in x:
        y_t, state = layer.step(x_t, state)
        steps.append(y_t)
    torch.testing.assert_close(y, torch.stack(steps), rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(h, state, rtol=1e-11, atol=1e-11)
    want = torch.autograd.grad(sum(s.sum() for s in steps) + state.sum(), [x, *layer.parameters()])
    for a, b in zip(gradients, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_autocast(kit):
    p = problem(kit, dtype=torch.float32, resets=False)
    x = torch.randn(2, 5, 2, device=kit.DEVICE)
    with torch.autocast(kit.DEVICE, torch.bfloat16):
        got = solve(p.cell, x, TWO, h0=p.given["h0"])
        want = solve(p.cell, x, NewtonConfig(backend="eager"), h0=p.given["h0"])
    assert got.states.dtype == want.states.dtype
    torch.testing.assert_close(got.states, want.states, rtol=2**-6, atol=1e-5)
    torch.testing.assert_close(got.final_state, want.final_state, rtol=1e-5, atol=1e-5)


# -- empty -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("B", "T"), [(0, 5), (2, 0), (0, 0)])
@pytest.mark.parametrize("name", ["ParaGRU[diag]", "ParaLSTM", "ParaCfC[published]"])
def test_nothing_to_do(kit, name, B, T):
    p = problem(kit, name, B=B, T=T)
    got, want = p.solve(ONE), p.eager()
    assert got.path == "fused"
    assert torch.equal(got.states, want.states)
    assert torch.equal(got.final_state, want.final_state)
    assert got.states.shape == want.states.shape
    assert got.converged
    assert (got.iterations, got.residual, got.fallback) == (0, 0.0, False)
    assert got.passes >= 0
    gradients = [torch.autograd.grad(scalar(s), p.leaves(), materialize_grads=True)
                 for s in (got, want)]  # fmt: skip
    for a, b in zip(*gradients, strict=True):
        assert torch.equal(a, b)


# -- the report --------------------------------------------------------------------------------


def hard(kit, T=9):
    """Weights that no Newton correction tames."""
    torch.manual_seed(1)
    cell = ParaGRU(2, 3, max_recurrent_norm=None).to(kit.DEVICE).double()
    with torch.no_grad():
        for m in cell.spec.map_list:
            getattr(cell, m.name).copy_(6 * torch.randn(3))
    u = torch.randn(2, T, 9, dtype=torch.float64, device=kit.DEVICE)
    return Problem(cell, u, {})


def test_report_of_one_chunk(kit):
    s = problem(kit).solve(ONE)
    assert (s.method, s.chunks, s.chunk_length) == ("sequential", 1, 5)
    assert (s.iterations, s.residual, s.residual_history) == (0, 0.0, (0.0,))
    assert s.converged
    assert not s.fallback
    assert s.passes == 1
    assert "cost model" in s.reason


def test_report_of_several_chunks(kit):
    p = problem(kit, "ParaGRU[diag]", T=7, resets=False)
    s = p.solve(TWO)
    assert (s.method, s.chunks, s.chunk_length) == ("shooting", 3, 3)
    assert s.reason == "asked for: chunk_length=3"
    assert s.converged
    assert 1 <= s.iterations <= 2
    history = s.residual_history
    assert len(history) == s.iterations + 1
    assert all(r > 2e-14 for r in history[:-1])
    assert s.residual == history[-1] <= 2e-14
    assert s.passes == pytest.approx(1 + s.iterations + 1 / 3)
    assert s.detached().states.requires_grad is False
    single = p.solve(dataclasses.replace(TWO, chunk_length=1))
    assert (single.method, single.chunks) == ("newton", 7)
    torch.testing.assert_close(single.states, s.states, rtol=1e-11, atol=1e-11)


def test_report_of_a_repair(kit):
    p = hard(kit)
    s = p.solve(dataclasses.replace(TWO, chunk_length=2, iteration_cap=1))
    assert s.fallback
    assert s.converged
    assert s.iterations == 1
    torch.testing.assert_close(s.states, p.eager().states, rtol=1e-7, atol=1e-7)
    easy = problem(kit, resets=False).solve(dataclasses.replace(TWO, chunk_length=4, warmup=4))
    assert not easy.fallback


def test_nothing_is_read_before_it_is_asked_for(kit, monkeypatch):
    """A host sync would break CUDA graphs: the report and the states of several slots are lazy."""
    p = problem(kit)
    for method in ("item", "tolist", "cpu", "nonzero", "__bool__"):

        def refuse(*args, _name=method, **kwargs):
            raise RuntimeError(f"the host read the device: {_name}")  # fmt: skip

        monkeypatch.setattr(torch.Tensor, method, refuse)
    from pararnn.kernels import launch

    fake = torch.zeros(3, 2, 1, device=kit.DEVICE)
    shapes = (2, 5, 3), (2, 5, 1, 3), (2, 2, 3)
    outs = [torch.zeros(s, dtype=torch.float64, device=kit.DEVICE) for s in shapes]
    monkeypatch.setattr(launch, "run_forward", lambda *_: (*outs, fake))
    solution = p.solve(TWO)
    assert solution.output.shape == (2, 5, 3)
    with pytest.raises(RuntimeError, match="host read"):
        _ = solution.iterations


def test_a_certificate(kit):
    p = problem(kit, "ParaGRU[diag]", T=6)
    s = p.solve(dataclasses.replace(TWO, certify=True))
    assert s.path == "fused"
    want = p.eager().states
    assert float((s.states - want).abs().max()) <= s.error_bound < 1e-10


# -- what is refused ---------------------------------------------------------------------------


class Step(nn.Module):
    state_shape = (3,)
    d_in = 2

    def __init__(self):
        super().__init__()
        self.w = nn.Linear(2, 3)

    def step(self, h, x):
        return torch.tanh(self.w(x) + h)


def two_axes():
    with Spec("Grid", axes=("K", "V")) as s:
        h = s.state("h", bounds=(-1, 1))
        (u,) = s.drives("u")
        s.next(h, tanh(u + h / 2))
    return s


def narrow():
    with Spec("Narrow") as s:
        h = s.state("h", bounds=(-1, 1))
        u = s.drives("u")[0]
        (v,) = s.drives("v", axes=())
        s.next(h, tanh(u + h * v))
    return s


def cell_of(spec, **sizes):
    class Own(pararnn.Cell):
        pass

    return Own(2, spec=spec, sizes=sizes)


REFUSED = {
    "eager": (lambda: ParaGRU(2, 3), {"backend": "eager"}, "auto", "asked for: backend='eager'"),
    "module": (Step, {}, "auto", "Step has no Spec"),
    "newton": (lambda: ParaGRU(2, 3), {}, "newton", "asked for: method='newton'"),
    "pinned": (lambda: ParaGRU(2, 3), {"max_iters": 2}, "auto", "asked for: max_iters"),
    "watched": (lambda: ParaGRU(2, 3), {"on_divergence": "raise"}, "auto", "the host must watch"),
    "quasi": (lambda: ParaGRU(2, 3), {"jacobian": "quasi"}, "auto", "carry exact Jacobians"),
    "picard": (lambda: ParaGRU(2, 3), {"jacobian": "none"}, "auto", "carry exact Jacobians"),
    "head": (lambda: ParaGRU(2, 4, mix="head", n_heads=2), {}, "auto", "its maps mix channels (Jacobian class 'head')"),
    "matrix": (lambda: ParaM2RNN(2, 2, 3), {}, "auto", "its maps mix channels"),
    "two axes": (lambda: cell_of(two_axes(), K=2, V=3), {}, "auto", "its state has 2 axes"),
    "narrow": (lambda: cell_of(narrow(), d=3), {}, "auto", "a drive does not have one number a channel"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_say_why(kit, name, monkeypatch):
    make, settings, method, reason = REFUSED[name]
    cell = make().to(kit.DEVICE)
    x = torch.randn(2, 4, 2, device=kit.DEVICE)
    config = NewtonConfig(**settings)
    if name != "eager":
        with pytest.raises(ValueError) as error:
            solve(cell, x, dataclasses.replace(config, backend="fused"), method=method)
        assert reason in str(error.value)
        assert "backend='auto'" in str(error.value)
    from pararnn.solvers.methods import BY_NAME
    from pararnn.solvers.problem import prepare

    assert reason in BY_NAME["fused"].unfit(prepare(cell, x, config=config, method=method))
    got = solve(cell, x, config, method=method)  # 'auto' takes the other path
    assert got.path == "eager"
    if kit.DEVICE == "cuda" and method == "auto":
        assert reason in got.reason


def test_transforms_do_not_reach_a_kernel(kit):
    """A tangent that is lost would be a silent zero."""
    cell = ParaGRU(2, 3).double().to(kit.DEVICE)
    x, v = torch.randn(2, 1, 5, 2, dtype=torch.float64, device=kit.DEVICE)
    fused = NewtonConfig(backend="fused")
    for transformed in (
        lambda: torch.func.jvp(lambda x: solve(cell, x, fused).output, (x,), (v,)),
        lambda: torch.func.grad(lambda x: solve(cell, x, fused).output.sum())(x),
        lambda: torch.func.vmap(lambda x: solve(cell, x, fused).output)(x[None]),
    ):
        with pytest.raises(ValueError, match="do not see into a kernel"):
            transformed()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, v)
        with pytest.raises(ValueError, match="forward-mode"):
            solve(cell, dual, fused)


def test_sequential_is_the_hand_written_loop_unless_fused_is_asked_for(kit):
    p = problem(kit, resets=False)
    assert p.solve(NewtonConfig(), method="sequential").path == "eager"
    s = p.solve(ONE, method="sequential")
    assert (s.path, s.chunks) == ("fused", 1)
    torch.testing.assert_close(s.states, p.eager().states, rtol=1e-11, atol=1e-11)


def test_auto_on_a_cpu_is_eager():
    cell = ParaGRU(2, 3)
    s = solve(cell, torch.randn(2, 4, 2))
    assert s.path == "eager"


def test_missing_says_what_is_missing(monkeypatch):
    import importlib.metadata
    import importlib.util

    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert "need a CUDA device" in missing(cpu)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "not for CUDA" in missing(cuda)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert missing(cuda) is None
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert missing(cpu) is None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    installed.cache_clear()
    assert "pip install 'pararnn[gpu]'" in missing(cuda)
    monkeypatch.undo()
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "3.5.1")
    installed.cache_clear()
    assert "need Triton 3.6 or newer, and 3.5 is installed" in missing(cuda)
    installed.cache_clear()


def test_the_cpu_is_refused_without_the_interpreter(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(ValueError, match="need a CUDA device"):
        solve(ParaGRU(2, 3), torch.randn(2, 4, 2), ONE)


def test_specs_that_the_template_cannot_hold():
    assert channelwise(ParaLSTM(2, 3).spec) is None
    with Spec("Clock") as s:
        h = s.state("h", bounds=(-1, 1))
        dt = s.time_gap("dt")
        s.next(h, tanh(h + dt))
    assert "no projected drive" in channelwise(s)
    with pytest.raises(ValueError, match="Clock has no fused kernels: it has no projected drive"):
        source(s)


# -- operators ---------------------------------------------------------------------------------


def operator_arguments(kit, name, length, h0=True):
    from pararnn.solvers.operator import Call, Settings

    p = problem(kit, name, T=4)
    params = [q.detach().clone().requires_grad_() for q in p.cell.recurrent_params()]
    start = p.given["h0"].detach().clone().requires_grad_() if h0 else None
    spec, settings = p.cell.spec, Settings("fused", length, 1, cap=2)
    return Call(spec.fingerprint, [p.cell.sizes[spec.axes[0]]], p.cell.state_dtype, [p.u],
                p.given.get("dt"), start, p.given.get("resets"), params, *settings)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "length", "h0"),
    [pytest.param("ParaGRU[diag]", 3, False, marks=pytest.mark.slow), ("ParaLSTM", 0, True)],
)
def test_opcheck(kit, name, length, h0):
    torch.library.opcheck(
        torch.ops.pararnn.solve.default, operator_arguments(kit, name, length, h0)
    )


def test_fake_outputs_are_like_real_ones(kit):
    from torch._subclasses.fake_tensor import FakeTensorMode

    for name in ("ParaGRU[diag]", "ParaLSTM"):
        args = operator_arguments(kit, name, 0)
        real = torch.ops.pararnn.solve(*args)
        with FakeTensorMode(allow_non_fake_inputs=True):
            fake = torch.ops.pararnn.solve(*args)
        for a, b in zip(real, fake, strict=True):
            assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)


def test_a_dispatch_mode_sees_the_operators_and_nothing_changes(kit):
    from torch.utils._python_dispatch import TorchDispatchMode

    p, seen = problem(kit, "ParaLSTM"), []
    leaves = [p.u, *(v for v in p.given.values() if v.requires_grad)]
    leaves += [q for n, q in p.cell.named_parameters() if "in_proj" not in n]

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.namespace == "pararnn":
                seen.append(func._opname)
            return func(*args, **(kwargs or {}))

    def run():
        s = p.solve(TWO)
        total = s.output.square().sum() + s.final_state.sum()
        return s, torch.autograd.grad(total, leaves)

    plain, want = run()
    assert seen == []
    with Mode():
        s, found = run()
    assert seen == ["solve", "solve_backward"]
    assert torch.equal(s.output, plain.output)
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
    assert s.residual_history == plain.residual_history


@torch.no_grad()
def test_a_step_in_place_counts_as_a_write(kit):
    cell = ParaGRU(2, 3).to(kit.DEVICE)
    h = torch.zeros(2, 3, device=kit.DEVICE)
    x = torch.randn(2, 2, device=kit.DEVICE)
    for count in (1, 2):
        pararnn.decode(cell, x, h, out=h, backend="fused")
        assert h._version == count
    with torch.inference_mode():
        h = torch.zeros(2, 3, device=kit.DEVICE)
        assert pararnn.decode(cell, x, h, out=h, backend="fused") is h


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ParaLSTM", "ParaGRU[diag]"])
def test_compile_a_solve(kit, name):
    """``fullgraph=True``: one graph without a break, the same bits."""
    p = problem(kit, name, dtype=torch.float32)
    given = {k: v.detach() for k, v in p.given.items()}

    def run(u):
        s = solve(p.cell, drives=u, config=TWO, **given)
        return s.output, s.final_state

    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    got, want = compiled(p.u), run(p.u)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    params = [q for n, q in p.cell.named_parameters() if "in_proj" not in n]
    gradients = [torch.autograd.grad(o.sum() + f.sum(), [p.u, *params]) for o, f in (got, want)]
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("dynamic", [pytest.param(False, marks=pytest.mark.slow), True])
def test_compile_a_layer(kit, dynamic):
    torch.manual_seed(0)
    layer = ParaRNN(ParaLSTM(3, 4), num_layers=2, config=ONE).to(kit.DEVICE)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for T in (4, 6):
        x = torch.randn(2, T, 3, device=kit.DEVICE, requires_grad=True)
        y, h = compiled(x)
        y_want, h_want = layer(x)
        torch.testing.assert_close(y, y_want, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(h, h_want, rtol=1e-6, atol=1e-6)
        got = torch.autograd.grad(y.sum() + h.sum(), [x, *layer.parameters()])
        want = torch.autograd.grad(y_want.sum() + h_want.sum(), [x, *layer.parameters()])
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


MIXERS = {
    "MinGRU": {},
    "MinLSTM": {},
    "SignedMinGRU": {},
    "RotationMinGRU": {"snap": None},  # a snapped angle jumps where a rounding differs
    "GivensMinGRU": {"block_size": 4},
    "DeltaMinGRU": {"n_heads": 2, "nh": 2},
}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="on the CPU: tests/cells")
@pytest.mark.parametrize("decay", [None, "learnable"])
@pytest.mark.parametrize("name", MIXERS)
def test_inductor_compiles_every_mixer(name, decay):
    """One graph, and what the layer computes by itself, with kernels on both sides."""
    torch.manual_seed(0)
    layer = getattr(pararnn, name)(3, 8, decay=decay, **MIXERS[name]).cuda()
    gaps = None if decay is None else torch.rand(2, 70, device="cuda")
    torch._dynamo.reset()
    found = []
    for run in (torch.compile(layer, fullgraph=True), layer):
        x = torch.linspace(-2, 2, 420, device="cuda").reshape(2, 70, 3).requires_grad_()
        y = run(x, None, gaps)
        found.append((y, *torch.autograd.grad(y.sin().sum(), [x, *layer.parameters()])))
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4 * float(want.abs().max()))


# -- decoding ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CELLS)
def test_decode_is_the_step(kit, name):
    p = problem(kit, name, B=3, D=11)  # two blocks of lanes
    x = torch.randn(3, 4, 2, dtype=torch.float64, device=kit.DEVICE)
    dt = p.given["dt"].detach() if "dt" in p.given else None
    h = p.given["h0"].detach()
    with torch.no_grad():
        want = sequential_apply(p.cell, x, h0=h, **({} if dt is None else {"dt": dt[:, :4]}))
        buffer = h.clone()
        for t in range(4):
            now = {} if dt is None else {"dt": dt[:, t]}
            h = pararnn.decode(p.cell, x[:, t], h, backend="fused", **now)
            torch.testing.assert_close(h, want[:, t], rtol=1e-12, atol=1e-12)
            out = pararnn.decode(p.cell, x[:, t], buffer, out=buffer, backend="fused", **now)
            assert out is buffer  # in place
            assert torch.equal(buffer, h)


def test_what_is_explained_is_what_runs(kit):
    p = problem(kit, "ParaGRU[diag]", T=7, resets=False)
    for config in (ONE, TWO):
        x = torch.zeros(2, 7, p.cell.d_in, dtype=torch.float64, device=kit.DEVICE)
        (said,) = explain(p.cell, x, config).layers
        ran = p.solve(config)
        assert said.path == "fused"
        assert (said.chunk_length, said.chunks) == (ran.chunk_length, ran.chunks)


def test_fake_cotangents_of_narrow_drives_are_like_real_ones(kit):
    from torch._subclasses.fake_tensor import FakeTensorMode

    from pararnn.solvers.operator import Call, Settings

    p = problem(kit, "ParaCfC", T=4, dtype=torch.bfloat16)
    weights = [q.detach() for q in p.cell.recurrent_params()]
    spec, settings = p.cell.spec, Settings("fused", warmup=1, cap=2)
    call = Call(spec.fingerprint, [p.cell.sizes[spec.axes[0]]], torch.float32, [p.u.detach()],
                p.given["dt"].detach(), None, None, weights, *settings)  # fmt: skip
    output, others, _ = torch.ops.pararnn.solve(*call)
    given = (*call, output, others, torch.ones_like(output), None, None, True)
    bars, *real, back = torch.ops.pararnn.solve_backward(*given)
    assert [t.dtype for t in (*bars, *real)] == [torch.bfloat16, call.dt.dtype, torch.float32]
    with FakeTensorMode(allow_non_fake_inputs=True):
        fakes, *fake, fake_back = torch.ops.pararnn.solve_backward(*given)
    for a, b in zip([*bars, *real, *back], [*fakes, *fake, *fake_back], strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
