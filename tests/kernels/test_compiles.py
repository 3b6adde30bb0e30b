"""Kernels compile for a GPU, which needs none; the interpreter does not tell."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

PROGRAM = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
import triton.language as tl
from pararnn import get_cell
from pararnn.kernels import launch
from pararnn.kernels.body import Body, Shape

name, kind, state, unroll, block = sys.argv[1:4] + [int(v) for v in sys.argv[4:]]
spec = get_cell(name).factory(3, 4).spec
body = Body(spec, unroll, True, (True, len(spec.slots) > 1))
columns = 128 * len(spec.projected)
shape = Shape(128, columns, True, True, block, getattr(tl, state))
short = {"float32": "*fp32", "float64": "*fp64", "bfloat16": "*bf16", "float16": "*fp16"}
narrow, wide = short[kind], short[state]
inputs = (narrow,) * (1 + body.timed.value) + ("*u8",)
several = len(spec.slots) > 1
types = dict(
    inputs=inputs, weights=(narrow,) * body.params.value, batch=("i32",) * len(inputs),
    strides=("i32",) * len(inputs), channels=("i32",), stored=(narrow, wide)[: 1 + several],
    grads=(narrow, wide)[: 1 + several], grad_strides=("i32",) * 3, bars=(narrow,),
    h0=wide, gap_bar=wide if body.timed.value else "constexpr", final=wide, h0_bar=wide, w_bar=wide,
    edges=wide, h=wide, out=wide, miss="*fp32", tol="fp32",
)
constants = dict(body=body, shape=shape, SEVERAL=True, MEET=kind == state, PART=kind == state,
                 gap_bar=None)
for kernel in ("forward", "readjoint", "decode"):  # every walk is in them
    fn = getattr(launch, kernel)
    if kernel == "decode":
        constants["body"] = Body(spec, 1)
        types |= dict(inputs=inputs[:-1], batch=types["batch"][:-1])
    signature, values = {}, {}
    for i, arg in enumerate(fn.arg_names):
        signature[arg] = types.get(arg, "constexpr" if arg in constants else "i32")
        if signature[arg] == "constexpr":
            values[(i,)] = constants[arg]
    source = ASTSource(fn, signature, constexprs=values)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 1})
    assert made.asm["cubin"], kernel
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind", "state", "unroll", "block"),
    [
        ("ParaGRU[diag]", "float32", "float32", 4, 32),
        ("ParaCfC[published]", "bfloat16", "float32", 4, 64),  # two-byte numbers move in pairs
        ("ParaNLRU", "float64", "float64", 2, 32),
    ],
)
def test_for_sm_90(name, kind, state, unroll, block, tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, name, kind, state, str(unroll), str(block)],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]


DELTA = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from pararnn.kernels import chain, delta

kind, rows, resets = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "True"
precision = "ieee" if kind == "fp64" else "tf32x3"
sizes = dict(K=rows, V=rows, NH=2, M=32, BK=rows, BV=32, DECAY=True, PRECISION=precision)
sizes |= dict(ROWS=rows, COLS=16, resets=None, cuts=None)
kernels = [delta.prepare, delta.emit, delta.pull, delta.pull_values, delta.gradients]
for fn, back in [(k, False) for k in kernels] + [(chain.walk_chain, b) for b in (False, True)]:
    signature, values = {}, {}
    for i, arg in enumerate(fn.arg_names):
        if arg in ("resets", "cuts") and resets:
            signature[arg] = "*u8"
        elif arg in sizes or arg == "BACK":
            signature[arg], values[(i,)] = "constexpr", sizes.get(arg, back)
        elif arg in ("steps", "chunks", "HEADS", "T"):
            signature[arg] = "i32"
        else:
            signature[arg] = ("i32",) * 5 if arg.endswith("_s") else "*" + kind
    made = triton.compile(ASTSource(fn, signature, constexprs=values),
                          target=GPUTarget("cuda", 90, 32), options={"num_warps": 2})
    assert made.asm["cubin"], fn
"""


@pytest.mark.slow
@pytest.mark.parametrize("resets", [False, True])
@pytest.mark.parametrize("kind", ["fp32", "fp64"])
def test_the_delta_rule_for_sm_90(kind, resets, tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", DELTA, kind, "32", str(resets)],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
