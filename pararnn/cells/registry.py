"""The cells that the catalog, the conformance suite and the command line know."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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


@dataclass(frozen=True)
class CellEntry:
    """One variant of a cell. ``factory(d_in, width, **kwargs)`` builds an instance of it, of a
    width (per axis of its state) that it accepts."""

    name: str
    slug: str
    facts: Facts
    fidelity: tuple[str, ...]
    factory: Callable[..., Cell]


def _delta(d_in: int, width: int, **settings: Any) -> DeltaMinGRU:
    """Two heads whose states have ``width`` rows and one column more."""
    return DeltaMinGRU(d_in, 2 * width, **{"n_heads": 2, "d_k": width, "d_v": width + 1} | settings)


CELLS: dict[str, CellEntry] = {
    entry.name: entry
    for entry in (
        CellEntry(
            "ParaGRU[diag]",
            "para_gru",
            ParaGRU.facts,
            ("paper-faithful",),
            lambda d_in=5, width=6, **kw: ParaGRU(d_in, width, mix="diag", **kw),
        ),
        CellEntry(
            "ParaGRU[head]",
            "para_gru",
            ParaGRU.facts,
            ("research-variant",),
            lambda d_in=5, width=6, n_heads=2, **kw: ParaGRU(
                d_in, width, mix="head", n_heads=n_heads, **kw
            ),
        ),
        CellEntry(
            "ParaLSTM",
            "para_lstm",
            ParaLSTM.facts,
            ParaLSTM.facts.fidelity,
            lambda d_in=5, width=6, **kw: ParaLSTM(d_in, width, **kw),
        ),
        CellEntry(
            "ParaNLRU",
            "para_nlru",
            ParaNLRU.facts,
            ParaNLRU.facts.fidelity,
            lambda d_in=5, width=6, **kw: ParaNLRU(d_in, width, **kw),
        ),
        CellEntry(
            "ParaSLSTM[sigmoid]",
            "para_slstm",
            ParaSLSTM.facts,
            ParaSLSTM.facts.fidelity,
            lambda d_in=5, width=6, **kw: ParaSLSTM(d_in, width, forget="sigmoid", **kw),
        ),
        CellEntry(
            "ParaSLSTM[exp]",
            "para_slstm",
            ParaSLSTM.facts,
            ParaSLSTM.facts.fidelity,
            lambda d_in=5, width=6, **kw: ParaSLSTM(d_in, width, forget="exp", **kw),
        ),
        CellEntry(
            "ParaCfC[published]",
            "para_cfc",
            ParaCfC.facts,
            ParaCfC.facts.fidelity,
            lambda d_in=5, width=6, **kw: ParaCfC(d_in, width, form="published", **kw),
        ),
        CellEntry(
            "ParaCfC[consistent]",
            "para_cfc",
            ParaCfC.facts,
            ParaCfC.facts.fidelity,
            lambda d_in=5, width=6, **kw: ParaCfC(d_in, width, form="consistent", **kw),
        ),
        CellEntry(
            "ParaM2RNN",
            "para_m2rnn",
            ParaM2RNN.facts,
            ParaM2RNN.facts.fidelity,
            lambda d_in=5, width=3, v_dim=None, **kw: ParaM2RNN(
                d_in, width, v_dim or width + 1, **kw
            ),
        ),
        CellEntry(
            "MinGRU[plain]",
            "min_gru",
            MinGRU.facts,
            MinGRU.facts.fidelity,
            lambda d_in=5, width=6, **kw: MinGRU(d_in, width, **kw),
        ),
        CellEntry(
            "MinGRU[decay]",
            "min_gru",
            MinGRU.facts,
            ("research-variant",),
            lambda d_in=5, width=6, decay="learnable", **kw: MinGRU(
                d_in,
                width,
                decay=decay,
                **{"learnable_h0": True, "log1p_delta": decay is not None} | kw,
            ),
        ),
        CellEntry(
            "MinLSTM",
            "min_lstm",
            MinLSTM.facts,
            MinLSTM.facts.fidelity,
            lambda d_in=5, width=6, **kw: MinLSTM(d_in, width, **kw),
        ),
        CellEntry(
            "SignedMinGRU[decoupled]",
            "signed_min_gru",
            SignedMinGRU.facts,
            SignedMinGRU.facts.fidelity,
            lambda d_in=5, width=6, **kw: SignedMinGRU(d_in, width, **kw),
        ),
        CellEntry(
            "SignedMinGRU[coupled]",
            "signed_min_gru",
            SignedMinGRU.facts,
            SignedMinGRU.facts.fidelity,
            lambda d_in=5, width=6, **kw: SignedMinGRU(d_in, width, **{"coupled": True} | kw),
        ),
        CellEntry(
            "RotationMinGRU[snapped]",
            "rotation_min_gru",
            RotationMinGRU.facts,
            RotationMinGRU.facts.fidelity,
            lambda d_in=5, width=3, **kw: RotationMinGRU(d_in, 2 * width, **kw),
        ),
        CellEntry(
            "RotationMinGRU[free]",
            "rotation_min_gru",
            RotationMinGRU.facts,
            RotationMinGRU.facts.fidelity,
            lambda d_in=5, width=3, **kw: RotationMinGRU(d_in, 2 * width, **{"snap": None} | kw),
        ),
        CellEntry(
            "GivensMinGRU",
            "givens_min_gru",
            GivensMinGRU.facts,
            GivensMinGRU.facts.fidelity,
            lambda d_in=5, width=2, block_size=4, rounds=3, **kw: GivensMinGRU(
                d_in, block_size * width, block_size=block_size, rounds=rounds, **kw
            ),
        ),
        CellEntry(
            "DeltaMinGRU[nh=1]",
            "delta_min_gru",
            DeltaMinGRU.facts,
            DeltaMinGRU.facts.fidelity,
            lambda d_in=5, width=3, **kw: _delta(d_in, width, **kw),
        ),
        CellEntry(
            "DeltaMinGRU[nh=2]",
            "delta_min_gru",
            DeltaMinGRU.facts,
            DeltaMinGRU.facts.fidelity,
            lambda d_in=5, width=3, **kw: _delta(d_in, width, **{"nh": 2} | kw),
        ),
        CellEntry(
            "DeltaMinGRU[decay]",
            "delta_min_gru",
            DeltaMinGRU.facts,
            DeltaMinGRU.facts.fidelity,
            lambda d_in=5, width=3, **kw: _delta(d_in, width, **{"decay": "learnable"} | kw),
        ),
    )
}


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
