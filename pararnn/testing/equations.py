"""The second oracle: the papers' equations, written out again scalar by scalar, in 50 digits.

They take numbers of mpmath, or those of :mod:`.rounding`, which carry what rounding may do to them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mpmath
import numpy as np
import torch
from torch import Tensor

from .kinds import AnyCell
from .reference import apart

DIGITS = 50


def _function(name: str) -> Callable[[Any], Any]:
    """A function of mpmath, or the method of that name of another kind of number
    (:class:`pararnn.testing.rounding.Number`), so that the equations serve both."""

    def of(x: Any) -> Any:
        if isinstance(x, mpmath.mpf | int | float):
            return getattr(mpmath, name)(x)
        return getattr(x, name)()

    return of


_exp, _expm1, _log1p, _tanh, _sqrt, _cos, _sin = map(
    _function, ("exp", "expm1", "log1p", "tanh", "sqrt", "cos", "sin")
)


def _sigmoid(x: Any) -> Any:
    return 1 / (1 + mpmath.exp(-x)) if isinstance(x, mpmath.mpf) else x.sigmoid()


def _gate(x: Any) -> tuple[Any, Any]:
    """``σ(x)`` and ``1 − σ(x)``, without cancellation."""
    return _sigmoid(x), _sigmoid(-x)


def _softplus(x: Any) -> Any:
    return mpmath.log1p(mpmath.exp(x)) if isinstance(x, mpmath.mpf) else x.softplus()


def _share(a: Any, b: Any) -> Any:
    """``σ(a) / (σ(a) + σ(b))``."""
    if isinstance(a, mpmath.mpf):
        return _sigmoid(a) / (_sigmoid(a) + _sigmoid(b))
    return (_softplus(-b) - _softplus(-a)).sigmoid()


def _choose(condition: Any, yes: Any, no: Any) -> Any:
    if isinstance(condition, bool):
        return yes if condition else no
    return no.replaced(condition, yes)


def _larger(a: Any, b: Any) -> Any:
    return _choose(a >= b, a, b)


def _snapped(theta: Any, m: Any) -> Any:
    """The nearest multiple of ``2π/m``, less whole turns."""
    if isinstance(theta, mpmath.mpf):
        step = 2 * mpmath.pi / m
        return mpmath.nint(theta / step) * step
    return theta.snapped(m)


def _unit(k: list) -> list:
    """A vector divided by its length."""
    if isinstance(k[0], mpmath.mpf):
        length = mpmath.sqrt(_dot(k, k))
        return [x / length for x in k]
    return type(k[0]).unit(k)


def _dot(row: Sequence, column: Sequence) -> Any:
    terms = [a * b for a, b in zip(row, column, strict=True)]
    if isinstance(terms[0], mpmath.mpf):
        return mpmath.fsum(terms)
    return sum(terms[1:], terms[0])


def _affine(weight: list, bias: list, x: list) -> list:
    return [_dot(row, x) + b for row, b in zip(weight, bias, strict=True)]


def _gru(h: list, u: list, apply: Callable[[int, list], list]) -> list:
    """Danieli et al., arXiv:2510.21450, eq. 3.1a; the drives come in the order z, r, n."""
    d = len(h)
    z = [_gate(a + b) for a, b in zip(apply(0, h), u[:d], strict=True)]
    r = [_sigmoid(a + b) for a, b in zip(apply(1, h), u[d : 2 * d], strict=True)]
    gated = [a * b for a, b in zip(r, h, strict=True)]
    n = [_tanh(a + b) for a, b in zip(apply(2, gated), u[2 * d :], strict=True)]
    return [z[i][1] * h[i] + z[i][0] * n[i] for i in range(d)]


def gru_diag(h: list, u: list, maps: list) -> list:
    return _gru(h, u, lambda which, v: [a * b for a, b in zip(maps[which], v, strict=True)])


def gru_head(h: list, u: list, maps: list) -> list:
    def apply(which: int, v: list) -> list:
        width = len(maps[which][0])
        heads = [v[i : i + width] for i in range(0, len(v), width)]
        return [_dot(row, x) for a, x in zip(maps[which], heads, strict=True) for row in a]

    return _gru(h, u, apply)


def lstm(state: list, u: list, maps: list) -> list:
    """Danieli et al., arXiv:2510.21450, eq. 3.1b; the drives come in the order f, z, o."""
    old, h = state
    d = len(h)
    a_f, a_z, a_o, c_f, c_o = maps
    memory, output = [], []
    for i in range(d):
        f, left = _gate(a_f[i] * h[i] + c_f[i] * old[i] + u[i])
        z = _tanh(a_z[i] * h[i] + u[d + i])
        c = f * old[i] + left * z
        o = _sigmoid(a_o[i] * h[i] + c_o[i] * c + u[2 * d + i])
        memory.append(c)
        output.append(o * _tanh(c))
    return [memory, output]


def nlru(h: list, u: list, maps: list) -> list:
    """De et al., arXiv:2402.19427, section 2.4, as powers of ``σ(−Λ)``, with the input
    ``tanh(w h + u_n)``; the drives come in the order r, i, n."""
    d = len(h)
    w, big = maps
    out = []
    for j in range(d):
        log_a = -8 * _sigmoid(u[j]) * _softplus(big[j])
        n = _tanh(w[j] * h[j] + u[2 * d + j])
        out.append(_exp(log_a) * h[j] + _sqrt(-_expm1(2 * log_a)) * _sigmoid(u[d + j]) * n)
    return out


def m2rnn(h: list, u: list, maps: list) -> list:
    """Mishra et al., arXiv:2603.14360, eq. 19 and 20; the drives come in the order k, v, f."""
    (w,) = maps
    rows, columns = len(h), len(w)
    k, v, f = u[:rows], u[rows : rows + columns], _gate(u[-1])
    out = []
    for i in range(rows):
        inner = [_dot(h[i], [w[m][j] for m in range(columns)]) for j in range(columns)]
        z = [_tanh(inner[j] + k[i] * v[j]) for j in range(columns)]
        out.append([f[0] * h[i][j] + f[1] * z[j] for j in range(columns)])
    return out


def _slstm(state: list, u: list, maps: list, log_forget: Callable[[Any], Any]) -> list:
    """Beck et al., arXiv:2405.04517, section 2.2, stabilised; the drives come in the order i, f, z,
    o. Nothing is kept of an empty state (n below 1/2)."""
    c, n, m, h = state
    d = len(h)
    r_i, r_f, r_z, r_o = maps
    out: list[list] = [[], [], [], []]
    for j in range(d):
        log_i = r_i[j] * h[j] + u[j]
        log_f = log_forget(r_f[j] * h[j] + u[d + j])
        z = _tanh(r_z[j] * h[j] + u[2 * d + j])
        o = _sigmoid(r_o[j] * h[j] + u[3 * d + j])
        empty = n[j] < 0.5
        top = _choose(empty, log_i, _larger(log_f + m[j], log_i))
        i = _exp(log_i - top)
        f = _choose(empty, 0 * top, _exp(log_f + m[j] - top))
        c_new, n_new = f * c[j] + i * z, f * n[j] + i
        for slot, value in zip(out, (c_new, n_new, top, o * c_new / n_new), strict=True):
            slot.append(value)
    return out


def slstm_sigmoid(state: list, u: list, maps: list) -> list:
    return _slstm(state, u, maps, lambda x: -_softplus(-x))


def slstm_exp(state: list, u: list, maps: list) -> list:
    return _slstm(state, u, maps, lambda x: x)


def cfc_published(h: list, u: list, maps: list) -> list:
    """Hasani et al., Nature Machine Intelligence 2022; the drives come in the order f, g, k, Δt."""
    d, dt = len(h), u[-1]
    f, g, k = ([maps[w][j] * h[j] + u[w * d + j] for j in range(d)] for w in range(3))
    gate = [_gate(-x * dt) for x in f]
    return [gate[j][0] * _tanh(g[j]) + gate[j][1] * _tanh(k[j]) for j in range(d)]


def cfc_consistent(h: list, u: list, maps: list) -> list:
    """The same with ``exp(−softplus(f) Δt)`` for the gate and the old state for g."""
    d, dt = len(h), u[-1]
    f, k = ([maps[w][j] * h[j] + u[w * d + j] for j in range(d)] for w in range(2))
    log_kept = [-_softplus(x) * dt for x in f]
    return [_exp(log_kept[j]) * h[j] - _expm1(log_kept[j]) * _tanh(k[j]) for j in range(d)]


def _g(x: Any) -> Any:
    """Feng et al., arXiv:2410.01201, App. B."""
    return _choose(x >= 0, x + 0.5, _sigmoid(x))


def min_gru(h: list, u: list, maps: list) -> list:
    """Feng et al., arXiv:2410.01201, minGRU in its log-space form; the drives in the order z, h."""
    d = len(h)
    z = [_gate(x) for x in u[:d]]
    return [z[j][1] * h[j] + z[j][0] * _g(u[d + j]) for j in range(d)]


def min_gru_decay(h: list, u: list, maps: list) -> list:
    """The same with ``exp(−softplus(ρ) log(1 + Δt))`` before ``1 − z``; Δt is the last drive."""
    d, dt = len(h), u[-1]
    (rho,) = maps
    left = [_exp(-_softplus(r) * _log1p(dt)) for r in rho]
    z = [_gate(x) for x in u[:d]]
    return [left[j] * z[j][1] * h[j] + z[j][0] * _g(u[d + j]) for j in range(d)]


def min_lstm(h: list, u: list, maps: list) -> list:
    """Feng et al., arXiv:2410.01201, minLSTM with normalised gates; the drives in the order f, i, h."""
    d = len(h)
    out = []
    for j in range(d):
        f, i = u[j], u[d + j]
        out.append(_share(f, i) * h[j] + _share(i, f) * _g(u[2 * d + j]))
    return out


def signed(h: list, u: list, maps: list) -> list:
    """The card's equation; the drives come in the order z, v, s."""
    d = len(h)
    return [_tanh(u[2 * d + j]) * h[j] + _sigmoid(u[j]) * u[d + j] for j in range(d)]


def signed_coupled(h: list, u: list, maps: list) -> list:
    d = len(h)
    z = [_gate(x) for x in u[:d]]
    turn = [z[j][1] * _tanh(u[2 * d + j]) for j in range(d)]
    return [turn[j] * h[j] + z[j][0] * u[d + j] for j in range(d)]


def rotation(state: list, u: list, maps: list) -> list:
    """The card's equations; the drives come in the order z (2), v (2), θ, d."""
    x, y = state
    n = len(x)
    zx, zy, vx, vy, theta, d = (u[i * n : (i + 1) * n] for i in range(6))
    if maps:
        theta = [_snapped(t, m) for t, m in zip(theta, maps[0], strict=True)]
    out: list[list] = [[], []]
    for j in range(n):
        c, s, flat = _cos(theta[j]), _sin(theta[j]), _tanh(d[j]) * y[j]
        out[0].append(c * x[j] - s * flat + _sigmoid(zx[j]) * vx[j])
        out[1].append(s * x[j] + c * flat + _sigmoid(zy[j]) * vy[j])
    return out


def givens(state: list, u: list, maps: list) -> list:
    """The card's equations, block by block; the drives come in the order θ, z, v."""
    k, n = len(state), len(state[0])
    rows = [u[i : i + n] for i in range(0, len(u), n)]
    angles, gates, values = rows[: -2 * k], rows[-2 * k : -k], rows[-k:]
    h = [list(row) for row in state]
    for q, theta in enumerate(angles):
        r, p = divmod(q, k // 2)
        i = (2 * p + r % 2) % k
        j = (i + 1) % k
        for b in range(n):
            c, s, first, second = _cos(theta[b]), _sin(theta[b]), h[i][b], h[j][b]
            h[i][b], h[j][b] = c * first - s * second, s * first + c * second
    return [[h[i][b] + _sigmoid(gates[i][b]) * values[i][b] for b in range(n)] for i in range(k)]


def delta(h: list, u: list, maps: list, nh: int = 1) -> list:
    """Yang et al., arXiv:2406.06484, section 2.2, head by head, with nh corrections a step (Siems
    et al., arXiv:2502.10297); the drives in the order q, keys, values, logits, and Δt with a decay."""
    heads, rows, columns = len(h), len(h[0]), len(h[0][0])
    keys = heads * rows  # where the first key begins, behind the queries
    values = keys + nh * heads * rows
    logits = values + nh * heads * columns
    out = []
    for n in range(heads):
        state = h[n]
        if maps:
            left = _exp(-_softplus(maps[0][n]) * u[-1])
            state = [[left * x for x in row] for row in state]
        for j in range(nh):
            at = j * heads + n
            k = _unit(u[keys + at * rows : keys + (at + 1) * rows])
            v = u[values + at * columns : values + (at + 1) * columns]
            beta = 2 * _sigmoid(u[logits + at])
            old = [_dot(k, [state[i][c] for i in range(rows)]) for c in range(columns)]
            state = [
                [state[i][c] - beta * k[i] * old[c] + beta * k[i] * v[c] for c in range(columns)]
                for i in range(rows)
            ]
        out.append(state)
    return out


def delta_product(h: list, u: list, maps: list) -> list:
    return delta(h, u, maps, nh=2)


EQUATIONS: dict[str, Callable[[list, list, list], list]] = {
    "DeltaMinGRU[nh=1]": delta,
    "DeltaMinGRU[nh=2]": delta_product,
    "DeltaMinGRU[decay]": delta,
    "ParaGRU[diag]": gru_diag,
    "ParaGRU[head]": gru_head,
    "ParaLSTM": lstm,
    "ParaNLRU": nlru,
    "ParaSLSTM[sigmoid]": slstm_sigmoid,
    "ParaSLSTM[exp]": slstm_exp,
    "ParaCfC[published]": cfc_published,
    "ParaCfC[consistent]": cfc_consistent,
    "ParaM2RNN": m2rnn,
    "MinGRU[plain]": min_gru,
    "MinGRU[decay]": min_gru_decay,
    "MinLSTM": min_lstm,
    "SignedMinGRU[decoupled]": signed,
    "SignedMinGRU[coupled]": signed_coupled,
    "RotationMinGRU[snapped]": rotation,
    "RotationMinGRU[free]": rotation,
    "GivensMinGRU": givens,
}


def corrected(h: Tensor, key: Tensor, v: Tensor, logit: Tensor) -> Tensor:
    """One step of the delta rule on ``(B, heads, rows, columns)``."""
    k = key / key.norm(dim=-1, keepdim=True)
    error = v - torch.einsum("bhkv,bhk->bhv", h, k)
    return h + torch.einsum("bh,bhk,bhv->bhkv", 2 * torch.sigmoid(logit), k, error)


LIMITS: dict[str, Callable[[Tensor, tuple[Tensor, ...], tuple[Tensor, ...]], Tensor]] = {
    "ParaCfC[published]": lambda h, u, r: (
        (torch.tanh(r[1] * h + u[1]) + torch.tanh(r[2] * h + u[2])) / 2
    ),
    "ParaCfC[consistent]": lambda h, u, r: h,
    "MinGRU[decay]": lambda h, u, r: (
        torch.sigmoid(-u[0]) * h
        + torch.sigmoid(u[0]) * torch.where(u[1] >= 0, u[1] + 0.5, torch.sigmoid(u[1]))
    ),
    "DeltaMinGRU[decay]": lambda h, u, r: corrected(h, *u[1:4]),
}
"""What a step is when no time has passed, as the card says: of state, drives and weights."""


def exact(values: Any) -> Any:
    """Nested lists of mpmath numbers; the conversion from float is exact."""
    if isinstance(values, Tensor):
        values = values.detach().double().cpu().tolist()
    if isinstance(values, list):
        return [exact(v) for v in values]
    return mpmath.mpf(values)


def written_out(name: str, cell: AnyCell, h: Tensor, x: Tensor) -> np.ndarray:
    """The paper's step of one sample with the cell's weights, in :data:`DIGITS` digits."""
    equation = EQUATIONS[name]
    with mpmath.workdps(DIGITS):
        weight, bias = exact(cell.in_proj.weight), exact(cell.in_proj.bias)
        maps = [exact(p) for p in cell.recurrent_params()]
        x, more = apart(cell, x)
        u = _affine(weight, bias, exact(x)) + [exact(dt) for dt in more.values()]
        return np.array(equation(exact(h), u, maps), dtype=object)
