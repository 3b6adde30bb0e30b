"""The clause about what surrounds a cell's weights: hooks, wrappers, pruning."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from ..context import Context, error
from ..reference import apart
from . import checks

ONE_STEP = 1e-13


@checks("modules")
def modules(ctx: Context) -> None:
    hooks_act_once(ctx)
    if not hasattr(ctx.cell(), "in_proj"):
        return
    projection_is_called(ctx)
    pruned_weights(ctx)


def hooks_act_once(ctx: Context) -> None:
    cell = ctx.cell()
    x, more = apart(cell, ctx.inputs(cell, 3, 9))
    layer = ctx.api.layer(cell)
    want, last = layer(2 * x, **more)
    seen: list[str] = []

    def before(module: nn.Module, given: tuple) -> tuple:
        seen.append("before")
        return 2 * given[0], *given[1:]

    def after(module: nn.Module, given: tuple, found: tuple) -> tuple:
        seen.append("after")
        return 3 * found[0], found[1]

    cell.register_forward_pre_hook(before)
    cell.register_forward_hook(after)
    got, final = layer(x, **more)
    ctx.require(seen == ["before", "after"], f"a sequence: got hooks {seen}, expected each once")
    ctx.same_bits("output between hooks", got, 3 * want)
    ctx.same_bits("final state between hooks", final, last)
    got, _ = layer.step(x[:, 0], None, **{key: value[:, 0] for key, value in more.items()})
    ctx.require(len(seen) == 4, f"a step: got hooks {seen[2:]}, expected each once")
    ctx.within("a step between hooks", error(got, 3 * want[:, 0]), ONE_STEP)


def by_hand(cell: nn.Module, u: Tensor, more: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Outputs and final state from packed drives, step by step."""
    h, outputs = cell.init_state(u.shape[0]), []
    for t in range(u.shape[1]):
        h = cell.step(h, drives=u[:, t], **{key: value[:, t] for key, value in more.items()})
        outputs.append(cell.output(h, drives=u[:, t]))
    return torch.stack(outputs, 1), h


def projection_is_called(ctx: Context) -> None:
    cell = ctx.cell()
    x, more = apart(cell, ctx.inputs(cell, 3, 9))
    given = torch.cat([x, *(value[..., None] for value in more.values())], -1)
    cell.in_proj.register_forward_hook(lambda module, inputs, u: 1.5 * u - 0.1)
    want, last = by_hand(cell, cell.in_proj(x), more)
    layer = ctx.api.layer(cell)
    output, final = layer(x, **more)
    ctx.within("a wrapped projection, layer", error(output, want), ONE_STEP)
    ctx.within("a wrapped projection, final state", error(final[0], last), ONE_STEP)
    solution = ctx.api.solve(cell, given)
    ctx.within("a wrapped projection, solve", error(solution.output, want), ONE_STEP)
    state, h, flat = None, cell.init_state(3), None
    for t in range(x.shape[1]):
        now = {key: value[:, t] for key, value in more.items()}
        y, state = layer.step(x[:, t], state, **now)
        ctx.within("a wrapped projection, step by step", error(y, want[:, t]), ONE_STEP)
        h = cell.step(h, x[:, t], **now)
        found = cell.output(h, x[:, t])
        ctx.within("a wrapped projection, step and output", error(found, want[:, t]), ONE_STEP)
        if hasattr(cell, "stream"):
            y, flat = cell.stream(x[:, t], flat, *now.values())
            ctx.within("a wrapped projection, stream", error(y, want[:, t]), ONE_STEP)


def pruned_weights(ctx: Context) -> None:
    """A weight that a hook computes is that of the parameters as they are now."""
    plain, cell = ctx.cell(), ctx.cell()
    cell.load_state_dict(plain.state_dict())
    names = [m.name for m in cell.spec.map_list]
    names += [p.name for p in cell.spec.param_list if p.trained]
    if not names:
        return
    x, more = apart(cell, ctx.inputs(cell, 3, 9))
    weight = getattr(plain, names[0])
    mask = (torch.arange(weight.numel(), device=weight.device) % 2).reshape(weight.shape)
    prune.custom_from_mask(cell, names[0], mask)
    layer, expected = ctx.api.layer(cell), ctx.api.layer(plain)
    original = getattr(cell, names[0] + "_orig")
    for _ in range(2):
        with torch.no_grad():
            original.mul_(0.9)
            weight.copy_(original * mask)
        given = torch.cat([x, *(value[..., None] for value in more.values())], -1)
        found = ctx.api.solve(cell, given).output  # before anything calls the cell
        output, _ = layer(x, **more)
        want, _ = expected(x, **more)
        ctx.same_bits("pruned weight, solve", found, ctx.api.solve(plain, given).output)
        ctx.same_bits("pruned weight, layer", output, want)
        cell.zero_grad()
        plain.zero_grad()
        output.square().sum().backward()
        want.square().sum().backward()
        gap = error(original.grad, weight.grad * mask)
        ctx.within("gradient of a pruned weight", gap, ONE_STEP)
