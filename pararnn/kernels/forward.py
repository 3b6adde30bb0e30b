"""The kernels of the forward pass: ``forward``, ``correct`` and ``repair``."""

from __future__ import annotations

from .pieces import ANY, CONSTANTS, FLAGS, Pieces, commas, indent


class Forward(Pieces):
    """Walks a chunk forwards, and the kernels that do."""

    def forward_step(self, u: int) -> list[str]:
        args = self.arguments(u, self.s)
        every = ", ".join(f"e{i}{j}" for i in self.slots for j in self.slots)
        entries = [f"e{i}{j}" for i, j in self.step]
        plain = f"{self.s}{',' * (len(self.slots) == 1)} = step({args})"
        jacobian = [
            "if JAC:",
            f"    {self.s}, {every} = step_jacobian({args})",
            *("    " + line for line in self.cut(u, entries)),
            f"    {self.times('j', 'e', 'j', self.step, self.product)}",
            "else:",
            f"    {plain}",
        ]
        return [
            *self.cut(u, self.s.split(", ")),
            *(jacobian if not self.reduced else [plain]),
            *self.grown(u),
            *(
                f"write_if({self.slot_at(i, str(u))}, s{i}, both(lane, write, ALIGNED))"
                for i in self.slots
            ),
        ]

    def grown(self, u: int) -> list[str]:
        """The largest states since a reset, where they are asked for."""
        if self.linear:
            return []
        largest = [f"past{i} = tl.maximum(past{i}, tl.abs(s{i}))" for i in self.slots]
        lines = self.cut(u, self.past.split(", ")) + largest
        return ["if JAC or MEET:", *("    " + line for line in lines)]

    def forward(self) -> str:
        U = self.unroll
        pointers = [*self.source, *self.stored]
        places = ", ".join(pointers)
        moved = " | ".join(
            f"far(jump(s{i}, o{i}), {self.scale(f'o{i}', f'past{i}')}, tol / 4)" for i in self.slots
        )
        old = [f"o{i} = tl.load({self.slot_at(i, str(U - 1))}, mask={ANY})" for i in self.slots]
        units: list[str] = []
        for u in range(U):
            units += [f"# step {u}", *self.forward_step(u)]
        loads = [line for u in range(U) for line in self.fetch(u, str(u), None)]
        start = ", ".join(f"tl.zeros_like(s0) + {int(i == k)}" for i, k in self.product)
        return f'''
@triton.jit
def walk(
    {commas(self.s, self.w, places)}, lane, n, write, once, {self.strides}, tol,
    {FLAGS}, JAC: tl.constexpr, MEET: tl.constexpr,
):
    """n steps from a state: the state after them, their Jacobian product, {"" if self.linear else "the largest states,"}
    and whether the walk met the stored states on its way, so that those after hold."""
    {self.j} = {start}
{indent([f"past{i} = tl.abs(s{i})" for i in self.slots if self.past], 1)}
    met = n < 0
    whole = tl.where(n >= {U}, {U}, 0)
{indent([line for u in range(U) for line in self.fetch(u, str(u), f"{u} < n")], 1)}
    while (n >= {U}) & (met == 0):
        if MEET:
{indent(old, 3)}
        # Load the block of steps after this one, or this one again if that is not whole. The
        # loop of one pass keeps the compiler from moving the loads to where they are waited for.
        ahead = tl.where(n >= {2 * U}, {U}, 0)
{indent(self.move("ahead", self.source), 2)}
{indent(self.following(loads), 2)}
        for _ in range(once):
{indent(units, 3)}
        {self.c} = {", ".join(self.following(self.c.split(", ")))}
{indent(self.move(str(U), self.stored), 2)}
        n -= {U}
        if MEET:
            met = tl.max(tl.where(lane, ({moved}).to(tl.int32), 0)) == 0
{indent(self.move("whole", self.source), 1)}
    if met == 0:
        for _ in range(n):
{indent(self.fetch(0, "0", None) + self.forward_step(0) + self.move("1", pointers), 3)}
    return {commas(self.s, self.j, self.past)}, met
'''

    def walked(
        self, state: str, t: str, n: str, *, write: str = "True", jac: str, meet: str
    ) -> str:
        args = commas(state, self.w, self.at(t, [*self.source, *self.stored]))
        flags = f"D, WIDTH, ALIGNED, DTYPE, {jac}, {meet}"
        return f"walk({args}, lane, {n}, {write}, once, {self.strides}, tol, {flags})"

    def finished(self, name: str) -> list[str]:
        """Write the state after the last step."""
        n = len(self.slots)
        return [
            f"put(final + (b * {n} + {i}) * D + d, {name}{i}, lane, ALIGNED)" for i in self.slots
        ]

    @property
    def outputs(self) -> str:
        """What every kernel of the forward pass writes to, and its sizes."""
        return ", ".join([*self.stored, "final", "edges", "miss", "B, T, L, chunks, blocks, once"])

    @property
    def loose(self) -> str:
        """Which lanes of a chunk start away from where the chunk before ends."""
        return " | ".join(f"far(a{i}, {self.scale(f'e{i}', f'b{i}')}, tol)" for i in self.slots)

    def scale(self, state: str, past: str) -> str:
        """What a difference of states is compared to. In a linear recurrence a small state is as
        exact as a large one, and may grow."""
        return f"tl.abs({state})" if self.linear else f"sized({state}, {past})"

    def guessed(self) -> list[str]:
        """Walk a chunk from a guess, and keep what a correction needs."""
        walk = self.walked(self.s, "t", "n", write="phase == 1", jac="True", meet="False")
        return [
            f"here = edges + tl.cast(chunk, tl.int64) * {self.rows} * N + lanes",
            f"{self.j} = {self.entries('tl.zeros([BLOCK], DTYPE)')}",
            *(f"past{i} = tl.zeros([BLOCK], DTYPE)" for i in self.slots if self.past),
            "for phase in range(2):",
            "    t = tl.where(phase == 0, early, begin)",
            "    n = tl.where(phase == 0, (begin - early).to(tl.int32), count)",
            f"    {commas(self.s, self.j, self.past)}, met = {walk}",
            "    if phase == 0:",
            *("        " + line for line in self.record("store", "start", "s", "here")),
            *self.record("store", "end", "s", "here"),
            *self.record("store", "jac", "j", "here"),
            *self.record("store", "past", "past", "here"),
        ]

    def known(self) -> list[str]:
        """Walk a chunk from the start that the chain found."""
        walk = self.walked(self.s, "begin", "count", jac="False", meet="False")
        return [
            f"here = edges + chunk * ({self.rows} * N) + lanes",
            "if chunk > 0:",
            *("    " + line for line in self.record("load", "start", "s", "here")),
            f"{commas(self.s, self.j, self.past)}, met = {walk}",
            *self.record("store", "end", "s", "here"),
        ]

    def forward_kernels(self) -> str:
        S = len(self.slots)
        return f'''
@triton.jit(do_not_specialize={["B", "T", "L", "W", "chunks", "blocks", "once"]})
def forward(
    {self.inputs}, {self.outputs}, W, tol,
    {CONSTANTS}, SEVERAL: tl.constexpr,
):
    """Walk every chunk, from {"the start that is known" if self.reduced else "a guess"}."""
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
{indent(self.known() if self.reduced else self.guessed(), 2)}
    else:
        {commas(self.s, self.j, self.past)}, met = {self.walked(self.s, "begin", "count", jac="False", meet="False")}
    if begin + L >= T:
{indent(self.finished("s"), 2)}

{"" if self.reduced else self.correct()}
{self.repair()}'''

    def correct(self) -> str:
        # The product of a linear recurrence stays what it was, and the correction is exact.
        product = [f"{self.j} = {self.entries('tl.where(met, j#, q#)')}"] * (not self.linear)
        negligible = "0" if self.linear else "tol / 16"
        moved = [f"e{i} = s{i} + a{i}" for i in self.slots]
        if not self.linear:  # a diverging product must not spoil a finite end
            moved = [
                f"e{i} = tl.where(tl.abs(a{i}) < float('inf'), s{i} + a{i}, e{i})"
                for i in self.slots
            ]
        worst = size = "0.0"
        for i in self.slots:
            against = self.scale(f"e{i}", f"b{i}")
            if self.linear:  # where a state is 0, to the guess of it
                against = f"sized(e{i}, tl.abs(s{i}))"
            worst = f"tl.maximum({worst}, largest(a{i}, {against}, lane))"
        for i, k in self.product:
            size = f"tl.maximum({size}, largest(q{i}{k}, 1.0, lane))"
        return f'''
@triton.jit(do_not_specialize={["B", "T", "L", "chunks", "blocks", "once", "k"]})
def correct(
    {self.inputs}, {self.outputs}, k, tol,
    {CONSTANTS}, MEET: tl.constexpr,
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
{indent(self.record("load", "past", "past", "here"), 2)}
{indent([f"b{i} = past{i}" for i in self.slots if self.past], 2)}
        {self.names("e")} = {self.names("s")}
        {self.names("a")} = {self.names("tl.zeros_like(s#)")}
        if chunk > 0:
            there = here - record
{indent(self.record("load", "end", "e", "there"), 3)}
{indent(self.record("load", "past", "b", "there"), 3)}
{indent([f"a{i} = jump(e{i}, s{i})" for i in self.slots], 3)}
{indent(self.record("load", "jac", "q", "there"), 3)}
            left = chunk - 1
            while (left > 0) & ({size} > {negligible}):
{indent(self.record("load", "start", "y", "there"), 4)}
                there -= record
{indent(self.record("load", "end", "z", "there"), 4)}
{indent([f"z{i} = jump(z{i}, y{i})" for i in self.slots], 4)}
{indent(self.applied("a", "q", "z"), 4)}
{indent(self.record("load", "jac", "y", "there"), 4)}
                {self.times("q", "q", "y", self.product, self.product)}
                left -= 1
        put(miss + (k * chunks + chunk) * blocks + index + tl.zeros([1], tl.int32), tl.zeros([1], tl.float32) + {worst}, True, True)
        loose = lane & ({self.loose})
        if tl.max(loose.to(tl.int32)) > 0:
{indent(moved, 3)}
            {self.s} = {self.names("tl.where(loose, e#, s#)")}
            {commas(self.names("y"), self.entries("q#"), self.past)}, met = {self.walked(self.s, "begin", "tl.minimum(L, T - begin).to(tl.int32)", jac=str(not self.linear), meet="MEET")}
            {self.names("x")} = {self.names("tl.where(met, x#, y#)")}
{indent(product, 3)}
            if begin + L >= T:
{indent(self.finished("x"), 4)}
        here = edges + (((k + 1) % 2) * chunks + chunk) * record + lanes
{indent(self.record("store", "start", "s", "here") + self.record("store", "end", "x", "here") + self.record("store", "jac", "j", "here") + self.record("store", "past", "past", "here"), 2)}
    else:
        put(miss + (k * chunks + chunk) * blocks + index + tl.zeros([1], tl.int32), tl.zeros([1], tl.float32), True, True)
'''

    def repair(self) -> str:
        # What is left of an exact correction is where a product overflowed: no start was found.
        broken = "3e38" if self.linear else "tol"
        found = " & ".join(f"(tl.abs(s{i}) < float('inf'))" for i in self.slots)
        lost = f" & (({found}) == 0)" * self.linear
        buffer = "0" if self.reduced else "(k % 2) * chunks * record"
        return f'''
@triton.jit(do_not_specialize={["B", "T", "L", "chunks", "blocks", "once", "k"]})
def repair(
    {self.inputs}, {self.outputs}, k, tol,
    {CONSTANTS}, MEET: tl.constexpr,
):
    """Walk again, in the order of time, every chunk that does not start where the one before
    ends; row k of miss gets their number."""
    index = tl.program_id(0)
{indent(self.opening(), 1)}
    count = 0
    if worst(miss + (k - 1) * chunks * blocks + index, chunks, blocks) > {broken}:
        record = {self.rows} * N
        here = edges + {buffer} + lanes
{indent(self.record("load", "end", "e", "here") + self.record("load", "past", "b", "here"), 2)}
        for chunk in range(1, chunks):
            here += record
{indent(self.record("load", "start", "s", "here"), 3)}
{indent(self.record("load", "end", "x", "here") + self.record("load", "past", "past", "here"), 3)}
{indent([f"a{i} = jump(e{i}, s{i})" for i in self.slots], 3)}
            loose = lane & ({self.loose}){lost}
            if tl.max(loose.to(tl.int32)) > 0:
                count += 1
                begin = tl.cast(chunk, tl.int64) * L
                {self.s} = {self.names("tl.where(loose, e#, s#)")}
                {commas(self.names("y"), self.j, self.past)}, met = {self.walked(self.s, "begin", "tl.minimum(L, T - begin).to(tl.int32)", jac="False", meet="MEET")}
                {self.names("x")} = {self.names("tl.where(met, x#, y#)")}
            {self.names("e")} = {self.names("x")}
{indent([f"b{i} = past{i}" for i in self.slots if self.past], 3)}
{indent(self.finished("e"), 2)}
    put(miss + k * chunks * blocks + index + tl.zeros([1], tl.int32), tl.zeros([1], tl.float32) + count, True, True)
'''
