"""DeltaMinGRU: a matrix state that is written by the delta rule, once or several times a step."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import sympy
import torch
from torch import Tensor, nn
from torch.nn import functional

from .. import _checks as checks
from .._precision import exactly
from ..scan import delta_scan
from ..spec import Spec, maximum, sigmoid
from .mixer import Mixer, decay_stage

EPSILON = 1e-12
"""Keys are divided by their norm, or by this if it is smaller: the Spec has its square."""


TINY = sympy.Integer(10) ** -12
""":data:`EPSILON` in the Spec. Keys of which the absolute entries add up to more than its inverse are
scaled before they are squared."""


def unit(u: Tensor) -> Tensor:
    """``u (..., K)`` divided by its norm, or by :data:`EPSILON` if that is larger. A power of two keeps
    the squares of large numbers in range, and rounds nothing."""
    half = 2.0 ** (
        math.frexp(torch.finfo(u.dtype).max)[1] // 2 - 8
    )  # 2^16 of its squares have a sum
    large = u.detach().abs().amax(-1, keepdim=True) > half
    return functional.normalize(torch.where(large, u / half / 2**20, u), dim=-1, eps=EPSILON)


@cache
def delta_min_gru_spec(nh: int, decay: str | None, log1p_delta: bool) -> Spec:
    """``H ← H + β k (v − Hᵀk)ᵀ`` with unit keys, ``nh`` times a step, and the read-out ``Hᵀq``."""
    label = ", ".join(filter(None, (f"nh={nh}", "decay" if decay else "")))
    counts = [""] if nh == 1 else [str(j + 1) for j in range(nh)]
    vector: dict[str, Any] = {"inline": False}
    scalar = ("heads",)
    axes = ("heads", "K", "V")
    with Spec(f"DeltaMinGRU[{label}]", axes=axes, parallel=("heads",)) as s:
        H = s.state("H")
        (q,) = s.drives("q", axes=("heads", "K"), **vector)
        keys = s.drives([f"u_k{i}" for i in counts], axes=("heads", "K"), **vector)
        values = s.drives([f"v_{i}" if i else "v" for i in counts], axes=("heads", "V"), **vector)
        logits = s.drives([f"u_b{i}" for i in counts], axes=scalar)
        gamma = decay_stage(s, decay, log1p_delta, axes=scalar)
        state = H if gamma == 1 else s.let("S_0", gamma * H)
        for i, u, v, logit in zip(counts, keys, values, logits, strict=True):
            sub = f"_{i}" if i else ""
            size = s.contract(f"m{sub}", TINY * maximum(u, -u), over="K")
            scale = s.let(f"c{sub}", 1 / maximum(size, sympy.Integer(1)))
            scaled = s.let(f"a{sub}", scale * u)
            square = s.contract(f"n{sub}", scaled * scaled, over="K")
            least = s.let(f"e{sub}", TINY * scale)
            k = s.let(f"k{sub}", scaled / sympy.sqrt(maximum(square, least * least)))
            beta = s.let(f"beta{sub}", 2 * sigmoid(logit))
            read = s.contract(f"p{sub}", k * state, over="K")
            written = state + beta * k * (v - read)
            if i == counts[-1]:
                s.next(H, written)
            else:
                state = s.let(f"S{sub}", written)
        s.read("o", q * s.updated(H), over="K")
    return s


class DeltaMinGRU(Mixer):
    """Heads with a matrix state, corrected at every step towards ``Hᵀk = v``.

    For every head, ``nh`` times a step: ``H ← H − β k (kᵀH) + β k vᵀ`` with a unit key ``k`` and
    ``β = 2σ(·)`` in (0, 2); then ``y = W_o [Hᵀq of all heads] + b_o``. With a decay, ``H ← γ H``
    comes first, once a step.

    Parameters
    ----------
    d_in, d_h
        Input and output width; also by ``input_size`` and ``hidden_size``.
    bias
        Whether the input heads and the output projection have biases.
    n_heads, d_k, d_v
        Number of heads, and rows and columns of the state of each: ``d_h / n_heads`` rows if not
        given, and as many columns as rows.
    nh
        Micro-steps a step: each has a key, a value and a ``β`` of its own.
    chunk_size
        Most steps whose writes are put together into one solve; the result does not depend on it.
    decay, decay_rate, log1p_delta
        Time-aware decay, with one rate a head; see :class:`~pararnn.cells.mixer.Mixer`.
    device, dtype
        As for :class:`torch.nn.Linear`.

    Attributes
    ----------
    out_proj : torch.nn.Linear
        ``n_heads * d_v → d_h``.

    Raises
    ------
    TypeError, ValueError
        If a size is missing or not a positive integer, if ``d_k`` is not given and ``n_heads``
        does not divide ``d_h``, or if an argument of the decay is none; in a call, if there is a
        ``dt`` without a decay or a decay without one, or a state has not the shape
        ``(B, 1, n_heads * d_k * d_v)`` or ``(B, n_heads * d_k * d_v)``.

    References
    ----------
    Schlag et al., arXiv:2102.11174; Yang et al., arXiv:2406.06484; Siems et al., arXiv:2502.10297.
    """

    direct = True

    def __init__(
        self,
        d_in: int | None = None,
        d_h: int | None = None,
        bias: bool = True,
        *,
        n_heads: int = 4,
        nh: int = 1,
        d_k: int | None = None,
        d_v: int | None = None,
        chunk_size: int = 64,
        hidden_size: int | None = None,
        **kwargs: Any,
    ):
        width = checks.either("d_h", d_h, "hidden_size", hidden_size)
        self.n_heads = checks.positive("n_heads", n_heads)
        self.nh = checks.positive("nh", nh)
        self.chunk_size = checks.positive("chunk_size", chunk_size)
        if d_k is None and width % n_heads:
            raise ValueError(
                f"n_heads: got {n_heads} heads for d_h={width}, expected a divisor of d_h; choose "
                "another, or give d_k."
            )
        self.d_k = width // n_heads if d_k is None else checks.positive("d_k", d_k)
        self.d_v = self.d_k if d_v is None else checks.positive("d_v", d_v)
        sizes = {"heads": n_heads, "K": self.d_k, "V": self.d_v}
        super().__init__(d_in, bias=bias, sizes=sizes, **kwargs)
        self.d_h = self.hidden_size = width
        self.out_proj = nn.Linear(
            n_heads * self.d_v, width, bias=bias, device=self.device, dtype=self.dtype
        )

    def make_spec(self) -> Spec:
        return delta_min_gru_spec(self.nh, self.decay, self.log1p_delta)

    def reset_parameters(self) -> None:
        """The input heads and the output projection each as a fresh :class:`torch.nn.Linear`."""
        super().reset_parameters()
        if hasattr(self, "out_proj"):
            self.out_proj.reset_parameters()

    def hyperparameters(self) -> dict[str, Any]:
        own = ("n_heads", "nh", "d_k", "d_v", "chunk_size")
        return super().hyperparameters() | {name: getattr(self, name) for name in own}

    # -- computing -----------------------------------------------------------------------------

    def recurrence(self, H: Tensor, *given: Tensor) -> Tensor:
        (_, *heads), gamma = self.apart(given)
        if isinstance(gamma, Tensor):
            H = gamma[..., None, None] * H
        n = self.nh
        for u, v, logit in zip(heads[:n], heads[n : 2 * n], heads[2 * n :], strict=True):
            k = unit(u)
            beta = 2 * torch.sigmoid(logit)[..., None, None]
            error = v[..., None, :] - k[..., None, :] @ H
            H = H + beta * k[..., :, None] * error
        return H

    def reading(self, H: Tensor, q: Tensor) -> Tensor:
        """What every head reads, ``Hᵀq``: ``(..., n_heads, d_v)``."""
        return (q[..., None, :] @ H).squeeze(-2)

    def output(
        self, states: Tensor, x: Tensor | None = None, *, drives: Tensor | None = None
    ) -> Tensor:
        """``W_o [Hᵀq] + b_o`` of states ``(..., n_heads, d_k, d_v)``, shape ``(..., d_h)``."""
        q = self.queries(self.drives(x) if drives is None else drives)  # type: ignore[arg-type]
        pair = states.to(self.state_dtype), q.to(self.state_dtype)
        (read,) = exactly(lambda H, q: (self.reading(H, q),), q.device, *pair)
        return self.out_proj(read.flatten(-2).to(self.dtype))

    def queries(self, drives: Tensor) -> Tensor:
        """``(..., n_heads, d_k)``, from packed drives."""
        return drives[..., : self.n_heads * self.d_k].unflatten(-1, (self.n_heads, self.d_k))

    def through(
        self,
        drives: Tensor,
        h0: Tensor | None = None,
        *,
        resets: Tensor | None = None,
        dt: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Output ``(B, T, d_h)`` and final state of a sequence; the arguments are those of
        :meth:`reads`."""
        read, final = self.reads(drives, h0, resets=resets, dt=dt)
        return self.out_proj(read.flatten(-2).to(self.dtype)), final

    def reads(
        self,
        drives: Tensor,
        h0: Tensor | None = None,
        *,
        resets: Tensor | None = None,
        dt: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """What every head reads, ``(B, T, n_heads, d_v)``, and the final state of a sequence, without
        the states in between.

        ``drives`` are packed, ``(B, T, C)``, and time gaps ``(B, T)``, as for
        :func:`~pararnn.solve`.
        """
        keys, values = self.n_heads * self.d_k, self.n_heads * self.d_v
        _, u, v, logits = drives.split(
            (keys, self.nh * keys, self.nh * values, self.nh * self.n_heads), -1
        )
        q = self.queries(drives)
        v = v.unflatten(-1, (self.nh, self.n_heads, self.d_v))
        with checks.full_precision(drives.device):
            u = u.unflatten(-1, (self.nh, self.n_heads, self.d_k)).to(self.state_dtype)
            k = unit(u)
            logits = logits.unflatten(-1, (self.nh, self.n_heads)).to(self.state_dtype)
            gamma = None
            if dt is not None:
                params = (p.to(self.state_dtype) for p in self.recurrent_params())
                _, decayed = self.apart((*self.split(drives), dt.to(self.state_dtype), *params))
                gamma = torch.as_tensor(decayed).expand(*dt.shape, self.n_heads)
            return delta_scan(
                q,
                k,
                v,
                2 * torch.sigmoid(logits),
                h0,
                gamma=gamma,
                resets=resets,
                chunk_size=self.chunk_size,
            )
