"""Device functions of the kernels: the scalar functions of the printed programs, and what the
kernels compute besides."""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)

# -- scalar functions, one a row of pararnn.spec.functions ------------------------------------
#
# In float32 each is accurate to a few roundings, relative to its value (a sigmoid, where it is small,
# to |x| of them), from two instructions of the machine (2^x and 1/x) and short polynomials. Float64
# uses CUDA's own library.


@triton.jit
def exp2(x):
    if x.dtype == tl.float32 and not INTERPRETED:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.exp2(x)


@triton.jit
def reciprocal(x):
    if x.dtype == tl.float32 and not INTERPRETED:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return 1 / x


@triton.jit
def fma(a, b, c):
    return tl.fma(a, b, c)


@triton.jit
def square(x):
    return x * x


@triton.jit
def zero(x):
    return tl.zeros_like(x)


@triton.constexpr_function
def ratio(p, q):
    """A fraction, which takes the precision of what it meets."""
    return p / q


@triton.jit
def diagonal(w, x):
    return w * x


@triton.jit
def diagonal_t(w, x):
    return w * x


@triton.jit
def sqrt(x):
    return tl.sqrt_rn(x) if x.dtype == tl.float32 else tl.sqrt(x)


@triton.jit
def decay(x):
    """``exp(-x)``, accurate to ``|x|`` roundings."""
    if x.dtype == tl.float32:
        return exp2(x * -1.4426950408889634)
    else:
        return tl.exp(-x)


@triton.jit
def sigmoid(x):
    return reciprocal(1 + decay(x))


@triton.jit
def cosigmoid(x):
    """``1 - sigmoid(x)``, accurate where that is near 1, from the exponential of ``sigmoid(x)``:
    where both are called, it is computed once."""
    e = decay(x)
    s = reciprocal(1 + e)
    return tl.where(x > 0, e * s, 1 - s)


@triton.jit
def tanh(x):
    if x.dtype == tl.float32:
        # 1 - 2/(1 + e) rounds to multiples of an ulp of 1, so small arguments take a polynomial.
        y = x * x
        large = 1 - 2 * reciprocal(1 + exp2(x * 2.8853900817779268))
        p = -0.33332947 + y * (0.13320725 + y * (-0.052671812 + y * 0.016437579))
        return tl.where(tl.abs(x) < 0.55, x + x * y * p, large)
    else:
        t = expm1(2 * tl.where(x > 20, 20.0, tl.where(x < -20, -20.0, x)))
        return t / (t + 2)


@triton.jit
def exp(x):
    if x.dtype == tl.float32:
        # x·log2(e) in two parts: rounding it alone would cost |x| ulps.
        x = tl.where(x > 89, 89.0, tl.where(x < -104, -104.0, x))
        high = x * 1.44269502
        low = tl.fma(x, 1.44269502, -high) + x * 1.925963e-8
        return exp2(high) * (1 + low * 0.69314718)
    else:
        return tl.exp(x)


@triton.jit
def expm1(x):
    if x.dtype == tl.float32:
        t = tanh(x * 0.5)
        return tl.where(x < 0.5, 2 * t * reciprocal(1 - t), exp(x) - 1)
    else:
        u = tl.exp(x)
        near = tl.where(u == 1, x, (u - 1) * x / tl.where(u == 1, 1.0, tl.log(u)))
        return tl.where(tl.abs(x) < 0.5, near, u - 1)


@triton.jit
def twice_atanh(s):
    """``log((1+s)/(1-s))`` for ``|s| ≤ 1/3``, in float32."""
    y = s * s
    p = 2 / 9 + y * (2 / 11 + y * (2 / 13 + y * (2 / 15)))
    return s * (2 + y * (2 / 3 + y * (2 / 5 + y * (2 / 7 + y * p))))


@triton.jit
def softplus(x):
    e = exp(-tl.abs(x))
    if x.dtype == tl.float32:
        tail = twice_atanh(e * reciprocal(2 + e))
    else:
        u = 1 + e
        tail = tl.where(u == 1, e, tl.log(u) * e / tl.where(u == 1, 1.0, u - 1))
    return tl.where(x > 0, x, 0.0) + tl.where(x == x, tail, x)


@triton.jit
def log(x):
    if x.dtype == tl.float32:
        # x = 2^k·m with m in [2/3, 4/3)
        bits = x.to(tl.int32, bitcast=True)
        k = (bits - 0x3F2AAAAB) >> 23
        m = (bits - (k << 23)).to(tl.float32, bitcast=True)
        value = k.to(tl.float32) * 0.69314718 + twice_atanh((m - 1) * reciprocal(m + 1))
        usual = (x >= 1.1754944e-38) & (x < float("inf"))
        return tl.where(usual, value, tl.log(x))
    else:
        return tl.log(x)


@triton.jit
def log1p(x):
    if x.dtype == tl.float32:
        near = (x > -0.5) & (x < 1)
        s = tl.where(near, x, 0.0)
        return tl.where(near, twice_atanh(s * reciprocal(2 + s)), log(1 + x))
    else:
        u = 1 + x
        near = (u > 0.5) & (u < 2) & (u != 1)
        exact = tl.log(u) * x / tl.where(near, u - 1, 1.0)
        return tl.where(u == 1, x, tl.where(near, exact, tl.log(u)))


@triton.jit
def positive(x):
    return tl.where(x >= 0, x + 0.5, sigmoid(x))


@triton.jit
def positive_slope(x, y):
    return tl.where(x >= 0, 1.0, y * (1 - y)).to(x.dtype)


@triton.jit
def nearest(x):
    """The nearest whole number, halves to the even one."""
    if INTERPRETED:
        whole: tl.constexpr = 8388608.0 if x.dtype == tl.float32 else 4503599627370496.0
        size = tl.abs(x)
        size = tl.where(size < whole, (size + whole) - whole, size)
        return tl.where(x < 0, -size, size)
    elif x.dtype == tl.float32:
        return tl.inline_asm_elementwise(
            "cvt.rni.f32.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.inline_asm_elementwise(
            "cvt.rni.f64.f64 $0, $1;", "=d,d", [x], dtype=tl.float64, is_pure=True, pack=1
        )


@triton.jit
def double(x, value: tl.constexpr):
    """A constant as float64, which a call would make float32."""
    return tl.full(x.shape, value, tl.float64)


@triton.jit
def snap(x, m):
    return nearest(x * (m * 0.15915494309189535)) * (6.283185307179586 / m)


@triton.jit
def snap_angle(x, m):
    """Counts in float64, and takes whole turns off the count, which is exact."""
    wide, order = x.to(tl.float64), m.to(tl.float64)
    count = nearest(wide * (order * double(wide, 0.15915494309189535)))
    count -= order * nearest(count / order)
    return (count * (double(wide, 6.283185307179586) / order)).to(x.dtype)


@triton.jit
def quarters(x):
    """A float32 angle as a whole number of quarter turns, modulo 4, and the rest, by way of
    float64. From 1e15 on, neighbouring float32 are many turns apart, and the angle counts as 0."""
    wide = tl.where(tl.abs(x) < 1e15, x, x * 0).to(tl.float64)
    # To add 3·2^51 rounds to a whole number and leaves its last bits at the end.
    large = double(wide, 6755399441055744.0)
    moved = tl.fma(wide, double(wide, 0.6366197723675814), large)
    whole = moved - large
    rest = tl.fma(whole, double(wide, -1.5707963267948966), wide)
    rest = tl.fma(whole, double(wide, -6.123233995736766e-17), rest)
    return rest.to(tl.float32), (moved.to(tl.int64, bitcast=True) & 3).to(tl.int32)


@triton.jit
def quarter_sin(r):
    """The sine for ``|r| ≤ π/4``."""
    y = r * r
    return r + r * y * (-0.16666655 + y * (0.00833218 + y * -0.00019517))


@triton.jit
def quarter_cos(r):
    """The cosine for ``|r| ≤ π/4``."""
    y = r * r
    return 1 + y * (-0.5 + y * (0.0416666469 + y * (-0.00138873669 + y * 2.44383776e-5)))


@triton.jit
def sin(x):
    if x.dtype == tl.float32 and not INTERPRETED:
        r, n = quarters(x)
        value = tl.where(n & 1 != 0, quarter_cos(r), quarter_sin(r))
        return tl.where(n & 2 != 0, -value, value)
    else:
        return tl.sin(x)


@triton.jit
def cos(x):
    if x.dtype == tl.float32 and not INTERPRETED:
        r, n = quarters(x)
        value = tl.where(n & 1 != 0, quarter_sin(r), quarter_cos(r))
        return tl.where((n + 1) & 2 != 0, -value, value)
    else:
        return tl.cos(x)


@triton.jit
def maximum(a, b):
    # One of the two may be a number.
    return tl.where(b != b, b, tl.where(a < b, b, a))


@triton.jit
def heaviside(x):
    return tl.where(x > 0, 1.0, tl.where(x == 0, 0.5, tl.where(x < 0, 0.0, x))).to(x.dtype)


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


# -- differences -------------------------------------------------------------------------------


@triton.jit
def jump(new, old):
    """``new - old``; 0 where they are equal, both infinite or both NaN."""
    return tl.where((new == old) | ((new != new) & (old != old)), 0.0, new - old)


@triton.jit
def least_of(like):
    """The least normal number."""
    least: tl.constexpr = 2.3e-308 if like.dtype == tl.float64 else 1.2e-38
    return least


@triton.jit
def sized(state, past):
    """What a difference of states is compared to: the state, or the largest of those that led to it,
    which count 1 at most (:mod:`pararnn.solvers.scale`); never a constant."""
    least = least_of(state)
    return tl.maximum(tl.maximum(tl.abs(state), tl.where(past < 1, past, 1.0)), least)


@triton.jit
def far(difference, scale, tol):
    """Whether a difference is above the tolerance; what is not finite is, whatever the scale."""
    near = (tl.abs(difference) <= tol * scale) & (tl.abs(difference) < float("inf"))
    return near == 0


@triton.jit
def largest(difference, scale, lane):
    """Largest difference of the lanes relative to its scale; infinite if one is NaN or infinite."""
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
