"""Risk field, emitter, torus."""

from __future__ import annotations

import math

import pytest
import torch

from pararnn.drm import DRM, DRMDynamics
from pararnn.drm.config import DRMConfig
from pararnn.drm.emitter import LanguageEmitter
from pararnn.drm.risk import RiskField
from pararnn.drm.torus import torus_angles, torus_coordinates, torus_difference, torus_distance

SIZES = {"d_state": 6, "hidden_size": 11, "vocab_size": 9}


def normal(*shape, seed=0, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    return scale * torch.randn(shape, generator=g, dtype=torch.float64)


def field(**values):
    torch.manual_seed(1)
    risk = RiskField(DRMConfig(risk="enabled", **SIZES)).double()
    with torch.no_grad():
        for name, value in values.items():
            getattr(risk, name).copy_(torch.tensor(value))
    return risk


@pytest.mark.parametrize(
    ("alpha", "beta"), [((0.1, 0.1), (1.5, 1.5)), ((-2.0, 0.7), (0.1, -9.0)), ((40.0, 3.0), (1, 1))]
)
def test_risk_mass(alpha, beta):
    risk, z = field(alpha=alpha, beta=beta), normal(4, 3, 6)
    w = dict(risk.named_parameters())
    alpha, beta = w["alpha"].tolist(), w["beta"].tolist()  # as stored
    a = z @ w["inner.weight"].T + w["inner.bias"]
    a = 0.5 * a * (1 + torch.erf(a / math.sqrt(2)))
    p = 1 / (1 + torch.exp(-(a @ w["outer.weight"].T + w["outer.bias"])))
    mass = sum(
        min(abs(alpha[i]), 10.0) * p[..., i] ** min(max(abs(beta[i]), 0.25), 4.0) for i in (0, 1)
    )
    torch.testing.assert_close(risk(z), mass.clamp(max=10.0), rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(risk.probabilities(z), p, rtol=1e-12, atol=1e-13)


def test_risk_is_capped():
    risk = field(alpha=(10.0, 10.0), beta=(0.25, 0.25))
    mass = risk(normal(50, 6, scale=30.0))
    assert (mass <= 10).all()
    assert (mass >= 0).all()
    assert (mass == 10).any()


def test_slope_of_the_risk_is_finite_far_out():
    """σ of -800 is 0 even in float64, and the slope of b^¼ at 0 is infinite."""
    risk = field(beta=(0.25, 0.25))
    with torch.no_grad():
        risk.outer.bias.fill_(-800.0)
    z = normal(4, 6).requires_grad_()
    mass = risk(z)
    mass.sum().backward()
    assert mass.isfinite().all()
    assert z.grad.isfinite().all()
    assert all(p.grad.isfinite().all() for p in risk.parameters())


def test_disabled_risk():
    risk = RiskField(DRMConfig(risk="disabled", **SIZES))
    z = normal(2, 3, 6).float().requires_grad_()
    mass = risk(z)
    assert mass.shape == (2, 3)
    assert not mass.any()
    assert not mass.requires_grad
    assert sum(p.numel() for p in risk.parameters()) == 7 * 11 + 2 * 12 + 4


def test_absent_risk_is_not_built():
    with pytest.raises(ValueError, match="absent"):
        RiskField(DRMConfig(**SIZES))


def emitter(**changes):
    torch.manual_seed(2)
    return LanguageEmitter(DRMConfig(**SIZES, **changes)).double()


def rms(z, gain):
    return z / torch.sqrt(z.square().mean(-1, keepdim=True) + 1e-6) * gain


def gelu(a):
    return 0.5 * a * (1 + torch.erf(a / math.sqrt(2)))


def test_emitter():
    f, z = emitter(), normal(2, 5, 6)
    with torch.no_grad():
        f.norm.weight.copy_(normal(6, seed=4))
    w = dict(f.named_parameters())
    a = rms(z, w["norm.weight"]) @ w["body.0.weight"].T + w["body.0.bias"]
    want = gelu(a) @ w["head.weight"].T + w["head.bias"]
    torch.testing.assert_close(f(z), want, rtol=1e-12, atol=1e-13)


def test_first_weights():
    """Uniform in ±1/√width of the input; embeddings N(0, 1); bases and z_0 N(0, 0.02²)."""
    parts = {"mixer": True, "token_residual": True, "memory": True, "risk": "enabled"}
    bases = {"direction_basis": 40, "metric_basis": 40}
    model = DRM(DRMConfig(d_state=50, d_token=70, mixer_hidden=60, **parts, **bases, seed=3))
    spread = {
        "embedding.table.weight": 1.0,
        "initializer.z0": 0.02,
        "dynamics.direction.basis": 0.02,
        "dynamics.metric.basis": 0.02,
    }
    seen = set()
    for name, p in model.named_parameters():
        if name in spread:
            rel = 5 / p.numel() ** 0.5
            assert float(p.detach().std()) == pytest.approx(spread[name], rel=rel)
            seen.add(name)
        elif name.endswith(("weight", "bias")) and "norm" not in name:
            weight = model.get_parameter(name.replace("bias", "weight"))
            most = (weight[0].numel()) ** -0.5
            assert float(p.detach().abs().max()) <= most * (1 + 1e-6), name
            assert float(p.detach().abs().max()) > 0.5 * most, name
            assert float(p.detach().mean().abs()) < 3 * most / p.numel() ** 0.5, name
    assert seen == set(spread)


@pytest.mark.parametrize("width", [1, 3])
def test_dropout(width):
    """After the first GELU of every network, in training alone; the rest is scaled up."""
    config = DRMConfig(**SIZES, d_token=5, dropout=0.4)
    torch.manual_seed(8)
    dynamics, emit = DRMDynamics(config).double(), LanguageEmitter(config).double()
    direct = DRMDynamics(config.changed(transition="direct")).double().direct
    z, e = normal(2, 6), normal(2, width, 5, seed=1)

    def masked(run, shape):
        """What ``run`` gives, and a mask of the same draw."""
        torch.manual_seed(9)
        got = run()
        torch.manual_seed(9)
        keep = torch.nn.functional.dropout(torch.ones(shape, dtype=torch.float64), 0.4)
        assert set(keep.unique().tolist()) <= {0.0, 1 / 0.6}
        return got, keep

    for net in (dynamics.direction.trunk, dynamics.metric.trunk):
        got, keep = masked(lambda net=net: net(z), (2, 11))
        torch.testing.assert_close(got, gelu(net[3](gelu(net[0](z)) * keep)))
        whole = net.eval()(z)
        torch.testing.assert_close(whole, gelu(net[3](gelu(net[0](z)))))
    pairs = torch.cat([z.unsqueeze(1).expand(-1, width, -1), e], -1)
    for net in (dynamics.flow, direct):
        got, keep = masked(lambda net=net: net(z, e), (2, width, 11))
        torch.testing.assert_close(got, torch.tanh(net.second(gelu(net.first(pairs)) * keep)))
        assert torch.equal(net.eval()(z, e), net(z, e))
    got, keep = masked(lambda: emit(z), (2, 11))
    inner = gelu(emit.body[0](rms(z, emit.norm.weight)))
    torch.testing.assert_close(got, emit.head(inner * keep))
    torch.testing.assert_close(emit.eval()(z), emit.head(inner))


@pytest.mark.parametrize("form", ["mlp", "swiglu"])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("layers", [1, 2])
def test_deep_emitter(form, residual, layers):
    if (form, residual, layers) == ("mlp", False, 1):
        pytest.skip("the plain emitter")
    f = emitter(emitter_form=form, emitter_residual=residual, emitter_layers=layers)
    w, z = dict(f.named_parameters()), normal(2, 5, 6)
    y = rms(z, w["norm.weight"])
    for i in range(layers):
        a = rms(y, w[f"body.{i}.norm.weight"])
        a = a @ w[f"body.{i}.inner.weight"].T + w[f"body.{i}.inner.bias"]
        if form == "swiglu":
            gate, value = a[..., :11], a[..., 11:]
            a = gate / (1 + torch.exp(-gate)) * value
        else:
            a = gelu(a)
        a = a @ w[f"body.{i}.outer.weight"].T + w[f"body.{i}.outer.bias"]
        y = y + a if residual else a
    want = y @ w["head.weight"].T + w["head.bias"]
    torch.testing.assert_close(f(z), want, rtol=1e-11, atol=1e-12)


def test_emitter_is_positionwise():
    f, z = emitter(), normal(2, 5, 6)
    for t in range(5):
        torch.testing.assert_close(f(z[:, t]), f(z)[:, t], rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("part", [emitter(), field()], ids=["emitter", "risk"])
def test_widths_and_dtypes(part):
    with pytest.raises(ValueError, match=r"\(2, 7\)"):
        part(normal(2, 7))
    with pytest.raises(TypeError, match="int64"):
        part(torch.zeros(2, 6, dtype=torch.int64))


def test_torus_round_trip():
    theta = normal(3, 4, scale=5.0)
    points = torus_coordinates(theta)
    assert points.shape == (3, 4, 2)
    torch.testing.assert_close(points.square().sum(-1), torch.ones_like(theta))
    turns = (torus_angles(3.0 * points) - theta) / (2 * math.pi)
    torch.testing.assert_close(turns, turns.round(), rtol=0, atol=1e-14)
    torch.testing.assert_close(
        torus_coordinates(theta + 2 * math.pi), points, rtol=1e-13, atol=1e-13
    )


def test_torus_difference_is_the_shortest_turn():
    a, b = normal(200, 3, scale=9.0), normal(200, 3, seed=1, scale=9.0)
    shifts = 2 * math.pi * torch.arange(-30, 31, dtype=torch.float64)
    want = ((a - b).unsqueeze(-1) + shifts).abs().amin(-1)
    got = torus_difference(a, b)
    torch.testing.assert_close(got.abs(), want, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        torus_coordinates(b + got), torus_coordinates(a), rtol=1e-12, atol=1e-12
    )
    torch.testing.assert_close(torus_distance(a, b), want.square().sum(-1).sqrt())
    assert torus_distance(a, b).le(math.pi * math.sqrt(3)).all()


def test_torus_shapes():
    with pytest.raises(ValueError, match="shape"):
        torus_difference(normal(3, 2), normal(2))
    with pytest.raises(ValueError, match="shape"):
        torus_angles(normal(3, 4))
    with pytest.raises(TypeError, match="theta"):
        torus_coordinates(torch.arange(3))
