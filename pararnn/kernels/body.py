"""What the kernels are compiled for: one Spec's step, and one layout of tensors.

Both are passed as compile-time constants. Device code reads their fields, and calls the printed
programs as functions: ``body.step(*state, *drives, *params)``.
"""

from __future__ import annotations

import hashlib
import linecache
from functools import lru_cache
from typing import Any

import sympy
import triton.language as tl

from ..spec import Spec
from .plan import reduced
from .programs import programs_of, programs_text

Entry = tuple[int, int]
Terms = tuple[tuple[Entry, ...], ...]


class Constant:
    """A compile-time constant of a kernel: told apart by a key, which Triton's caches use."""

    key: str

    def __repr__(self) -> str:
        return self.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.key == other.key

    @property
    def cache_key(self) -> str:
        """What Triton's cache on disk tells it apart by."""
        return self.key


def matrix_terms(left: list[Entry], right: list[Entry], of: list[Entry]) -> Terms:
    """For every entry of a product of matrices with structural zeros: positions of the factors."""
    return tuple(
        tuple(
            (left.index((i, j)), right.index((j, k)))
            for j in range(1 + max(max(e) for e in of))
            if (i, j) in left and (j, k) in right
        )
        for i, k in of
    )


class Body(Constant):
    """One Spec's step for the device.

    Parameters
    ----------
    spec
        A channelwise Spec.
    unroll
        Steps in flight.
    resets
        Whether a mask says where the state starts anew.
    grads
        Whether there are cotangents of the output, and of the slots that are not in it.
    apart
        Whether every drive is a tensor of its own, instead of columns of one.
    """

    def __init__(
        self,
        spec: Spec,
        unroll: int = 8,
        resets: bool = False,
        grads: tuple[bool, bool] = (True, False),
        apart: bool = False,
    ):
        names = programs_of(spec)
        scope = compiled_programs(spec)
        for name in names:
            setattr(self, name, scope[name])
        slots, drives = len(spec.slots), spec.drive_list
        linear = spec.jac_structure == "linear"
        shown = slots if spec.output == "all" else 1
        others = slots - shown
        timed = any(d.given for d in drives)
        step = jacobian_pattern(spec)
        product = closure(step, slots)
        projected = [d for d in drives if not d.given]
        constant = tl.constexpr
        self.slots, self.drives = constant(slots), constant(len(drives))
        self.params = constant(len(spec.map_list) + len(spec.param_list))
        self.shown, self.others = constant(shown), constant(others)
        self.unroll, self.resets, self.timed = constant(unroll), constant(resets), constant(timed)
        self.linear = constant(linear)
        self.reduced = constant(reduced(spec))
        self.coefficients = constant(spec.factorization.n_state)
        self.graded, self.rest = constant(grads[0]), constant(grads[1] and others > 0)
        # A chunk's record: start, end, product, and largest states, or in a linear recurrence the
        # terms that the start is a sum of. Backwards, start and end as they were corrected, the
        # terms, and the size of the cotangents.
        again = 0 if reduced(spec) else 2 * slots + len(product)
        self.entries, self.pasts = constant(len(product)), constant(0 if linear else slots)
        self.terms_at = constant(2 * slots + len(product))
        self.rows = constant(self.terms_at.value + slots)
        self.used_at = constant(again)
        self.terms_back_at = constant(again + 2 * slots if again else self.terms_at.value)
        self.rows_back = constant(self.terms_back_at.value + slots * linear + (again > 0))
        # Where things are. Inputs are the drives (one tensor, or one each), time gaps, resets.
        wide = len(projected) if apart else 1
        self.tensors = constant(wide)
        self.pointer = tuple(wide if d.given else projected.index(d) * apart for d in drives)
        self.column = tuple(0 if d.given or apart else projected.index(d) for d in drives)
        self.given = tuple(d.given for d in drives)
        self.mask_at = constant(wide + timed)
        self.by_channel = tuple(
            bool(axes)
            for axes in [spec.axes for _ in spec.map_list] + [p.axes for p in spec.param_list]
        )
        # Which numbers of Jacobians there are, and how their products are summed.
        self.step_entries = tuple(i * slots + j for i, j in step)
        self.product = tuple(product)
        self.step_product = matrix_terms(step, product, product)
        self.product_step = matrix_terms(product, step, product)
        self.product_product = matrix_terms(product, product, product)
        self.programs = tuple(scope[name] for name in names)
        settings = f"{unroll}{'r' * resets}{'g' * grads[0]}{'o' * grads[1]}{'a' * apart}"
        self.key = f"{spec.name}_{spec.fingerprint[:16]}_{settings}"

    @property
    def cache_key(self) -> str:
        """Also the programs' own, as Triton hashes them: their text, and what they call."""
        return self.key + "".join(program.cache_key for program in self.programs)


@lru_cache(maxsize=512)
def body(
    spec: Spec,
    unroll: int,
    resets: bool,
    grads: tuple[bool, bool] = (True, False),
    apart: bool = False,
) -> Body:
    """The :class:`Body` with these settings, made once."""
    return Body(spec, unroll, resets, grads, apart)


@lru_cache(maxsize=256)
def compiled_programs(spec: Spec) -> dict[str, Any]:
    """The device programs of a Spec as Triton functions, by name."""
    text = programs_text(spec)
    name = f"<pararnn programs of {spec.name} {hashlib.sha256(text.encode()).hexdigest()[:12]}>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    scope: dict[str, Any] = {"__name__": "pararnn.kernels.generated"}
    exec(compile(text, name, "exec"), scope)
    return scope


def jacobian_pattern(spec: Spec) -> list[Entry]:
    """The entries that the Jacobian of one step can have."""
    fz = spec.factorization
    rows = fz.channel_jacobian([sympy.Symbol(f"c{i}") for i in range(fz.n_state)])
    slots = range(len(spec.slots))
    return [(i, j) for i in slots for j in slots if rows[i][j] != 0]


def closure(step: list[Entry], slots: int) -> list[Entry]:
    """The entries that a product of Jacobians can have."""
    found = set(step) | {(i, i) for i in range(slots)}
    while more := {(i, k) for i, j in found for jj, k in found if j == jj} - found:
        found |= more
    return sorted(found)


class Shape(Constant):
    """One layout of tensors: ``width`` channels, ``columns`` numbers a step of the drives (side by
    side if ``packed``), cotangents of the output side by side if ``dense``, ``block`` lanes a
    program, which all exist if ``aligned``, and the ``dtype`` of states."""

    def __init__(
        self, width: int, columns: int, packed: bool, dense: bool, block: int, dtype: tl.dtype
    ):
        constant = tl.constexpr
        self.width, self.columns = constant(width), constant(columns)
        self.packed, self.dense = constant(packed), constant(dense)
        self.block, self.aligned = constant(block), constant(width % block == 0)
        self.dtype = constant(dtype)
        self.key = f"{width}x{columns}{'p' * packed}{'d' * dense}_{block}_{dtype}"


@lru_cache(maxsize=4096)
def shape(
    width: int, columns: int, packed: bool, dense: bool, block: int, dtype: tl.dtype
) -> Shape:
    """The :class:`Shape` of these sizes, made once."""
    return Shape(width, columns, packed, dense, block, dtype)
