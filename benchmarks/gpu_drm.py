"""Checks and times the DRM on a GPU, at the published 125M shape.

    PYTHONPATH=. python benchmarks/gpu_drm.py [--out DIR] [--budget 200]

One run first checks small models of all paths and presets against float64 on the CPU; then it
measures, alone on the device. `--smoke` runs everything at tiny sizes, on a CPU too
(`TRITON_INTERPRET=1`), to test this script. The exit status is 1 if a check or a section failed.
`--only compile` measures `torch.compile`, which takes minutes to compile; it is left out otherwise.

Times are medians (`median`, `least`, `most`, in milliseconds a call) of single calls by events, or
of replays of a CUDA graph that holds several calls (`how` is `graph`). The published preset is not
captured: its LU factorization waits for the device. Rollouts and their gradients are timed by the
clock: `median` and `least` are both the faster of two calls. A training call is the forward and backward pass
of the cross entropy, without the optimizer.

The tolerance of a check is measured: four times the largest error that the same model makes in
float32 on the CPU, and 32 roundings of the largest entry.

Weights are as they are initialised, or trained: `STEPS` steps of AdamW (3e-4, batches of 16×512
bytes, bf16 autocast) on the text of Python's own library, a start only.

Results: `<out>/<date>-h200-drm.json` (the name has the device), with

    date, revision, command, device, torch, triton, cuda, seconds      where and how
    failures        sections that raised, with their trace; skipped: sections left out for time
    checks          rows: variant, preset, path; ok; by result the largest error, and the largest
                    part of its tolerance used; or the exception; on the parallel path what each
                    window took
    train           rows: variant, preset, precision, shape (B, T); parameters; eager and graph
                    times, tokens a second of either; peak bytes above weights and their gradients
    naturalize      rows: points, vectors a point, precision; forward, both
    memory          rows: backend; forward, both of the memory's scan (B, T, d_state)
    prefix          rows: shape (B, L, d_state), dtype of the increments, backend; forward, both of a
                    block's sums, single calls of both; error against float64, of the largest sum
    gap             rows: variant, weights, dt: for each block length the distance of the block path
                    from the recurrence, over the recurrence's movement
    rollout         rows: variant, weights, dt, shape: loop (time); largest norm of a state, mean
                    norm of a step; for each window corrections, looped windows, time, error against
                    the loop, remainder, error_estimate
    gradient        rows: variant, weights, dt, shape: loop, parallel (times of forward and
                    backward), corrections of both passes, largest difference of gradients
    compile         rows: variant: seconds of the first call, time, tokens a second, difference
"""

from __future__ import annotations

import sys

from gpu_drm_parts import Parts
from gpu_drm_rollouts import Rollouts
from harness import parser
from sessions import recorded, verdict


class Benchmark(Parts, Rollouts):
    """All sections."""


SECTIONS = ("checks", "train", "naturalize", "memory", "prefix", "gap", "gradient", "rollout")


def main() -> int:
    args = parser(__doc__, (*SECTIONS, "compile"), 200).parse_args()
    session = Benchmark(args)
    return verdict(session.found, recorded(session, args, SECTIONS))


if __name__ == "__main__":
    sys.exit(main())
