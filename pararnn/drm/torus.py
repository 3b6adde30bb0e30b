r"""Angles as points of a torus (notes, section 16).

The map \(\theta \mapsto (\cos\theta, \sin\theta)\) makes a coordinate circular where it is used. It
says nothing about the topology of learned trajectories, and no path of the model uses it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pararnn import checks


def torus_coordinates(theta: Tensor) -> Tensor:
    """Points ``(..., k, 2)``, each ``(cos, sin)``, of angles ``(..., k)`` in radians.

    Raises
    ------
    TypeError
        If ``theta`` is not a floating-point tensor.
    """
    checks.floating("torus_coordinates: theta", theta)
    return torch.stack([theta.cos(), theta.sin()], -1)


def torus_angles(points: Tensor) -> Tensor:
    """Angles ``(..., k)`` in [-π, π] of points ``(..., k, 2)``, whose length does not matter.

    Raises
    ------
    TypeError, ValueError
        If ``points`` is not a floating-point tensor with a last dimension of 2.
    """
    name = "torus_angles: points"
    checks.shaped(name, points, (2,), fix="that the last dimension is (cos, sin)")
    return torch.atan2(points[..., 1], points[..., 0])


def torus_difference(a: Tensor, b: Tensor) -> Tensor:
    """The shortest turn from ``b`` to ``a``, in [-π, π]: angles of one shape, in radians.

    Raises
    ------
    TypeError, ValueError
        If the angles are not floating-point tensors of one shape.
    """
    name = "torus_difference: b"
    checks.floating("torus_difference: a", a)
    checks.shaped(name, b, tuple(a.shape), 0, "that a has this shape")
    return torch.remainder(a - b + math.pi, 2 * math.pi) - math.pi


def torus_distance(a: Tensor, b: Tensor) -> Tensor:
    """Length of the shortest path on the flat torus between angles ``(..., k)``: shape ``(...)``.

    Raises
    ------
    TypeError, ValueError
        As :func:`torus_difference`.
    """
    return torch.linalg.vector_norm(torus_difference(a, b), dim=-1)
