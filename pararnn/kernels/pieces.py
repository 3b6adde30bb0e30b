"""What the kernels of one Spec are written from: names, matrices, loads and records.

Names in the text: ``s0 …`` slots, ``c0_2`` drive 0 of the step in flight number 2, ``w0 …``
recurrent parameters, ``m0 …`` cotangents of the slots, ``j01`` entry (0, 1) of a Jacobian product.
"""

from __future__ import annotations

import sympy

from ..spec import Spec
from .plan import reduced

Entry = tuple[int, int]

ANY = "None if ALIGNED else lane"
CONSTANTS = (
    "D: tl.constexpr, WIDTH: tl.constexpr, PACKED: tl.constexpr,\n"
    "    BLOCK: tl.constexpr, ALIGNED: tl.constexpr, DTYPE: tl.constexpr"
)
FLAGS = "D: tl.constexpr, WIDTH: tl.constexpr, ALIGNED: tl.constexpr, DTYPE: tl.constexpr"


def commas(*parts: str) -> str:
    """The parts that are not empty, as one list."""
    return ", ".join(part for part in parts if part)


def indent(lines: list[str], depth: int) -> str:
    return "\n".join("    " * depth + line if line else "" for line in lines)


class Pieces:
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
        Whether there are cotangents of the output, and of the slots that are not in it.
    apart
        Whether every drive is a tensor of its own, with its own strides, instead of a part of one.
    """

    def __init__(
        self,
        spec: Spec,
        unroll: int = 8,
        resets: bool = False,
        grads: tuple[bool, bool] = (True, False),
        apart: bool = False,
    ):
        self.spec, self.unroll, self.resets, self.apart = spec, unroll, resets, apart
        self.slots, self.drives = range(len(spec.slots)), range(len(spec.drive_list))
        self.params = range(len(spec.map_list) + len(spec.param_list))
        fz = spec.factorization
        rows = fz.channel_jacobian([sympy.Symbol(f"c{i}") for i in range(fz.n_state)])
        self.step: list[Entry] = [(i, j) for i in self.slots for j in self.slots if rows[i][j] != 0]
        self.product = self._closure()
        # Slots that the output holds, and those that are stored beside it.
        self.shown = len(self.slots) if spec.output == "all" else 1
        self.others = len(self.slots) - self.shown
        self.row_width = f"{self.shown} * D" if self.shown > 1 else "D"
        self.linear = spec.jac_structure == "linear"
        self.reduced = reduced(spec)
        self.timed = any(d.given for d in spec.drive_list)
        self.s, self.m = self.names("s"), self.names("m")
        self.j = self.entries("j#")
        self.w = ", ".join(f"w{i}" for i in self.params)
        flight = range(unroll)
        loads = [f"c{k}" for k in self.drives] + ["x"] * resets
        self.c = ", ".join(f"{name}_{u}" for u in flight for name in loads)
        before = [f"p{i}" for i in self.slots]
        self.graded = [i for i in self.slots if grads[i < self.others]]
        before += [f"g{i}" for i in self.graded]
        self.grads = ["grad"] * grads[0] + ["rest"] * (grads[1] and bool(self.others))
        self.v = ", ".join(f"v{i}" for i in self.params)
        self.past = "" if self.linear else self.names("past")
        self.p = ", ".join(f"{name}_{u}" for u in flight for name in before)
        self.inputs_u = [f"u{k}" for k in self.drives] if apart else ["u"]
        self.bars = [f"{name}_bar" for name in self.inputs_u]
        self.source = [*self.inputs_u, *["dt"] * self.timed, *["r"] * resets]
        self.stored = ["last", *["others"] * bool(self.others)]
        steps = [f"{name}_{axis}" for name in self.inputs_u for axis in "tc"]
        self.strides = ", ".join([*steps, *["dt_t"] * self.timed, *["r_t"] * resets])

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
            values.append(" + ".join(terms) or f"tl.zeros_like({target}{i}{k})")
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
        if i >= self.others:
            place = f" + {i - self.others} * D" * (i > self.others)
            return f"last + ({steps} * {self.row_width}{place})"
        return f"others + ({steps} * {self.others} + {i}) * D"

    def starts(self, t: str) -> dict[str, str]:
        """Pointers to what step ``t`` (a 64-bit number) reads."""
        return {
            **{name: f"{name} + b * {name}_b + {t} * {name}_t" for name in self.source},
            **{
                name: f"{name} + b * {name}_b + {t} * {name}_t + d * {name}_c"
                for name in self.inputs_u
            },
        }

    def at(self, t: str, names: list[str]) -> str:
        """Pointers of a walk that begins at step ``t``."""
        base = self.starts(t) | {
            "last": f"last + (b * T + {t}) * {self.row_width} + d",
            "others": f"others + (b * T + {t}) * {self.others} * D + d",
        }
        return ", ".join(base[name] for name in names)

    def at_back(self, t: str, names: list[str]) -> list[str]:
        """Pointers of a backward walk that begins at step ``t``; those of states stand one step
        before."""
        wide = "D" if self.apart else "WIDTH"
        base = self.starts(f"({t})") | {
            **{name: f"{name} + (b * T + ({t})) * {wide} + d" for name in self.bars},
            "last": f"last + (b * T + ({t}) - 1) * {self.row_width} + d",
            "others": f"others + (b * T + ({t}) - 1) * {self.others} * D + d",
            "grad": f"grad + b * grad_b + ({t}) * grad_t + d * grad_c",
            "rest": f"rest + (b * T + ({t})) * {self.others} * D + d",
        }
        return [base[name] for name in names]

    def drive_at(self, k: int, steps: str) -> str:
        """Address of a drive, some steps from where the pointers stand."""
        if self.spec.drive_list[k].given:
            return f"dt + {steps} * dt_t"
        if self.apart:
            return f"u{k} + {steps} * u{k}_t"
        return f"u + ({steps} * u_t + {k} * D * u_c)"

    def bar_at(self, k: int, steps: str) -> str:
        """Address of a drive's cotangent, some steps back."""
        if self.apart:
            return f"u{k}_bar - {steps} * D"
        return f"u_bar + (-{steps} * WIDTH + {k} * D)"

    def fetch(self, u: int, steps: str, condition: str | None) -> list[str]:
        """Load the drives and the reset of a step; masked ones are never used."""
        mask = f"both(lane, {condition}, ALIGNED)" if condition else ANY
        lines = []
        for k in self.drives:
            lines.append(f"c{k}_{u} = read({self.drive_at(k, steps)}, {mask})")
        if self.resets:
            lines.append(f"x_{u} = read(r + {steps} * r_t, {mask})")
        return lines

    def fetch_cotangents(self, u: int, steps: str, condition: str | None) -> list[str]:
        """Load the cotangents of the slots after the step ``steps`` before the pointers."""
        mask = f"both(lane, {condition}, ALIGNED)" if condition else ANY
        lines = []
        for i in self.graded:
            place = f" + {i - self.others} * D * grad_c" * (i > self.others)
            at = f"grad + (-{steps} * grad_t{place})"
            if i < self.others:
                at = f"rest + (-{steps} * {self.others} + {i}) * D"
            lines.append(f"g{i}_{u} = read({at}, {mask})")
        return lines

    def following(self, lines: list[str]) -> list[str]:
        """The same loads, for the block of steps that follows."""
        return [f"z{line}" for line in lines]

    def cut(self, u: int, names: list[str]) -> list[str]:
        """Where step ``u`` starts anew, what comes from before is zero."""
        return [f"{n} = tl.where(x_{u} != 0, 0.0, {n})" for n in names] if self.resets else []

    def arguments(self, u: int, state: str) -> str:
        """Arguments of the printed step programs at the step in flight ``u``."""
        drives = [f"c{k}_{u}.to(DTYPE)" for k in self.drives]
        return commas(state, *drives, self.w)

    def move(self, steps: str, pointers: list[str], sign: str = "+") -> list[str]:
        stride = {
            **{name: f"{name}_t" for name in self.source},
            **dict.fromkeys(self.bars, "D" if self.apart else "WIDTH"),
            "last": self.row_width,
            "others": f"{self.others} * D",
            "grad": "grad_t",
            "rest": f"{self.others} * D",
            "dt_bar": "D",
        }
        return [f"{name} {sign}= {steps} * {stride[name]}" for name in pointers]

    # -- what every kernel begins with, and what it keeps of a chunk -------------------------------

    @property
    def inputs(self) -> str:
        """Arguments of every kernel, as far as this Spec has them."""
        batch = [f"{name}_b" for name in self.source]
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
            *(
                f"    {name}_t, {name}_c = {'D' if self.apart else 'WIDTH'}, 1"
                for name in self.inputs_u
            ),
            "else:",
            *(
                f"    {name}_{axis} = tl.cast({name}_{axis}, tl.int64)"
                for name in self.inputs_u
                for axis in "tc"
            ),
            *self.weights(),
        ]

    @property
    def strides_back(self) -> str:
        """Arguments of kernels that read the output's cotangent."""
        return ", grad_b, grad_t, grad_c" * ("grad" in self.grads)

    def opening_back(self) -> list[str]:
        """The same, with the strides of the output's cotangent."""
        dense = [
            "if DENSE:  # so are those of the output's cotangent",
            f"    grad_t = {self.row_width}",
            "    grad_c = 1",
            "else:",
            "    grad_t = tl.cast(grad_t, tl.int64)",
            "    grad_c = tl.cast(grad_c, tl.int64)",
        ]
        return self.opening() + dense * ("grad" in self.grads)

    def row(self, kind: str, i: int) -> int:
        """Row of a chunk's record: its start, its end, its Jacobian product, its largest states."""
        n = len(self.slots)
        return i + {"start": 0, "end": n, "jac": 2 * n, "past": 2 * n + len(self.product)}[kind]

    @property
    def rows(self) -> int:
        """Rows of a chunk's record; a linear recurrence compares states to themselves."""
        return 2 * len(self.slots) + len(self.product) + len(self.slots) * (not self.linear)

    def record(self, verb: str, kind: str, name: str, at: str) -> list[str]:
        """Load or store starts, ends, products or largest states of a chunk's record at ``at``."""
        if kind == "past" and self.linear:
            return []
        keys = [f"{i}{k}" for i, k in self.product] if kind == "jac" else [*map(str, self.slots)]
        lines = []
        for i, key in enumerate(keys):
            where = f"{at} + {self.row(kind, i)} * N"
            if verb == "load":
                lines.append(f"{name}{key} = read({where}, lane)")
            else:
                lines.append(f"put({where}, {name}{key}, lane, ALIGNED)")
        return lines
