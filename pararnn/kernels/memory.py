"""What the kernels read and write.

Loads and stores of every step are written as instructions of the machine. Triton would choose a
layout for each together with all others that it is connected to, at a cost in compile time that
grows with the square of their number; here lanes simply lie one after the other. The interpreter
takes Triton's own.
"""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)

_NUMBERS = {
    "fp64": ("f64", "f64", "d", tl.float64, "0d0000000000000000"),
    "fp32": ("f32", "f32", "f", tl.float32, "0f00000000"),
    "uint8": ("u8", "u32", "r", tl.int32, "0"),
    "fp16": ("b16", "b16", "h", tl.int16, "0"),
    "bf16": ("b16", "b16", "h", tl.int16, "0"),
}
"""How the machine calls a number: in memory and in a register, by its constraint, type and zero."""
_GUARD = "{ .reg .pred p; setp.ne.b32 p, $%d, 0; "


@triton.constexpr_function
def _load_text(kind):
    return f"ld.global.{_NUMBERS[kind.name][0]} $0, [$1];"


@triton.constexpr_function
def _load_if_text(kind):
    _, held, _, _, zero = _NUMBERS[kind.name]
    return f"{_GUARD % 2}mov.{held} $0, {zero}; @p {_load_text(kind)} }}"


@triton.constexpr_function
def _store_if_text(kind):
    return f"{_GUARD % 3}@p st.global.{_NUMBERS[kind.name][0]} [$1], $2; mov.u32 $0, 0; }}"


@triton.constexpr_function
def _letter(kind):
    return _NUMBERS[kind.name][2]


@triton.constexpr_function
def _register(kind):
    return _NUMBERS[kind.name][3]


@triton.jit
def _loaded(value, kind: tl.constexpr):
    """From a register; bytes stay whole numbers."""
    return value if kind == tl.uint8 else value.to(kind, bitcast=True)


@triton.jit
def fetch(at):
    """The lanes' values at an address each; what is read there must not change meanwhile."""
    kind: tl.constexpr = at.dtype.element_ty
    value = tl.inline_asm_elementwise(
        _load_text(kind),
        "=" + _letter(kind) + ",l",
        [at.to(tl.int64)],
        dtype=_register(kind).value,
        is_pure=True,
        pack=1,
    )
    return _loaded(value, kind)


@triton.jit
def fetch_if(at, there):
    """The same, only where ``there`` is not 0; elsewhere the value is 0."""
    kind: tl.constexpr = at.dtype.element_ty
    value = tl.inline_asm_elementwise(
        _load_if_text(kind),
        "=" + _letter(kind) + ",l,r",
        [at.to(tl.int64), there],
        dtype=_register(kind).value,
        is_pure=True,
        pack=1,
    )
    return _loaded(value, kind)


@triton.jit
def store_if(at, value, there):
    """Write the lanes' values where ``there`` is not 0."""
    kind: tl.constexpr = at.dtype.element_ty
    tl.inline_asm_elementwise(
        _store_if_text(kind),
        "=r,l," + _letter(kind) + ",r",
        [at.to(tl.int64), value.to(kind).to(_register(kind), bitcast=True), there],
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
