"""What resets cut off in kernels of the delta rule, by selection: no number is multiplied by a zero that
stands for "not seen", because a number may be infinite or NaN.

A product over the micro-steps of a chunk selects before it sums (:func:`weigh`). A product over rows
or columns of a state, whose result is a micro-step's own, is selected afterwards. ``piece`` is the
number of resets in the chunk up to each micro-step, or None if there are no resets: then all of this
is the plain product.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def times(a, b, PRECISION: tl.constexpr):
    return tl.dot(a, b, input_precision=PRECISION, out_dtype=a.dtype)


@triton.jit
def pieces(resets, b, m, exists, steps, NH: tl.constexpr):
    """Of micro-steps ``m`` of row ``b``; ``resets (B, T)`` are contiguous, or None."""
    if resets is not None:
        begins = exists & (m % NH == 0)
        marks = tl.load(resets + b * (steps // NH) + m // NH, mask=begins, other=0)
        return tl.cumsum(marks.to(tl.int32), 0)


@triton.jit
def whole(x, piece):
    """What a chunk without resets has of its start."""
    if piece is None:
        return x
    else:
        return tl.where(tl.max(piece, 0) == 0, x, 0.0)


@triton.jit
def pairs(x, piece):
    """``(M, M)`` without what a micro-step has of one before a reset."""
    if piece is None:
        return x
    else:
        return tl.where(piece[:, None] == piece[None, :], x, 0.0)


@triton.jit
def of_start(x, piece):
    """Micro-steps, ``(M,)`` or ``(M, d)``, without what they have of the chunk's start."""
    if piece is None:
        return x
    else:
        if len(x.shape) == 2:
            return tl.where(piece[:, None] == 0, x, 0.0)
        else:
            return tl.where(piece == 0, x, 0.0)


@triton.jit
def of_end(x, piece):
    """Micro-steps ``(M, d)`` without what the chunk's end has not of them."""
    if piece is None:
        return x
    else:
        return tl.where(piece[:, None] == tl.max(piece, 0), x, 0.0)


@triton.jit
def seen(i, piece, BACK: tl.constexpr):
    """Which micro-steps (columns) a micro-step (row) sees; backwards, which see it."""
    if piece is not None:
        order = i[:, None] <= i[None, :] if BACK else i[:, None] >= i[None, :]
        return order & (piece[:, None] == piece[None, :])


@triton.jit
def finite_product(a, x, reach, PRECISION: tl.constexpr):
    """``a @ x`` over micro-steps, with ``a`` zero outside of ``reach``: what is not finite in ``x`` is seen
    there only."""
    # What is rounded to infinity in a product of leading bits is not finite.
    far = float("inf") if x.dtype == tl.float64 else 3.4e38
    fine = tl.abs(x) < far
    total = times(a, tl.where(fine, x, 0.0), PRECISION)
    reach = tl.where(reach, 1.0, 0.0).to(x.dtype)
    lost = tl.where(fine, 0.0, 1.0).to(x.dtype)
    marks = times(reach, lost, "ieee" if x.dtype == tl.float64 else "tf32")
    return tl.where(marks > 0, float("nan"), total)


@triton.jit
def weigh(a, x, reach, PRECISION: tl.constexpr):
    """``a @ x`` over the micro-steps that are within ``reach``. A row of zeros adds zero, whatever its
    weight."""
    if reach is None:
        return times(a, x, PRECISION)
    else:
        speaks = tl.max((x != 0).to(tl.int32), 1) > 0
        return finite_product(tl.where(speaks[None, :], a, 0.0), x, reach, PRECISION)


@triton.jit
def weigh_by(bar, x, piece, PRECISION: tl.constexpr):
    """``bar @ x`` over micro-steps with weights that are cotangents, which reach where they are not 0."""
    if piece is None:
        return times(bar, x, PRECISION)
    else:
        return finite_product(bar, x, bar != 0, PRECISION)


@triton.jit
def scaled(bar, product, piece):
    """Cotangents times numbers; a cotangent of zero stays zero."""
    if piece is None:
        return product
    else:
        return tl.where(bar == 0, 0.0, product)


@triton.jit
def told(bar, product, piece):
    """Rows of a product with rows of cotangents; those of zeros stay zero."""
    if piece is None:
        return product
    else:
        return tl.where((tl.max((bar != 0).to(tl.int32), 1) > 0)[:, None], product, 0.0)


@triton.jit
def heard(product, bar, piece):
    """A product with a state's cotangents, if any of these is not zero."""
    if piece is None:
        return product
    else:
        return tl.where(tl.max(tl.max((bar != 0).to(tl.int32), 1), 0) > 0, product, 0.0)
