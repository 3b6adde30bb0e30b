"""What all benchmarks share: a clock, a record of where and how, options, lines of JSON, and checks.

`Clock` times a call: inside a captured CUDA graph, call by call with events, or by the clock on the
wall; `turns` times several on a CPU that take turns. Times are `median`, `least` and `most`, in
milliseconds a call. `record` says where and how, `parser` has the options of all scripts, `checked` and
`compared` judge results: what is not finite never passes.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import math
import os
import platform
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
START = time.perf_counter()
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
Row = dict[str, Any]
Call = Callable[[], object]

if str(ROOT) not in sys.path:  # last: PYTHONPATH says which version of the library is measured
    sys.path.append(str(ROOT))


def say(text: str) -> None:
    print(f"[{time.perf_counter() - START:6.1f} s] {text}", flush=True)


# -- time ------------------------------------------------------------------------------------------


def summary(times: Sequence[float], digits: int = 5) -> dict[str, float]:
    """Median, least and most, in milliseconds."""
    return {
        "median": round(statistics.median(times), digits),
        "least": round(min(times), digits),
        "most": round(max(times), digits),
    }


def median(row: Row, part: str) -> float:
    value: float = row[part]["median"]
    return value


def seconds(run: Call) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


class Clock:
    """Times calls on a device; on a CPU, once, only to run them."""

    def __init__(self, device: str):
        self.device, self.cuda = device, device == "cuda"
        self.stream = torch.cuda.Stream() if self.cuda else None
        if self.stream is not None:  # everything is on it, so that all of it can be captured
            torch.cuda.set_stream(self.stream)

    def wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def free(self) -> None:
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()

    def events(self, run: Call, repeats: int = 5) -> list[float]:
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

    def eager(self, run: Call, repeats: int = 5) -> dict[str, float]:
        if not self.cuda:
            return self.once(run)
        self.busy(run)
        return summary(self.events(run, repeats))

    def busy(self, run: Call) -> None:
        """Run until the clocks are up."""
        begin = time.perf_counter()
        while time.perf_counter() - begin < 0.03:
            run()
            torch.cuda.synchronize()

    def once(self, run: Call) -> dict[str, float]:
        return summary([1e3 * seconds(run)])

    def graph(self, run: Call, repeats: int = 7) -> dict[str, float]:
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

    def measured(self, run: Call) -> Row:
        """In a captured graph if that is possible."""
        try:
            return {**self.graph(run), "how": "graph"}
        except Exception as error:
            self.wait()
            return {**self.eager(run), "how": "events", "why": repr(error)[:300]}

    def both(self, run: Callable[..., Tensor], leaves: Sequence[Tensor], bar: Tensor) -> Row:
        """Forward, and forward with backward, each measured."""
        return {name: self.measured(call) for name, call in calls(run, leaves, bar).items()}

    def wall(self, run: Call, calls: int) -> float:
        """Microseconds a call, as the caller sees them."""
        calls = calls if self.cuda else 2
        for _ in range(min(calls, 20)):
            run()
        self.wait()
        begin = time.perf_counter()
        for _ in range(calls):
            run()
        self.wait()
        return round(1e6 * (time.perf_counter() - begin) / calls, 1)

    def pair(self, run: Call) -> dict[str, float]:
        """Wall-clock times of two calls that wait for the device themselves; the faster one counts."""
        times = []
        for _ in range(2):
            self.wait()
            begin = time.perf_counter()
            run()
            self.wait()
            times.append(1e3 * (time.perf_counter() - begin))
        return summary(times, 3) | {"median": round(min(times), 3)}

    def peak(self, run: Call) -> int:
        """Largest number of bytes above what is there before the call."""
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        kept = run()
        torch.cuda.synchronize()
        found = torch.cuda.max_memory_allocated() - before
        del kept
        return found


def calls(
    run: Callable[..., Tensor], leaves: Sequence[Tensor], bar: Tensor, unused: bool = False
) -> dict[str, Call]:
    """A function's forward pass without gradients, and both passes."""

    def forward() -> None:
        with torch.no_grad():
            run(*leaves)

    return {
        "forward": forward,
        "both": lambda: torch.autograd.grad(run(*leaves), leaves, bar, allow_unused=unused),
    }


def turns(runs: dict[str, Call], repeats: int, patience: float = math.inf) -> dict[str, float]:
    """Median wall-clock milliseconds of calls that take turns, after one call of each: a machine that
    slows down slows all of them. After ``patience`` seconds three turns are enough."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    start = time.perf_counter()
    for turn in range(repeats):
        if turn >= 3 and time.perf_counter() - start > patience:
            break
        for name, run in runs.items():
            times[name].append(1e3 * seconds(run))
    return {name: statistics.median(values) for name, values in times.items()}


def attempt(labels: Row, run: Callable[[], Row]) -> Row:
    """A row of times; one that raises says so."""
    try:
        return {**labels, **run()}
    except Exception:
        return {**labels, "exception": traceback.format_exc()[-1500:]}


# -- where and how ---------------------------------------------------------------------------------


def device_name(device: str) -> str:
    """That of the GPU, or the CPU's architecture with the threads that are used."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name()
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"


def command(about: str, words: Sequence[str]) -> str:
    """How to run a script again; a peer's place is not told."""
    shown = [
        "DIR" if before == "--peer" else word
        for before, word in zip(("", *words), words, strict=False)
    ]
    drop = {i for i, w in enumerate(words) if w in ("--out", "--revision")}
    drop |= {i + 1 for i in drop}
    kept = [w for i, w in enumerate(shown) if i not in drop]
    return " ".join([about, *kept])


def record(
    script: str,
    device: str,
    revision: str = "not given",
    words: Sequence[str] | None = None,
    **more: Any,
) -> Row:
    """Date, revision, command, device and versions of a run; ``words`` are those of the command line."""
    try:
        import triton

        version = triton.__version__
    except ImportError:
        version = None
    return {
        "date": datetime.date.today().isoformat(),
        "revision": revision,
        "command": command(script, sys.argv[1:] if words is None else words),
        "device": device_name(device),
        "torch": torch.__version__,
        "triton": version,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        **more,
    }


def target(out: Path, found: Row, device: str, topic: str, smoke: bool = False) -> Path:
    """The file of results: date, device and topic."""
    cuda = torch.device(device).type == "cuda"
    kind = found["device"].split()[-1].lower() if cuda else "cpu"
    return out / f"{found['date']}-{kind}-{topic}{'-smoke' * smoke}.json"


def parser(
    about: str | None,
    sections: Sequence[str] = (),
    budget: float | None = None,
    peers: str | None = None,
    out: Path | None = RESULTS,
) -> argparse.ArgumentParser:
    """What every script is told. ``budget``: the seconds of one with ``sections``; ``peers`` names those
    it is compared with."""
    made = argparse.ArgumentParser(description=(about or "").splitlines()[0])
    made.add_argument("--out", type=Path, default=out, required=out is None, help="of the results")
    made.add_argument("--revision", default="not given", help="of the code, for the record")
    made.add_argument("--smoke", action="store_true", help="tiny sizes, to test the script")
    if budget is not None:
        made.add_argument("--budget", type=float, default=budget, help="seconds")
    if sections:
        made.add_argument("--only", action="append", choices=sections, help="repeatable")
    made.set_defaults(peer=None)
    if peers is not None:
        made.add_argument("--peer", help=f"folder with {peers}, made by pip install --target")
        made.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 1))
        made.add_argument("--as-peer", help=argparse.SUPPRESS)
    return made


# -- JSON ------------------------------------------------------------------------------------------


def save(path: Path, found: Row) -> None:
    """Results as one object; what was there stays until all of it is written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    part.replace(path)


def add_line(path: Path, row: Row) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def emit(row: Row) -> None:
    """A line of JSON for the process that started this one."""
    print("ROW " + json.dumps(row), flush=True)


def read_lines(text: str, mark: str = "", cut: bool = False) -> Iterator[Row]:
    """Objects of lines that begin with the mark; with ``cut``, one that was cut off is left out."""
    for line in text.splitlines():
        if line.startswith(mark):
            try:
                yield json.loads(line[len(mark) :])
            except ValueError:
                if not cut:
                    raise


# -- checks ----------------------------------------------------------------------------------------


def unit(dtype: torch.dtype) -> float:
    """The largest relative error of one rounding."""
    return torch.finfo(dtype).eps / 2


def compared(got: Tensor, exact: Tensor, allowed: Tensor | float) -> dict[str, float]:
    """The largest error, and the largest part of what is allowed, which is right up to 1.

    A number that is not finite, in a result or in what is allowed, is infinitely much of it.

    Raises
    ------
    ValueError
        If the shapes differ.
    """
    if got.shape != exact.shape:
        raise ValueError(f"got shape {tuple(got.shape)}, expected {tuple(exact.shape)}")
    if not exact.numel():
        return {"error": 0.0, "of tolerance": 0.0}
    error = (got.detach().cpu().double() - exact).abs()
    limit = torch.as_tensor(allowed, dtype=torch.float64).expand(error.shape)
    part = error / limit.clamp(min=1e-300)
    part = torch.where(error.isfinite() & limit.isfinite(), part, math.inf)
    return {"error": float(error.max()), "of tolerance": float(part.max())}


def passes(errors: dict[str, Row] | Sequence[Row]) -> bool:
    """Whether there are results, and every one is within its tolerance; NaN is not."""
    judged = list(errors.values()) if isinstance(errors, dict) else errors
    return bool(judged) and all(e["of tolerance"] <= 1 for e in judged)


def checked(labels: Row, check: Callable[[], Row]) -> Row:
    """A row of checks: what ``check`` says, with its verdict; or its exception."""
    row: Row = {**labels, "ok": False}
    begin = time.perf_counter()
    try:
        row |= check()
        row["ok"] = passes(row["errors"])
    except Exception:
        row["exception"] = traceback.format_exc()[-2000:]
    row.setdefault("seconds", round(time.perf_counter() - begin, 1))
    return row


def tell(label: str, row: Row) -> None:
    """A row of checks in one line."""
    if "exception" in row:
        say(f"FAIL {label}: {row['exception'].strip().splitlines()[-1]}")
    elif row["ok"]:
        name, worst = max(row["errors"].items(), key=lambda kv: kv[1]["of tolerance"])
        say(f"ok   {label}: {worst['of tolerance']:.2f} of tolerance ({name}), {row['seconds']} s")
    else:
        bad = {k: v for k, v in row["errors"].items() if not v["of tolerance"] <= 1}
        say(f"FAIL {label}: {bad}")


def poison(device: str, numbers: int) -> None:
    """Fill what the allocator will hand out next with NaN."""
    if device == "cuda":
        blocks = [torch.full((2**19,), 255, dtype=torch.uint8, device=device) for _ in range(40)]
        size = max(64 * numbers, 2**24)
        blocks.append(torch.full((size,), 255, dtype=torch.uint8, device=device))
        torch.cuda.synchronize()
        del blocks


def brief(row: Row) -> str:
    """A row's times in one line."""
    if "exception" in row:
        return str(row["exception"]).strip().splitlines()[-1]
    parts = []
    for part in ("gemm", "layer", "forward", "backward", "both", "eager"):
        if part in row:
            of = row[part]["median"] / row["floor"][part] if part in row.get("floor", {}) else 0
            parts.append(f"{part} {row[part]['median']:.4f}" + (f" ({of:.2f}×)" if of else ""))
            if row[part].get("how") == "events":
                parts.append(f"(not captured: {row[part]['why']})")
    if "error" in row:
        parts.append(f"error {row['error']:.1e}")
    if "peak" in row:
        parts.append(f"peak {row['peak'] / 2**20:.0f} MiB")
    return ", ".join(parts)
