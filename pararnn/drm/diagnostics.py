r"""Diagnostics of a metric and of the emitted distribution (notes, sections 4 and 15).

They are measurements. None is the formal rank of a degenerate metric, and a small energy proves no
geodesic: the metric of section 4 has full rank by construction, whatever these numbers say.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.func import jacfwd, jvp, vmap

from .. import _checks as checks


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
    r"""Spectral effective rank, :math:`\exp(-\sum p_i \log p_i)` with :math:`p = \lambda/\sum\lambda`.

    Parameters
    ----------
    eigenvalues
        ``(..., d)``, not negative, not all 0.

    Returns
    -------
    Tensor
        ``(...)``, from 1 (one eigenvalue) to d (all equal).

    Raises
    ------
    TypeError, ValueError
        If they are not floating-point numbers, or one is negative.
    """
    p = _spectrum("effective_rank", eigenvalues)
    p = p / p.sum(-1, keepdim=True)
    return (-torch.special.xlogy(p, p).sum(-1)).exp()


def participation_ratio(eigenvalues: Tensor) -> Tensor:
    r""":math:`(\sum\lambda)^2 / \sum\lambda^2`: from 1 to d, as :func:`effective_rank`, which it
    never exceeds.

    Raises
    ------
    TypeError, ValueError
        As :func:`effective_rank`.
    """
    p = _spectrum("participation_ratio", eigenvalues)
    p = p / p.amax(-1, keepdim=True)  # squares neither overflow nor vanish
    return p.sum(-1).square() / p.square().sum(-1)


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
    r"""Energy :math:`v^\top J^\top F J v` of velocities in the metric pulled back from the emitted
    distributions, :math:`F = \mathrm{diag}(p) - pp^\top`: the variance of the change of the logits.

    It is twice the leading term of the divergence of :math:`p(z + v)` from :math:`p(z)`. One JVP, at
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
    checks.trailing("fisher_energy: v", checks.floating("fisher_energy: v", v), tuple(z.shape), 0)
    logits, change = jvp(emit, (z,), (v,))[:2]
    p = logits.softmax(-1)
    centred = change - (p * change).sum(-1, keepdim=True)
    energy: Tensor = (p * centred.square()).sum(-1)
    return energy


def fisher_metric(emit: Callable[[Tensor], Tensor], z: Tensor) -> Tensor:
    r"""The pulled-back metric itself, :math:`J^\top F J`, ``(N, d, d)``, at states ``(N, d)``.

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
