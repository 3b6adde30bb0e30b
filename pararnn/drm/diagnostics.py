r"""Diagnostics of a metric, of frames and of the emitted distribution (notes, sections 4 and 15).

They are measurements. None is the formal rank of a degenerate metric, and a small energy proves no
geodesic: the metric of section 4 has full rank by construction, whatever these numbers say.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.func import jacfwd, jvp, vmap

from pararnn import checks


def _spectrum(name: str, eigenvalues: Tensor) -> Tensor:
    checks.floating(f"{name}: eigenvalues", eigenvalues)
    if eigenvalues.ndim == 0 or eigenvalues.shape[-1] == 0:
        raise ValueError(
            f"{name}: eigenvalues: got shape {tuple(eigenvalues.shape)}, expected (..., d) with "
            "d ≥ 1."
        )
    if checks.readable(eigenvalues) and bool((eigenvalues < 0).any()):
        raise ValueError(
            f"{name}: eigenvalues: got {float(eigenvalues.min()):.3g}, expected none below 0; clamp "
            "those that are negative by rounding."
        )
    return eigenvalues


def effective_rank(eigenvalues: Tensor) -> Tensor:
    r"""Spectral effective rank, \(\exp(-\sum p_i \log p_i)\) with \(p = \lambda/\sum\lambda\).

    Parameters
    ----------
    eigenvalues
        ``(..., d)``, not negative.

    Returns
    -------
    Tensor
        ``(...)``, from 1 (one eigenvalue) to d (all equal); 0 where all are 0.

    Raises
    ------
    TypeError, ValueError
        If they are not floating-point numbers, or one is negative.
    """
    p = _spectrum("effective_rank", eigenvalues)
    total = p.sum(-1)
    p = p / total.unsqueeze(-1)
    return torch.where(total == 0, 0.0, (-torch.special.xlogy(p, p).sum(-1)).exp())


def participation_ratio(eigenvalues: Tensor) -> Tensor:
    r"""\((\sum\lambda)^2 / \sum\lambda^2\): from 1 to d, or 0, as :func:`effective_rank`, which it
    never exceeds.

    Raises
    ------
    TypeError, ValueError
        As :func:`effective_rank`.
    """
    p = _spectrum("participation_ratio", eigenvalues)
    top = p.amax(-1)
    p = p / top.unsqueeze(-1)  # squares neither overflow nor vanish
    return torch.where(top == 0, 0.0, p.sum(-1).square() / p.square().sum(-1))


def kernel_fraction(eigenvalues: Tensor, threshold: float) -> Tensor:
    """Share of the dimensions whose eigenvalue is at most ``threshold`` times the largest.

    Raises
    ------
    TypeError, ValueError
        As :func:`effective_rank`; and if the threshold is not from 0 to below 1.
    """
    p = _spectrum("kernel_fraction", eigenvalues)
    if not 0 <= threshold < 1:
        raise ValueError(
            f"kernel_fraction: threshold: got {threshold}, expected a number from 0 to below 1."
        )
    return (p <= threshold * p.amax(-1, keepdim=True)).to(p.dtype).mean(-1)


def fisher_energy(emit: Callable[[Tensor], Tensor], z: Tensor, v: Tensor) -> Tensor:
    r"""Energy \(v^\top J^\top F J v\) of velocities in the metric pulled back from the emitted
    distributions, \(F = \mathrm{diag}(p) - pp^\top\): the variance of the change of the logits.

    It is twice the leading term of the divergence of \(p(z + v)\) from \(p(z)\). One JVP, at
    any size.

    Parameters
    ----------
    emit
        Logits ``(..., V)`` of states ``(..., d)``, position by position, without dropout: a
        :class:`LanguageEmitter` in evaluation.
    z, v
        States and velocities, ``(..., d)``.

    Returns
    -------
    Tensor
        ``(...)``, not negative.

    Raises
    ------
    TypeError, ValueError
        If states and velocities are not floating-point tensors of one shape.
    """
    checks.floating("fisher_energy: z", z)
    checks.shaped("fisher_energy: v", v, tuple(z.shape), 0)
    logits, change = jvp(emit, (z,), (v,))[:2]
    p = logits.softmax(-1)
    centred = change - (p * change).sum(-1, keepdim=True)
    energy: Tensor = (p * centred.square()).sum(-1)
    return energy


def fisher_metric(emit: Callable[[Tensor], Tensor], z: Tensor) -> Tensor:
    r"""The pulled-back metric itself, \(J^\top F J\), ``(N, d, d)``, at states ``(N, d)``.

    Positive semidefinite, of rank at most V - 1. It takes d JVPs and ``N V d`` numbers: for small
    sizes.

    Raises
    ------
    TypeError, ValueError
        If ``z`` is not a floating-point tensor ``(N, d)``.
    """
    if checks.floating("fisher_metric: z", z).ndim != 2:
        raise ValueError(f"fisher_metric: z: got shape {tuple(z.shape)}, expected (N, d).")
    jacobian = vmap(jacfwd(emit))(z)  # (N, V, d)
    p = emit(z).softmax(-1).unsqueeze(-1)
    # Centred before it is squared: positive semidefinite also after rounding.
    root = p.sqrt() * (jacobian - (p * jacobian).sum(-2, keepdim=True))
    return root.mT @ root


def frame_holonomy(frames: Tensor) -> Tensor:
    r"""What carrying a frame once around a loop turns it by, ``(..., n, n)``: orthogonal, the
    identity where the spanned planes do not turn.

    Each frame is made orthonormal within its span. From one point of the loop to the next the frame
    moves to the nearest orthonormal frame of the next span, which in the limit of a fine loop is
    parallel transport by the connection of the surrounding Euclidean space; the last point is
    followed by the first. Another basis of a span changes nothing but the basis of the result.

    This is not the holonomy of section 15, which needs a connection that is compatible with a
    degenerate metric.

    Parameters
    ----------
    frames
        ``(..., K, n, d)``: n independent vectors, n ≤ d, at each of K ≥ 2 points, such as
        ``Directions.vectors``.

    Raises
    ------
    TypeError, ValueError
        If frames are not floating-point numbers of this shape; on the CPU also if vectors of a frame
        are dependent, or two neighbouring spans have orthogonal directions, so that no frame is
        nearest.
    """
    name = "frame_holonomy: frames"
    shape = tuple(checks.floating(name, frames).shape)
    if frames.ndim < 3 or shape[-3] < 2 or not 1 <= shape[-2] <= shape[-1]:
        raise ValueError(f"{name}: got shape {shape}, expected (..., K, n, d), K ≥ 2 and n ≤ d.")
    unit = _polar(frames, f"{name}: got a frame of dependent vectors; take fewer of them.")
    steps = _polar(
        unit.roll(-1, -3) @ unit.mT,
        f"{name}: got neighbours whose spans are orthogonal in a direction; take more points.",
    )
    turn = steps[..., 0, :, :]
    for k in range(1, shape[-3]):
        turn = steps[..., k, :, :] @ turn
    return turn


def _polar(matrices: Tensor, problem: str) -> Tensor:
    """The nearest matrices with orthonormal rows."""
    u, sizes, vh = torch.linalg.svd(matrices, full_matrices=False)
    least = torch.finfo(sizes.dtype).eps * matrices.shape[-1] * sizes[..., :1]
    if checks.readable(sizes) and bool((sizes <= least).any()):
        raise ValueError(problem)
    nearest: Tensor = u @ vh
    return nearest
