"""Measures what the cards say about numerical behaviour.

`python benchmarks/card_numerics.py` solves, writes `benchmarks/results/card_numerics.json`, and
from that file the tables and plots that the cards include; `card_page.py` only does the latter.
`--only para_gru` measures one card again and keeps the rest, on the same machine and day.
"""

from __future__ import annotations

import argparse
import datetime
import math
import platform
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from card_page import DATA, ITERATIONS, outputs
from harness import ROOT, save
from report import load, written

GRU = {"diag": (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0), "head": (0.5, 1.0, 2.0)}
LSTM = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0)
NLRU = (
    *((norm, 0.0) for norm in (0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0)),
    *((0.5, bias) for bias in (-6.0, -3.0, 3.0)),
)
SLSTM = tuple(
    (forget, norm, bias)
    for forget in ("sigmoid", "exp")
    for norm, bias in ((0.5, 0.0), (1.0, 0.0), (2.0, 0.0), (4.0, 0.0), (0.5, 4.0), (2.0, 4.0))
)
CFC_NORMS = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0)
CFC = tuple(
    (form, *setting)
    for form in ("published", "consistent")
    for setting in (*((norm, 1.0) for norm in CFC_NORMS), (1.0, 0.1), (1.0, 10.0))
)
M2RNN = (
    *((norm, 0.0, 16, 16) for norm in (0.5, 0.75, 1.0, 1.25, 1.5, 2.0)),
    *((1.0, bias, 16, 16) for bias in (2.0, 4.0, 6.0)),
    *((1.0, 2.0, k, v) for k, v in ((8, 8), (32, 16), (64, 16))),
)


# --------------------------------------------------------------------------------------
# Measuring
# --------------------------------------------------------------------------------------


def gru(norm: float, mix: str) -> Any:
    """Recurrent entries uniform in ±norm, or head matrices of spectral norm exactly `norm`."""
    import torch

    import pararnn

    draw = torch.Generator().manual_seed(1)
    cell = pararnn.ParaGRU(32, 64, mix=mix, max_recurrent_norm=None, dtype=torch.float64)
    with torch.no_grad():
        weight = cell.in_proj.weight
        weight.copy_(torch.randn(weight.shape, generator=draw, dtype=weight.dtype) / 32**0.5)
        for a in (cell.A_z, cell.A_r, cell.A_n):
            values = 2 * torch.rand(a.shape, generator=draw, dtype=a.dtype) - 1
            if mix == "head":
                values = values / torch.linalg.matrix_norm(values, ord=2, keepdim=True)
            a.copy_(norm * values)
    return cell


def lstm(norm: float) -> Any:
    """Recurrent and peephole entries uniform in ±norm."""
    import pararnn

    return drawn(pararnn.ParaLSTM(32, 64, max_recurrent_norm=None), norm)


def nlru(norm: float, bias: float) -> Any:
    """Entries of `w` uniform in ±norm; `bias` is that of the recurrence gate."""
    import torch

    import pararnn

    torch.manual_seed(1)  # Λ keeps its initial value
    cell = drawn(pararnn.ParaNLRU(32, 64, max_recurrent_norm=None), norm)
    with torch.no_grad():
        cell.in_proj.bias[:64] = bias
    return cell


def slstm(forget: str, norm: float, bias: float) -> Any:
    """Recurrent entries uniform in ±norm; `bias` is that of the forget gate."""
    import torch

    import pararnn

    cell = drawn(pararnn.ParaSLSTM(32, 64, forget=forget), norm)
    with torch.no_grad():
        cell.in_proj.bias[64:128] = bias
    return cell


def cfc(form: str, norm: float) -> Any:
    """Recurrent entries uniform in ±norm."""
    import pararnn

    return drawn(pararnn.ParaCfC(32, 64, form=form), norm)


def drawn(cell: Any, norm: float) -> Any:
    """The cell in float64, with normal input weights and diagonal maps uniform in ±norm."""
    import torch

    draw = torch.Generator().manual_seed(1)
    cell = cell.double()
    with torch.no_grad():
        weight = cell.in_proj.weight
        weight.copy_(torch.randn(weight.shape, generator=draw, dtype=weight.dtype) / 32**0.5)
        for m in cell.spec.map_list:
            a = getattr(cell, m.name)
            a.copy_(norm * (2 * torch.rand(a.shape, generator=draw, dtype=a.dtype) - 1))
    return cell


def m2rnn(norm: float, bias: float, k: int, v: int) -> Any:
    """`W` is `norm` times a random orthogonal matrix; `bias` is that of the forget gate."""
    import torch

    import pararnn

    draw = torch.Generator().manual_seed(1)
    cell = pararnn.ParaM2RNN(32, k, v, dtype=torch.float64)
    with torch.no_grad():
        weight = cell.in_proj.weight
        weight.copy_(torch.randn(weight.shape, generator=draw, dtype=weight.dtype) / 32**0.5)
        cell.in_proj.bias[-1] = bias
        random = torch.randn(v, v, generator=draw, dtype=weight.dtype)
        cell.W.copy_(norm * torch.linalg.qr(random)[0])
    return cell


def solved(cell: Any, batch: int, gap: float | None = None, slot: Any = ...) -> dict[str, Any]:
    """Residuals in float64; errors and iteration counts in float32, against the float64 loop.

    `gap` is the mean time gap, for a cell that takes them; `slot` chooses what errors are those of.
    """
    import copy

    import torch

    from pararnn import NewtonConfig, sequential_apply, solve

    draw = torch.Generator().manual_seed(2)
    x = torch.randn(batch, 512, 32, generator=draw, dtype=torch.float64)
    pinned = NewtonConfig(max_iters=ITERATIONS, on_divergence="ignore")
    three = NewtonConfig(max_iters=3, on_divergence="ignore")
    single = copy.deepcopy(cell).float()
    wide: dict[str, Any] = {}
    if gap is not None:
        wide["dt"] = torch.empty(batch, 512, dtype=torch.float64).exponential_(generator=draw) * gap
    narrow = {name: value.float() for name, value in wide.items()}
    with torch.no_grad():
        exact = sequential_apply(cell, x, **wide)

        def error(states: torch.Tensor) -> float:
            return float((states.double() - exact)[slot].abs().max())

        residuals = solve(cell, x, pinned, method="newton", **wide).residual_history
        newton = solve(single, x.float(), method="newton", **narrow)
        chunked = NewtonConfig(chunk_length=64)
        shooting = solve(single, x.float(), chunked, method="shooting", **narrow)
        three_error = error(solve(single, x.float(), three, method="newton", **narrow).states)
        return {
            "residuals": [float(f"{r:.3g}") for r in residuals],
            "three": three_error if math.isfinite(three_error) else None,
            "newton": [newton.iterations, newton.fallback, error(newton.states)],
            "shooting": [shooting.iterations, shooting.fallback, error(shooting.states)],
            "loop": error(sequential_apply(single, x.float(), **narrow)),
        }


def gru_rows() -> Iterator[dict[str, Any]]:
    for mix, norms in GRU.items():
        for norm in norms:
            yield {"mix": mix, "norm": norm} | solved(gru(norm, mix), 8)


def lstm_rows() -> Iterator[dict[str, Any]]:
    for norm in LSTM:
        yield {"norm": norm} | solved(lstm(norm), 8)


def nlru_rows() -> Iterator[dict[str, Any]]:
    for norm, bias in NLRU:
        yield {"norm": norm, "bias": bias} | solved(nlru(norm, bias), 8)


def slstm_rows() -> Iterator[dict[str, Any]]:
    for forget, norm, bias in SLSTM:
        setting = {"forget": forget, "norm": norm, "bias": bias}
        output = solved(slstm(forget, norm, bias), 8, slot=(..., -1, slice(None)))
        yield setting | {k: v for k, v in output.items() if k != "residuals"}


def cfc_rows() -> Iterator[dict[str, Any]]:
    for form, norm, gap in CFC:
        yield {"form": form, "norm": norm, "gap": gap} | solved(cfc(form, norm), 8, gap)


def m2rnn_rows() -> Iterator[dict[str, Any]]:
    for norm, bias, k, v in M2RNN:
        setting = {"norm": norm, "bias": bias, "k": k, "v": v}
        yield setting | solved(m2rnn(norm, bias, k, v), 4)


ROWS: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
    "para_gru": gru_rows,
    "para_lstm": lstm_rows,
    "para_nlru": nlru_rows,
    "para_slstm": slstm_rows,
    "para_cfc": cfc_rows,
    "para_m2rnn": m2rnn_rows,
}


def measure(only: list[str] | None) -> dict[str, Any]:
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found: dict[str, Any] = {
        "machine": f"{platform.machine()} CPU, torch {torch.__version__.partition('+')[0]}",
        "date": datetime.date.today().isoformat(),
    }
    if only:
        kept = load(DATA)
        if any(kept[key] != value for key, value in found.items()):
            raise SystemExit(
                f"--only: got results of {kept['date']}, {kept['machine']}; measure all"
            )
        found |= {name: kept[name] for name in ROWS if name in kept}
    for name in only or ROWS:
        found[name] = []
        for row in ROWS[name]():
            say(f"{name} { ({k: v for k, v in row.items() if not isinstance(v, list)}) }")
            found[name].append(row)
    return found


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", choices=list(ROWS), help="one card; repeatable")
    save(DATA, measure(parser.parse_args().only))
    for path in written(outputs(load(DATA))):
        print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
