"""The programs of a Spec, derived from its stages.

==================  ==========================================================================
``step``            next value of every slot
``read``            what a layer passes on, where that is not the state: arguments of ``step``, with
                    the new state for every slot
``step_jacobian``   (channelwise Specs) the same statements, then the S×S Jacobian entries
``affine``          (linear, channelwise Specs) arguments of ``step`` without the slots; the
                    state-carrying coefficients, then the next value of every slot from zero
``coefficients``    state-carrying coefficients of the factorized Jacobian
``linearization``   those, the coefficients of drives and parameters, and operands of linear maps
``channel_jacobian``  the S×S entries from coefficients and (the diagonals of) the maps
``tangent``         JVP from coefficients: perturbation of the state → of its update
``transpose``       VJP from coefficients: cotangent of the update → of the state
``majorant``        ``tangent`` with absolute coefficients: bounds a perturbation from above
``gradients``       from a linearization and the cotangent of the update: the cotangents of drives
                    and elementwise parameters, and (cotangent, operand) of every linear map
``adjoint``         (channelwise Specs) one step of the backward pass: ``linearization``,
                    ``transpose`` and ``gradients`` in one; arguments of ``step``, then cotangents
                    of the update → cotangents of every argument
==================  ==========================================================================
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ..program import Program
from . import backward, forward, tangent

if TYPE_CHECKING:
    from ..spec import Spec

PROGRAMS: dict[str, Callable[[Spec], Program]] = {
    f.__name__: f
    for f in (
        *(forward.step, forward.read, forward.step_jacobian, forward.affine),
        *(forward.coefficients, forward.linearization, forward.channel_jacobian),
        *(tangent.tangent, backward.transpose, backward.gradients, tangent.majorant),
        backward.adjoint,
    )
}


def derive(spec: Spec, program: str) -> Program:
    """One program of the table above.

    Raises
    ------
    ValueError
        If the program is unknown, or is none that the Spec has: ``step_jacobian`` and ``adjoint`` of
        one that mixes channels, ``affine`` of one that is not linear, ``read`` without a read-out.
    """
    if program not in PROGRAMS:
        raise ValueError(f"got program {program!r}, expected one of {tuple(PROGRAMS)}.")
    if program in ("step_jacobian", "adjoint") and not spec.channelwise:
        raise ValueError(
            f"{spec.name}: {program!r} needs a channelwise Spec, but maps mix channels; "
            "use 'coefficients' with 'tangent' or 'transpose'."
        )
    return PROGRAMS[program](spec)
