"""Selective memory: the scan against the loop, without division, causal, and streaming."""

from __future__ import annotations

import pytest
import torch

from pararnn.drm.config import DRMConfig
from pararnn.drm.memory import SelectiveMemory
from pararnn.scan import linear_scan

LENGTHS = (1, 2, 5, 33, 64, 131)


def build(dtype=torch.float64, **changes):
    torch.manual_seed(3)
    config = DRMConfig(d_state=6, d_token=5, memory_hidden=11, memory=True).changed(**changes)
    return SelectiveMemory(config).to(dtype)


def draw(length, dtype=torch.float64, seed=0, batch=2):
    g = torch.Generator().manual_seed(seed)
    shapes = ((batch, length, 6), (batch, 6), (batch, length, 5), (batch, 6))
    return [torch.randn(s, generator=g, dtype=torch.float64).to(dtype) for s in shapes]


def loop(memory, states, start, tokens, m):
    """The recurrence of the notes, one step after the other, from the parameters."""
    out, previous = [], start
    w = dict(memory.named_parameters())
    for t in range(states.shape[1]):
        x = torch.cat([previous, tokens[:, t]], -1)
        a = x @ w["in_proj.weight"].T + w["in_proj.bias"]
        h = a / (1 + torch.exp(-a))
        f = 1 / (1 + torch.exp(-(h @ w["forget.weight"].T + w["forget.bias"] + 2.0)))
        u = 1 / (1 + torch.exp(-(h @ w["write.weight"].T + w["write.bias"])))
        c = torch.tanh(h @ w["candidate.weight"].T + w["candidate.bias"])
        m = f * m + u * c
        out.append(m)
        previous = states[:, t]
    return torch.stack(out, 1)


@pytest.mark.parametrize("length", LENGTHS)
def test_scan_is_the_loop(length):
    memory, inputs = build(), draw(length)
    want = loop(memory, *inputs)
    got, last = memory(*inputs)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(last, want[:, -1], rtol=1e-10, atol=1e-12)


def test_gradients_are_those_of_the_loop():
    memory, inputs = build(), draw(21)
    leaves = [x.requires_grad_() for x in inputs]
    variables = [*leaves, *memory.parameters()]
    g = torch.randn(2, 21, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    want = torch.autograd.grad((loop(memory, *leaves) * g).sum(), variables)
    got = torch.autograd.grad((memory(*leaves)[0] * g).sum(), variables)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("gate", [0.0, 1e-30, 1e-4])
def test_no_division_by_products_of_gates(gate):
    """Products of 512 such gates underflow to 0; dividing by them would give NaN."""
    g = torch.Generator().manual_seed(1)
    u = torch.randn(2, 512, 6, generator=g)
    f = torch.full_like(u, gate)
    f[:, 100:300] = torch.rand(2, 200, 6, generator=g)
    m0 = torch.randn(2, 6, generator=g)
    m, want = m0.double(), []
    for t in range(512):
        m = f[:, t].double() * m + u[:, t].double()
        want.append(m)
    got = linear_scan(f, u, m0)
    assert got.isfinite().all()
    torch.testing.assert_close(got.double(), torch.stack(want, 1), rtol=0, atol=1e-5)


def test_saturated_gates_stay_finite():
    """A forget bias at its bounds: gates of 4.5e-5 and 1 - 4.5e-5 over a long block."""
    for bias in (-10.0, 10.0):
        memory = build(torch.float32, memory_forget_bias=bias)
        inputs = draw(512, torch.float32)
        got, _ = memory(*inputs)
        f, u = memory.maps(*inputs[:3])
        m, want = inputs[3].double(), []
        for t in range(512):
            m = f[:, t].double() * m + u[:, t].double()
            want.append(m)
        torch.testing.assert_close(got.double(), torch.stack(want, 1), rtol=1e-5, atol=1e-5)


def test_maps_compose_associatively():
    def after(second, first):
        (f2, u2), (f1, u1) = second, first
        return f2 * f1, u2 + f2 * u1

    f, u = build().maps(*draw(3)[:3])
    one, two, three = ((f[:, t], u[:, t]) for t in range(3))
    left, right = after(after(three, two), one), after(three, after(two, one))
    for a, b in zip(left, right, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-14, atol=1e-15)
    composed = linear_scan(f, u, coefficients=True)
    for a, b in zip(composed, left, strict=True):
        torch.testing.assert_close(a[:, -1], b, rtol=1e-14, atol=1e-15)


def test_composition_is_not_commutative():
    """So the order of tokens matters to the memory."""
    f, u = build().maps(*draw(2)[:3])
    forth, back = linear_scan(f, u)[:, -1], linear_scan(f.flip(1), u.flip(1))[:, -1]
    assert (forth - back).abs().max() > 1e-3


@pytest.mark.parametrize("cut", [1, 7, 32, 63])
def test_prefix_causality_is_exact(cut):
    memory, inputs = build(), draw(64)
    got, _ = memory(*inputs)
    states, start, tokens, m0 = (x.clone() for x in inputs)
    states[:, cut:] += 3.0
    tokens[:, cut:] -= 2.0
    changed, _ = memory(states, start, tokens, m0)
    assert torch.equal(changed[:, :cut], got[:, :cut])
    assert not torch.equal(changed[:, cut:], got[:, cut:])


def test_step_sees_the_state_before_it():
    """State ``t`` enters the memory at ``t + 1``, not at ``t``."""
    memory, (states, start, tokens, m0) = build(), draw(5)
    got, _ = memory(states, start, tokens, m0)
    other = states.clone()
    other[:, 2] += 1.0
    changed, _ = memory(other, start, tokens, m0)
    assert torch.equal(changed[:, :3], got[:, :3])
    assert (changed[:, 3] - got[:, 3]).abs().min() > 0


@pytest.mark.parametrize("pieces", [(64,), (1,) * 64, (7, 50, 7), (33, 31)])
def test_carried_memory_is_one_recurrence(pieces):
    memory, (states, start, tokens, m) = build(), draw(64)
    want, _ = memory(states, start, tokens, m)
    parts, at = [], 0
    for size in pieces:
        part, m = memory(states[:, at : at + size], start, tokens[:, at : at + size], m)
        parts.append(part)
        at += size
        start = states[:, at - 1]
    torch.testing.assert_close(torch.cat(parts, 1), want, rtol=1e-12, atol=1e-13)


def test_bounded():
    """|m| ≤ max(|m_0|, 1 / (1 - f))."""
    memory, inputs = build(), draw(200)
    f, _ = memory.maps(*inputs[:3])
    m, _ = memory(*inputs)
    bound = torch.maximum(inputs[3].abs().amax(), 1 / (1 - f.max()))
    assert (m.abs() <= bound).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_accumulated_in_float32(dtype):
    memory, inputs = build(dtype), draw(64, dtype)
    f, u = memory.maps(*inputs[:3])
    m, last = memory(*inputs)
    assert f.dtype == u.dtype == m.dtype == last.dtype == torch.float32
    state, want = inputs[3].double(), []
    for t in range(64):
        state = f[:, t].double() * state + u[:, t].double()
        want.append(state)
    torch.testing.assert_close(m.double(), torch.stack(want, 1), rtol=1e-5, atol=1e-5)


def test_half_precision_has_its_product_in_float32():
    memory, (states, start, tokens, _) = build(torch.bfloat16), draw(64, torch.bfloat16)
    _, u = memory.maps(states, start, tokens)
    previous = torch.cat([start.unsqueeze(1), states[:, :-1]], 1)
    h = torch.nn.functional.silu(memory.in_proj(torch.cat([previous, tokens], -1)))
    w, c = memory.write(h).float(), memory.candidate(h).float()
    torch.testing.assert_close(u, w.sigmoid() * c.tanh(), rtol=1e-6, atol=1e-7)


def test_autocast_keeps_the_recurrence_in_float32():
    memory, inputs = build(torch.float32), draw(64, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        m, last = memory(*inputs)
    assert m.dtype == last.dtype == torch.float32
    want, _ = memory(*inputs)
    torch.testing.assert_close(m, want, rtol=0, atol=0.1)


def test_empty_block():
    memory, inputs = build(), draw(0)
    m, last = memory(*inputs)
    assert m.shape == (2, 0, 6)
    assert torch.equal(last, inputs[3])


@pytest.mark.parametrize(
    ("index", "shape"), [(0, (2, 4, 5)), (1, (1, 6)), (1, (2, 1, 6)), (2, (2, 3, 5)), (3, (6,))]
)
def test_nothing_is_broadcast(index, shape):
    inputs = draw(4)
    inputs[index] = torch.zeros(shape, dtype=torch.float64)
    with pytest.raises(ValueError, match="got shape"):
        build()(*inputs)


def test_integer_states():
    inputs = draw(4)
    inputs[0] = inputs[0].long()
    with pytest.raises(TypeError, match="states"):
        build()(*inputs)
