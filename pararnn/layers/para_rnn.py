"""ParaRNN: the layer that a ``torch.nn.GRU`` user expects, around any cell."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from ..solvers import NewtonConfig, Solution, decode
from ..solvers.api import METHODS, solve_layer
from ..solvers.task import has_spec, output_of


def takes_gaps(cell: Any) -> bool:
    """Whether every step of the cell needs the time since the step before."""
    return getattr(getattr(cell, "spec", None), "gap", None) is not None


def _width(cell: Any) -> int:
    if has_spec(cell):
        return cell.d_h
    return output_of(cell, torch.empty(1, *cell.state_shape)).shape[-1]


def _dtype(cell: Any, x: Tensor) -> torch.dtype:
    """Dtype of a layer's output for an input."""
    return cell.output_dtype if has_spec(cell) else x.dtype


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
        if solver not in METHODS:
            raise ValueError(f"solver: got {solver!r}, expected one of {METHODS}.")
        if not 0.0 <= dropout < 1.0:
            raise ValueError(f"dropout: got {dropout}, expected a probability in [0, 1).")
        if isinstance(cell, nn.Module):
            cells = [cell]
        else:
            cells = list(cell) if isinstance(cell, Sequence) else []
        if not cells or not all(isinstance(c, nn.Module) for c in cells):
            raise TypeError(f"cell: got {cell!r}, expected a cell, or a non-empty list of cells.")
        for c in cells:
            if not hasattr(c, "step") or not hasattr(c, "state_shape"):
                raise TypeError(
                    f"cell: got {type(c).__name__}, expected a Cell or a module with a method "
                    "step(h, x) and an attribute state_shape."
                )
        if len(cells) > 1 and num_layers not in (1, len(cells)):
            raise ValueError(
                f"num_layers: got {num_layers} for a list of {len(cells)} cells; leave it out."
            )
        if num_layers < 1:
            raise ValueError(f"num_layers: got {num_layers}, expected at least 1.")
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

        Returns
        -------
        output
            ``(B, T, hidden_size)`` (or as ``x``): the last layer's output at every step.
        h_n
            ``(num_layers, B, *state_shape)``: every layer's state after the last step, in the
            state's dtype (at least float32), to continue from.
        """
        if isinstance(x, PackedSequence):
            if resets is not None:
                raise ValueError(
                    "resets: a PackedSequence takes none; give a padded tensor instead."
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
        if single:
            x = x.unsqueeze(0)
            h0 = None if h0 is None else h0.unsqueeze(1)
            resets, dt = (None if v is None else v.unsqueeze(0) for v in (resets, dt))
        elif not self.batch_first:
            x = x.transpose(0, 1)
            resets, dt = (None if v is None else v.transpose(0, 1) for v in (resets, dt))
        output, states = self._run(x, h0, resets, dt)
        h_n = torch.stack([s.final_state for s in states])
        if single:
            return output.squeeze(0), h_n.squeeze(1)
        return (output if self.batch_first else output.transpose(0, 1)), h_n

    def _run(
        self, x: Tensor, h0: Tensor | None, resets: Tensor | None, dt: Tensor | None
    ) -> tuple[Tensor, list[Solution]]:
        self._check_state("h0", h0)
        gaps = self._gaps(dt)
        solutions = []
        for i, cell in enumerate(self.cells):
            start = None if h0 is None else h0[i]
            solution = solve_layer(
                cell, x, self.config, method=self.solver, h0=start, resets=resets, dt=gaps[i]
            )
            solutions.append(solution)
            x = solution.output.to(_dtype(cell, x))
            if i + 1 < self.num_layers:
                x = nn.functional.dropout(x, self.dropout, self.training)
        if not torch.compiler.is_compiling():
            self.last_solutions = [s.detached() for s in solutions]
        return x, solutions

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
        output, solutions = self._run(padded, h0, None, gaps)
        rows = torch.arange(len(lengths))
        # States of padding come after those of the sequence and do not influence them.
        finals = [s.states[rows, lengths - 1].to(s.final_state.dtype) for s in solutions]
        if x.sorted_indices is not None:
            output, lengths = output[x.sorted_indices], lengths[x.sorted_indices.cpu()]
        data = pack_padded_sequence(output, lengths, batch_first=True).data
        packed = PackedSequence(data, x.batch_sizes, x.sorted_indices, x.unsorted_indices)
        return packed, torch.stack(finals)

    def step(
        self,
        x: Tensor,
        state: Tensor | None = None,
        *,
        dt: Tensor | None = None,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """One step, for streaming: ``x (B, d_in)``, ``state (num_layers, B, *state_shape)``, and
        ``dt (B,)`` if there are cells with a time gap.

        Returns the output ``(B, hidden_size)`` and the new state. Running a sequence step by step
        gives what :meth:`forward` gives for the whole. Without gradients, the new state can be
        written to ``out``, of the shape and dtype of ``state``, which it may be: the output is then a
        copy, which the next step does not overwrite. On a CUDA device a step is the projections and
        one kernel a layer (see :func:`~pararnn.decode`).
        """
        self._check_state("state", state)
        self._check_state("out", out)
        gaps = self._gaps(dt)
        following = []
        for i, cell in enumerate(self._cells()):
            h = self._start(cell, x) if state is None else state[i]
            h = decode(cell, x, h, dt=gaps[i], out=None if out is None else out[i])
            following.append(h)
            output = cell.output(h, x) if has_spec(cell) else output_of(cell, h)
            x = output.to(_dtype(cell, x))
            if i + 1 < self.num_layers:
                x = nn.functional.dropout(x, self.dropout, self.training)
        if out is not None:  # whose memory the next step may use
            return x.clone(), out
        return x, torch.stack(following)

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
