"""Scan of the gated delta rule, or of products of Householder maps, in chunks.

Micro-step ``m`` of a head with state ``H (dk×dv)`` is ``H ← g_m H + β_m k_m u_mᵀ`` with the error
``u_m = v_m − g_m Hᵀ k_m``, where ``g_m`` is the decay of the token at the token's first micro-step
and 1 at the others. Inside a chunk that starts from ``S``,

    ``u_m = v_m − D_m Sᵀ k_m − Σ_{j<m} D_mj β_j (k_m·k_j) u_j``,

a unit lower triangular system (``I + A`` in :mod:`.wy`), where ``D_mj`` is the product of the
decays after ``j`` up to ``m``, and ``D_m`` that from the start. It is inverted for all chunks at
once: the WY form of Bischof and Van Loan, used for this rule by Yang et al., arXiv:2406.06484,
section 3, and for several micro-steps a token by Siems et al., arXiv:2502.10297.

Decays are multiplied, never divided, and no logarithm is taken. So a decay of exactly 0, or one
that underflows, is exact, and has its derivative.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from .._checks import full_precision, positive, readable
from .._operators import LIBRARY, Operator
from .._precision import exactly
from .backend import pick
from .containment import contained
from .inputs import accumulated, common_dtype, cut, one_device, reset_mask, tensor
from .stepwise import faint, in_range
from .wy import assemble

NAME = "delta_scan"
Run = Callable[[list[Tensor], Tensor, int, Tensor | None], tuple[Tensor, Tensor]]
"""Sequences, first state, most tokens a chunk and resets, to outputs and the last state."""


def delta_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    h0: Tensor | None = None,
    *,
    gamma: Tensor | None = None,
    resets: Tensor | None = None,
    reverse: bool = False,
    chunk_size: int = 64,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    r"""Delta rule, or a product of generalised Householder maps a token, over a sequence.

    For every token: \(H \leftarrow \gamma_t H\), then for each micro-step \(j\):
    \(H \leftarrow H - \beta_{tj} k_{tj} (k_{tj}^\top H) + \beta_{tj} k_{tj} v_{tj}^\top\); then
    \(y_t = H^\top q_t\). Keys are used as given: normalise them before.

    Parameters
    ----------
    q
        Queries ``(B, T, H, dk)``.
    k
        Keys ``(B, T, nh, H, dk)``, or ``(B, T, H, dk)`` for one micro-step a token.
    v
        Values ``(B, T, nh, H, dv)``, or ``(B, T, H, dv)``.
    beta
        Step sizes ``(B, T, nh, H)``, or ``(B, T, H)``. With unit keys the map of a micro-step has
        the eigenvalue ``1 − β`` along its key; 2 reflects.
    h0
        Initial states ``(B, H, dk, dv)``; zero if not given.
    gamma
        Decays ``(B, T, H)``, themselves and not their logarithms; 1 if not given. Any sign; 0
        forgets the state.
    resets
        ``(B, T)`` bool; where set, the token starts from the zero state.
    reverse
        Run from the last token to the first. Micro-steps keep their order.
    chunk_size
        Most tokens a chunk. The result does not depend on it beyond rounding.
    backend
        ``'auto'``, ``'eager'`` or ``'fused'``: whether kernels run it (:mod:`.fused_delta`).

    Returns
    -------
    tuple of Tensor
        Outputs ``y (B, T, H, dv)``, in the dtype of ``q``, and the state after the last token,
        ``(B, H, dk, dv)``, in the dtype of accumulation: float32 for half precision.

    Raises
    ------
    TypeError
        If an input is not a floating-point tensor, or ``resets`` not a bool one.
    ValueError
        If a shape or a device does not fit, or ``chunk_size`` is not positive.
    RuntimeError
        If ``backend='fused'`` and no kernel can run this.
    """
    q = tensor(NAME, "q", q, ("B", "T", "H", "dk"))
    batch, length, heads, dk = q.shape
    if isinstance(k, Tensor) and k.ndim == 4:
        k = k.unsqueeze(2)
        v = v.unsqueeze(2) if isinstance(v, Tensor) and v.ndim == 4 else v
        beta = beta.unsqueeze(2) if isinstance(beta, Tensor) and beta.ndim == 3 else beta
    k = tensor(NAME, "k", k, (batch, length, "nh", heads, dk))
    micro = positive(f"{NAME}: k: nh", k.shape[2])
    v = tensor(NAME, "v", v, (batch, length, micro, heads, "dv"))
    dv = v.shape[-1]
    beta = tensor(NAME, "beta", beta, (batch, length, micro, heads))
    if gamma is not None:
        gamma = tensor(NAME, "gamma", gamma, (batch, length, heads))
    if h0 is not None:
        h0 = tensor(NAME, "h0", h0, (batch, heads, dk, dv))
    mask = reset_mask(NAME, resets, q)
    one_device(NAME, q=q, k=k, v=v, beta=beta, gamma=gamma, h0=h0)
    positive(f"{NAME}: chunk_size", chunk_size)
    fused = pick(NAME, backend, q, k, v, beta, gamma, h0)
    dtype = common_dtype(q, k, v, beta, gamma, h0)
    if mask is not None and gamma is None:
        gamma = torch.ones((batch, length, heads), dtype=dtype, device=q.device)
    if h0 is None:
        h0 = q.new_zeros((batch, heads, dk, dv), dtype=dtype)
    sequences = [q.unsqueeze(2), k, v, beta.unsqueeze(-1)]
    if gamma is not None:
        sequences.append(cut(gamma, mask)[:, :, None, :, None])
    *sequences, start = accumulated(dtype, *sequences, h0)
    if length == 0:
        empty = sequences[2].sum(2) + sum(s.sum() for s in sequences)
        return empty.to(q.dtype), start  # known to autograd
    if reverse:
        sequences = [s.flip(1) for s in sequences]
        mask = None if mask is None else mask.flip(1)
    if fused is None and torch.compiler.is_compiling():
        y, end = _operator(sequences, start, mask, chunk_size)
    else:
        y, end = _solved(sequences, start, mask, chunk_size, fused or in_chunks)
    return (y.flip(1) if reverse else y).to(q.dtype), end


def _solved(
    sequences: list[Tensor],
    start: Tensor,
    resets: Tensor | None,
    most: int,
    run: Run,
) -> tuple[Tensor, Tensor]:
    """``run``, with bad numbers where they belong."""

    def call(sequences: list[Tensor], start: Tensor) -> tuple[Tensor, Tensor]:
        return run(sequences, start, most, resets)

    def solve(*given: Tensor) -> tuple[Tensor, Tensor]:
        *sequences, start = given
        # Where results can be looked at, bad numbers are dealt with if there are any.
        if all(map(readable, given)):
            size = _chunk_of(sequences[0].shape[1], sequences[1].shape[2], most, start)
            y, end = call(sequences, start)
            if (
                bool(y.isfinite().all())
                and bool(end.isfinite().all())
                and not bool(faint(sequences, start, size).any())
            ):
                return y, end

            def loop_like(sequences: list[Tensor], start: Tensor) -> tuple[Tensor, Tensor]:
                return in_range(call, sequences, start, resets, size)

            return contained(loop_like, sequences, start, resets)
        return contained(call, sequences, start, resets)

    y, end = exactly(solve, start.device, *sequences, start)
    return y, end


def _chunk_of(length: int, micro: int, most: int, start: Tensor) -> int:
    """Tokens of a chunk: chunks are equal and of at most ``most``. On the CPU they have about as
    many micro-steps as the state has rows: their products cost the square of that number, and a
    new start costs little."""
    if start.device.type == "cpu":
        few = 64 if start.shape[-1] * start.shape[-2] > 1024 else 32
        most = min(most, max(1, few // micro))
    count = -(-length // most)
    return -(-length // count)


def in_chunks(
    sequences: list[Tensor], start: Tensor, most: int, resets: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Outputs ``(B, T, H, dv)`` and the final state, in chunks of at most ``most`` tokens.

    ``sequences`` are queries ``(B, T, 1, H, dk)``, keys, values ``(B, T, nh, H, d)``, step sizes
    ``(B, T, nh, H, 1)`` and, if there are any, decays ``(B, T, 1, H, 1)``, all of one dtype. Decays
    are 0 at ``resets (B, T)``, which besides cut off by selection: no number, nor a cotangent, that
    is too large is multiplied by that 0.
    """
    batch, length, _, heads, _ = sequences[0].shape
    micro = sequences[1].shape[2]
    size = _chunk_of(length, micro, most, start)
    count = -(-length // size)

    def chunks(x: Tensor, fill: float = 0.0) -> Tensor:
        """``(B, T, m, H, d)`` as ``(chunks, B·H, steps, d)``. Steps added at the end do nothing."""
        if count * size > length:
            x = pad(x, (0, 0, 0, 0, 0, 0, 0, count * size - length), value=fill)
        x = x.unflatten(1, (count, size)).permute(1, 0, 4, 2, 3, 5)
        return x.flatten(3, 4).flatten(1, 2)

    q, k, v, beta = (chunks(x) for x in sequences[:4])
    cuts = Cuts(resets, batch, heads, size, count)
    written = beta * k
    scores = q @ written.mT  # of every token with every micro-step of its chunk
    system = (k @ written.mT).tril(-1)
    faded, keep = k, None
    if len(sequences) == 5:
        through, between = decays(chunks(sequences[4], 1.0).squeeze(-1))
        through, between = cuts.start(through), cuts.pairs(between)
        # What is left of a micro-step at a token; of a micro-step, and of the start, at another.
        at_token = between.repeat_interleave(micro, -1)
        scores = cuts.pairs(scores * at_token)
        system = cuts.pairs(system * at_token.repeat_interleave(micro, -2))
        written = cuts.end(written * at_token[..., -1, :].unsqueeze(-1))
        faded = cuts.start(k * through.repeat_interleave(micro, -1).unsqueeze(-1), -2)
        q, keep = cuts.start(q * through.unsqueeze(-1), -2), through[..., -1, None, None]
    else:
        visible = torch.ones(size, size, dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~visible.repeat_interleave(micro, -1), 0)
    y, end = assemble((system, scores, v, faded, written, q, keep), start.flatten(0, 1))
    y = y.unflatten(1, (batch, heads)).permute(1, 0, 3, 2, 4).flatten(1, 2)
    return y[:, :length], end.unflatten(0, (batch, heads))


class Cuts:
    """What resets ``(B, T)`` cut off inside chunks ``(chunks, B·H)``; nothing if there are none."""

    def __init__(self, resets: Tensor | None, batch: int, heads: int, size: int, count: int):
        self.piece: Tensor | None = None
        if resets is not None:
            marks = pad(resets, (0, count * size - resets.shape[1]))
            piece = marks.unflatten(1, (count, size)).cumsum(2).transpose(0, 1)
            self.piece = piece.unsqueeze(2).expand(-1, -1, heads, -1).flatten(1, 2)

    def _of(self, steps: int) -> Tensor:
        """The number of resets up to every step: tokens, or micro-steps of them."""
        assert self.piece is not None
        return self.piece.repeat_interleave(steps // self.piece.shape[-1], -1)

    def pairs(self, x: Tensor) -> Tensor:
        """``(..., steps, steps)`` without what a later step has of one before a reset."""
        if self.piece is None:
            return x
        rows, columns = self._of(x.shape[-2]), self._of(x.shape[-1])
        return x.masked_fill(rows.unsqueeze(-1) != columns.unsqueeze(-2), 0)

    def start(self, x: Tensor, dim: int = -1) -> Tensor:
        """Steps along ``dim`` without what they have of the chunk's start."""
        if self.piece is None:
            return x
        gone = self._of(x.shape[dim]) > 0
        return x.masked_fill(gone if dim == -1 else gone.unsqueeze(-1), 0)

    def end(self, x: Tensor) -> Tensor:
        """Steps ``(..., steps, d)`` without what the chunk's end has not of them."""
        if self.piece is None:
            return x
        steps = self._of(x.shape[-2])
        return x.masked_fill((steps != steps[..., -1:]).unsqueeze(-1), 0)


def decays(gamma: Tensor) -> tuple[Tensor, Tensor]:
    """Products of decays ``(..., C)``: from the first to each, ``(..., C)``, and after one up to
    another, ``(..., C, C)``, zero above the diagonal. By doubling, with products only."""
    size = gamma.shape[-1]
    levels = (size - 1).bit_length()
    gamma = pad(gamma, (0, (1 << levels) - size), value=1.0)
    # Blocks of length 1: prefix products, suffix products (after a step), products between steps.
    prefix = gamma.unsqueeze(-1)
    suffix = torch.ones_like(prefix)
    between = torch.ones_like(prefix).unsqueeze(-1)
    for _ in range(levels):
        (p1, p2), (s1, s2) = (x.unflatten(-2, (-1, 2)).unbind(-2) for x in (prefix, suffix))
        b1, b2 = between.unflatten(-3, (-1, 2)).unbind(-3)
        across = p2.unsqueeze(-1) * s1.unsqueeze(-2)
        upper = torch.cat([b1, torch.zeros_like(b1)], -1)
        between = torch.cat([upper, torch.cat([across, b2], -1)], -2)
        prefix = torch.cat([p1, p1[..., -1:] * p2], -1)
        suffix = torch.cat([s1 * p2[..., -1:], s2], -1)
    prefix, between = prefix.squeeze(-2), between.squeeze(-3)
    return prefix[..., :size], between[..., :size, :size]


# -- one node for compilers and exporters ------------------------------------------------------


def _forward(
    sequences: list[Tensor], start: Tensor, resets: Tensor | None, most: int
) -> tuple[Tensor, Tensor]:
    """:func:`_solved`, of any length, as one operation in a graph."""
    y, end = _solved(sequences, start, resets, most, in_chunks)
    return y.contiguous(), end.contiguous()


def _empty(
    sequences: list[Tensor], start: Tensor, resets: Tensor | None, most: int
) -> tuple[Tensor, Tensor]:
    batch, length, _, heads, dv = sequences[2].shape
    return start.new_empty(batch, length, heads, dv), start.new_empty(start.shape)


def _gradients(
    arguments: Sequence[Any],
    kept: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    needs: dict[str, bool],
) -> dict[str, Any]:
    bars = (
        torch.zeros_like(like) if bar is None else bar
        for like, bar in zip(_empty(*arguments), grads, strict=True)
    )
    *found, first = _backward_operator(*arguments, *bars)
    return {"sequences": found, "start": first}


_CALL = "Tensor[] sequences, Tensor start, Tensor? resets, int most"
_operator = Operator(
    f"delta_scan({_CALL}) -> (Tensor, Tensor)", _forward, _empty, gradients=_gradients
)


def _backward(
    sequences: list[Tensor],
    start: Tensor,
    resets: Tensor | None,
    most: int,
    d_y: Tensor,
    d_end: Tensor,
) -> list[Tensor]:
    """Cotangents of the sequences and of the start."""

    def run(*given: Tensor) -> tuple[Tensor, Tensor]:
        return _solved(list(given[:-1]), given[-1], resets, most, in_chunks)

    with full_precision(start.device):
        pull = torch.func.vjp(run, *sequences, start)[1]
        return [g.contiguous() for g in pull((d_y, d_end))]


def _empty_back(sequences: list[Tensor], start: Tensor, *others: Any) -> list[Tensor]:
    return [g.new_empty(g.shape) for g in (*sequences, start)]


_backward_operator = Operator(
    f"delta_scan_backward({_CALL}, Tensor d_y, Tensor d_end) -> Tensor[]", _backward, _empty_back
)


def _mapped(
    info: Any,
    dims: tuple[Any, ...],
    sequences: list[Tensor],
    start: Tensor,
    resets: Tensor | None,
    most: int,
) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
    """The mapped dimension joins the batch."""

    def folded(value: Tensor | None, dim: int | None) -> Tensor | None:
        if value is None:
            return None
        value = (
            value.expand(info.batch_size, *value.shape) if dim is None else value.movedim(dim, 0)
        )
        return value.flatten(0, 1)

    several = [folded(s, d) for s, d in zip(sequences, dims[0], strict=True)]
    out = _operator(several, folded(start, dims[1]), folded(resets, dims[2]), most)
    y, end = (v.unflatten(0, (info.batch_size, -1)) for v in out)
    return (y, end), (0, 0)


torch.library.register_vmap(_operator.name, _mapped, lib=LIBRARY)
