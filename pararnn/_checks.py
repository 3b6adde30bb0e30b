"""Argument checks shared by all cells. Each error says what was got, expected, and the fix."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

FOREVER = 1e10
"""What an infinite time gap counts as, so that nothing becomes NaN."""


def positive(name: str, value: object) -> int:
    """``value`` as a positive int, or a ``TypeError``/``ValueError`` that names it."""
    return whole(name, value, 1, "a positive integer")


def whole(name: str, value: object, least: int = 0, wanted: str = "") -> int:
    """``value`` as an int of at least ``least``, or a ``TypeError``/``ValueError`` that names it."""
    wanted = wanted or f"an integer ≥ {least}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: got {value!r} ({type(value).__name__}), expected {wanted}.")
    if value < least:
        raise ValueError(f"{name}: got {value}, expected {wanted}.")
    return value


def number(name: str, value: object, least: float = 0.0) -> float:
    """``value`` as a finite number of at least ``least``, or an error that names it."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name}: got {value!r} ({type(value).__name__}), expected a number.")
    if not (math.isfinite(value) and value >= least):
        raise ValueError(f"{name}: got {value}, expected a finite number ≥ {least:g}.")
    return value


def batch(sizes: Iterable[Any]) -> None:
    """Raise unless these are sizes of batch dimensions, 0 or more (also symbolic ones)."""
    for size in sizes:
        if isinstance(size, bool) or not isinstance(size, int | torch.SymInt):
            raise TypeError(
                f"batch: got {size!r} ({type(size).__name__}), expected a number of samples."
            )
        if size < 0:
            raise ValueError(f"batch: got {size}, expected a number of samples, 0 or more.")


def bound(name: str, value: object) -> float | None:
    """``value`` as a positive number, or None for no bound, or an error that names it."""
    if value is None:
        return None
    wanted = "a positive number or None (no bound)"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name}: got {value!r} ({type(value).__name__}), expected {wanted}.")
    if not 0 < value < math.inf:
        raise ValueError(f"{name}: got {value!r}, expected {wanted}.")
    return float(value)


def probability(name: str, value: object) -> float:
    """``value`` as a number in [0, 1), or an error that names it."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name}: got {value!r}, expected a probability in [0, 1).")
    if not 0.0 <= value < 1.0:
        raise ValueError(f"{name}: got {value}, expected a probability in [0, 1).")
    return value


def one_of(name: str, value: object, known: Iterable[Any]) -> Any:
    """``value``, which is one of those that are ``known``, or an error that lists them."""
    known = tuple(known)
    if not any(value is k or (type(value) is type(k) and value == k) for k in known):
        raise ValueError(f"{name}: got {value!r}, expected one of {', '.join(map(repr, known))}.")
    return value


def flag(name: str, value: object) -> bool:
    """``value`` as True or False, or a ``TypeError`` that names it."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}: got {value!r} ({type(value).__name__}), expected True or False.")
    return value


def either(name: str, value: int | None, alias: str, other: int | None) -> int:
    """A width that can be given under two names, exactly once."""
    if value is not None and other is not None and value != other:
        raise ValueError(f"got {name}={value} and {alias}={other}; they are one size, give one.")
    chosen = value if value is not None else other
    if chosen is None:
        raise TypeError(f"got neither {name} nor {alias}; give one of them.")
    return positive(name, chosen)


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of states and accumulations: float64 for float64, float32 for everything narrower."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def parameter_dtype(dtype: torch.dtype | None) -> None:
    """Raise a ``TypeError`` if parameters cannot have this dtype."""
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype: got {dtype!r}, expected a torch.dtype, e.g. torch.float32.")
    if dtype is not None and not dtype.is_floating_point:
        raise TypeError(f"dtype: got {dtype}, expected a floating-point dtype.")


def floating(name: str, value: object) -> Tensor:
    """``value`` as a real floating-point tensor."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: got {type(value).__name__}, expected a torch.Tensor.")
    if value.is_complex():
        raise TypeError(
            f"{name}: got dtype {value.dtype}, expected a real floating-point dtype; give real and "
            "imaginary parts as two numbers, torch.view_as_real(...): what multiplies them is a "
            "rotation of a plane."
        )
    if not value.is_floating_point():
        raise TypeError(
            f"{name}: got dtype {value.dtype}, expected a floating-point dtype; "
            "convert it with .to(torch.float32)."
        )
    return value


def trailing(
    name: str,
    value: Tensor,
    shape: tuple[int, ...],
    lead: int | None = None,
    fix: str = "the width that the module was built with",
) -> Tensor:
    """Check the last dimensions (and, if given, the number of leading ones); ``fix`` is what a user
    should check."""
    fits = value.ndim >= len(shape) and tuple(value.shape[value.ndim - len(shape) :]) == shape
    if not fits or (lead is not None and value.ndim != lead + len(shape)):
        dots = "..., " if lead is None else "N, " * lead
        wanted = f"({dots}{', '.join(map(str, shape))})"
        raise ValueError(f"{name}: got shape {tuple(value.shape)}, expected {wanted}; check {fix}.")
    return value


def same_device(name: str, value: Tensor, device: torch.device) -> Tensor:
    if value.device != device:
        raise ValueError(
            f"{name}: got device {value.device}, expected {device} as the cell's parameters; "
            f"move one of them with .to(...)."
        )
    return value


def time_gaps(cell: Any, dt: object, lead: tuple[int, ...]) -> Tensor | None:
    """Time gaps of shape ``lead``: there if the cell's Spec has a time gap, and only then.

    That none is negative or NaN is checked on the CPU only: elsewhere it would mean waiting for the
    device, and a NaN stays in its row, as one in the input does. An infinite gap counts as
    :data:`FOREVER`, everywhere.
    """
    name = type(cell).__name__
    if cell.spec.gap is None:
        if dt is not None:
            raise TypeError(
                f"dt: got time gaps, expected none for {name}; leave dt out, or declare time_gap() "
                "in the Spec."
            )
        return None
    if dt is None:
        raise TypeError(f"dt: {name} takes time gaps, got none; give dt=… of shape {lead}.")
    gaps = floating("dt", dt)
    if tuple(gaps.shape) != lead:
        raise ValueError(
            f"dt: got shape {tuple(gaps.shape)}, expected {lead}, one time gap a step; nothing is "
            "broadcast, use dt.expand(...) if all are alike."
        )
    same_device("dt", gaps, cell.device)
    if gaps.dtype not in (cell.dtype, cell.state_dtype):
        wanted = " or ".join(dict.fromkeys(map(str, (cell.dtype, cell.state_dtype))))
        raise TypeError(f"dt: got dtype {gaps.dtype}, expected {wanted}; convert it with .to(...).")
    if readable(gaps) and not bool((gaps >= 0).all()):
        worst = gaps[~(gaps >= 0)].flatten()[0]
        raise ValueError(
            f"dt: got a time gap of {float(worst):.3g}, expected none that is NaN or below 0; sort the "
            "sequence by time."
        )
    # A NaN stays one, and a gap that is finite stays what it is.
    return torch.nan_to_num(gaps.to(cell.state_dtype), nan=math.nan, posinf=FOREVER)


def readable(value: Tensor) -> bool:
    """Whether the numbers of a tensor can be looked at without waiting: on the CPU, and neither
    traced (by a compiler, or by a mode that sees every operation) nor mapped over."""
    if value.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    if torch._C._len_torch_dispatch_stack() > 0 or torch._is_functional_tensor(value):
        return False
    return not torch._C._functorch.is_functorch_wrapped_tensor(value)


def within(value: float | Tensor, least: float, greatest: float) -> bool:
    """Whether ``value`` is from ``least`` to ``greatest``, which NaN is not. A tensor that is not
    :func:`readable` is taken to be."""
    if isinstance(value, Tensor):
        return not readable(value) or bool(((value >= least) & (value <= greatest)).all())
    return least <= value <= greatest


def transformed(*values: Tensor | None) -> bool:
    """Whether this runs inside a transform of ``torch.func``, or a value has a tangent.

    These see through PyTorch's operations only. An operator of ours without a rule for tangents
    would drop them, and not always with an error.
    """
    if torch.compiler.is_compiling():
        return False
    return torch._C._are_functorch_transforms_active() or _has_tangent(values)


def differentiated(*values: Tensor | None) -> bool:
    """Whether this runs inside a derivative of ``torch.func``, or a value has a tangent."""
    if torch.compiler.is_compiling():
        return False
    levels = torch._C._functorch.get_interpreter_stack() or ()
    vmap = torch._C._functorch.TransformType.Vmap
    return any(level.key() != vmap for level in levels) or _has_tangent(values)


def forward_mode() -> bool:
    """Whether this runs inside a level of forward-mode derivatives."""
    return forward_ad._current_level >= 0


def _has_tangent(values: Iterable[Tensor | None]) -> bool:
    return forward_mode() and any(
        v is not None and forward_ad.unpack_dual(v).tangent is not None for v in values
    )


def full_precision(device: torch.device) -> AbstractContextManager[Any]:
    """Context in which autocast is off: recurrences run in the dtype of their state."""
    if autocast_dtype(device) is None:
        return nullcontext()
    if torch.compiler.is_compiling():
        return torch.autocast(device.type, enabled=False)
    return _without_autocast(device)


_regions = threading.local()


@contextmanager
def _without_autocast(device: torch.device) -> Iterator[None]:
    outer = getattr(_regions, "left", 0)
    _regions.left = outer + 1
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        _regions.left = outer


def inside_autocast(device: torch.device) -> bool:
    """Whether a region of autocast is around this, also where :func:`full_precision` has left it."""
    return autocast_dtype(device) is not None or getattr(_regions, "left", 0) > 0


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Autocast's dtype on a device; None where it is off, as it always is for ``meta``."""
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)
