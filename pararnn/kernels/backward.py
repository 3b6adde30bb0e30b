"""The kernels of the backward pass: ``adjoint_chunks`` and ``readjoint``."""

from __future__ import annotations

from .pieces import ANY, CONSTANTS, FLAGS, Pieces, commas, indent


class Backward(Pieces):
    """Walks a chunk backwards, and the kernels that do."""

    def fetch_back(self, u: int, steps: str, condition: str | None, last: bool) -> list[str]:
        """Load what the backward step ``steps`` before the pointers needs: drives, the state
        before it, and cotangents of the state after it. The ``last`` step of a block can be the
        first of the sequence, with no state before it."""
        lines = self.fetch(u, f"-{steps}", condition)
        exists = " & ".join(
            [f"({condition})"] * bool(condition) + [f"({steps} < ahead_top)"] * last
        )
        before = f"both(lane, {exists}, ALIGNED)" if exists else ANY
        lines += [f"p{i}_{u} = read({self.slot_at(i, f'-{steps}')}, {before})" for i in self.slots]
        return lines + self.fetch_cotangents(u, steps, condition)

    def backward_step(self, u: int, last: bool) -> list[str]:
        slots = self.slots
        args = self.arguments(u, self.names("p"))
        every = ", ".join(f"e{i}{j}" for i in slots for j in slots)
        step = [f"e{i}{j}" for i, j in self.step]
        columns = [k for k in self.drives if not self.spec.drive_list[k].given]
        drives, params = [f"d{k}" for k in self.drives], [f"h{i}" for i in self.params]
        results = ", ".join([self.m, *drives, *params])
        incoming = [f"m{i} + g{i}_{u}.to(DTYPE)" if i in self.graded else f"m{i}" for i in slots]
        store = [line for k in columns for line in self.add_to(self.bar_at(k, str(u)), k)]
        if self.timed:
            k = next(k for k in self.drives if self.spec.drive_list[k].given)
            lines = self.add_to(f"dt_bar - {u} * D", k)
            store += ["if dt_bar is not None:", *("    " + line for line in lines)]
        size = "size"
        for i in slots:
            size = f"tl.maximum({size}, tl.abs(m{i}))"
        before = [f"p{i} = p{i}_{u}.to(DTYPE)" for i in slots]
        jacobian = [
            "if JAC:",
            f"    size = {size}",
            f"    {self.names('n')}, {every} = step_jacobian({args})",
            *("    " + line for line in self.cut(u, step)),
            f"    {self.times('j', 'j', 'e', self.product, self.step)}",
        ]
        if last:
            before = [f"p{i} = tl.where(top == {u}, f{i}, p{i}_{u}.to(DTYPE))" for i in slots]
        return [
            *before,
            *self.cut(u, self.names("p").split(", ")),
            "if not PART:",
            f"    {self.m} = {', '.join(incoming)}",
            *(jacobian if not self.reduced else []),
            f"{results} = adjoint({args}, {self.m})",
            *self.cut(u, self.m.split(", ")),
            *store,
            *(f"v{i} += h{i}" for i in self.params),
        ]

    def add_to(self, at: str, k: int) -> list[str]:
        """Store the cotangent of a drive, or add a part to what is there."""
        there = "both(lane, write, ALIGNED)"
        return [
            "if PART:",
            f"    d{k} += read({at}, {there}).to(DTYPE)",
            f"write_if({at}, d{k}, {there})",
        ]

    def backward(self) -> str:
        U = self.unroll
        source = [*self.source, *self.stored, *self.grads]
        targets = self.bars
        places = ", ".join([*source, *self.bars, *["dt_bar"] * self.timed])
        held = commas(self.names("f"), self.w)
        strides = self.strides + ", grad_t, grad_c" * ("grad" in self.grads)
        units: list[str] = []
        loads: list[str] = []
        for u in range(U):
            last = u == U - 1
            units += [f"# step {u}", *self.backward_step(u, last)]
            loads += self.fetch_back(u, str(u), None, last)
        prologue = [line for u in range(U) for line in self.fetch_back(u, str(u), f"{u} < n", True)]
        start = ", ".join(f"tl.zeros_like(m0) + {int(i == k)}" for i, k in self.product)
        flight = commas(self.c, self.p)
        alive = " | ".join(f"(tl.abs(m{i}) > floor)" for i in self.slots)
        out = commas(self.m, self.j, "size", self.v)
        timed = ["if dt_bar is not None:", f"    dt_bar -= {U} * D"] if self.timed else []
        timed_one = ["if dt_bar is not None:", "    dt_bar -= D"] if self.timed else []
        return f'''
@triton.jit
def walk_back(
    {self.m}, {held}, {places}, lane, n, top, write, once, floor, {strides},
    {FLAGS}, JAC: tl.constexpr, PART: tl.constexpr,
):
    """n steps backwards from step ``top``: the cotangent before them, the product of their
    Jacobians, the largest cotangent on the way, and the parameters' cotangents. A PART of a
    cotangent is added to what is there, until it is below ``floor``; the rest of it is zero."""
    live = n >= 0
    {self.j} = {start}
    size = tl.zeros_like(m0)
{indent([f"v{i} = tl.zeros_like(m0)" for i in self.params], 1)}
    ahead_top = top
    whole = tl.where(n >= {U}, {U}, 0)
{indent(prologue, 1)}
    while (n >= {U}) & live:
        # As forwards: load the block of steps before this one, then make this one's.
        ahead = tl.where(n >= {2 * U}, {U}, 0)
        ahead_top = top - ahead
{indent(self.move("ahead", source, "-"), 2)}
{indent(self.following(loads), 2)}
        for _ in range(once):
{indent(units, 3)}
        {flight} = {", ".join(self.following(flight.split(", ")))}
{indent(self.move(str(U), targets, "-") + timed, 2)}
        n -= {U}
        top -= {U}
        if PART:
            live = tl.max(tl.where(lane & ({alive}), 1, 0)) > 0
{indent(self.move("whole", source, "-"), 1)}
    ahead_top = top
    if PART:
        n = tl.where(live, n, 0)
        {self.m} = {self.names("tl.where(live, m#, 0.0)")}
    for _ in range(n):
{indent(self.fetch_back(0, "0", None, True) + self.backward_step(0, True), 2)}
{indent(self.move("1", [*source, *targets], "-") + timed_one, 2)}
        top -= 1
        ahead_top = top
    return {out}
'''

    def walked_back(
        self,
        t: str,
        n: str,
        *,
        write: str = "True",
        jac: str,
        floor: str = "0.0",
        part: str = "False",
    ) -> str:
        """A backward walk of n steps from step ``t``, which is included."""
        places = self.at_back(t, [*self.source, *self.stored, *self.grads, *self.bars])
        if self.timed:
            places.append(f"None if dt_bar is None else dt_bar + (b * T + ({t})) * D + d")
        strides = self.strides + ", grad_t, grad_c" * ("grad" in self.grads)
        held = commas(self.names("f"), self.w)
        return (
            f"walk_back({self.m}, {held}, {', '.join(places)}, lane, {n}, ({t}).to(tl.int32), "
            f"{write}, once, {floor}, {strides}, D, WIDTH, ALIGNED, DTYPE, {jac}, {part})"
        )

    @property
    def inputs_back(self) -> str:
        """What the kernels of the backward pass read, write to, and their sizes."""
        grads = [*self.grads, *self.bars, *["dt_bar"] * self.timed]
        outputs = [*self.stored, *grads, "final", "h0_bar", "w_bar", "edges"]
        return ", ".join([self.inputs, *outputs, "B, T, L, chunks, blocks, once"])

    @property
    def rows_back(self) -> int:
        """Rows of a chunk's record: start, end and product, and the size of the cotangents."""
        return 2 * len(self.slots) + len(self.product) + (not self.reduced)

    def first_state(self) -> list[str]:
        """The state before the first step."""
        S = len(self.slots)
        return [
            "if h0 is None:",
            f"    {self.names('f')} = {self.names('tl.zeros([BLOCK], DTYPE)')}",
            "else:",
            *(
                f"    f{i} = tl.load(h0 + (b * {S} + {i}) * D + d, mask=lane, other=0.0)"
                for i in self.slots
            ),
        ]

    def gathered(self) -> list[str]:
        """Write the parameters' cotangents of a chunk, and the one of ``h0``."""
        S, P = len(self.slots), len(self.params)
        return [
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

    @property
    def walk_results(self) -> str:
        return commas(self.m, self.j, "size", self.v)

    def guessed_back(self) -> list[str]:
        """Walk a chunk from a guess of what enters it, and keep what a correction needs."""
        walk = self.walked_back("t - 1", "n", write="phase == 1", jac="True")
        return [
            f"here = edges + tl.cast(chunk, tl.int64) * {self.rows_back} * N + lanes",
            "size = tl.zeros([BLOCK], DTYPE)",
            f"{self.j} = {self.entries('tl.zeros([BLOCK], DTYPE)')}",
            *(f"v{i} = tl.zeros([BLOCK], DTYPE)" for i in self.params),
            "for phase in range(2):",
            "    t = tl.where(phase == 0, late, end)",
            "    n = tl.where(phase == 0, (late - end).to(tl.int32), count)",
            f"    {self.walk_results} = {walk}",
            "    if phase == 0:",
            *("        " + line for line in self.record("store", "start", "m", "here")),
            f"        put(here + {self.rows_back - 1} * N, size, lane, ALIGNED)",
            *self.record("store", "end", "m", "here"),
            *self.record("store", "jac", "j", "here"),
        ]

    def known_back(self) -> list[str]:
        """Walk a chunk from the cotangent that the chain found."""
        return [
            "if chunk < chunks - 1:",
            f"    here = edges + chunk * ({self.rows_back} * N) + lanes",
            *("    " + line for line in self.record("load", "start", "m", "here")),
            f"{self.walk_results} = {self.walked_back('end - 1', 'count', jac='False')}",
        ]

    def backward_kernels(self) -> str:
        S = len(self.slots)
        return f'''
@triton.jit(do_not_specialize={["B", "T", "L", "W", "chunks", "blocks", "once"]})
def adjoint_chunks(
    {self.inputs_back}, W{self.strides_back}, tol,
    {CONSTANTS}, DENSE: tl.constexpr, SEVERAL: tl.constexpr,
):
    """Cotangents of every chunk, from {"what is known to enter it" if self.reduced else "a guess of what enters it"} on the right."""
    index = tl.program_id(0) % blocks
    chunk = tl.program_id(0) // blocks
{indent(self.opening_back() + self.first_state(), 1)}
    begin = tl.cast(chunk, tl.int64) * L
    end = tl.minimum(begin + L, T)
    late = tl.minimum(end + W, T)
    if final is None:
        {self.m} = {self.names("tl.zeros([BLOCK], DTYPE)")}
    else:
{indent([f"m{i} = tl.load(final + (b * {S} + {i}) * D + d, mask=lane & (late == T), other=0.0)" for i in self.slots], 2)}
    count = (end - begin).to(tl.int32)
    if SEVERAL:
{indent(self.known_back() if self.reduced else self.guessed_back(), 2)}
    else:
        {self.walk_results} = {self.walked_back("end - 1", "count", jac="False")}
{indent(self.gathered(), 1)}

{"" if self.reduced else self.readjoint()}'''

    def readjoint(self) -> str:
        S, P = len(self.slots), len(self.params)
        added = [
            f"v{i} += read(w_bar + (tl.cast(chunk, tl.int64) * {P} + {i}) * N + lanes, lane)"
            for i in self.params
        ]
        added += [
            "if chunk == 0:",
            *(f"    m{i} += read(h0_bar + (b * {S} + {i}) * D + d, lane)" for i in self.slots),
        ]
        # As forwards: what is small in a linear recurrence may grow.
        scale = "tl.abs(m#)" if self.linear else "tl.maximum(tl.abs(m#), size)"
        floor = "0 * size" if self.linear else "tol * tol * size"
        loose = " | ".join(f"far(a{i}, {scale.replace('#', str(i))}, tol)" for i in self.slots)
        peak = "0.0"
        for i, k in self.product:
            peak = f"tl.maximum({peak}, largest(q{i}{k}, 1.0, lane))"
        size_at = f"{self.rows_back - 1} * N"
        return f'''
@triton.jit(do_not_specialize={["B", "T", "L", "chunks", "blocks", "once"]})
def readjoint(
    {self.inputs_back}{self.strides_back}, tol,
    {CONSTANTS}, DENSE: tl.constexpr, PART: tl.constexpr,
):
    """The exact correction of what enters a chunk on the right, and a walk where it moved."""
    index = tl.program_id(0) % blocks
    chunk = tl.program_id(0) // blocks
{indent(self.opening_back(), 1)}
    if chunk < chunks - 1:
        record = {self.rows_back} * N
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
{indent(self.first_state(), 3)}
            if PART:  # The backward pass is linear: the correction walks by itself, and is added.
                {self.m} = {self.names("tl.where(loose, a#, 0.0)")}
            else:  # To add to rounded numbers would round them twice: all is walked again.
                {self.m} = {self.names("tl.where(loose, m# + a#, m#)")}
            floor = {floor}
            begin = tl.cast(chunk, tl.int64) * L
            end = begin + L
            {self.walk_results} = {self.walked_back("end - 1", "L + tl.zeros([], tl.int32)", jac="False", floor="floor", part="PART")}
            if PART:
{indent(added, 4)}
{indent(self.gathered(), 3)}
'''
