"""The one channelwise kernel template, filled from a Spec.

A lane is one channel of one sample: it carries ``S`` numbers through time and never looks at its
neighbours. A program walks a block of lanes through one chunk of the sequence. There are six
kernels:

``forward``    every chunk walks from a guess (the state after a warm-up from zero), writes its
               states, and keeps its start, its end and its Jacobian product
``correct``    a Newton correction of the chunk starts, by looking back over the chunks before; a
               chunk whose start moves walks again, until it meets its old states
``repair``     chunks that still do not fit are walked again in the order of time
``adjoint_chunks``  the backward pass of every chunk, with a warm-up from the right
``readjoint``  the exact correction of what enters the chunks, by looking ahead
``decode``     one step, for streaming

With one chunk, only ``forward`` and ``adjoint_chunks`` run. The loads of the next ``unroll`` steps are
issued before the present ones are used.

Names in the text: ``s0 …`` slots, ``c0_2`` drive 0 of the step in flight number 2, ``w0 …``
recurrent parameters, ``m0 …`` cotangents of the slots, ``j01`` entry (0, 1) of a Jacobian product.
"""

from __future__ import annotations

import sympy

from ..spec import Spec
from ..spec.program import print_program

Entry = tuple[int, int]

ANY = "mask=None if ALIGNED else lane"
FLAGS = "D: tl.constexpr, WIDTH: tl.constexpr, ALIGNED: tl.constexpr, DTYPE: tl.constexpr"


def commas(*parts: str) -> str:
    """The parts that are not empty, as one list."""
    return ", ".join(part for part in parts if part)


def indent(lines: list[str], depth: int) -> str:
    return "\n".join("    " * depth + line if line else "" for line in lines)


class Template:
    """The text of one Spec's kernels.

    Parameters
    ----------
    spec
        A channelwise Spec.
    unroll
        Steps in flight.
    resets
        Whether a mask says where the state starts anew.
    grads
        Whether there are cotangents of the last slot, and of the other slots.
    """

    def __init__(
        self,
        spec: Spec,
        unroll: int = 8,
        resets: bool = False,
        grads: tuple[bool, bool] = (True, False),
    ):
        self.spec, self.unroll, self.resets = spec, unroll, resets
        self.slots, self.drives = range(len(spec.slots)), range(len(spec.drive_list))
        self.params = range(len(spec.map_list) + len(spec.param_list))
        fz = spec.factorization
        rows = fz.channel_jacobian([sympy.Symbol(f"c{i}") for i in range(fz.n_state)])
        self.step: list[Entry] = [(i, j) for i in self.slots for j in self.slots if rows[i][j] != 0]
        self.product = self._closure()
        self.others = len(self.slots) - 1
        self.timed = any(d.given for d in spec.drive_list)
        self.s, self.m = self.names("s"), self.names("m")
        self.j = self.entries("j#")
        self.w = ", ".join(f"w{i}" for i in self.params)
        flight = range(unroll)
        loads = [f"c{k}" for k in self.drives] + ["x"] * resets
        self.c = ", ".join(f"{name}_{u}" for u in flight for name in loads)
        before = [f"p{i}" for i in self.slots]
        self.graded = [i for i in self.slots if grads[i < len(self.slots) - 1]]
        before += [f"g{i}" for i in self.graded]
        self.grads = ["grad"] * grads[0] + ["rest"] * (grads[1] and bool(self.others))
        self.v = ", ".join(f"v{i}" for i in self.params)
        self.p = ", ".join(f"{name}_{u}" for u in flight for name in before)
        self.source = ["u", *["dt"] * self.timed, *["r"] * resets]
        self.stored = ["last", *["others"] * bool(self.others)]
        self.strides = ", ".join(["u_t", "u_c", *["dt_t"] * self.timed, *["r_t"] * resets])

    def _closure(self) -> list[Entry]:
        """The entries that a product of Jacobians can have."""
        found = set(self.step) | {(i, i) for i in self.slots}
        while more := {(i, k) for i, j in found for jj, k in found if j == jj} - found:
            found |= more
        return sorted(found)

    def names(self, form: str) -> str:
        """``names("s")`` → ``"s0, s1"``; a form with ``#`` has the number in its place."""
        form = form + "#" if form.isidentifier() else form
        return ", ".join(form.replace("#", str(i)) for i in self.slots)

    def entries(self, form: str) -> str:
        return ", ".join(form.replace("#", f"{i}{k}") for i, k in self.product)

    def times(self, target: str, left: str, right: str, of: list[Entry], by: list[Entry]) -> str:
        """``target = left · right`` for matrices with structural zeros."""
        targets, values = [], []
        for i, k in self.product:
            terms = [
                f"{left}{i}{j}*{right}{j}{k}" for j in self.slots if (i, j) in of and (j, k) in by
            ]
            targets.append(f"{target}{i}{k}")
            values.append(" + ".join(terms) or f"0*{right}{k}{k}")
        return f"{', '.join(targets)} = {', '.join(values)}"

    def applied(self, target: str, matrix: str, vector: str, transposed: bool = False) -> list[str]:
        """``target += matrix · vector``; where the vector is 0, so is the product."""
        lines = []
        for i in self.slots:
            for j in self.slots:
                entry = (j, i) if transposed else (i, j)
                if entry in self.product:
                    value = f"{matrix}{entry[0]}{entry[1]}*{vector}{j}"
                    lines.append(f"{target}{i} += tl.where({vector}{j} == 0, 0.0, {value})")
        return lines

    # -- where things are ------------------------------------------------------------------------

    def slot_at(self, i: int, steps: str) -> str:
        """Address of a stored slot, some steps from where the pointers stand."""
        if i == len(self.slots) - 1:
            return f"last + {steps} * D"
        return f"others + ({steps} * {self.others} + {i}) * D"

    def fetch(self, u: int, steps: str, condition: str | None) -> list[str]:
        """Load the drives and the reset of a step; masked ones are never used."""
        mask = f"mask=both(lane, {condition}, ALIGNED)" if condition else ANY
        lines = []
        for k in self.drives:
            at = f"u + ({steps} * u_t + {k} * D * u_c)"
            if self.spec.drive_list[k].given:
                at = f"dt + {steps} * dt_t"
            lines.append(f"c{k}_{u} = tl.load({at}, {mask})")
        if self.resets:
            lines.append(f"x_{u} = tl.load(r + {steps} * r_t, {mask})")
        return lines

    def cut(self, u: int, names: list[str]) -> list[str]:
        """Where step ``u`` starts anew, what comes from before is zero."""
        return [f"{n} = tl.where(x_{u} != 0, 0.0, {n})" for n in names] if self.resets else []

    def arguments(self, u: int, state: str) -> str:
        """Arguments of the printed step programs at the step in flight ``u``."""
        drives = [f"c{k}_{u}.to(DTYPE)" for k in self.drives]
        return commas(state, *drives, self.w)

    def move(self, steps: str, pointers: list[str], sign: str = "+") -> list[str]:
        stride = {
            "u": "u_t",
            "dt": "dt_t",
            "r": "r_t",
            "last": "D",
            "others": f"{self.others} * D",
            "grad": "grad_t",
            "rest": f"{self.others} * D",
            "u_bar": "WIDTH",
            "dt_bar": "D",
        }
        return [f"{name} {sign}= {steps} * {stride[name]}" for name in pointers]

    def forward_step(self, u: int) -> list[str]:
        args = self.arguments(u, self.s)
        every = ", ".join(f"e{i}{j}" for i in self.slots for j in self.slots)
        step = [f"e{i}{j}" for i, j in self.step]
        return [
            *self.cut(u, self.s.split(", ")),
            "if JAC:",
            f"    {self.s}, {every} = step_jacobian({args})",
            *("    " + line for line in self.cut(u, step)),
            f"    {self.times('j', 'e', 'j', self.step, self.product)}",
            "else:",
            f"    {self.s}{',' * (len(self.slots) == 1)} = step({args})",
            *(
                f"tl.store({self.slot_at(i, str(u))}, s{i}, mask=both(lane, write, ALIGNED))"
                for i in self.slots
            ),
        ]

    def forward(self) -> str:
        U = self.unroll
        pointers = [*self.source, *self.stored]
        places = ", ".join(pointers)
        moved = " | ".join(
            f"far(jump(s{i}, o{i}), tl.maximum(tl.abs(o{i}), 1.0), tol / 4)" for i in self.slots
        )
        old = [f"o{i} = tl.load({self.slot_at(i, str(U - 1))}, {ANY})" for i in self.slots]
        units: list[str] = []
        for u in range(U):
            units += [f"# step {u}", *self.forward_step(u), *self.fetch(u, str(u), None)]
        start = ", ".join(f"tl.zeros_like(s0) + {int(i == k)}" for i, k in self.product)
        return f'''
@triton.jit
def walk(
    {commas(self.s, self.w, places)}, lane, n, write, {self.strides}, tol,
    {FLAGS}, JAC: tl.constexpr, MEET: tl.constexpr,
):
    """n steps from a state: the state after them, their Jacobian product, and whether the walk
    met the stored states on its way, so that those after hold."""
    {self.j} = {start}
    met = n < 0
    whole = tl.where(n >= {U}, {U}, 0)
{indent([line for u in range(U) for line in self.fetch(u, str(u), f"{u} < n")], 1)}
    while (n >= {U}) & (met == 0):
        if MEET:
{indent(old, 3)}
        # What a step loads is for the block after, or the same again if that is not whole.
        ahead = tl.where(n >= {2 * U}, {U}, 0)
{indent(self.move("ahead", self.source), 2)}
{indent(units, 2)}
{indent(self.move(str(U), self.stored), 2)}
        n -= {U}
        if MEET:
            met = tl.max(tl.where(lane, ({moved}).to(tl.int32), 0)) == 0
{indent(self.move("whole", self.source), 1)}
    if met == 0:
        for _ in range(n):
{indent(self.fetch(0, "0", None) + self.forward_step(0) + self.move("1", pointers), 3)}
    return {self.s}, {self.j}, met
'''

    # -- kernels of the forward pass -------------------------------------------------------------

    @property
    def inputs(self) -> str:
        """Arguments of every kernel, as far as this Spec has them."""
        batch = ["u_b", *["dt_b"] * self.timed, *["r_b"] * self.resets]
        return commas(*self.source, "h0", self.w, *batch, self.strides)

    def weights(self) -> list[str]:
        """Load the recurrent parameters, which stay in registers."""
        axes = [self.spec.axes] * len(self.spec.map_list)
        axes += [p.axes for p in self.spec.param_list]
        return [
            f"w{i} = tl.load(w{i} + d, mask=lane, other=0.0).to(DTYPE)"
            if axes[i]
            else f"w{i} = tl.load(w{i}).to(DTYPE)"
            for i in self.params
        ]

    def opening(self) -> list[str]:
        """Where this program is, and what it holds throughout."""
        return [
            "b, d, lanes, lane = place(index, B, D, BLOCK, ALIGNED)",
            "N = tl.cast(B, tl.int64) * D",
            "if PACKED:  # the strides are known",
            "    u_t = WIDTH",
            "    u_c = 1",
            *self.weights(),
        ]

    def at(self, t: str) -> str:
        """Pointers of a walk that begins at step ``t`` (a 64-bit number)."""
        base = {
            "u": "u + b * u_b + {t} * u_t + d * u_c",
            "dt": "dt + b * dt_b + {t} * dt_t",
            "r": "r + b * r_b + {t} * r_t",
            "last": "last + (b * T + {t}) * D + d",
            "others": f"others + (b * T + {{t}}) * {self.others} * D + d",
        }
        return ", ".join(base[name].format(t=t) for name in [*self.source, *self.stored])

    def walked(
        self, state: str, t: str, n: str, *, write: str = "True", jac: str, meet: str
    ) -> str:
        args = commas(state, self.w, self.at(t))
        flags = f"D, WIDTH, ALIGNED, DTYPE, {jac}, {meet}"
        return f"walk({args}, lane, {n}, {write}, {self.strides}, tol, {flags})"

    def row(self, kind: str, i: int) -> int:
        """Row of a chunk's record: its start, its end, its Jacobian product."""
        return i + {"start": 0, "end": len(self.slots), "jac": 2 * len(self.slots)}[kind]

    @property
    def rows(self) -> int:
        return 2 * len(self.slots) + len(self.product)

    def record(self, verb: str, kind: str, name: str, at: str) -> list[str]:
        """Load or store starts, ends or products of a chunk's record at ``at``."""
        keys = [f"{i}{k}" for i, k in self.product] if kind == "jac" else [*map(str, self.slots)]
        lines = []
        for i, key in enumerate(keys):
            where = f"{at} + {self.row(kind, i)} * N"
            if verb == "load":
                lines.append(f"{name}{key} = tl.load({where}, mask=lane, other=0.0)")
            else:
                lines.append(f"put({where}, {name}{key}, lane, ALIGNED)")
        return lines

    def finished(self, name: str) -> list[str]:
        """Write the state after the last step."""
        n = len(self.slots)
        return [
            f"put(final + (b * {n} + {i}) * D + d, {name}{i}, lane, ALIGNED)" for i in self.slots
        ]

    def forward_kernels(self) -> str:
        S = len(self.slots)
        outputs = ", ".join([*self.stored, "final", "edges", "miss"])
        sizes = "B, T, L, chunks, blocks"
        flags = (
            "D: tl.constexpr, WIDTH: tl.constexpr, PACKED: tl.constexpr,\n"
            "    BLOCK: tl.constexpr, ALIGNED: tl.constexpr, DTYPE: tl.constexpr"
        )
        scale = "tl.maximum(tl.abs(e#), 1.0)"
        loose = " | ".join(f"far(a{i}, {scale.replace('#', str(i))}, tol)" for i in self.slots)
        worst = "0.0"
        for i in self.slots:
            worst = f"tl.maximum({worst}, largest(a{i}, {scale.replace('#', str(i))}, lane))"
        size = "0.0"
        for i, k in self.product:
            size = f"tl.maximum({size}, largest(q{i}{k}, 1.0, lane))"
        return f'''
@triton.jit(do_not_specialize={["B", "T", "L", "W", "chunks", "blocks"]})
def forward(
    {self.inputs}, {outputs}, {sizes}, W, tol,
    {flags}, SEVERAL: tl.constexpr,
):
    """Guess and walk every chunk."""
    index = tl.program_id(0) % blocks
    chunk = tl.program_id(0) // blocks
{indent(self.opening(), 1)}
    begin = tl.cast(chunk, tl.int64) * L
    early = tl.maximum(begin - W, 0)
    if h0 is None:
        {self.s} = {self.names("tl.zeros([BLOCK], DTYPE)")}
    else:
{indent([f"s{i} = tl.load(h0 + (b * {S} + {i}) * D + d, mask=lane & (early == 0), other=0.0)" for i in self.slots], 2)}
    count = tl.minimum(L, T - begin).to(tl.int32)
    if SEVERAL:
        here = edges + tl.cast(chunk, tl.int64) * {self.rows} * N + lanes
        {self.j} = {self.entries("tl.zeros([BLOCK], DTYPE)")}
        for phase in range(2):
            t = tl.where(phase == 0, early, begin)
            n = tl.where(phase == 0, (begin - early).to(tl.int32), count)
            {self.s}, {self.j}, met = {self.walked(self.s, "t", "n", write="phase == 1", jac="True", meet="False")}
            if phase == 0:
{indent(self.record("store", "start", "s", "here"), 4)}
{indent(self.record("store", "end", "s", "here") + self.record("store", "jac", "j", "here"), 2)}
    else:
        {self.s}, {self.j}, met = {self.walked(self.s, "begin", "count", jac="False", meet="False")}
    if begin + L >= T:
{indent(self.finished("s"), 2)}


@triton.jit(do_not_specialize={["B", "T", "L", "chunks", "blocks", "k"]})
def correct(
    {self.inputs}, {outputs}, {sizes}, k, tol,
    {flags}, MEET: tl.constexpr,
):
    """Newton correction number k of every chunk's start, and a walk where it moved."""
    index = tl.program_id(0) % blocks
    chunk = tl.program_id(0) // blocks
{indent(self.opening(), 1)}
    active = k == 0
    if k > 0:
        active = worst(miss + (k - 1) * chunks * blocks + index, chunks, blocks) > tol
    if active:
        begin = tl.cast(chunk, tl.int64) * L
        record = {self.rows} * N
        here = edges + ((k % 2) * chunks + chunk) * record + lanes
{indent(self.record("load", "start", "s", "here"), 2)}
{indent(self.record("load", "end", "x", "here"), 2)}
{indent(self.record("load", "jac", "j", "here"), 2)}
        {self.names("e")} = {self.names("s")}
        {self.names("a")} = {self.names("tl.zeros_like(s#)")}
        if chunk > 0:
            there = here - record
{indent(self.record("load", "end", "e", "there"), 3)}
{indent([f"a{i} = jump(e{i}, s{i})" for i in self.slots], 3)}
{indent(self.record("load", "jac", "q", "there"), 3)}
            left = chunk - 1
            while (left > 0) & ({size} > tol / 16):
{indent(self.record("load", "start", "y", "there"), 4)}
                there -= record
{indent(self.record("load", "end", "z", "there"), 4)}
{indent([f"z{i} = jump(z{i}, y{i})" for i in self.slots], 4)}
{indent(self.applied("a", "q", "z"), 4)}
{indent(self.record("load", "jac", "y", "there"), 4)}
                {self.times("q", "q", "y", self.product, self.product)}
                left -= 1
        put(miss + (k * chunks + chunk) * blocks + index + tl.zeros([1], tl.int32), tl.zeros([1], tl.float32) + {worst}, True, True)
        loose = lane & ({loose})
        if tl.max(loose.to(tl.int32)) > 0:
{indent([f"e{i} = tl.where(tl.abs(a{i}) < float('inf'), s{i} + a{i}, e{i})" for i in self.slots], 3)}
            {self.s} = {self.names("tl.where(loose, e#, s#)")}
            {self.names("y")}, {self.entries("q#")}, met = {self.walked(self.s, "begin", "tl.minimum(L, T - begin).to(tl.int32)", jac="True", meet="MEET")}
            {self.names("x")} = {self.names("tl.where(met, x#, y#)")}
            {self.j} = {self.entries("tl.where(met, j#, q#)")}
            if begin + L >= T:
{indent(self.finished("x"), 4)}
        here = edges + (((k + 1) % 2) * chunks + chunk) * record + lanes
{indent(self.record("store", "start", "s", "here") + self.record("store", "end", "x", "here") + self.record("store", "jac", "j", "here"), 2)}
    else:
        put(miss + (k * chunks + chunk) * blocks + index + tl.zeros([1], tl.int32), tl.zeros([1], tl.float32), True, True)


@triton.jit(do_not_specialize={["B", "T", "L", "chunks", "blocks", "k"]})
def repair(
    {self.inputs}, {outputs}, {sizes}, k, tol,
    {flags}, MEET: tl.constexpr,
):
    """Walk again, in the order of time, every chunk that does not start where the one before
    ends; row k of miss gets their number."""
    index = tl.program_id(0)
{indent(self.opening(), 1)}
    count = 0
    if worst(miss + (k - 1) * chunks * blocks + index, chunks, blocks) > tol:
        record = {self.rows} * N
        here = edges + (k % 2) * chunks * record + lanes
{indent(self.record("load", "end", "e", "here"), 2)}
        for chunk in range(1, chunks):
            here += record
{indent(self.record("load", "start", "s", "here"), 3)}
{indent(self.record("load", "end", "x", "here"), 3)}
{indent([f"a{i} = jump(e{i}, s{i})" for i in self.slots], 3)}
            loose = lane & ({loose})
            if tl.max(loose.to(tl.int32)) > 0:
                count += 1
                begin = tl.cast(chunk, tl.int64) * L
                {self.s} = {self.names("tl.where(loose, e#, s#)")}
                {self.names("y")}, {self.j}, met = {self.walked(self.s, "begin", "tl.minimum(L, T - begin).to(tl.int32)", jac="False", meet="MEET")}
                {self.names("x")} = {self.names("tl.where(met, x#, y#)")}
            {self.names("e")} = {self.names("x")}
{indent(self.finished("e"), 2)}
    put(miss + k * chunks * blocks + index + tl.zeros([1], tl.int32), tl.zeros([1], tl.float32) + count, True, True)
'''

    # -- backward --------------------------------------------------------------------------------

    def fetch_back(self, u: int, steps: str, condition: str | None, last: bool) -> list[str]:
        """Load what the backward step ``steps`` before the pointers needs: drives, the state
        before it, and cotangents of the state after it. The ``last`` step of a block can be the
        first of the sequence, with no state before it."""
        lines = self.fetch(u, f"-{steps}", condition)
        mask = f"mask=both(lane, {condition}, ALIGNED)" if condition else ANY
        exists = " & ".join(
            [f"({condition})"] * bool(condition) + [f"({steps} < ahead_top)"] * last
        )
        before = f"mask=both(lane, {exists}, ALIGNED)" if exists else ANY
        lines += [
            f"p{i}_{u} = tl.load({self.slot_at(i, f'-{steps}')}, {before})" for i in self.slots
        ]
        for i in self.graded:
            at = f"grad - {steps} * grad_t"
            if i < self.others:
                at = f"rest + (-{steps} * {self.others} + {i}) * D"
            lines.append(f"g{i}_{u} = tl.load({at}, {mask})")
        return lines

    def backward_step(self, u: int, last: bool) -> list[str]:
        slots = self.slots
        args = self.arguments(u, self.names("p"))
        every = ", ".join(f"e{i}{j}" for i in slots for j in slots)
        step = [f"e{i}{j}" for i, j in self.step]
        columns = [k for k in self.drives if not self.spec.drive_list[k].given]
        drives, params = [f"d{k}" for k in self.drives], [f"h{i}" for i in self.params]
        results = ", ".join([self.m, *drives, *params])
        incoming = [f"m{i} + g{i}_{u}.to(DTYPE)" if i in self.graded else f"m{i}" for i in slots]
        there = "mask=both(lane, write, ALIGNED)"
        store = [f"tl.store(u_bar + (-{u} * WIDTH + {k} * D), d{k}, {there})" for k in columns]
        if self.timed:
            k = next(k for k in self.drives if self.spec.drive_list[k].given)
            store += [
                "if dt_bar is not None:",
                f"    tl.store(dt_bar - {u} * D, d{k}, {there})",
            ]
        size = "size"
        for i in slots:
            size = f"tl.maximum({size}, tl.abs(m{i}))"
        before = [f"p{i} = p{i}_{u}.to(DTYPE)" for i in slots]
        if last:
            before = [f"p{i} = tl.where(top == {u}, f{i}, p{i}_{u}.to(DTYPE))" for i in slots]
        return [
            *before,
            *self.cut(u, self.names("p").split(", ")),
            f"{self.m} = {', '.join(incoming)}",
            "if JAC:",
            f"    size = {size}",
            f"    {self.names('n')}, {every} = step_jacobian({args})",
            *("    " + line for line in self.cut(u, step)),
            f"    {self.times('j', 'j', 'e', self.product, self.step)}",
            f"{results} = adjoint({args}, {self.m})",
            *self.cut(u, self.m.split(", ")),
            *store,
            *(f"v{i} += h{i}" for i in self.params),
        ]

    def backward(self) -> str:
        U = self.unroll
        source = [*self.source, *self.stored, *self.grads]
        targets = ["u_bar"]
        places = ", ".join([*source, "u_bar", *["dt_bar"] * self.timed])
        held = commas(self.names("f"), self.w)
        strides = self.strides + ", grad_t" * ("grad" in self.grads)
        units: list[str] = []
        for u in range(U):
            last = u == U - 1
            units += [f"# step {u}", *self.backward_step(u, last)]
            units += self.fetch_back(u, str(u), None, last)
        prologue = [line for u in range(U) for line in self.fetch_back(u, str(u), f"{u} < n", True)]
        start = ", ".join(f"tl.zeros_like(m0) + {int(i == k)}" for i, k in self.product)
        out = commas(self.m, self.j, "size", self.v)
        timed = ["if dt_bar is not None:", f"    dt_bar -= {U} * D"] if self.timed else []
        timed_one = ["if dt_bar is not None:", "    dt_bar -= D"] if self.timed else []
        return f'''
@triton.jit
def walk_back(
    {self.m}, {held}, {places}, lane, n, top, write, {strides},
    {FLAGS}, JAC: tl.constexpr,
):
    """n steps backwards from step ``top``: the cotangent before them, the product of their
    Jacobians, the largest cotangent on the way, and the parameters' cotangents."""
    {self.j} = {start}
    size = tl.zeros_like(m0)
{indent([f"v{i} = tl.zeros_like(m0)" for i in self.params], 1)}
    ahead_top = top
    whole = tl.where(n >= {U}, {U}, 0)
{indent(prologue, 1)}
    while n >= {U}:
        # What a step loads is for the block before, or the same again if that is not whole.
        ahead = tl.where(n >= {2 * U}, {U}, 0)
        ahead_top = top - ahead
{indent(self.move("ahead", source, "-"), 2)}
{indent(units, 2)}
{indent(self.move(str(U), targets, "-") + timed, 2)}
        n -= {U}
        top -= {U}
{indent(self.move("whole", source, "-"), 1)}
    ahead_top = top
    for _ in range(n):
{indent(self.fetch_back(0, "0", None, True) + self.backward_step(0, True), 2)}
{indent(self.move("1", [*source, *targets], "-") + timed_one, 2)}
        top -= 1
        ahead_top = top
    return {out}
'''

    def walked_back(self, t: str, n: str, *, write: str = "True", jac: str) -> str:
        """A backward walk of n steps from step ``t``, which is included."""
        base = {
            "u": "u + b * u_b + ({t}) * u_t + d * u_c",
            "dt": "dt + b * dt_b + ({t}) * dt_t",
            "r": "r + b * r_b + ({t}) * r_t",
            "last": "last + (b * T + ({t}) - 1) * D + d",
            "others": f"others + (b * T + ({{t}}) - 1) * {self.others} * D + d",
            "grad": "grad + b * grad_b + ({t}) * grad_t + d * grad_c",
            "rest": f"rest + (b * T + ({{t}})) * {self.others} * D + d",
            "u_bar": "u_bar + (b * T + ({t})) * WIDTH + d",
        }
        places = [base[p].format(t=t) for p in [*self.source, *self.stored, *self.grads, "u_bar"]]
        if self.timed:
            places.append(f"None if dt_bar is None else dt_bar + (b * T + ({t})) * D + d")
        strides = self.strides + ", grad_t" * ("grad" in self.grads)
        held = commas(self.names("f"), self.w)
        return (
            f"walk_back({self.m}, {held}, {', '.join(places)}, lane, {n}, ({t}).to(tl.int32), "
            f"{write}, {strides}, D, WIDTH, ALIGNED, DTYPE, {jac})"
        )

    def backward_kernels(self) -> str:
        S, P = len(self.slots), len(self.params)
        rows = self.rows + 1  # and the size of the cotangents
        grads = [*self.grads, "u_bar", *["dt_bar"] * self.timed]
        outputs = ", ".join([*self.stored, *grads, "final", "h0_bar", "w_bar", "edges"])
        more = ", grad_b, grad_t, grad_c" if "grad" in self.grads else ""
        flags = (
            "D: tl.constexpr, WIDTH: tl.constexpr, PACKED: tl.constexpr,\n"
            "    BLOCK: tl.constexpr, ALIGNED: tl.constexpr, DTYPE: tl.constexpr"
        )
        out = commas(self.m, self.j, "size", self.v)
        first = [
            "if h0 is None:",
            f"    {self.names('f')} = {self.names('tl.zeros([BLOCK], DTYPE)')}",
            "else:",
            *(
                f"    f{i} = tl.load(h0 + (b * {S} + {i}) * D + d, mask=lane, other=0.0)"
                for i in self.slots
            ),
        ]
        ending = [
            *(
                f"put(w_bar + (tl.cast(chunk, tl.int64) * {P} + {i}) * N + lanes, v{i}, lane, "
                "ALIGNED)"
                for i in self.params
            ),
            "if chunk == 0:",
            *(
                f"    put(h0_bar + (b * {S} + {i}) * D + d, m{i}, lane, ALIGNED)"
                for i in self.slots
            ),
        ]
        scale = "tl.maximum(tl.abs(m#), size)"
        loose = " | ".join(f"far(a{i}, {scale.replace('#', str(i))}, tol)" for i in self.slots)
        peak = "0.0"
        for i, k in self.product:
            peak = f"tl.maximum({peak}, largest(q{i}{k}, 1.0, lane))"
        size_at = f"{rows - 1} * N"
        return f'''
@triton.jit(do_not_specialize={["B", "T", "L", "W", "chunks", "blocks"]})
def adjoint_chunks(
    {self.inputs}, {outputs}, B, T, L, chunks, blocks, W{more}, tol,
    {flags}, SEVERAL: tl.constexpr,
):
    """Cotangents of every chunk, from a guess of what enters it on the right."""
    index = tl.program_id(0) % blocks
    chunk = tl.program_id(0) // blocks
{indent(self.opening(), 1)}
{indent(first, 1)}
    begin = tl.cast(chunk, tl.int64) * L
    end = tl.minimum(begin + L, T)
    late = tl.minimum(end + W, T)
    if final is None:
        {self.m} = {self.names("tl.zeros([BLOCK], DTYPE)")}
    else:
{indent([f"m{i} = tl.load(final + (b * {S} + {i}) * D + d, mask=lane & (late == T), other=0.0)" for i in self.slots], 2)}
    count = (end - begin).to(tl.int32)
    if SEVERAL:
        here = edges + tl.cast(chunk, tl.int64) * {rows} * N + lanes
        size = tl.zeros([BLOCK], DTYPE)
        {self.j} = {self.entries("tl.zeros([BLOCK], DTYPE)")}
{indent([f"v{i} = tl.zeros([BLOCK], DTYPE)" for i in self.params], 2)}
        for phase in range(2):
            t = tl.where(phase == 0, late, end)
            n = tl.where(phase == 0, (late - end).to(tl.int32), count)
            {out} = {self.walked_back("t - 1", "n", write="phase == 1", jac="True")}
            if phase == 0:
{indent(self.record("store", "start", "m", "here"), 4)}
                put(here + {size_at}, size, lane, ALIGNED)
{indent(self.record("store", "end", "m", "here") + self.record("store", "jac", "j", "here"), 2)}
    else:
        {out} = {self.walked_back("end - 1", "count", jac="False")}
{indent(ending, 1)}


@triton.jit(do_not_specialize={["B", "T", "L", "chunks", "blocks"]})
def readjoint(
    {self.inputs}, {outputs}, B, T, L, chunks, blocks{more}, tol,
    {flags},
):
    """The exact correction of what enters a chunk on the right, and a walk where it moved."""
    index = tl.program_id(0) % blocks
    chunk = tl.program_id(0) // blocks
{indent(self.opening(), 1)}
    if chunk < chunks - 1:
        record = {rows} * N
        here = edges + tl.cast(chunk, tl.int64) * record + lanes
{indent(self.record("load", "start", "m", "here"), 2)}
        size = tl.load(here + {size_at}, mask=lane, other=1.0)
        there = here + record
{indent(self.record("load", "end", "a", "there"), 2)}
{indent([f"a{i} = jump(a{i}, m{i})" for i in self.slots], 2)}
{indent(self.record("load", "jac", "q", "there"), 2)}
        right = chunk + 1
        while (right < chunks - 1) & ({peak} > 0):
{indent(self.record("load", "start", "y", "there"), 3)}
            there += record
{indent(self.record("load", "end", "z", "there"), 3)}
{indent([f"z{i} = jump(z{i}, y{i})" for i in self.slots], 3)}
{indent(self.applied("a", "q", "z", transposed=True), 3)}
{indent(self.record("load", "jac", "y", "there"), 3)}
            {self.times("q", "y", "q", self.product, self.product)}
            right += 1
        loose = lane & ({loose})
        if tl.max(loose.to(tl.int32)) > 0:
{indent(first, 3)}
            {self.m} = {self.names("tl.where(loose, m# + a#, m#)")}
            begin = tl.cast(chunk, tl.int64) * L
            end = begin + L
            {out} = {self.walked_back("end - 1", "L + tl.zeros([], tl.int32)", jac="False")}
{indent(ending, 3)}
'''

    # -- decoding --------------------------------------------------------------------------------

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
            load.append(f"c{k}_0 = tl.load({at}, {ANY})")
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
        programs = [
            print_program(self.spec, p, "triton") for p in ("step", "step_jacobian", "adjoint")
        ]
        head = (
            f'"""Kernels of {self.spec.name}, from its Spec {self.spec.fingerprint[:12]}, by '
            'pararnn.kernels.template."""\n\n'
            "import triton\nimport triton.language as tl\n\n"
            "from pararnn.kernels.functions import *\n\n"
        )
        return head + "\n\n".join(
            [
                *programs,
                self.forward(),
                self.forward_kernels(),
                self.backward(),
                self.backward_kernels(),
                self.decode_kernel(),
            ]
        )
