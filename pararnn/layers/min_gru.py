"""MinGRUBlock and MinGRUStack: residual layers around the mixers of the linear-scan family."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .. import _checks as checks
from ..cells.entry import in_order, spelled
from ..cells.mixer import SPELLINGS
from .mixers import MIXERS, MixerEntry, keywords, known, plan
from .para_rnn import takes_gaps


class MinGRUBlock(nn.Module):
    """A pre-norm residual block: a mixer over time, then an MLP over channels.

    ``x ← x + dropout(mixer(LN(x)))``, then ``x ← x + MLP(LN(x))`` with the MLP
    ``Linear(d, e·d) → GELU → Dropout → Linear(e·d, d)``.

    Parameters
    ----------
    d_model
        Width of input, output and mixer.
    mlp_expansion
        The factor ``e``; with 0 the block has no MLP.
    dropout
        Probability of dropout after the mixer and inside the MLP, in training.
    learnable_h0
        Whether the mixer's start is a parameter, for mixers that let you choose.
    mixer
        ``'log'`` (:class:`~pararnn.MinGRU`), ``'signed'``, ``'rotation'``, ``'givens'``,
        ``'delta'`` or ``'lstm'``.
    mixer_kwargs
        Further arguments of the mixer.
    device, dtype
        As for :class:`torch.nn.Linear`.

    Attributes
    ----------
    mixer : Cell
        The mixer.

    Raises
    ------
    TypeError, ValueError
        If the mixer is unknown, cannot learn its start, or does not take an argument; if a width is
        not positive; if ``dropout`` is no probability.
    """

    def __init__(
        self,
        d_model: int,
        mlp_expansion: int = 4,
        dropout: float = 0.0,
        learnable_h0: bool = False,
        mixer: str = "log",
        mixer_kwargs: Mapping[str, Any] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        checks.positive("d_model", d_model)
        checks.parameter_dtype(dtype)
        checks.whole("mlp_expansion", mlp_expansion)
        checks.probability("dropout", dropout)
        checks.flag("learnable_h0", learnable_h0)
        chosen, settings = known(mixer), keywords("mixer_kwargs", mixer_kwargs)
        _can_learn_start(learnable_h0, [chosen])
        if learnable_h0 and chosen.learnable_h0:
            settings["learnable_h0"] = True
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        self.d_model = d_model
        self.norm1 = nn.LayerNorm(d_model, **where)
        self.mixer = chosen.build(d_model, settings, **where)
        self.drop = nn.Dropout(dropout)
        self.norm2 = self.mlp = None
        if mlp_expansion:
            self.norm2 = nn.LayerNorm(d_model, **where)
            self.mlp = nn.Sequential(
                nn.Linear(d_model, mlp_expansion * d_model, **where),
                nn.GELU(),
                nn.Dropout(dropout),
                nn.Linear(mlp_expansion * d_model, d_model, **where),
            )

    @spelled(**SPELLINGS)
    def forward(
        self,
        x: Tensor,
        h0: Tensor | None = None,
        dt: Tensor | None = None,
        *,
        resets: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Run whole sequences.

        Parameters
        ----------
        x
            ``(B, T, d_model)``.
        h0
            State to start from, ``(B, 1, W)`` or ``(B, W)``, as this method or :meth:`step` return
            it; the mixer's own start if not given. Also by ``h_0``.
        dt
            Time since the step before, ``(B, T)`` or ``(B, T, 1)``: for a mixer with decay, and
            only for one. Also by ``delta_t``.
        resets
            Bool mask ``(B, T)``: where True, the mixer starts from the zero state.

        Returns
        -------
        x
            ``(B, T, d_model)``.
        state
            The mixer's state after the last step, ``(B, 1, W)``, to continue from; the start if
            ``T`` is 0.

        Raises
        ------
        TypeError, ValueError
            If shapes, dtypes or devices do not fit; nothing is broadcast. If ``dt`` is missing or
            not wanted.
        """
        _fits(x, ("B", "T"), self.d_model, self.norm1.weight)
        y, state = self.mixer(self.norm1(x), h0, dt, resets=resets, return_state=True)
        return self._finished(x, y), state

    @spelled(x_t="x", h_prev="h", delta_t="dt")
    def step(
        self, x: Tensor, h: Tensor | None = None, dt: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """One step, for streaming: ``x (B, d_model)``, ``h`` as ``h0`` of :meth:`forward`, ``dt (B,)``
        or ``(B, 1)``; also by ``x_t``, ``h_prev`` and ``delta_t``.

        Returns the output ``(B, d_model)`` and the state ``(B, W)``. Step by step, a sequence gives
        what :meth:`forward` gives for the whole, and the same gradients if they are enabled. State
        and input in the other order are a ``TypeError``, where their shapes tell.
        """
        in_order("step", x, h, self.d_model, getattr(self.mixer, "flat_width", self.d_model))
        _fits(x, ("B",), self.d_model, self.norm1.weight)
        y, state = self.mixer.stream(self.norm1(x), h, dt)
        return self._finished(x, y), state

    def init_state(self, batch: int) -> Tensor:
        """The mixer's own start, ``(B, 1, W)``."""
        checks.batch((batch,))
        return self.mixer.init_state(batch).flatten(1).unsqueeze(1)

    def _finished(self, x: Tensor, y: Tensor) -> Tensor:
        x = x + self.drop(y)
        return x if self.mlp is None else x + self.mlp(self.norm2(x))  # type: ignore[misc]


class MinGRUStack(nn.Module):
    """Blocks on top of each other, with a projection in front and a norm behind.

    Parameters
    ----------
    input_size, d_model
        Width of the input, and of the blocks and the output. Equal ones need no projection.
    n_layers
        Number of blocks.
    mlp_expansion, dropout
        As for :class:`MinGRUBlock`.
    learnable_h0
        Whether the start is a parameter in all blocks whose mixer lets you choose.
    mixer
        One mixer for all blocks, or a list with the mixer of every block.
    mixer_kwargs
        Further arguments: of the mixer; or, for a list, ``{mixer: arguments}``, shared by all
        blocks with that mixer.
    decay_layers
        ``'all'``, or ``'last'``: take the arguments ``decay``, ``decay_rate`` and ``log1p_delta``
        away from all blocks but the last.
    device, dtype
        As for :class:`torch.nn.Linear`.

    Attributes
    ----------
    in_proj : torch.nn.Linear or torch.nn.Identity
        The projection.
    blocks : torch.nn.ModuleList
        The blocks.
    norm_out : torch.nn.LayerNorm
        The norm.

    Raises
    ------
    TypeError, ValueError
        As for :class:`MinGRUBlock`; if a list of mixers does not have one name a layer, or the
        arguments are not keyed as they have to be.

    Warns
    -----
    UserWarning
        Once, if more than one mixer rounds its transitions (``'rotation'`` with its grid).
    """

    def __init__(
        self,
        input_size: int,
        d_model: int,
        n_layers: int,
        mlp_expansion: int = 4,
        dropout: float = 0.0,
        learnable_h0: bool = False,
        mixer: str | list[str] = "log",
        mixer_kwargs: Mapping[str, Any] | None = None,
        decay_layers: str = "all",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        sizes = {"input_size": input_size, "d_model": d_model, "n_layers": n_layers}
        for name, size in sizes.items():
            checks.positive(name, size)
        checks.parameter_dtype(dtype)
        checks.flag("learnable_h0", learnable_h0)
        layers = plan(mixer, mixer_kwargs, n_layers, decay_layers)
        mixers = [MIXERS[name] for name, _ in layers]
        _can_learn_start(learnable_h0, mixers)
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        self.input_size, self.d_model, self.n_layers = input_size, d_model, n_layers
        same = input_size == d_model
        self.in_proj = nn.Identity() if same else nn.Linear(input_size, d_model, **where)
        self.blocks = nn.ModuleList(
            MinGRUBlock(
                d_model,
                mlp_expansion,
                dropout,
                learnable_h0 and MIXERS[name].learnable_h0,
                name,
                settings,
                **where,
            )
            for name, settings in layers
        )
        self.norm_out = nn.LayerNorm(d_model, **where)
        rounding = sum(MIXERS[name].rounds(settings) for name, settings in layers)
        if rounding > 1:
            warnings.warn(
                f"{rounding} mixers of this stack round their transitions; gradients pass each "
                "straight through, and what they miss is multiplied. One such mixer trains more "
                "reliably.",
                stacklevel=2,
            )

    @spelled(state="h0", delta_t="dt")
    def forward(
        self,
        x: Tensor,
        h0: Sequence[Tensor | None] | None = None,
        dt: Tensor | None = None,
        *,
        resets: Tensor | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """Run whole sequences, or one chunk of them.

        Parameters
        ----------
        x
            ``(B, T, input_size)``.
        h0
            One entry a block, as this method or :meth:`step` returns them; None, as a whole or for
            a block, is the mixer's own start. Also by ``state``.
        dt
            Time since the step before, ``(B, T)`` or ``(B, T, 1)``: for the blocks with decay, and
            needed if there are any. Also by ``delta_t``.
        resets
            Bool mask ``(B, T)``: where True, every mixer starts from the zero state.

        Returns
        -------
        output
            ``(B, T, d_model)``.
        state
            Of every block ``(B, 1, W)``, to continue from. Detach them to cut gradients between
            chunks.

        Raises
        ------
        TypeError, ValueError
            As for :meth:`MinGRUBlock.forward`; if ``h0`` does not have one entry a block; if ``dt``
            is given and no block has decay.
        """
        _fits(x, ("B", "T"), self.input_size, self.norm_out.weight)
        return self._run("forward", x, "h0", h0, dt, resets=resets)

    @spelled(x_t="x", state="h", delta_t="dt")
    def step(
        self,
        x: Tensor,
        h: Sequence[Tensor | None] | None = None,
        dt: Tensor | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """One step, for streaming: ``x (B, input_size)``, ``h`` as ``h0`` of :meth:`forward`,
        ``dt (B,)`` or ``(B, 1)``; also by ``x_t``, ``state`` and ``delta_t``.

        Returns the output ``(B, d_model)`` and the states, ``(B, W)`` each. Step by step, a
        sequence gives what :meth:`forward` gives for the whole, and the same gradients if they are
        enabled. State and input in the other order are a ``TypeError``.
        """
        in_order("step", x, h, self.input_size, 0)
        _fits(x, ("B",), self.input_size, self.norm_out.weight)
        return self._run("step", x, "h", h, dt)

    def init_state(self, batch: int | None = None) -> list[Any]:
        """The states to start from: None for every block, or, of a batch, ``(B, 1, W)`` each."""
        if batch is None:
            return [None] * self.n_layers
        return [block.init_state(batch) for block in self._blocks()]

    def _run(
        self, method: str, x: Tensor, name: str, h: object, dt: Tensor | None, **given: Any
    ) -> tuple[Tensor, list[Tensor]]:
        states = self._states(name, h)
        decays = [takes_gaps(block.mixer) for block in self._blocks()]
        if dt is not None and not any(decays):
            raise ValueError(
                "dt: got time gaps, expected none: no block has decay; leave dt out, or give "
                "mixer_kwargs={'decay': …}."
            )
        x = self.in_proj(x)
        following = []
        for block, state, decay in zip(self._blocks(), states, decays, strict=True):
            run = block if method == "forward" else block.step
            x, state = run(x, state, dt if decay else None, **given)
            following.append(state)
        return self.norm_out(x), following

    def _blocks(self) -> list[Any]:
        return list(self.blocks)

    def _states(self, name: str, state: object) -> list[Tensor | None]:
        if state is None:
            return [None] * self.n_layers
        if not isinstance(state, list | tuple):
            raise TypeError(
                f"{name}: got {type(state).__name__}, expected a list with one state a block."
            )
        if len(state) != self.n_layers:
            raise ValueError(
                f"{name}: got {len(state)} states, expected {self.n_layers}, one a block."
            )
        return list(state)


def _can_learn_start(wanted: bool, mixers: Sequence[MixerEntry]) -> None:
    if wanted and not any(m.learnable_h0 or m.learns_start for m in mixers):
        raise ValueError(
            f"learnable_h0: got True, but {mixers[0].cell.__name__} starts from a fixed state; leave it out."
        )


def _fits(value: object, lead: tuple[str, ...], width: int, parameter: nn.Parameter) -> None:
    """Raise unless this is an input of a module with such parameters."""
    tensor = checks.same_device("x", checks.floating("x", value), parameter.device)
    if tensor.ndim != len(lead) + 1 or tensor.shape[-1] != width:
        raise ValueError(
            f"x: got shape {tuple(tensor.shape)}, expected ({', '.join(lead)}, {width})."
        )
    if tensor.dtype != parameter.dtype and checks.autocast_dtype(tensor.device) is None:
        raise TypeError(
            f"x: got dtype {tensor.dtype}, expected {parameter.dtype} as the parameters; "
            "convert one of them with .to(...) or use torch.autocast."
        )
