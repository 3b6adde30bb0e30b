"""What a call costs beside the work: small layers, decode steps, the first call, Python frames.

    PYTHONPATH=. python benchmarks/gpu_overhead.py [--out DIR] [--budget 120]

Times are wall-clock, as a caller sees them, and in milliseconds; cuDNN's layers of the same sizes stand
beside them. On a CPU the calls run once or twice, in Triton's interpreter with `TRITON_INTERPRET=1`.

Results: `<out>/<date>-h200-overhead.json` (the name has the device), with

    small           rows: library, cell, shape (B, T, D); forward, both
    decode          rows: library, cell, shape (layers, B, D); step, and step in a captured graph
    first           rows: cell, shape; seconds of the first forward and of the first backward pass in a
                    fresh process with an empty cache of kernels, and of those after them; import
    frames          rows: cell, pass, shape; Python functions that are entered from a layer's call to the
                    first kernel's launch (`to launch`), those of pararnn (`own`) and the files they are
                    in, how deep the launch is; all that are entered
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import torch
from harness import Row, calls, emit, parser, read_lines, say, summary
from sessions import Session, process, recorded, source, verdict
from torch import nn

SMALL = (8, 128, 64)
DECODE = (4, 8, 1024)  # layers, batch, width
SMOKE = (1, 4, 4)
CELLS = ("ParaGRU", "ParaLSTM")
LAUNCH = {("jit.py", "run"), ("interpreter.py", "run"), ("interpreter.py", "__call__")}
"""File and function of Triton that starts a kernel: compiled, and in the interpreter."""


def launches(path: str, name: str) -> bool:
    folder, _, file = path.rpartition(os.sep)
    return (file, name) in LAUNCH and f"{os.sep}triton{os.sep}" in folder + os.sep


class Counted:
    """The functions that are entered while a call runs, until a kernel is started and in all."""

    def __init__(self, run: Callable[[], object]):
        self.before = self.own = self.all = self.depth = 0
        self.files: set[str] = set()
        self.library = source() + os.sep + "pararnn" + os.sep
        self.launched = False
        self.at = 0
        torch.autograd.set_multithreading_enabled(False)  # a profile is one thread's
        sys.setprofile(self.see)
        try:
            run()
        finally:
            sys.setprofile(None)
            torch.autograd.set_multithreading_enabled(True)

    def see(self, frame: FrameType, event: str, _: object) -> None:
        if event == "return":
            self.at -= 1
        if event != "call":
            return
        path = frame.f_code.co_filename
        if path == __file__:
            self.at += 1
            return
        self.all += 1
        self.at += 1
        if self.launched:
            return
        if launches(path, frame.f_code.co_name):
            self.launched, self.depth = True, self.at
            return
        self.before += 1
        if path.startswith(self.library):
            self.own += 1
            self.files.add(path)

    def row(self) -> Row:
        """Without a launch (the eager path has none) there is only the number of all."""
        found: Row = {"to launch": self.before, "own": self.own, "files": len(self.files),
                      "depth": self.depth}  # fmt: skip
        return (found if self.launched else dict.fromkeys(found)) | {"all": self.all}


def layer(cell: str, width: int, device: str, **options: Any) -> Any:
    import pararnn

    return pararnn.ParaRNN(getattr(pararnn, cell)(width, width), **options).to(device)


def parts_of(module: nn.Module, shape: tuple[int, ...], device: str) -> dict[str, Any]:
    B, T, D = shape
    x = torch.randn(B, T, D, device=device, requires_grad=True)
    bar = torch.randn(B, T, D, device=device)
    return calls(lambda x, *_: module(x)[0], [x, *module.parameters()], bar)


class Overhead(Session):
    """The sections."""

    topic, script = "overhead", "gpu_overhead.py"

    @property
    def shape(self) -> tuple[int, ...]:
        return SMOKE if self.smoke else SMALL

    def wall(self, run: Callable[[], object]) -> Row:
        """Median of five means over a hundred calls, in milliseconds."""
        times = [self.clock.wall(run, 100) / 1e3 for _ in range(5 if self.clock.cuda else 1)]
        return {**summary(times, 4), "how": "wall"}

    def small(self) -> None:
        width = self.shape[2]

        def run(library: str, cell: str) -> Row:
            module: nn.Module = (
                layer(cell, width, self.device)
                if library == "pararnn"
                else getattr(nn, cell)(width, width, batch_first=True, device=self.device)
            )
            row: Row = {"library": library, "cell": cell, "shape": self.shape}
            parts = parts_of(module, self.shape, self.device)
            row |= {name: self.wall(call) for name, call in parts.items()}
            say(f"{library} {cell}: {[row[part]['median'] for part in parts]} ms")
            return row

        each = [("pararnn", cell) for cell in CELLS] + [("cuDNN", "GRU"), ("cuDNN", "LSTM")]
        self.rows("small", each, run)

    def decode(self) -> None:
        """One step of a stack of layers, of which each needs the one before."""
        layers, B, D = (2, 1, 4) if self.smoke else DECODE
        x = torch.randn(B, D, device=self.device)

        def ours(cell: str) -> Callable[[], object]:
            stack = layer(cell, D, self.device, num_layers=layers)
            state = stack.step(x)[1].clone()
            return lambda: stack.step(x, state, out=state)

        def theirs(cell: str) -> Callable[[], object]:
            stack = getattr(nn, cell)(D, D, layers, device=self.device)
            return partial(stack, x.unsqueeze(0), stack(x.unsqueeze(0))[1])

        def run(library: str, cell: str) -> Row:
            with torch.no_grad():
                step = (ours if library == "pararnn" else theirs)(cell)
                row: Row = {"library": library, "cell": cell, "shape": (layers, B, D)}
                row |= {"step": self.wall(step), "captured": self.clock.measured(step)}
            say(f"decode {library} {cell}: {row['step']['median']} ms, captured "
                f"{row['captured']['median']} ms")  # fmt: skip
            return row

        self.rows("decode", [("pararnn", "ParaGRU"), ("cuDNN", "GRU")], run)

    def first(self) -> None:
        """In processes of their own."""

        def run(cell: str) -> Row:
            job = {"device": self.device, "cell": cell, "shape": self.shape}
            with tempfile.TemporaryDirectory(prefix="triton-") as empty:
                words = ["--as-peer", json.dumps(job)]
                started = process(__file__, words, source(), TRITON_CACHE_DIR=empty)
                out, _ = started.communicate(timeout=None if self.smoke else 120)
            row: Row = {"cell": cell, "shape": self.shape}
            for found in read_lines(out, "ROW "):
                row |= found
            say(f"first call of {cell}: {row}")
            if "backward" not in row:
                raise RuntimeError(f"got exit status {started.returncode}, expected a row: {out}")
            return row

        self.rows("first", [(cell,) for cell in CELLS], run)

    def frames(self) -> None:
        """Of what a user calls; in Triton's interpreter the kernels are asked for, as no cell takes
        them there by itself."""
        from pararnn import NewtonConfig

        asked = not self.clock.cuda and os.environ.get("TRITON_INTERPRET") == "1"
        options = {"config": NewtonConfig(backend="fused")} if asked else {}

        def run(cell: str, which: str) -> Row:
            module = layer(cell, self.shape[2], self.device, **options)
            x = torch.randn(self.shape, device=self.device)
            call = partial(module, x)
            y = module(x)[0].sum()
            if which == "backward":
                call = partial(y.backward, retain_graph=True)
            call()  # what is only done once does not count
            row: Row = {"cell": cell, "pass": which, "shape": self.shape, **Counted(call).row()}
            say(f"frames {cell} {which}: {row}")
            return row

        self.rows("frames", [(c, w) for c in CELLS for w in ("forward", "backward")], run)


def as_first(job: Row) -> None:
    """The first calls of a process, in seconds."""
    begin = time.perf_counter()
    import pararnn

    found = {"import": time.perf_counter() - begin, "source": pararnn.__file__}
    B, T, D = job["shape"]
    module = layer(job["cell"], D, job["device"])
    x = torch.randn(B, T, D, device=job["device"], requires_grad=True)

    def wait() -> None:
        if job["device"] == "cuda":
            torch.cuda.synchronize()

    wait()
    for suffix in ("", ", again"):
        begin = time.perf_counter()
        y = module(x)[0]
        wait()
        middle = time.perf_counter()
        y.sum().backward()
        wait()
        found["forward" + suffix] = middle - begin
        found["backward" + suffix] = time.perf_counter() - middle
    emit({k: round(v, 4) if isinstance(v, float) else v for k, v in found.items()})


SECTIONS = ("frames", "small", "decode", "first")


def main() -> int:
    made = parser(__doc__, SECTIONS, 120)
    made.add_argument("--as-peer", help="for the script itself")
    args = made.parse_args()
    if args.as_peer:
        as_first(json.loads(args.as_peer))
        return 0
    session = Overhead(args)
    return verdict(session.found, recorded(session, args, SECTIONS))


if __name__ == "__main__":
    sys.exit(main())
