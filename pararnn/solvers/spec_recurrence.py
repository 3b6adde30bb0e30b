"""A recurrence from a Spec: every number from its printed programs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Self, cast

import sympy
import torch
from torch import Tensor

from .._checks import state_dtype
from ..scan import Algebra, Block, Dense, Diagonal, Flat, Left, Right
from ..spec import Spec
from ..spec.derive.factorization import operand_symbol
from .recurrence import Coefficients, Recurrence, pack
from .torch_backend import align, compiled


class SpecRecurrence(Recurrence):
    """The recurrence of a Spec with some sizes and parameters, and of the cell that has them, if
    there is one."""

    spec: Spec

    def __init__(
        self,
        spec: Spec,
        sizes: dict[str, int],
        params: Sequence[Tensor],
        dtype: torch.dtype,
        cell: Any = None,
    ):
        self.spec, self.sizes, self.dtype, self.cell = spec, sizes, dtype, cell
        self.raw_params = tuple(params)
        self._weights: list[Tensor] | None = None
        shape = spec.state_shape(sizes) if cell is None else cell.state_shape
        self.state_shape: tuple[int, ...] = shape
        self.slot_dim = -len(spec.axes) - 1
        self.several = len(spec.slots) > 1
        self.structure = spec.jac_structure
        self.linear = spec.jac_structure == "linear"

    @classmethod
    def of(cls, cell: Any) -> SpecRecurrence:
        """That of a :class:`~pararnn.Cell`, with its effective parameters."""
        dtype = state_dtype(cell.like.dtype)
        return cls(cell.spec, cell.sizes, cell.recurrent_params(), dtype, cell)

    def using(self, params: Sequence[Tensor], dtype: torch.dtype | None = None) -> Self:
        return type(self)(self.spec, self.sizes, params, dtype or self.dtype, self.cell)

    @property
    def name(self) -> str:
        return self.spec.name

    @cached_property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of the drives of a sample, in the order of their packing."""
        return self.spec.drive_shapes(self.sizes)

    @cached_property
    def widths(self) -> list[int]:
        return [math.prod(s) for s in self.shapes]

    @property
    def weights(self) -> list[Tensor]:
        """The parameters in the state's dtype. (A compiler does not look into a cached_property.)"""
        if self._weights is None:
            self._weights = [p.to(self.dtype) for p in self.raw_params]
        return self._weights

    @cached_property
    def params(self) -> list[Tensor]:
        """:attr:`weights`, elementwise ones with the axes of a state."""
        spec, weights, n_maps = self.spec, self.weights, len(self.spec.map_list)
        return [
            *weights[:n_maps],
            *(
                align(w, p.axes, spec.axes)
                for w, p in zip(weights[n_maps:], spec.param_list, strict=True)
            ),
        ]

    @property
    def bounds(self) -> list[tuple[float, float] | None]:  # type: ignore[override]
        return [s.bounds for s in self.spec.slots]

    @cached_property
    def writes(self) -> bool:
        """Whether the printed step can write its result in place."""
        return "_out" in compiled(self.spec, "step").__code__.co_varnames

    @property
    def n_state(self) -> int:  # type: ignore[override]
        return self.spec.factorization.n_state

    @property
    def width(self) -> int:
        return self.cell.d_h

    def written(self, h: Tensor, u: Tensor) -> Tensor:
        return self.cell.advance(h, u, self.weights)

    def output(self, states: Tensor, u: Tensor) -> Tensor:
        return self.cell.output(states, drives=u)

    # -- layout --------------------------------------------------------------------------------

    def _slots(self, h: Tensor) -> tuple[Tensor, ...]:
        return h.unbind(self.slot_dim) if self.several else (h,)

    def _join(self, slots: Sequence[Tensor], like: Tensor) -> Tensor:
        """Slots as one state, expanded to the shape of ``like`` if they do not vary along it."""
        if self.several:
            shape = like.select(self.slot_dim, 0).shape
            return torch.stack([s.expand(shape) for s in slots], self.slot_dim)
        return slots[0] if slots[0].shape == like.shape else slots[0].expand_as(like)

    def _drives(self, u: Tensor) -> list[Tensor]:
        u = u if u.dtype == self.dtype else u.to(self.dtype)
        out = []
        for part, shape, drive in zip(
            u.split(self.widths, -1), self.shapes, self.spec.drive_list, strict=True
        ):
            if len(shape) != 1:
                part = part.reshape((*u.shape[:-1], *shape))
            out.append(align(part, drive.axes, self.spec.axes))
        return out

    # -- forward -------------------------------------------------------------------------------

    def step(self, h: Tensor, u: Tensor, out: Tensor | None = None) -> Tensor:
        """Next state, ``(..., *state_shape)``. It may be written to ``out``, and is then ``out``."""
        program = compiled(self.spec, "step")
        into = {"_out": out} if self.writes else {}
        return self._join(program(*self._slots(h), *self._drives(u), *self.params, **into), h)

    def read(self, h: Tensor, u: Tensor) -> Tensor:
        """What a layer passes on, of a Spec with a read-out, from new states ``h``."""
        if self.spec.gap is not None and u.shape[-1] < sum(self.widths):
            u = pack(u, u.new_zeros(u.shape[:-1]))  # which is not read
        (out,) = compiled(self.spec, "read")(*self._slots(h), *self._drives(u), *self.params)
        kept = self.spec.axes_of(self.spec.readout.symbol)  # type: ignore[union-attr]
        return out[(..., *(slice(None) if a in kept else 0 for a in self.spec.axes))]

    def step_with_operator(
        self, h: Tensor, u: Tensor, kind: str, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Next state (see :meth:`step`) and the transition operator of ``kind`` at ``h``."""
        if not self.spec.channelwise:
            return self.step(h, u, out), self.operator(self.coefficients(h, u), kind, h)
        program = compiled(self.spec, "step_jacobian")
        into = {"_out": out} if self.writes else {}
        results = program(*self._slots(h), *self._drives(u), *self.params, **into)
        n = len(self.spec.slots)
        return self._join(results[:n], h), self._channel_operator(results[n:], h)

    def affine(self, u: Tensor) -> tuple[Coefficients, Tensor]:
        """State-carrying coefficients and inputs ``b = f(0, u)`` of a linear Spec, for any leading
        dimensions of ``u``."""
        out = compiled(self.spec, "affine")(*self._drives(u), *self.params)
        lead, n = u.shape[:-1], len(self.spec.axes)
        shape = (*lead, *self.state_shape[-n:])
        coefficients = tuple(c.expand(*lead, *c.shape[-n:]) for c in out[: self.n_state])
        forcing = [
            b.expand(shape) if isinstance(b, Tensor) else u.new_full(shape, b, dtype=self.dtype)
            for b in out[self.n_state :]
        ]
        return coefficients, torch.stack(forcing, self.slot_dim) if self.several else forcing[0]

    # -- linearization -------------------------------------------------------------------------

    def coefficients(self, h: Tensor, u: Tensor) -> Coefficients:
        """State-carrying coefficients of the factorized Jacobian at ``h``, broadcastable to a
        slot."""
        return self._evaluated("coefficients", h, u)

    def linearization(self, h: Tensor, u: Tensor) -> Coefficients:
        """:meth:`coefficients`, followed by what :meth:`gradients` needs besides."""
        return self._evaluated("linearization", h, u)

    def _evaluated(self, program: str, h: Tensor, u: Tensor) -> Coefficients:
        out = compiled(self.spec, program)(*self._slots(h), *self._drives(u), *self.params)
        lead, n = h.shape[: h.ndim - len(self.state_shape)], len(self.spec.axes)
        # A coefficient of parameters only has no leading dimensions; give it them as a view.
        return tuple(c if c.ndim == len(lead) + n else c.expand(*lead, *c.shape[-n:]) for c in out)

    def tangent(self, coefficients: Coefficients, v: Tensor) -> Tensor:
        """``J v``."""
        program = compiled(self.spec, "tangent")
        return self._join(program(*self._slots(v), *coefficients, *self.params), v)

    def transpose(self, coefficients: Coefficients, v: Tensor) -> Tensor:
        """``Jᵀ v``."""
        program = compiled(self.spec, "transpose")
        return self._join(program(*self._slots(v), *coefficients, *self.params), v)

    def majorant(self, coefficients: Coefficients, v: Tensor) -> Tensor:
        """``|J| v`` or more, for ``v ≥ 0``: absolute coefficients and weights."""
        program = compiled(self.spec, "majorant")
        absolute = [c.abs() for c in coefficients]
        return self._join(program(*self._slots(v), *absolute, *self.params), v)

    # -- operators -----------------------------------------------------------------------------

    def algebra(self, kind: str) -> Algebra | None:
        """Algebra of the operators of ``kind``, or None if they are not formed."""
        structures = {st.map.structure for st in self.spec.factorization.carrying}
        if kind in ("none", "factorized"):
            return None
        if "contract" in structures:
            return Left() if self.spec.factorization.columnwise else Flat(self.state_shape)
        if "right" in structures:
            return None if self.several else Right(by_row=kind == "exact")
        if structures <= {"diagonal"} or kind == "quasi":
            return Block(len(self.spec.axes)) if self.several else Diagonal()
        heads = self.sizes["heads"] if structures <= {"head", "diagonal"} else 1
        return Dense(heads=heads, slots=len(self.spec.slots))

    @property
    def cheap_kind(self) -> str:
        """The operator that ``jacobian='auto'`` carries along a chunk."""
        if self.spec.channelwise:
            return "exact"
        return "none" if self.algebra("quasi") is None else "quasi"

    @property
    def single_kind(self) -> str:
        """The exact operator of single steps: formed, or (for a matrix state) in factors only."""
        return "factorized" if self.spec.jac_structure == "m2rnn" else "exact"

    def operator(self, coefficients: Coefficients, kind: str, like: Tensor) -> Tensor:
        """Transition operators of ``kind``, from coefficients at states shaped as ``like``."""
        algebra = self.algebra(kind)
        if algebra is None:
            raise ValueError(f"operators of kind {kind!r} are not formed.")
        if isinstance(algebra, Diagonal | Block):
            program = compiled(self.spec, "channel_jacobian")
            params = [
                w.diagonal(dim1=-2, dim2=-1).flatten() if m.structure in ("head", "dense") else w
                for m, w in zip(self.spec.map_list, self.params, strict=False)
            ]
            entries = program(*coefficients, *params, *self.params[len(params) :])
            return self._channel_operator(entries, like)
        if isinstance(algebra, Left | Flat):
            return self._pushed_operator(coefficients, algebra, like)
        op = self._matrix_operator(coefficients, cast(Dense | Right, algebra), like)
        lead = like.shape[: like.ndim - len(self.state_shape)]
        blocks = (self.state_shape[0],) if kind == "exact" and isinstance(algebra, Right) else ()
        blocks = (algebra.heads,) if isinstance(algebra, Dense) else blocks
        return op.expand(*lead, *blocks, *op.shape[-2:])

    def _channel_operator(self, entries: Sequence[Tensor | int], like: Tensor) -> Tensor:
        """Stack S×S Jacobian entries, which may be numbers or smaller than a slot."""
        lead = like.shape[: like.ndim - len(self.state_shape)]
        shape = (*lead, *self.state_shape[-len(self.spec.axes) :])
        full = [
            (e if isinstance(e, Tensor) else like.new_tensor(float(e))).expand(shape)
            for e in entries
        ]
        if not self.several:
            return full[0]
        n = len(self.spec.slots)
        return torch.stack(full, self.slot_dim).unflatten(self.slot_dim, (n, n))

    def _matrix_operator(
        self, coefficients: Coefficients, algebra: Dense | Right, like: Tensor
    ) -> Tensor:
        """Push the identity through the signal-flow graph: one matrix a head, or for a right
        multiplication one ``V×V`` matrix a row, or one for the average of the rows."""
        fz = self.spec.factorization
        heads = algebra.heads if isinstance(algebra, Dense) else 0  # 0: right multiplication
        by_row = isinstance(algebra, Right) and algebra.by_row
        n_slots = len(fz.slots)
        width = self.state_shape[-1] // max(heads, 1)
        eye = torch.eye(n_slots * width, dtype=self.dtype, device=like.device)

        def times(op: Tensor, c: Tensor) -> Tensor:
            """``c`` after ``op``: it scales rows, or for a right multiplication columns."""
            if not heads:
                return op * (c.unsqueeze(-2) if by_row else c.mean(-2, keepdim=True))
            c = c.expand(*c.shape[:-1], self.state_shape[-1])
            return op * c.unflatten(-1, (heads, width)).unsqueeze(-1)

        if heads:
            rows = [eye[i * width : (i + 1) * width] for i in range(n_slots)]
            ops = {s: r.expand(heads, -1, -1) for s, r in zip(fz.slots, rows, strict=True)}
        else:
            ops = {fz.slots[0]: eye}
        weights = dict(zip((m.name for m in self.spec.map_list), self.params, strict=False))

        def combine(target: sympy.Symbol) -> Tensor:
            total = torch.zeros_like(ops[fz.slots[0]])
            for t, source in fz.state_edges:
                if t == target and source in ops:
                    i, op = fz.position(t, source), ops[source]
                    total = total + (
                        op * float(fz.edges[t][source]) if i is None else times(op, coefficients[i])
                    )
            return total

        for stage in fz.carrying:
            inner, weight = combine(operand_symbol(stage)), weights[stage.map.name]
            if stage.map.structure == "diagonal":
                ops[stage.symbol] = times(inner, weight)
            elif stage.map.structure == "right":
                ops[stage.symbol] = inner @ weight
            else:
                if weight.ndim == 3 and weight.shape[0] != heads:
                    weight = torch.block_diag(*weight)
                ops[stage.symbol] = (weight if weight.ndim == 3 else weight.unsqueeze(0)) @ inner
        updates = [combine(out) for out in fz.outputs]
        return updates[0] if n_slots == 1 else torch.cat(torch.broadcast_tensors(*updates), -2)

    def _pushed_operator(
        self, coefficients: Coefficients, algebra: Left | Flat, like: Tensor
    ) -> Tensor:
        """The tangent of an identity matrix: in the place of a matrix state, whose columns it
        treats alike, or of every basis state."""
        lead = like.shape[: like.ndim - len(self.state_shape)]
        if isinstance(algebra, Left):
            rows = self.state_shape[-2]
            eye = torch.eye(rows, dtype=self.dtype, device=like.device)
            return self.tangent(coefficients, eye.expand(*lead, *self.state_shape[:-1], rows))
        count, axes = math.prod(self.state_shape), len(self.spec.axes)
        eye = torch.eye(count, dtype=self.dtype, device=like.device)
        basis = eye.reshape(count, *self.state_shape).expand(*lead, count, *self.state_shape)
        spread = tuple(c.unsqueeze(-axes - 1) for c in coefficients)
        return self.tangent(spread, basis).flatten(len(lead) + 1).mT

    # -- gradients -----------------------------------------------------------------------------

    def gradients(
        self,
        linearization: Coefficients,
        h: Tensor,
        u: Tensor,
        cotangent: Tensor,
        u_bar: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        """Cotangents of ``u`` (written to ``u_bar`` if given) and of the parameters, summed over
        the leading dimensions, in the state's dtype, from the linearization at ``h``."""
        program = compiled(self.spec, "gradients")
        out = program(*self._slots(cotangent), *self._slots(h), *linearization, *self.params)
        n_drives, n_params = len(self.spec.drive_list), len(self.spec.param_list)
        u_bar = self._packed(out[:n_drives], u, u_bar)
        elementwise, pairs = out[n_drives : n_drives + n_params], out[n_drives + n_params :]
        grads: list[Tensor | None] = []
        for m, weight in zip(self.spec.map_list, self.params, strict=False):
            total = None
            for i, stage in enumerate(self.spec.factorization.linear):
                if stage.map.name == m.name and pairs[2 * i] is not None:
                    g = _map_gradient(m.structure, pairs[2 * i], pairs[2 * i + 1], weight.shape)
                    total = g if total is None else total + g
            grads.append(total)
        for p, bar in zip(self.spec.param_list, elementwise, strict=True):
            grads.append(None if bar is None else _reduced(bar, p.axes, self.spec.axes, 0))
        return u_bar, tuple(
            None if g is None else g.reshape(p.shape)
            for g, p in zip(grads, self.raw_params, strict=True)
        )

    def _packed(self, bars: Sequence[Tensor | None], u: Tensor, out: Tensor | None) -> Tensor:
        parts = [
            u.new_zeros(*u.shape[:-1], width)
            if bar is None
            else _reduced(bar, spec.axes, self.spec.axes, u.ndim - 1).reshape(*u.shape[:-1], width)
            for bar, spec, width in zip(bars, self.spec.drive_list, self.widths, strict=True)
        ]
        if out is None:
            return torch.cat([p.to(u.dtype) for p in parts], -1)
        for target, part in zip(out.split(self.widths, -1), parts, strict=True):
            target.copy_(part)
        return out


def _reduced(value: Tensor, axes: Sequence[str], state_axes: Sequence[str], lead: int) -> Tensor:
    """Sum over the state axes that a drive or parameter does not have, and over leading ones
    beyond the first ``lead``."""
    first = value.ndim - len(state_axes)
    dims = list(range(lead, first)) + [first + i for i, a in enumerate(state_axes) if a not in axes]
    return value.sum(dims) if dims else value


def _map_gradient(structure: str, bar: Tensor, operand: Tensor, shape: Sequence[int]) -> Tensor:
    """Gradient of a recurrent weight of the given shape, from output cotangents and operands."""
    bar, operand = torch.broadcast_tensors(bar, operand)
    if structure == "diagonal":
        return (bar * operand).sum(list(range(bar.ndim - len(shape))))
    bar, operand = (v.reshape(-1, v.shape[-1]) for v in (bar, operand))
    if structure == "right":
        return operand.mT @ bar
    if structure == "dense":
        return bar.mT @ operand
    left = bar.unflatten(-1, (shape[0], -1)).permute(1, 2, 0)
    return left @ operand.unflatten(-1, (shape[0], -1)).transpose(0, 1)
