"""One kernel for a recurrence of matrix states: a program holds some columns of a state, reads one
operator after the other, and writes every state."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS = 32
"""Columns of a state that a program holds, at most."""


@triton.jit(do_not_specialize=["T"])
def walk_chain(
    op, b, start, out, T,
    K: tl.constexpr, V: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """``x_t = A_t x_{t-1} + b_t``; backwards ``x_t = A_{t+1}ᵀ x_{t+1} + b_t``, from zero."""
    n = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, ROWS)
    j = tl.program_id(1) * COLS + tl.arange(0, COLS)
    state = i[:, None] * V + j[None, :]
    inside = (i[:, None] < K) & (j[None, :] < V)
    if BACK:
        matrix = i[None, :] * K + i[:, None]
        x = tl.zeros([ROWS, COLS], op.dtype.element_ty)
    else:
        matrix = i[:, None] * K + i[None, :]
        x = tl.load(start + n * K * V + state, mask=inside, other=0.0)
    square = (i[:, None] < K) & (i[None, :] < K)
    for step in range(T):
        t = T - 1 - step if BACK else step
        at = n * T + t
        operator = at + 1 if BACK else at
        exists = square & (step > 0) if BACK else square
        a = tl.load(op + operator * K * K + matrix, mask=exists, other=0.0)
        x = tl.dot(a, x, input_precision="ieee", out_dtype=op.dtype.element_ty)
        x += tl.load(b + at * K * V + state, mask=inside, other=0.0)
        tl.store(out + at * K * V + state, x, mask=inside)


def run_chain(op: Tensor, b: Tensor, start: Tensor | None, back: bool) -> Tensor:
    """States of operators ``(N, T, K, K)`` and inputs ``(N, T, K, V)``, all contiguous; from
    ``start (N, K, V)``, or backwards from zero."""
    N, T, K, V = b.shape
    out = torch.empty_like(b)
    rows = max(16, triton.next_power_of_2(K))
    columns = min(COLUMNS, max(16, triton.next_power_of_2(V)))
    walk_chain[(N, triton.cdiv(V, columns))](
        op,
        b,
        b if start is None else start,
        out,
        T,
        K=K,
        V=V,
        ROWS=rows,
        COLS=columns,
        BACK=back,
        num_warps=8 if rows > 64 else 4,
    )
    return out
