"""Random Specs against a direct interpreter of the expressions as they were written.

Whatever an author may write is canonicalized, hoisted, factorized, printed, fused and linearized
before anything computes. Here nothing of that is used: the interpreter walks the authored
expression trees with torch, and autograd through its loop is the reference for everything.
"""

from __future__ import annotations

import random

import pytest
import sympy
import torch

from pararnn import Cell, NewtonConfig, Spec, SpecError, sequential_apply, solve
from pararnn.solvers.certificate import certify
from pararnn.solvers.task import prepare
from pararnn.spec import cos, exp, expm1, log, maximum, sigmoid, sin, softplus, tanh
from pararnn.spec.bounds import derivative_bounds
from pararnn.spec.declarations import Linear

FUNCTIONS = {
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "exp": torch.exp,
    "expm1": torch.expm1,
    "maximum": torch.maximum,
    "log": torch.log,
    "softplus": torch.nn.functional.softplus,
    "sin": torch.sin,
    "cos": torch.cos,
}


def act(structure, w, x):
    if structure == "diagonal":
        return w * x
    if structure == "right":
        return x @ w
    if structure == "dense":
        return x @ w.mT
    width = w.shape[-1]
    return torch.cat([x[..., i * width : (i + 1) * width] @ m.mT for i, m in enumerate(w)], -1)


def interpret(spec, sizes, slots, drives, maps, params):
    """The next slots, straight from the authored expressions."""
    full = tuple(sizes[a] for a in spec.axes)
    lead = slots[0].shape[: slots[0].ndim - len(full)]
    values = {s.symbol: v for s, v in zip(spec.slots, slots, strict=True)}
    weights = {m.name: w for m, w in zip(spec.map_list, maps, strict=True)}
    declared = [
        *zip(spec.drive_list, drives, strict=True),
        *zip(spec.param_list, params, strict=True),
    ]
    for d, v in declared:
        for i, a in enumerate(reversed(spec.axes)):
            v = v if a in d.axes else v.unsqueeze(-1 - i)
        values[d.symbol] = v

    def evaluate(e):
        if e in values:
            return values[e]
        if not e.args:
            return torch.tensor(float(e), dtype=torch.float64)
        if isinstance(e, sympy.Pow):
            return evaluate(e.args[0]) ** float(e.args[1])
        inner = [evaluate(a) for a in e.args]
        if isinstance(e, sympy.Add | sympy.Mul):
            out = inner[0]
            for other in inner[1:]:
                out = out + other if isinstance(e, sympy.Add) else out * other
            return out
        return FUNCTIONS[type(e).__name__](*inner)

    for stage in spec.stages:
        out = evaluate(stage.authored)
        if isinstance(stage, Linear):
            out = act(stage.map.structure, weights[stage.map.name], out.expand(*lead, *full))
        values[stage.symbol] = out
    return [values[s.next_symbol].expand(*lead, *full) for s in spec.slots]


def invent(seed, kinks):
    """A random Spec and sizes. Every expression contains a symbol. With ``kinks``, there is a time
    gap, and ``maximum`` occurs."""
    r = random.Random(seed)
    matrix = r.random() < 0.35
    axes = ("K", "V") if matrix else ("d",)
    sizes = {"K": 2, "V": 3} if matrix else {"d": 4, "heads": 2}
    with Spec("Random", axes=axes) as s:
        slots = [s.state(n, bounds=(-1, 1)) for n in ("h", "c")[: r.choice((1, 1, 2))]]
        some = lambda: r.choice((axes, axes, axes[:1], axes[1:], ()))  # noqa: E731
        pool = list(slots)
        for i in range(r.randint(1, 3)):
            pool += s.drives(f"u_{i}", axes=some())
        if kinks:
            pool += [s.time_gap("dt")] * 2
        for i in range(r.randint(0, 2)):
            pool += s.params(f"p_{i}", axes=some())
        rest = "right" if matrix else r.choice(("head", "dense"))
        kinds = ("diagonal",) if r.random() < 0.4 else ("diagonal", rest)
        maps = [s.map(f"A_{i}", structure=r.choice(kinds)) for i in range(r.randint(1, 3))]

        def expression(depth):
            if depth == 0 or r.random() < 0.15:
                return r.choice(pool + slots)
            x = expression(depth - 1)
            kind = r.randrange(24 if kinks else 18)
            if kind >= 18:
                return (
                    lambda: maximum(x, expression(depth - 1)),
                    lambda: maximum(r.choice(pool), x * r.choice(slots)),
                    lambda: maximum(x, sympy.Rational(1, 4)),
                    lambda: maximum(0, x) - x / 3,
                    lambda: expm1(-(x**2)),
                    lambda: expm1(sin(x)) * x,
                )[kind - 18]()
            if kind < 9:
                y = expression(depth - 1)
                z = r.choice(pool)
                number = r.choice((sympy.Integer(2), sympy.Rational(1, 3), sympy.Float(0.3)))
                return (
                    x + y,
                    x - y / 2,
                    x * y,
                    x / (2 + y**2),
                    (1 - z) * x + z * y,
                    number * x - y,
                    1 - x * y,
                    r.choice(maps)(x * r.choice(slots)),
                    x + r.choice(maps)(r.choice(slots)),
                )[kind]
            return (
                lambda: sigmoid(x),
                lambda: tanh(x),
                lambda: exp(-(x**2)),
                lambda: log(2 + x**2),
                lambda: softplus(x),
                lambda: sin(x),
                lambda: cos(x) * x,
                lambda: sympy.sqrt(1 + x**2),
                lambda: (1 + x**2) ** sympy.Rational(-3, 2),
            )[kind - 9]()

        for i in range(r.randint(0, 3)):
            pool.append(s.let(f"z_{i}", r.choice((sigmoid, tanh))(expression(3)) * r.choice(pool)))
        for slot in slots:
            e = tanh(expression(3) + r.choice(maps)(slot * r.choice(pool)))
            if r.random() < 0.5:
                g = s.let(f"g_{slot.name}", sigmoid(expression(2)))
                e = (1 - g) * slot + g * e
            s.next(slot, e)
            pool.append(s.updated(slot))
    return s, sizes


def build(seed, kinks):
    spec, sizes = invent(seed, kinks)
    n, k, m = len(spec.slots), len(spec.drive_list), len(spec.map_list)

    class Interpreted(Cell):
        def recurrence(self, *a):
            out = interpret(spec, sizes, a[:n], a[n : n + k], a[n + k : n + k + m], a[n + k + m :])
            return out[0] if n == 1 else tuple(out)

    torch.manual_seed(seed)
    cell = Interpreted(2, spec=spec, sizes=sizes).double()
    with torch.no_grad():
        for p in cell.parameters():
            p.copy_(0.5 * torch.randn_like(p))
    return cell


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
