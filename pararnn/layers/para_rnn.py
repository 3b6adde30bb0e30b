"""ParaRNN: the layer that a ``torch.nn.GRU`` user expects, around any cell."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from .. import _checks as checks
from ..cells import Cell
from ..cells.entry import entered, in_order, spelled
from ..solvers import NewtonConfig, Solution, decode
from ..solvers.api import solve_layer
from ..solvers.methods import ASKED
from ..solvers.problem import as_recurrence
from ..spec import Spec


def takes_gaps(cell: Any) -> bool:
    """Whether every step of the cell needs the time since the step before."""
    return getattr(getattr(cell, "spec", None), "gap", None) is not None


def _width(cell: Any) -> int:
    return as_recurrence(cell, torch.empty(0)).width


def _dtype(cell: Any, x: Tensor) -> torch.dtype:
    """Dtype of a layer's output for an input."""
    return cell.output_dtype if isinstance(getattr(cell, "spec", None), Spec) else x.dtype


class ParaRNN(nn.Module):
    """Stacked recurrent layers, trained in parallel over the sequence.

    Parameters
    ----------
    cell
        A cell, or a list of cells, one a layer. Any module with ``step(h, x)``, ``state_shape``
        and ``d_in`` will do.
    num_layers
        With one cell: this many layers; those after the first are fresh cells of the same kind.
    batch_first
        Whether inputs are ``(B, T, d_in)`` (the default) or ``(T, B, d_in)``.
    dropout
        Probability of dropout between layers, in training.
    solver
        ``'auto'``, ``'sequential'``, ``'newton'`` or ``'shooting'``; see :func:`pararnn.solve`.
    config
        Settings of the solver.

    Attributes
    ----------
    cells : torch.nn.ModuleList
        One cell a layer.
    last_solutions : list of Solution
        The solver's report of every layer in the last forward pass, tensors detached.

    Raises
    ------
    TypeError, ValueError
        If the widths of a list of cells do not chain, or an argument is out of range.
    """

    def __init__(
        self,
        cell: nn.Module | Sequence[nn.Module],
        num_layers: int = 1,
        *,
        batch_first: bool = True,
        dropout: float = 0.0,
        solver: str = "auto",
        config: NewtonConfig | None = None,
    ):
        super().__init__()
        checks.one_of("solver", solver, ASKED)
        checks.probability("dropout", dropout)
        checks.flag("batch_first", batch_first)
        checks.positive("num_layers", num_layers)
        if not isinstance(config, NewtonConfig | None):
            raise TypeError(
                f"config: got {type(config).__name__}, expected a NewtonConfig or None."
            )
        if isinstance(cell, nn.Module):
            cells = [cell]
        else:
            cells = list(cell) if isinstance(cell, Sequence) else []
        if not cells or not all(isinstance(c, nn.Module) for c in cells):
            raise TypeError(f"cell: got {cell!r}, expected a cell, or a non-empty list of cells.")
        for c in cells:
            as_recurrence(c, torch.empty(0))  # or an error that says what a cell is
        if len(cells) > 1 and num_layers not in (1, len(cells)):
            raise ValueError(
                f"num_layers: got {num_layers} for a list of {len(cells)} cells; leave it out."
            )
        if len(cells) == 1:
            cells += [_another(cells[0]) for _ in range(num_layers - 1)]
        for i, (below, above) in enumerate(itertools.pairwise(cells)):
            if getattr(above, "d_in", None) != _width(below):
                raise ValueError(
                    f"cells[{i + 1}]: got d_in={getattr(above, 'd_in', None)}, expected "
                    f"{_width(below)}, the output width of cells[{i}]."
                )
        shapes = [tuple(cast(Sequence[int], c.state_shape)) for c in cells]
        if len(set(shapes)) > 1:
            raise ValueError(
                f"cell: got cells with states of different shapes, {shapes}, expected equal ones, so "
                "that h_n is one tensor; use one ParaRNN a layer."
            )
        self.cells = nn.ModuleList(cells)
        self.num_layers = len(cells)
        self.input_size = getattr(cells[0], "d_in", None)
        self.hidden_size = _width(cells[-1])
        self.batch_first, self.dropout = batch_first, dropout
        self.solver, self.config = solver, config
        self.last_solutions: list[Solution] = []

    def __getstate__(self) -> dict[str, Any]:
        """Without the reports of the last pass, which would be saved with every model."""
        return self.__dict__ | {"last_solutions": []}

    def extra_repr(self) -> str:
        return f"num_layers={self.num_layers}, dropout={self.dropout}, solver={self.solver!r}"

    def forward(
        self,
        x: Tensor | PackedSequence,
        h0: Tensor | None = None,
        *,
        resets: Tensor | None = None,
        dt: Tensor | PackedSequence | None = None,
        lengths: Tensor | None = None,
    ) -> tuple[Tensor | PackedSequence, Tensor]:
        """Run whole sequences.

        Parameters
        ----------
        x
            ``(B, T, d_in)``, ``(T, B, d_in)`` if not ``batch_first``, ``(T, d_in)`` for a single
            sequence, or a ``PackedSequence``.
        h0
            ``(num_layers, B, *state_shape)``, without ``B`` for a single sequence; every cell's
            ``init_state`` if not given.
        resets
            Bool mask shaped like ``x`` without its features: where True, the step starts from the
            zero state, also if the cell's ``init_state`` is another.
        dt
            Time since the step before, shaped like ``x`` without its features: for the layers
            whose cell has a time gap, and needed if there are any. For a ``PackedSequence``,
            another one, of numbers.
        lengths
            Steps of every sequence, int64 of shape ``(B,)`` from 0 to T (not checked on a GPU): what
            comes after them is padding. It is not looked at, whatever it holds, NaN too; the output
            is zero there, and so are gradients.

        Returns
        -------
        output
            ``(B, T, hidden_size)`` (or as ``x``): the last layer's output at every step.
        h_n
            ``(num_layers, B, *state_shape)``: every layer's state after the last step of every
            sequence, in the state's dtype (at least float32), to continue from. It is one tensor,
            ``h_n[i]`` that of layer ``i``; that of a cell with several slots cannot be unpacked
            into them.
        """
        if isinstance(x, PackedSequence):
            if resets is not None or lengths is not None:
                raise ValueError(
                    f"{'lengths' if resets is None else 'resets'}: a PackedSequence takes none; give "
                    "a padded tensor instead."
                )
            return self._forward_packed(x, h0, dt)
        if not isinstance(x, Tensor) or x.ndim not in (2, 3):
            got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"x: got {got}, expected (B, T, d_in), (T, d_in) or a PackedSequence.")
        if dt is not None and not isinstance(dt, Tensor):
            raise TypeError(
                f"dt: got {type(dt).__name__}, expected a tensor shaped like x without its "
                "features."
            )
        single = x.ndim == 2
        if single and isinstance(lengths, Tensor) and lengths.ndim == 0:
            lengths = lengths.unsqueeze(0)
        given = self.batched(x, h0, resets, dt)
        output, h_n = self._run(*given) if lengths is None else self._padded(*given, lengths)
        if single:
            return output.squeeze(0), self._states(h_n.squeeze(1))
        return (output if self.batch_first else output.transpose(0, 1)), self._states(h_n)

    def batched(
        self, x: Tensor, h0: Any = None, resets: Any = None, dt: Any = None
    ) -> tuple[Tensor, Any, Any, Any]:
        """Arguments of :meth:`forward` as those of a batch, ``(B, T, …)``."""
        given: list[Any] = [x, resets, dt]
        if x.ndim == 2:
            h0 = None if h0 is None else h0.unsqueeze(1)
            given = [None if v is None else v.unsqueeze(0) for v in given]
        elif not self.batch_first:
            given = [None if v is None else v.transpose(0, 1) for v in given]
        return given[0], h0, given[1], given[2]

    def _padded(
        self, x: Tensor, h0: Tensor | None, resets: Tensor | None, dt: Any, lengths: Tensor
    ) -> tuple[Tensor, Tensor]:
        """:meth:`_run` with padding that is selected away, so that no number of it is read."""
        batch, total = x.shape[:2]
        _check_lengths(lengths, batch, total, x.device)
        valid = torch.arange(total, device=x.device) < lengths[:, None]
        x = torch.where(valid[..., None], x, 0)
        if dt is not None and tuple(dt.shape) == (batch, total):
            dt = torch.where(valid, dt, 0)
        output, h_n = self._run(x, h0, resets, dt, lengths)
        return torch.where(valid[..., None], output, 0), h_n

    def _run(
        self,
        x: Tensor,
        h0: Tensor | None,
        resets: Tensor | None,
        dt: Tensor | None,
        lengths: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Output, and the final states ``(num_layers, B, *state_shape)``: those after ``lengths``."""
        self._check_state("h0", h0)
        gaps = self._gaps(dt)
        finals, solutions = [], []
        for i, cell in enumerate(self.cells):
            run = _Sequence(cell, self.config, self.solver, lengths)
            given = {"h0": None if h0 is None else h0[i], "resets": resets, "dt": gaps[i]}
            given = {name: value for name, value in given.items() if value is not None}
            x, final = entered(cell, run, x, **given)
            finals.append(final)
            solutions.append(run.solution)
            if i + 1 < self.num_layers:
                x = nn.functional.dropout(x, self.dropout, self.training)
        if not torch.compiler.is_compiling():
            self.last_solutions = [s.detached() for s in solutions if s is not None]
        return x, _layers(finals)

    def _forward_packed(
        self, x: PackedSequence, h0: Tensor | None, dt: object
    ) -> tuple[PackedSequence, Tensor]:
        padded, lengths = pad_packed_sequence(x, batch_first=True)
        gaps = None
        if dt is not None:
            if not isinstance(dt, PackedSequence) or dt.batch_sizes.tolist() != (
                x.batch_sizes.tolist()
            ):
                raise TypeError(
                    f"dt: got {type(dt).__name__}, expected a PackedSequence of the lengths of x; "
                    "pack it as you pack x."
                )
            gaps, _ = pad_packed_sequence(dt, batch_first=True)
        output, h_n = self._run(padded, h0, None, gaps, lengths.to(padded.device))
        if x.sorted_indices is not None:
            output, lengths = output[x.sorted_indices], lengths[x.sorted_indices.cpu()]
        data = pack_padded_sequence(output, lengths, batch_first=True).data
        packed = PackedSequence(data, x.batch_sizes, x.sorted_indices, x.unsorted_indices)
        return packed, self._states(h_n)

    @spelled(state="h")
    def step(
        self,
        x: Tensor,
        h: Tensor | None = None,
        *,
        dt: Tensor | None = None,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """One step, for streaming: ``x (B, d_in)``, ``h (num_layers, B, *state_shape)``, also by
        ``state``, and ``dt (B,)`` if there are cells with a time gap.

        A layer takes its input first, as in ``forward(x, h0)``; a cell's ``step(h, x)`` is the
        recurrence and takes the state first. ``step(x=…, h=…)`` is right for both, and the other
        order is a ``TypeError``.

        Returns the output ``(B, hidden_size)`` and the new state. Running a sequence step by step
        gives what :meth:`forward` gives for the whole. Without gradients, the new state can be
        written to ``out``, of the shape and dtype of ``h``, which it may be: the output is then a
        copy, which the next step does not overwrite. On a CUDA device a step is the projections and
        one kernel a layer (see :func:`~pararnn.decode`).
        """
        numbers = self.num_layers * math.prod(self._cells()[0].state_shape)
        in_order("step", x, h, self.input_size, numbers)
        self._check_state("h", h)
        self._check_state("out", out)
        gaps = self._gaps(dt)
        following = []
        for i, cell in enumerate(self._cells()):
            state = self._start(cell, x) if h is None else h[i]
            run = _Step(cell, None if out is None else out[i])
            given = {} if gaps[i] is None else {"dt": gaps[i]}
            x, state = entered(cell, run, x, state, **given)
            following.append(state)
            if i + 1 < self.num_layers:
                x = nn.functional.dropout(x, self.dropout, self.training)
        if out is not None:  # whose memory the next step may use
            return x.clone(), out
        return x, self._states(_layers(following))

    def _states(self, h_n: Tensor) -> Tensor:
        """States as they are returned: those of several slots cannot be unpacked."""
        several = getattr(self._cells()[0], "state_slots", 1) > 1
        return h_n.as_subclass(Slots) if several and not torch.compiler.is_compiling() else h_n

    def init_state(self, batch: int) -> Tensor:
        """The zero state ``(num_layers, B, *state_shape)``."""
        like = next(self.parameters())
        return torch.stack([self._start(c, like.new_empty(batch, 0)) for c in self.cells])

    def _cells(self) -> list[Any]:
        return list(self.cells)

    def _gaps(self, dt: Any) -> list[Any]:
        """The time gaps for every layer: for those whose cell takes them."""
        if dt is not None and not any(map(takes_gaps, self.cells)):
            raise TypeError("dt: got time gaps, expected none: no cell takes any; leave dt out.")
        return [dt if takes_gaps(cell) else None for cell in self.cells]

    @staticmethod
    def _start(cell: Any, x: Tensor) -> Tensor:
        if hasattr(cell, "init_state"):
            return cell.init_state(x.shape[0])
        return x.new_zeros(x.shape[0], *cell.state_shape)

    def _check_state(self, name: str, state: Tensor | None) -> None:
        if state is not None and not isinstance(state, Tensor):
            raise TypeError(
                f"{name}: got {type(state).__name__}, expected one tensor; the slots of a cell with "
                "several are stacked in it."
            )
        if state is not None and (state.ndim < 2 or state.shape[0] != self.num_layers):
            raise ValueError(
                f"{name}: got shape {tuple(state.shape)}, expected ({self.num_layers}, B, "
                f"{', '.join(map(str, self._cells()[0].state_shape))})."
            )


class Slots(Tensor):
    """States of cells with several slots. Every operation gives a plain tensor."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __iter__(self) -> Any:
        raise TypeError(
            f"h_n: got an iteration over the states {tuple(self.shape)} of all layers, as in "
            "'out, (h, c) = rnn(x)'; expected 'out, h_n = rnn(x)'. Layers come first: h_n[i] has "
            "the slots of layer i, in the order of the cell's card, and h_n.unbind(0) all layers."
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)


class _Sequence:
    """What a layer runs on its cell for whole sequences: output and final state."""

    def __init__(self, cell: Any, config: NewtonConfig | None, method: str, lengths: Tensor | None):
        self.cell, self.config, self.method, self.lengths = cell, config, method, lengths
        self.solution: Solution | None = None

    def __call__(self, x: Tensor, **given: Any) -> tuple[Tensor, Tensor]:
        cell, lengths = self.cell, self.lengths
        solution = solve_layer(
            cell, x, self.config, method=self.method, unrounded=lengths is not None, **given
        )
        self.solution, final = solution, solution.final_state
        if lengths is not None and x.shape[1]:
            # States of padding come after those of the sequence and do not influence them.
            rows = torch.arange(len(lengths), device=x.device)
            final = solution.states[rows, (lengths - 1).clamp_min(0)].to(final.dtype)
            empty = (lengths == 0).reshape(-1, *(1,) * (final.ndim - 1))
            start = given.get("h0")
            start = ParaRNN._start(cell, x) if start is None else start
            final = torch.where(empty, start.to(final.dtype), final)
        return solution.output.to(_dtype(cell, x)), final


class _Step:
    """What a layer runs on its cell for one step: output and new state."""

    def __init__(self, cell: Any, out: Tensor | None):
        self.cell, self.out = cell, out

    def __call__(self, x: Tensor, h: Tensor, **given: Any) -> tuple[Tensor, Tensor]:
        cell = self.cell
        if isinstance(cell, Cell):
            u = cell.drives(x)
            h = decode(cell, None, h, drives=u, out=self.out, **given)
            return cell.output(h, drives=u).to(cell.output_dtype), h
        h = decode(cell, x, h, out=self.out, **given)
        return as_recurrence(cell, x).output(h, x), h


def _layers(states: list[Tensor]) -> Tensor:
    """States of all layers as one tensor; of one layer, without a copy."""
    return torch.stack(states) if len(states) > 1 else states[0].unsqueeze(0)


def _check_lengths(lengths: object, batch: int, total: int, device: torch.device) -> None:
    if not isinstance(lengths, Tensor) or lengths.dtype != torch.int64:
        got = lengths.dtype if isinstance(lengths, Tensor) else type(lengths).__name__
        raise TypeError(f"lengths: got {got}, expected an int64 tensor of shape ({batch},).")
    if tuple(lengths.shape) != (batch,):
        raise ValueError(
            f"lengths: got shape {tuple(lengths.shape)}, expected ({batch},), one a sequence."
        )
    checks.same_device("lengths", lengths, device)
    if not checks.within(lengths, 0, total):
        raise ValueError(
            f"lengths: got {lengths.tolist()}, expected numbers from 0 to {total}, the steps of x."
        )


def _another(cell: Any) -> nn.Module:
    """A fresh cell of the same kind that reads the given cell's output."""
    if hasattr(cell, "rebuilt"):
        return cell.rebuilt(d_in=_width(cell))
    if getattr(cell, "d_in", None) == _width(cell) and hasattr(cell, "reset_parameters"):
        fresh = copy.deepcopy(cell)
        fresh.reset_parameters()
        return fresh
    raise ValueError(
        f"num_layers > 1: a {type(cell).__name__} cannot be rebuilt for another input width; pass "
        "a list of cells."
    )
