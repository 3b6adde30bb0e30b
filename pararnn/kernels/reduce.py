"""The kernels that a linear recurrence of several slots has besides: ``reduce`` and ``chain``, and
``reduce_back`` and ``chain_back``.

Where the product of a chunk's Jacobians does not die out, as with rotations, no guess of a chunk's
start is good and every chunk must be walked again. So the first walk writes nothing: it reads what
the transition needs and keeps the chunk's end, from a start of zero, and its Jacobian product, whose
columns go through time beside the state (backwards: its rows, beside the cotangent). ``chain`` then
finds every start, in the order of time, and one walk writes.
"""

from __future__ import annotations

from .pieces import CONSTANTS, FLAGS, Pieces, commas, indent


class Reduce(Pieces):
    """A walk that writes nothing, in both directions, and the kernels around it."""

    def carried(self, back: bool) -> list[list[str]]:
        """What goes through time: the state (or the cotangent), and each column (or row) of the
        product; an entry that is always 0 has no name."""

        def entry(i: int, k: int) -> str:
            return f"j{i}{k}" if (i, k) in self.product else ""

        if back:
            return [[f"m{i}" for i in self.slots]] + [
                [entry(i, k) for k in self.slots] for i in self.slots
            ]
        return [[f"s{i}" for i in self.slots]] + [
            [entry(i, k) for i in self.slots] for k in self.slots
        ]

    def reduce_step(self, u: int, back: bool) -> list[str]:
        count = self.spec.factorization.n_state
        coefficients = [f"k{i}" for i in range(count)]
        inputs = [f"i{i}" for i in self.slots]
        program = "transpose" if back else "tangent"
        vectors = self.carried(back)
        moved = []
        for names in vectors:
            targets = ", ".join(name or f"_{i}" for i, name in enumerate(names))
            values = [name or f"tl.zeros_like({vectors[0][0]})" for name in names]
            args = commas(*values, *coefficients, self.w)
            moved.append(f"{targets} = {program}({args})")
        cut = self.cut(u, [name for names in vectors for name in names if name])
        step = f"{', '.join([*coefficients, *inputs])} = affine({self.arguments(u, '')})"
        if back:
            grown = [f"m{i} += g{i}_{u}.to(DTYPE)" for i in self.graded]
            return [*grown, step, *moved, *cut]
        return [*cut, step, *moved, *(f"s{i} += i{i}" for i in self.slots)]

    def reduce_walk(self, back: bool) -> str:
        U, sign = self.unroll, "-" if back else "+"
        state = self.m if back else self.s
        source = [*self.source, *self.grads] if back else self.source
        flight = [*self.c.split(", ")]
        if back:
            flight += [f"g{i}_{u}" for u in range(U) for i in self.graded]

        def loads(u: int, condition: str | None) -> list[str]:
            found = self.fetch(u, f"-{u}" if back else str(u), condition)
            return found + self.fetch_cotangents(u, str(u), condition) * back

        units: list[str] = []
        for u in range(U):
            units += [f"# step {u}", *self.reduce_step(u, back)]
        start = ", ".join(f"tl.zeros_like({state[:2]}) + {int(i == k)}" for i, k in self.product)
        strides = self.strides + ", grad_t, grad_c" * (back and "grad" in self.grads)
        first = [line for u in range(U) for line in loads(u, f"{u} < n")]
        following = self.following([line for u in range(U) for line in loads(u, None)])
        tail = [
            "for _ in range(n):",
            *("    " + line for line in loads(0, None) + self.reduce_step(0, back)),
            *("    " + line for line in self.move("1", source, sign)),
        ]
        return f'''
@triton.jit
def reduce_walk{"_back" * back}(
    {commas(state, self.w, *source)}, lane, n, once, {strides}, {FLAGS},
):
    """n steps that write nothing: what they make of a {"cotangent" if back else "state"}, and their
    Jacobian product."""
    {self.j} = {start}
    whole = tl.where(n >= {U}, {U}, 0)
{indent(first, 1)}
    while n >= {U}:
        ahead = tl.where(n >= {2 * U}, {U}, 0)
{indent(self.move("ahead", source, sign), 2)}
{indent(following, 2)}
        for _ in range(once):
{indent(units, 3)}
        {", ".join(flight)} = {", ".join(self.following(flight))}
        n -= {U}
{indent((self.move("whole", source, sign) + tail) * (U > 1), 1)}
    return {state}, {self.j}
'''

    def chained(self, back: bool) -> str:
        """One pass over the records of all chunks."""
        state = "m" if back else "s"
        names = self.names(state)
        sign = "-" if back else "+"
        keep = ", ".join([self.names("x"), self.j, self.names("zx"), self.entries("zj#")]).split(
            ", "
        )
        half = len(keep) // 2
        ahead = "lane & (left > 1)"
        prefetch = [
            line.replace(", lane)", f", {ahead})")
            for line in self.record("load", "end", "zx", "next")
            + self.record("load", "jac", "zj", "next")
        ]
        size = "0.0"
        for i in self.slots:
            size = f"tl.maximum({size}, largest({state}{i}, sized({state}{i}, 0.0), lane))"
        noted = [
            "put(miss + chunk * blocks + index + tl.zeros([1], tl.int32), "
            f"tl.zeros([1], tl.float32) + {size}, True, True)"
        ] * (not back)
        silent = [
            "put(miss + index + tl.zeros([1], tl.int32), tl.zeros([1], tl.float32), True, True)"
        ] * (not back)
        return f'''
@triton.jit(do_not_specialize={["B", "chunks", "blocks", "once"]})
def chain{"_back" * back}(
    edges{", miss" * (not back)}, B, chunks, blocks, once,
    D: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr,
):
    """What enters every chunk {"on the right" if back else "on the left"}, one after the other."""
    index = tl.program_id(0)
    b, d, lanes, lane = place(index, B, D, BLOCK, ALIGNED)
    N = tl.cast(B, tl.int64) * D
    record = {self.rows} * N
    here = edges + {"(chunks - 1) * record + " * back}lanes
    left = chunks - 1
    next = here {sign} tl.where(left > 1, record, 0)
{indent(self.record("load", "end", state, "here"), 1)}
{indent(prefetch, 1)}
    {", ".join(keep[:half])} = {", ".join(keep[half:])}
{indent(silent, 1)}
    while left > 0:
        here {sign}= record
        chunk = {"left - 1" if back else "chunks - left"}
        next = here {sign} tl.where(left > 2, record, 0)
        left -= 1
{indent(prefetch, 2)}
        for _ in range(once):
{indent(self.record("store", "start", state, "here") + noted, 3)}
{indent(self.applied("x", "j", state, transposed=back), 3)}
            {names} = {self.names("x")}
        {", ".join(keep[:half])} = {", ".join(keep[half:])}
'''

    def reduce_kernels(self) -> str:
        """The four kernels, and their walks."""
        S = len(self.slots)
        grad = ", grad_t, grad_c" * ("grad" in self.grads)
        sizes = "B, T, L, chunks, blocks, once"
        known = "D, WIDTH, ALIGNED, DTYPE"
        forwards = commas(self.s, self.w, self.at("begin", self.source))
        places = self.at_back("end - 1", [*self.source, *self.grads])
        backwards = commas(self.m, self.w, *places)
        ends = self.record("store", "end", "#", "here")
        product = self.record("store", "jac", "j", "here")
        return f'''
{self.reduce_walk(back=False)}

@triton.jit(do_not_specialize={["B", "T", "L", "chunks", "blocks", "once"]})
def reduce(
    {self.inputs}, edges, {sizes},
    {CONSTANTS},
):
    """End and product of every chunk but the last."""
    index = tl.program_id(0) % blocks
    chunk = tl.program_id(0) // blocks
{indent(self.opening(), 1)}
    begin = tl.cast(chunk, tl.int64) * L
    if h0 is None:
        {self.s} = {self.names("tl.zeros([BLOCK], DTYPE)")}
    else:
{indent([f"s{i} = tl.load(h0 + (b * {S} + {i}) * D + d, mask=lane & (chunk == 0), other=0.0)" for i in self.slots], 2)}
    {self.s}, {self.j} = reduce_walk({forwards}, lane, L + tl.zeros([], tl.int32), once, {self.strides}, {known})
    here = edges + chunk * ({self.rows} * N) + lanes
{indent([line.replace("#", "s") for line in ends] + product, 1)}

{self.chained(back=False)}

{self.reduce_walk(back=True)}

@triton.jit(do_not_specialize={["B", "T", "L", "chunks", "blocks", "once"]})
def reduce_back(
    {commas(self.inputs, *self.grads)}, final, edges, {sizes}{self.strides_back},
    {CONSTANTS}, DENSE: tl.constexpr,
):
    """The cotangent before every chunk but the first, and the product."""
    index = tl.program_id(0) % blocks
    chunk = tl.program_id(0) // blocks + 1
{indent(self.opening_back(), 1)}
    begin = tl.cast(chunk, tl.int64) * L
    end = tl.minimum(begin + L, T)
    if final is None:
        {self.m} = {self.names("tl.zeros([BLOCK], DTYPE)")}
    else:
{indent([f"m{i} = tl.load(final + (b * {S} + {i}) * D + d, mask=lane & (end == T), other=0.0)" for i in self.slots], 2)}
    {self.m}, {self.j} = reduce_walk_back({backwards}, lane, (end - begin).to(tl.int32), once, {self.strides}{grad}, {known})
    here = edges + chunk * ({self.rows} * N) + lanes
{indent([line.replace("#", "m") for line in ends] + product, 1)}

{self.chained(back=True)}
'''
