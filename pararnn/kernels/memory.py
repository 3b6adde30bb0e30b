"""What the kernels read and write.

Loads and stores of every step are written as instructions of the machine. Triton would choose a
layout for each together with all others that it is connected to, at a cost in compile time that
grows with the square of their number; here lanes simply lie one after the other. The interpreter
takes Triton's own.
"""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def fetch(at):
    """The lanes' values at an address each; what is read there must not change meanwhile."""
    kind: tl.constexpr = at.dtype.element_ty
    where = at.to(tl.int64)
    if kind == tl.float64:
        return tl.inline_asm_elementwise(
            "ld.global.f64 $0, [$1];",
            "=d,l",
            [where],
            dtype=tl.float64,
            is_pure=True,
            pack=1,
        )
    elif kind == tl.float32:
        return tl.inline_asm_elementwise(
            "ld.global.f32 $0, [$1];",
            "=f,l",
            [where],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    elif kind == tl.uint8:
        return tl.inline_asm_elementwise(
            "ld.global.u8 $0, [$1];",
            "=r,l",
            [where],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        return tl.inline_asm_elementwise(
            "ld.global.b16 $0, [$1];",
            "=h,l",
            [where],
            dtype=tl.int16,
            is_pure=True,
            pack=1,
        ).to(kind, bitcast=True)


@triton.jit
def fetch_if(at, there):
    """The same, only where ``there`` is not 0; elsewhere the value is 0."""
    kind: tl.constexpr = at.dtype.element_ty
    where = at.to(tl.int64)
    if kind == tl.float64:
        return tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $2, 0; mov.f64 $0, 0d0000000000000000; @p ld.global.f64 $0, [$1]; }",
            "=d,l,r",
            [where, there],
            dtype=tl.float64,
            is_pure=True,
            pack=1,
        )
    elif kind == tl.float32:
        return tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $2, 0; mov.f32 $0, 0f00000000; @p ld.global.f32 $0, [$1]; }",
            "=f,l,r",
            [where, there],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    elif kind == tl.uint8:
        return tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $2, 0; mov.u32 $0, 0; @p ld.global.u8 $0, [$1]; }",
            "=r,l,r",
            [where, there],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $2, 0; mov.b16 $0, 0; @p ld.global.b16 $0, [$1]; }",
            "=h,l,r",
            [where, there],
            dtype=tl.int16,
            is_pure=True,
            pack=1,
        ).to(kind, bitcast=True)


@triton.jit
def store_if(at, value, there):
    """Write the lanes' values where ``there`` is not 0."""
    kind: tl.constexpr = at.dtype.element_ty
    where = at.to(tl.int64)
    if kind == tl.float64:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $3, 0; @p st.global.f64 [$1], $2; mov.u32 $0, 0; }",
            "=r,l,d,r",
            [where, value.to(kind), there],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    elif kind == tl.float32:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $3, 0; @p st.global.f32 [$1], $2; mov.u32 $0, 0; }",
            "=r,l,f,r",
            [where, value.to(kind), there],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $3, 0; @p st.global.b16 [$1], $2; mov.u32 $0, 0; }",
            "=r,l,h,r",
            [where, value.to(kind).to(tl.int16, bitcast=True), there],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.constexpr_function
def pairs(at):
    """Whether there are two-byte numbers at the addresses, and two lanes a thread."""
    kind = at.type.scalar.element_ty
    return at.type.is_block() and at.type.numel > 32 and kind.primitive_bitwidth == 16


@triton.jit
def read(at, mask):
    """What a step loads; a masked lane's value is not used. Two-byte numbers of two lanes a thread
    go through Triton, which joins them to one load."""
    joined: tl.constexpr = pairs(at)
    if INTERPRETED or joined:
        return tl.load(at, mask=mask, other=None if mask is None else 0)
    elif mask is None:
        return fetch(at)
    else:
        return fetch_if(at, tl.cast(mask, tl.int32))


@triton.jit
def write_if(at, value, mask):
    """What a step stores."""
    joined: tl.constexpr = pairs(at)
    if at.dtype.element_ty.primitive_bitwidth == 16:  # nothing converts float64 in one step
        value = tl.cast(value, tl.float32)
    if INTERPRETED or joined:
        tl.store(at, value, mask=mask)
    elif mask is None:
        store_if(at, value, 1)
    else:
        store_if(at, value, tl.cast(mask, tl.int32))


@triton.jit
def put(at, value, lane, ALIGNED: tl.constexpr):
    write_if(at, value, None if ALIGNED else lane)
