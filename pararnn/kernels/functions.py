"""Device functions of the kernels: the scalar functions of the printed bodies, and what the
template needs besides."""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)

# -- scalar functions, one a row of pararnn.spec.primitives ------------------------------------


@triton.jit
def square(x):
    return x * x


@triton.jit
def zero(x):
    return x * 0


@triton.jit
def diagonal_t(w, x):
    return w * x


@triton.jit
def exp2(x):
    """2 to the power of x; in float32 the machine's instruction, with 2 roundings."""
    if x.dtype == tl.float32 and not INTERPRETED:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.exp2(x)


@triton.jit
def reciprocal(x):
    """1/x; in float32 the machine's instruction, with 1 rounding."""
    if x.dtype == tl.float32 and not INTERPRETED:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return 1 / x


@triton.jit
def exp(x):
    return tl.exp(x)


@triton.jit
def sigmoid(x):
    if x.dtype == tl.float32:
        return reciprocal(1 + exp2(x * -1.4426950408889634))
    else:
        return 1 / (1 + tl.exp(-x))


@triton.jit
def tanh(x):
    if x.dtype == tl.float32:
        # 1 - 2/(1 + e) rounds to multiples of 2⁻²⁴, so small arguments take an odd polynomial.
        large = 1 - 2 * reciprocal(1 + exp2(x * 2.8853900817779268))
        y = x * x
        p = -0.33332947 + y * (0.13320725 + y * (-0.052671812 + y * 0.016437579))
        return tl.where(tl.abs(x) < 0.55, x + x * y * p, large)
    else:
        return 1 - 2 / (1 + tl.exp(2 * x))


# -- lanes -------------------------------------------------------------------------------------


@triton.jit
def place(block, B, D: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr):
    """Sample and channel of every lane of a block, its number, and which lanes exist."""
    if ALIGNED:
        b = (block // (D // BLOCK)).to(tl.int64)
        d = (block % (D // BLOCK)) * BLOCK + tl.arange(0, BLOCK)
        return b, d, b * D + d, d < D
    else:
        n = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        return n // D, n % D, n, n // D < B


@triton.jit
def both(lane, condition, ALIGNED: tl.constexpr):
    """Mask of a load or a store. The lanes of an aligned block all exist."""
    if ALIGNED:
        return condition
    else:
        return lane & condition


@triton.jit
def put(at, value, lane, ALIGNED: tl.constexpr):
    if ALIGNED:
        tl.store(at, value)
    else:
        tl.store(at, value, mask=lane)


# -- differences -------------------------------------------------------------------------------


@triton.jit
def jump(new, old):
    """``new - old``; 0 where they are equal, both infinite or both NaN."""
    return tl.where((new == old) | ((new != new) & (old != old)), 0.0, new - old)


@triton.jit
def far(difference, scale, tol):
    """Whether a difference is above the tolerance; a NaN is."""
    return (tl.abs(difference) <= tol * scale) == 0


@triton.jit
def largest(difference, scale, lane):
    """Largest difference of the lanes relative to its scale; infinite if one is NaN."""
    ratio = tl.abs(difference) / scale
    return tl.max(tl.where(lane, tl.where(ratio == ratio, ratio, float("inf")), 0.0))


@triton.jit
def worst(miss, chunks, blocks):
    """Largest recorded mismatch of a block's chunks."""
    most = 0.0
    for first in range(0, chunks, 128):
        chunk = first + tl.arange(0, 128)
        value = tl.load(miss + chunk * blocks, mask=chunk < chunks, other=0.0)
        most = tl.maximum(most, tl.max(value))
    return most
