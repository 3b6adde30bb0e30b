"""The mixers that a block knows by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..cells import (
    Cell,
    DeltaMinGRU,
    GivensMinGRU,
    MinGRU,
    MinLSTM,
    Mixer,
    RotationMinGRU,
    SignedMinGRU,
)
from ..cells.rebuild import constructor_arguments

DECAY_KEYS = ("decay", "decay_rate", "log1p_delta")


@dataclass(frozen=True)
class MixerEntry:
    """What a name stands for.

    Attributes
    ----------
    cell : type
        The class.
    learnable_h0 : bool
        Whether the class takes ``learnable_h0``.
    learns_start : bool
        Whether its start is always a parameter.
    grid : str, optional
        The argument with the grid to which transitions are rounded, None for none. Gradients pass
        the rounding straight through; what they miss is multiplied in a stack of several.
    """

    cell: type[Mixer]
    learnable_h0: bool = False
    learns_start: bool = False
    grid: str | None = None

    def rounds(self, settings: Mapping[str, Any]) -> bool:
        """Whether it rounds its transitions, with these arguments."""
        return self.grid is not None and settings.get(self.grid, True) is not None

    def build(self, width: int, settings: Mapping[str, Any], **common: Any) -> Mixer:
        """A new one from ``width`` to ``width``.

        Raises
        ------
        TypeError, ValueError
            If ``settings`` has something that is no argument of the class, or a value does not fit.
        """
        allowed = arguments(self.cell)
        unknown = [name for name in settings if name not in allowed]
        if unknown:
            raise TypeError(
                f"mixer_kwargs: got {unknown[0]!r}, expected arguments of {self.cell.__name__}: "
                f"{', '.join(allowed)}."
            )
        return self.cell(width, width, **common, **settings)


def arguments(cell: type[Mixer]) -> list[str]:
    """What a block may pass on to a mixer: all named arguments but widths, device and dtype."""
    return [name for name in constructor_arguments(cell, Cell) if name not in ("d_in", "d_h")]


MIXERS: dict[str, MixerEntry] = {
    "log": MixerEntry(MinGRU, learnable_h0=True),
    "signed": MixerEntry(SignedMinGRU, learnable_h0=True),
    "rotation": MixerEntry(RotationMinGRU, learns_start=True, grid="snap"),
    "givens": MixerEntry(GivensMinGRU, learns_start=True),
    "delta": MixerEntry(DeltaMinGRU),
    "lstm": MixerEntry(MinLSTM, learnable_h0=True),
}


def known(name: object) -> MixerEntry:
    """The mixer of a name, or a ``ValueError`` that lists them."""
    if not isinstance(name, str) or name not in MIXERS:
        raise ValueError(f"mixer: got {name!r}, expected one of {', '.join(map(repr, MIXERS))}.")
    return MIXERS[name]


def plan(
    mixer: object, settings: object, n_layers: int, decay_layers: str
) -> list[tuple[str, dict[str, Any]]]:
    """Name and keyword arguments of the mixer of every layer; see :class:`MinGRUStack`.

    Raises
    ------
    ValueError
        If a name is unknown, a list of another length, or the arguments are not given as they have
        to be.
    """
    if isinstance(mixer, str):
        known(mixer)
        flat = keywords("mixer_kwargs", settings)
        layers = [(mixer, dict(flat)) for _ in range(n_layers)]
    elif isinstance(mixer, list):
        for name in mixer:
            known(name)
        if len(mixer) != n_layers:
            raise ValueError(
                f"mixer: got a list of {len(mixer)} names for {n_layers} layers, expected one name "
                "a layer."
            )
        keyed = keywords("mixer_kwargs", settings, named=False)
        unused = [key for key in keyed if key not in mixer]
        if unused:
            raise ValueError(
                f"mixer_kwargs: got the key {unused[0]!r}, expected names of mixers in "
                f"{mixer!r}: for a list of mixers, give {{'name': {{…}}}}."
            )
        of = {key: keywords(f"mixer_kwargs[{key!r}]", value) for key, value in keyed.items()}
        layers = [(name, dict(of.get(name, {}))) for name in mixer]
    else:
        raise ValueError(
            f"mixer: got {mixer!r} ({type(mixer).__name__}), expected a name or a list of names."
        )
    if decay_layers not in ("all", "last"):
        raise ValueError(f"decay_layers: got {decay_layers!r}, expected 'all' or 'last'.")
    if decay_layers == "last":
        if layers[-1][1].get("decay") is None:
            raise ValueError(
                "decay_layers: got 'last', expected 'all' where the last block has no decay; leave "
                "it out, or give the last block's mixer a decay in mixer_kwargs."
            )
        for _, arguments in layers[:-1]:
            for key in DECAY_KEYS:
                arguments.pop(key, None)
    return layers


def keywords(what: str, value: object, named: bool = True) -> dict[str, Any]:
    """Keyword arguments as a dict, None being none. Names of mixers are no arguments of one."""
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ValueError(f"{what}: got {value!r}, expected None or a dict with names as keys.")
    mixers = [key for key in value if key in MIXERS]
    if named and mixers:
        raise ValueError(
            f"{what}: got the key {mixers[0]!r}, a mixer, expected arguments of one; they are keyed "
            "by mixer only if mixer is a list."
        )
    return dict(value)
