"""The cells that the catalog, the conformance suite and the command line know, in catalog order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .cell import Cell
from .delta_min_gru import DeltaMinGRU
from .facts import Facts
from .givens_min_gru import GivensMinGRU
from .min_gru import MinGRU
from .min_lstm import MinLSTM
from .para_cfc import ParaCfC
from .para_gru import ParaGRU
from .para_lstm import ParaLSTM
from .para_m2rnn import ParaM2RNN
from .para_nlru import ParaNLRU
from .para_slstm import ParaSLSTM
from .rotation_min_gru import RotationMinGRU
from .signed_min_gru import SignedMinGRU

Settings = Mapping[str, Any]


@dataclass(frozen=True)
class CellEntry:
    """One variant of a cell: its class, and the settings that make it.

    Its card's facts are in the file ``facts/<slug>.toml``, named like the module of the class.

    Attributes
    ----------
    kind
        The class.
    variant
        What the name has in brackets; empty if there is only one.
    settings
        Arguments of the constructor.
    label
        Fidelity label, if it is not that of the card.
    width, sizes
        Width of an instance that is not asked for another, and the arguments that make a width (per
        axis of the state) of it and the settings.

    Raises
    ------
    TypeError
        If the class has no recurrence written by hand.
    """

    kind: type[Cell]
    variant: str = ""
    settings: Settings = field(default_factory=dict, hash=False)
    label: tuple[str, ...] = ()
    width: int = 6
    sizes: Callable[[int, Settings], Settings] = lambda width, settings: {"d_h": width}

    def __post_init__(self) -> None:
        if self.kind.recurrence is None:
            raise TypeError(
                f"{self.name}: got no recurrence, expected the step written by hand beside the Spec, "
                "which the contract compares with it; write a method recurrence()."
            )

    @property
    def name(self) -> str:
        """``"ParaGRU[diag]"``."""
        return self.kind.__name__ + (f"[{self.variant}]" if self.variant else "")

    @property
    def slug(self) -> str:
        """Name of its module, its file of facts and its page."""
        return self.kind.__module__.rpartition(".")[2]

    @property
    def facts(self) -> Facts:
        """What its card says, read on first use."""
        from .facts.load import of_cell

        return of_cell(self.slug)

    @property
    def fidelity(self) -> tuple[str, ...]:
        """Fidelity labels of this variant."""
        return self.label or self.facts.fidelity

    def factory(self, d_in: int = 5, width: int | None = None, **settings: Any) -> Cell:
        """An instance, of a width that it accepts; ``settings`` replace those of the variant."""
        chosen = {**self.settings, **settings}
        sizes = self.sizes(self.width if width is None else width, chosen)
        return self.kind(d_in, **{**sizes, **chosen})


def _registered(*entries: CellEntry) -> dict[str, CellEntry]:
    cells: dict[str, CellEntry] = {}
    for entry in entries:
        if cells.setdefault(entry.name, entry) is not entry:
            raise ValueError(f"got two cells {entry.name!r}; give one of them another variant.")
    return cells


def _planes(width: int, settings: Settings) -> Settings:
    return {"d_h": 2 * width}


RESEARCH = ("research-variant",)

CELLS = _registered(
    CellEntry(ParaGRU, "diag", {"mix": "diag"}),
    CellEntry(ParaGRU, "head", {"mix": "head", "n_heads": 2}, RESEARCH),
    CellEntry(ParaLSTM),
    CellEntry(ParaNLRU),
    CellEntry(ParaSLSTM, "sigmoid", {"forget": "sigmoid"}),
    CellEntry(ParaSLSTM, "exp", {"forget": "exp"}),
    CellEntry(ParaCfC, "published", {"form": "published"}),
    CellEntry(ParaCfC, "consistent", {"form": "consistent"}),
    CellEntry(ParaM2RNN, width=3, sizes=lambda width, _: {"k_dim": width, "v_dim": width + 1}),
    CellEntry(MinGRU, "plain"),
    CellEntry(
        MinGRU, "decay", {"decay": "learnable", "learnable_h0": True, "log1p_delta": True}, RESEARCH
    ),
    CellEntry(MinLSTM),
    CellEntry(SignedMinGRU, "decoupled"),
    CellEntry(SignedMinGRU, "coupled", {"coupled": True}),
    CellEntry(RotationMinGRU, "snapped", width=3, sizes=_planes),
    CellEntry(RotationMinGRU, "free", {"snap": None}, width=3, sizes=_planes),
    CellEntry(
        GivensMinGRU,
        settings={"block_size": 4, "rounds": 3},
        width=2,
        sizes=lambda width, settings: {"d_h": settings["block_size"] * width},
    ),
    *(
        CellEntry(
            DeltaMinGRU,
            variant,
            {"n_heads": 2, **settings},
            width=3,
            sizes=lambda width, _: {"d_h": 2 * width, "d_k": width, "d_v": width + 1},
        )
        for variant, settings in (
            ("nh=1", {}),
            ("nh=2", {"nh": 2}),
            ("decay", {"decay": "learnable"}),
        )
    ),
)
"""The one place where a cell is registered."""


def cell_names() -> tuple[str, ...]:
    """Names of all variants, in catalog order."""
    return tuple(CELLS)


def get_cell(name: str) -> CellEntry:
    """The entry of a variant; a bare cell name gives its first variant.

    Raises
    ------
    KeyError
        If there is no such cell, listing those that exist.
    """
    for key, entry in CELLS.items():
        if name == key or name == key.partition("[")[0] or name == entry.slug:
            return entry
    raise KeyError(f"got cell {name!r}, expected one of {', '.join(CELLS)}.")


def facts_of(kind: type) -> Facts | None:
    """The facts of a registered class, or of the next one that it is derived from."""
    known = {entry.kind: entry for entry in CELLS.values()}
    return next((known[base].facts for base in kind.__mro__ if base in known), None)
