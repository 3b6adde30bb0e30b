"""Whether a fresh cell is of the same kind as another one."""

from __future__ import annotations

import inspect
import itertools

from torch import nn
from torch.nn.utils import parametrize

from .entry import HOOKS

GIVEN_APART = ("self", "input_size", "hidden_size", "device", "dtype")


def constructor_arguments(kind: type, base: type) -> list[str]:
    """Named arguments of the constructors of a class and its bases, down to ``base`` without it, but
    for device, dtype and second names of widths."""
    found: dict[str, None] = {}
    for each in itertools.takewhile(lambda c: c not in (base, nn.Module), kind.__mro__):
        if "__init__" in vars(each):
            for p in inspect.signature(vars(each)["__init__"]).parameters.values():
                if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY):
                    found[p.name] = None
    return [name for name in found if name not in GIVEN_APART]


def lost(cell: nn.Module, fresh: nn.Module) -> str | None:
    """What a cell has and a fresh one has not, in words; None if they differ in values only."""
    others = dict(fresh.named_modules())
    for name, module in cell.named_modules():
        where = f" on {name!r}" if name else ""
        other = others.get(name)
        if parametrize.is_parametrized(module):
            return f"a parametrization{where}"
        if other is None:
            return f"a submodule {name!r}"
        if type(module) is not type(other):
            return f"a {type(module).__name__} as {name or 'its class'}"
        for kind in HOOKS:
            if len(getattr(module, kind)) > len(getattr(other, kind)):
                return f"{kind.strip('_').replace('_', ' ')}{where}"
    names, expected = (dict(m.named_parameters()) for m in (cell, fresh))
    more = sorted(set(names) - set(expected)) or sorted(set(expected) - set(names))
    return f"other parameters, such as {more[0]!r}" if more else None
