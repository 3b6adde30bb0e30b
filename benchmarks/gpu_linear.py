"""Checks and times the scans and mixers of the linear family on a GPU.

    PYTHONPATH=. python benchmarks/gpu_linear.py [--peer DIR] [--out DIR] [--budget 150]

One run first checks scans and mixers against float64 loops, in several processes, which also fills
Triton's cache; then it measures, alone on the device. `--peer` is a folder made by
`pip install --no-deps --target DIR mingru-scans accelerated-scan fla-core`; what is in it runs in
processes of their own. `--smoke` runs everything at tiny sizes, on a CPU too
(`TRITON_INTERPRET=1`), to test this script. The exit status is 1 if a check or a section failed.

Times are medians of replays of a CUDA graph that holds several calls (`median`, `least`, `most`, in
milliseconds a call; `how` is `graph`); what cannot be captured is timed call by call with events
(`how` is `events`, `why` the reason). Coefficients and inputs of a scan are given.

Tolerances of scans are bounds, not guesses. Every step may lose `ROUNDINGS` roundings of what its
terms add up to without their signs, and the recurrence carries such an error on: the same loop over
absolute values gives the bound of every entry, of a state and of a cotangent. A result that is
stored in half precision may be off by half a unit in its last place more. For mixers the tolerance
is measured: four times the largest error that the loop over the hand-written steps makes in the same
dtype on the CPU, and a few roundings of the largest entry. Their inputs pick a row of the weights
and scale it by a power of two, so that drives are the same numbers in every dtype: an angle that is
rounded to a grid must not depend on how a matrix product rounds.

Results: `<out>/<date>-h200-linear.json` (the name has the device), with

    date, revision, command, device, torch, triton, cuda, seconds      where and how
    failures        sections that raised, with their trace; skipped: sections left out for time
    versions        of the peers
    copy            bandwidth in bytes/s: of three ways to copy 1 GiB, the best one counts
    checks          one row a case: what, dtype, case; ok; by result the largest error, and the
                    largest part of its tolerance used; or the exception
    scan            rows: coefficients, dtype, shape (B, T, D); floor, forward, both (times in ms:
                    states alone; states and gradients), error against float64
    peers           rows: peer, layout, shape; forward, both, error; or the exception
    delta           rows of the delta rule: library, dtype, shape (B, T, heads, rows and columns of a
                    state); floor (queries, keys, values in and outputs out; backward all of them and
                    their cotangents), forward, both, error against float64
    layers          rows: library, mixer, precision, shape; `both`, forward and backward together, as
                    the times above say; `eager`, the same call by call; peak bytes of such a call
                    above what was there before it
    groups          rows as those of layers, of layers that run `samples` of the batch at a time and
                    compute each anew in the backward pass (torch.utils.checkpoint without the state
                    of random numbers, so that a graph can hold it)
    gemm            rows: mixer, precision: the matrix products of the layer alone
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from harness import DTYPES, Row, attempt, brief, calls, checked, parser, say, tell
from linear_checks import CASES, CHECKED, check_mixer, check_scan
from linear_peers import PACKAGES, PEER, PEERS, WARP, as_peer, peer_mixer, see_peers
from linear_problems import (
    COEFFICIENTS,
    DELTA,
    LAYER,
    LAYERS,
    PRECISIONS,
    SAMPLES,
    SHAPES,
    SMOKE,
    SMOKE_DELTA,
    Grouped,
    Peer,
    delta_problem,
    delta_row,
    delta_rule,
    layer_problem,
    layer_rows,
    mixer,
    own_scan,
    problem,
    scan_row,
)
from sessions import Session, pooled, recorded, source, verdict
from torch import nn

# -- jobs of the workers ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """What a worker does, in a process of its own: checks, or compiling what will be timed."""

    kind: str
    name: str = ""
    dtype: str = "float32"
    widths: tuple[int, ...] = (1024, 256)
    device: str = "cpu"
    backend: str = "auto"
    peer: str = ""
    smoke: bool = False

    def __str__(self) -> str:
        return " ".join(filter(None, (self.kind, self.name, self.dtype)))


def jobs(device: str, backend: str, peer: str | None, smoke: bool) -> Iterator[Job]:
    """The longest first."""
    common: dict[str, Any] = {"device": device, "backend": backend, "smoke": smoke}
    for name in reversed(LAYERS):
        for kind in ("layer", "groups"):
            yield Job(kind, name, **common)
    for dtype in DTYPES:
        yield Job("scan", "", dtype, **common)
        yield Job("delta", "pararnn", dtype, **common)
    for name in ("linear_scan", "matrix_scan", "parallel_scan_log"):
        for dtype in DTYPES:
            yield Job("cases", name, dtype, **common)
    for name in reversed(CHECKED):
        for dtype in DTYPES:
            yield Job("mixer", name, dtype, **common)
    if peer:
        for name in ("DeltaMinGRU", "GivensMinGRU", "RotationMinGRU", "MinGRU", "SignedMinGRU"):
            yield Job("peer layer", name, peer=peer, **common)
        for width in (1024, 256):  # many variants to compile
            yield Job("peer", "fla", widths=(width,), peer=peer, **common)
        for name in PEERS[1:]:
            yield Job("peer", name, peer=peer, **common)


def one_of_each(listed: list[Job]) -> list[Job]:
    """The first job of every kind, and of every scan."""
    return list(
        {(j.kind, j.name if j.kind == "cases" else ""): j for j in reversed(listed)}.values()
    )


def work(job: Job) -> list[Row]:
    """Rows of checks; none for a job that only compiles."""
    torch.set_num_threads(1)
    if job.peer:
        see_peers(job.peer)
    if job.kind == "mixer":
        return [
            judged(job, start, partial(check_mixer, job.name, job.dtype, start, job.device))
            for start in ("given start", "own start")
        ]
    if job.kind == "cases":
        cases = [c for c in CASES if c.scan == job.name]
        return [
            judged(job, str(c), partial(check_scan, c, job.dtype, job.device, job.backend))
            for c in (cases[:2] if job.smoke else cases)
        ]
    compile_for(job)
    return []


def judged(job: Job, case: str, check: Callable[[], Row]) -> Row:
    labels = {"what": job.name, "dtype": job.dtype, "case": case}
    return checked(labels, lambda: {"errors": check()})


def compile_for(job: Job) -> None:
    """Run once what will be timed."""
    if job.kind == "scan":
        for shape in [SMOKE] if job.smoke else SHAPES:
            leaves, bar = problem("sigmoid", shape, job.dtype, job.device)
            for call in calls(own_scan(job.backend), leaves, bar).values():
                call()
    elif job.kind == "delta":
        for B, _, *sizes in [SMOKE_DELTA] if job.smoke else DELTA:
            leaves, bar = delta_problem((B, 256, *sizes), job.dtype, job.device)
            for call in calls(delta_rule(job.name, job.backend), leaves, bar).values():
                call()
    elif job.kind == "peer":
        peer = PEER[job.name]()
        for shape in [SMOKE] if job.smoke else [(2, 512, width) for width in job.widths]:
            leaves, bar = problem("sigmoid", shape, "float32", job.device)
            leaves, bar = peer.own(leaves, bar)
            for call in calls(peer.run, leaves, bar).values():
                call()
    elif job.kind in ("layer", "groups", "peer layer"):
        B, T, D = SMOKE if job.smoke else LAYER
        build = peer_mixer if job.kind == "peer layer" else mixer
        layer = build(job.name, D, D).to(job.device)
        for count in SAMPLES if job.kind == "groups" else (B,):
            leaves, bar = layer_problem(layer, (count, T, D), job.device)
            torch.autograd.grad(layer(leaves[0]), leaves, bar, allow_unused=True)


# -- sections --------------------------------------------------------------------------------------


class Linear(Session):
    """The sections."""

    topic, script = "linear", "gpu_linear.py"

    def __init__(self, args: argparse.Namespace):
        super().__init__(args)
        self.backend = args.backend or ("fused" if self.clock.cuda else "auto")
        self.found["versions"] = versions(self.peer)
        self.build: subprocess.Popen[str] | None = None
        self.shapes = [SMOKE] if self.smoke else list(SHAPES)
        self.layer_shape = SMOKE if self.smoke else LAYER

    def add(self, section: str, row: Row, *labels: str) -> None:
        self.found.setdefault(section, []).append(row)
        say(f"{section} {' '.join(str(row[k]) for k in labels if k in row)}: {brief(row)}")

    # Checks and compilation, in parallel.

    def warm(self) -> None:
        """Only compile what is timed."""
        listed = jobs(self.device, self.backend, None, self.smoke)
        tasks = [(work, job) for job in listed if job.kind not in ("cases", "mixer")]
        for job, found in pooled(tasks, self.workers, self.left()):
            say(f"compiled {job}: {found}")

    def checks(self) -> None:
        rows = self.found["checks"] = []
        if self.peer and self.clock.cuda:
            self.build = self.started({"task": "build"}, quiet=True)
        listed = list(jobs(self.device, self.backend, self.peer, self.smoke))
        listed = one_of_each(listed) if self.smoke else listed
        tasks = [(work, job) for job in listed]
        late = []
        for job, found in pooled(tasks, self.workers, self.left() - 0.4 * self.budget, fresh=True):
            if isinstance(found, TimeoutError):
                late.append(str(job))
            elif isinstance(found, Exception):
                say(f"{job} failed: {found!r}")
                self.found.setdefault("uncompiled", []).append(str(job))
            else:
                say(f"done {job}")
                rows += found
                for row in found:
                    tell(f"{row['what']} {row['dtype']} {row['case']}", row)
        if late:
            self.lacks(f"checks and compilation: {', '.join(late)}")
            say(f"out of time for {late}")
        rows.sort(key=lambda r: (r["what"], r["dtype"], r["case"]))
        say(f"checks: {sum(r['ok'] for r in rows)} of {len(rows)} cases pass")

    # Times, alone on the device.

    def floor(self, shape: tuple[int, ...], dtype: str, forward: int, both: int) -> Row:
        """Of so many tensors that must move."""
        one = self.milliseconds(math.prod(shape) * DTYPES[dtype].itemsize)
        return {"forward": forward * one, "both": both * one}

    def scan(self) -> None:
        """Forward moves a, b and h; backward a, h, the cotangent of h, and those of a and b."""
        own = Peer("(B, T, D)", own_scan(self.backend))
        for dtype in DTYPES:
            for coefficients in COEFFICIENTS:
                for shape in self.shapes:
                    labels = {"coefficients": coefficients, "dtype": dtype, "shape": shape}
                    labels["floor"] = self.floor(shape, dtype, 3, 8)
                    run = partial(scan_row, self.clock, own, coefficients, shape, dtype)
                    self.add("scan", attempt(labels, run), "dtype", "shape", "coefficients")

    def delta(self) -> None:
        shapes = [SMOKE_DELTA] if self.smoke else list(DELTA)
        rows = [
            attempt(
                {"library": "pararnn", "dtype": dtype, "shape": shape},
                partial(delta_row, self.clock, "pararnn", self.backend, shape, dtype),
            )
            for dtype in DTYPES
            for shape in shapes
        ]
        rows += self.peer_rows({"task": "delta", "shapes": shapes}, 40)
        for row in rows:
            row["floor"] = self.floor(row["shape"], row["dtype"], 4, 12)
            self.add("delta", row, "library", "dtype", "shape")

    def peers(self, names: tuple[str, ...] = PEERS) -> None:
        self.found.setdefault("peers", [])
        for name in names:  # one that fails takes no other with it
            for row in self.peer_rows({"task": "scans", "names": [name]}, 40):
                self.add("peers", row, "peer", "shape")

    def layers(self) -> None:
        import pararnn

        B, T, D = self.layer_shape
        for row in layer_rows(self.clock, mixer, self.layer_shape, library="pararnn"):
            try:
                x = torch.zeros(B, T, D, device=self.device)
                row["path"] = str(pararnn.explain(mixer(row["mixer"], D, D).to(self.device), x))
            except Exception as error:
                row["path"] = repr(error)[:200]
            self.add("layers", row, "library", "mixer", "precision")

    def peer_layers(self) -> None:
        for row in self.peer_rows({"task": "layers", "shapes": [self.layer_shape]}, 60):
            self.add("layers", row, "library", "mixer", "precision")

    def groups(self) -> None:
        for samples in SAMPLES:

            def build(*given: Any, samples: int = samples) -> nn.Module:
                return Grouped(mixer(*given), samples)

            for row in layer_rows(self.clock, build, self.layer_shape, samples=samples):
                self.add("groups", row, "samples", "mixer", "precision")

    def gemm(self) -> None:
        B, T, D = self.layer_shape
        for name in LAYERS:
            width = mixer(name, D, D).in_proj.out_features
            projection = nn.Linear(D, width, device=self.device)
            leaves, _ = layer_problem(projection, (B, T, D), self.device)
            bar = torch.randn(B, T, width, device=self.device)
            for precision, setting in PRECISIONS.items():
                torch.set_float32_matmul_precision(setting)
                call = calls(lambda x, *_, m=projection: m(x), leaves, bar)["both"]
                row = {"mixer": name, "precision": precision, "both": self.clock.measured(call)}
                self.add("gemm", row, "mixer", "precision")
        torch.set_float32_matmul_precision("highest")

    def warp(self) -> None:
        """accelerated-scan's CUDA kernels, if they could be built meanwhile."""
        if self.build is None:
            self.lacks(WARP)
            return
        try:
            status = self.build.wait(timeout=max(1, self.left() - 15))
        except subprocess.TimeoutExpired:
            self.build.kill()
            self.lacks(f"{WARP} (not built in time)")
            return
        if status:
            self.lacks(f"{WARP} (does not build here)")
            return
        self.peers((WARP,))

    # Processes of peers.

    def started(self, job: Row, quiet: bool = False) -> subprocess.Popen[str]:
        architecture = os.environ.get("TORCH_CUDA_ARCH_LIST", "9.0")
        job = {"shapes": self.shapes} | job
        return self.start(job, source(), quiet, TORCH_CUDA_ARCH_LIST=architecture)

    def peer_rows(self, job: Row, limit: float) -> Iterator[Row]:
        if not self.peer:
            self.lacks(f"peers' {job['task']}")
            return
        what = f"{job.get('names', 'peers')}, {job['task']}"
        yield from self.rows_of(self.started(job), what, limit)


SECTIONS = (
    "checks",
    "copy",
    "scan",
    "layers",
    "peers",
    "peer_layers",
    "gemm",
    "groups",
    "delta",
    "warp",
)


def versions(folder: str | None) -> dict[str, str]:
    found: dict[str, str] = {}
    if folder is None:
        return found
    for name in PACKAGES:
        for distribution in importlib.metadata.distributions(name=name, path=[folder]):
            found[name] = distribution.version
    return found


def main() -> int:
    made = parser(__doc__, (*SECTIONS, "warm"), 150, "the peers")
    made.add_argument("--backend", choices=("auto", "eager", "fused"), help="of the scans")
    args = made.parse_args()
    if args.as_peer:
        as_peer(json.loads(args.as_peer))
        return 0
    session = Linear(args)
    target = recorded(session, args, SECTIONS)
    if session.build is not None and session.build.poll() is None:
        session.build.kill()
    return verdict(session.found, target)


if __name__ == "__main__":
    sys.exit(main())
