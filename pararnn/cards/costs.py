"""What one step of a cell costs, counted from its Spec, and how its Jacobian class is solved."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import sympy

from ..spec import Spec
from ..spec.declarations import Elementwise, Linear
from ..spec.functions import primitive_of

HEADS = sympy.Symbol("heads", positive=True)


@dataclass(frozen=True)
class JacobianClass:
    """How the solver treats a Jacobian class."""

    name: str
    meaning: str
    path: str
    operator: str


CLASSES = {
    "diag": JacobianClass(
        "diag",
        "One number a channel: no channel of the state influences another within a step.",
        "shooting, exact Jacobian",
        "exact, one number a channel",
    ),
    "block": JacobianClass(
        "block",
        "One small dense block a channel, between the state slots of that channel.",
        "shooting, exact Jacobian",
        "exact, one block a channel",
    ),
    "head": JacobianClass(
        "head",
        "Dense within a head, zero between heads.",
        "shooting, quasi-Jacobian",
        "diagonal quasi-Jacobian",
    ),
    "dense": JacobianClass(
        "dense",
        "Every channel of the state influences every other one.",
        "shooting, quasi-Jacobian",
        "diagonal quasi-Jacobian",
    ),
    "m2rnn": JacobianClass(
        "m2rnn",
        "The matrix state is multiplied from the right: rows do not mix, columns do. The Jacobian "
        "is only used in its factorized form.",
        "shooting, quasi-Jacobian",
        "row-averaged quasi-Jacobian, one right multiplication",
    ),
    "linear": JacobianClass(
        "linear",
        "Independent of the state: the recurrence is linear, and one correction solves it exactly.",
        "linear scan",
        "exact",
    ),
}


def jacobian_class(spec: Spec) -> JacobianClass:
    """The description of a Spec's Jacobian class."""
    return CLASSES[spec.jac_structure.rstrip("0123456789")]


@dataclass(frozen=True)
class Path:
    """One way to solve a sequence: passes over the data, and what must be done in a row.
    All in Markdown."""

    name: str
    passes: str
    depth: str


PATHS = (
    Path("sequential", r"\(1\)", r"\(T\) steps"),
    Path(
        "shooting",
        r"\(k + 1 + \tfrac{w}{L}\)",
        r"\(L\) steps a pass, and a scan over the \(T/L\) chunks a correction; one more pass if "
        "operators are needed after the first",
    ),
    Path(
        r"Newton, \(L = 1\)",
        r"\(k + 2\)",
        r"one step a pass, for all times at once, and a linear recurrence over \(T\) a correction",
    ),
)
SCAN = Path(
    "scan (linear, exact; what PyTorch operations do by default)",
    r"\(2\)",
    r"\(L\) steps a pass, and a scan over the \(T/L\) chunks once",
)
"""What takes the place of iterations where a recurrence is linear in its state."""


@dataclass(frozen=True)
class Cost:
    """One line of the cost table: a quantity and its size, as a SymPy expression."""

    quantity: str
    size: sympy.Expr

    @property
    def latex(self) -> str:
        return sympy.latex(self.size, symbol_names=_LATEX)


_LATEX = {sympy.Symbol("d_h", positive=True): "d_h", HEADS: r"n_{\mathrm{heads}}"}


def axis_symbol(spec: Spec, axis: str) -> sympy.Symbol:
    """Size of a state axis; the only axis of a vector state is called ``d_h``."""
    return sympy.Symbol("d_h" if len(spec.axes) == 1 else axis, positive=True)


def _size(spec: Spec, axes: Iterable[str]) -> sympy.Expr:
    return sympy.Mul(*[axis_symbol(spec, a) for a in axes])


def _map_work(spec: Spec, stage: Linear) -> sympy.Expr:
    """Multiplications of one application of a recurrent map to one state, or in a sum of products
    over an axis."""
    if stage.map.structure == "contract":
        return _size(spec, spec.axes_of(stage.operand))
    state = _size(spec, spec.axes)
    last = axis_symbol(spec, spec.axes[-1])
    return {
        "diagonal": state,
        "head": state * last / HEADS,
        "dense": state * last,
        "right": state * last,
    }[stage.map.structure]


def costs(spec: Spec) -> tuple[Cost, ...]:
    """Counts for one step of one sample.

    "Multiplications" are those of the recurrent maps; the elementwise ones are a small multiple of
    the number of function values.
    """
    fz = spec.factorization
    slots = len(spec.slots)
    state = slots * _size(spec, spec.axes)
    calls = sum(
        (
            _size(spec, spec.axes_of(st.expr))
            for st in spec.stages
            if isinstance(st, Elementwise) and primitive_of(st.expr) is not None
        ),
        sympy.Integer(0),
    )
    maps = sum((_map_work(spec, st) for st in fz.linear), sympy.Integer(0))
    carried = sum((_map_work(spec, st) for st in fz.carrying), sympy.Integer(0))
    coefficients = sum(
        (_size(spec, spec.axes_of(c)) for c in fz.coefficients[: fz.n_state]),
        sympy.Integer(0),
    )
    operator, composition = _operator(spec)
    return (
        Cost("state, numbers", state),
        Cost("step: function values", calls),
        Cost("step: multiplications in recurrent maps", maps),
        Cost("Jacobian: coefficients", coefficients),
        Cost("Jacobian times vector: multiplications in maps", carried),
        Cost("chunk operator, numbers", operator),
        Cost("chunk operator: multiplications to extend it by a step", composition),
        Cost("dense Jacobian, numbers (never formed in a solve)", state**2),
    )


def _operator(spec: Spec) -> tuple[sympy.Expr, sympy.Expr]:
    """Size of the operator that shooting carries along a chunk, and work to compose two."""
    structures = {st.map.structure for st in spec.factorization.carrying}
    if "right" in structures:
        width = axis_symbol(spec, spec.axes[-1])
        return width**2, width**3
    if spec.factorization.columnwise and structures:
        *copies, height, _ = (axis_symbol(spec, a) for a in spec.axes)
        return sympy.Mul(*copies) * height**2, sympy.Mul(*copies) * height**3
    slots, state = len(spec.slots), _size(spec, spec.axes)
    return slots**2 * state, slots**3 * state
