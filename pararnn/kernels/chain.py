"""One kernel for a recurrence of matrix states: a program holds some columns of a state, reads one
operator after the other, and writes every state."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def precision(x: Tensor) -> str:
    """How matrices are multiplied: in float32 by three products of their leading and their remaining
    bits, on tensor cores."""
    return "ieee" if x.dtype == torch.float64 else "tf32x3"


@triton.jit(do_not_specialize=["T"])
def walk_chain(
    op, b, states, cuts, T,
    K: tl.constexpr, V: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, BACK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """``x_{t+1} = A_t x_t + b_t`` from ``x_0``; backwards ``x_t = A_tᵀ x_{t+1} + b_t`` from ``x_T``.
    Nothing passes a step that ``cuts (N, T)`` marks, and then a column of zeros stays zero."""
    n = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, ROWS)
    j = tl.program_id(1) * COLS + tl.arange(0, COLS)
    state = i[:, None] * V + j[None, :]
    inside = (i[:, None] < K) & (j[None, :] < V)
    if BACK:
        matrix = i[None, :] * K + i[:, None]
    else:
        matrix = i[:, None] * K + i[None, :]
    square = (i[:, None] < K) & (i[None, :] < K)
    before = n * (T + 1)  # states of other programs
    known = before + T if BACK else before
    x = tl.load(states + known * K * V + state, mask=inside, other=0.0)
    for step in range(T):
        t = T - 1 - step if BACK else step
        at = n * T + t
        a = tl.load(op + at * K * K + matrix, mask=square, other=0.0)
        product = tl.dot(a, x, input_precision=PRECISION, out_dtype=op.dtype.element_ty)
        if cuts is not None:
            through = tl.load(cuts + at) == 0
            through = through & (tl.max((x != 0).to(tl.int32), 0) > 0)
            product = tl.where(through[None, :], product, 0.0)
        x = product + tl.load(b + at * K * V + state, mask=inside, other=0.0)
        found = before + t if BACK else before + t + 1
        tl.store(states + found * K * V + state, x, mask=inside)


def run_chain(
    op: Tensor, b: Tensor, states: Tensor, back: bool, cuts: Tensor | None = None
) -> None:
    """Fill in ``states (N, T + 1, K, V)`` but the first, or backwards but the last, which is given;
    operators are ``(N, T, K, K)`` and inputs ``(N, T, K, V)``. Steps that are not 0 in ``cuts``, uint8
    ``(N, T)``, forget the state. All are contiguous."""
    N, T, K, V = b.shape
    rows = max(16, triton.next_power_of_2(K))
    columns = min(16 if rows <= 64 else 32, max(16, triton.next_power_of_2(V)))
    walk_chain[(N, triton.cdiv(V, columns))](
        op,
        b,
        states,
        cuts,
        T,
        K=K,
        V=V,
        ROWS=rows,
        COLS=columns,
        BACK=back,
        PRECISION=precision(op),
        num_warps=4 if rows <= 64 else 8,
    )
