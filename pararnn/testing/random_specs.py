"""Random Specs, and a direct interpreter of the expressions as they were written.

Whatever an author may write is canonicalized, hoisted, factorized, printed, fused and linearized
before anything computes. The interpreter uses nothing of that: it walks the authored expression
trees with tensors, or with the numbers of :mod:`.rounding`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from torch import Tensor

from pararnn import Cell, Spec
from pararnn.spec import cos, exp, expm1, log, maximum, sigmoid, sin, softplus, tanh
from pararnn.spec.declarations import Linear

from .rounding import Number, Rounding

FUNCTIONS: dict[str, Callable[..., Tensor]] = {
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


def act(structure: str, w: Tensor, x: Tensor) -> Tensor:
    """A linear map of a structure, by its weights."""
    if structure == "diagonal":
        return w * x
    if structure == "right":
        return x @ w
    if structure == "dense":
        return (x.unsqueeze(-2) @ w.mT).squeeze(-2)
    heads = x.unflatten(-1, (w.shape[-3], -1)).unsqueeze(-2)
    return (heads @ w.mT).squeeze(-2).flatten(-2)


def interpret(
    spec: Spec,
    sizes: dict[str, int],
    slots: Sequence,
    drives: Sequence,
    maps: Sequence,
    params: Sequence,
    rounding: Rounding | None = None,
) -> list[Tensor]:
    """The next slots, straight from the authored expressions; with ``rounding``, in numbers that are
    off by it. Weights have the leading dimensions of the state then, or as many of size 1."""
    full = tuple(sizes[a] for a in spec.axes)
    lead = slots[0].shape[: slots[0].ndim - len(full)]
    weights = {m.name: w for m, w in zip(spec.map_list, maps, strict=True)}

    def number(value: Tensor) -> Any:
        return rounding.number(value) if rounding else value

    def expanded(value: Any) -> Tensor:
        value = value.value if isinstance(value, Number) else value
        return value.expand(*lead, *full)

    values = {s.symbol: number(v) for s, v in zip(spec.slots, slots, strict=True)}
    declared: list[tuple[Any, Tensor]] = [
        *zip(spec.drive_list, drives, strict=True),
        *zip(spec.param_list, params, strict=True),
    ]
    for d, v in declared:
        for i, a in enumerate(reversed(spec.axes)):
            v = v if a in d.axes else v.unsqueeze(-1 - i)
        values[d.symbol] = number(v)

    def evaluate(e: sympy.Expr) -> Any:
        if e in values:
            return values[e]
        if not e.args:
            constant = torch.tensor(float(e), dtype=torch.float64)
            return number(constant.reshape((1,) * slots[0].ndim)) if rounding else constant
        if isinstance(e, sympy.Pow):
            return evaluate(e.args[0]) ** float(e.args[1])
        inner = [evaluate(a) for a in e.args]
        if isinstance(e, sympy.Add | sympy.Mul):
            out = inner[0]
            for other in inner[1:]:
                out = out + other if isinstance(e, sympy.Add) else out * other
            return out
        name = type(e).__name__
        return getattr(inner[0], name)(*inner[1:]) if rounding else FUNCTIONS[name](*inner)

    for stage in spec.stages:
        out = evaluate(stage.authored)
        if isinstance(stage, Linear):
            x, w, structure = expanded(out), weights[stage.map.name], stage.map.structure
            out = act(structure, w, x)
            if rounding:
                out = rounding.accumulated(out, act(structure, w.detach().abs(), x.detach().abs()))
        values[stage.symbol] = out
    return [expanded(values[s.next_symbol]) for s in spec.slots]


def invent(r: random.Random, kinks: bool = False) -> tuple[Spec, dict[str, int]]:
    """A random Spec and sizes. Every expression contains a symbol. With ``kinks``, there is a time
    gap, and ``maximum`` occurs."""
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

        def expression(depth: int) -> Any:
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


def build(seed: int, kinks: bool = False) -> Cell:
    """A float64 cell of the Spec of a seed, whose hand-written step is :func:`interpret`."""
    spec, sizes = invent(random.Random(seed), kinks)
    n, k, m = len(spec.slots), len(spec.drive_list), len(spec.map_list)

    class Interpreted(Cell):
        def recurrence(self, *a: Any) -> Any:
            out = interpret(spec, sizes, a[:n], a[n : n + k], a[n + k : n + k + m], a[n + k + m :])
            return out[0] if n == 1 else tuple(out)

    torch.manual_seed(seed)
    cell = Interpreted(2, spec=spec, sizes=sizes).double()
    with torch.no_grad():
        for p in cell.parameters():
            p.copy_(0.5 * torch.randn_like(p))
    return cell
