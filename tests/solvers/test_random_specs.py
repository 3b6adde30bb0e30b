"""Random Specs against a direct interpreter of the expressions as they were written.

Specs and interpreter are those of ``pararnn/testing/random_specs.py``; autograd through the loop of the
interpreter is the reference for everything.
"""

from __future__ import annotations

import pytest
import torch

from pararnn import NewtonConfig, SpecError, sequential_apply, solve
from pararnn.solvers.certificate import certify
from pararnn.solvers.problem import prepare
from pararnn.spec.bounds import derivative_bounds
from pararnn.testing.random_specs import build

SEEDS = [pytest.param(i, marks=pytest.mark.slow) if i >= 8 else i for i in range(80)]


@pytest.mark.parametrize("kinks", [False, True], ids=["smooth", "kinks"])
@pytest.mark.parametrize("seed", SEEDS)
def test_states_derivatives_bounds_and_certificate(seed, kinks):
    try:
        cell = build(seed, kinks)
    except SpecError as e:
        pytest.skip(f"refused: {e}")
    x = torch.randn(2, 9, 2, dtype=torch.float64, requires_grad=True)
    h0 = (2 * torch.rand(2, *cell.state_shape, dtype=torch.float64) - 1).requires_grad_()
    resets = torch.rand(2, 9) < 0.15
    timed = {"dt": (2 * torch.rand(2, 9, dtype=torch.float64)).requires_grad_()} if kinks else {}
    want = sequential_apply(cell, x, h0=h0, resets=resets, **timed)
    inputs = [x, h0, *timed.values(), *cell.parameters()]
    weight = torch.randn_like(want)

    def derivatives(states):
        """First ones, and those of a function of them."""
        loss = (states * weight + states**2).sum()
        first = torch.autograd.grad(loss, inputs, create_graph=True, allow_unused=True)
        live = [g for g in first if g is not None and g.requires_grad]
        second = torch.autograd.grad(sum(g.pow(2).sum() for g in live), inputs, allow_unused=True)
        found = zip([*first, *second], [*inputs, *inputs], strict=True)
        return [torch.zeros_like(t) if g is None else g.detach() for g, t in found]

    expected = derivatives(want)
    for length, kind in ((1, "auto"), (4, "auto"), (4, "exact")):
        config = NewtonConfig(chunk_length=length, warmup=1, jacobian=kind)
        try:
            s = solve(cell, x, config, method="shooting", h0=h0, resets=resets, **timed)
        except ValueError as e:
            assert "not formed" in str(e)  # noqa: PT017
            continue
        torch.testing.assert_close(s.states, want, rtol=1e-10, atol=1e-10)
        for got, right in zip(derivatives(s.states), expected, strict=True):
            size = right.abs().max().clamp_min(1)
            torch.testing.assert_close(got / size, right / size, rtol=0, atol=1e-7)

    arrays = [p.detach().numpy() for p in cell.recurrent_params()]
    limits = derivative_bounds(cell.spec, arrays, cell.sizes, gap=2.0)
    for _ in range(2):
        h = 2 * torch.rand(1, *cell.state_shape, dtype=torch.float64) - 1
        v, along = torch.randn_like(h).sign(), torch.zeros((), dtype=torch.float64)
        along.requires_grad_()
        now = {name: t[:1, 0].detach() for name, t in timed.items()}
        x_t = 3 * torch.randn(1, 2, dtype=torch.float64)
        out = cell.step(h + along * v, x_t, **now).reshape(-1)
        for i, o in enumerate(out):
            d, *_ = torch.autograd.grad(o, along, create_graph=True)
            bent = torch.autograd.grad(d, along, retain_graph=True)[0] if d.requires_grad else 0.0
            for value, limit in zip((d, bent), limits, strict=True):
                assert abs(float(value)) <= limit.reshape(-1)[i] * (1 + 1e-9) + 1e-12

    task = prepare(
        cell, x.detach(), h0.detach(), resets, **{k: t.detach() for k, t in timed.items()}
    )
    for size in (1e-9, 1e-5):
        assert certify(task, want.detach() + size).error_bound >= size * (1 - 1e-6)
