"""Programs as source code, in three dialects.

``plain`` uses operators and named functions only, so the same text runs on NumPy arrays of floats,
of mpmath numbers, or of SymPy expressions. ``torch`` fuses ``a + b*c`` into ``addcmul`` and
``(1-w)*a + w*b`` into ``lerp``, and works in place on the temporaries that it has just made.
``triton`` is plain text under ``@triton.jit``, with the value that is known last in the last
operation. Printed text is deterministic: equal Specs, equal bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..derive import derive
from ..program import Apply, finished
from .python import PlainPrinter, TorchPrinter
from .triton import TritonPrinter

if TYPE_CHECKING:
    from ..spec import Spec

DIALECTS: dict[str, type[PlainPrinter]] = {
    "plain": PlainPrinter,
    "torch": TorchPrinter,
    "triton": TritonPrinter,
}


def print_program(spec: Spec, program: str = "step", dialect: str = "torch") -> str:
    """Source text of one program of the table of :mod:`pararnn.spec.derive`.

    Raises
    ------
    ValueError
        If the dialect is unknown, or the program is none that the Spec has.
    """
    made = derive(spec, program)
    if dialect not in DIALECTS:
        raise ValueError(f"got dialect {dialect!r}, expected one of {tuple(DIALECTS)}.")
    printer = DIALECTS[dialect](made.depth)
    statements, outputs = finished(made, printer.change)
    inputs, lines = list(made.inputs), []
    for statement in statements:
        value = statement.value
        if isinstance(value, Apply):
            text = f"{value.function}({value.argument}, {printer(value.operand)})"
        else:
            text = printer(value)
        if statement.symbol == made.target and printer.into(text) != text:
            text = printer.into(text)
            inputs.append("_out=None")
        lines.append(f"    {statement.symbol.name} = {text}")
    results = ["None" if out is None else printer(out) for out in outputs]
    head = ["@triton.jit"] * (dialect == "triton") + [f"def {program}({', '.join(inputs)}):"]
    tail = f"    return ({', '.join(results)}{',' * (len(results) == 1)})"
    return "\n".join([*head, *lines, tail]) + "\n"
