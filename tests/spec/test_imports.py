"""The spec package knows no tensors."""

from __future__ import annotations

import subprocess
import sys


def loaded(program: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", f"{program}; import sys; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    return set(done.stdout.split())


def test_specs_need_no_torch():
    program = (
        "from pararnn.spec import Spec, tanh, oracle, bounds\n"
        "with Spec('S') as s:\n"
        "    h = s.state('h', bounds=(-1, 1)); u, = s.drives('u')\n"
        "    w = s.map('w', structure='dense')\n"
        "    s.next(h, tanh(w(h) + u))\n"
        "s.latex(), s.jacobian_latex(), s.source('step'), s.source('gradients'), s.fingerprint\n"
        "oracle.prove_jacobian(s, {'d': 2}), bounds.derivative_bounds(s, [[[1.0]]], {'d': 1})"
    )
    modules = loaded(program)
    assert "sympy" in modules
    assert "torch" not in modules
    assert "triton" not in modules


def test_the_package_alone_loads_next_to_nothing():
    modules = loaded("import pararnn")
    assert not modules & {"torch", "sympy", "mpmath", "numpy", "triton"}
    modules = loaded("import pararnn; pararnn.solve; pararnn.ParaGRU; pararnn.ParaRNN")
    assert "triton" not in modules
