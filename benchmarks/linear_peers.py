"""Other libraries' scans and layers, as `gpu_linear.py` times them: in processes of their own."""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from harness import Clock, Row, attempt, emit
from linear_problems import OPTIONS, SHAPES, Peer, delta_row, fla_module, layer_rows, scan_row
from torch import Tensor, nn

PEERS = ("fla", "accelerated-scan", "mingru-scans", "mingru-scans, eager")
WARP = "accelerated-scan, CUDA"
PACKAGES = ("mingru-scans", "accelerated-scan", "fla-core")


def see_peers(folder: str) -> None:
    """Make the packages of a folder importable."""
    os.environ["FLA_CACHE_RESULTS"] = "0"  # what was tuned beside other processes does not count
    if folder not in sys.path:
        sys.path.insert(0, folder)


def leaf(x: Tensor) -> Tensor:
    return x.detach().contiguous().requires_grad_()


def mingru_scan(mode: str) -> Peer:
    scan = importlib.import_module("mingru").linear_scan

    def run(a: Tensor, b: Tensor) -> Tensor:
        os.environ["MINGRU_SCAN"] = mode if a.is_cuda else "eager"
        return scan(a, b)[1]

    return Peer("(B, T, D)", run)


def peer_mixer(name: str, d_in: int, width: int) -> nn.Module:
    os.environ["MINGRU_SCAN"] = "triton" if torch.cuda.is_available() else "eager"
    module: nn.Module = getattr(importlib.import_module("mingru"), name)(
        d_in, width, **OPTIONS.get(name, {})
    )
    return module


def fla_scan() -> Peer:
    module = fla_module("hgrn")

    def own(leaves: list[Tensor], bar: Tensor) -> tuple[list[Tensor], Tensor]:
        """It is given log a; and it tunes itself anew, so that it is tuned for this shape."""
        for kernel in (module.chunk_hgrn_fwd_kernel_h, module.chunk_hgrn_bwd_kernel_h):
            if hasattr(kernel, "cache"):
                kernel.cache.clear()
        return [leaf(leaves[0].detach().log()), leaf(leaves[1])], bar

    return Peer("(B, T, D), log a", lambda g, x: module.chunk_hgrn(x, g)[0], own)


def trimmed(source: str) -> str:
    """accelerated-scan's CUDA source, for float32 and the lengths that are timed: compiling all of
    it takes minutes. The kernels stay as they are."""
    for kind in ("__nv_bfloat16, at::BFloat16", "__half, at::Half"):
        source = source.replace(f"warpscan<{kind}>(gates, __VA_ARGS__);", "TORCH_CHECK(false);")
    parts = re.split(r"(?=if \(seqlen == )", source)
    for i, part in enumerate(parts):
        length = re.match(r"if \(seqlen == (\d+)", part)
        if length and int(length[1]) not in [shape[1] for shape in SHAPES]:
            parts[i] = re.sub(
                r"DISPATCH_SCAN\(.*?\);", "TORCH_CHECK(false);", part, count=1, flags=re.DOTALL
            )
    return "".join(parts)


def warp_scan() -> Peer:
    from torch.utils import cpp_extension

    build = cpp_extension.load_inline

    def load(*, cuda_sources: list[str], **kwargs: Any) -> Any:
        return build(cuda_sources=list(map(trimmed, cuda_sources)), **kwargs)

    cpp_extension.load_inline = load  # type: ignore[assignment]
    return accelerated_scan("warp")


def accelerated_scan(module: str) -> Peer:
    scan = importlib.import_module(f"accelerated_scan.{module}").scan

    def own(leaves: list[Tensor], bar: Tensor) -> tuple[list[Tensor], Tensor]:
        return [leaf(x.mT) for x in leaves], bar.mT.contiguous()

    return Peer("(B, D, T)", scan, own, lambda states: states.mT)


PEER: dict[str, Callable[[], Peer]] = {
    "mingru-scans": lambda: mingru_scan("triton"),
    "mingru-scans, eager": lambda: mingru_scan("eager"),
    "fla": fla_scan,
    "accelerated-scan": lambda: accelerated_scan("scalar"),
    WARP: warp_scan,
}


def as_peer(job: Row) -> None:
    """Runs in a process of its own; one line of JSON a row."""
    see_peers(job["peer"])
    if job["task"] == "build":
        warp_scan()
        return
    clock = Clock(job["device"])

    def tell(row: Row) -> None:
        emit(row)
        if "exception" not in row:
            clock.free()

    if job["task"] == "layers":
        shape = tuple(job["shapes"][0])
        for row in layer_rows(clock, peer_mixer, shape, library="mingru-scans"):
            tell(row)
        return
    if job["task"] == "delta":
        for shape in map(tuple, job["shapes"]):
            labels = {"library": "fla", "dtype": "bfloat16", "shape": shape}
            tell(attempt(labels, partial(delta_row, clock, "fla", "", shape, "bfloat16")))
        return
    for name in job["names"]:
        for shape in map(tuple, job["shapes"]):
            row = attempt({"peer": name, "shape": shape, "dtype": "float32"},
                          partial(peer_row, clock, name, shape))  # fmt: skip
            tell(row)
            if "exception" in row:
                clock.wait()  # ends here if the device was left broken


def peer_row(clock: Clock, name: str, shape: tuple[int, ...]) -> Row:
    peer = PEER[name]()
    return {"layout": peer.layout, **scan_row(clock, peer, "sigmoid", shape, "float32")}
