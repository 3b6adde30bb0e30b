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
from pararnn.kernels.launch import kernels

name, kind, state, unroll, block = sys.argv[1:4] + [int(v) for v in sys.argv[4:]]
spec = get_cell(name).factory(3, 4).spec
found = kernels(spec, unroll, True, (True, len(spec.slots) > 1))
narrow = {"u", "dt", "last", "grad", "u_bar"} | {f"w{i}" for i in range(20)}
wide = {"h0", "final", "others", "rest", "h0_bar", "w_bar", "dt_bar", "edges", "h", "out"}
constants = dict(D=128, WIDTH=128 * len(spec.projected), PACKED=True, DENSE=True, BLOCK=block,
                 ALIGNED=True, DTYPE=getattr(tl, state), SEVERAL=True, MEET=kind == state,
                 PART=kind == state)
short = {"float32": "fp32", "float64": "fp64", "bfloat16": "bf16", "float16": "fp16"}
for kernel in ("forward", "readjoint", "decode"):  # every walk is in them
    fn = found[kernel]
    given = {k: v for k, v in constants.items() if k in fn.arg_names}
    signature = {}
    for arg in fn.arg_names:
        if arg in given:
            signature[arg] = "constexpr"
        elif arg in narrow | wide:
            signature[arg] = "*" + short[kind if arg in narrow else state]
        elif arg in ("r", "miss"):
            signature[arg] = {"r": "*u8", "miss": "*fp32"}[arg]
        else:
            signature[arg] = "fp32" if arg == "tol" else "i32"
    source = ASTSource(fn, signature, constexprs={(fn.arg_names.index(k),): v
                                                  for k, v in given.items()})
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
