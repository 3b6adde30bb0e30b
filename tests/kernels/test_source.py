"""Text of the kernels, and the plans that they run by."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import pararnn
from pararnn import Spec, kernels
from pararnn.kernels import channelwise, source
from pararnn.kernels.plan import CORRECTIONS, Plan, plan
from pararnn.spec import tanh

NAMES = ("ParaGRU[diag]", "ParaLSTM", "ParaSLSTM[sigmoid]", "ParaCfC[published]", "ParaNLRU")


def spec_of(name):
    return pararnn.get_cell(name).factory(2).spec


@pytest.mark.parametrize("name", NAMES)
def test_text_is_python_and_reads_the_same(name):
    text = source(spec_of(name))
    assert text == source(spec_of(name))
    functions = {f.name for f in ast.parse(text).body if isinstance(f, ast.FunctionDef)}
    assert functions == {"step", "step_jacobian", "adjoint"}


PRINT = """
import hashlib, pararnn
from pararnn import Spec, kernels
from pararnn.kernels import channelwise, source
for name in {names}:
    spec = pararnn.get_cell(name).factory(2).spec
    print(hashlib.sha256(source(spec).encode()).hexdigest())
import sys
assert "triton" not in sys.modules
"""


@pytest.mark.slow
def test_text_is_the_same_in_every_process():
    found = set()
    for seed in ("0", "1", "4242"):
        env = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", PRINT.format(names=NAMES)]
        done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
        assert done.returncode == 0, done.stderr
        found.add(done.stdout)
    assert len(found) == 1


def test_one_body_for_all_sizes(kit):
    """Nothing is printed or compiled again for another batch, length or chunk."""
    from pararnn.kernels.body import body

    body.cache_clear()
    for B, T, length in ((1, 2, 0), (2, 3, 0), (2, 3, 2), (3, 4, 1)):
        case = kit.Case("linear", B=B, T=T, length=length, h0=B > 1)
        kit.forward(case, kit.draw(case))
    assert body.cache_info().misses == 1


@pytest.mark.parametrize("module", ["walk", "walk_back", "reduce"])
def test_sizes_are_not_specialized(module):
    """Triton compiles a kernel again when a specialized argument changes, so sizes are not."""
    tree = ast.parse((Path(kernels.__file__).parent / f"{module}.py").read_text())
    sizes = {"B", "T", "L", "W", "chunks", "blocks", "once", "k"}
    launched = 0
    for f in tree.body:
        if isinstance(f, ast.FunctionDef) and isinstance(f.decorator_list[0], ast.Call):
            (named,) = [
                w.value for w in f.decorator_list[0].keywords if w.arg == "do_not_specialize"
            ]
            assert sizes & {a.arg for a in f.args.args} == set(ast.literal_eval(named)), f.name
            launched += 1
    assert launched


def test_making_a_cell_prints_no_kernel():
    code = (
        "import pararnn.kernels.programs as p; p.print_program = None; import pararnn, sys\n"
        "pararnn.ParaGRU(3, 4); pararnn.ParaLSTM(3, 4); assert 'triton' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_constants_are_told_apart_by_what_they_call():
    """Triton's caches know a compile-time constant by its key."""
    pytest.importorskip("triton")
    from pararnn.kernels.body import Body, Shape

    spec, other = spec_of("ParaGRU[diag]"), spec_of("ParaLSTM")
    made = Body(spec, 4)
    assert made == Body(spec, 4)
    assert hash(made) == hash(Body(spec, 4))
    different = [
        Body(spec, 8),
        Body(spec, 4, True),
        Body(spec, 4, grads=(True, True)),
        Body(other, 4),
    ]
    different.append(Body(spec, 4, apart=True))
    assert len({repr(b) for b in (made, *different)}) == 6
    assert all(made != b for b in different)
    import triton.language as tl

    shapes = [
        Shape(8, 24, p, d, 32, t) for p in (0, 1) for d in (0, 1) for t in (tl.float32, tl.float64)
    ]
    assert len({repr(s) for s in shapes}) == 8


def test_unused_specs_are_forgotten_by_name_only():
    from pararnn.solvers.operator import register

    spec = spec_of("ParaLSTM")
    assert register(spec) == register(spec_of("ParaLSTM")) == spec.fingerprint


# -- plans -------------------------------------------------------------------------------------

SHAPES = [(B, T, D) for B in (1, 64, 4096) for T in (0, 1, 31, 512, 100_000) for D in (1, 96, 1024)]


@pytest.mark.parametrize("name", ["ParaGRU[diag]", "ParaSLSTM[sigmoid]"])
@pytest.mark.parametrize("itemsize", [2, 4, 8])
@pytest.mark.parametrize("backward", [False, True])
def test_plans_are_possible(name, itemsize, backward):
    spec = spec_of(name)
    for B, T, D in SHAPES:
        p = plan(spec, B, T, D, itemsize, 132, backward=backward)
        assert 1 <= p.length <= max(T, 1)
        assert p.chunks(T) * p.length >= T > (p.chunks(T) - 1) * p.length or T == 0
        assert p.block in (32, 64, 128)
        assert p.unroll in (2, 4, 8, 16)
        assert p.warmup >= 1
        assert p.corrections == CORRECTIONS
        if T < 32:
            assert p.chunks(T) == 1, "a short sequence was cut"
        if B * D >= 4096 * 1024 and T <= 512:
            assert p.chunks(T) == 1, "a full machine got chunks"


def test_more_lanes_never_need_more_chunks():
    spec = spec_of("ParaGRU[diag]")
    for T in (512, 8192, 131072):
        counts = [plan(spec, B, T, 1024, 4, 132).chunks(T) for B in (1, 2, 4, 8, 16, 32, 64, 128)]
        assert counts == sorted(counts, reverse=True)
    assert plan(spec, 1, 131072, 256, 4, 132).chunks(131072) > 16


def test_what_is_given_is_kept():
    spec = spec_of("ParaLSTM")
    p = plan(spec, 2, 100, 64, 4, 132, length=7, warmup=3, corrections=1, tol=1e-3)
    assert (p.length, p.warmup, p.corrections, p.tol) == (7, 3, 1, 1e-3)
    assert plan(spec, 2, 5, 64, 4, 132, length=7).length == 5
    assert p.chunks(100) == 15


def test_chunks_of_a_plan():
    assert [Plan(length=3).chunks(T) for T in (0, 1, 3, 4, 6, 7)] == [1, 1, 1, 2, 2, 3]


def test_half_precision_carries_float32(kit):
    from pararnn.kernels.launch import Problem

    u = torch.zeros(1, 2, 9, dtype=torch.bfloat16)
    assert Problem(spec_of("ParaGRU[diag]"), u, ()).dtype == torch.float32
    assert Problem(spec_of("ParaGRU[diag]"), u.double(), ()).dtype == torch.float64


@pytest.mark.parametrize(
    ("exponent", "text"),
    [
        (3, "h*square(h)"),
        (4, "square(square(h))"),
        (-1.5, "1/(h*sqrt(h))"),
        (7, "h*square(h*square(h))"),
    ],
)
def test_powers_are_products(exponent, text):
    """Triton has no ``**``."""
    spec = powered(exponent)
    assert channelwise(spec) is None
    assert text in source(spec)
    assert "**" not in source(spec)


@pytest.mark.parametrize("exponent", [1 / 3, 0.3, None])
def test_other_powers_are_refused(exponent):
    reason = channelwise(powered(exponent))
    assert "cannot be printed for Triton" in reason
    assert "half of one as exponent" in reason


def powered(exponent):
    with Spec("Powered") as s:
        h = s.state("h", bounds=(-1, 1))
        (u,) = s.drives("u")
        s.next(h, tanh(u + h ** (u if exponent is None else exponent)))
    return s
