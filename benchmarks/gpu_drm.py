"""Checks and times the DRM on a GPU, at the published 125M shape.

    PYTHONPATH=. python benchmarks/gpu_drm.py [--out DIR] [--budget 150]

One run first checks small models of all paths and presets against float64 on the CPU; then it
measures, alone on the device. `--smoke` runs everything at tiny sizes, on a CPU too
(`TRITON_INTERPRET=1`), to test this script. The exit status is 1 if a check or a section failed.
`--only compile` measures `torch.compile`, which takes minutes to compile; it is left out otherwise.

Times are medians (`median`, `least`, `most`, in milliseconds a call) of single calls by events, or
of replays of a CUDA graph that holds several calls (`how` is `graph`). The
published preset is not captured: its LU factorization waits for the device. A training call is the forward and backward pass of the cross entropy, without the optimizer.

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
    gap             rows: variant, weights, dt: for each block length the distance of the block path
                    from the recurrence, over the recurrence's movement
    rollout         rows: variant, weights, dt, shape: loop (time); largest norm of a state, mean
                    norm of a step; for each window corrections, looped windows, time, error against
                    the loop, error_estimate, error_bound
    gradient        rows: variant, weights, dt, shape: loop, parallel (times of forward and
                    backward), corrections of both passes, largest difference of gradients
    compile         rows: variant: seconds of the first call, time, tokens a second, difference
"""

from __future__ import annotations

import argparse
import copy
import functools
import gc
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpu_channelwise import START, Clock, options, recorded, say, verdict
from gpu_linear import LOOSE, compared, measured, unit
from torch import Tensor
from torch.nn import functional as F

STEPS = 40
Row = dict[str, Any]

MATMUL = {"float32": "highest", "TF32": "high", "bfloat16": "highest"}
"""Precision of products of float32 matrices; ``bfloat16`` is autocast."""

CHECKED = (
    ("J", "notes", "block"),
    ("J", "published", "block"),
    ("J", "notes", "recurrent"),
    ("J", "notes", "parallel"),
    ("J_NO_DIRECTION", "notes", "block"),
    ("J_NO_DIRECTION", "notes", "parallel"),
    ("J_NO_NATURALIZATION", "published", "block"),
    ("J_METRIC_SUBSPACE", "notes", "block"),
    ("G", "notes", "block"),
    ("SSM_CONTROL", "notes", "block"),
    ("SSM_CONTROL", "published", "block"),
)
CHECK_SIZES = {
    "d_token": 48,
    "d_state": 96,
    "hidden_size": 128,
    "n_directions": 12,
    "metric_rank": 8,
    "direction_basis": 32,
    "metric_basis": 32,
    "mixer_hidden": 64,
    "memory_hidden": 80,
    "block_length": 64,
    "naturalization_warmup": 0,
}
TRAIN = (
    *((v, "notes", p, (16, 512)) for v in ("J", "SSM_CONTROL") for p in MATMUL),
    *((v, "published", "bfloat16", (16, 512)) for v in ("J", "SSM_CONTROL", "J_NO_DIRECTION")),
    *((v, "published", "bfloat16", (2, 512)) for v in ("J", "SSM_CONTROL")),
    *(
        (v, "notes", p, (16, 512))
        for v in (
            "J_NO_DIRECTION",
            "J_NO_NATURALIZATION",
            "J_NO_METRIC",
            "J_DIRECT_CONTROL_MATCHED",
        )
        for p in ("bfloat16", "float32")
    ),
)
ROLLOUTS = (
    ("J", "initial", 0.08),
    ("J", "initial", 0.3),
    ("J_NO_DIRECTION", "initial", 0.08),
    ("J", "trained", 0.08),
    ("J", "trained", 0.01),
    ("J_NO_DIRECTION", "trained", 0.08),
)
ROLLOUT = (2, 128)
WINDOWS = (8, 64)
LENGTHS = (4, 8, 16, 32, 64, 128, 256, 512)
SMOKE = {
    **CHECK_SIZES,
    "d_token": 8,
    "d_state": 12,
    "hidden_size": 16,
    "metric_rank": 3,
    "direction_basis": 5,
    "metric_basis": 5,
    "mixer_hidden": 6,
    "memory_hidden": 8,
    "block_length": 8,
}


def drawn(shape: tuple[int, ...], device: str = "cpu", seed: int = 0) -> Tensor:
    """Normal numbers, the same on every device."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


@functools.cache
def bytes_of_python(count: int) -> Tensor:
    """The first bytes of Python's own library, file after file."""
    text = bytearray()
    for file in sorted(Path(os.__file__).parent.glob("*.py")):
        if len(text) >= count:
            break
        text += file.read_bytes()
    return torch.frombuffer(text, dtype=torch.uint8)[:count].long()


def batch(shape: tuple[int, int], device: str, seed: int = 0) -> Tensor:
    """Windows of text, ``(B, T + 1)``."""
    text = bytes_of_python(4_000_000)
    starts = torch.randint(
        len(text) - shape[1] - 1, (shape[0],), generator=torch.Generator().manual_seed(seed)
    )
    return torch.stack([text[i : i + shape[1] + 1] for i in starts.tolist()]).to(device)


def loss_of(model: Any, tokens: Tensor, precision: str) -> Tensor:
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=precision == "bfloat16"):
        logits = model(tokens[:, :-1], step=500).logits
    return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


# -- checks ----------------------------------------------------------------------------------------


def results(model: Any, tokens: Tensor) -> dict[str, Tensor]:
    """Logits, states and gradients, on the CPU in float64."""
    out = model(tokens[:, :-1])
    loss = F.cross_entropy(out.logits.flatten(0, 1), tokens[:, 1:].flatten())
    names, params = zip(*model.named_parameters(), strict=True)
    grads = torch.autograd.grad(loss, params, allow_unused=True)
    found = {"logits": out.logits, "states": out.states, "z": out.state.z}
    found |= {n: g for n, g in zip(names, grads, strict=True) if g is not None}
    return {name: x.detach().cpu().double() for name, x in found.items()}


def check(variant: str, preset: str, path: str, device: str) -> Row:
    from pararnn import drm

    config = drm.variant(variant).config(**CHECK_SIZES)
    config = config.published() if preset == "published" else config
    if path != "block":
        config = config.changed(path=path)
    model = drm.DRM(config.changed(naturalization_warmup=0))
    tokens = torch.randint(256, (3, 202), generator=torch.Generator().manual_seed(1))
    exact = results(copy.deepcopy(model).double(), tokens)
    same = results(model, tokens)
    found = results(copy.deepcopy(model).to(device), tokens.to(device))
    errors = {}
    for name, value in exact.items():
        allowed = 4 * float((same[name] - value).abs().max())
        allowed += LOOSE["float32"] * unit(torch.float32) * float(value.abs().max())
        errors[name] = compared(found[name], value, allowed)
    row = {"ok": all(e["of tolerance"] <= 1 for e in errors.values()), "errors": errors}
    if path == "parallel":
        sweeps = copy.deepcopy(model).to(device)(tokens.to(device)).sweeps
        row |= {"corrections": sweeps.corrections, "looped": sweeps.looped}
    return row


# -- sections --------------------------------------------------------------------------------------


class Session:
    """What all sections share, and the results so far."""

    def __init__(self, args: argparse.Namespace):
        self.smoke, self.budget = args.smoke, args.budget
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.clock = Clock(self.device)
        self.found: dict[str, Any] = {"failures": {}, "skipped": []}
        self.weights: dict[str, Any] = {}

    def left(self) -> float:
        return self.budget - (time.perf_counter() - START)

    def model(self, variant: str, preset: str = "notes", **changes: Any) -> Any:
        """At the published size, in training."""
        from pararnn import drm

        config = drm.variant(variant).config(**(SMOKE if self.smoke else {}))
        config = config.published() if preset == "published" else config
        with torch.device(self.device):
            return drm.DRM(config.changed(**changes))

    def shape(self, shape: tuple[int, int]) -> tuple[int, int]:
        return (2, 16) if self.smoke else shape

    def rows(self, section: str, each: Any, run: Callable[..., Row]) -> None:
        """Fill a section, row by row, while there is time; a row that raises says so."""
        rows = self.found[section] = []
        for case in each:
            if self.left() < 8 and not self.smoke:
                self.found["skipped"].append(f"{section} {case}")
                continue
            try:
                row = run(*case)
            except Exception:
                row = {"case": str(case), "exception": traceback.format_exc()[-1500:]}
                say(f"{section} {case}: {row['exception'].strip().splitlines()[-1]}")
            rows.append(row)
            gc.collect()
            if self.clock.cuda:
                torch.cuda.empty_cache()
        torch.set_float32_matmul_precision("highest")

    def checks(self) -> None:
        def run(variant: str, preset: str, path: str) -> Row:
            row: Row = {"variant": variant, "preset": preset, "path": path, "ok": False}
            try:
                row |= check(variant, preset, path, self.device)
                name, worst = max(row["errors"].items(), key=lambda kv: kv[1]["of tolerance"])
                said = f"{worst['of tolerance']:.2f} of tolerance ({name})"
            except Exception:
                row["exception"] = traceback.format_exc()[-1500:]
                said = row["exception"].strip().splitlines()[-1]
            say(f"{'ok  ' if row['ok'] else 'FAIL'} {variant} {preset} {path}: {said}")
            return row

        self.rows("checks", CHECKED[:: 4 if self.smoke else 1], run)

    def train(self) -> None:
        self.rows("train", TRAIN[:: 4 if self.smoke else 1], self.training)

    def training(self, variant: str, preset: str, precision: str, shape: tuple[int, int]) -> Row:
        torch.set_float32_matmul_precision(MATMUL[precision])
        shape = self.shape(shape)
        model = self.model(variant, preset)
        params = list(model.parameters())
        tokens = batch(shape, self.device)

        def both() -> object:
            return torch.autograd.grad(loss_of(model, tokens, precision), params, allow_unused=True)

        both()
        row: Row = {"variant": variant, "preset": preset, "precision": precision, "shape": shape}
        row["parameters"] = sum(p.numel() for p in params)
        row["eager"] = self.clock.eager(both, repeats=3)
        if self.clock.cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            grads = both()
            torch.cuda.synchronize()
            row["peak"] = torch.cuda.max_memory_allocated() - before
            row["peak"] -= sum(p.nbytes for p in params)
            del grads
        if preset == "notes":
            row["graph"] = measured(self.clock, both)
        for how in ("eager", "graph"):
            if how in row:
                row[how]["tokens/s"] = self.rate(row[how], shape)
        said = {how: row[how] for how in ("eager", "graph") if how in row}
        say(f"train {variant} {preset} {precision} {shape}: {said}, "
            f"peak {row.get('peak', 0) / 2**30:.1f} GiB")  # fmt: skip
        return row

    @staticmethod
    def rate(timed: Row, shape: tuple[int, int]) -> float:
        return round(1e3 * shape[0] * shape[1] / timed["median"])

    def naturalize(self) -> None:
        """One factorization for the tokens of a block, or one for each token."""
        from pararnn import drm

        d, r = (12, 3) if self.smoke else (1536, 64)

        def run(points: int, vectors: int, precision: str) -> Row:
            diagonal = (0.3 + drawn((points, d), self.device).square()).requires_grad_()
            factor = (0.1 * drawn((points, d, r), self.device, 1)).requires_grad_()
            v = drawn((points, vectors, d), self.device, 2).requires_grad_()
            leaves, bar = [diagonal, factor, v], drawn((points, vectors, d), self.device, 3)

            def forward() -> Tensor:
                return drm.solve_metric(drm.Metric(diagonal, factor), v, 0.3, precision)

            def no_grad() -> None:
                with torch.no_grad():
                    forward()

            def timed(call: Callable[[], object]) -> Row:
                if precision == "published":
                    return {**self.clock.eager(call), "how": "events"}
                return measured(self.clock, call)

            row: Row = {"points": points, "vectors": vectors, "precision": precision}
            row["forward"] = timed(no_grad)
            row["both"] = timed(lambda: torch.autograd.grad(forward(), leaves, bar))
            say(f"naturalize {points}×{vectors} {precision}: forward {row['forward']}, "
                f"both {row['both']}")  # fmt: skip
            return row

        sizes = ((2, 3),) if self.smoke else ((16, 64), (512, 1))
        precisions = ("safe", "single", "published")
        self.rows("naturalize", [(*s, p) for s in sizes for p in precisions], run)

    def memory(self) -> None:
        """The scan of the selective memory, by either backend."""
        from pararnn.scan import linear_scan

        shape = (2, 16, 12) if self.smoke else (16, 512, 1536)

        def run(backend: str) -> Row:
            f = (drawn(shape, self.device) + 2).sigmoid().requires_grad_()
            u, bar = drawn(shape, self.device, 1).requires_grad_(), drawn(shape, self.device, 2)

            def forward() -> Any:
                return linear_scan(f, u, backend=backend)

            def no_grad() -> None:
                with torch.no_grad():
                    forward()

            row: Row = {"backend": backend, "shape": shape}
            row["forward"] = measured(self.clock, no_grad)
            row["both"] = measured(self.clock, lambda: torch.autograd.grad(forward(), [f, u], bar))
            say(f"memory scan {backend}: forward {row['forward']}, both {row['both']}")
            return row

        self.rows("memory", [("auto",), ("eager",)], run)

    def trained(self, variant: str) -> Any:
        """A model after a few steps, once for each variant."""
        if variant not in self.weights:
            model = self.model(variant)
            optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.01)
            losses = []
            for step in range(2 if self.smoke else STEPS):
                tokens = batch(self.shape((16, 512)), self.device, seed=step)
                loss = loss_of(model, tokens, "bfloat16")
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                losses.append(loss.detach())
            last = [round(float(x), 3) for x in (losses[0], losses[-1])]
            say(f"trained {variant}: {last} nats a byte, first and last")
            self.found.setdefault("trained", []).append({"variant": variant, "nats": last})
            self.weights[variant] = model.state_dict()
        return self.weights[variant]

    def problem(
        self, variant: str, weights: str, dt: float, shape: tuple[int, int]
    ) -> tuple[Any, Tensor, Tensor, float]:
        """Dynamics, first states, embeddings and strength of a rollout."""
        model = self.model(variant, dt=dt)
        if weights == "trained":
            model.load_state_dict(self.trained(variant))
        with torch.no_grad():
            e = model.embedding(batch(shape, self.device)[:, :-1])
            z = model.initial_state(shape[0]).z.clone()
        return model.dynamics, z, e, model.config.naturalization_strength

    def each_rollout(self) -> list[tuple[str, str, float]]:
        return list(ROLLOUTS[::3] if self.smoke else ROLLOUTS)

    def gap(self) -> None:
        from pararnn import drm

        def run(variant: str, weights: str, dt: float) -> Row:
            shape = self.shape((2, 512))
            problem = self.problem(variant, weights, dt, shape)
            lengths = [n for n in LENGTHS if n <= shape[1]]
            gaps = drm.block_gap(*problem, lengths)
            say(f"gap {variant} {weights} dt={dt}: {gaps}")
            row: Row = {"variant": variant, "weights": weights, "dt": dt, "shape": shape}
            return {**row, "gap": gaps}

        self.rows("gap", [c for c in self.each_rollout() if c[2] == 0.08], run)

    def rollout(self) -> None:
        from pararnn import drm

        def run(variant: str, weights: str, dt: float) -> Row:
            shape = self.shape(ROLLOUT)
            dynamics, z, e, s = self.problem(variant, weights, dt, shape)
            row: Row = {"variant": variant, "weights": weights, "dt": dt, "shape": shape}

            @torch.no_grad()
            def loop() -> Tensor:
                return drm.recurrent_states(dynamics, z, e, s, measure=False).states

            want = loop()
            row["loop"] = self.once(loop)
            row["norm"] = float(want.norm(dim=-1).max())
            row["step"] = float(want.diff(dim=1).norm(dim=-1).mean())
            row["windows"] = {}
            for window in [8] if self.smoke else WINDOWS:

                @torch.no_grad()
                def sweep(certify: bool = False, window: int = window) -> Any:
                    return drm.sweep_states(
                        dynamics, z, e, s, window=window, max_corrections=window // 2,
                        certify=certify,
                    )  # fmt: skip

                found = sweep(certify=True)
                row["windows"][window] = {
                    "corrections": sum(found.corrections),
                    "looped": sum(found.looped),
                    "time": self.once(sweep),
                    "error": float((found.states - want).abs().max()),
                    "error_estimate": found.error_estimate,
                    "error_bound": found.error_bound,
                }
            said = {w: (v["corrections"], v["looped"], v["time"]["median"], v["error"],
                        v["error_bound"]) for w, v in row["windows"].items()}  # fmt: skip
            say(
                f"rollout {variant} {weights} dt={dt}: loop {row['loop']['median']}, windows {said}"
            )
            return row

        self.rows("rollout", self.each_rollout(), run)

    def once(self, run: Callable[[], object]) -> dict[str, float]:
        """Wall-clock times of calls that wait for the device themselves."""
        times = []
        for _ in range(2):
            if self.clock.cuda:
                torch.cuda.synchronize()
            begin = time.perf_counter()
            run()
            if self.clock.cuda:
                torch.cuda.synchronize()
            times.append(1e3 * (time.perf_counter() - begin))
        best = round(min(times), 3)
        return {"median": best, "least": best, "most": round(max(times), 3)}

    def gradient(self) -> None:
        from pararnn import drm

        def run(variant: str, weights: str, dt: float) -> Row:
            shape = self.shape(ROLLOUT)
            dynamics, z, e, s = self.problem(variant, weights, dt, shape)
            bar = drawn((*shape, z.shape[1]), self.device)
            leaves = list(dynamics.parameters())
            kept: list[Any] = []

            def loop() -> Any:
                states = drm.recurrent_states(dynamics, z, e, s, measure=False).states
                return torch.autograd.grad((states * bar).sum(), leaves, allow_unused=True)

            def parallel() -> Any:
                found = drm.sweep_states(dynamics, z, e, s, window=8 if self.smoke else 64,
                                         max_corrections=32)  # fmt: skip
                grads = torch.autograd.grad((found.states * bar).sum(), leaves, allow_unused=True)
                kept[:] = [found]
                return grads

            pairs = zip(loop(), parallel(), strict=True)
            worst = max(float((a - b).abs().max() / a.abs().max()) for a, b in pairs
                        if a is not None and b is not None)  # fmt: skip
            row: Row = {"variant": variant, "weights": weights, "dt": dt, "shape": shape,
                        "loop": self.once(loop), "parallel": self.once(parallel),
                        "corrections": kept[0].corrections, "backward": kept[0].backward,
                        "difference": worst}  # fmt: skip
            say(f"gradient {variant} {weights} dt={dt}: loop {row['loop']['median']}, parallel "
                f"{row['parallel']['median']}, corrections {row['corrections']} and "
                f"{row['backward']}, difference {worst:.1e}")  # fmt: skip
            return row

        picked = [c for c in self.each_rollout() if c[0] == "J" and c[2] <= 0.08]
        self.rows("gradient", picked, run)

    def compile(self) -> None:
        def run(variant: str) -> Row:
            torch.set_float32_matmul_precision("highest")
            shape = self.shape((16, 512))
            model = self.model(variant)
            params, tokens = list(model.parameters()), batch(shape, self.device)
            compiled = torch.compile(model, fullgraph=True, backend="inductor")

            def both(which: Any = compiled) -> Any:
                return torch.autograd.grad(
                    loss_of(which, tokens, "bfloat16"), params, allow_unused=True
                )

            begin = time.perf_counter()
            both()
            row: Row = {"variant": variant, "shape": shape, "precision": "bfloat16"}
            row["seconds"] = round(time.perf_counter() - begin, 1)
            with torch.no_grad():
                values = [float(loss_of(m, tokens, "bfloat16")) for m in (compiled, model)]
            row["difference"] = abs(values[0] - values[1])
            row["both"] = measured(self.clock, both)
            row["both"]["tokens/s"] = self.rate(row["both"], shape)
            say(f"compile {variant}: {row}")
            return row

        self.rows("compile", [("SSM_CONTROL",), ("J",)], run)


SECTIONS = ("checks", "train", "naturalize", "memory", "rollout", "gap", "gradient")


def main() -> int:
    args = options(__doc__, (*SECTIONS, "compile"), 150).parse_args()
    sys.path[:0] = [str(Path(__file__).resolve().parents[1])]
    session = Session(args)
    target = recorded(session, args, "drm", SECTIONS, least=8)
    return verdict(session.found, target)


if __name__ == "__main__":
    sys.exit(main())
