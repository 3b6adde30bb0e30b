"""Functions that autocast does not reach, nor their derivatives of any order.

Autocast acts on what runs inside its region, and so on a backward pass that runs there: the
products that autograd makes of a recorded product would be rounded, though the forward pass was not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ._checks import full_precision, inside_autocast

Run = Callable[..., tuple[Tensor, ...]]


def exactly(run: Run, device: torch.device, *tensors: Tensor | None) -> tuple[Tensor, ...]:
    """``run(*tensors)`` without autocast, differentiable any number of times without it. All tensors
    that ``run`` may be differentiated by are among those given."""
    traced = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    if traced or not torch.is_grad_enabled() or not inside_autocast(device):
        with full_precision(device):
            return run(*tensors)
    return _Exactly.apply(run, device, *tensors)


class _Exactly(torch.autograd.Function):
    """Keeps the graph of ``run`` for the first derivative; a further one records it again."""

    @staticmethod
    def forward(
        ctx: Any, run: Run, device: torch.device, *tensors: Tensor | None
    ) -> tuple[Tensor, ...]:
        ctx.run, ctx.device = run, device
        ctx.save_for_backward(*tensors)
        given = [
            None if t is None else t.detach().requires_grad_(needed)
            for t, needed in zip(tensors, ctx.needs_input_grad[2:], strict=True)
        ]
        with torch.enable_grad(), full_precision(device):
            results = run(*given)
        ctx.graph = given, results
        return tuple(r.detach() for r in results)

    @staticmethod
    def backward(ctx: Any, *bars: Tensor) -> tuple[Any, ...]:
        tensors, needs = ctx.saved_tensors, ctx.needs_input_grad[2:]
        if torch.is_grad_enabled():
            run, count = ctx.run, len(tensors)

            def pull(*given: Any) -> tuple[Tensor, ...]:
                views = [_view(t, n) for t, n in zip(given[:count], needs, strict=True)]
                return _pulled(views, run(*views), given[count:], needs, create_graph=True)

            found = exactly(pull, ctx.device, *tensors, *bars)
        else:
            with full_precision(ctx.device):
                given, results = ctx.graph
                found = _pulled(given, results, bars, needs, retain_graph=True)
        each = iter(found)
        return None, None, *(next(each) if n else None for n in needs)


def _view(t: Tensor | None, needed: bool) -> Tensor | None:
    """A view, so that of what an input is made from is not asked; it records if a cotangent of it is
    needed."""
    if t is None:
        return None
    return t.detach().requires_grad_() if needed and not t.requires_grad else t.view_as(t)


def _pulled(
    given: list[Tensor | None],
    results: tuple[Tensor, ...],
    bars: tuple[Tensor, ...],
    needs: tuple[bool, ...],
    **options: Any,
) -> tuple[Tensor, ...]:
    """Cotangents of the given tensors that need one, from those of the results."""
    wanted = [t for t, n in zip(given, needs, strict=True) if n and t is not None]
    pairs = [(r, b) for r, b in zip(results, bars, strict=True) if r.requires_grad]
    if not pairs:
        return tuple(torch.zeros_like(t) for t in wanted)
    outputs, cotangents = zip(*pairs, strict=True)
    return torch.autograd.grad(outputs, wanted, cotangents, materialize_grads=True, **options)
