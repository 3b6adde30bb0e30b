"""verify_agreement: passes what agrees, fails what does not, and leaves the model as it was."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

from pararnn import (
    Cell,
    DeltaMinGRU,
    NewtonConfig,
    ParaCfC,
    ParaGRU,
    ParaM2RNN,
    ParaRNN,
    Spec,
    explain,
    tanh,
    verify_agreement,
)


def elman():
    with Spec("Elman") as s:
        h = s.state("h", bounds=(-1, 1))
        (u,) = s.drives("u")
        w = s.map("w", structure="diagonal")
        s.next(h, tanh(w(h) + u))
    return s


class Written(Cell):
    spec = elman()
    error = 0.0

    def recurrence(self, h, u, w):
        return torch.tanh(w * h + u + self.error)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.first = ParaRNN(ParaGRU(3, 4), num_layers=2)
        self.second = ParaRNN(ParaM2RNN(4, 2, 2), batch_first=False)
        self.out = nn.Linear(4, 1)

    def forward(self, x):
        x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        y, _ = self.first(x)
        z, _ = self.second(y.transpose(0, 1))
        return self.out(z)


@pytest.mark.parametrize(
    "build",
    [
        lambda: ParaGRU(3, 4),
        lambda: ParaGRU(3, 4).double(),
        lambda: ParaGRU(3, 4).bfloat16(),
        lambda: ParaM2RNN(3, 2, 2),
        lambda: Written(3, 4),
        lambda: ParaRNN(ParaGRU(3, 4), num_layers=2),
        lambda: ParaRNN(ParaM2RNN(3, 2, 2).half(), solver="newton"),
        Model,
    ],
)
def test_what_agrees_passes(build):
    torch.manual_seed(0)
    module = build()
    x = torch.randn(2, 40, 3, dtype=next(module.parameters()).dtype)
    report = verify_agreement(module, x)
    assert report.passed, str(report)
    assert all(a.passed for a in report.layers)
    assert "PASS" in str(report)
    plain = report.to_dict()
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain
    assert plain["passed"] is True
    assert len(plain["layers"]) == len(report.layers) > 0
    for layer in report.layers:
        assert 0 <= layer.error <= layer.tolerance
        assert layer.shape[:2] == (2, 40)


def test_layers_of_a_model_are_named():
    report = verify_agreement(Model(), torch.randn(2, 20, 3))
    assert [a.layer for a in report.layers] == [
        "first.cells[0]",
        "first.cells[1]",
        "second.cells[0]",
    ]
    assert [a.cell for a in report.layers] == ["ParaGRU[diag]", "ParaGRU[diag]", "ParaM2RNN"]


@pytest.mark.parametrize("error", [1e-3, 3e-5])
@pytest.mark.parametrize(
    "wrap", [lambda c: c, lambda c: ParaRNN(c), lambda c: nn.Sequential(ParaRNN(c))]
)
def test_a_broken_equation_fails(error, wrap):
    """The written recurrence and the Spec differ a little."""
    torch.manual_seed(0)
    cell = Written(3, 4)
    cell.error = error
    for method in ("auto", "newton"):
        module = wrap(cell)
        config = None if method == "auto" else NewtonConfig(chunk_length=1)
        report = verify_agreement(module, torch.randn(2, 30, 3), config)
        assert not report.passed
        assert "FAIL" in str(report)
        assert report.layers[0].error > report.layers[0].tolerance
        assert "are different equations" in report.layers[0].reason
        assert report.layers[0].reason.count("e-") == 2


def test_a_broken_double_precision_cell_fails():
    cell = Written(3, 4).double()
    cell.error = 1e-8
    assert not verify_agreement(cell, torch.randn(2, 30, 3, dtype=torch.float64)).passed


def test_too_few_iterations_fail():
    torch.manual_seed(0)
    cell = ParaGRU(3, 4, mix="head", n_heads=2)
    with torch.no_grad():
        for a in (cell.A_z, cell.A_r, cell.A_n):
            a.mul_(6)
    rnn = ParaRNN(cell, solver="newton")
    x = torch.randn(2, 60, 3)
    config = NewtonConfig(max_iters=1, on_divergence="ignore")
    report = verify_agreement(rnn, x, config)
    assert not report.passed
    assert "did not converge" in report.layers[0].reason
    assert report.layers[0].iterations == 1


def test_a_start_outside_zero():
    cell = ParaGRU(3, 4)
    x, h0 = torch.randn(2, 30, 3), 0.5 * torch.randn(2, 4)
    assert verify_agreement(cell, x, h0=h0).passed
    assert verify_agreement(ParaRNN(cell), x, h0=h0[None]).passed


def test_one_sequence_and_time_first():
    assert verify_agreement(ParaRNN(ParaGRU(3, 4)), torch.randn(30, 3)).passed
    report = verify_agreement(ParaRNN(ParaGRU(3, 4), batch_first=False), torch.randn(30, 2, 3))
    assert report.layers[0].shape == (2, 30, 4)
    assert verify_agreement(ParaRNN(ParaGRU(3, 4)), torch.randn(2, 0, 3)).passed


def test_the_model_is_left_as_it_was():
    torch.manual_seed(0)
    model = Model()
    model.train()
    model.norm.eval()
    model.first.cells[1].eval()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    modes = [m.training for m in model.modules()]
    hooks = [len(m._forward_pre_hooks) for m in model.modules()]
    verify_agreement(model, torch.randn(2, 20, 3))
    assert [m.training for m in model.modules()] == modes
    assert [len(m._forward_pre_hooks) for m in model.modules()] == hooks
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    model.out = nn.Linear(7, 1)  # breaks after the recurrent layers
    with pytest.raises(RuntimeError):
        verify_agreement(model, torch.randn(2, 20, 3))
    assert [m.training for m in model.modules()][: len(modes)] == modes
    assert [len(m._forward_pre_hooks) for m in model.modules()] == hooks


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.out = ParaRNN(ParaGRU(3, 4)), nn.Linear(3, 4)

    def forward(self, x):
        return self.out(x)


def test_nothing_checked_is_not_a_pass():
    try:
        report = verify_agreement(Unused(), torch.randn(2, 5, 3))
    except (TypeError, ValueError, RuntimeError):
        return
    assert not report.passed


class Restarting(nn.Module):
    """A model that resets its layer: what is compared is what it computes."""

    def __init__(self):
        super().__init__()
        self.rnn = ParaRNN(ParaGRU(3, 4))

    def forward(self, x):
        resets = torch.zeros(x.shape[:2], dtype=torch.bool)
        resets[:, ::3] = True
        return self.rnn(x, resets=resets)[0]


def test_resets_inside_a_model_are_kept(monkeypatch):
    from pararnn.layers import agreement

    seen = []
    original = agreement.solve

    def spy(*args, **kwargs):
        seen.append(kwargs.get("resets"))
        return original(*args, **kwargs)

    monkeypatch.setattr(agreement, "solve", spy)
    assert verify_agreement(Restarting(), torch.randn(2, 12, 3)).passed
    assert seen
    assert all(r is not None and bool(r[:, ::3].all()) for r in seen)


def test_what_cannot_be_checked():
    with pytest.raises(TypeError, match="Linear"):
        verify_agreement(nn.Linear(3, 3), torch.randn(2, 5, 3))
    with pytest.raises(TypeError, match=r"[Pp]acked"):
        verify_agreement(ParaRNN(ParaGRU(3, 4)), pack_sequence([torch.randn(4, 3)]))


class Plain(nn.Module):
    d_in, state_shape = 3, (3,)

    def __init__(self, broken=False):
        super().__init__()
        self.inner, self.broken, self.calls = nn.GRUCell(3, 3), broken, 0

    def step(self, h, x):
        self.calls += 1
        noise = 1e-2 * self.calls if self.broken else 0.0
        return self.inner(x, h) + noise


def test_modules_without_a_spec():
    assert verify_agreement(Plain(), torch.randn(2, 30, 3)).passed
    report = verify_agreement(Plain(), torch.randn(2, 30, 3))
    assert report.layers[0].jac_structure == "unknown"
    assert report.to_dict()["layers"][0]["certified"] is None


def test_a_step_that_is_not_a_function_fails():
    """Its value changes from call to call, so parallel and sequential cannot agree."""
    assert not verify_agreement(Plain(broken=True), torch.randn(2, 30, 3)).passed


def test_what_is_not_finite_is_no_pass():
    """Both runs have the same NaN: that is agreement, and no success."""
    cell = ParaGRU(3, 4)
    x = torch.randn(2, 30, 3)
    x[0, 5] = torch.nan
    report = verify_agreement(cell, x)
    (layer,) = report.layers
    assert not report.passed
    assert (report.verdict, layer.verdict) == ("NOT FINITE", "NOT FINITE")
    assert layer.error <= layer.tolerance
    assert not layer.converged
    assert not layer.finite
    assert layer.residual == torch.inf
    assert "agree in which states are not finite" in str(report)
    assert report.to_dict()["layers"][0]["residual"] is None
    with torch.no_grad():
        cell.in_proj.weight[0, 0] = torch.nan
    assert not verify_agreement(cell, torch.randn(2, 30, 3)).passed


@pytest.mark.parametrize("broken", [0, 1, 2])
def test_one_layer_that_differs_fails_a_stack(broken):
    torch.manual_seed(0)
    model = nn.Sequential(*(ParaRNN(Written(3, 3)) for _ in range(3)))
    model[broken].cells[0].error = 1e-2

    class Chain(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnns = model

        def forward(self, x):
            for rnn in self.rnns:
                x = rnn(x)[0]
            return x

    report = verify_agreement(Chain(), torch.randn(2, 30, 3))
    assert [layer.passed for layer in report.layers] == [i != broken for i in range(3)]
    assert not report.passed
    assert report.verdict == "FAIL"


def test_a_solve_that_is_right_by_chance_and_did_not_converge_fails(monkeypatch):
    """``converged`` counts, however small the error is."""
    from types import SimpleNamespace

    from pararnn.layers import agreement

    original = agreement.solve

    def unsure(*args, **kwargs):
        found = original(*args, **kwargs)
        names = ("iterations", "passes", "residual", "residual_history", "fallback")
        report = {name: getattr(found, name) for name in names}
        progress = SimpleNamespace(converged=False, **report)
        return dataclasses.replace(found, progress=progress)

    monkeypatch.setattr(agreement, "solve", unsure)
    report = verify_agreement(ParaGRU(3, 4), torch.randn(2, 30, 3))
    assert report.layers[0].error <= report.layers[0].tolerance
    assert not report.passed
    assert report.verdict == "FAIL"


def test_small_states_are_compared_to_themselves(monkeypatch):
    """A difference of 1 % of states of size 1e-8 is seen."""
    from pararnn.layers import agreement

    torch.manual_seed(0)
    cell, x = ParaGRU(3, 4), 1e-8 * torch.randn(2, 30, 3)
    with torch.no_grad():
        cell.in_proj.bias.zero_()
    assert verify_agreement(cell, x).passed
    original = agreement.sequential_states
    monkeypatch.setattr(agreement, "sequential_states", lambda task: 1.01 * original(task))
    report = verify_agreement(cell, x)
    assert not report.passed
    assert report.layers[0].error == pytest.approx(0.01, rel=0.1)


def test_what_differs_in_what_is_finite():

    class Exploding(Written):
        def recurrence(self, h, u, w):
            return torch.tanh(w * h + u) / (u.abs() > 1e-9)

    bad = Exploding(3, 4)
    x = torch.randn(2, 30, 3)
    with torch.no_grad():
        bad.in_proj.weight[0].zero_()
    report = verify_agreement(bad, x)
    assert not report.passed


@pytest.mark.parametrize("wrap", [lambda c: c, ParaRNN, lambda c: ParaRNN(c, batch_first=False)])
def test_resets(wrap):
    torch.manual_seed(0)
    module = wrap(ParaGRU(3, 4))
    x, resets = torch.randn(2, 30, 3), torch.rand(2, 30) < 0.2
    if isinstance(module, ParaRNN) and not module.batch_first:
        x, resets = x.transpose(0, 1), resets.T
    assert verify_agreement(module, x, resets=resets).passed
    with pytest.raises(ValueError, match="resets: got"):
        verify_agreement(module, x, resets=resets[:1])


class Amplifying(Cell):
    """Rounding errors grow: the limit is exceeded, and the equations are the same."""

    spec = elman()

    def recurrence(self, h, u, w):
        return torch.tanh(w * h + u)


def test_the_equation_is_blamed_only_if_it_differs(monkeypatch):
    from pararnn.layers import agreement

    monkeypatch.setattr(agreement, "_tolerance", lambda *_: -1.0)
    torch.manual_seed(0)
    cell = Amplifying(3, 4)
    with torch.no_grad():
        cell.w.fill_(4.0)
    (layer,) = verify_agreement(cell, torch.randn(2, 300, 3), NewtonConfig(chunk_length=8)).layers
    assert not layer.passed
    assert "rounding errors can grow" in layer.reason


# -- explain -----------------------------------------------------------------------------------


def test_paths_of_a_model_and_of_one_sequence():
    model, x = Model(), torch.randn(2, 30, 3)
    said = explain(model, x)
    assert [layer.cell for layer in said.layers] == ["ParaGRU[diag]"] * 2 + ["ParaM2RNN"]
    assert {layer.chunks * layer.chunk_length for layer in said.layers} == {30}
    assert model.training
    assert explain(model, x, method="newton").layers[0].method == "newton"
    alone = explain(model.first, x[0])
    assert alone.layers == explain(model.first, x[:1]).layers
    with pytest.raises(ValueError, match=r"x: got shape \(3,\)"):
        explain(model.first, x[0, 0])
    with pytest.raises(TypeError, match="got Linear, expected a cell"):
        explain(nn.Linear(3, 3), x)


@pytest.mark.parametrize(
    "spoilt", [lambda y, h: (3 * y + 1, h), lambda y, h: (y, h + 1e-3), lambda y, h: (y + 1e-3, h)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_layer_that_forms_no_states_is_run_itself(spoilt, dtype, monkeypatch):
    from pararnn.cells import delta_min_gru

    torch.manual_seed(0)
    layer = DeltaMinGRU(3, 8, n_heads=2, nh=2, decay="learnable", dtype=dtype)
    x, dt = torch.randn(2, 40, 3, dtype=dtype), torch.rand(2, 40, dtype=dtype)
    report = verify_agreement(layer, x, dt=dt)
    assert report.passed, report
    scan = delta_min_gru.delta_scan
    monkeypatch.setattr(delta_min_gru, "delta_scan", lambda *args, **kw: spoilt(*scan(*args, **kw)))
    report = verify_agreement(layer, x, dt=dt)
    assert not report.passed
    assert "the difference exceeds its limit" in report.layers[0].reason


def test_paths_are_those_of_the_layers_own_settings():
    x = torch.randn(2, 30, 3)
    rnn = ParaRNN(ParaGRU(3, 4), config=NewtonConfig(chunk_length=6), solver="shooting")
    (said,) = explain(rnn, x).layers
    assert (said.method, said.chunk_length, said.chunks) == ("shooting", 6, 5)
    (said,) = explain(rnn, x, NewtonConfig(), method="newton").layers
    assert said.method == "newton"
    (said,) = explain(rnn, x, NewtonConfig(chunk_length=10)).layers
    assert (said.method, said.chunk_length) == ("shooting", 10)
    rnn = ParaRNN(ParaGRU(3, 4), solver="sequential")
    assert explain(rnn, x).layers[0].method == "sequential"
    assert explain(rnn, x, method="newton").layers[0].method == "newton"


def test_agreement_where_the_sequence_restarts():
    torch.manual_seed(0)
    layer = DeltaMinGRU(3, 8, n_heads=2, nh=2)
    x, resets = torch.randn(2, 40, 3), torch.zeros(2, 40, dtype=torch.bool)
    resets[0, 11] = resets[1, 30] = True
    report = verify_agreement(layer, x, resets=resets)
    assert report.passed, report


def test_agreement_of_one_sequence():
    """Without a batch: the start, resets and gaps of one sequence."""
    torch.manual_seed(0)
    x, resets, dt = torch.randn(40, 3), torch.zeros(40, dtype=torch.bool), torch.rand(40)
    resets[11] = True
    for cell, given in ((ParaGRU(3, 4), {}), (ParaCfC(3, 4), {"dt": dt})):
        rnn = ParaRNN(cell)
        report = verify_agreement(rnn, x, h0=torch.rand(1, 4), resets=resets, **given)
        assert report.passed, report
        assert report.layers[0].shape == (1, 40, 4)


def test_paths_are_those_of_the_layers_own_solver():
    x = torch.randn(2, 30, 3)
    assert explain(ParaRNN(ParaGRU(3, 4)), x).layers[0].method == "sequential"
    assert explain(ParaRNN(ParaGRU(3, 4), solver="newton"), x).layers[0].method == "newton"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_limits_are_those_of_the_contract(dtype):
    """C6: max(1e-5, 16 u κ) in float32, max(1e-10, 16 u κ) in float64."""
    torch.manual_seed(0)
    (layer,) = verify_agreement(
        ParaGRU(3, 4, dtype=dtype), torch.randn(2, 30, 3, dtype=dtype)
    ).layers
    assert 1 <= layer.amplification < 10
    least, unit = (1e-5, 2.0**-24) if dtype == torch.float32 else (1e-10, 2.0**-53)
    assert layer.tolerance == pytest.approx(max(least, 16 * unit * layer.amplification))


def test_no_report_passes_over_a_layer_that_failed():
    report = verify_agreement(ParaGRU(3, 4), torch.randn(2, 30, 3))
    assert report.verdict == "PASS"
    failed = dataclasses.replace(report.layers[0], passed=False)
    assert dataclasses.replace(report, layers=(*report.layers, failed)).verdict == "FAIL"


def test_a_difference_in_what_is_finite_is_called_that(monkeypatch):
    from pararnn.layers import agreement

    original = agreement.sequential_states

    def spoilt(task):
        states = original(task).clone()
        states[0, 4] = torch.nan
        return states

    monkeypatch.setattr(agreement, "sequential_states", spoilt)
    (layer,) = verify_agreement(Plain(), torch.randn(2, 30, 3)).layers
    assert not layer.passed
    assert "differ in which states are finite" in layer.reason
