"""Sections of `gpu_drm.py`: small models against float64, training calls, and the parts alone."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import torch
from gpu_drm_session import CHECK_SIZES, DRMSession, batch, drawn, loss_of
from harness import Row, checked, say, tell, unit
from linear_checks import LOOSE, compared
from torch import Tensor
from torch.nn import functional as F

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
PREFIXES = ((16, 64, 1536), (2, 64, 1536), (16, 512, 1536))
"""Batch, tokens of a block and width of the state."""


def results(model: Any, tokens: Tensor) -> dict[str, Tensor]:
    """Logits, states and gradients, on the CPU in float64."""
    out = model(tokens[:, :-1])
    loss = F.cross_entropy(out.logits.flatten(0, 1), tokens[:, 1:].flatten())
    trained = ((n, p) for n, p in model.named_parameters() if p.requires_grad)
    names, params = zip(*trained, strict=True)
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
    row: Row = {"errors": errors}
    if path == "parallel":
        sweeps = copy.deepcopy(model).to(device)(tokens.to(device)).sweeps
        row |= {"corrections": sweeps.corrections, "looped": sweeps.looped}
    return row


class Parts(DRMSession):
    """Sections without a rollout."""

    def checks(self) -> None:
        def run(variant: str, preset: str, path: str) -> Row:
            labels = {"variant": variant, "preset": preset, "path": path}
            row = checked(labels, lambda: check(variant, preset, path, self.device))
            tell(f"{variant} {preset} {path}", row)
            return row

        self.rows("checks", CHECKED[:: 4 if self.smoke else 1], run)

    def train(self) -> None:
        self.rows("train", TRAIN[:: 4 if self.smoke else 1], self.training)

    def training(self, variant: str, preset: str, precision: str, shape: tuple[int, int]) -> Row:
        torch.set_float32_matmul_precision(MATMUL[precision])
        shape = self.shape(shape)
        model = self.model(variant, preset)
        params = [p for p in model.parameters() if p.requires_grad]
        tokens = batch(shape, self.device)

        def both() -> object:
            return torch.autograd.grad(loss_of(model, tokens, precision), params, allow_unused=True)

        both()
        row: Row = {"variant": variant, "preset": preset, "precision": precision, "shape": shape}
        row["parameters"] = sum(p.numel() for p in params)
        row["eager"] = self.clock.eager(both, repeats=3)
        if self.clock.cuda:
            row["peak"] = self.clock.peak(both) - sum(p.nbytes for p in params)
        if preset == "notes":
            row["graph"] = self.clock.measured(both)
        for how in ("eager", "graph"):
            if how in row:
                row[how]["tokens/s"] = self.rate(row[how], shape)
        said = {how: row[how] for how in ("eager", "graph") if how in row}
        say(f"train {variant} {preset} {precision} {shape}: {said}, "
            f"peak {row.get('peak', 0) / 2**30:.1f} GiB")  # fmt: skip
        return row

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
                return self.clock.measured(call)

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
            row["forward"] = self.clock.measured(no_grad)
            row["both"] = self.clock.measured(lambda: torch.autograd.grad(forward(), [f, u], bar))
            say(f"memory scan {backend}: forward {row['forward']}, both {row['both']}")
            return row

        self.rows("memory", [("auto",), ("eager",)], run)

    def prefix(self) -> None:
        """The sums of a block's increments, by the kernel and by `torch.cumsum`."""
        from pararnn.scan import prefix_sum

        def run(shape: tuple[int, int, int], dtype: str, backend: str) -> Row:
            b = (0.08 * drawn(shape, self.device)).to(getattr(torch, dtype)).requires_grad_()
            z = (drawn((shape[0], shape[2]), self.device, 1) / 5).requires_grad_()
            bar = drawn(shape, self.device, 2)

            def forward() -> Tensor:
                return prefix_sum(b, z, backend=backend)

            def no_grad() -> None:
                with torch.no_grad():
                    forward()

            def both() -> object:
                return torch.autograd.grad(forward(), [b, z], bar)

            exact = z.detach().double().unsqueeze(1) + b.detach().double().cumsum(1)
            row: Row = {"shape": shape, "dtype": dtype, "backend": backend}
            row["forward"] = self.clock.measured(no_grad)
            row["both"] = self.clock.measured(both)
            row["single"] = self.clock.eager(both)
            row["error"] = float((forward().detach() - exact).abs().max() / exact.abs().max())
            say(f"prefix {shape} {dtype} {backend}: {row}")
            return row

        shapes = ((2, 5, 12),) if self.smoke else PREFIXES
        dtypes = ("float32", "bfloat16")
        each = [(s, d, b) for s in shapes for d in dtypes for b in ("auto", "eager")]
        self.rows("prefix", each, run)

    def compile(self) -> None:
        def run(variant: str) -> Row:
            torch.set_float32_matmul_precision("highest")
            shape = self.shape((16, 512))
            model = self.model(variant)
            params = [p for p in model.parameters() if p.requires_grad]
            tokens = batch(shape, self.device)
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
            row["both"] = self.clock.measured(both)
            row["both"]["tokens/s"] = self.rate(row["both"], shape)
            say(f"compile {variant}: {row}")
            return row

        self.rows("compile", [("SSM_CONTROL",), ("J",)], run)
