"""The one differentiable operator of all recurrences with a Spec: ``pararnn::solve``.

Autograd, compilers and exporters see one node, whatever the length and whatever runs inside: the
kernels, one scan, or chunks by PyTorch operations. It plans for the sizes that it gets when it runs,
so a graph serves any length. A Spec travels by its fingerprint. Nothing but drives and states is kept
for the backward pass, which is one node, too; a second derivative is made of PyTorch operations
(:mod:`.adjoint`), whatever the first pass was. No node reaches its own output.

How a recurrence is run is the affair of :mod:`.methods`, which register it in :data:`RUNS`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._checks import full_precision
from .._operators import LIBRARY, Operator
from ..spec import Spec
from .adjoint import differentiable_gradients, first_order
from .config import divergence
from .recurrence import pack
from .spec_recurrence import SpecRecurrence

_SPECS: dict[str, Spec] = {}
FAMILIES: dict[str, Callable[[str], Spec]] = {}
"""Specs that are made when they are first needed: ``family:kind`` is one of a family."""


def register(spec: Spec) -> str:
    """Make a Spec known to the operators; returns its name there."""
    _SPECS[spec.fingerprint] = spec
    return spec.fingerprint


def spec_of(name: str) -> Spec:
    """The Spec that was registered under a name, or one of a family."""
    if name not in _SPECS:
        family, _, kind = name.partition(":")
        _SPECS[name] = FAMILIES[family](kind)
    return _SPECS[name]


class Settings(NamedTuple):
    """How to cut a sequence, in the types of an operator."""

    method: str = "chunks"  # a name in RUNS
    length: int = 0  # of a chunk; 0: the cost model's; -1: of the whole sequence
    warmup: int = -1  # -1: the cost model's
    max_iters: int = -1  # -1: until it converges
    tol: float = 0.0  # 0: the dtype's
    jacobian: str = "auto"
    cap: int = 16
    on_divergence: str = "auto"


class Call(NamedTuple):
    """Arguments of ``pararnn::solve``, and the first ones of its backward pass."""

    name: str
    sizes: Sequence[int]  # of the Spec's axes, and the number of heads
    dtype: torch.dtype  # of states
    drives: Sequence[Tensor]  # packed (B, T, C), or every one of them (B, T, D)
    dt: Tensor | None  # (B, T)
    h0: Tensor | None  # (B, *state_shape), in the state's dtype; zero if None
    resets: Tensor | None  # (B, T) bool
    params: Sequence[Tensor]
    method: str
    length: int
    warmup: int
    max_iters: int
    tol: float
    jacobian: str
    cap: int
    on_divergence: str

    @property
    def spec(self) -> Spec:
        return spec_of(self.name)

    @property
    def u(self) -> Tensor:
        """Some drives, for their sizes."""
        return self.drives[0]

    @property
    def named_sizes(self) -> dict[str, int]:
        return dict(zip((*self.spec.axes, "heads"), self.sizes, strict=False))

    @property
    def settings(self) -> Settings:
        return Settings(*self[-len(Settings._fields) :])  # type: ignore[arg-type]

    @property
    def state_shape(self) -> tuple[int, ...]:
        return self.spec.state_shape(self.named_sizes)

    @property
    def start(self) -> Tensor:
        """The initial state ``(B, *state_shape)``."""
        if self.h0 is not None:
            return self.h0
        return self.u.new_zeros(self.u.shape[0], *self.state_shape, dtype=self.dtype)

    @property
    def packed(self) -> Tensor:
        """What a recurrence reads at every step."""
        u = self.u if len(self.drives) == 1 else torch.cat(list(self.drives), -1)
        return pack(u, self.dt)

    def recurrence(self) -> SpecRecurrence:
        return SpecRecurrence(self.spec, self.named_sizes, self.params, self.dtype)

    def shown(self) -> int:
        """Slots that the output of the kernels holds."""
        return len(self.spec.slots) if self.spec.output == "all" else 1

    def whole(self, output: Tensor, others: Tensor) -> Tensor:
        """All slots ``(B, T, *state_shape)``, in the state's dtype."""
        if self.method != "fused":
            return output
        output = output.to(self.dtype)
        if len(self.spec.slots) == 1:
            return output
        return torch.cat([others, output.unflatten(-1, (self.shown(), -1))], 2)


Results = tuple[Tensor, Tensor, Tensor, Any]
"""The output, the states of the slots that are not in it ``(B, T, S-1, D)``, the final state
``(B, *state_shape)`` in the state's dtype, and how it went. The kernels' output is flat,
``(B, T, D)`` or ``(B, T, S·D)`` in the dtype of the drives; any other is all states,
``(B, T, *state_shape)`` in the state's dtype."""


class Run(NamedTuple):
    """How a method runs a call, and its backward pass: ``backward(call, output, others, grad, rest,
    final, dt_grad)``, from the cotangents of the three results, which may be None, gives those of
    the drives, of the time gaps (if ``dt_grad``), of the initial state and of the parameters."""

    forward: Callable[[Call], Results]
    backward: Callable[..., Gradients]


Gradients = tuple[list[Tensor], Tensor | None, Tensor, Sequence[Tensor | None]]
RUNS: dict[str, Run] = {}

_CALL = (
    "str spec, int[] sizes, ScalarType dtype, Tensor[] drives, Tensor? dt, Tensor? h0, "
    "Tensor? resets, Tensor[] params, str method, int length, int warmup, int max_iters, float tol, "
    "str jacobian, int cap, str on_divergence"
)


def _forward(*arguments: Any) -> Results:
    call = Call(*arguments)
    return RUNS[call.method].forward(call)


def empty_results(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Room for the results."""
    u, state_shape = call.u, call.state_shape
    batch, total = u.shape[:2]
    final = u.new_empty(batch, *state_shape, dtype=call.dtype)
    if call.method != "fused":
        output = u.new_empty(batch, total, *state_shape, dtype=call.dtype)
        return output, u.new_empty(batch, 0, dtype=call.dtype), final
    slots, shown, width = len(call.spec.slots), call.shown(), state_shape[-1]
    others = u.new_empty(batch, total, slots - shown, width, dtype=call.dtype)
    return u.new_empty(batch, total, shown * width), others, final


def _gradients(
    arguments: Sequence[Any],
    kept: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    needs: dict[str, bool],
) -> dict[str, Any]:
    call, (output, others) = Call(*arguments), kept
    grad, rest, final = grads[:3]
    rest = None if others.shape[-1] == 0 or others.shape[2:3] == (0,) else rest
    if grad is None and rest is None and final is None:
        return {}
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        with full_precision(call.u.device):
            return _named(call, *_eager(call, output, others, grad, rest, final, again=True))
    dt_grad = call.dt is not None and needs["dt"]
    bars, dt_bar, h0_bar, weights = solve_backward(
        *call, output, others, grad, rest, final, dt_grad
    )
    return _named(call, bars, dt_bar if dt_grad else None, h0_bar, weights)


def _named(
    call: Call,
    drives: list[Tensor],
    dt: Tensor | None,
    h0: Tensor,
    params: Sequence[Tensor | None],
) -> dict[str, Any]:
    found = {"drives": drives, "dt": dt, "params": list(params)}
    return found if call.h0 is None else found | {"h0": h0}


def _unread(arguments: Sequence[Any], report: Any) -> None:
    """Inside a compiled graph nobody reads a report; a solve that was told to warn or raise does."""
    call = Call(*arguments)
    if call.method != "fused":
        method = "newton" if call.length == 1 else "shooting"
        divergence(report, method, call.on_divergence)


solve = Operator(
    f"solve({_CALL}) -> (Tensor, Tensor, Tensor)",
    _forward,
    lambda *arguments: empty_results(Call(*arguments)),
    gradients=_gradients,
    kept=(0, 1),
    unread=_unread,
)


# -- the backward pass -----------------------------------------------------------------------------


def _backward(*arguments: Any) -> tuple[list[Tensor], Tensor, Tensor, list[Tensor]]:
    call, rest = Call(*arguments[: len(Call._fields)]), arguments[len(Call._fields) :]
    if call.u.numel() == 0:
        bars, dt_bar, h0_bar, weights = _empty_back(*arguments)
        zeros = [w.zero_() for w in weights]
        final = rest[4]
        return bars, dt_bar.zero_(), h0_bar.zero_() if final is None else final.clone(), zeros
    bars, gaps, h0_bar, found = RUNS[call.method].backward(call, *rest)
    dt_bar = call.u.new_empty(0) if gaps is None else gaps
    weights = [
        torch.zeros_like(p) if g is None else g.to(p.dtype)
        for g, p in zip(found, call.params, strict=True)
    ]
    return bars, dt_bar, h0_bar, weights


def _empty_back(*arguments: Any) -> tuple[list[Tensor], Tensor, Tensor, list[Tensor]]:
    call, dt_grad = Call(*arguments[: len(Call._fields)]), arguments[-1]
    return (
        [u.new_empty(u.shape) for u in call.drives],
        call.u.new_empty(0) if call.dt is None or not dt_grad else call.dt.new_empty(call.dt.shape),
        call.u.new_empty(call.u.shape[0], *call.state_shape, dtype=call.dtype),
        [p.new_empty(p.shape) for p in call.params],
    )


solve_backward = Operator(
    f"solve_backward({_CALL}, Tensor output, Tensor others, Tensor? grad, Tensor? rest, "
    "Tensor? final, bool dt_grad) -> (Tensor[], Tensor, Tensor, Tensor[])",
    _backward,
    _empty_back,
)


def eager_backward(call: Call, *results: Any) -> Gradients:
    """By PyTorch operations: the linear adjoint recurrence (:mod:`.adjoint`)."""
    output, others, grad, rest, final, _ = results
    with full_precision(call.u.device):
        return _eager(call, output, others, grad, rest, final, again=False)


def _eager(
    call: Call,
    output: Tensor,
    others: Tensor,
    grad: Tensor | None,
    rest: Tensor | None,
    final: Tensor | None,
    again: bool,
) -> Gradients:
    """Gradients; ``again`` makes them differentiable."""
    states = call.whole(output, others)
    if states.shape[1] == 0:
        zeros = [torch.zeros_like(p) for p in call.params]
        dt = None if call.dt is None else torch.zeros_like(call.dt)
        first = torch.zeros_like(call.start) if final is None else final
        return [torch.zeros_like(u) for u in call.drives], dt, first, zeros
    g = call.whole(
        torch.zeros_like(output) if grad is None else grad,
        torch.zeros_like(others) if rest is None else rest,
    )
    if final is not None:
        g = torch.cat([g[:, :-1], (g[:, -1] + final).unsqueeze(1)], 1)
    gradients = differentiable_gradients if again else first_order
    arguments = (states, call.packed, call.start, g)
    bar, h0_bar, weights = gradients(call.recurrence(), call.resets, *arguments)
    dt_bar = None
    if call.dt is not None:
        bar, dt_bar = bar[..., :-1], bar[..., -1].to(call.dt.dtype).contiguous()
    parts = bar.split([u.shape[-1] for u in call.drives], -1)
    bars = [b.to(u.dtype).contiguous() for b, u in zip(parts, call.drives, strict=True)]
    params = [
        None if g is None else g.to(p.dtype) for g, p in zip(weights, call.params, strict=True)
    ]
    return bars, dt_bar, h0_bar, params


# -- torch.vmap ------------------------------------------------------------------------------------


def _mapped(info: Any, dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
    """The mapped dimension joins the batch; one call a sample if it is one of the recurrent
    parameters, too."""
    count, call, of = info.batch_size, Call(*arguments), Call(*dims)

    def front(value: Tensor | None, dim: int | None) -> Tensor | None:
        if value is None:
            return None
        if dim is None:
            return value.unsqueeze(0).expand(count, *value.shape)
        return value.movedim(dim, 0)

    def fronts(values: Sequence[Tensor], dims: Any) -> list[Any]:
        return [front(v, d) for v, d in zip(values, dims or [None] * len(values), strict=True)]

    drives = fronts(call.drives, of.drives)
    dt, h0, resets = (front(getattr(call, n), getattr(of, n)) for n in ("dt", "h0", "resets"))
    if any(d is not None for d in of.params or ()):
        weights = fronts(call.params, of.params)
        each = [
            solve(*call._replace(
                drives=[u[i] for u in drives],
                dt=None if dt is None else dt[i],
                h0=None if h0 is None else h0[i],
                resets=None if resets is None else resets[i],
                params=[p[i] for p in weights],
            ))[:-1]
            for i in range(count)
        ]  # fmt: skip
        return tuple(torch.stack(found) for found in zip(*each, strict=True)), (0, 0, 0)

    def folded(value: Tensor | None) -> Tensor | None:
        return None if value is None else value.flatten(0, 1)

    results = solve(*call._replace(
        drives=[u.flatten(0, 1) for u in drives], dt=folded(dt), h0=folded(h0), resets=folded(resets),
    ))  # fmt: skip
    size = drives[0].shape[1]
    return tuple(r.unflatten(0, (count, size)) for r in results[:-1]), (0, 0, 0)


torch.library.register_vmap(solve.name, _mapped, lib=LIBRARY)
