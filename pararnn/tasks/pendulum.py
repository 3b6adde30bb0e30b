"""A pendulum, seen through noise at irregular times; where is it really?"""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from .task import Batch

GRAVITY, LENGTH = 9.81, 1.0
NOISE = 0.05
SUBSTEPS = 20


def swing(angle: Tensor, speed: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
    """Angle and angular speed after some time, without friction: the classical Runge–Kutta method
    of order four, in 20 equal steps."""

    def slope(a: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        return s, -GRAVITY / LENGTH * torch.sin(a)

    step = time / SUBSTEPS
    for _ in range(SUBSTEPS):
        a1, s1 = slope(angle, speed)
        a2, s2 = slope(angle + step / 2 * a1, speed + step / 2 * s1)
        a3, s3 = slope(angle + step / 2 * a2, speed + step / 2 * s2)
        a4, s4 = slope(angle + step * a3, speed + step * s3)
        angle = angle + step / 6 * (a1 + 2 * a2 + 2 * a3 + a4)
        speed = speed + step / 6 * (s1 + 2 * s2 + 2 * s3 + s4)
    return angle, speed


def pendulum(generator: Generator, batch: int, length: int) -> Batch:
    """Sine and cosine of the angle with Gaussian noise of 0.05 on each; the answer is the same pair
    without noise.

    Angle and angular speed start between −1 and 1, time gaps are 0.05 to 0.3, and 0 at the first
    step.
    """

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(*shape, generator=generator, dtype=torch.float64)

    angle, speed = uniform(-1, 1, batch), uniform(-1, 1, batch)
    dt = uniform(0.05, 0.3, batch, length)
    dt[:, :1] = 0
    noise = torch.randn(batch, length, 2, generator=generator, dtype=torch.float64)
    angles = torch.empty_like(dt)
    for t in range(length):
        angle, speed = swing(angle, speed, dt[:, t])
        angles[:, t] = angle
    y = torch.stack((angles.sin(), angles.cos()), -1)
    return Batch((y + NOISE * noise).float(), y.float(), dt.float())
