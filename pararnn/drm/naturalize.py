"""Preconditioning of velocities by the metric (notes, section 5)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pararnn import checks

from .direction import Directions
from .metric import Metric
from .networks import rows

SMALLEST_DAMPING = 1e-6  # of a Gram matrix of directions, which is singular where they repeat


def solve_metric(
    metric: Metric, v: Tensor, damping: float = 0.0, precision: str = "safe"
) -> Tensor:
    r"""\((G + \lambda I)^{-1} v\) by the Woodbury identity.

    With \(\Delta = D + \lambda\),

    \[ (\Delta + UU^\top)^{-1} = \Delta^{-1} - \Delta^{-1}U(I + U^\top\Delta^{-1}U)^{-1}
       U^\top\Delta^{-1}. \]

    The inner r×r matrix has eigenvalues ≥ 1 and is factored by Cholesky once for all m vectors of a
    state. For v near the span of a large U the result is a small difference of large terms; its
    relative error is about the rounding unit times the condition number. Where the inner matrix has no
    factor (see :func:`cholesky`), the result is NaN: in models as they are drawn, at states above 1e11 with as many
    columns as coordinates, and with fewer than half as many at none that float64 has the squares of.

    Parameters
    ----------
    metric
        Of leading shape ``(...)``.
    v
        Vectors ``(..., m, d)``.
    damping
        \(\lambda \ge 0\).
    precision
        ``'safe'``: in float64, rounded once. ``'single'``: in float32, float64 in float64.
        ``'published'``: float32 inside, but the correction is rounded to the dtype of ``v`` before
        it is subtracted, and the inner matrix is solved by LU; in half precision it loses all
        digits where the terms cancel.

    Returns
    -------
    Tensor
        ``(..., m, d)`` in the dtype of ``v``. A NaN in one state stays in its rows.

    Raises
    ------
    ValueError
        If the shapes do not fit, ``damping`` is negative, or ``precision`` is another word.
    """
    dtype = _checked(metric, v, damping, precision)
    with checks.full_precision(v.device):
        if precision == "published":
            return _published(metric, v, damping)
        u, wide = metric.factor.to(dtype), v.to(dtype)
        inverse = (metric.diagonal.to(dtype) + damping).reciprocal()
        y = wide * inverse.unsqueeze(-2)
        if u.shape[-1]:
            scaled = u * inverse.unsqueeze(-1)
            inner = u.mT @ scaled
            y = y - solve_spd(inner + _eye(inner), wide @ scaled) @ scaled.mT
        return y.to(v.dtype)


def naturalize(
    metric: Metric, v: Tensor, strength: float, damping: float = 0.0, precision: str = "safe"
) -> Tensor:
    r"""\((1-s)\,v + s\,(G + \lambda I)^{-1} v\); with \(s = 0\), ``v`` itself, untouched.

    Arguments as for :func:`solve_metric`. The result leaves the span of the directions.

    Raises
    ------
    ValueError
        As :func:`solve_metric`; and if the strength is not from 0 to 1.
    """
    _check_strength(strength)
    _checked(metric, v, damping, precision)
    if strength == 0:
        return v
    return torch.lerp(v, solve_metric(metric, v, damping, precision), strength)


def naturalize_in_span(
    metric: Metric,
    directions: Directions,
    coefficients: Tensor,
    strength: float,
    damping: float = 0.0,
    form: str = "subspace",
    precision: str = "safe",
) -> Tensor:
    r"""Velocities that are preconditioned in the span of the directions, and stay in it.

    With \(\kappa = a \odot c\), rows of V the directions and \(\Gamma_\lambda = VGV^\top + \lambda I
    = \Lambda\Lambda^\top\), ``'subspace'`` is \(V^\top\Gamma_\lambda^{-1}\kappa\) and
    ``'orthonormal'`` is \((\Lambda^{-1}V)^\top\kappa\). Either is blended with \(V^\top\kappa\) by
    the strength.

    Parameters
    ----------
    metric, directions
        Of leading shape ``(...)``.
    coefficients
        ``(..., m, n)``.
    damping
        \(\lambda\), taken as at least 1e-6: \(VGV^\top\) is singular where directions repeat. In
        float64 that suffices: for ``'subspace'`` with fewer columns of U than directions, and D large in as
        many coordinates as there are directions, at all states (the large term of low rank is kept apart);
        else at states up to 1e15 in models as they are drawn; above, the result is NaN where no factor
        exists (see :func:`cholesky`). In float32 it does not: there directions that nearly repeat lose
        about \(10^{-7}\lVert VGV^\top\rVert/\lambda\) of the result, and more of its gradient, or it
        is NaN where no factor exists.

    Returns
    -------
    Tensor
        ``(..., m, d)``.

    Raises
    ------
    ValueError
        As :func:`naturalize`; and if ``form`` is another word. Also where the strength is 0.
    """
    if form not in ("subspace", "orthonormal"):
        raise ValueError(f"form: got {form!r}, expected 'subspace' or 'orthonormal'.")
    _check_strength(strength)
    _check_damping(damping)
    kappa = directions.weights(coefficients)
    raw = kappa @ directions.vectors
    dtype = work_dtype(raw.dtype, precision)
    if strength == 0:
        return raw
    with checks.full_precision(raw.device):
        vectors, factor = directions.vectors.to(dtype), metric.factor.to(dtype)
        # Fewer columns than directions: they are a term of low rank, whatever their size.
        apart = form == "subspace" and factor.shape[-1] < vectors.shape[-2]
        of_u = factor[..., :0] if apart else factor
        gram = Metric(metric.diagonal.to(dtype), of_u).coupling(vectors)
        gram = (gram + gram.mT) / 2 + max(damping, SMALLEST_DAMPING) * _eye(gram)
        if apart:
            weights = solve_low_rank(gram, vectors @ factor, kappa.to(dtype))
        elif form == "subspace":
            weights = solve_spd(gram, kappa.to(dtype))
        else:
            root = cholesky(gram)
            weights = torch.linalg.solve_triangular(root.mT, kappa.to(dtype).mT, upper=True).mT
        solved = (weights @ vectors).to(raw.dtype)
    return torch.lerp(raw, solved, strength)


def _checked(metric: Metric, v: Tensor, damping: float, precision: str) -> torch.dtype:
    """The dtype in which the system is solved, if it can be."""
    metric._rows("v", v)
    _check_damping(damping)
    return work_dtype(v.dtype, precision)


def _check_strength(strength: float) -> None:
    if not checks.within(strength, 0.0, 1.0):
        raise ValueError(
            f"strength: got {strength}, expected a number from 0, no naturalization, to 1."
        )


def _check_damping(damping: float) -> None:
    if not checks.within(damping, 0.0, math.inf):
        raise ValueError(
            f"damping: got {damping}, expected a number ≥ 0; below, the damped metric may be "
            "singular or indefinite."
        )


def work_dtype(dtype: torch.dtype, precision: str) -> torch.dtype:
    """The dtype in which a system is solved."""
    if precision not in ("safe", "single", "published"):
        raise ValueError(
            f"precision: got {precision!r}, expected one of ('safe', 'single', 'published')."
        )
    return torch.float64 if precision == "safe" else checks.state_dtype(dtype)


def solve_spd(matrix: Tensor, right: Tensor) -> Tensor:
    """Rows ``x`` of ``right (..., m, n)`` solved: ``matrix · x``, positive definite."""
    rows("right", right, matrix.shape[:-2], matrix.shape[-1])
    factor = cholesky(matrix)
    half = torch.linalg.solve_triangular(factor, right.mT, upper=False)
    return torch.linalg.solve_triangular(factor.mT, half, upper=True).mT


def solve_low_rank(matrix: Tensor, columns: Tensor, right: Tensor) -> Tensor:
    r"""Rows ``x`` of ``right (..., m, n)`` solved: :math:`(A + WW^\top)\,x`, A positive definite.

    With :math:`A = LL^\top` and :math:`Y = L^{-1}W`, :math:`x = L^{-\top}(I + YY^\top)^{-1}L^{-1}` of a row, the
    middle by the Woodbury identity: the sum, in which a large W would leave nothing of A, is not formed.

    Parameters
    ----------
    matrix
        A, ``(..., n, n)``.
    columns
        W, ``(..., n, r)``.
    """
    root = cholesky(matrix)
    both = torch.cat([columns, right.mT], -1)
    solved = torch.linalg.solve_triangular(root, both, upper=False)
    y, half = solved.tensor_split([columns.shape[-1]], -1)
    if y.shape[-1]:
        inner = y.mT @ y
        half = half - y @ solve_spd(inner + _eye(inner), (y.mT @ half).mT).mT
    return torch.linalg.solve_triangular(root.mT, half, upper=True).mT


def cholesky(matrix: Tensor) -> Tensor:
    r"""The lower factor; NaN where there is none, instead of an error for the whole batch.

    There is one where the smallest eigenvalue of the matrix scaled to a diagonal of ones is above
    \(n\gamma_{n+1}/(1-\gamma_{n+1})\), with \(\gamma_k = ku/(1-ku)\) and u the rounding unit; so
    columns of any different sizes have one. Below that, rounding has taken what was positive definite. [Demmel 1989;
    Higham, *Accuracy and Stability of Numerical Algorithms*, theorem 10.7]
    """
    factor, info = torch.linalg.cholesky_ex(matrix)
    return factor.masked_fill((info != 0)[..., None, None], torch.nan)


def _eye(like: Tensor) -> Tensor:
    return torch.eye(like.shape[-1], dtype=like.dtype, device=like.device)


def _published(metric: Metric, v: Tensor, damping: float) -> Tensor:
    dtype = checks.state_dtype(v.dtype)
    damped = (metric.diagonal + damping).to(v.dtype)
    y = v / damped.unsqueeze(-2)
    u = metric.factor.to(dtype)
    if not u.shape[-1]:
        return y
    scaled = u * damped.reciprocal().to(dtype).unsqueeze(-1)
    inner = u.mT @ scaled
    alpha = torch.linalg.solve_ex(inner + _eye(inner), (y.to(dtype) @ u).mT).result.mT
    return y - (alpha @ scaled.mT).to(v.dtype)
