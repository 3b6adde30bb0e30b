"""How the kernels cut a sequence and lay out a program: a small cost model.

A chunk of ``L`` steps also reads ``w`` warm-up steps, which write nothing. A step takes at least the
latency of the recurrence's own chain of operations, which all lanes share; many lanes make it
longer, by their operations or by their bytes, and between the two it is a smooth maximum. More lanes
than fit on the machine at once (its registers decide) run in waves::

    step(n) = (chain⁴ + (max(work, bytes / bandwidth) · n)⁴)^¼      n = B × D × chunks lanes
    time    = waves · (L + share · w) · step(n / waves) + launches, if there are several chunks

A linear recurrence of several slots walks twice (:mod:`pararnn.kernels.reduce`), each time at the
speed of its loads and its products, and a chain over the chunks runs in between.

The model takes the number of chunks with the least time. Only sizes and the number of function
calls in the Spec enter, never a cell's name. Its constants were measured on an NVIDIA H200 (132
processors) with ParaGRU (``mix='diag'``), and those of the two walks with RotationMinGRU and
GivensMinGRU; see the benchmarks pages.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import sympy

from ..spec import Spec
from ..spec.functions import primitive_of

CHAIN = {False: 0.15, True: 0.19}
"""Microseconds of one step of ParaGRU, forward and backward, where nothing else is short."""
WORK = {False: 2.6e-6, True: 4.5e-6}
"""Microseconds of one step a lane, with all processors busy."""
BANDWIDTH = 4.1e6
"""Bytes a microsecond."""
LAUNCHES = {False: 25.0, True: 15.0}
"""Microseconds for the launches that check and correct: 8 and 3 on the device, and the rest on the
host, which a caller without a captured graph waits for (four launches of ParaLSTM's layer of 8×128×64,
float32, took 135 µs of an H200's host)."""
ARRIVAL, PRODUCTS = 0.6, 0.07
"""Microseconds until a load arrives, shared by the steps in flight, and of a step's products."""
HEAVIER = 1.5
"""Work of a step with the columns of a product, or with several cotangents, to that of one slot."""
LINK = (0.07, 0.08)
"""Microseconds of the chain for a chunk, and for a chunk and slot."""
CALLS = 3
"""Function calls of ParaGRU, to which those of another cell are compared."""
WARMUP = {2: 48, 4: 32, 8: 64}
"""Warm-up steps by bytes of a number. Where they are too few, a correction follows, which for
numbers of two bytes walks the whole chunk again."""
TOLERANCE = {2: 5e-7, 4: 5e-7, 8: 2e-14}
CORRECTIONS = 2
EVEN = 8
"""Chunks are cut at multiples of this, the largest number of steps in flight."""


@dataclass(frozen=True)
class Plan:
    """How the sequence is cut, and how a program is laid out.

    ``length`` steps a chunk, ``warmup`` steps for a guess, at most ``corrections`` Newton
    corrections (1 or more), and then what is left in the order of time; ``block`` lanes a program
    of one warp, ``unroll`` steps in flight.
    """

    length: int
    warmup: int = 32
    corrections: int = CORRECTIONS
    tol: float = 5e-7
    block: int = 32
    unroll: int = 8
    cost: float = 0.0  # microseconds

    def chunks(self, total: int) -> int:
        return max(1, -(-total // self.length))


@lru_cache(maxsize=256)
def calls(spec: Spec) -> int:
    """Function calls of one step."""
    found = 0
    for stage in spec.stages:
        found += sum(primitive_of(e) is not None for e in sympy.preorder_traversal(stage.expr))
    return max(1, found)


def layout(
    spec: Spec, width: int, lanes: int, itemsize: int, backward: bool, several: bool
) -> tuple[int, int]:
    """Lanes a program, and steps in flight: few of both where registers are short.

    Two lanes a thread save instructions once the machine is full, and let two-byte numbers move in
    pairs; one lane a thread hides more latency.
    """
    slots = len(spec.slots)
    if reduced(spec):
        fit = 64 // (len(spec.drive_list) + slots) // (2 if itemsize == 8 else 1)
        return 32, max(1, min(8, 1 << max(0, fit.bit_length() - 1)))
    if itemsize == 8 or slots > 2:
        fit = 32 // (len(spec.drive_list) + slots)
        return 32, max(1, min(2 if itemsize == 8 else 4, 1 << max(0, fit.bit_length() - 1)))
    if itemsize == 2 and slots == 1:
        block, unroll = 64 if backward or (lanes > 60_000 and not several) else 32, 8
    elif backward:
        block, unroll = (64, 4) if lanes > 48_000 and not several else (32, 8)
    elif itemsize == 2 and not several:
        block, unroll = (64, 4) if lanes > 80_000 else (64 if lanes > 60_000 else 32, 8)
    else:
        block, unroll = (64, 4) if lanes > 80_000 else (32, 8)
    return (32 if width % 64 else block), unroll


def resident(spec: Spec, itemsize: int, backward: bool, several: bool) -> int:
    """Lanes of a processor beyond which more of them wait: fewer where a program holds many
    registers. Without other chunks it carries no Jacobian."""
    if not several:
        return 1024
    if reduced(spec):
        return 512 if len(spec.slots) == 2 else 384
    single = len(spec.slots) == 1
    if backward:
        return 512 if itemsize == 2 and single else 256
    return 512 if single else 384


def reduced(spec: Spec) -> bool:
    """Whether every chunk is reduced to its end and its product before anything is written: where
    a linear transition turns the state and keeps what a start holds, no guess is good."""
    return spec.linear_class not in (None, "diag")


def warmups(spec: Spec, itemsize: int) -> int:
    """Steps for a guess."""
    return 0 if reduced(spec) else WARMUP[itemsize]


def chunk_length(
    spec: Spec,
    batch: int,
    total: int,
    width: int,
    itemsize: int,
    processors: int,
    backward: bool,
    length: int | None = None,
) -> tuple[int, float]:
    """Length of a chunk with the least modelled time, ``total`` for one chunk, and that time; the
    ``length`` itself if one is given."""
    lanes = batch * width
    scale = calls(spec) / CALLS * (2 if itemsize == 8 else 1)
    drives, slots = len(spec.drive_list), len(spec.slots)
    read, written = (drives + slots + 1, drives) if backward else (drives, slots)

    def walk(length: float, chunks: int, work: float, numbers: int, chain: float) -> float:
        """Time of a walk, from its work a lane and step, the numbers it moves, and its chain."""
        capacity = resident(spec, itemsize, backward, chunks > 1) * processors
        waves = max(1, -(-lanes * chunks // capacity))
        per_lane = max(work, numbers * itemsize / BANDWIDTH) * 132 / processors
        n = lanes * chunks / waves
        return float(waves * length * (chain**4 + (per_lane * n) ** 4) ** 0.25)

    def guessed(length: int, chunks: int) -> float:
        """A walk with a warm-up, corrections where it was too short."""
        # In the chain of a linear recurrence there is no function, only its products.
        latency = 1 / CALLS if spec.jac_structure == "linear" else scale
        steps = length + (chunks > 1) * warmups(spec, itemsize) * read / (read + written)
        products = slots**3 / 40 if slots > 2 else 0  # of Jacobians, in the same unit
        work = WORK[backward] * (scale + products)
        time = walk(steps, chunks, work, read + written, CHAIN[backward] * latency)
        return time + LAUNCHES[backward] * (chunks > 1)

    def twice(length: int, chunks: int) -> float:
        """A walk that reduces, a chain, and a walk that writes."""
        _, unroll = layout(spec, width, lanes * chunks, itemsize, backward, chunks > 1)
        chain = ARRIVAL / unroll + PRODUCTS
        time = walk(length, chunks, HEAVIER * WORK[backward] * scale, read + written, chain)
        if chunks > 1:
            numbers = drives + slots * backward
            time += walk(length, chunks, HEAVIER * WORK[False] * scale, numbers, chain)
            time += chunks * (LINK[0] + LINK[1] * slots) + LAUNCHES[False]
        return time

    modelled = twice if reduced(spec) else guessed
    if length is not None:
        length = min(length, max(total, 1))
        return length, modelled(length, -(-total // length))
    best, least = max(total, 1), modelled(total, 1)
    guess = 2.0
    while lanes and total / guess >= WARMUP[itemsize]:
        length = -(-total // round(guess))
        length = -(-length // EVEN) * EVEN
        time = modelled(length, -(-total // length))
        if time < least:
            best, least = length, time
        guess *= 1.0625
    return best, least


@lru_cache(maxsize=4096)
def plan(
    spec: Spec,
    batch: int,
    total: int,
    width: int,
    itemsize: int,
    processors: int,
    *,
    backward: bool = False,
    length: int | None = None,
    warmup: int | None = None,
    corrections: int | None = None,
    tol: float | None = None,
) -> Plan:
    """The plan for these sizes; what is given is kept."""
    sizes = batch, total, width, itemsize, processors
    length, cost = chunk_length(spec, *sizes, backward, length)
    most = 1 if spec.jac_structure == "linear" else CORRECTIONS  # one is exact
    chunks = -(-total // length)
    lanes = batch * width * chunks
    block, unroll = layout(spec, width, lanes, itemsize, backward, chunks > 1)
    return Plan(
        length=length,
        warmup=warmups(spec, itemsize) if warmup is None else warmup,
        corrections=most if corrections is None else min(most, corrections),
        tol=TOLERANCE[itemsize] if tol is None else tol,
        block=block,
        unroll=unroll,
        cost=cost,
    )
