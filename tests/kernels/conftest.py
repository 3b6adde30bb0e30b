"""The kernels against a loop over the hand-written step in float64.

With an NVIDIA GPU the kernels run on it. Without one they run in Triton's interpreter, which is
slow, so shapes are tiny. A block has 32 lanes whatever the shape is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

if importlib.util.find_spec("triton") is None:
    collect_ignore_glob = ["test_*.py"]

EPS = {torch.float64: 2.0**-52, torch.float32: 2.0**-23}
NAN = float("nan")


# -- recurrences -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Subject:
    """A Spec with its equation by hand, and the ranges of inputs that it is drawn from."""

    spec: Any
    equation: Callable[..., Any]

    @property
    def slots(self) -> int:
        return len(self.spec.slots)

    @property
    def timed(self) -> bool:
        return self.spec.gap is not None

    def step(self, state: Tensor, u: Tensor, dt: Tensor | None, params: tuple) -> Tensor:
        """``(B, S, D)`` and drives ``(B, n·D)`` → the next ``(B, S, D)``."""
        width = state.shape[-1]
        drives = [*u.split(width, -1), *([] if dt is None else [dt])]
        out = self.equation(*state.unbind(1), *drives, *params)
        return torch.stack([out] if isinstance(out, Tensor) else list(out), 1)


def trio() -> Subject:
    """Three slots, zeros in the Jacobian, an elementwise and a scalar parameter."""
    from pararnn.spec import Spec, cos, sigmoid, tanh

    with Spec("Trio") as s:
        a, b, h = s.state("a"), s.state("b"), s.state("h")
        u, v = s.drives("u v")
        A = s.map("A", structure="diagonal")
        (g,) = s.params("g")
        (k,) = s.params("k", axes=())
        s.next(a, tanh(A(h) + u))
        s.next(b, sigmoid(v) * b + k * s.updated(a))
        s.next(h, s.updated(a) * cos(s.updated(b)) + g * h / 3)

    def equation(a, b, h, u, v, A, g, k):
        a = torch.tanh(A * h + u)
        b = torch.sigmoid(v) * b + k * a
        return a, b, a * torch.cos(b) + g * h / 3

    return Subject(s, equation)


def linear() -> Subject:
    """Two slots, linear in the state, with Jacobians that do not commute: chunks are reduced."""
    from pararnn.spec import Spec

    with Spec("Linear") as s:
        a, h = s.state("a"), s.state("h")
        u, v = s.drives("u v")
        A = s.map("A", structure="diagonal")
        s.next(a, u * a - A(h) + v)
        s.next(h, A(a) + v * h / 2)

    return Subject(s, lambda a, h, u, v, A: (u * a - A * h + v, A * a + v * h / 2))


def nearly() -> Subject:
    """The same but for a term that the second Newton correction makes as small as a rounding."""
    from pararnn.spec import Spec, tanh

    with Spec("Nearly") as s:
        a, h = s.state("a"), s.state("h")
        u, v = s.drives("u v")
        A = s.map("A", structure="diagonal")
        s.next(a, u * a - A(h) + v)
        s.next(h, A(a) + v * h / 2 + tanh(h) / 2**20)

    return Subject(
        s, lambda a, h, u, v, A: (u * a - A * h + v, A * a + v * h / 2 + torch.tanh(h) / 2**20)
    )


def gate() -> Subject:
    """No recurrent parameter; the Jacobian is a drive."""
    from pararnn.spec import Spec

    with Spec("Gate") as s:
        h = s.state("h")
        u, v = s.drives("u v")
        s.next(h, u * h + v)

    return Subject(s, lambda h, u, v: u * h + v)


OWN = {"trio": trio, "linear": linear, "nearly": nearly, "gate": gate}


@cache
def subject(name: str) -> Subject:
    import pararnn

    if name in OWN:
        return OWN[name]()
    cell = pararnn.get_cell(name).factory(2)
    return Subject(cell.spec, cell.recurrence)


GRU, LSTM, SLSTM = "ParaGRU[diag]", "ParaLSTM", "ParaSLSTM[sigmoid]"
CFC, NLRU, TRIO = "ParaCfC[published]", "ParaNLRU", "trio"
NAMES = (GRU, LSTM, SLSTM, "ParaSLSTM[exp]", CFC, "ParaCfC[consistent]", NLRU, TRIO)


# -- cases -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One problem and how it is cut. ``length`` 0 is one chunk. ``resets``: none, some, zero (at
    step 0), borders (at every chunk's first step), all. ``grads`` names the cotangents that there
    are. ``layout`` says how the drives lie in memory, ``flat`` makes cotangents of stride 0."""

    cell: str = GRU
    B: int = 2
    T: int = 7
    D: int = 3
    length: int = 0
    warmup: int = 2
    corrections: int = 2
    unroll: int = 2
    dtype: torch.dtype = torch.float64
    h0: bool = True
    resets: str = "none"
    grads: tuple[str, ...] = ("last", "others", "final")
    layout: str = "packed"
    flat: bool = False
    scale: float = 0.7
    seed: int = 0
    tol: float = 0.0
    repaired: bool | None = None  # whether the repair must run, if that is known

    @property
    def state(self) -> torch.dtype:
        return torch.float64 if self.dtype == torch.float64 else torch.float32


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "packed": lambda u: u.clone(),
    "time-major": lambda u: u.transpose(0, 1).contiguous().transpose(0, 1),
    "sliced": lambda u: torch.cat([u, u, u], 2)[..., u.shape[2] : 2 * u.shape[2]],
    "stride 2": lambda u: torch.stack([u, torch.full_like(u, NAN)], -1).flatten(2)[..., ::2],
    "channel-major": lambda u: u.transpose(1, 2).contiguous().transpose(1, 2),
    "one sample": lambda u: u[:1].clone().expand_as(u),
    "one step": lambda u: u[:, :1].clone().expand_as(u),
    "every second step": lambda u: u.repeat_interleave(2, 1)[:, ::2],
}


@dataclass
class Data:
    """Inputs of a case on the device."""

    u: Tensor
    dt: Tensor | None
    h0: Tensor | None
    resets: Tensor | None
    params: tuple[Tensor, ...]


def draw(case: Case) -> Data:
    s = subject(case.cell)
    g = torch.Generator().manual_seed(case.seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64)

    B, T, D = case.B, case.T, case.D
    shapes = s.spec.parameter_shapes({"d": D}).values()
    params = tuple((case.scale * normal(*shape)).to(case.dtype) for shape in shapes)
    vectors = sum(not d.given for d in s.spec.drive_list)
    u = LAYOUTS[case.layout](normal(B, T, vectors * D).to(case.dtype))
    dt = None
    if s.timed:
        dt = 2 * torch.rand(B, T, generator=g, dtype=torch.float64)
        dt = dt.to(case.dtype)
        if case.layout != "packed":
            dt = torch.stack([dt, torch.full_like(dt, NAN)], -1)[..., 0]
    h0 = torch.zeros(B, s.slots, D, dtype=torch.float64)
    for _ in range(2):  # a state that the recurrence can be in
        now = dt[:, 0].double() if s.timed else None
        wide = tuple(p.double() for p in params)
        h0 = s.step(h0, normal(B, vectors * D), now, wide)
    chunk = case.length or T
    at = torch.arange(T)
    chosen = {
        "none": None,
        "some": torch.rand(B, T, generator=g) < 0.3,
        "zero": (at == 0).expand(B, T),
        "borders": (at % chunk == 0).expand(B, T),
        "all": torch.ones(B, T, dtype=torch.bool),
    }[case.resets]
    move = lambda t: None if t is None else t.to(DEVICE)  # noqa: E731
    return Data(
        move(u),
        move(dt),
        move(h0.to(case.state)) if case.h0 else None,
        move(chosen),
        tuple(move(p) for p in params),
    )


# -- the reference -----------------------------------------------------------------------------


def expected_states(case: Case, data: Data) -> Tensor:
    """``(B, T+1, S, D)`` in float64 on the CPU, the initial state first."""
    s = subject(case.cell)
    u, params = data.u.cpu().double(), tuple(p.cpu().double() for p in data.params)
    h = torch.zeros(case.B, s.slots, case.D, dtype=torch.float64)
    h = h if data.h0 is None else data.h0.cpu().double()
    found = [h]
    for t in range(case.T):
        if data.resets is not None:
            h = torch.where(data.resets[:, t, None, None].cpu(), 0.0, h)
        dt = None if data.dt is None else data.dt[:, t].cpu().double()
        h = s.step(h, u[:, t], dt, params)
        found.append(h)
    return torch.stack(found, 1)


def expected_cotangents(
    case: Case, data: Data, states: Tensor, bars: dict[str, Tensor | None]
) -> dict[str, Any]:
    """Cotangents in float64 on the CPU, by autograd through every step at the given states
    ``(B, T+1, S, D)``."""
    s = subject(case.cell)
    u = data.u.cpu().double()
    params = tuple(p.cpu().double().requires_grad_() for p in data.params)
    wide = {k: None if v is None else v.cpu().double() for k, v in bars.items()}
    m = torch.zeros(case.B, s.slots, case.D, dtype=torch.float64)
    m = m if wide["final"] is None else wide["final"]
    u_bar, dt_bar = torch.zeros_like(u), torch.zeros(case.B, case.T, dtype=torch.float64)
    w_bar = [torch.zeros_like(p) for p in params]
    for t in reversed(range(case.T)):
        if wide["last"] is not None:
            m = torch.cat([m[:, :-1], m[:, -1:] + wide["last"][:, t, None]], 1)
        if wide["others"] is not None:
            m = torch.cat([m[:, :-1] + wide["others"][:, t], m[:, -1:]], 1)
        keep = torch.ones(case.B, 1, 1, dtype=torch.float64)
        if data.resets is not None:
            keep = (~data.resets[:, t, None, None].cpu()).double()
        h = states[:, t].detach().requires_grad_()
        now = u[:, t].clone().requires_grad_()
        leaves = [h, now, *params]
        dt = None
        if data.dt is not None:
            dt = data.dt[:, t].cpu().double().requires_grad_()
            leaves.append(dt)
        out = s.step(torch.where(keep == 0, 0.0, h), now, dt, params)
        got = torch.autograd.grad(out, leaves, m, materialize_grads=True)
        m, u_bar[:, t] = got[0], got[1]
        w_bar = [a + b for a, b in zip(w_bar, got[2 : 2 + len(params)], strict=True)]
        if dt is not None:
            dt_bar[:, t] = got[-1]
    return {"u": u_bar, "dt": dt_bar, "h0": m, "params": w_bar}


# -- running -----------------------------------------------------------------------------------


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Fresh memory holds NaN, or the largest integer."""
    fresh = torch.empty

    def empty(*args: Any, **kwargs: Any) -> Tensor:
        out = fresh(*args, **kwargs)
        return out.fill_(NAN if out.is_floating_point() else torch.iinfo(out.dtype).max)

    with mock.patch.object(torch, "empty", empty):
        yield


def plan_of(case: Case) -> Any:
    from pararnn.kernels.plan import Plan

    return Plan(
        length=case.length or max(case.T, 1),
        warmup=case.warmup,
        corrections=case.corrections,
        tol=case.tol or {torch.float64: 1e-13, torch.float32: 5e-7}[case.state],
        block=32,
        unroll=case.unroll,
    )


def problem_of(case: Case, data: Data) -> Any:
    from pararnn.kernels.launch import Problem

    return Problem(subject(case.cell).spec, data.u, data.params, data.dt, data.h0, data.resets)


def forward(case: Case, data: Data) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from pararnn.kernels.launch import run_forward

    with poisoned():
        return run_forward(problem_of(case, data), plan_of(case))


def adjoint(
    case: Case, data: Data, last: Tensor, others: Tensor, bars: dict[str, Tensor | None]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from pararnn.kernels.launch import run_adjoint

    with poisoned():
        (u_bar,), *more = run_adjoint(
            problem_of(case, data),
            plan_of(case),
            last,
            others,
            bars["last"],
            bars["others"],
            bars["final"],
            dt_grad=data.dt is not None,
        )
    return u_bar, *more


def cotangents(case: Case, last: Tensor, others: Tensor, final: Tensor) -> dict[str, Any]:
    """Random cotangents of what the case names, None elsewhere."""
    g = torch.Generator().manual_seed(case.seed + 1)
    out: dict[str, Tensor | None] = {}
    for name, like in (("last", last), ("others", others), ("final", final)):
        if name not in case.grads or like.numel() == 0:
            out[name] = None
        elif case.flat:
            out[name] = torch.tensor(1.5, dtype=like.dtype, device=DEVICE).expand(like.shape)
        else:
            value = torch.randn(like.shape, generator=g, dtype=torch.float64)
            out[name] = value.to(like.dtype).to(DEVICE)
    return out


# -- comparing ---------------------------------------------------------------------------------


def close(what: str, got: Tensor, want: Tensor, case: Case, terms: int = 1) -> None:
    """Within ``16 T`` roundings of the state's dtype relative to the largest entry, and the
    mismatch that the solver leaves at the chunks' borders; half a unit in the last place of a
    half-precision result more. ``terms`` numbers were added."""
    got = got.detach().cpu().double()
    assert got.shape == want.shape, f"{what}: shape {tuple(got.shape)}, not {tuple(want.shape)}"
    assert torch.equal(torch.isnan(got), torch.isnan(want)), f"{what}: NaN in other places"
    usual = torch.isfinite(want)
    infinite = [torch.where(usual, 0.0, t.nan_to_num(0.0, torch.inf)) for t in (got, want)]
    assert torch.equal(*infinite), f"{what}: other infinities"
    size = float(want[usual].abs().max()) if bool(usual.any()) else 0.0
    rounding = 16 * max(case.T, 4) * EPS[case.state]
    if 0 < case.length < case.T:
        rounding += plan_of(case).tol * plan_of(case).chunks(case.T)
    bound = rounding * size * terms**0.5
    allowed = torch.full_like(want, max(bound, torch.finfo(case.state).tiny))
    if case.dtype in (torch.bfloat16, torch.float16):
        # Triton's interpreter cuts bfloat16 off where a GPU rounds.
        units = 1.0 if case.dtype == torch.bfloat16 and DEVICE == "cpu" else 0.5
        allowed += want.abs() * torch.finfo(case.dtype).eps * units * 1.01
        allowed += torch.finfo(case.dtype).smallest_normal
    worst = max([0.0, *((got - want).abs() / allowed)[usual].tolist()])
    assert worst <= 1, f"{what}: off by {worst:.3g} times the tolerance ({bound:.1e})"


def verify(case: Case, data: Data | None = None) -> Tensor:
    """Run both passes of a case and compare them with the reference; returns the record of
    mismatches."""
    data = draw(case) if data is None else data
    want = expected_states(case, data)
    last, others, final, miss = forward(case, data)
    close("final", final, want[:, -1], dataclasses.replace(case, dtype=case.state))
    close("last", last, want[:, 1:, -1], case)
    close("others", others, want[:, 1:, :-1], dataclasses.replace(case, dtype=case.state))
    bars = cotangents(case, last, others, final)
    stored = torch.cat([others.cpu().double(), last.cpu().double().unsqueeze(2)], 2)
    stored = torch.cat([want[:, :1], stored], 1)
    right = expected_cotangents(case, data, stored, bars)
    u_bar, dt_bar, h0_bar, w_bar = adjoint(case, data, last, others, bars)
    exact = dataclasses.replace(case, dtype=case.state)
    close("u_bar", u_bar, right["u"], case)
    close("h0_bar", h0_bar, right["h0"], exact)
    if data.dt is not None:
        close("dt_bar", dt_bar.sum(-1), right["dt"], exact, case.D)
    for i, w in enumerate(right["params"]):
        got = w_bar[i] if w.ndim else w_bar[i].sum()
        close(f"w_bar {i}", got, w, exact, case.B * case.T * (1 if w.ndim else case.D))
    if case.repaired is not None:
        assert bool(miss[-1, 0].sum() > 0) == case.repaired, f"repairs: {miss[-1, 0].tolist()}"
    return miss


def patched_once(patch: Callable[[Any], Any], modules: tuple[Any, ...]) -> Callable[[Any], Any]:
    """Triton's interpreter prepares its language anew for every call of a device function, which
    takes half of its time; once in a launch is enough."""
    done: set[frozenset[int]] = set()

    def prepare(fn: Any) -> Any:
        used = frozenset(i for i, m in enumerate(modules) if m in fn.__globals__.values())
        if used in done:
            return None
        outermost, scope = not done, patch(fn)
        done.add(used)
        if outermost:
            restore = scope.restore
            scope.restore = lambda: (done.clear(), restore())
        return scope

    return prepare


@pytest.fixture(scope="session", autouse=True)
def quick_interpreter() -> Iterator[None]:
    if DEVICE == "cuda":
        yield
        return
    import triton.language as tl
    from triton.runtime import interpreter

    once = patched_once(interpreter._patch_lang, (tl, tl.core))
    with mock.patch.object(interpreter, "_patch_lang", once):
        yield


@pytest.fixture(scope="session")
def kit() -> Any:
    """Everything of this file, for the tests."""
    return sys.modules[__name__]
