"""The cost model behind ``method='auto'``: chunk length and warm-up from sizes alone.

Walking one step of ``P`` chunks costs ``c0 + c1·N / p(N)``: a fixed overhead, and the work on
``N = B × state size × P`` numbers, shared by ``p(N)`` processors: an operation is split only into
parts that are large enough. A sequential solve takes ``T`` such steps with ``P = 1``; a chunked one
takes ``L + w`` with ``P = T/L``, where ``w`` warm-up steps guess the chunk starts. The model tries
every sensible ``L`` and takes the cheapest; no cell is known by name, and only the ratio ``c0/c1``
matters: how many numbers one step must touch to be worth its overhead.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch

WARMUP = 48
"""Warm-up steps: a step that forgets half of its state leaves 2⁻⁴⁸ of the wrong guess."""


@dataclass(frozen=True)
class Machine:
    """What the model knows of a device.

    ``overhead`` is ``c0/c1``, in numbers; an operation on more than ``grain`` numbers is split
    among as many processors as it has parts of that size, begun ones included.
    """

    overhead: float
    grain: int
    processors: int
    unit: float = 1.0  # c1, in microseconds

    def step(self, numbers: float) -> float:
        """Cost of one step on so many numbers, in units of ``c1``."""
        parts = max(1, math.ceil(numbers / self.grain))
        return self.overhead + numbers / min(self.processors, parts)


def machine(device: str) -> Machine:
    """Constants of a device type, from one step of ParaGRU (``mix='diag'``) in float32.

    CPU: PyTorch splits elementwise work in parts of 32,768 numbers; a step took 30 µs and 13.5 ns
    a number (2-core x86-64, one thread, torch 2.13.0). CUDA: a step is about ten launches; it took
    0.10 ms on 85 thousand numbers and 0.17 ms on 655 thousand (H200, torch 2.11.0).
    """
    if device == "cpu":
        return Machine(
            overhead=2_200, grain=32_768, processors=torch.get_num_threads(), unit=0.0135
        )
    return Machine(overhead=800_000, grain=1, processors=1, unit=1.2e-4)


AUTODIFF = 4
"""A Jacobian product by automatic differentiation, to a step: it runs the step and its derivative,
through the transforms of ``torch.func``."""
RECORDED = 2
"""The backward pass of a step that autograd recorded, to the step."""
OWN_CAP = 4
"""Corrections that ``auto`` lets a module without a Spec have, at most: a step that forgets needs one
or two, and one that does not is better run in the order of time."""
SLACK = 1.5
"""The slowest that ``auto`` may be, to the loop, whatever the numbers turn out to be."""


@dataclass(frozen=True)
class Cut:
    """Chunks of a length, and their modelled cost in microseconds; infinite if none will do."""

    length: int
    cost: float


def loop_cost(total: int, numbers: int, device: str, recorded: bool) -> float:
    """Cost of a loop over the hand-written step, in microseconds, with what autograd records of it."""
    kind = machine(device)
    return total * kind.step(numbers) * (1 + RECORDED * recorded) * kind.unit


def chunk_length(total: int, numbers: int, device: str) -> tuple[int, int]:
    """Chunk length and warm-up for ``total`` steps on ``numbers = B × state size``.

    The chunk length equals ``total`` where the sequential algorithm is cheaper.
    """
    return chunk_cut(total, numbers, device).length, WARMUP


def chunk_cut(total: int, numbers: int, device: str) -> Cut:
    """The cheapest chunks, one of all steps included, for a recurrence with a Spec."""
    return _chunk_cut(total, numbers, machine(device))


@lru_cache(maxsize=1024)
def _chunk_cut(total: int, numbers: int, device: Machine) -> Cut:
    best, least = max(total, 1), total * device.step(numbers)
    chunks = 2.0
    while numbers and total / chunks >= WARMUP:
        length = -(-total // round(chunks))
        cost = (length + WARMUP) * device.step(numbers * (total / length))
        if cost < least:
            best, least = length, cost
        chunks *= 1.25
    return Cut(best, least * device.unit)


def own_cut(total: int, batch: int, size: int, device: str, recorded: bool, dense: bool) -> Cut:
    """The cheapest chunks for a module without a Spec, whose derivatives are taken by automatic
    differentiation.

    Nothing is known of how well such a step forgets. So chunks are taken only where their worst case,
    :data:`OWN_CAP` corrections and then all steps in the order of time, is within :data:`SLACK` of
    the loop.

    Parameters
    ----------
    total, batch, size
        Steps, samples and numbers of one sample's state.
    recorded
        Whether there will be a backward pass.
    dense
        Whether Jacobians ``(n, n)`` are formed; else a correction is a pass alone, and the adjoint
        has no bound but the loop.
    """
    return _own_cut(total, batch, size, machine(device), recorded, dense)


@lru_cache(maxsize=1024)
def _own_cut(
    total: int, batch: int, size: int, device: Machine, recorded: bool, dense: bool
) -> Cut:
    best, least = max(total, 1), math.inf
    if (recorded and not dense) or not batch * size:
        return Cut(best, least)
    numbers, columns = batch * size, size if dense else 0
    loop = total * device.step(numbers) * (1 + RECORDED * recorded)
    backward = 0.0
    if recorded:  # all Jacobians at once, a scan over them, and the gradients of all steps
        backward = AUTODIFF * (device.overhead + size * total * numbers) + size * total * numbers
        backward += AUTODIFF * device.step(total * numbers)
    chunks = 2.0
    while total / chunks >= WARMUP:
        length = -(-total // round(chunks))
        many = numbers * (total / length)
        walk = length * device.step(many)
        product = length * AUTODIFF * device.step(many * columns) if columns else 0.0
        usual = (1 + WARMUP / length) * walk + backward
        worst = usual + OWN_CAP * (walk + product) + AUTODIFF / 2 * total * device.step(numbers)
        if worst <= SLACK * loop and usual < least:
            best, least = length, usual
        chunks *= 1.25
    return Cut(best, least * device.unit)
