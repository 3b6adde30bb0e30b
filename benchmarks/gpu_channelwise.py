"""Checks and times the fused channelwise kernels on a GPU.

    PYTHONPATH=. python benchmarks/gpu_channelwise.py [--peer DIR] [--out DIR] [--budget 345]

One run first checks every case of `gpu_checks.py` against a float64 loop, in several processes,
which also fills Triton's cache; then it measures, alone on the device. `--peer` is a folder made by
`pip install --target DIR pararnn-torch`; that package runs in a process of its own. `--smoke` runs
everything at tiny sizes, on a CPU too (`TRITON_INTERPRET=1`), to test this script. The exit status
is 1 if a check or a section failed.

Times are medians of replays of a CUDA graph that holds several calls (`median`, `least`, `most`, in
milliseconds a call); what cannot be captured is timed call by call with events, and says so. The
drives are given: the input's matrix product is not part of a time, except in `layer` and `cudnn`.

Results: `<out>/<date>-h200-channelwise.json` (the name has the device), with

    date, command, device, torch, triton, cuda, seconds       where and how
    failures        sections that raised, with their trace; skipped: sections left out for time
    copy            bandwidth in bytes/s: of three ways to copy 1 GiB, the best one counts
    checks          one row a case: the fields of gpu_checks.Case; ok; iterations; fallback;
                    errors by result: largest error, and the largest part of its tolerance used
    giant           windows of a problem of more than 2³¹ numbers
    main            rows: cell, dtype, shape (B, T, D); floor, forward, backward, both (times in ms)
    sweep           rows: as main, and for auto and every fixed number of chunks the times `forward`
                    and `both`
    peer            rows: cell, shape; forward (recurrence only), both (cell with one input feature)
    cudnn           rows: cell, shape; forward, both (whole layer, as many inputs as channels)
    layer           rows: shape, precision; layer and gemm, forward and backward together
    newton          rows: norm, bias; iterations, residual, fallback, error (against float64),
                    auto, one (times)
    memory          rows: cell, shape; peak bytes above the inputs, bytes of outputs and saved states
    overhead        wall-clock microseconds a call: eager calls, decode steps eager and captured
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

HERE = Path(__file__).resolve()
RESULTS = HERE.parent / "results"
START = time.perf_counter()
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

GRU, LSTM = "ParaGRU[diag]", "ParaLSTM"
OTHERS = (
    "ParaSLSTM[sigmoid]", "ParaSLSTM[exp]", "ParaCfC[published]", "ParaCfC[consistent]", "ParaNLRU",
)  # fmt: skip
MAIN = (
    (64, 512, 1024), (128, 1024, 1024), (8, 2048, 1024), (1, 8192, 1024), (1, 131072, 256),
)  # fmt: skip
# B·T is 32768 in the first rows: the same bytes at every length.
SWEEP = (
    (256, 128, 1024), (128, 256, 1024), (64, 512, 1024), (32, 1024, 1024), (16, 2048, 1024),
    (8, 4096, 1024), (4, 8192, 1024), (2, 16384, 1024), (1, 32768, 1024),
    (128, 1024, 1024), (8, 2048, 1024), (1, 8192, 1024), (1, 131072, 256),
    (4, 4096, 256), (2, 4096, 512),
)  # fmt: skip
SHORT = ((64, 512, 1024), (8, 2048, 1024), (1, 8192, 1024), (1, 131072, 256))
COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
NORMS = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 8.0)
BIASES = (0.0, -2.0, -4.0)


def say(text: str) -> None:
    print(f"[{time.perf_counter() - START:6.1f} s] {text}", flush=True)


# -- measuring -------------------------------------------------------------------------------------


def summary(times: list[float]) -> dict[str, float]:
    """Median, least and most, in milliseconds."""
    return {
        "median": round(statistics.median(times), 5),
        "least": round(min(times), 5),
        "most": round(max(times), 5),
    }


class Clock:
    """Times calls on a device; on a CPU, once, only to run them."""

    def __init__(self, device: str):
        self.device, self.cuda = device, device == "cuda"
        self.stream = torch.cuda.Stream() if self.cuda else None
        if self.stream is not None:  # everything is on it, so that all of it can be captured
            torch.cuda.set_stream(self.stream)

    def events(self, run: Callable[[], object], repeats: int = 5) -> list[float]:
        """Times of single calls."""
        times = []
        for _ in range(repeats):
            begin, end = torch.cuda.Event(True), torch.cuda.Event(True)
            begin.record()
            run()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end))
        return times

    def eager(self, run: Callable[[], object], repeats: int = 5) -> dict[str, float]:
        if not self.cuda:
            return self.once(run)
        self.busy(run)
        return summary(self.events(run, repeats))

    def busy(self, run: Callable[[], object]) -> None:
        """Run until the clocks are up."""
        begin = time.perf_counter()
        while time.perf_counter() - begin < 0.03:
            run()
            torch.cuda.synchronize()

    def once(self, run: Callable[[], object]) -> dict[str, float]:
        begin = time.perf_counter()
        run()
        return summary([1e3 * (time.perf_counter() - begin)])

    def graph(self, run: Callable[[], object], repeats: int = 7) -> dict[str, float]:
        """Times of a call inside a captured graph of several."""
        if not self.cuda:
            return self.once(run)
        run()
        guess = min(self.events(run, 3))
        calls = int(min(20, max(2, 2 / max(guess, 1e-3))))
        repeats = repeats if guess < 20 else 3
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured, stream=self.stream):
            for _ in range(calls):
                run()
        self.busy(captured.replay)
        times = [t / calls for t in self.events(captured.replay, repeats)]
        del captured
        return summary(times)


def copy_bandwidth(clock: Clock) -> dict[str, Any]:
    """The best of three ways to copy 1 GiB: bytes read and written a second."""
    numbers = 2**28 if clock.cuda else 2**16
    x = torch.randn(numbers, device=clock.device)
    y = torch.empty_like(x)
    ways: dict[str, Callable[[], object]] = {
        "torch.mul": lambda: torch.mul(x, 1, out=y),
        "copy_": lambda: y.copy_(x),
    }
    if clock.cuda:
        ways["Triton"] = lambda: triton_copy(x, y)
    found = {}
    for name, run in ways.items():
        for _ in range(50 if clock.cuda else 1):
            run()
        times = clock.events(run, 15) if clock.cuda else [1.0]
        found[name] = 2 * x.nbytes / (1e-3 * statistics.median(times))
    best = max(found, key=lambda name: found[name])
    return {"bandwidth": found[best], "best": best, "ways": found}


def triton_copy(x: Tensor, y: Tensor) -> None:
    from gpu_copy import copy

    copy[(x.numel() // 4096,)](x, y, BLOCK=4096, num_warps=8)


# -- problems --------------------------------------------------------------------------------------


class Run:
    """One recurrence with given drives, ready to be timed."""

    def __init__(self, clock: Clock, cell: str, shape: tuple[int, ...], dtype: str, **extra: Any):
        from gpu_checks import make

        self.clock, self.extra = clock, extra
        self.B, self.T, self.D = shape
        kind = DTYPES.get(dtype, torch.float64)
        torch.manual_seed(0)
        self.cell = make(cell, self.D, device=clock.device, dtype=kind)
        with torch.no_grad():
            for m in self.cell.spec.map_list:
                getattr(self.cell, m.name).uniform_(-0.45, 0.45)
        width = self.cell.in_proj.out_features
        options = {"device": clock.device, "dtype": kind}
        self.u = torch.randn(self.B, self.T, width, **options).requires_grad_()
        self.bar = torch.randn(self.B, self.T, self.D, **options)
        gap = self.cell.spec.gap is not None
        self.dt = torch.rand(self.B, self.T, **options) if gap else None
        self.leaves = [self.u, *(p for n, p in self.cell.named_parameters() if "in_proj" not in n)]

    def solve(self, **settings: Any) -> Any:
        from pararnn import NewtonConfig, solve

        config = NewtonConfig(backend="fused", **settings)
        return solve(self.cell, drives=self.u, dt=self.dt, config=config)

    def forward(self, **settings: Any) -> dict[str, float]:
        def run() -> None:
            with torch.no_grad():
                self.solve(**settings)

        return self.clock.graph(run)

    def both(self, **settings: Any) -> dict[str, float]:
        return self.clock.graph(
            lambda: torch.autograd.grad(self.solve(**settings).output, self.leaves, self.bar)
        )

    def backward(self, **settings: Any) -> dict[str, float]:
        output = self.solve(**settings).output
        return self.clock.graph(
            lambda: torch.autograd.grad(output, self.leaves, self.bar, retain_graph=True)
        )

    def bytes(self) -> tuple[int, int]:
        """What must move forward: drives and states; and backward: drives, states, cotangents of
        the output and of the drives. Slots but the last are kept in float32."""
        own, G = self.u.element_size(), self.u.shape[2] // self.D
        states = own + (len(self.cell.spec.slots) - 1) * max(own, 4)
        gaps = 0 if self.dt is None else self.dt.nbytes
        lanes = self.B * self.T * self.D
        return lanes * (G * own + states) + gaps, lanes * ((2 * G + 1) * own + states) + gaps

    def floors(self, bandwidth: float) -> dict[str, float]:
        forward, backward = (1e3 * b / bandwidth for b in self.bytes())
        return {"forward": forward, "backward": backward, "both": forward + backward}


def fixed(T: int, chunks: int) -> dict[str, int]:
    return {"chunk_length": -(-T // chunks)}


def warm(job: tuple[str, str, int, str]) -> str:
    """Compile what a timing needs, in a worker: one chunk and several, few lanes and many."""
    cell, dtype, width, device = job
    clock = Clock(device)
    for lanes in (width, 66_000, 90_000) if clock.cuda else (width,):  # as plan.layout tells apart
        run = Run(clock, cell, (-(-lanes // width), 64, width), dtype)
        for length in (32, 64):
            torch.autograd.grad(run.solve(chunk_length=length).output, run.leaves, run.bar)
    return f"{cell} {dtype} {width}"


# -- sections --------------------------------------------------------------------------------------


class Session:
    """What all sections share, and the results so far."""

    def __init__(self, args: argparse.Namespace):
        self.smoke, self.budget, self.peer = args.smoke, args.budget, args.peer
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.clock = Clock(self.device)
        self.workers = args.workers
        self.found: dict[str, Any] = {"failures": {}, "skipped": []}
        self.bandwidth = 0.0

    def shapes(self, full: tuple[tuple[int, ...], ...]) -> list[tuple[int, ...]]:
        return [(2, 40, 8)] if self.smoke else list(full)

    def left(self) -> float:
        return self.budget - (time.perf_counter() - START)

    # Checks and compilation, in parallel.

    def checks(self) -> None:
        import gpu_checks

        listed = list(gpu_checks.small_jobs() if self.smoke else gpu_checks.jobs())
        listed = listed[:3] if self.smoke else listed
        wanted = [(c, d, w, self.device) for c, d, w in self.timed_kernels()]
        rows: list[dict[str, Any]] = []
        context = multiprocessing.get_context("spawn")
        peer = self.start_peer(warm=True) if self.peer else None
        with ProcessPoolExecutor(self.workers, mp_context=context) as pool:
            timings = [pool.submit(warm, job) for job in wanted]
            futures = [pool.submit(gpu_checks.run_job, (job, self.device)) for job in listed]
            for future in as_completed([*timings, *futures]):
                if self.left() < 0.55 * self.budget:
                    pool.shutdown(wait=False, cancel_futures=True)
                if future.cancelled():
                    continue
                try:
                    result = future.result()
                except Exception:  # a timing that does not compile fails again where it is timed
                    say(f"a worker failed:\n{traceback.format_exc()}")
                    continue
                if isinstance(result, str):
                    say(f"compiled {result}")
                    continue
                rows += result
                for row in result:
                    self.report(row)
        if peer is not None:
            peer.communicate()
            say("peer warmed up")
        self.found["checks"] = sorted(rows, key=lambda r: json.dumps(r, sort_keys=True))
        bad = [r for r in rows if not r["ok"]]
        cases = sum(map(len, listed))
        if len(rows) < cases:
            self.found["skipped"].append(f"{cases - len(rows)} cases of checks")
        say(f"checks: {len(rows) - len(bad)} of {len(rows)} cases pass, {cases} in all")

    @staticmethod
    def report(row: dict[str, Any]) -> None:
        import gpu_checks

        names = [f.name for f in gpu_checks.dataclasses.fields(gpu_checks.Case)]
        case = gpu_checks.Case(**{k: row[k] for k in names})
        if row["ok"]:
            name, worst = max(row["errors"].items(), key=lambda kv: kv[1]["of tolerance"])
            say(f"ok   {case}: {worst['of tolerance']:.2f} of tolerance ({name}), "
                f"{row['iterations']} corrections, seconds {row['seconds']}")  # fmt: skip
        else:
            what = row.get("exception") or {
                k: v for k, v in row["errors"].items() if not v["of tolerance"] <= 1
            }
            say(f"FAIL {case}: {what}")

    def timed_kernels(self) -> list[tuple[str, str, int]]:
        if self.smoke:
            return [(GRU, "float32", 8)]
        return [
            *((cell, dtype, 1024) for cell in OTHERS for dtype in DTYPES),
            *((LSTM, dtype, D) for dtype in DTYPES for D in (1024, 256)),
            *((GRU, dtype, D) for dtype in DTYPES for D in (1024, 256)),
            (GRU, "float32", 512),
            (GRU, "float64", 256),
        ]

    # Times, alone on the device.

    def copy(self) -> None:
        self.found["copy"] = copy_bandwidth(self.clock)
        self.bandwidth = self.found["copy"]["bandwidth"]
        ways = {k: f"{v / 1e12:.2f}" for k, v in self.found["copy"]["ways"].items()}
        say(f"copy bandwidth, TB/s: {ways}")

    def timed(self, cell: str, dtype: str, shape: tuple[int, ...]) -> dict[str, Any]:
        run = Run(self.clock, cell, shape, dtype)
        solution = run.solve()
        row = {
            "cell": cell,
            "dtype": dtype,
            "shape": shape,
            "floor": run.floors(self.bandwidth),
            "forward": run.forward(),
            "backward": run.backward(),
            "both": run.both(),
            "chunks": solution.chunks,
            "iterations": solution.iterations,
            "fallback": solution.fallback,
        }
        parts = ("forward", "backward", "both")
        ratios = ", ".join(
            f"{p} {row[p]['median']:.4f} ({row[p]['median'] / row['floor'][p]:.2f}×)" for p in parts
        )
        say(f"{cell} {dtype} {shape}: {ratios}, {row['chunks']} chunks")
        return row

    def main(self) -> None:
        rows = self.found["main"] = []
        for cell, dtype in ((GRU, "float32"), (LSTM, "float32"), (GRU, "bfloat16"),
                            (LSTM, "bfloat16")):  # fmt: skip
            for shape in self.shapes(MAIN):
                rows.append(self.timed(cell, dtype, shape))

    def others(self) -> None:
        rows = self.found["others"] = []
        for cell in OTHERS:
            for dtype in DTYPES:
                for shape in self.shapes(((8, 2048, 1024),)):
                    rows.append(self.timed(cell, dtype, shape))

    def sweep(self) -> None:
        rows = self.found["sweep"] = []
        plans = [(GRU, "float32", self.shapes(SWEEP))]
        plans += [(c, d, self.shapes(SHORT)) for c, d in ((LSTM, "float32"), (GRU, "bfloat16"))]
        for cell, dtype, shapes in plans:
            for shape in shapes:
                run = Run(self.clock, cell, shape, dtype)
                times: dict[str, Any] = {"auto": [run.forward(), run.both()]}
                for count in COUNTS if not self.smoke else COUNTS[:2]:
                    # Very long loops on a narrow problem cannot win, and take a long time.
                    if shape[1] // count < 16 or (shape[1] // count > 33_000 and shape[0] == 1):
                        continue
                    settings = fixed(shape[1], count)
                    times[str(count)] = [run.forward(**settings), run.both(**settings)]
                # What auto does is timed again at the end: the device's clock drifts.
                again = [run.forward(), run.both()]
                times["auto"] = [
                    min(pair, key=lambda t: t["median"])
                    for pair in zip(times["auto"], again, strict=True)
                ]
                row = {
                    "cell": cell,
                    "dtype": dtype,
                    "shape": shape,
                    "floor": run.floors(self.bandwidth),
                    "chunks": run.solve().chunks,
                    "times": {k: dict(zip(("forward", "both"), v, strict=True))
                              for k, v in times.items()},
                }  # fmt: skip
                rows.append(row)
                ratios = []
                for part in ("forward", "both"):
                    best = min(
                        (k for k in row["times"] if k != "auto"),
                        key=lambda k: row["times"][k][part]["median"],
                    )
                    ratio = (
                        row["times"]["auto"][part]["median"] / row["times"][best][part]["median"]
                    )
                    ratios.append(f"{part} {ratio:.3f} of best ({best} chunks)")
                say(f"sweep {cell} {dtype} {shape}: auto ({row['chunks']} chunks) {ratios}")

    def start_peer(self, warm: bool) -> subprocess.Popen[str]:
        shapes = [list(s) for s in self.shapes(MAIN)]
        job = json.dumps({"shapes": shapes, "warm": warm, "device": self.device})
        environment = {**os.environ, "PYTHONPATH": str(Path(self.peer).resolve())}
        return subprocess.Popen(
            [sys.executable, str(HERE), "--as-peer", job],
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd="/",
        )

    def peers(self) -> None:
        if not self.peer:
            self.found["skipped"].append("peer")
            return
        out, _ = self.start_peer(warm=False).communicate(timeout=120)
        self.found["peer"] = json.loads(out.splitlines()[-1])
        for row in self.found["peer"]["rows"]:
            say(f"peer {row}")

    def cudnn(self) -> None:
        rows = self.found["cudnn"] = []
        for name, module in (("GRU", torch.nn.GRU), ("LSTM", torch.nn.LSTM)):
            for B, T, D in self.shapes(MAIN[:4]):
                layer = module(D, D, batch_first=True, device=self.device)
                x = torch.randn(B, T, D, device=self.device, requires_grad=True)
                bar = torch.randn(B, T, D, device=self.device)
                leaves = [x, *layer.parameters()]

                def forward(layer: Any = layer, x: Tensor = x) -> None:
                    with torch.no_grad():
                        layer(x)

                def both(
                    layer: Any = layer, x: Tensor = x, leaves: Any = leaves, bar: Tensor = bar
                ) -> None:
                    torch.autograd.grad(layer(x)[0], leaves, bar)

                row = {
                    "cell": name,
                    "shape": (B, T, D),
                    "forward": self.clock.eager(forward, 3),
                    "both": self.clock.eager(both, 3),
                }
                rows.append(row)
                say(f"cuDNN {name} {row['shape']}: {row['forward']['median']:.3f}, "
                    f"{row['both']['median']:.3f}")  # fmt: skip

    def layer(self) -> None:
        """A whole layer, forward and backward, beside its matrix products alone."""
        from pararnn import ParaGRU, ParaRNN

        rows = self.found["layer"] = []
        for precision in ("float32", "TF32", "bfloat16"):
            torch.set_float32_matmul_precision("high" if precision == "TF32" else "highest")
            dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
            for B, T, D in self.shapes((*MAIN[:2], MAIN[2])):
                options = {"device": self.device, "dtype": dtype}
                module = ParaRNN(ParaGRU(D, D, **options))
                projection = torch.nn.Linear(D, 3 * D, **options)
                x = torch.randn(B, T, D, **options).requires_grad_()
                bar, wide = torch.randn(B, T, D, **options), torch.randn(B, T, 3 * D, **options)

                def layer(module: Any = module, x: Tensor = x, bar: Tensor = bar) -> None:
                    torch.autograd.grad(module(x)[0], [x, *module.parameters()], bar)

                def gemm(module: Any = projection, x: Tensor = x, bar: Tensor = wide) -> None:
                    torch.autograd.grad(module(x), [x, *module.parameters()], bar)

                row = {
                    "precision": precision,
                    "shape": (B, T, D),
                    "gemm": self.clock.graph(gemm, 5),
                    "layer": self.clock.graph(layer, 5),
                }
                rows.append(row)
                ratio = row["layer"]["median"] / row["gemm"]["median"]
                say(f"layer {precision} {row['shape']}: {row['layer']['median']:.3f} of gemm "
                    f"{row['gemm']['median']:.3f}: {ratio:.3f}×")  # fmt: skip
        torch.set_float32_matmul_precision("highest")

    def newton(self) -> None:
        """Corrections over the size of the recurrent weights and the bias of the update gate."""
        rows = self.found["newton"] = []
        B, T, D = self.shapes(((4, 4096, 256),))[0]
        for bias in BIASES:
            for norm in NORMS:
                run = Run(self.clock, GRU, (B, T, D), "float32")
                wide = Run(self.clock, GRU, (B, T, D), "float64")
                for r in (run, wide):
                    r.cell.max_recurrent_norm = None
                with torch.no_grad():
                    run.u[..., :D] += bias
                    wide.u.copy_(run.u)
                    for m in run.cell.spec.map_list:
                        weight = getattr(run.cell, m.name)
                        weight.mul_(norm / 0.45)
                        getattr(wide.cell, m.name).copy_(weight)
                    exact = wide.solve(chunk_length=T).states
                    solution, loop = run.solve(), run.solve(chunk_length=T)
                    row = {
                        "norm": norm,
                        "bias": bias,
                        "shape": (B, T, D),
                        "chunks": solution.chunks,
                        "iterations": solution.iterations,
                        "residual": solution.residual_history[0],
                        "left": solution.residual,
                        "fallback": solution.fallback,
                        "error": float((solution.states - exact).abs().max()),
                        "error of one chunk": float((loop.states - exact).abs().max()),
                        "auto": run.forward(),
                        "one": run.forward(chunk_length=T),
                    }
                rows.append(row)
                say(f"newton norm {norm} bias {bias}: {row['iterations']} corrections, first "
                    f"mismatch {row['residual']:.1e}, fallback {row['fallback']}, error "
                    f"{row['error']:.1e} (one chunk {row['error of one chunk']:.1e}), "
                    f"{row['auto']['median']:.3f} against {row['one']['median']:.3f}")  # fmt: skip

    def memory(self) -> None:
        rows = self.found["memory"] = []
        for cell in (GRU, LSTM):
            for shape in self.shapes((MAIN[0], MAIN[2], MAIN[4])):
                run = Run(self.clock, cell, shape, "float32")
                if not self.clock.cuda:
                    continue
                torch.autograd.grad(run.solve().output, run.leaves, run.bar)
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                solution = run.solve()
                after = torch.cuda.memory_allocated() - before
                torch.autograd.grad(solution.output, run.leaves, run.bar)
                peak = torch.cuda.max_memory_allocated() - before
                lanes = run.B * run.T * run.D
                saved = lanes * run.u.element_size() * len(run.cell.spec.slots)
                row = {
                    "cell": cell,
                    "shape": shape,
                    "chunks": solution.chunks,
                    "peak": peak,
                    "after forward": after,
                    "needed": saved + run.u.nbytes,
                    "one boundary": run.B * run.D * run.u.element_size() * solution.chunks,
                }
                rows.append(row)
                say(f"memory {row}")
                del solution

    def overhead(self) -> None:
        from pararnn import ParaGRU, ParaRNN

        found: dict[str, Any] = {}

        def wall(run: Callable[[], object], calls: int) -> float:
            """Microseconds a call, as the caller sees them."""
            calls = calls if self.clock.cuda else 2
            for _ in range(min(calls, 20)):
                run()
            self.synchronize()
            begin = time.perf_counter()
            for _ in range(calls):
                run()
            self.synchronize()
            return round(1e6 * (time.perf_counter() - begin) / calls, 1)

        shape = (2, 64, 64) if self.clock.cuda else (2, 8, 8)
        run = Run(self.clock, GRU, shape, "float32")

        def forward() -> None:
            with torch.no_grad():
                run.solve()

        def both() -> None:
            torch.autograd.grad(run.solve().output, run.leaves, run.bar)

        found["solve, forward"] = wall(forward, 200)
        found["solve, forward and backward"] = wall(both, 200)
        found["graph, forward"] = 1e3 * run.forward()["median"]
        found["graph, forward and backward"] = 1e3 * run.both()["median"]
        D = 1024 if self.clock.cuda else 8
        layer = ParaRNN(ParaGRU(D, D, device=self.device))
        x = torch.randn(8, D, device=self.device)
        with torch.no_grad():
            state = layer.step(x)[1].clone()
            out = torch.empty_like(state)
            found["decode step"] = wall(lambda: layer.step(x, state, out=out), 200)
            found["decode step, captured"] = (
                1e3 * self.clock.graph(lambda: layer.step(x, state, out=out))["median"]
            )
            gemm = layer.cells[0].in_proj
            found["its projection, captured"] = 1e3 * self.clock.graph(lambda: gemm(x))["median"]
            other = torch.nn.GRUCell(D, D, device=self.device)
            h = torch.randn(8, D, device=self.device)
            found["nn.GRUCell step"] = wall(lambda: other(x, h), 200)
            found["nn.GRUCell step, captured"] = (
                1e3 * self.clock.graph(lambda: other(x, h))["median"]
            )
        self.found["overhead"] = found
        say(f"overhead, µs: { {k: round(v, 1) for k, v in found.items()} }")

    def giant(self) -> None:
        import gpu_checks

        sizes = (400, 2, 8) if self.smoke else (700_001, 3, 1024)
        row = self.found["giant"] = gpu_checks.giant(self.device, *sizes)
        say(f"giant {row}")

    def synchronize(self) -> None:
        if self.clock.cuda:
            torch.cuda.synchronize()


SECTIONS = (
    "checks", "copy", "main", "giant", "peers", "sweep", "layer", "newton", "cudnn", "memory",
    "overhead", "others",
)  # fmt: skip


def as_peer(job: dict[str, Any]) -> None:
    """Runs inside a process that sees pararnn-torch instead of this package."""
    from pararnn.kernels.fused_newton import fused_newton

    import pararnn
    from pararnn import NewtonConfig, ParaGRU, ParaLSTM, newton_apply

    clock, device = Clock(job["device"]), job["device"]
    backend = "auto" if device == "cuda" else "eager"
    config = NewtonConfig(scan_backend=backend, residual_atol=None, residual_fail=None)
    rows = []
    for name, kind in (("ParaGRU", ParaGRU), ("ParaLSTM", ParaLSTM)):
        for B, T, D in job["shapes"]:
            if job["warm"]:
                B, T = 1, min(T, 2048)
            cell = kind(1, D).to(device)
            x = torch.randn(B, T, 1, device=device, requires_grad=True)
            row: dict[str, Any] = {"cell": name, "shape": (B, T, D)}
            try:
                states = newton_apply(cell, x, config)
                bar = torch.randn_like(states)
                if device == "cuda":
                    wx = torch.randn(B, T, 3 * D, device=device)

                    def forward(cell: Any = cell, wx: Tensor = wx) -> None:
                        with torch.no_grad():
                            fused_newton(cell, wx, max_iters=3, omega=1.0, h0=None)

                    row["forward"] = clock.eager(forward)

                def both(
                    config: Any = config, cell: Any = cell, x: Tensor = x, bar: Tensor = bar
                ) -> None:
                    states = newton_apply(cell, x, config)
                    torch.autograd.grad(states, [x, *cell.parameters()], bar)

                row["both"] = clock.eager(both)
                row["both, its defaults"] = clock.eager(lambda: both(None))
            except Exception as error:
                row["exception"] = repr(error)[:500]
            rows.append(row)
    version = getattr(pararnn, "__version__", None)
    print(json.dumps({"version": version, "rows": rows}))


def options(
    about: str, sections: tuple[str, ...], budget: float, peers: str | None = None
) -> argparse.ArgumentParser:
    """What every script for a GPU is told; ``peers`` names those it is compared with."""
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    parser.add_argument("--revision", default="not given", help="of the code, for the record")
    parser.add_argument(
        "--budget", type=float, default=budget, help="seconds; sections are left out"
    )
    parser.add_argument("--only", action="append", choices=sections, help="a section; repeatable")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, to test the script")
    if peers is None:
        parser.set_defaults(peer=None)
        return parser
    parser.add_argument("--peer", help=f"folder with {peers}, made by pip install --target")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 1))
    parser.add_argument("--as-peer", help=argparse.SUPPRESS)
    return parser


def verdict(found: dict[str, Any], target: Path, *more: dict[str, Any]) -> int:
    """Say how a run ended; the exit status is 1 if a check, or one of ``more``, or a section failed."""
    bad = [r for r in (*found.get("checks", ()), *more) if not r.get("ok")]
    say(f"wrote {target}; {len(bad)} checks failed, sections failed: {list(found['failures'])}, "
        f"left out: {found['skipped']}")  # fmt: skip
    return int(bool(bad or found["failures"]))


def recorded(
    session: Any, args: argparse.Namespace, topic: str, sections: tuple[str, ...], least: float
) -> Path:
    """Run the sections that were asked for, while more than ``least`` seconds are left, and write
    the results after each of them; returns the file."""
    import triton

    cuda = session.clock.cuda
    words = [f"PYTHONPATH=. python benchmarks/gpu_{topic}.py", "--peer DIR" if args.peer else ""]
    session.found = found = {
        "date": datetime.date.today().isoformat(),
        "revision": args.revision,
        "command": " ".join(filter(None, words)),
        "device": torch.cuda.get_device_name() if cuda else "CPU",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "unit": "ms",
        "seconds": 0.0,
        **session.found,
    }
    args.out.mkdir(parents=True, exist_ok=True)
    kind = found["device"].split()[-1].lower()
    target = args.out / f"{found['date']}-{kind}-{topic}{'-smoke' * args.smoke}.json"
    say(f"{found['device']}, torch {found['torch']}, triton {found['triton']}")
    for name in args.only or sections:
        if session.left() < least and not args.only:
            found["skipped"].append(name)
            say(f"{name}: left out, no time")
            continue
        say(f"== {name}")
        gc.collect()
        gc.freeze()  # every capture of a graph collects garbage
        try:
            getattr(session, name)()
        except Exception:
            found["failures"][name] = traceback.format_exc()
            say(f"{name} failed:\n{found['failures'][name]}")
        if cuda:
            try:
                torch.cuda.empty_cache()
            except Exception:  # the device is lost; other processes may still have theirs
                say(traceback.format_exc())
        found["seconds"] = round(time.perf_counter() - START, 1)
        target.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return target


def main() -> int:
    args = options(__doc__, SECTIONS, 345, "pararnn-torch").parse_args()
    if args.as_peer:
        as_peer(json.loads(args.as_peer))
        return 0
    sys.path[:0] = [str(HERE.parent), str(HERE.parent.parent)]
    session = Session(args)
    target = recorded(session, args, "channelwise", SECTIONS, least=15)
    found = session.found
    return verdict(found, target, *[found["giant"]] * ("giant" in found))


if __name__ == "__main__":
    sys.exit(main())
