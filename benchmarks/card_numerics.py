"""Measures what the cards say about numerical behaviour, and draws it.

`python benchmarks/card_numerics.py` solves, writes `benchmarks/results/card_numerics.json`, and
from that file the tables and plots that the cards include. `--redraw` only does the latter; it is
deterministic, and a test compares the result with what is committed. `--only para_gru` measures one
card again and keeps the rest, on the same machine and day.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import math
import platform
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "benchmarks" / "results" / "card_numerics.json"
ITERATIONS = 8

GRU = {"diag": (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0), "head": (0.5, 1.0, 2.0)}
GRU_SHOWN = (0.5, 1.0, 1.5, 2.0, 3.0)
LSTM = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0)
LSTM_SHOWN = (0.5, 1.0, 1.5, 2.0, 3.0)
NLRU = (
    *((norm, 0.0) for norm in (0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0)),
    *((0.5, bias) for bias in (-6.0, -3.0, 3.0)),
)
NLRU_SHOWN = (0.25, 0.5, 0.75, 1.0, 2.0)
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
CFC_SHOWN = (0.5, 1.0, 2.0, 3.0, 4.0)
M2RNN = (
    *((norm, 0.0, 16, 16) for norm in (0.5, 0.75, 1.0, 1.25, 1.5, 2.0)),
    *((1.0, bias, 16, 16) for bias in (2.0, 4.0, 6.0)),
    *((1.0, 2.0, k, v) for k, v in ((8, 8), (32, 16), (64, 16))),
)
M2RNN_SHOWN = (0.5, 1.0, 1.25, 1.5, 2.0)


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
        kept = json.loads(DATA.read_text(encoding="utf-8"))
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


# --------------------------------------------------------------------------------------
# Tables
# --------------------------------------------------------------------------------------


def number(value: float) -> str:
    return f"{value:.1g}" if value >= 0.01 else f"{value:.0e}".replace("e-0", "e-")


def count(entry: list) -> str:
    iterations, fallback, _ = entry
    return f"{iterations}\u00a0+\u00a0loop" if fallback else str(iterations)


COLUMNS = (
    "Newton",
    "error",
    "error, \\(K = 3\\)",
    "Shooting",
    "error",
    "error, loop",
)


def cells(row: dict[str, Any]) -> list[str]:
    three = "not finite" if row["three"] is None else number(row["three"])
    return [
        count(row["newton"]),
        number(row["newton"][2]),
        three if (row["three"] or 1) <= 1e-5 else f"**{three}**",
        count(row["shooting"]),
        number(row["shooting"][2]),
        number(row["loop"]),
    ]


def table(first: list[str], rows: list[list[str]], label: str) -> list[str]:
    head = [*first, *COLUMNS]
    lines = [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]
    box = '<div class="table-box" tabindex="0" role="region"'
    return [f'{box} aria-label="{label}" markdown>', "", *lines, "", "</div>", ""]


def provenance(found: dict[str, Any], shape: str) -> list[str]:
    return [
        f"Measured with `python benchmarks/card_numerics.py` on {found['date']} ({found['machine']}): "
        f"{shape}, normal inputs of width 32. *Newton* and *Shooting* count corrections in "
        "float32; each error is the largest difference of any state from the float64 loop. The "
        "residuals in the plot are those of float64. Shooting has chunks of 64 steps. Bold: above 1e-5. *16 + loop*: the cap of 16 "
        "iterations was reached, and the loop did the rest.",
        "",
    ]


def gru_table(found: dict[str, Any]) -> str:
    rows = [[f"`{r['mix']}`", f"{r['norm']:g}", *cells(r)] for r in found["para_gru"]]
    lines = table(["`mix`", "Norm"], rows, "Iterations and errors of ParaGRU")
    lines += provenance(found, "8 × 512 × 64 (sequences, steps, \\(d_h\\))")
    lines += [
        "The norm is the largest entry of the recurrent vectors (`diag`, drawn evenly from ± the "
        "norm), or the spectral norm of every head's matrix (`head`, 4 heads). From norm 3 on "
        "this random network is sensitive to rounding: the float32 loop itself is that far from the "
        "float64 one."
    ]
    return "\n".join(lines) + "\n"


def lstm_table(found: dict[str, Any]) -> str:
    rows = [[f"{r['norm']:g}", *cells(r)] for r in found["para_lstm"]]
    lines = table(["Norm"], rows, "Iterations and errors of ParaLSTM")
    lines += provenance(found, "8 × 512 × 64 (sequences, steps, \\(d_h\\))")
    lines += [
        "The norm is the largest entry of the recurrent vectors and peepholes, drawn evenly from ± "
        "the norm. Both slots count as states."
    ]
    return "\n".join(lines) + "\n"


def nlru_table(found: dict[str, Any]) -> str:
    rows = [[f"{r['norm']:g}", f"{r['bias']:g}", *cells(r)] for r in found["para_nlru"]]
    lines = table(["Norm", "Gate bias"], rows, "Iterations and errors of ParaNLRU")
    lines += provenance(found, "8 × 512 × 64 (sequences, steps, \\(d_h\\))")
    lines += [
        "The norm is the largest entry of \\(w\\), drawn evenly from ± the norm. The gate bias is that "
        "of the logit of \\(r_t\\): the lower it is, the slower the decay. \\(\\Lambda\\) has its initial "
        "value. The plots are for gate bias 0."
    ]
    return "\n".join(lines) + "\n"


def slstm_table(found: dict[str, Any]) -> str:
    rows = [
        [f"`{r['forget']}`", f"{r['norm']:g}", f"{r['bias']:g}", *cells(r)]
        for r in found["para_slstm"]
    ]
    lines = table(["`forget`", "Norm", "Forget bias"], rows, "Iterations and errors of ParaSLSTM")
    lines += provenance(found, "8 × 512 × 64 (sequences, steps, \\(d_h\\))")
    lines += [
        "The norm is the largest entry of the recurrent vectors, drawn evenly from ± the norm. The "
        "forget bias is that of the forget gate. Errors are those of the output \\(h\\), not of "
        "the other three slots."
    ]
    return "\n".join(lines) + "\n"


def cfc_table(found: dict[str, Any]) -> str:
    rows = [
        [f"`{r['form']}`", f"{r['norm']:g}", f"{r['gap']:g}", *cells(r)] for r in found["para_cfc"]
    ]
    lines = table(["`form`", "Norm", "Mean gap"], rows, "Iterations and errors of ParaCfC")
    lines += provenance(found, "8 × 512 × 64 (sequences, steps, \\(d_h\\))")
    lines += [
        "The norm is the largest entry of the recurrent vectors, drawn evenly from ± the norm. Gaps "
        "are drawn from an exponential distribution with this mean. From norm 2 on this random "
        "network is sensitive to rounding, and at norm 4 chaotic: the float32 loop itself is that far "
        "from the float64 one."
    ]
    return "\n".join(lines) + "\n"


def m2rnn_table(found: dict[str, Any]) -> str:
    rows = [
        [f"\\({r['k']} \\times {r['v']}\\)", f"{r['norm']:g}", f"{r['bias']:g}", *cells(r)]
        for r in found["para_m2rnn"]
    ]
    lines = table(["\\(K \\times V\\)", "\\(\\lVert W \\rVert\\)", "Forget bias"], rows,
                  "Iterations and errors of ParaM2RNN")  # fmt: skip
    lines += provenance(found, "4 sequences of 512 steps")
    lines += [
        "\\(W\\) is a multiple of a random orthogonal matrix, so the initial value, the identity, "
        "has the norm 1. The forget bias is that of the logit of \\(f_t\\). The plots are for "
        "\\(K = V = 16\\) and forget bias 0."
    ]
    return "\n".join(lines) + "\n"


# --------------------------------------------------------------------------------------
# Plots: plain SVG, coloured by the page's own text colour and four mid-tones that are readable
# on light and on dark
# --------------------------------------------------------------------------------------

COLOURS = ("#4a86d8", "#2a9d8f", "#b58900", "#d9662c", "#d33682")
WIDTH, HEIGHT = 360, 290
LEFT, RIGHT, TOP, BOTTOM = 48, 12, 46, 46
STYLE = (
    'xmlns="http://www.w3.org/2000/svg" font-family="system-ui, sans-serif" font-size="13" '
    'fill="currentColor" stroke-linejoin="round"'
)


class Plot:
    """One panel with a logarithmic vertical axis."""

    def __init__(self, title: str, text: str, x: tuple[float, float], powers: tuple[int, int]):
        self.x, self.powers = x, powers
        self.parts = [
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{text}" {STYLE}>',
            f'<text x="{LEFT}" y="13" font-weight="600">{title}</text>',
        ]

    def at(self, x: float, power: float) -> tuple[float, float]:
        low, high = self.x
        bottom, top = self.powers
        power = min(max(power, bottom), top)
        return (
            LEFT + (x - low) / (high - low) * (WIDTH - LEFT - RIGHT),
            HEIGHT - BOTTOM - (power - bottom) / (top - bottom) * (HEIGHT - TOP - BOTTOM),
        )

    def add(self, part: str) -> None:
        self.parts.append(part)

    def text(self, x: float, y: float, text: str, more: str = "") -> None:
        self.add(f'<text x="{x:.1f}" y="{y:.1f}"{" " + more if more else ""}>{text}</text>')

    def axes(self, ticks: list[float], label: str, step: int) -> None:
        bottom, top = self.powers
        right = WIDTH - RIGHT
        for power in range(bottom, top + 1, step):
            _, y = self.at(self.x[0], power)
            self.add(f'<path d="M{LEFT} {y:.1f}H{right}" stroke="currentColor" opacity=".15"/>')
            raised = str(power).translate(str.maketrans("0123456789-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻"))
            self.text(LEFT - 6, y + 4, f"10{raised}", 'text-anchor="end"')
        for tick in ticks:
            x, y = self.at(tick, bottom)
            self.add(f'<path d="M{x:.1f} {y:.1f}v4" stroke="currentColor" opacity=".6"/>')
            self.text(x, y + 18, f"{tick:g}", 'text-anchor="middle"')
        self.text((LEFT + right) / 2, HEIGHT - 6, label, 'text-anchor="middle"')

    def line(self, points: list[tuple[float, float]], colour: str, dots: bool = True) -> None:
        places = [self.at(x, power) for x, power in points]
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        self.add(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        if dots:
            self.parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.6" fill="{colour}"/>'
                           for x, y in places]  # fmt: skip

    def upright(self, x: float, label: str) -> None:
        across, _ = self.at(x, 0)
        bottom = HEIGHT - BOTTOM
        self.add(f'<path d="M{across:.1f} {TOP}V{bottom}" stroke="currentColor" '
                 f'stroke-dasharray="5 4" opacity=".7"/>')  # fmt: skip
        self.text(across + 5, TOP + 12, label)

    def level(self, power: float, label: str) -> None:
        _, y = self.at(self.x[0], power)
        self.add(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="currentColor" '
                 f'stroke-dasharray="1.5 3.5" opacity=".9"/>')  # fmt: skip
        self.text(LEFT + 5, y + 14, label)

    def legend(self, entries: list[tuple[str, str]]) -> None:
        x = float(LEFT)
        for colour, label in entries:
            self.add(f'<path d="M{x:.1f} 28h14" stroke="{colour}" stroke-width="3"/>')
            self.text(x + 18, 32, label)
            x += 28 + 7.4 * len(label)

    def write(self, name: str) -> tuple[Path, str]:
        path = ROOT / "docs" / "assets" / f"{name}.svg"
        return path, "\n".join([*self.parts, "</svg>"]) + "\n"


def log10(value: float) -> float:
    return math.log10(max(value, 1e-30))


def residual_plot(rows: dict[float, dict[str, Any]], what: str) -> Plot:
    """Residual against iteration, one line a norm."""
    (*_, largest) = rows.values()
    lost = largest["residuals"][-1] > 1e-3
    plot = Plot(
        "Residual of Newton's method, float64",
        f"Residual after every Newton iteration for {what} of {', '.join(f'{n:g}' for n in rows)}; "
        "it falls quadratically for small ones and "
        f"{'not at all for the largest' if lost else 'may rise at first for large ones'}.",
        (0, ITERATIONS),
        (-16, 2),
    )
    plot.axes(list(range(ITERATIONS + 1)), "iterations", 3)
    plot.upright(3, "K = 3")
    plot.level(-6, "tolerance")
    for colour, row in zip(COLOURS, rows.values(), strict=True):
        residuals = row["residuals"]
        # Below 1e-15 there is only rounding; the line ends with the first value there.
        stop = next((i for i, r in enumerate(residuals) if r < 1e-15), len(residuals) - 1)
        plot.line([(i, log10(r)) for i, r in enumerate(residuals[: stop + 1])], colour)
    plot.legend([(c, f"{n:g}") for c, n in zip(COLOURS, rows, strict=True)])
    return plot


def error_plot(rows: list[dict[str, Any]], what: str, axis: str, ticks: list[float]) -> Plot:
    """Error against norm: with three iterations, and with as many as it takes."""
    limit = crossing([(r["norm"], r["three"]) for r in rows])
    plot = Plot(
        "Error of the states, float32",
        f"Largest error against {what}: with three iterations it passes 1e-5 at {limit:.1f}; "
        "with as many as it takes it stays at rounding level.",
        (0, rows[-1]["norm"]),
        (-8, 1),
    )
    left, _ = plot.at(limit, 0)
    plot.add(f'<rect x="{left:.1f}" y="{TOP}" width="{WIDTH - RIGHT - left:.1f}" '
             f'height="{HEIGHT - TOP - BOTTOM}" fill="{COLOURS[3]}" opacity=".1"/>')  # fmt: skip
    plot.axes(ticks, axis, 2)
    plot.level(-5, "")
    note = f"K = 3 is not enough from {limit:.1f} on"
    plot.text(WIDTH - RIGHT - 6, HEIGHT - BOTTOM - 8, note, 'text-anchor="end"')
    plot.line([(r["norm"], log10(r["three"])) for r in rows], COLOURS[3])
    plot.line([(r["norm"], log10(r["newton"][2])) for r in rows], COLOURS[0])
    plot.legend([(COLOURS[3], "K = 3"), (COLOURS[0], "until converged")])
    return plot


def crossing(points: list[tuple[float, float]], limit: float = 1e-5) -> float:
    """Where the error passes the limit, on a straight line between logarithms."""
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        if y0 <= limit < y1:
            part = (log10(limit) - log10(y0)) / (log10(y1) - log10(y0))
            return x0 + part * (x1 - x0)
    return points[-1][0]


def outputs(found: dict[str, Any]) -> Iterator[tuple[Path, str]]:
    """Every file that follows from the measurements, with its content."""
    results = ROOT / "benchmarks" / "results"
    yield results / "para_gru_numerics.md", gru_table(found)
    yield results / "para_lstm_numerics.md", lstm_table(found)
    yield results / "para_nlru_numerics.md", nlru_table(found)
    yield results / "para_slstm_numerics.md", slstm_table(found)
    yield results / "para_cfc_numerics.md", cfc_table(found)
    yield results / "para_m2rnn_numerics.md", m2rnn_table(found)
    diag = {r["norm"]: r for r in found["para_gru"] if r["mix"] == "diag"}
    shown = {n: diag[n] for n in GRU_SHOWN}
    yield residual_plot(shown, "recurrent norms").write("para_gru_residuals")
    errors = error_plot(list(diag.values()), "the recurrent norm", "largest recurrent entry",
                        [0, 0.5, 1, 2, 3, 4])  # fmt: skip
    yield errors.write("para_gru_errors")
    norms = {r["norm"]: r for r in found["para_lstm"]}
    shown = {n: norms[n] for n in LSTM_SHOWN}
    yield residual_plot(shown, "recurrent norms").write("para_lstm_residuals")
    errors = error_plot(found["para_lstm"], "the recurrent norm", "largest recurrent entry",
                        [0, 0.5, 1, 2, 3, 4])  # fmt: skip
    yield errors.write("para_lstm_errors")
    norms = {r["norm"]: r for r in found["para_nlru"] if r["bias"] == 0}
    shown = {n: norms[n] for n in NLRU_SHOWN}
    yield residual_plot(shown, "norms of w").write("para_nlru_residuals")
    errors = error_plot(list(norms.values()), "the norm of w", "largest entry of w",
                        [0, 0.5, 1, 1.5, 2])  # fmt: skip
    yield errors.write("para_nlru_errors")
    norms = {r["norm"]: r for r in found["para_cfc"] if (r["form"], r["gap"]) == ("consistent", 1)}
    shown = {n: norms[n] for n in CFC_SHOWN}
    yield residual_plot(shown, "recurrent norms").write("para_cfc_residuals")
    errors = error_plot(list(norms.values()), "the recurrent norm", "largest recurrent entry",
                        [0, 0.5, 1, 2, 3, 4])  # fmt: skip
    yield errors.write("para_cfc_errors")
    matrix = {
        r["norm"]: r for r in found["para_m2rnn"] if (r["bias"], r["k"], r["v"]) == (0, 16, 16)
    }
    shown = {n: matrix[n] for n in M2RNN_SHOWN}
    yield residual_plot(shown, "norms of W").write("para_m2rnn_residuals")
    errors = error_plot(list(matrix.values()), "the norm of W", "norm of W", [0, 0.5, 1, 1.5, 2])
    yield errors.write("para_m2rnn_errors")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--redraw", action="store_true", help="only tables and plots")
    parser.add_argument("--only", action="append", choices=list(ROWS), help="one card; repeatable")
    arguments = parser.parse_args()
    if not arguments.redraw:
        DATA.parent.mkdir(exist_ok=True)
        found = json.dumps(measure(arguments.only), indent=1) + "\n"
        DATA.write_text(found, encoding="utf-8")
    for path, text in outputs(json.loads(DATA.read_text(encoding="utf-8"))):
        path.write_text(text, encoding="utf-8")
        print(path.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
