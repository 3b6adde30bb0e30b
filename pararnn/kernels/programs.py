"""The device programs of a Spec: what is printed of its kernels. It needs no Triton."""

from __future__ import annotations

import sympy

from ..spec import Spec
from ..spec.print import print_program
from .plan import reduced

HEAD = "import triton\nimport triton.language as tl\n\nfrom pararnn.kernels.functions import *\n\n"


def programs_of(spec: Spec) -> tuple[str, ...]:
    """The printed programs that the kernels of a Spec call."""
    linearized = ("affine", "tangent", "transpose") if reduced(spec) else ("step_jacobian",)
    return ("step", *linearized, "adjoint")


def programs_text(spec: Spec) -> str:
    """Source of a Spec's device programs; equal Specs, equal text."""
    title = f'"""Device programs of {spec.name}, printed from its Spec {spec.fingerprint[:12]}."""'
    printed = (print_program(spec, name, "triton") for name in programs_of(spec))
    return "\n\n".join([title, HEAD + next(printed), *printed])


def unprintable(spec: Spec) -> str | None:
    """Why the programs cannot be printed for a GPU; None if they can."""
    for stage in spec.stages:
        for power in stage.expr.atoms(sympy.Pow):
            exponent = power.exp
            if not exponent.is_number or float(2 * exponent) != int(2 * exponent):
                return (
                    f"its expressions cannot be printed for Triton: got the power {power}, expected "
                    "an integer or half of one as exponent"
                )
    return None
