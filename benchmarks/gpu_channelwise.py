"""Checks and times the fused channelwise kernels on a GPU.

    PYTHONPATH=. python benchmarks/gpu_channelwise.py [--peer DIR] [--out DIR] [--budget 345]

One run first checks every case of `gpu_cases.py` against a float64 loop, in several processes,
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

import json
import sys
from functools import partial
from typing import Any

import torch
from channelwise_problems import (
    BIASES,
    COUNTS,
    GRU,
    LSTM,
    MAIN,
    NORMS,
    OTHERS,
    SHORT,
    SMOKE,
    SWEEP,
    Run,
    as_peer,
    fixed,
    warm,
)
from gpu_cases import giant, jobs, small_jobs
from gpu_checks import case_of, run_job
from harness import DTYPES, Row, brief, calls, parser, say, tell
from sessions import Session, pooled, recorded, verdict
from torch import Tensor

# -- sections --------------------------------------------------------------------------------------


class Channelwise(Session):
    """The sections."""

    topic, script, least = "channelwise", "gpu_channelwise.py", 15.0

    def shapes(self, full: tuple[tuple[int, ...], ...]) -> list[tuple[int, ...]]:
        return [SMOKE] if self.smoke else list(full)

    def floors(self, run: Run) -> dict[str, float]:
        forward, backward = map(self.milliseconds, run.bytes())
        return {"forward": forward, "backward": backward, "both": forward + backward}

    # Checks and compilation, in parallel.

    def compile(self) -> list[tuple[Any, Any]]:
        return [(warm, (c, d, w, self.device)) for c, d, w in self.timed_kernels()]

    def warm(self) -> None:
        """Only compile what is timed."""
        for job, found in pooled(self.compile(), self.workers, self.left()):
            say(f"compiled {job}: {found}")

    def checks(self) -> None:
        listed = list(small_jobs() if self.smoke else jobs())[: 3 if self.smoke else None]
        check = partial(run_job, device=self.device)
        tasks = [*self.compile(), *((check, cases) for cases in listed)]
        peer = self.start_peer(warm=True) if self.peer else None
        rows = self.found["checks"] = []
        for job, found in pooled(tasks, self.workers, self.left() - 0.5 * self.budget):
            if isinstance(found, Exception):  # what does not compile fails again where it is timed
                say(f"a worker failed: {job}: {found!r}")
            elif isinstance(found, str):
                say(f"compiled {found}")
            else:
                rows += found
                for row in found:
                    tell(str(case_of(row)), row)
        if peer is not None:
            peer.communicate()
            say("peer warmed up")
        rows.sort(key=lambda r: json.dumps(r, sort_keys=True))
        good, cases = sum(r["ok"] for r in rows), sum(map(len, listed))
        if len(rows) < cases:
            self.lacks(f"{cases - len(rows)} cases of checks")
        say(f"checks: {good} of {len(rows)} cases pass, {cases} in all")

    def timed_kernels(self) -> list[tuple[str, str, int]]:
        if self.smoke:
            return [(GRU, "float32", SMOKE[2])]
        return [
            *((cell, dtype, 1024) for cell in OTHERS for dtype in DTYPES),
            *((LSTM, dtype, D) for dtype in DTYPES for D in (1024, 256)),
            *((GRU, dtype, D) for dtype in DTYPES for D in (1024, 256)),
            (GRU, "float32", 512),
            (GRU, "float64", 256),
        ]

    # Times, alone on the device.

    def timed(self, cell: str, dtype: str, shape: tuple[int, ...]) -> dict[str, Any]:
        run = Run(self.clock, cell, shape, dtype)
        solution = run.solve()
        row = {
            "cell": cell,
            "dtype": dtype,
            "shape": shape,
            "floor": self.floors(run),
            "forward": run.forward(),
            "backward": run.backward(),
            "both": run.both(),
            "chunks": solution.chunks,
            "iterations": solution.iterations,
            "fallback": solution.fallback,
        }
        say(f"{cell} {dtype} {shape}: {brief(row)}, {row['chunks']} chunks")
        return row

    def main(self) -> None:
        rows = self.found["main"] = []
        for cell, dtype in ((GRU, "float32"), (LSTM, "float32"), (GRU, "bfloat16"),
                            (LSTM, "bfloat16")):  # fmt: skip
            for shape in self.shapes(MAIN):
                rows.append(self.timed(cell, dtype, shape))

    def others(self) -> None:
        rows = self.found["others"] = []
        for cell in OTHERS[:: 3 if self.smoke else 1]:
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
                    "floor": self.floors(run),
                    "chunks": run.solve().chunks,
                    "times": {k: dict(zip(("forward", "both"), v, strict=True))
                              for k, v in times.items()},
                }  # fmt: skip
                rows.append(row)
                say(f"sweep {cell} {dtype} {shape}: auto ({row['chunks']} chunks), ms: "
                    f"{ {k: v['both']['median'] for k, v in row['times'].items()} }")  # fmt: skip

    def start_peer(self, warm: bool) -> Any:
        shapes = [list(s) for s in self.shapes(MAIN)]
        return self.start({"shapes": shapes, "warm": warm}, self.peer or "")

    def peers(self) -> None:
        if not self.peer:
            self.lacks("peer")
            return
        version, *rows = self.rows_of(self.start_peer(warm=False), "pararnn-torch", 120)
        self.found["peer"] = {**version, "rows": rows}
        for row in rows:
            say(f"peer {row}")

    def cudnn(self) -> None:
        rows = self.found["cudnn"] = []
        for name, module in (("GRU", torch.nn.GRU), ("LSTM", torch.nn.LSTM)):
            for B, T, D in self.shapes(MAIN[:4]):
                layer = module(D, D, batch_first=True, device=self.device)
                x = torch.randn(B, T, D, device=self.device, requires_grad=True)
                bar = torch.randn(B, T, D, device=self.device)
                parts = calls(lambda x, *_, m=layer: m(x)[0], [x, *layer.parameters()], bar)
                row = {"cell": name, "shape": (B, T, D)}
                rows.append(row | {part: self.clock.eager(run, 3) for part, run in parts.items()})
                say(f"cuDNN {name} {row['shape']}: {brief(rows[-1])}")

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

                row: Row = {"precision": precision, "shape": (B, T, D)}
                row |= {"gemm": self.clock.graph(gemm, 5), "layer": self.clock.graph(layer, 5)}
                rows.append(row)
                say(f"layer {precision} {row['shape']}: {brief(row)}")
        torch.set_float32_matmul_precision("highest")

    def newton(self) -> None:
        """Corrections over the size of the recurrent weights and the bias of the update gate."""
        rows = self.found["newton"] = []
        B, T, D = self.shapes(((4, 4096, 256),))[0]
        every = 7 if self.smoke else 1
        for bias in BIASES[::every]:
            for norm in NORMS[::every]:
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

        wall = self.clock.wall
        shape = (2, 64, 64) if self.clock.cuda else (1, 4, 4)
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
        sizes = (60, 1, 4) if self.smoke else (700_001, 3, 1024)
        row = self.found["giant"] = giant(self.device, *sizes)
        say(f"giant {row}")


SECTIONS = (
    "checks", "copy", "main", "giant", "peers", "sweep", "layer", "newton", "cudnn", "memory",
    "overhead", "others",
)  # fmt: skip


def main() -> int:
    args = parser(__doc__, (*SECTIONS, "warm"), 345, "pararnn-torch").parse_args()
    if args.as_peer:
        as_peer(json.loads(args.as_peer))
        return 0
    session = Channelwise(args)
    return verdict(session.found, recorded(session, args, SECTIONS))


if __name__ == "__main__":
    sys.exit(main())
