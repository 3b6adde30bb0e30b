"""One exact scan, for a recurrence that is linear in its state.

Where no map mixes channels, ``h_t = A_t h_{t−1} + b_t`` with ``A_t`` and ``b_t`` from the drives
alone. Both come from a few operations on the whole sequence, and a scan has all states; its adjoint
is a scan of the same kind.
"""

from __future__ import annotations

from typing import cast

from torch import Tensor

from ..._checks import full_precision
from ...scan import affine_scan
from ...scan.autograd import scan
from ...spec import Spec
from .. import operator
from ..adjoint import GROUP
from ..columns import column_scan
from ..config import HostProgress, Solution
from ..cost import chunk_cut
from ..problem import Problem
from ..spec_recurrence import SpecRecurrence
from .method import Choice, Method, asked_otherwise
from .results import call_of, solution_of


def scannable(spec: Spec) -> bool:
    """Whether one scan solves a Spec: linear in the state, and channels do not mix."""
    return spec.jac_structure == "linear" and spec.channelwise


def asked_chunks(problem: Problem) -> str | None:
    """Why one pass over the whole sequence is not what was asked for; None if it is."""
    if (other := asked_otherwise(problem)) is not None:
        return other
    if not problem.free:
        return "asked for: chunk_length or max_iters"
    if problem.config.jacobian not in ("auto", "exact"):
        return f"asked for: jacobian={problem.config.jacobian!r}"
    return None


def one_scan(problem: Problem) -> Choice:
    """What a scan of the whole sequence runs, whether it forms states or only reads from them."""
    total, reason = problem.total, "linear in its state: one exact scan"
    return Choice("scan", "eager", total, min(total, 1), reason)


class Scan(Method):
    """See :mod:`.scan`."""

    name = "scan"

    def unfit(self, problem: Problem) -> str | None:
        if (other := asked_chunks(problem)) is not None:
            return other
        if problem.spec is None:
            return f"{problem.recurrence.name} has no Spec"
        if not scannable(problem.spec):
            return "it is not linear in its state, or its maps mix channels"
        return None

    def cost(self, problem: Problem) -> float:
        """A step of a scan is one product and one sum, of a printed step many."""
        return chunk_cut(problem.total, problem.numbers, problem.u.device.type).cost / 2

    def choice(self, problem: Problem) -> Choice:
        return one_scan(problem)

    def run(self, problem: Problem, choice: Choice) -> Solution:
        if problem.differentiated:
            return solution_of(problem, choice, transformable_states(problem), HostProgress())
        states, _, final, _ = operator.solve(*call_of(problem, operator.Settings("scan")))
        return solution_of(problem, choice, states, HostProgress(), final)


def transformable_states(problem: Problem) -> Tensor:
    """All states from operations that derivatives of ``torch.func`` and forward mode see through,
    any number of times. It keeps the operators of all steps."""
    recurrence = cast(SpecRecurrence, problem.recurrence)
    with full_precision(problem.u.device):
        coefficients, b = recurrence.affine(problem.inputs)
        op = recurrence.operator(coefficients, "exact", b)
        if not recurrence.several:
            return scan(op, b, problem.h0, resets=problem.resets)
        given = op.flatten(4), b.flatten(3), problem.h0.flatten(2)
        states = scan(*given, "block", resets=problem.resets)
        return states.unflatten(-1, recurrence.state_shape[1:])


# -- in the operator -------------------------------------------------------------------------------


def run_scan(call: operator.Call) -> operator.Results:
    """All states, by rows of the batch."""
    output, others, _ = operator.empty_results(call)
    with full_precision(call.u.device):
        recurrence, u, h0, resets = call.recurrence(), call.packed, call.start, call.resets
        for rows in groups(u, h0[:1].numel()):
            local = None if resets is None else resets[rows]
            linear_states(recurrence, u[rows], h0[rows], local, output[rows])
    return output, others, output[:, -1].clone() if u.shape[1] else h0.clone(), HostProgress()


def linear_states(
    recurrence: SpecRecurrence, u: Tensor, h0: Tensor, resets: Tensor | None, out: Tensor
) -> Tensor:
    """All states ``(B, T, *state_shape)`` from packed drives ``(B, T, C)``, written to ``out``."""
    if u.shape[1] == 0:
        return out
    coefficients, b = recurrence.affine(u)
    if recurrence.several:
        arguments = (recurrence.tangent, coefficients, b, h0, resets)
        return column_scan(*arguments, axes=len(recurrence.spec.axes), reverse=False, out=out)
    a = recurrence.operator(coefficients, "exact", b)
    return affine_scan(a, b, h0, resets=resets, out=out)


def groups(u: Tensor, numbers: int) -> list[slice]:
    """Rows to compute at a time, so that intermediates stay in the cache of a CPU."""
    size = u.shape[0] if u.device.type != "cpu" else GROUP // max(1, u.shape[1] * numbers)
    size = max(1, size)
    return [slice(i, i + size) for i in range(0, u.shape[0], size)]


operator.RUNS["scan"] = operator.Run(run_scan, operator.eager_backward)
