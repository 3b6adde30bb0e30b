"""Operators of ``torch.ops.pararnn``, and how autograd records a call of one.

Compilers, exporters, dispatch modes and ``torch.func`` see one node with rules of its own. The rules
of ``torch.library`` take nested arguments apart at every call, which for a short sequence is longer
than the kernels take. Where nothing looks into a call, the same functions run as a
``torch.autograd.Function``, without the dispatcher.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

_reader = threading.local()
"""Where a call that something watches finds its report."""
LIBRARY = torch.library.Library("pararnn", "FRAGMENT")
PLAIN = frozenset({Tensor, nn.Parameter, type(None)})
"""What a call holds that no subclass of a tensor looks into."""


def watched(tensors: Iterable[Tensor | None]) -> bool:
    """Whether a compiler, a mode, a transform or a tensor's own class looks into a call."""
    if (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._get_tracing_state() is not None
    ):
        return True
    for t in tensors:  # noqa: SIM110 (no generator: this is asked at every call)
        if type(t) not in PLAIN or (t is not None and t.is_meta):
            return True
    return False


class Operator:
    """An operator, defined when it is made.

    Parameters
    ----------
    schema
        As ``torch.library`` takes it, without the namespace.
    forward
        What it does, where nothing is recorded. It returns new tensors.
    fake
        Empty results of the same shapes.
    keys
        Dispatch keys that ``forward`` is for.
    gradients
        ``gradients(arguments, kept, grads, needs)``: cotangents by the name of the argument, None
        or left out where there is none. It is given the arguments, the results that are ``kept``,
        the cotangents of all results (None if nothing depends on one, but never all of them), and
        by the name of every tensor whether its cotangent is needed.
    kept
        Positions of the results that ``gradients`` is given.
    unread
        Given if ``forward`` returns one thing more, of any type: how it went. A call returns it last,
        or None if nothing ran. A compiled graph has no room for it; ``unread(arguments, report)`` is
        called when it runs.
    """

    def __init__(
        self,
        schema: str,
        forward: Callable[..., Any],
        fake: Callable[..., Any],
        *,
        keys: Sequence[str] = ("CompositeExplicitAutograd",),
        gradients: Callable[..., dict[str, Any]] | None = None,
        kept: Sequence[int] = (),
        unread: Callable[[Sequence[Any], Any], None] | None = None,
    ):
        self.forward, self.gradients, self.kept = forward, gradients, kept
        self.unread = unread
        short = schema.partition("(")[0]
        self.name = f"pararnn::{short}"
        LIBRARY.define(schema)
        for key in keys:
            LIBRARY.impl(short, self._run, key)
        torch.library.register_fake(self.name, fake, lib=LIBRARY)
        self.overload = getattr(torch.ops.pararnn, short).default
        if gradients is not None:
            torch.library.register_autograd(
                self.name, self._traced_gradients, setup_context=self._traced_setup, lib=LIBRARY
            )
        given = self.overload._schema.arguments
        self.arguments = [a.name for a in given]
        kinds = [str(a.type) for a in given]
        self.single = [i for i, k in enumerate(kinds) if k in ("Tensor", "Optional[Tensor]")]
        self.listed = [i for i, k in enumerate(kinds) if k == "List[Tensor]"]

    def __call__(self, *arguments: Any) -> Any:
        if torch.compiler.is_compiling() or watched(tensors := self.opened(arguments)):
            return self._dispatched(arguments)
        if self.gradients is None or not torch.is_grad_enabled():
            return self.forward(*arguments)
        return Recorded.apply(self, arguments, *tensors)

    def _dispatched(self, arguments: Sequence[Any]) -> Any:
        """The call, seen by whatever watches it; its report comes back beside the dispatcher."""
        if self.unread is None:
            return self.overload(*arguments)
        if torch.compiler.is_compiling():
            return (*self.overload(*arguments), None)
        outer, _reader.reports = getattr(_reader, "reports", None), []
        try:
            results = self.overload(*arguments)
            reports = _reader.reports
        finally:
            _reader.reports = outer
        return (*results, reports[0] if reports else None)

    def opened(self, arguments: Sequence[Any]) -> list[Any]:
        """The tensors of some arguments, those of lists last; or what stands in their places."""
        found = [arguments[i] for i in self.single]
        for i in self.listed:
            found += arguments[i]
        return found

    def save(self, ctx: Any, arguments: Sequence[Any], results: Any) -> None:
        """Keep what the backward pass needs."""
        ctx.set_materialize_grads(False)
        results = results if isinstance(results, tuple) else (results,)
        ctx.rest = list(arguments)
        for i in self.single:
            ctx.rest[i] = None
        for i in self.listed:
            ctx.rest[i] = len(arguments[i])
        ctx.save_for_backward(*(results[i] for i in self.kept), *self.opened(arguments))

    def cotangents(
        self, ctx: Any, grads: Sequence[Tensor | None], needs: dict[str, bool]
    ) -> list[Any]:
        """One for every argument, and a list for a list."""
        arguments, saved = list(ctx.rest), ctx.saved_tensors
        first = len(self.kept)
        kept, tensors = saved[:first], saved[first:]
        for i, tensor in zip(self.single, tensors, strict=False):
            arguments[i] = tensor
        first = len(self.single)
        found: dict[str, Any] = {}
        for i in self.listed:
            end = first + arguments[i]
            found[self.arguments[i]] = [None] * arguments[i]
            arguments[i], first = list(tensors[first:end]), end
        if self.gradients is not None and any(g is not None for g in grads):
            found |= self.gradients(arguments, kept, grads, needs)
        return [found.get(name) for name in self.arguments]

    # How torch.library calls these.

    def _run(self, *arguments: Any) -> Any:
        with torch.no_grad():
            results = self.forward(*arguments)
        if self.unread is None:
            return results
        *results, report = results
        reader = getattr(_reader, "reports", None)
        if reader is None:
            self.unread(arguments, report)
        else:
            reader.append(report)
        return tuple(results)

    def _traced_setup(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        self.save(ctx, inputs, output)

    def _traced_gradients(self, ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        needs = {self.arguments[i]: ctx.needs_input_grad[i] for i in self.single}
        return tuple(self.cotangents(ctx, grads, needs))


class Recorded(torch.autograd.Function):
    """``(operator, arguments, *tensors of the arguments) → results`` of a call that nothing
    watches."""

    @staticmethod
    def forward(ctx: Any, operator: Operator, arguments: tuple[Any, ...], *tensors: Any) -> Any:
        results = operator.forward(*arguments)
        operator.save(ctx, arguments, results)
        ctx.operator = operator
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        operator: Operator = ctx.operator
        names = [operator.arguments[i] for i in operator.single]
        needs = dict(zip(names, ctx.needs_input_grad[2:], strict=False))
        return None, None, *operator.opened(operator.cotangents(ctx, grads, needs))
