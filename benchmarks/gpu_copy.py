"""A copy kernel, as a measure of the memory's bandwidth."""

import triton
import triton.language as tl


@triton.jit
def copy(x, y, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at))
