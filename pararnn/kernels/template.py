"""The one channelwise kernel template, filled from a Spec.

A lane is one channel of one sample: it carries ``S`` numbers through time and never looks at its
neighbours. A program walks a block of lanes through one chunk of the sequence. The kernels:

``forward``    every chunk walks from a guess (the state after a warm-up from zero), writes its
               states, and keeps its start, its end and its Jacobian product
``correct``    a Newton correction of the chunk starts, by looking back over the chunks before; a
               chunk whose start moves walks again, until it meets its old states
``repair``     chunks that still do not fit are walked again in the order of time
``adjoint_chunks``  the backward pass of every chunk, with a warm-up from the right
``readjoint``  the exact correction of what enters the chunks, by looking ahead
``decode``     one step, for streaming

A linear recurrence of several slots has four others (:mod:`pararnn.kernels.reduce`) in the place of
``correct`` and ``readjoint``; its ``forward`` and ``adjoint_chunks`` then start from what is known.

With one chunk, only ``forward`` and ``adjoint_chunks`` run. The loads of the next ``unroll`` steps are
issued before the present ones are used.
"""

from __future__ import annotations

from ..spec.program import print_program
from .backward import Backward
from .forward import Forward
from .pieces import ANY, commas, indent
from .reduce import Reduce


class Template(Forward, Backward, Reduce):
    """The text of one Spec's kernels; arguments as for :class:`~pararnn.kernels.pieces.Pieces`."""

    def decode_kernel(self) -> str:
        S = len(self.slots)
        batch = ["u_b", *["dt_b"] * self.timed, "u_c"]
        source = ["u", *["dt"] * self.timed]
        load = [
            f"s{i} = tl.load(h + (b * {S} + {i}) * D + d, mask=lane, other=0.0).to(DTYPE)"
            for i in self.slots
        ]
        for k in self.drives:
            given = self.spec.drive_list[k].given
            at = "dt + b * dt_b" if given else f"u + b * u_b + ({k} * D + d) * u_c"
            load.append(f"c{k}_0 = tl.load({at}, mask={ANY})")
        store = [f"put(out + (b * {S} + {i}) * D + d, s{i}, lane, ALIGNED)" for i in self.slots]
        inputs = commas(*source, "h", self.w, "out", "B", *batch)
        return f'''
@triton.jit(do_not_specialize=["B"])
def decode(
    {inputs},
    D: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr, DTYPE: tl.constexpr,
):
    """One step; every program reads its lanes before it writes them, so out may be h."""
    b, d, lanes, lane = place(tl.program_id(0), B, D, BLOCK, ALIGNED)
{indent(self.weights() + load, 1)}
    {self.s}{"," * (S == 1)} = step({self.arguments(0, self.s)})
{indent(store, 1)}
'''

    # -- the whole text --------------------------------------------------------------------------

    def text(self) -> str:
        """Source of the module with all kernels; equal Specs, equal text."""
        linearized = ("affine", "tangent", "transpose") if self.reduced else ("step_jacobian",)
        programs = [print_program(self.spec, p, "triton") for p in ("step", *linearized, "adjoint")]
        head = (
            f'"""Kernels of {self.spec.name}, from its Spec {self.spec.fingerprint[:12]}, by '
            'pararnn.kernels.template."""\n\n'
            "import triton\nimport triton.language as tl\n\n"
            "from pararnn.kernels.functions import *\n"
            "from pararnn.kernels.memory import *\n\n"
        )
        return head + "\n\n".join(
            [
                *programs,
                self.forward(),
                self.forward_kernels(),
                self.backward(),
                self.backward_kernels(),
                *[self.reduce_kernels()] * self.reduced,
                self.decode_kernel(),
            ]
        )
