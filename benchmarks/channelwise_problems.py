"""Recurrences with given drives that `gpu_channelwise.py` times, and those of pararnn-torch beside them."""

from __future__ import annotations

from typing import Any

import torch
from gpu_checks import DTYPES as KINDS
from gpu_checks import make
from harness import Clock, emit
from torch import Tensor

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
SMOKE = (1, 32, 4)


class Run:
    """One recurrence with given drives, ready to be timed."""

    def __init__(self, clock: Clock, cell: str, shape: tuple[int, ...], dtype: str, **extra: Any):
        self.clock, self.extra = clock, extra
        self.B, self.T, self.D = shape
        kind = KINDS[dtype]
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


def fixed(T: int, chunks: int) -> dict[str, int]:
    return {"chunk_length": -(-T // chunks)}


def warm(job: tuple[str, str, int, str]) -> str:
    """Compile what a timing needs, in a worker: one chunk and several, few lanes and many."""
    cell, dtype, width, device = job
    clock = Clock(device)
    for lanes in (width, 66_000, 90_000) if clock.cuda else (width,):  # as plan.layout tells apart
        T = 64 if clock.cuda else 4
        run = Run(clock, cell, (-(-lanes // width), T, width), dtype)
        for length in (T // 2, T):
            torch.autograd.grad(run.solve(chunk_length=length).output, run.leaves, run.bar)
    return f"{cell} {dtype} {width}"


def as_peer(job: dict[str, Any]) -> None:
    """Runs inside a process that sees pararnn-torch instead of this package."""
    from pararnn.kernels.fused_newton import fused_newton

    import pararnn
    from pararnn import NewtonConfig, ParaGRU, ParaLSTM, newton_apply

    clock, device = Clock(job["device"]), job["device"]
    backend = "auto" if device == "cuda" else "eager"
    config = NewtonConfig(scan_backend=backend, residual_atol=None, residual_fail=None)
    emit({"version": getattr(pararnn, "__version__", None)})
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
            emit(row)
